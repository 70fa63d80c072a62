"""Whether ranks that planned each by itself agree. Pure: each check takes plans, by rank, and gives what is wrong, one line a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rlhf_mc.models.roles import Role
from rlhf_mc.offload.minimum import RoleBytes, Route
from rlhf_mc.offload.text import readable
from rlhf_mc.parallel.microbatches import PlannedMicrobatch
from rlhf_mc.parallel.reshard import Block, Piece, Share, Shapes


def unmatched_slices(shares: Mapping[int, Sequence[Share]]) -> Iterator[str]:
    """Weight sync: what one rank sends to another in a bucket, the other receives there, in the same order, and nothing else.

    shares: of each bucket, by position in the sync, as each of them planned.
    """
    counts = {len(of_rank) for of_rank in shares.values()}
    if len(counts) > 1:
        yield f"weight sync: ranks count {sorted(counts)} buckets"
        return
    for number in range(counts.pop() if counts else 0):
        sends = {rank: _by_peer((block.target, block) for block in of_rank[number].sends) for rank, of_rank in shares.items()}
        receives = {rank: _by_peer((block.source, block) for block in of_rank[number].receives) for rank, of_rank in shares.items()}
        for source in shares:
            for target in shares:
                sent, received = sends[source].get(target, []), receives[target].get(source, [])
                if sent != received:
                    names = sorted({block.name for block in {*sent} ^ {*received}}) or ["the same slices in another order"]
                    yield (
                        f"weight sync: in bucket {number} position {source} sends {len(sent)} slices to {target}, which receives "
                        f"{len(received)} from there; they differ in {', '.join(names[:3])}"
                    )


def _by_peer(pairs: Iterable[tuple[int, Block]]) -> dict[int, list[Block]]:
    found: dict[int, list[Block]] = {}
    for peer, block in pairs:
        found.setdefault(peer, []).append(block)
    return found


def missing_slices(position: int, shares: Sequence[Share], wanted: Sequence[Piece], shapes: Shapes) -> Iterator[str]:
    """Weight sync: what a rank copies and receives is the whole of its engine's shard, each element once."""
    arriving: Counter[str] = Counter()
    for share in shares:
        for block in share.wanted:
            arriving[block.name] += block.numel
    expected: Counter[str] = Counter()
    for piece in wanted:
        expected[piece.name] += piece.numel(shapes[piece.name])
    for name in sorted(arriving.keys() | expected.keys()):
        if arriving[name] != expected[name]:
            yield f"weight sync: position {position} gets {arriving[name]} of the {expected[name]} elements of {name} that its engine needs"


def wrong_received(shares: Mapping[int, Sequence[Share]], received: Sequence[int], element_bytes: int) -> Iterator[str]:
    """Weight sync: each rank receives the bytes that the plan says of it, which the run prints beside the bound."""
    for position, of_rank in shares.items():
        counted = element_bytes * sum(block.numel for share in of_rank for block in share.receives)
        if counted != received[position]:
            yield f"weight sync: position {position} receives {readable(counted)}, planned are {readable(received[position])}"


def wrong_passes(name: str, plan: Sequence[Sequence[PlannedMicrobatch]], num_sequences: int, multiple: int) -> Iterator[str]:
    """Micro-batches of one pass: as many on every data-parallel rank, a multiple of `multiple`; each sequence once, fills aside.

    num_sequences: those numbered from 0 on are all there.
    """
    counts = {len(of_rank) for of_rank in plan}
    if len(counts) != 1:
        yield f"micro-batches: {name}: data-parallel ranks have {sorted(counts)} of them; collectives would hang"
    elif counts.pop() % multiple:
        yield f"micro-batches: {name}: their number is no multiple of {multiple}"
    times = Counter(sequence for of_rank in plan for one in of_rank if not one.fill for sequence in one.sequences)
    wrong = [sequence for sequence in range(num_sequences) if times[sequence] != 1]
    if wrong:
        yield f"micro-batches: {name}: {len(wrong)} of {num_sequences} sequences are not trained on once, the first is {wrong[0]}"


def wrong_hands(hands: Sequence[Sequence[int]], num_samples: int) -> Iterator[str]:
    """Prompts dealt to replicas: each sample once, and hands that differ by one at most."""
    times = Counter(sample for hand in hands for sample in hand)
    wrong = [sample for sample in range(num_samples) if times[sample] != 1]
    if wrong or len(times) != num_samples:
        yield f"prompts: {len(wrong)} of {num_samples} samples are not dealt once"
    if max(map(len, hands)) - min(map(len, hands)) > 1:
        yield f"prompts: hands of {min(map(len, hands))} to {max(map(len, hands))} samples"


def different(what: str, by_rank: Mapping[int, Any]) -> Iterator[str]:
    """What must be the same on every rank, is."""
    first, *others = by_rank
    for rank in others:
        if by_rank[rank] != by_rank[first]:
            yield f"{what}: rank {rank} has another one than rank {first}"


Groups = Mapping[str, tuple[int, ...]]


def wrong_groups(groups: Mapping[int, Groups], expected: Mapping[int, Groups]) -> Iterator[str]:
    """Process groups: as the grid has them, with this rank in them, and the same for each of their members that is known."""
    for rank, named in groups.items():
        for name, ranks in named.items():
            if rank not in ranks:
                yield f"groups: rank {rank} is not in its {name} group"
            if ranks != expected[rank].get(name, ranks):
                yield f"groups: rank {rank} has {list(ranks[:8])} as its {name} group, the grid says {list(expected[rank][name][:8])}"
            for other in ranks:
                if groups.get(other, named).get(name) != ranks:
                    yield f"groups: ranks {rank} and {other} differ in their {name} group"


def wrong_bytes(rank: int, built: Mapping[Role, RoleBytes], planned: Mapping[Role, RoleBytes]) -> Iterator[str]:
    """Memory: each part of each role has the bytes that the plan says."""
    for role in planned.keys() | built.keys():
        if built.get(role) != planned.get(role):
            yield f"memory: rank {rank}: {role.value} was built with {built.get(role)}, planned was {planned.get(role)}"


def wrong_moves(rank: int, moved: Mapping[Route, int], minimum: Mapping[Route, int]) -> Iterator[str]:
    """Offload: an iteration moves the least that its stages allow, by role, part and direction."""
    for route in moved.keys() | minimum.keys():
        if moved.get(route, 0) != minimum.get(route, 0):
            where = f"{route.role.value} {route.part.label} {route.direction}"
            yield f"offload: rank {rank}: {where}: {readable(moved.get(route, 0))} moved, the least is {readable(minimum.get(route, 0))}"
