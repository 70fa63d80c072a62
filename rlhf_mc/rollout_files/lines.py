"""The lines of a rollout file: a header, then one sample of an Experience a line, and from them the same bits again.

A float32 number is written as the shortest decimal of the double that it is, so that it comes back exactly. JSON has no
NaN and no infinity: null is NaN, and a string holds the bits of any other number that is not finite ("0x7f800000").

A parse_ function raises ValueError for a line that does not hold what it should; the caller knows file and line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import pyarrow
import pyarrow.compute
import torch
from torch import Tensor

from rlhf_mc.batch import Experience, RolloutBatch

FORMAT, VERSION = "rlhf_mc rollout", 1

#: Fields with one number for each response token: those of RolloutBatch, then those of Experience.
_OF_ROLLOUT = ("rollout_logprobs",)
_OF_EXPERIENCE = ("old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
_TOKEN_NUMBERS = _OF_ROLLOUT + _OF_EXPERIENCE
_NAN_BITS = 0x7FC00000
_BITS = re.compile(r"0x[0-9a-f]{8}")

_HEADER_TYPES = {"format": str, "version": int, "iteration": int, "num_samples": int, "kl_coef": float, "settings": dict}
_SAMPLE_TYPES = {
    "iteration": int, "sample": int, "group": int, "row": dict, "prompt": str, "response": str, "prompt_ids": list,
    "response_ids": list, "stop_reason": str, "truncated": bool, "reward_parts": dict, "loss_mask": list,
    **dict.fromkeys(_TOKEN_NUMBERS, list),
}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """What an update needs beside the samples, and what the samples were made under.

    kl_coef: the coefficient of the KL in this iteration's loss.  settings: by key, those of conditions.py.
    """

    iteration: int
    num_samples: int
    kl_coef: float
    settings: dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """One line: the fields of one sequence in RolloutBatch and Experience. n response tokens.

    prompt_ids, response_ids: int64.  token_numbers: name -> float32[n].  loss_mask: bool[n].
    score: float32[1].  reward_parts: name -> float32[1].
    """

    iteration: int
    sample: int
    group: int
    row: dict[str, Any]
    prompt_ids: Tensor
    response_ids: Tensor
    stop_reason: str
    truncated: bool
    token_numbers: dict[str, Tensor]
    loss_mask: Tensor
    score: Tensor
    reward_parts: dict[str, Tensor]


# ---- writing


def header_line(header: Header) -> bytes:
    """The first line of a file."""
    return (json.dumps({"format": FORMAT, "version": VERSION} | asdict(header), allow_nan=False) + "\n").encode()


def sample_lines(experience: Experience, iteration: int, decode: Callable[[list[int]], str]) -> Iterator[bytes]:
    """One line for each of the B sequences, in order. `decode` gives the text of token ids, for people to read."""
    rollout = experience.rollout
    scores = _numbers(experience.scores)
    parts = {name: _numbers(values) for name, values in experience.reward_parts.items()}
    lengths = torch.stack([rollout.prompt_lengths, rollout.response_lengths], dim=1).flatten()
    ids = rollout.tokens.split(lengths.tolist())
    of_tokens = {name: getattr(rollout, name) for name in _OF_ROLLOUT}
    of_tokens |= {name: getattr(experience, name) for name in (*_OF_EXPERIENCE, "loss_mask")}
    pieces = {name: values.split(rollout.response_lengths.tolist()) for name, values in of_tokens.items()}
    for b in range(len(rollout)):
        prompt, response = ids[2 * b], ids[2 * b + 1]
        small = {
            "iteration": iteration,
            "sample": b,
            "group": int(rollout.groups[b]),
            "row": _plain(rollout.rows[b]),
            "prompt": decode(prompt.tolist()),
            "response": decode(response.tolist()),
            "stop_reason": rollout.stop_reasons[b],
            "truncated": bool(rollout.truncated[b]),
            "score": scores[b],
            "reward_parts": {name: values[b] for name, values in parts.items()},
        }
        lists = {"prompt_ids": prompt, "response_ids": response} | {name: values[b] for name, values in pieces.items()}
        texts = [json.dumps(small, allow_nan=False)[1:-1], *(f'"{name}": {_list(values)}' for name, values in lists.items())]
        yield f"{{{', '.join(texts)}}}\n".encode()


def _list(values: Tensor) -> str:
    """A flat tensor of float32, int64 or bool as a JSON list.

    By Arrow, which lets go of the interpreter's lock meanwhile. json.dumps holds it for a whole list: the thread that
    trains, which gives it up and takes it back at every operator, would come to a stop.
    """
    if values.is_floating_point():
        if not values.isfinite().all():
            return json.dumps(_numbers(values))
        values = values.double()
    texts = pyarrow.compute.cast(pyarrow.array(values.numpy()), pyarrow.string())
    # Read as an integer, Arrow's -0 would lose its sign.
    texts = pyarrow.compute.if_else(pyarrow.compute.equal(texts, "-0"), "-0.0", texts)
    joined = pyarrow.compute.binary_join(pyarrow.ListArray.from_arrays([0, len(texts)], texts), ", ")
    return f"[{joined[0].as_py()}]"


def _numbers(values: Tensor) -> list[float | str | None]:
    """float32[n] as JSON can hold it."""
    written: list[float | str | None] = values.tolist()
    for i in (~values.isfinite()).nonzero().flatten().tolist():
        bits = int(values[i : i + 1].view(torch.int32)) & 0xFFFFFFFF
        written[i] = None if bits == _NAN_BITS else f"0x{bits:08x}"
    return written


def _plain(value: Any) -> Any:
    """A field of a dataset row as JSON can hold it: what only parquet holds (bytes, dates) becomes its text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


