"""Swap of two trained roles, actor for critic and back, both ways at once, against a memcpy of the same bytes.

    bash scripts/bench/run.sh swap [--dtype bf16] [--repeats 7] [--parameters-m 80]      on a GPU: --parameters-m 1000

What is on the device has just been updated, so all of it goes to the host (params, main params, moments) while the other's
comes in. The limit: on a GPU, the slower of the two directions at the rate of a flat copy through page-locked memory, for its
link carries both at once; on a CPU, whose memory they share, one after the other. Also prints what is left on the device at the
end, on a GPU by the driver's own figure. Its last line is one JSON object.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

import torch
from offload import bench_arguments, memcpy, save_model, seconds, settings_for

from rlhf_mc.config import Optim


class Bench:
    """Both roles, the actor on the device."""

    def __init__(self, dtype: str, millions: float) -> None:
        from rlhf_mc.models.role import Role, build_role
        from rlhf_mc.offload import Ledger, ModelState, Part, Residency
        from rlhf_mc.parallel.world import join_world

        settings = settings_for(dtype)
        self.world = join_world(settings)
        self.on_gpu = self.world.device.type == "cuda"
        self.parts = Part.PARAMS | Part.MAIN_PARAMS | Part.OPTIMIZER
        self.residency = Residency(self.world, [], Ledger())
        self.models = []
        with tempfile.TemporaryDirectory() as directory:
            path = save_model(Path(directory), millions)
            for role, head in ((Role.ACTOR, "language"), (Role.CRITIC, "value")):
                self.models.append(build_role(role, head, path, settings, self.world, Optim()))
                self.residency.adopt(ModelState.of(self.models[-1]))
        self.role_bytes = [sum(self.residency.state(m.role).num_bytes(part) for part in self.parts) for m in self.models]

    def bring(self, position: int) -> None:
        """One role to the device; all else leaves it."""
        with self.residency.on_device(self.models[position].role, self.parts):
            pass

    def swap(self, leaves: int) -> tuple[float, dict[str, int]]:
        """(seconds, bytes by direction) of one swap of a role that has just been updated."""
        self.bring(leaves)
        self.residency.ledger.metrics()
        self.models[leaves].version += 1
        spent = seconds(lambda: self.bring(1 - leaves))
        moved = self.residency.ledger.moved()
        return spent, {d: sum(n for route, n in moved.items() if route.direction == d) for d in ("to_host", "to_device")}

    def memcpy_rates(self) -> dict[str, float]:
        """Bytes a second of flat copies of the larger role, in each direction, the device otherwise empty."""
        from rlhf_mc.offload.host_buffer import HostBuffer

        num_bytes = max(self.role_bytes)
        with self.residency.nobody_on_device():
            device = torch.ones(num_bytes, dtype=torch.uint8, device=self.world.device)
            host = HostBuffer(num_bytes, self.world.device, "limit").bytes.fill_(1)
            out = statistics.median(seconds(lambda: memcpy(host, device)) for _ in range(5))
            back = statistics.median(seconds(lambda: memcpy(device, host)) for _ in range(5))
        return {"to_host": num_bytes / out, "to_device": num_bytes / back}


def main() -> None:
    """Measures, prints, and the JSON line."""
    arguments = bench_arguments(__doc__)
    from rlhf_mc.offload.text import readable  # after the libraries under it were told to be quiet

    bench = Bench(arguments.dtype, arguments.parameters_m)
    bench.swap(0)
    measured, limits = [], []
    for i in range(arguments.repeats):
        spent, moved = bench.swap(i % 2)
        rates = bench.memcpy_rates()
        each_way = [num_bytes / rates[direction] for direction, num_bytes in moved.items()]
        measured.append(spent)
        limits.append(max(each_way) if bench.on_gpu else sum(each_way))
    median, limit = statistics.median(measured), statistics.median(limits)
    print(f"{arguments.dtype}, {bench.world.device.type}: {readable(moved['to_host'])} out, {readable(moved['to_device'])} in")
    print(f"swap {median:.3f} s, limit {limit:.3f} s ({'the slower direction' if bench.on_gpu else 'both directions, one memory'})")
    with bench.residency.nobody_on_device():
        print(bench.residency.residue())
    result = dict(name="swap", measured=median, limit=limit, ratio=limit / median, unit="s")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
