"""Serve: the whole life of a rank that only runs an engine (rollout.placement: separate). No megatron-core is loaded here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rlhf_mc.config import Settings
from rlhf_mc.data import load_tokenizer
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import read_shape
from rlhf_mc.models.precision import DTYPES
from rlhf_mc.parallel.exchange import Reshard
from rlhf_mc.parallel.grids import RolloutGrid, TrainingGrid
from rlhf_mc.parallel.job import Job, choose_device, start_distributed
from rlhf_mc.pipeline.control import BridgeError, Control
from rlhf_mc.pipeline.engine import Engine
from rlhf_mc.pipeline.engine_limits import stop_token_ids
from rlhf_mc.pipeline.nccl_wire import wire_over
from rlhf_mc.pipeline.server import EngineServer
from rlhf_mc.pipeline.weight_sync import plan_sync_apart
from rlhf_mc.reliability import Stopped, StopRequest, Watchdog
from rlhf_mc.tracking import StageClock, Trace


def take_place(settings: Settings) -> Job:
    """This rank's place in the job that torchrun's environment describes. A rank that only runs an engine has its whole life here, and
    the process ends.
    """
    job = Job.of(os.environ, settings.rollout.engine_ranks)
    if job.has_engine_only:
        serve(settings, job)
        sys.exit(0)  # not by way of leaving megatron's world, in which this rank never was
    return job


def serve(settings: Settings, job: Job) -> None:
    """Collective over all ranks of the job. Starts the engine, and obeys the trainer until it stops."""
    actor, rollout, trainer, dtype = settings.actor.path, settings.rollout, settings.trainer, DTYPES[settings.trainer.dtype]
    stops = stop_token_ids(actor, load_tokenizer(actor, trainer.trust_remote_code).eos_token_id)
    device = choose_device(trainer.device, job.local_rank)
    bridge = start_distributed(job, device)
    StopRequest.that_listens(bridge.is_over)
    grid = RolloutGrid.apart(job.num_engines, job.rank - job.num_trainers, rollout.tensor_parallel)
    training = TrainingGrid.of(settings.parallel, job.num_trainers, 0)
    shape = read_shape(actor, "actor.path")
    heads = HeadsShape.if_enabled(settings.medusa, shape)
    plan = plan_sync_apart(shape, training, grid, dtype.itemsize, heads)
    reshard = Reshard(plan, wire_over(bridge, device), device, dtype)
    engine = Engine(actor, rollout, trainer.dtype, grid, trainer.seed, settings.data.max_prompt_tokens, stops, heads)
    trace = Trace(trainer.trace_iterations)
    clock = StageClock(device, trace)
    stacks = Path(trainer.output_dir, "stacks", f"rank{job.rank:05d}.txt")
    try:
        with Watchdog(settings.watchdog, job.rank, clock.waiting, trace.last, stacks, waits_between=True):
            EngineServer(engine, grid, reshard, Control(bridge), clock, trace).serve()
    except BridgeError as error:
        if bridge.is_over():
            raise Stopped from error
        raise
    except Exception as error:
        error.add_note(f"on rank {job.rank}, an engine's, in stage {clock.failed_in}")
        raise
    finally:
        trace.write(Path(trainer.output_dir, "trace", f"rank{job.rank}.json"), job.rank)
    engine.close()  # after an error the process ends without it: an engine whose peers are gone may hang
