"""Finish: what was trained is written, and the run is summed up."""

from __future__ import annotations

from pathlib import Path

import torch

from rlhf_mc.stages.checkpoint import finish_checkpoint
from rlhf_mc.stages.dump import finish_dump
from rlhf_mc.stages.export import save_models
from rlhf_mc.stages.start import Run
from rlhf_mc.tracking import Comparison


def finish(run: Run, before: dict[str, float], after: dict[str, float]) -> None:
    """Collective over all ranks. What was trained, as directories for other programs; the ledger, the residue, before and after.

    The last dump and the last checkpoint are complete by then. Raises SaveError on every rank where rank 0 cannot write.
    """
    settings, output = run.settings, Path(run.settings.trainer.output_dir)
    finish_dump(run)
    finish_checkpoint(run)
    save_models(run, output)
    with run.residency.nobody_on_device():
        run.tracker.say(f"bytes moved by offload\n{run.residency.ledger.table()}")
        run.tracker.say(f"device of rank {run.world.rank} between stages\n{run.residency.residue()}")
    names = {name: None for name in (*before, *after)}
    rows = [Comparison(name.removeprefix("val/"), before.get(name), after.get(name)) for name in names]
    rows += [Comparison(label, first, last) for label, (first, last) in run.drafting.summary().items()]
    run.tracker.before_and_after("Held-out prompts, greedy" + (", and drafts" if run.drafting.summary() else ""), rows)
    peak = run.world.sum_over_ranks(torch.tensor([run.clock.host_peak_gib], dtype=torch.float64)).item()
    run.tracker.say(f"peak of host memory: {peak:.2f} GiB (resident, the peaks of all {run.world.size} ranks added)")
    run.tracker.goodput()
    models = f"{' and '.join(f'{role.value}/' for role in run.trained)} (Hugging Face), " if run.trained else ""
    models += "medusa/ (vLLM), " if models and run.drafter is not None else ""
    rollouts = "rollouts/, " if settings.dumps else ""
    run.tracker.say(f"results are in {output.resolve()}: {models}{rollouts}metrics.jsonl, samples.jsonl, summary.json")
