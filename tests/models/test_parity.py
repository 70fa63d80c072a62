"""Log-probs, entropies, values and scores are those of transformers, in every family and layout."""

from __future__ import annotations

import json

import pytest
import torch
from ranks import Layout, RankPool
from tiny_models import (
    FAMILIES,
    random_batch,
    reference_logprobs,
    reference_scores,
    reference_values,
    save_model,
    tiny_language_model,
    tiny_value_model,
)

from rlhf_mc.config import MicroBatch

# The longest sequences are longer than mistral's window of 7. At 25 tokens there are several micro-batches, one of them of
# several sequences and padded (under TP) by one token; length 2 has a single prediction.
BATCH = random_batch([9, 13, 5, 20, 11, 2])
BUDGET = MicroBatch(tokens=25)
LAYOUTS = [Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(context=2), Layout(tensor=2, pipeline=2, virtual=2)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_logprobs_and_entropy(ranks: RankPool, language_model, layout: Layout, family: str) -> None:
    answers = ranks.run("models.on_ranks:logprobs", layout, directory=language_model(family), batch=BATCH, budget=BUDGET)
    with torch.no_grad():
        logprobs, entropy = reference_logprobs(tiny_language_model(family), BATCH)
    for answer in answers:  # every rank has the same numbers
        torch.testing.assert_close(answer["scored"], logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(answer["entropy"], entropy, rtol=0, atol=1e-5)
        assert torch.equal(answer["scored"], answer["trained"]), "the ratio of the first update would not be exactly 1"


@pytest.mark.parametrize("layout, most", [(Layout(), 1), (Layout(pipeline=2, virtual=2), 2)], ids=["1rank", "PP2xVP2"])
def test_a_micro_batch_is_let_go_when_the_last_chunk_has_read_it(ranks: RankPool, language_model, layout: Layout, most: int) -> None:
    arguments = dict(directory=language_model("llama"), batch=random_batch([5] * 8), budget=MicroBatch(tokens=None, sequences=1))
    assert ranks.run("models.on_ranks:most_alive", layout, **arguments)[-1] == most


@pytest.mark.parametrize("lengths", [[3, 1, 2, 2], [2, 1]], ids=str)
def test_sequences_shorter_than_their_context_group(ranks: RankPool, language_model, value_model, lengths: list[int]) -> None:
    """Some ranks have no token of a sequence, or padding only."""
    batch = random_batch(lengths)
    models = dict(directory=language_model("mistral")), dict(directory=value_model("mistral"))
    answers = ranks.run("models.on_ranks:logprobs", Layout(context=4), batch=batch, budget=BUDGET, **models[0])
    values = ranks.run("models.on_ranks:values", Layout(context=4), batch=batch, budget=BUDGET, **models[1])
    with torch.no_grad():
        logprobs, entropy = reference_logprobs(tiny_language_model("mistral"), batch)
        scores = reference_scores(tiny_value_model("mistral"), batch).squeeze(-1)
    for answer, value in zip(answers, values):
        torch.testing.assert_close(answer["scored"], logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(answer["entropy"], entropy, rtol=0, atol=1e-5)
        torch.testing.assert_close(value["last"], scores, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_temperature_divides_the_logits(ranks: RankPool, language_model, layout: Layout) -> None:
    arguments = dict(directory=language_model("qwen2"), batch=BATCH, budget=BUDGET, sampling=dict(temperature=0.7))
    answer = ranks.run("models.on_ranks:logprobs", layout, **arguments)[0]
    with torch.no_grad():
        logprobs, entropy = reference_logprobs(tiny_language_model("qwen2"), BATCH, temperature=0.7)
    torch.testing.assert_close(answer["scored"], logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(answer["entropy"], entropy, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=str)
def test_stop_tokens_before_the_minimum_length(ranks: RankPool, language_model, layout: Layout) -> None:
    """The first three tokens of each answer were drawn from all tokens but the stop tokens, one on each tensor rank."""
    sampling = dict(temperature=0.8, min_tokens=3, stop_token_ids=(1, 90))
    arguments = dict(directory=language_model("mistral"), batch=BATCH, budget=BUDGET, sampling=sampling)
    answer = ranks.run("models.on_ranks:logprobs", layout, **arguments)[0]
    with torch.no_grad():
        logprobs, entropy = reference_logprobs(tiny_language_model("mistral"), BATCH, 0.8, min_tokens=3, stop_token_ids=(1, 90))
    allowed = logprobs.isfinite()  # a stop token where it could not be drawn has no log-prob to compare
    torch.testing.assert_close(answer["scored"][allowed], logprobs[allowed], rtol=0, atol=1e-5)
    torch.testing.assert_close(answer["entropy"], entropy, rtol=0, atol=1e-5)
    assert (answer["scored"][~allowed] < -1e20).all()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_rank_without_vocabulary(ranks: RankPool, tmp_path, tied: bool) -> None:
    """Seven words are padded to sixteen rows: all real ones are on the first of two tensor ranks."""
    model = tiny_language_model("llama", vocab_size=7, tie_word_embeddings=tied)
    batch = random_batch([6, 4, 9], vocab=7)
    arguments = dict(directory=save_model(model, tmp_path / "model"), batch=batch, budget=BUDGET)
    with torch.no_grad():
        logprobs, entropy = reference_logprobs(model, batch)
    for answer in ranks.run("models.on_ranks:logprobs", Layout(tensor=2), **arguments):
        torch.testing.assert_close(answer["trained"], logprobs, rtol=0, atol=1e-5)
        torch.testing.assert_close(answer["entropy"], entropy, rtol=0, atol=1e-5)


def test_only_masked_tokens_answer(ranks: RankPool, language_model) -> None:
    """Some sequences ask for their last two tokens, one asks for nothing."""
    mask = BATCH.loss_mask.clone()
    ends = BATCH.lengths.cumsum(0).tolist()
    for sequence, (end, length) in enumerate(zip(ends, BATCH.lengths.tolist())):
        mask[end - length : end if sequence == 3 else max(end - 2, end - length + 1)] = False
    batch = type(BATCH)(BATCH.tokens, BATCH.lengths, mask)
    answer = ranks.run("models.on_ranks:logprobs", directory=language_model("llama"), batch=batch, budget=BUDGET)[0]
    with torch.no_grad():
        logprobs, _ = reference_logprobs(tiny_language_model("llama"), batch)
    assert answer["scored"].numel() == int(mask.sum()) == logprobs.numel()
    torch.testing.assert_close(answer["scored"], logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_and_scores(ranks: RankPool, value_model, layout: Layout, family: str) -> None:
    """The score at the last token is that of transformers' ForSequenceClassification."""
    answers = ranks.run("models.on_ranks:values", layout, directory=value_model(family), batch=BATCH, budget=BUDGET)
    model = tiny_value_model(family)
    with torch.no_grad():
        scores, values = reference_scores(model, BATCH).squeeze(-1), reference_values(model, BATCH)
    for answer in answers:
        torch.testing.assert_close(answer["last"], scores, rtol=0, atol=1e-5)
        torch.testing.assert_close(answer["predicted"], values, rtol=0, atol=1e-5)


def test_a_language_model_as_critic_starts_at_zero(ranks: RankPool, language_model) -> None:
    answer = ranks.run("models.on_ranks:values", directory=language_model("llama"), batch=BATCH, budget=BUDGET)[0]
    assert not answer["predicted"].any() and not answer["last"].any()


def test_nan_in_one_sequence_stays_there(ranks: RankPool, language_model) -> None:
    """Untied weights, so that the poisoned embedding is not an output row; token 100 occurs in the second sequence only."""
    batch = random_batch([6, 6, 5, 6], vocab=100)
    batch.tokens[8] = 100
    clean, poisoned = ranks.run("models.on_ranks:poisoned_sequence", directory=language_model("qwen2"), batch=batch, token=100)[0]
    sequence = torch.arange(4).repeat_interleave(batch.lengths - 1)
    assert torch.equal(clean[sequence != 1], poisoned[sequence != 1])
    assert poisoned[sequence == 1].isnan().any()


ROPE = {
    "linear": dict(rope_type="linear", factor=4.0),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_scaling(ranks: RankPool, tmp_path, kind: str) -> None:
    model = tiny_language_model("llama", head_dim=16, rope_parameters={"rope_theta": 10000.0, **ROPE[kind]})
    batch = random_batch([150, 40])
    arguments = dict(directory=save_model(model, tmp_path / "model"), batch=batch, budget=MicroBatch(tokens=200))
    answer = ranks.run("models.on_ranks:logprobs", **arguments)[0]
    with torch.no_grad():
        logprobs, _ = reference_logprobs(model, batch)
    torch.testing.assert_close(answer["scored"], logprobs, rtol=0, atol=1e-5)
    with torch.no_grad():
        unscaled, _ = reference_logprobs(tiny_language_model("llama", head_dim=16), batch)
    assert (unscaled - logprobs).abs().max() > 1e-2, "the scaling makes no difference, so the test shows nothing"


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "nonsense"])
def test_rope_scaling_that_depends_on_the_sequence_is_refused(ranks: RankPool, tmp_path, kind: str) -> None:
    """One table for all sequences cannot be right where the frequencies change with the length."""
    directory = save_model(tiny_language_model("llama"), tmp_path / "model")
    config_file = tmp_path / "model" / "config.json"
    config = json.loads(config_file.read_text())
    config["rope_parameters"] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    config_file.write_text(json.dumps(config))
    error = ranks.run("models.on_ranks:load_error", directory=directory)[0]
    assert error.startswith("ConfigError: actor.path") and kind in error and "llama3" in error
