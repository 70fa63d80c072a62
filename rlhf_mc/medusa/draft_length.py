"""How many tokens the engine drafts for each sequence, by how many sequences run: chosen from what was measured. Pure.

A step that checks k drafted tokens of each sequence gives a sequence E = 1 + a_1 + a_1 a_2 + ... + a_1 ... a_k tokens, where a_i is
the share of drafts accepted at position i, of those whose drafts before it were (arXiv:2211.17192, arXiv:2401.10774). It takes
T(B, k) seconds with B sequences running. So it decodes E T(B, 0) / T(B, k) times as fast as without drafts: that pays while the
device has arithmetic to spare, which it has with few sequences.

Which tokens are sampled does not depend on k. To try another k costs time only; how much is bounded here. A schedule holds for a
rollout, and is chosen from the sums over all replicas, so that every rank chooses the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import mul
from typing import NamedTuple, TypeVar

#: Numbers of sequences are told apart by powers of two: 1, 2, 3 to 4, 5 to 8, ... The last bucket takes all above.
NUM_BUCKETS = 12
_TRIAL_STEPS = 4  # the first of them checks what the step before drafted, and so measures nothing
_MEASURED_STEPS = _TRIAL_STEPS - 1
_TRIAL_COST = 0.02  # of the time, at most, goes into trials of what is not thought best
_MARGIN = 1.03  # gains below this may be noise
_PAST_STEPS, _PAST_SEQUENCES = 8, 256  # the past weighs as much as so many at most, so that the present is heard
_GOLDEN = (math.sqrt(5) - 1) / 2
Sums = TypeVar("Sums", bound=tuple)


def bucket_of(running: int) -> int:
    """The bucket of so many sequences, from 1."""
    return min((running - 1).bit_length(), NUM_BUCKETS - 1)


def expected_tokens(acceptance: Sequence[float], drafted: int) -> float:
    """E above: tokens of a step and sequence, with so many drafted ones. acceptance: a_1, a_2, ..."""
    return 1.0 + sum(accumulate(acceptance[:drafted], mul))


@dataclass(frozen=True)
class StepMeasure:
    """One engine step.

    running: sequences in it.  tokens: that went through the model, of prompts too.  seconds: with drafting for the next step.
    checked, proposed: tokens of each sequence that this step checked, and that it drafted for the next.
    accepted: for each position checked, sequences whose drafts up to there were all accepted, each for one more token of its response.
    drafting: sequences that had any.
    """

    running: int
    tokens: int
    seconds: float
    checked: int = 0
    proposed: int = 0
    drafting: int = 0
    accepted: tuple[int, ...] = ()

    @property
    def decodes_only(self) -> bool:
        """Whether no prompt was computed beside, and no sequence lacked its drafts."""
        return self.tokens == self.running * (1 + self.checked)


class StepTimes(NamedTuple):
    """Sums over steps that checked and drafted the same k, with about as many sequences."""

    steps: float = 0.0
    sequences: float = 0.0
    seconds: float = 0.0


class Position(NamedTuple):
    """Sums at one position of the drafts: sequences that had a draft there, those that were accepted up to it, and including it."""

    checked: float = 0.0
    reached: float = 0.0
    accepted: float = 0.0


class Steps(NamedTuple):
    """Sums over all steps of a bucket: how many, of these with drafts to check, and that only decode; sequences in them."""

    all: float = 0.0
    checking: float = 0.0
    decoding: float = 0.0
    sequences: float = 0.0


class DraftStatistics:
    """Sums over engine steps. times: [bucket][k].  steps: [bucket].  positions: of all buckets, on which acceptance hardly depends."""

    def __init__(self, num_heads: int) -> None:
        """Nothing measured yet."""
        self.num_heads = num_heads
        self.times = [[StepTimes() for _ in range(num_heads + 1)] for _ in range(NUM_BUCKETS)]
        self.positions = [Position() for _ in range(num_heads)]
        self.steps = [Steps() for _ in range(NUM_BUCKETS)]

    def add(self, step: StepMeasure) -> None:
        """Times are of steps that only decode, and draft as many as they check: the first after a change of k is half of each."""
        bucket, checked = bucket_of(step.running), step.checked
        counts = Steps(1, step.drafting > 0, step.decodes_only, step.running)
        self.steps[bucket] = _plus(self.steps[bucket], counts)
        if step.decodes_only and checked == step.proposed:
            self.times[bucket][checked] = _plus(self.times[bucket][checked], StepTimes(1, step.running, step.seconds))
        reached = step.drafting
        for position, accepted in enumerate(step.accepted):
            self.positions[position] = _plus(self.positions[position], Position(step.drafting, reached, accepted))
            reached = accepted

    def steps_at(self, running: int) -> int:
        """Steps that only decoded, with about so many sequences: what `DraftSchedule.drafted` counts."""
        return int(self.steps[bucket_of(running)].decoding)

    def numbers(self) -> list[float]:
        """All sums, to be added up over replicas."""
        return [number for sums in (*(times for row in self.times for times in row), *self.positions, *self.steps) for number in sums]

    @staticmethod
    def from_numbers(num_heads: int, numbers: Iterable[float]) -> DraftStatistics:
        """What has these `numbers`."""
        left = iter(numbers)
        statistics = DraftStatistics(num_heads)
        statistics.times = [[_take(StepTimes, left) for _ in row] for row in statistics.times]
        statistics.positions = [_take(Position, left) for _ in statistics.positions]
        statistics.steps = [_take(Steps, left) for _ in statistics.steps]
        return statistics

    def then(self, rollout: DraftStatistics) -> DraftStatistics:
        """The past, and a rollout after it. Heads and lengths change, so the past weighs little, but it fades only where something
        new is known: a few steps do not replace what was well measured.
        """
        result = DraftStatistics(self.num_heads)
        pairs = zip(self.times, rollout.times)
        result.times = [[_plus(_scaled(a, a.steps, _PAST_STEPS), b) for a, b in zip(*rows)] for rows in pairs]
        result.positions = [_plus(_scaled(a, a.reached, _PAST_SEQUENCES), b) for a, b in zip(self.positions, rollout.positions)]
        result.steps = [_plus(a, b) for a, b in zip(self.steps, rollout.steps)]
        return result

    @property
    def acceptance(self) -> list[float]:
        """a_1, a_2, ...; 0 where no draft came so far."""
        return [position.accepted / position.reached if position.reached else 0.0 for position in self.positions]

    def seconds(self, bucket: int, drafted: int) -> float | None:
        """Mean of a step with so many drafted tokens; None where there was none."""
        times = self.times[bucket][drafted]
        return times.seconds / times.steps if times.steps else None

    def unmeasured(self, bucket: int) -> tuple[int, ...]:
        """Every k that has too few steps of this bucket to be judged."""
        return tuple(k for k, times in enumerate(self.times[bucket]) if times.steps < _MEASURED_STEPS)

    def speeds(self, bucket: int) -> list[float]:
        """For each k, decoding's speed over that without drafts; no k is unmeasured in this bucket."""
        acceptance = self.acceptance
        return [
            expected_tokens(acceptance, k) * self.plain_seconds(bucket, times.sequences / times.steps) * times.steps / times.seconds
            for k, times in enumerate(self.times[bucket])
        ]

    def plain_seconds(self, bucket: int, running: float) -> float:
        """T(B, 0) for `running` sequences, B, of a bucket in which there were such steps: another k may have been measured at another B.

        On the line to the nearest other bucket; but a step neither shortens with more sequences, nor grows faster than they.
        """
        plain = {b: row[0] for b, row in enumerate(self.times) if row[0].steps}
        own = plain.pop(bucket)
        here, seconds = own.sequences / own.steps, own.seconds / own.steps
        if not plain:
            return seconds
        other = plain[min(plain, key=lambda b: abs(b - bucket))]
        slope = (other.seconds / other.steps - seconds) / (other.sequences / other.steps - here)
        return seconds + min(max(slope, 0.0), seconds / here) * (running - here)


