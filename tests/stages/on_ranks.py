"""What the tests of stages/ run on ranks (see tests/ranks.py)."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

from torch import Tensor

from offload.on_ranks import actor_and_critic, one_step, residency_of
from rlhf_mc.batch import SequenceBatch
from rlhf_mc.config import MicroBatch, Optim, Parallel, Settings, Supervised, Trainer
from rlhf_mc.models.passes import score
from rlhf_mc.models.whole_directory import SaveError
from rlhf_mc.offload import TRAINING
from rlhf_mc.parallel.world import World
from rlhf_mc.stages.export import export
from rlhf_mc.stages.metrics import straggler_metrics
from rlhf_mc.stages.reward_model import preferences
from rlhf_mc.stages.supervised import build_learner
from rlhf_mc.tracking import StageClock


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


def exports(world: World, language: str, value: str, output: str) -> str:
    """Actor and critic are exported after 1, 2, 3 and 4 iterations, where it is time every 2; the disk is full at the last. The error."""
    models = actor_and_critic(world, language, value, "bf16", True)
    trainer = Trainer(output_dir=output, export_every=2, device="cpu")
    residency = residency_of(world, models)
    run = SimpleNamespace(
        settings=Settings(trainer=trainer), world=world, actor=models[0], critic=models[1], drafter=None, residency=residency,
        roles={model.role: model for model in models},
        clock=StageClock(world.device), tracker=SimpleNamespace(say=print),
    )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for done in (1, 2, 3, 4):
            for model in reversed(models):
                with residency.on_device(model.role, TRAINING):
                    one_step(model)
            if done == 4:
                assert residency.ledger.moved() == residency.ledger.minimum()
                resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, hard))
            export(run, done)
    except SaveError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return ""
