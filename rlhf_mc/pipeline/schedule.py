"""In which order a rollout is generated, rewarded and scored, from what that cost before. Pure.

One thread does it all on each rank, so a schedule is a list of operations. Two resources work beside that thread: reward
functions, and the engine, where it has devices of its own. What is worth doing follows from that. Where engine and trainer
share a device, scoring in the middle of the rollout gains nothing, while reward functions and copies can hide: the rollout is
generated first, chunks go to the reward functions as they finish, and each role then scores all of it in one pass. Where the
engine is apart, each group of chunks is scored while the next is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlhf_mc.config import Settings

Kind = Literal["generate", "submit", "sleep", "score", "collect"]
FIRST_CHUNKS = 4  # before anything was measured
CHUNK_COUNTS = (1, 2, 4, 8, 16)
_WORTH = 0.98  # more chunks must save this much, or they are not worth their passes


@dataclass(frozen=True)
class Operation:
    """generate: step until these chunks are complete.  submit: hand them to the reward functions.  sleep: the engine's memory
    is the trainer's from here on.  score: `role` scores these chunks in one pass.  collect: wait for the reward functions.
    """

    kind: Kind
    chunks: tuple[int, ...] = ()
    role: str | None = None


@dataclass(frozen=True)
class Costs:
    """Seconds of one whole rollout, as measured earlier.

    generate: the engine's decoding, if nothing else is done meanwhile.  score: by role, one pass over everything, its
    params present; in the order in which roles score.  overhead: what a pass costs however little it scores.
    load: by role, params onto the device.  reward: the reward functions, from first call to last answer.
    """

    generate: float
    score: Mapping[str, float]
    overhead: float = 0.0
    load: Mapping[str, float] = field(default_factory=dict)
    reward: float = 0.0


@dataclass(frozen=True)
class Resources:
    """apart: the engine has devices of its own.  beside: roles can score while the engine is awake (always so where apart).

    roles_at_once: roles whose params the device holds together.  prefetch: there is room for the next role's params to come
    while one scores.
    """

    apart: bool = False
    beside: bool = False
    roles_at_once: int = 1
    prefetch: bool = False

    @staticmethod
    def of(settings: Settings, num_roles: int) -> Resources:
        """Of a run with so many roles."""
        return Resources(
            apart=settings.rollout.placement == "separate",
            beside=settings.pipeline.score_while_generating,
            roles_at_once=1 if settings.offload.enabled else num_roles,
            prefetch=settings.offload.device_budget_gib is not None,
        )

    @property
    def can_score_between(self) -> bool:
        """Whether a role may score before the rollout is complete."""
        return self.apart or self.beside


def operations_of(settings: Settings, roles: Sequence[str], num_chunks: int) -> list[Operation]:
    """Those of one rollout in so many chunks, as `pipeline.mode` asks. roles: in the order in which they score."""
    resources = Resources.of(settings, len(roles))
    groups = groups_of(num_chunks, resources)
    return serial(roles, groups) if settings.pipeline.mode == "serial" else pipelined(roles, groups, resources)


def serial(roles: Sequence[str], groups: Sequence[Sequence[int]]) -> list[Operation]:
    """Everything one after the other: the yardstick. Scores the same groups, so that it gives the same bits."""
    chunks = tuple(chunk for group in groups for chunk in group)
    return [
        Operation("generate", chunks),
        Operation("sleep"),
        Operation("submit", chunks),
        Operation("collect"),
        *_score(roles, groups),
    ]


def pipelined(roles: Sequence[str], groups: Sequence[Sequence[int]], resources: Resources) -> list[Operation]:
    """The operations of a rollout whose chunks are scored in `groups`, in this order:

    - every chunk is generated once, in order, and submitted right after it, before anything else is done;
    - every role scores every group once, after all its chunks were generated;
    - where roles cannot score beside the engine, nothing is scored before it sleeps; nothing is generated after it sleeps;
    - "collect" comes once, last;
    - the last pass is the last role's, which is the first to train; a group is scored from the first role to the last, and
      where not all roles are on the device at once, every other group before it from the last to the first, so that the
      role that is there begins.
    """
    operations: list[Operation] = []
    between = resources.can_score_between
    for number, group in enumerate(groups):
        for chunk in group:
            operations += [Operation("generate", (chunk,)), Operation("submit", (chunk,))]
        if between and number < len(groups) - 1:
            operations += _score(_in_turn(roles, len(groups) - 1 - number, resources), [group])
    operations.append(Operation("sleep"))
    operations += _score(roles, groups[-1:] if between else groups)
    return [*operations, Operation("collect")]


def _score(roles: Sequence[str], groups: Sequence[Sequence[int]]) -> list[Operation]:
    """Role by role, so that each is loaded once."""
    return [Operation("score", tuple(group), role) for role in roles for group in groups]


def _in_turn(roles: Sequence[str], groups_left: int, resources: Resources) -> Sequence[str]:
    return roles if resources.roles_at_once >= len(roles) or groups_left % 2 == 0 else list(reversed(roles))


def groups_of(num_chunks: int, resources: Resources) -> list[tuple[int, ...]]:
    """Which chunks are scored in one pass: each by itself where scoring goes on beside decoding, else all."""
    return [(chunk,) for chunk in range(num_chunks)] if resources.can_score_between else [tuple(range(num_chunks))]


def seconds(operations: Sequence[Operation], sizes: Sequence[int], costs: Costs, resources: Resources) -> float:
    """What the operations would take: the time at which the last of them is done.

    sizes: samples of each chunk. Decoding, scoring and rewarding take their share by samples, and a pass its overhead on
    top. Reward functions work through what is submitted in order. Params come while the thread is busy with what comes
    before, where there is room for them, and leave for others where too many roles are there.
    """
    total = sum(sizes)
    thread = engine = rewards = copies = 0.0
    resident: list[str] = []
    for operation in operations:
        share = sum(sizes[chunk] for chunk in operation.chunks) / total
        if operation.kind == "generate":
            if resources.apart:
                engine += costs.generate * share
                thread = max(thread, engine)
            else:
                thread += costs.generate * share
        elif operation.kind == "submit":
            rewards = max(rewards, thread) + costs.reward * share
        elif operation.kind == "score":
            if operation.role not in resident:
                resident = [*resident, operation.role][-resources.roles_at_once :]
                copies = (copies if resources.prefetch else thread) + costs.load.get(operation.role, 0.0)
                thread = max(thread, copies)
            thread += costs.score[operation.role] * share + costs.overhead
        elif operation.kind == "sleep" and not resources.can_score_between:
            copies = thread  # until then the engine had the memory
        elif operation.kind == "collect":
            thread = max(thread, rewards)
    return thread


def bound(costs: Costs, resources: Resources, num_chunks: int) -> float:
    """Seconds that no order of one rollout in so many equal chunks can beat: each resource must do all of its work, scoring and
    rewards cannot begin before the first chunk is there, and rewards of the last one not before the end of decoding. Where
    the engine has the device to itself, some role's params come when it sleeps, and nothing can be done meanwhile.
    """
    score = sum(costs.score.values()) + costs.overhead * len(costs.score)
    loads = [costs.load.get(role, 0.0) for role in costs.score]
    first = costs.generate / num_chunks
    after_decoding = costs.generate + costs.reward / num_chunks
    if resources.apart:
        thread = first + score
    elif resources.beside:
        thread = costs.generate + score
    else:
        thread = costs.generate + min(loads, default=0.0) + score
    return max(thread, first + costs.reward, after_decoding, sum(loads))


def choose_chunks(costs: Costs, resources: Resources, num_units: int) -> int:
    """How many chunks to cut the next rollout into: the fewest that come within 2 % of the fastest.

    num_units: prompts, or samples, that cannot be cut further.
    """
    times = {}
    for count in (count for count in CHUNK_COUNTS if count <= num_units):
        sizes = [(number + 1) * num_units // count - number * num_units // count for number in range(count)]
        operations = pipelined(list(costs.score), groups_of(count, resources), resources)
        times[count] = seconds(operations, sizes, costs, resources)
    best = min(times.values(), default=0.0)
    return next((count for count, spent in times.items() if spent * _WORTH <= best), 1)
