"""A plan for people to read: bars of device memory, tables of the rest."""

from __future__ import annotations

from dataclasses import asdict

from rlhf_mc.offload.text import aligned, readable
from rlhf_mc.plan.memory import OWNERS, DeviceMemory
from rlhf_mc.plan.plan import Plan

_WIDTH = 50
_LETTERS = dict(zip(OWNERS, "PGMOAWLSBEKNCR", strict=True))


def picture(plan: Plan) -> str:
    """All that a plan says."""
    parts = [_headline(plan), bars(plan), owners_table(plan), host_table(plan), moved_table(plan)]
    if plan.times is not None:
        parts += [times_table(plan), assumptions(plan)]
    return "\n\n".join(parts)


def _headline(plan: Plan) -> str:
    case, machine, parallel = plan.case, plan.case.machine, plan.case.settings.parallel
    where = f"{machine.num_gpus} ranks on the CPU of one host"
    if machine.device is not None:
        where = (
            f"{machine.num_gpus} x {machine.device.name} of {readable(machine.memory_bytes)}, nodes of {machine.gpus_per_node} with "
            f"{readable(machine.host_bytes)} of host memory: {machine.num_nodes}"
        )
    rollout, work = case.settings.rollout, case.workload
    apart = f", {rollout.engine_ranks} ranks apart" if case.is_apart else ""
    return (
        f"{where}\n"
        f"tensor {parallel.tensor}, context {parallel.context}, pipeline {parallel.pipeline}, data {case.data}; recompute "
        f"{case.settings.trainer.recompute}; rollout tensor {rollout.tensor_parallel}{apart}, KV cache {rollout.kv_cache_gib:g} GiB\n"
        f"{work.sequences} sequences of {work.prompt:g} + {work.response:g} tokens on average, {work.longest} at most"
    )


def bars(plan: Plan) -> str:
    """One bar a stage, as long as the device's memory; what sticks out beyond the mark does not fit."""
    limit = plan.case.machine.memory_bytes
    full = max(limit, plan.peak.total) if plan.case.machine.device is not None else plan.peak.total
    rows = plan.by_stage()
    width = max(len(row.stage) for row in rows)
    lines = ["device memory by stage, on the rank that holds most"]
    for row in rows:
        bar = _bar(row, full)
        mark = round(limit / full * _WIDTH)
        bar = bar.ljust(_WIDTH, ".")
        bar = bar if mark >= _WIDTH else f"{bar[:mark]}|{bar[mark:]}"
        peak = "  <- peak" if row is plan.peak else ""
        lines.append(f"{row.stage.ljust(width)}  {bar}  {readable(row.total)}{_rank(row)}{peak}")
    used = [owner for owner in OWNERS if any(owner in row.owners for row in rows)]
    legend = ", ".join(f"{_LETTERS[owner]} {owner}" for owner in used)
    return "\n".join([*lines, legend])


def _bar(row: DeviceMemory, full: int) -> str:
    bar, end = "", 0
    for owner in OWNERS:
        end += row.owners.get(owner, 0)
        bar += _LETTERS[owner] * (round(end / full * _WIDTH) - len(bar))
    return bar


def _rank(row: DeviceMemory) -> str:
    return " (engine rank)" if row.pipeline_stage is None else f" (pipeline stage {row.pipeline_stage})"


def owners_table(plan: Plan) -> str:
    """Bytes of every owner in every stage."""
    rows = plan.by_stage()
    used = [owner for owner in OWNERS if any(owner in row.owners for row in rows)]
    cells = [(owner, *(readable(row.owners[owner]) if owner in row.owners else "" for row in rows)) for owner in used]
    return aligned([("owner", *(row.stage for row in rows)), *cells, ("all", *(readable(row.total) for row in rows))])


def host_table(plan: Plan) -> str:
    """Bytes of one node by role and part."""
    rows = [(use, readable(num_bytes)) for use, num_bytes in plan.host.items()]
    limit = readable(plan.case.machine.host_bytes)
    return aligned([("host memory of a node", ""), *rows, ("all", f"{readable(plan.host_bytes)} of {limit}")])


def moved_table(plan: Plan) -> str:
    """Bytes of the rank that moves most."""
    moved = plan.moved
    rows = [
        ("states to the device", readable(moved.to_device)),
        ("states to the host", readable(moved.to_host)),
        ("gathered of shared host copies", readable(moved.gathered)),
        ("weight sync, received", readable(moved.sync_received)),
        ("weight sync, written", readable(moved.sync_written)),
    ]
    return aligned([("bytes a rank moves in an iteration", ""), *rows])


def times_table(plan: Plan) -> str:
    """Seconds by stage, with what passes wait for."""
    times = plan.times
    rows = []
    for name, seconds in times.stages.items():
        found, why = times.passes.get(name), ""
        if found is not None and seconds:
            shares = {"tensor": found.tensor, "context": found.context, "pipeline": found.bubble, "data": found.data}
            why = ", ".join(f"{what} {part / seconds:.0%}" for what, part in shares.items() if part / seconds >= 0.005)
        rows.append((name, f"{seconds:.4g}", f"{seconds / times.iteration:.0%}", why))
    total = ("iteration", f"{times.iteration:.4g}", "", f"{times.samples_per_second:.3g} samples a second, by these assumptions")
    return aligned([("stage", "seconds", "share", "of it spent on waiting for"), *rows, total])


def assumptions(plan: Plan) -> str:
    """What the plan believes without a source."""
    values = ", ".join(f"{name} {value:g}" for name, value in asdict(plan.case.assumed).items())
    return f"assumed (rlhf_mc/plan/machine.py says what each is): {values}"
