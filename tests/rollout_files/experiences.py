"""Experiences of every kind for tests: any bits of float32, empty responses, any text; and how two are compared."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlhf_mc.batch import Experience, RolloutBatch
from rlhf_mc.rollout_files import Header, write_rollout

SPECIAL = (0x00000000, 0x80000000, 0x00000001, 0x3DCCCCCD, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001)
_BITS = st.sampled_from(SPECIAL) | st.integers(0, 2**32 - 1)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_ROWS = st.dictionaries(st.text(), _JSON, max_size=3)


def of_bits(patterns: list[int]) -> Tensor:
    """float32[n] of the given bits."""
    return torch.tensor([p - 2**32 if p >= 2**31 else p for p in patterns], dtype=torch.int32).view(torch.float32)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    """1 to 4 sequences of 1 to 4 and 0 to 4 tokens."""
    num = draw(st.integers(1, 4))

    def ints(low: int, high: int, size: int) -> Tensor:
        return torch.tensor(draw(st.lists(st.integers(low, high), min_size=size, max_size=size)), dtype=torch.int64)

    def floats(size: int) -> Tensor:
        return of_bits(draw(st.lists(_BITS, min_size=size, max_size=size)))

    def bools(size: int) -> Tensor:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=torch.bool)

    prompts, responses = ints(1, 4, num), ints(0, 4, num)
    tokens = int(responses.sum())
    rollout = RolloutBatch(
        tokens=ints(0, 200_000, int(prompts.sum()) + tokens),
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=floats(tokens),
        truncated=bools(num),
        stop_reasons=draw(st.lists(st.text(), min_size=num, max_size=num)),
        groups=torch.arange(num) // 2,
        rows=draw(st.lists(_ROWS, min_size=num, max_size=num)),
    )
    numbers = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    return Experience(
        rollout=rollout,
        scores=floats(num),
        loss_mask=bools(tokens),
        reward_parts={name: floats(num) for name in draw(st.lists(st.text(), max_size=3, unique=True))},
        **{name: floats(tokens) for name in numbers},
    )


def example() -> Experience:
    """Two sequences of 2 + 3 and 1 + 0 tokens."""
    rollout = RolloutBatch(
        tokens=torch.tensor([5, 6, 7, 8, 2, 9]),
        prompt_lengths=torch.tensor([2, 1]),
        response_lengths=torch.tensor([3, 0]),
        rollout_logprobs=torch.tensor([-0.1, -0.2, -0.3]),
        truncated=torch.tensor([False, True]),
        stop_reasons=["stop", "length"],
        groups=torch.tensor([0, 1]),
        rows=[{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}],
    )
    return Experience(
        rollout=rollout,
        old_logprobs=torch.tensor([-0.1, -0.25, -0.3]),
        ref_logprobs=torch.tensor([-0.2, -0.2, -0.2]),
        values=torch.tensor([0.1, 0.2, 0.3]),
        scores=torch.tensor([1.0, 0.0]),
        rewards=torch.tensor([0.0, -0.0, 1.0]),
        advantages=torch.tensor([0.5, float("nan"), float("inf")]),
        returns=torch.tensor([1.0, 1.0, 1.0]),
        loss_mask=torch.tensor([True, False, True]),
        reward_parts={"exact": torch.tensor([1.0, float("nan")])},
    )


def letters(ids: list[int]) -> str:
    """A text for token ids."""
    return "".join(chr(0x40 + token) for token in ids)


def written(path: Path, experience: Experience | None = None, **header: Any) -> Path:
    """`path`, where `experience` (null: the example) now is, with `header` on top of what fits it."""
    experience = experience or example()
    usual = {"iteration": 0, "num_samples": len(experience), "kl_coef": 0.05, "settings": {}}
    write_rollout(path, Header(**usual | header), experience, letters)
    return path


def same_bits(a: Any, b: Any) -> bool:
    """Whether two records, or what they hold, are equal, tensors in dtype, shape and every bit."""
    if is_dataclass(a):
        return type(a) is type(b) and all(same_bits(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, Tensor):
        numbers = (a.view(torch.int32), b.view(torch.int32)) if a.dtype == b.dtype == torch.float32 else (a, b)
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*numbers)
    if isinstance(a, dict) and any(isinstance(value, Tensor) for value in a.values()):
        return list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    return a == b
