"""A NaN in a gradient and a request to stop, in one run whose engine has a rank of its own. scripts/faults.py tries many more faults."""

from __future__ import annotations

import json
import signal

import psutil
import pytest
from end_to_end.job import Job, start
from end_to_end.task import written

from rlhf_mc.rollout_files import read_rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FAULTS = [{"stage": "update_critic", "iteration": 0, "rank": 0, "action": "nan gradient"}]


def listening(job: Job) -> set[str]:
    """The addresses at which ranks and their workers can be reached."""
    ranks = [psutil.Process(process.pid) for process in job.processes() if "LOCAL_RANK" in process.environment]
    return {connection.laddr.ip for rank in ranks for connection in rank.net_connections() if connection.status == psutil.CONN_LISTEN}


def test_a_bad_update_is_skipped_and_a_signal_ends_both_sides_with_a_checkpoint(task, tmp_path):
    out = tmp_path / "out"
    settings = task.overrides(out) | {
        "trainer.iterations": "100000",
        "trainer.save_every": "50000",
        "data.validation": "[]",
        "algorithm.mini_batch_sequences": "8",
        "rollout.placement": "separate",
        "rollout.engine_ranks": "1",
    }
    job = start(tmp_path / "log", "scripts.faulty_ppo", written(settings), environment={"FAULTS": json.dumps(FAULTS)})
    try:
        job.wait_for("     0 ", 200)
        assert listening(job) == {"127.0.0.1"}, "nobody on the network can speak to a rank of a job on one host"
        job.process.send_signal(signal.SIGUSR1)  # to the shell, as `sbatch --signal=B:USR1@...` does
        assert job.wait(60) == 1, "torchrun's own status"
    finally:
        job.seconds_until_gone(10)
    assert job.left_in_shared_memory() == []

    assert "guard: iteration 0: an update of the critic is skipped: the gradient norm is nan; rank 0: " in job.output, job.output
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    first, last, done = lines[0], lines[-1], len(lines)
    assert (first["guard/skipped_updates"], first["guard/skipped_in_a_row"], "nonfinite" in first) == (1, 0, False)
    assert first["critic/grad_norm"] > 0, "the second update of the iteration was good"
    header, experience = read_rollout(out / "bad_updates" / "000000.jsonl")
    assert header.iteration == 0 and len(experience) == 16

    assert f"stopped: the checkpoint after {done} iterations is in {out}/checkpoints" in job.output
    assert "SIGUSR1 on rank 0" in job.output and "rlhf_mc: train: error" not in job.output
    record = json.loads((out / "checkpoints" / f"{done:06d}" / "run.json").read_text())
    assert record["weight_version"] == done and record["metrics"]["critic/score/mean"] == last["critic/score/mean"]
