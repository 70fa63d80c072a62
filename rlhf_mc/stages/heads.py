"""Draft heads alone, on samples of a finished model: torchrun -m rlhf_mc.stages.heads --config FILE [key=value ...]

The actor is frozen (Medusa-1, arXiv:2401.10774): it answers data.train by the engine, which drafts with the heads as they are by
then, and the heads learn from the hidden states of its answers, as in PPO. No reference, critic or rewards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_mc.launch import run_program

if TYPE_CHECKING:
    from rlhf_mc.config import Settings


def heads(settings: Settings) -> None:
    """Collective over all ranks: the whole program. With rollout.placement=separate the last ranks only run engines."""
    # Imported here, after the settings were checked: vLLM and megatron-core take many seconds.
    from rlhf_mc.stages.serve import take_place

    job = take_place(settings)  # before megatron-core, which an engine's rank does without

    from rlhf_mc.stages.draft_heads import finish_heads
    from rlhf_mc.stages.leave import leaves_when_asked
    from rlhf_mc.stages.make_experience import make_samples
    from rlhf_mc.stages.metrics import run_metrics
    from rlhf_mc.stages.start import start_ppo
    from rlhf_mc.stages.sync_weights import sync_weights
    from rlhf_mc.stages.train import train_heads_alone
    from rlhf_mc.tracking import sampling_metrics

    with start_ppo(settings, job) as run, leaves_when_asked(run):
        learned: list[dict[str, float]] = []
        for iteration in range(settings.trainer.iterations):
            metrics = sync_weights(run)
            rollout, logprobs = make_samples(run, iteration)
            learned.append(train_heads_alone(run, iteration))
            metrics |= learned[-1] | sampling_metrics(rollout, logprobs) | run_metrics(run, rollout)
            run.tracker.log(iteration, metrics)
            run.done = iteration + 1
        finish_heads(run, learned)


if __name__ == "__main__":
    run_program("heads", heads)
