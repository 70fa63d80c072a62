"""Prompts, supervised examples, pairs and text as batches by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from character_tokenizer import character_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mc.batch import PromptBatch, SequenceBatch
from rlhf_mc.data import DataError, Encoder, PreferencePairs, PretrainText, PromptSource, Row, SupervisedExamples, read_rows

TOKENIZER = character_tokenizer()
RAW = Encoder(TOKENIZER, chat_template=False)
EOS = "<|im_end|>"


def rows_of(fields: list[dict[str, Any]]) -> list[Row]:
    return [Row(f, f"rows.jsonl:{i}") for i, f in enumerate(fields, start=1)]


def prompt_source(num: int, size: int, seed: int = 1, shuffle: bool = True, limit: int = 100) -> PromptSource:
    fields = [{"prompt": f"{i:03}" + "x" * (i % 3), "id": i} for i in range(num)]
    return PromptSource(
        rows_of(fields), RAW, prompts_per_iteration=size, max_prompt_tokens=limit, seed=seed, shuffle=shuffle
    )


def words(batch: SequenceBatch, mask: Tensor | None = None) -> list[str]:
    """Text of each sequence, of its tokens under `mask` if given."""
    keep = torch.ones_like(batch.loss_mask) if mask is None else mask
    parts = zip(batch.tokens.split(batch.lengths.tolist()), keep.split(batch.lengths.tolist()), strict=True)
    return ["".join(TOKENIZER.convert_ids_to_tokens(tokens[kept].tolist())) for tokens, kept in parts]


def assert_same(a: PromptBatch, b: PromptBatch) -> None:
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.lengths.tolist() == b.lengths.tolist()
    assert (a.rows, a.indices.tolist()) == (b.rows, b.indices.tolist())


@settings(deadline=None, max_examples=50)
@given(num=st.integers(1, 20), size=st.integers(1, 25), seed=st.integers(0, 99))
def test_no_prompt_is_lost_or_repeated_within_an_epoch(num: int, size: int, seed: int) -> None:
    source = prompt_source(num, size, seed)
    batches = [source.batch(i) for i in range(2 * num)]
    ids = [row["id"] for batch in batches for row in batch.rows]
    indices = [i for batch in batches for i in batch.indices.tolist()]
    assert indices == [i % num for i in range(len(ids))]
    for start in range(0, len(ids) - num + 1, num):
        assert Counter(ids[start : start + num]) == Counter(range(num))


@settings(deadline=None, max_examples=30)
@given(num=st.integers(1, 20), size=st.integers(1, 25), iteration=st.integers(0, 40))
def test_a_resumed_source_gives_the_same_batch(num: int, size: int, iteration: int) -> None:
    used = prompt_source(num, size)
    for earlier in range(iteration):
        used.batch(earlier)
    assert_same(used.batch(iteration), prompt_source(num, size).batch(iteration))


def test_tokens_belong_to_their_rows() -> None:
    batch = prompt_source(7, 5).batch(1)
    assert batch.tokens.dtype == batch.lengths.dtype == batch.indices.dtype == torch.int64
    assert len(batch) == len(batch.rows) == 5
    for b, row in enumerate(batch.rows):
        assert "".join(TOKENIZER.convert_ids_to_tokens(batch.prompt(b))) == row["prompt"]


def test_all_is_every_prompt_in_file_order() -> None:
    batch = prompt_source(5, 2).all()
    assert [row["id"] for row in batch.rows] == batch.indices.tolist() == [0, 1, 2, 3, 4]
    assert batch.lengths.tolist() == [3, 4, 5, 3, 4]


def test_long_prompts_are_dropped_counted_and_named() -> None:
    source = prompt_source(6, 4, limit=4)
    assert len(source) == 4
    assert source.report.dropped == (("rows.jsonl:3", 5), ("rows.jsonl:6", 5))
    assert source.report.num_kept == 4
    expected = "6 prompts, 2 dropped as longer than data.max_prompt_tokens=4: rows.jsonl:3 (5 tokens), rows.jsonl:6 (5 tokens)"
    assert str(source.report) == expected
    assert sorted(row["id"] for row in source.batch(0).rows) == [0, 1, 3, 4]
    assert str(prompt_source(6, 4).report) == "6 prompts, none over data.max_prompt_tokens=100"


def test_a_long_report_names_the_first_and_counts_the_rest() -> None:
    report = prompt_source(60, 4, limit=4).report
    assert len(report.dropped) == 20
    assert str(report).endswith("rows.jsonl:30 (5 tokens) and 10 more")


def test_nothing_left_is_an_error() -> None:
    with pytest.raises(DataError, match="left to use: 2 prompts.*the shortest has 3 tokens, raise data.max_prompt_tokens"):
        prompt_source(2, 1, limit=2)


def test_a_row_without_prompt_is_named(write_jsonl: Callable[..., str]) -> None:
    path = write_jsonl([{"prompt": "a"}, {"txt": "b"}])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the row needs 'prompt' .*it has txt"):
        PromptSource(
            read_rows([path], "data.train"), RAW, prompts_per_iteration=1, max_prompt_tokens=9, seed=1, shuffle=True
        )


def examples(kind: Any, fields: list[dict[str, Any]], batch_size: int = 2, max_tokens: int = 100, shuffle: bool = False) -> Any:
    return kind(rows_of(fields), RAW, batch_size=batch_size, max_tokens=max_tokens, seed=1, shuffle=shuffle)


def test_sft_loss_is_on_the_response_and_its_eos() -> None:
    source = examples(SupervisedExamples, [{"prompt": "12+3=", "completion": "15"}, {"question": "q", "answer": ""}])
    batch = source.batch(0)
    assert words(batch) == ["12+3=15" + EOS, "q" + EOS]
    assert words(batch, batch.loss_mask) == ["15" + EOS, EOS]
    assert batch.lengths.tolist() == [8, 2]
    assert (batch.tokens.dtype, batch.lengths.dtype, batch.loss_mask.dtype) == (torch.int64, torch.int64, torch.bool)


def test_sft_trains_the_last_turn_only() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    batch = examples(SupervisedExamples, [{"messages": [{"role": r, "content": c} for r, c in turns]}]).all()
    assert words(batch, batch.loss_mask) == ["d" + EOS]


def test_sft_drops_by_whole_length() -> None:
    source = examples(SupervisedExamples, [{"prompt": "p", "completion": "r" * n} for n in (2, 3, 4)], max_tokens=5)
    assert source.report.dropped == (("rows.jsonl:3", 6),)
    assert "examples, 1 dropped as longer than supervised.max_tokens=5" in str(source.report)
    assert len(source) == 2


def test_steps_cover_the_epochs_and_batches_are_pure() -> None:
    fields = [{"prompt": "p", "completion": str(i)} for i in range(5)]
    source = examples(SupervisedExamples, fields, shuffle=True)
    assert source.num_steps(epochs=3) == 8
    seen = [word for step in range(8) for word in words(source.batch(step))]
    assert set(Counter(seen[:15]).values()) == {3}
    assert words(examples(SupervisedExamples, fields, shuffle=True).batch(6)) == seen[12:14]


def test_pairs_are_interleaved_and_stay_together() -> None:
    fields = [{"prompt": f"p{i}", "chosen": f"good{i}", "rejected": f"bad{i}"} for i in range(5)]
    source = examples(PreferencePairs, fields, shuffle=True)
    assert (len(source), source.num_steps(1)) == (5, 3)
    batch = source.batch(1)
    assert len(batch) == 4
    for chosen, rejected in zip(words(batch)[::2], words(batch)[1::2], strict=True):
        assert chosen.replace("good", "bad") == rejected
    assert words(source.all())[:2] == ["p0good0" + EOS, "p0bad0" + EOS]
    assert words(batch, batch.loss_mask) == [word[2:] for word in words(batch)]


def test_a_pair_is_dropped_if_either_is_long() -> None:
    fields = [
        {"prompt": "p", "chosen": "c" * a, "rejected": "r" * b} for a, b in ((1, 1), (9, 1), (1, 8))
    ]
    source = examples(PreferencePairs, fields, max_tokens=5)
    assert source.report.dropped == (("rows.jsonl:2", 11), ("rows.jsonl:3", 10))
    assert words(source.all()) == ["pc" + EOS, "pr" + EOS]


def test_pairs_without_prompt_never_predict_a_first_token() -> None:
    batch = examples(PreferencePairs, [{"chosen": "good", "rejected": "bad"}]).all()
    assert words(batch, batch.loss_mask) == ["ood" + EOS, "ad" + EOS]


def test_text_is_cut_not_dropped_and_trains_all_but_first_tokens() -> None:
    source = examples(PretrainText, [{"text": "abcdefgh"}, {"prompt": "p", "completion": "r"}, {"text": "abcdef"}], max_tokens=3)
    batch = source.all()
    assert words(batch) == ["abc", "def", "gh" + EOS, "pr" + EOS, "abc", "def"]
    assert words(batch, batch.loss_mask) == ["bc", "ef", "h" + EOS, "r" + EOS, "bc", "ef"]


def test_bos_begins_a_text_and_is_not_predicted() -> None:
    encoder = Encoder(character_tokenizer(adds_bos=True), chat_template=False)
    source = PretrainText(rows_of([{"text": "ab"}]), encoder, batch_size=1, max_tokens=9, seed=1, shuffle=False)
    batch = source.batch(0)
    assert words(batch) == ["<s>ab" + EOS]
    assert batch.loss_mask.tolist() == [False, True, True, True]


def test_text_with_nothing_to_predict() -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl:1: no row from here on has a piece of 2 to 8 tokens"):
        examples(PretrainText, [{"text": ""}], max_tokens=8)
