"""Rollouts of an engine that has no clock: what a step takes is a formula, and drafts are accepted by chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mc.medusa.draft_length import DraftSchedule, DraftStatistics, StepMeasure, choose, fixed


@dataclass(frozen=True)
class Device:
    """A step takes `memory` seconds to read the weights, or `token` seconds a token if that is more; drafting `draft` a token.

    noise: spread of a step's seconds, as a share.  hiccups: share of the steps that take five times as long.
    """

    memory: float
    token: float
    draft: float
    noise: float = 0.0
    hiccups: float = 0.0

    def seconds(self, running: int, checked: int, proposed: int, chance: random.Random) -> float:
        """Of one step."""
        exact = max(self.memory, self.token * running * (1 + checked)) + self.draft * running * proposed
        return exact * max(0.2, chance.gauss(1.0, self.noise)) * (5.0 if chance.random() < self.hiccups else 1.0)


def accepted_of(drafts: int, acceptance: Sequence[float], chance: random.Random) -> int:
    """How many of one sequence's drafts are accepted."""
    return next((i for i in range(drafts) if chance.random() >= acceptance[i]), drafts)


def roll_out(
    schedule: DraftSchedule, device: Device, acceptance: Sequence[float], lengths: Sequence[int], seed: int = 0
) -> tuple[DraftStatistics, float]:
    """One rollout of responses of these lengths: what was measured, and the seconds it took."""
    chance, measured = random.Random(seed), DraftStatistics(len(acceptance))
    left, total, proposed = list(lengths), 0.0, 0
    while left:
        running, checked = len(left), proposed
        proposed = schedule.drafted(running, measured.steps_at(running))
        counts = [accepted_of(checked, acceptance, chance) for _ in left]
        accepted = tuple(sum(count > i for count in counts) for i in range(checked))
        seconds = device.seconds(running, checked, proposed, chance)
        measured.add(StepMeasure(running, running * (1 + checked), seconds, checked, proposed, running if checked else 0, accepted))
        left = [tokens - 1 - count for tokens, count in zip(left, counts) if tokens > 1 + count]
        total += seconds
    return measured, total


class LongRun:
    """Rollout after rollout, each with the schedule that the ones before it give."""

    def __init__(self, num_heads: int, device: Device, lengths: Sequence[int]) -> None:
        self.device, self.lengths = device, lengths
        self.history = DraftStatistics(num_heads)
        self.schedule = choose(self.history)

    def go_on(self, rollouts: int, acceptance: Sequence[float]) -> float:
        """So many rollouts more: their seconds over those of plain decoding."""
        spent = plain = 0.0
        for _ in range(rollouts):
            measured, seconds = roll_out(self.schedule, self.device, acceptance, self.lengths, seed=self.schedule.rollout)
            self.history = self.history.then(measured)
            self.schedule = choose(self.history, self.schedule)
            spent += seconds
            plain += roll_out(fixed(0), self.device, acceptance, self.lengths)[1]
        return spent / plain

    def drafted(self) -> dict[int, int]:
        """k of each bucket that was measured, by its largest number of sequences."""
        measured = (b for b in range(len(self.schedule.plans)) if not self.history.unmeasured(b))
        return {2**bucket: self.schedule.plans[bucket].drafted for bucket in measured}

