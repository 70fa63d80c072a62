"""Tiny models of the supported families with random weights, made by transformers, and what transformers says of a batch.

The reference runs one sequence at a time, in fp32, with eager attention: no padding, no packing, no kernel of ours.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from rlhf_mc.batch import SequenceBatch

VOCAB = 101  # no multiple of 8, so that every trainer pads it

_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    attn_implementation="eager",
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(model_type="llama", tie_word_embeddings=True),
    "mistral": dict(model_type="mistral", sliding_window=7, tie_word_embeddings=False),
    "qwen2": dict(model_type="qwen2", tie_word_embeddings=False),
    "qwen3": dict(model_type="qwen3", head_dim=16, tie_word_embeddings=True),  # 4 heads of 16 are wider than hidden 32
}


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """The config of a family's tiny model, with `changes` on top."""
    return AutoConfig.for_model(**{**_SIZES, **FAMILIES[family], **changes})


def tiny_language_model(family: str, **changes: Any) -> PreTrainedModel:
    """Random weights of every kind: biases that are not zero, norm weights that are not one."""
    return _randomised(AutoModelForCausalLM.from_config(tiny_config(family, **changes)))


def tiny_value_model(family: str, **changes: Any) -> PreTrainedModel:
    """As `tiny_language_model`, with one score a sequence."""
    return _randomised(AutoModelForSequenceClassification.from_config(tiny_config(family, num_labels=1, **changes)))


def _randomised(model: PreTrainedModel) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    return model.eval()


def save_model(model: PreTrainedModel, directory: Path) -> str:
    """Writes the model as a Hugging Face directory; its path."""
    disable_progress_bar()
    model.save_pretrained(directory)
    return str(directory)


def random_batch(lengths: list[int], vocab: int = VOCAB, seed: int = 0) -> SequenceBatch:
    """Random tokens, each but the first of a sequence to be predicted."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths)
    tokens = torch.randint(0, vocab, (int(sizes.sum()),), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[sizes.cumsum(0) - sizes] = False
    return SequenceBatch(tokens, sizes, mask)


def sequences_of(batch: SequenceBatch) -> list[tuple[Tensor, Tensor]]:
    """(tokens, loss mask) of each sequence."""
    sizes = batch.lengths.tolist()
    return list(zip(batch.tokens.split(sizes), batch.loss_mask.split(sizes)))


def reference_logprobs(
    model: PreTrainedModel,
    batch: SequenceBatch,
    temperature: float = 1.0,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
) -> tuple[Tensor, Tensor]:
    """Log-prob of each token in the loss mask, and the entropy of the distribution that it came from; differentiable.

    For the first `min_tokens` of a sequence's tokens in the mask, that distribution has no `stop_token_ids`.
    """
    logprobs, entropy = [], []
    for tokens, mask in sequences_of(batch):
        logits = model(tokens[None]).logits[0, :-1][mask[1:]] / temperature
        stops = torch.zeros_like(logits, dtype=torch.bool)
        stops[:min_tokens, list(stop_token_ids)] = True
        all_logprobs = logits.masked_fill(stops, -torch.inf).log_softmax(-1)
        logprobs.append(all_logprobs.gather(1, tokens[1:, None][mask[1:]]).squeeze(1))
        entropy.append(-(all_logprobs.exp() * all_logprobs.masked_fill(stops, 0.0)).sum(-1))
    return torch.cat(logprobs), torch.cat(entropy)


def reference_scores(model: PreTrainedModel, batch: SequenceBatch) -> Tensor:
    """The classifier's score of each sequence, [B]; differentiable."""
    return torch.cat([model(tokens[None]).logits[0] for tokens, _ in sequences_of(batch)])


def reference_values(model: PreTrainedModel, batch: SequenceBatch) -> Tensor:
    """The classifier's head before each token in the loss mask; differentiable."""
    hidden = [(model.model(tokens[None]).last_hidden_state[0, :-1], mask[1:]) for tokens, mask in sequences_of(batch)]
    return torch.cat([(h @ model.score.weight.T).squeeze(1)[mask] for h, mask in hidden])
