"""What the tests of stages/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch, Optim, Parallel, Settings, Supervised, Trainer
from rlhf_mc.models.passes import score
from rlhf_mc.parallel.world import World
from rlhf_mc.stages.metrics import straggler_metrics
from rlhf_mc.stages.reward_model import preferences
from rlhf_mc.stages.supervised import build_learner


def stragglers(world: World) -> dict[str, float]:
    """Of ranks that take 1, 2, ... seconds to score, and as long as each other to train."""
    return straggler_metrics(world, {"timing_s/score": 1.0 + world.rank, "timing_s/train": 3.0, "perf/throughput": 1.0})


def trained_reward_model(world: World, directory: str, batch: SequenceBatch, num_steps: int, output: str) -> Tensor:
    """float32[B]: how the reward model that was trained on these pairs, and saved to `output`/model, scores them."""
    micro_batch = MicroBatch(tokens=64)
    section = Supervised(path=directory, optim=Optim(lr=1e-2, schedule="constant"), micro_batch=micro_batch)
    parallel = Parallel(tensor=world.grid.tensor, pipeline=world.grid.pipeline)
    settings = Settings(trainer=Trainer(device="cpu", dtype="fp32"), parallel=parallel, supervised=section)
    learner = build_learner(settings, preferences(), world, num_steps, print)
    for step in range(num_steps):
        learner.take_step(batch, step)
    learner.save(Path(output))
    return score(learner.model, batch, "last", micro_batch)