def _plus(a: Sums, b: Sums) -> Sums:
    return type(a)(*(x + y for x, y in zip(a, b)))


def _scaled(sums: Sums, weight: float, limit: float) -> Sums:
    """So that what weighs `weight` weighs `limit` at most; means stay."""
    return type(sums)(*(x * min(1.0, limit / weight) for x in sums)) if weight else sums


def _take(kind: type[Sums], numbers: Iterator[float]) -> Sums:
    return kind(*islice(numbers, len(kind._fields)))


@dataclass(frozen=True)
class Plan:
    """What a bucket drafts in a rollout: first each k of `untried`, for a trial; then `drafted`, but `tried` for a trial in each
    `period` of steps, where there is one. offset: where in the period the rollout begins.
    """

    drafted: int
    untried: tuple[int, ...] = ()
    tried: int = 0
    period: int | None = None
    offset: int = 0

    def at(self, step: int) -> int:
        """k of one step, counted from 0 in this bucket and rollout."""
        if step < _TRIAL_STEPS * len(self.untried):
            return self.untried[step // _TRIAL_STEPS]
        if self.period is not None and (step + self.offset) % self.period < _TRIAL_STEPS:
            return self.tried
        return self.drafted


@dataclass(frozen=True)
class DraftSchedule:
    """The plan of each bucket for one rollout; rollouts are numbered from 0."""

    plans: tuple[Plan, ...]
    rollout: int = 0

    def drafted(self, running: int, step: int) -> int:
        """Tokens to draft for each sequence. step: of this bucket and rollout, see `DraftStatistics.steps_at`."""
        return self.plans[bucket_of(running)].at(step)


def fixed(drafted: int) -> DraftSchedule:
    """Always so many, without trials."""
    return DraftSchedule((Plan(drafted),) * NUM_BUCKETS)


def choose(history: DraftStatistics, previous: DraftSchedule | None = None) -> DraftSchedule:
    """For the rollout after `previous`, which is None before the first.

    A bucket takes the fastest k. Drafting begins where it gains 3 %, and ends where it loses: a bucket leaves its k for another
    only if that is 3 % faster, or is 0 and faster. A bucket that is not measured tries what it lacks, then drafts as the next
    larger one does, or not at all where there is none: what pays there pays with fewer sequences too.
    """
    rollout = 0 if previous is None else previous.rollout + 1
    plans: list[Plan] = []
    larger = 0
    for bucket in reversed(range(NUM_BUCKETS)):
        present = 0 if previous is None else previous.plans[bucket].drafted
        unmeasured = history.unmeasured(bucket)
        plan = Plan(larger, unmeasured) if unmeasured else _best(history.speeds(bucket), present, rollout)
        plans.insert(0, plan)
        larger = plan.drafted
    return DraftSchedule(tuple(plans), rollout)


def _best(speeds: Sequence[float], present: int, rollout: int) -> Plan:
    """The others are tried in turn, one a rollout, the more seldom the more that costs.

    A rollout may be shorter than the period: by multiples of the golden ratio, each begins at another place of it, and all
    places get their turn.
    """
    drafted = max(range(len(speeds)), key=lambda k: speeds[k] if k in (0, present) else speeds[k] / _MARGIN)
    others = [k for k in range(len(speeds)) if k != drafted]
    tried = others[rollout % len(others)]
    loss = speeds[drafted] / speeds[tried] - 1.0
    period = math.ceil(_TRIAL_STEPS * max(1.0, loss) / _TRIAL_COST)
    return Plan(drafted, tried=tried, period=period, offset=int(rollout * _GOLDEN % 1.0 * period))


def changes(old: DraftSchedule, new: DraftSchedule, history: DraftStatistics) -> list[str]:
    """A sentence for each bucket that drafts otherwise from now on, and why; for those that were measured."""
    sentences = []
    for bucket, (before, after) in enumerate(zip(old.plans, new.plans)):
        if before.drafted == after.drafted or after.untried:
            continue
        acceptance = ", ".join(f"{share:.2f}" for share in history.acceptance[: max(before.drafted, after.drafted)])
        old_seconds, new_seconds = history.seconds(bucket, before.drafted), history.seconds(bucket, after.drafted)
        sentences.append(
            f"speculation: {_sequences(bucket)}: {before.drafted} -> {after.drafted} drafted tokens "
            f"(acceptance {acceptance}; step {old_seconds * 1e3:.3g} -> {new_seconds * 1e3:.3g} ms)"
        )
    return sentences


def _sequences(bucket: int) -> str:
    if bucket == 0:
        return "1 sequence"
    least, most = 2 ** (bucket - 1) + 1, 2**bucket
    if bucket == NUM_BUCKETS - 1:
        return f"{least} sequences or more"
    return f"{least} to {most} sequences" if least < most else f"{most} sequences"


def metrics(rollout: DraftStatistics, history: DraftStatistics) -> dict[str, float]:
    """medusa/... of one rollout, in which there were steps. history: with this rollout; it knows plain decoding's times.

    acceptance/position_i: a_i.  accepted_length: tokens of a step for a sequence that had drafts, with the one that is sampled
    anyway.  tokens_per_forward: the same over all steps and sequences.  speedup_estimate: seconds that the same tokens would have
    taken without drafts, over those they took, where that was measured.  What was never seen is left out.
    """
    steps = _total(rollout.steps)
    accepted = sum(position.accepted for position in rollout.positions)
    drafted = sum(position.checked for position in rollout.positions)
    found = {
        f"medusa/acceptance/position_{number}": position.accepted / position.reached
        for number, position in enumerate(rollout.positions, start=1)
        if position.reached
    }
    if drafted:
        found["medusa/accepted_length"] = 1.0 + accepted / rollout.positions[0].checked
    speedup = _speedup(rollout, history)
    if speedup is not None:
        found["medusa/speedup_estimate"] = speedup
    return found | {
        "medusa/tokens_per_forward": 1.0 + accepted / steps.sequences,
        "medusa/drafted_tokens": drafted,
        "medusa/wasted_tokens": drafted - accepted,
        "medusa/steps_drafting": steps.checking / steps.all,
    }


def _total(steps: Iterable[Steps]) -> Steps:
    return Steps(*map(sum, zip(*steps)))


def _speedup(rollout: DraftStatistics, history: DraftStatistics) -> float | None:
    plain = spent = 0.0
    for bucket, row in enumerate(rollout.times):
        for k, times in enumerate(row):
            if times.steps and history.times[bucket][0].steps:
                step = history.plain_seconds(bucket, times.sequences / times.steps)
                plain += times.steps * expected_tokens(rollout.acceptance, k) * step
                spent += times.seconds
    return plain / spent if spent else None
