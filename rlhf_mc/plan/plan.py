"""The plan of one case: memory by stage and owner against the limits, bytes, times; and what is wrong where it does not fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rlhf_mc.config import ConfigError
from rlhf_mc.offload.text import readable
from rlhf_mc.plan.case import Case
from rlhf_mc.plan.engine import least_kv_cache_bytes
from rlhf_mc.plan.memory import DeviceMemory, all_device_memory, host_memory
from rlhf_mc.plan.movement import Moved, moved
from rlhf_mc.plan.times import Times, predicted_times


@dataclass(frozen=True)
class Plan:
    """device: every stage on every kind of rank.  host: of the node that holds most.  times: None for ranks on the CPU."""

    case: Case
    device: list[DeviceMemory]
    host: dict[str, int]
    moved: Moved
    times: Times | None

    @staticmethod
    def of(case: Case) -> Plan:
        """All of it. Raises ConfigError where the models cannot be split as asked."""
        for role, shape in case.shapes.items():
            shape.check_layout(case.settings.parallel, f"{role.value}.path")
        times = None if case.machine.device is None else predicted_times(case)
        return Plan(case, all_device_memory(case), host_memory(case), moved(case), times)

    @property
    def peak(self) -> DeviceMemory:
        """The stage and rank that hold most."""
        return max(self.device, key=lambda row: row.total)

    @property
    def host_bytes(self) -> int:
        """Of one node."""
        return sum(self.host.values())

    def by_stage(self) -> list[DeviceMemory]:
        """Of each stage the rank that holds most."""
        stages = dict.fromkeys(row.stage for row in self.device)
        return [max((row for row in self.device if row.stage == name), key=lambda row: row.total) for name in stages]

    def shortages(self) -> list[str]:
        """A sentence for each limit that is exceeded; none where all fits."""
        machine, found = self.case.machine, []
        over = self.peak.total - machine.memory_bytes
        if machine.device is not None and over > 0:
            parts = sorted(self.peak.owners.items(), key=lambda part: -part[1])[:3]
            largest = ", ".join(f"{owner} {readable(num_bytes)}" for owner, num_bytes in parts)
            found.append(
                f"device: {self.peak.stage} takes {readable(self.peak.total)} of {readable(machine.memory_bytes)}, {readable(over)} "
                f"too much; most of it is {largest}"
            )
        over = self.host_bytes - machine.host_bytes
        if over > 0:
            largest = max(self.host, key=self.host.__getitem__)
            found.append(
                f"host: a node takes {readable(self.host_bytes)} of {readable(machine.host_bytes)}, {readable(over)} too much; "
                f"most of it is {largest}, {readable(self.host[largest])}"
            )
        least = least_kv_cache_bytes(self.case) if self.case.settings.trainer.generates else 0
        if least > self.case.settings.rollout.kv_cache_gib * 2**30:
            found.append(
                f"rollout.kv_cache_gib: {self.case.settings.rollout.kv_cache_gib} GiB hold less than one sequence of "
                f"{self.case.workload.longest} tokens, which takes {readable(least)}"
            )
        return found

    def refuse_shortages(self) -> None:
        """Raises ConfigError with the shortages and a table of all owners where it does not fit."""
        shortages = self.shortages()
        if shortages:
            lines = [
                f"{row.stage}: {', '.join(f'{owner} {readable(num_bytes)}' for owner, num_bytes in row.owners.items())}"
                for row in self.by_stage()
            ]
            lines += [f"host, {use}: {readable(num_bytes)}" for use, num_bytes in self.host.items()]
            raise ConfigError("\n  ".join(["plan: this run does not fit here", *shortages, "in detail:", *lines]))

    def as_json(self) -> dict[str, Any]:
        """For programs: bytes and seconds, and the assumptions behind them."""
        case, parallel = self.case, self.case.settings.parallel
        return {
            "machine": asdict(case.machine),
            "layout": {
                "tensor": parallel.tensor,
                "context": parallel.context,
                "pipeline": parallel.pipeline,
                "data": case.data,
                "rollout_tensor": case.settings.rollout.tensor_parallel,
            },
            "workload": asdict(case.workload),
            "device_bytes": [{"stage": row.stage, "pipeline_stage": row.pipeline_stage, **row.owners} for row in self.device],
            "peak": {"stage": self.peak.stage, "pipeline_stage": self.peak.pipeline_stage, "bytes": self.peak.total},
            "host_bytes": self.host,
            "moved_bytes": asdict(self.moved),
            "seconds": None if self.times is None else self.times.stages | {"iteration": self.times.iteration},
            "samples_per_second": None if self.times is None else self.times.samples_per_second,
            "shortages": self.shortages(),
            "assumptions": asdict(case.assumed),
        }
