"""Residency: which parts of which roles are on the device. A stage asks with one `with` line; what must move, moves.

Three verbs, never mixed: offload (copy to the host, then free), reload (allocate, then copy back), free (drop).
Gradients are only ever freed. What the host has already is freed without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from rlhf_mc.models.role import Resident, Role
from rlhf_mc.offload.arena import storage_key
from rlhf_mc.offload.holding import Holding
from rlhf_mc.offload.layout import CHUNK_BYTES
from rlhf_mc.offload.ledger import Ledger
from rlhf_mc.offload.minimum import EMPTY, Visit
from rlhf_mc.offload.model_state import ModelState
from rlhf_mc.offload.mover import Mover
from rlhf_mc.offload.parts import TRAINING, Part
from rlhf_mc.offload.prefetch import Prefetch
from rlhf_mc.offload.residue import release_residue, residue, residue_table
from rlhf_mc.offload.text import aligned, readable
from rlhf_mc.parallel.world import World

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace

#: In which parts come: params are made from main params while the moments are still on their way.
_ORDER = (Part.MAIN_PARAMS, Part.PARAMS, Part.OPTIMIZER, Part.GRADS)


class ResidencyError(RuntimeError):
    """A request that cannot be met, or memory that is not where it should be. The message ends with the table of residents."""


class Residency:
    """The state machine of all roles' parts on this rank.

    Each part is on the device or off it. `on_device` claims the device for some parts of one role, or of several: they come, all
    others leave. Leaving the block moves nothing, so a role that the next block asks for again is still there, free of charge.
    A role may hold nothing on this rank (draft heads, off the last pipeline stage): any part of it can be asked for then.
    `enabled` false: everything stays on the device, which must hold it; requests are still checked.
    """

    def __init__(
        self,
        world: World,
        states: Iterable[ModelState],
        ledger: Ledger,
        enabled: bool = True,
        device_budget_bytes: int | None = None,
        shared_by: dist.ProcessGroup | None = None,
        schedule: Sequence[Visit] = (),
        trace: Trace | None = None,
    ) -> None:
        """No collective.

        device_budget_bytes: what all parts on the device may take together; None: as much as the largest request.
        shared_by: ranks that hold the same params (neighbours.py), each with a share of their host copy; None: it is kept whole.
        schedule: the visits of one iteration, as far as they are known; within the budget, the next one is prefetched.
        trace: gets the copies, the waits for them, and where a prefetch begins.
        """
        self.ledger = ledger
        self.enabled = enabled
        self._world = world
        self._budget = device_budget_bytes
        self._shared_by = shared_by
        self._states: dict[Role, ModelState] = {}
        self._holdings: dict[tuple[Role, Part], Holding] = {}
        self._trace = trace
        self._mover = Mover(world.device, ledger, trace)
        self._prefetch = Prefetch(schedule)
        self._claimed: Role | None = None
        for state in states:
            self.adopt(state)

    def adopt(self, state: ModelState) -> None:
        """Takes over a role's state, all of it on the device, and sends it to the host at once.

        So roles can be built one by one on a device that could not hold them all.
        """
        self._states[state.role] = state
        new = [Holding.of(state, part, self.enabled, self._shared_by) for part in TRAINING if state.arenas[part]]
        self._holdings |= {(holding.role, holding.part): holding for holding in new}
        self._mover.adopt(new)
        if self.enabled:
            self._mover.swap(leaving=new, coming=[], limit_bytes=self._mover.present_bytes)
        self.ledger.add_role(state.role, state.role_bytes().shared(self._shared_by.size() if self._shared_by else 1))

    @contextmanager
    def on_device(
        self, role: Role, parts: Part, following: Visit | None = None, beside: Visit | None = None
    ) -> Iterator[Resident]:
        """Inside, the device holds `parts` of `role`, and what is prefetched for the next visit. Gives the role's model.

        following: the next visit, where the caller knows better than the schedule.
        beside: what the device must hold too, a Visit(role, parts) of another role; its `updates` is not read.

        Collective over the copies of each shard: params are put together there where they are shared, or made from main params.
        Raises ResidencyError for a request that cannot be met, before anything moves; and at the end, if memory is not
        where it should be.
        """
        visit = Visit(role, parts, beside=beside)
        self._check_request(visit)
        if self.enabled:
            self._bring(visit.wanted())
            scheduled = self._prefetch.after(visit)
            self.expect(following or scheduled)
        before = self._versions()
        self._claimed = role
        try:
            yield self._states[role].model
        finally:
            self._claimed = None
        if self.enabled:
            updated = self._versions().items() - before.items()
            self.ledger.visited(visit.with_updates({updated_role for updated_role, _ in updated}))
        self.assert_as_expected()

    def expect(self, following: Visit | None) -> None:
        """Starts copies for a visit that will come, part by part, as long as they fit into the budget; without one, nothing."""
        if not self.enabled or self._budget is None or following is None:
            return
        wanted = following.wanted()
        for holding in self._in_order(wanted):
            made_later = holding.part is Part.PARAMS and (holding.role, Part.MAIN_PARAMS) in wanted and holding.state.derived
            if holding.resident or holding.part is Part.GRADS or made_later:
                continue
            if self._mover.present_bytes + holding.num_bytes <= self._budget:
                if self._trace is not None:
                    self._trace.instant(f"prefetch {holding.name}", "main", **holding.labels)
                self._mover.swap([], [holding], self._budget)

    @contextmanager
    def nobody_on_device(self) -> Iterator[None]:
        """Inside, the device holds no part of any role: its memory is the engine's, or whoever's. See all_off."""
        self.all_off()
        yield
        self.assert_as_expected()

    def all_off(self) -> None:
        """Empties the device of all roles, and gives the memory back to the driver, for the engine to take."""
        if self._claimed is not None:
            raise self._error(f"all_off: {self._claimed.value} is in use; leave its `with` block first")
        if self.enabled:
            self._bring(set())
            self.ledger.visited(EMPTY)
            release_residue(self._world.device)
        self.assert_as_expected()

    def sources(self, role: Role, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Where these params, main params and moments of the role can be read, from another thread too, until its next update.

        They are its host copies, with the device empty now; without offload, the tensors themselves. Where host copies are shared, the
        params come to the device, and are copied: collective over the data-parallel group then.
        """
        if not self.enabled:
            return [tensor.detach() for tensor in tensors]
        if self._shared_by is None:
            self.all_off()
            return [self._host_copy(role, tensor) for tensor in tensors]
        with self.on_device(role, Part.PARAMS):
            return [self._host_copy(role, tensor) for tensor in tensors]

    @contextmanager
    def rewriting(self, role: Role, tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """Collective over the copies of each shard. A place for each of these tensors: all that the role's optimizer steps, and its state.

        Inside, the caller sets all values there; at the end the role is what they say. The places are the role's host copies, with the
        device empty, for nothing need move that is about to be replaced. Without offload, and where host copies are shared, they are
        the tensors themselves.
        """
        state = self._states[role]
        if not self.enabled or self._shared_by is not None:
            with self.on_device(role, Part.PARAMS | Part.MAIN_PARAMS | Part.OPTIMIZER) as model:
                yield [tensor.detach() for tensor in tensors]
                state.rebuild_params()
                model.version += 1
            return
        self.all_off()
        yield [self._host_copy(role, tensor) for tensor in tensors]
        if not state.makes_params:
            state.model.version += 1
            return
        with self.on_device(role, Part.PARAMS | Part.MAIN_PARAMS) as model:
            if not state.derived:  # else they were made from the new main params on their way to the device
                state.rebuild_params()
            model.version += 1

    def _host_copy(self, role: Role, tensor: Tensor) -> Tensor:
        """The place of `tensor` in the role's host copies; a copy of it, if it is on the device."""
        holdings = (holding for key, holding in self._holdings.items() if key[0] is role)
        piece = next(piece for holding in holdings for piece in holding.pieces() if piece.arena.key == storage_key(tensor))
        if piece.arena.present:
            return tensor.detach().to("cpu", copy=True)
        start = tensor.storage_offset() * tensor.element_size()
        return piece.host[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def assert_as_expected(self) -> None:
        """Compares every storage with what should be there. Raises ResidencyError with the table where they differ."""
        for holding in self._holdings.values():
            found = sum(arena.num_bytes for arena in holding.arenas if arena.present)
            if found != (holding.num_bytes if holding.resident else 0):
                where = "on the device" if holding.resident else "off the device"
                raise self._error(
                    f"{holding.name} should be {where}, but {found} of its {holding.num_bytes} bytes are there; "
                    "something else than Residency freed or allocated it"
                )
        for state in self._states.values():
            state.check_wiring()

    def state(self, role: Role) -> ModelState:
        """The flat state of a role."""
        return self._states[role]

    @property
    def resident_bytes(self) -> int:
        """Bytes of all parts that are on the device."""
        return sum(holding.num_bytes for holding in self._holdings.values() if holding.resident)

    @property
    def host_bytes(self) -> int:
        """Bytes of all host copies of this rank."""
        return sum(holding.host.num_bytes for holding in self._holdings.values() if holding.host)

    @property
    def peak_bytes(self) -> int:
        """Most bytes of parts that were on the device at once, swaps included."""
        return self._mover.peak_bytes

    def residue(self) -> str:
        """What the device holds now, by owner, for people to read."""
        return residue_table(residue(self.resident_bytes, self.host_bytes, self._world.device))

    def table(self) -> str:
        """Every part with its size and place."""
        rows = [("role", "part", "bytes", "place")]
        rows += [(h.role.value, h.part.label, readable(h.num_bytes), h.place) for h in self._holdings.values()]
        return aligned(rows)

    def _error(self, message: str) -> ResidencyError:
        return ResidencyError(f"{message}\n{self.table()}")

    def _check_request(self, visit: Visit) -> None:
        claims = list(visit.claims())
        asked = f"on_device({' beside '.join(f'{claim.role.value}, {claim.parts.label}' for claim in claims)})"
        if self._claimed is not None:
            raise self._error(f"{asked}: {self._claimed.value} is in use; leave its `with` block first")
        if len({claim.role for claim in claims}) < len(claims):
            raise self._error(f"{asked}: a role is asked for twice; name it once, with all parts that are needed")
        for claim in claims:
            self._check_claim(asked, claim.role, claim.parts)
        self._check_budget(asked, visit.wanted())

    def _check_claim(self, asked: str, role: Role, parts: Part) -> None:
        if role not in self._states:
            raise self._error(f"{asked}: no such role here")
        state = self._states[role]
        if state.is_frozen and parts & ~Part.PARAMS:
            raise self._error(f"{asked}: {role.value} is frozen and has params only; ask for Part.PARAMS")
        if parts & ~Part.PARAMS and not parts & Part.PARAMS:
            raise self._error(f"{asked}: these parts are of no use without params; add Part.PARAMS")
        if Part.OPTIMIZER in parts and Part.MAIN_PARAMS not in parts:
            raise self._error(f"{asked}: a step needs the main params too; add Part.MAIN_PARAMS, or ask for TRAINING")

    def _check_budget(self, asked: str, wanted: set[tuple[Role, Part]]) -> None:
        needed = sum(holding.num_bytes for key, holding in self._holdings.items() if not self.enabled or key in wanted)
        if self._budget is not None and needed > self._budget:
            raise self._error(
                f"{asked}: needs {readable(needed)} on the device, but the budget is {readable(self._budget)}; raise "
                "offload.device_budget_gib, split the model further (parallel.tensor, parallel.pipeline), or take a smaller one"
            )

    def _bring(self, wanted: set[tuple[Role, Part]]) -> None:
        """Makes exactly `wanted` resident; compute that follows sees it."""
        asked = self._in_order(wanted)
        leaving = [h for key, h in self._holdings.items() if h.resident and key not in wanted]
        coming = [h for h in asked if not h.resident]
        for holding in leaving:
            if holding.part is Part.GRADS and holding.state.model.accumulating:
                raise self._error(
                    f"{holding.name}: gradients were accumulated and not used yet; call update() or zero_gradients() "
                    "before another role takes the device"
                )
        derive = {role for role, part in wanted if part is Part.MAIN_PARAMS}
        self._mover.swap(leaving, coming, self._swap_limit(leaving, coming), derive)
        for holding in asked:
            holding.before_compute()
            if holding.role in derive and holding.part is Part.PARAMS and holding in coming and holding.state.derived:
                holding.state.rebuild_params()

    def _in_order(self, wanted: set[tuple[Role, Part]]) -> list[Holding]:
        """Those of `wanted` that have memory here, in the order in which they come: alike on all ranks that hold the same."""
        return [h for part in _ORDER for key, h in self._holdings.items() if key[1] is part and key in wanted]

    def _versions(self) -> dict[Role, int]:
        return {role: state.model.version for role, state in self._states.items()}

    def _swap_limit(self, leaving: list[Holding], coming: list[Holding]) -> int:
        """The larger of before and after, plus one bucket: so both directions flow at once, and a swap costs no more."""
        freed = sum(h.num_bytes for h in leaving if not h.needs_copy)
        copied = sum(h.num_bytes for h in leaving if h.needs_copy)
        before = self._mover.present_bytes - freed
        after = before - copied + sum(h.num_bytes for h in coming)
        buckets = [arena.num_bytes for h in coming for arena in h.arenas if arena.num_bytes <= CHUNK_BYTES]
        limit = max(before, after) + max(buckets, default=0)
        return limit if self._budget is None else min(limit, self._budget)
