"""PPO: torchrun -m rlhf_mc.train --config FILE [key=value ...]. The loop below is the algorithm; each line of it is a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_mc.launch import run_program

if TYPE_CHECKING:
    from rlhf_mc.config import Settings


def ppo(settings: Settings) -> None:
    """Collective over all ranks: the whole run. With rollout.placement=separate the last ranks only run engines."""
    # Imported here, after the settings were checked: vLLM and megatron-core take many seconds.
    from rlhf_mc.stages.serve import take_place

    job = take_place(settings)  # before megatron-core, which an engine's rank does without

    from rlhf_mc.stages.checkpoint import begin, save_checkpoint
    from rlhf_mc.stages.dump import dump
    from rlhf_mc.stages.evaluate import evaluate, sample_rows
    from rlhf_mc.stages.export import export
    from rlhf_mc.stages.finish import finish
    from rlhf_mc.stages.leave import leaves_when_asked
    from rlhf_mc.stages.make_experience import make_experience
    from rlhf_mc.stages.metrics import iteration_metrics
    from rlhf_mc.stages.replay import replay
    from rlhf_mc.stages.start import start_ppo
    from rlhf_mc.stages.sync_weights import sync_weights
    from rlhf_mc.stages.train import train

    trainer = settings.trainer
    with start_ppo(settings, job) as run, leaves_when_asked(run):
        before = begin(run)
        for iteration in range(run.origin.iteration, trainer.iterations):
            metrics: dict[str, float] = {}
            if trainer.generates:
                metrics |= sync_weights(run)
                experience = make_experience(run, iteration)
                dump(run, experience, iteration)
            else:
                experience = replay(run, iteration)
            if trainer.trains:
                metrics |= train(run, experience, iteration)
            if trainer.evaluate_every and (iteration + 1) % trainer.evaluate_every == 0:
                metrics |= evaluate(run, iteration + 1)
            run.tracker.samples(iteration, sample_rows(run, experience), show=iteration == 0)
            metrics |= iteration_metrics(run, experience)
            run.tracker.log(iteration, metrics)
            export(run, iteration + 1)
            save_checkpoint(run, iteration + 1, metrics)
        finish(run, before, after=evaluate(run, trainer.iterations))


if __name__ == "__main__":
    run_program("train", ppo)