# ---- reading


def parse_header(line: bytes) -> Header:
    """The header that the first line of a file holds."""
    fields = _fields(line, {"format": str, "version": int})
    if (fields["format"], fields["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"the file is of format '{fields['format']}', version {fields['version']}; this program reads '{FORMAT}', version {VERSION}"
        )
    fields = _fields(line, _HEADER_TYPES)
    return Header(**{name: fields[name] for name in Header.__dataclass_fields__})


def parse_sample(line: bytes) -> Sample:
    """The sample that a line holds."""
    fields = _fields(line, _SAMPLE_TYPES | {"score": None})
    response = _ids("response_ids", fields["response_ids"])
    for name in (*_TOKEN_NUMBERS, "loss_mask"):
        if len(fields[name]) != len(response):
            raise ValueError(f"{name} has {len(fields[name])} items for {len(response)} response_ids")
    if not fields["prompt_ids"]:
        raise ValueError("prompt_ids is empty")
    if not all(type(item) is bool for item in fields["loss_mask"]):
        raise ValueError("loss_mask holds something else than true and false")
    return Sample(
        **{name: fields[name] for name in ("iteration", "sample", "group", "row", "stop_reason", "truncated")},
        prompt_ids=_ids("prompt_ids", fields["prompt_ids"]),
        response_ids=response,
        token_numbers={name: _floats(name, fields[name]) for name in _TOKEN_NUMBERS},
        loss_mask=torch.tensor(fields["loss_mask"], dtype=torch.bool),
        score=_floats("score", [fields["score"]]),
        reward_parts={name: _floats(f"reward_parts.{name}", [value]) for name, value in fields["reward_parts"].items()},
    )


def assemble(samples: Sequence[Sample]) -> Experience:
    """The Experience of all its samples, in order; at least one."""

    def of_tokens(name: str) -> Tensor:
        return torch.cat([sample.token_numbers[name] for sample in samples])

    rollout = RolloutBatch(
        tokens=torch.cat([ids for sample in samples for ids in (sample.prompt_ids, sample.response_ids)]),
        prompt_lengths=torch.tensor([sample.prompt_ids.numel() for sample in samples]),
        response_lengths=torch.tensor([sample.response_ids.numel() for sample in samples]),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        stop_reasons=[sample.stop_reason for sample in samples],
        groups=torch.tensor([sample.group for sample in samples]),
        rows=[sample.row for sample in samples],
        **{name: of_tokens(name) for name in _OF_ROLLOUT},
    )
    return Experience(
        rollout=rollout,
        scores=torch.cat([sample.score for sample in samples]),
        loss_mask=torch.cat([sample.loss_mask for sample in samples]),
        reward_parts={name: torch.cat([sample.reward_parts[name] for sample in samples]) for name in samples[0].reward_parts},
        **{name: of_tokens(name) for name in _OF_EXPERIENCE},
    )


def _fields(line: bytes, types: dict[str, type | None]) -> dict[str, Any]:
    """The object that a line holds, with at least the fields of `types`; a type None is not checked here."""
    fields = json.loads(line, parse_constant=_refuse_constant)
    if not isinstance(fields, dict):
        raise ValueError(f"the line holds a JSON {type(fields).__name__}, not an object")
    for name, wanted in types.items():
        if name not in fields:
            raise ValueError(f"the field {name} is missing")
        if wanted is not None and type(fields[name]) is not wanted:
            raise ValueError(f"{name} is {type(fields[name]).__name__}, not {wanted.__name__}")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _ids(name: str, values: list[Any]) -> Tensor:
    """int64[n]"""
    for i, value in enumerate(values):
        if type(value) is not int or not 0 <= value < 2**31:
            raise ValueError(f"{name}[{i}]: {value!r} is no token id")
    return torch.tensor(values, dtype=torch.int64)


def _floats(name: str, values: list[Any]) -> Tensor:
    """float32[n], the inverse of `_numbers` and of `_list`."""
    bits = {i: _bits(f"{name}[{i}]", value) for i, value in enumerate(values) if type(value) not in (float, int)}
    doubles = torch.tensor([0.0 if i in bits else float(value) for i, value in enumerate(values)], dtype=torch.float64)
    numbers = doubles.float()
    if wrong := (numbers.double() != doubles).nonzero().flatten().tolist():
        raise ValueError(f"{name}[{wrong[0]}]: {values[wrong[0]]} is no float32 number")
    for i, pattern in bits.items():
        numbers.view(torch.int32)[i] = pattern - 2**32 if pattern >= 2**31 else pattern
    return numbers


def _bits(where: str, value: Any) -> int:
    """The bits of a float32 that JSON holds as null or as a string."""
    if value is None:
        return _NAN_BITS
    if isinstance(value, str) and _BITS.fullmatch(value):
        return int(value, 16)
    raise ValueError(f"{where}: {value!r} is no number, null or bits like '0x7f800000'")
