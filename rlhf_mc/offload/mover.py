"""Mover: carries out a swap, storage by storage, both ways at once, within a limit of device memory."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch

from rlhf_mc.models.role import Role
from rlhf_mc.offload.arena import Arena
from rlhf_mc.offload.holding import Holding, Piece
from rlhf_mc.offload.lanes import Copied, lanes
from rlhf_mc.offload.ledger import Ledger
from rlhf_mc.offload.parts import ON_DEVICE, Part

if TYPE_CHECKING:
    from rlhf_mc.tracking import Trace


class Mover:
    """peak_bytes: the most bytes that all storages on the device ever had together.

    The trace gets what each role has there, in bytes, as the counters device/ROLE.
    """

    def __init__(self, device: torch.device, ledger: Ledger, trace: Trace | None = None) -> None:
        self._to_host, self._to_device = lanes(device, trace)
        self._ledger = ledger
        self._trace = trace
        self._departures: deque[tuple[Role, Arena, Copied]] = deque()
        self._present: Counter[Role] = Counter()
        self.peak_bytes = 0

    @property
    def present_bytes(self) -> int:
        """Bytes of all storages on the device now."""
        return self._present.total()

    def adopt(self, holdings: Iterable[Holding]) -> None:
        """Parts that are on the device, and not known yet."""
        for holding in holdings:
            self._changed(holding.role, holding.num_bytes)

    def swap(self, leaving: list[Holding], coming: list[Holding], limit_bytes: int, derive: Collection[Role] = ()) -> None:
        """Sends `leaving` off the device and brings `coming`, within `limit_bytes`, which must be enough for the end state.

        Returns when all that leaves is off; what comes may still be in flight (Holding.in_flight).
        `derive`: of these roles, params that main params can give back get memory only; the caller fills it
        (ModelState.rebuild_params).
        """
        for holding in leaving:
            holding.finish()
            if not holding.needs_copy:
                self._free(holding)
        for holding in leaving:
            if holding.resident:
                self._queue_departure(holding)
        for holding in coming:
            self._queue_arrival(holding, limit_bytes, holding.role in derive)
        while self._departures:
            self._finish_departure()

    def _free(self, holding: Holding) -> None:
        if holding.part is Part.GRADS:
            holding.state.drop_gradients()
        for arena in holding.arenas:
            self._release(holding.role, arena)
        holding.resident = False

    def _queue_departure(self, holding: Holding) -> None:
        for piece in holding.pieces():
            copied = self._to_host.copy(piece.host, piece.share(holding.shared_by), holding.labels)
            self._ledger.record(holding.role, holding.part, "to_host", piece.host.nbytes, copied)
            self._departures.append((holding.role, piece.arena, copied))
        holding.copied_version = holding.state.model.version
        holding.resident = False

    def _queue_arrival(self, holding: Holding, limit_bytes: int, derive: bool) -> None:
        for piece in holding.pieces():
            while self._departures and self.present_bytes + piece.arena.num_bytes > limit_bytes:
                self._finish_departure()
            piece.arena.restore()
            self._changed(holding.role, piece.arena.num_bytes)
            if piece.host is None:
                holding.in_flight.append(self._to_device.zero(piece.arena.bytes(), holding.labels))
            elif not (derive and piece.arena.key in holding.state.derived):
                self._queue_copy(holding, piece)
        # What was off the device cannot have changed, whatever became of the role's other parts.
        holding.copied_version = holding.state.model.version
        holding.resident = True

    def _queue_copy(self, holding: Holding, piece: Piece) -> None:
        copied = self._to_device.copy(piece.share(holding.shared_by), piece.host, holding.labels)
        self._ledger.record(holding.role, holding.part, "to_device", piece.host.nbytes, copied)
        holding.in_flight.append(copied)
        if holding.shared_by is not None:
            holding.to_gather.append(piece)

    def _finish_departure(self) -> None:
        role, arena, copied = self._departures.popleft()
        copied.finish()
        self._release(role, arena)

    def _release(self, role: Role, arena: Arena) -> None:
        arena.release()
        self._changed(role, -arena.num_bytes)

    def _changed(self, role: Role, num_bytes: int) -> None:
        self._present[role] += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.present_bytes)
        if self._trace is not None:
            self._trace.counter(f"{ON_DEVICE}{role.value}", self._present[role])
