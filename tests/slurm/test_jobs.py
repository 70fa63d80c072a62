"""The tiny recipe as jobs of a real Slurm: two at once on one node; one is told to leave in mid-run, is requeued, and goes on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from slurm import cluster as slurm
from slurm.cluster import Cluster, running_cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing()))]

ROOT = Path(__file__).parents[2]
ITERATIONS = 6
# The two models that PPO starts from need not be good.
SHORT = (f"trainer.iterations={ITERATIONS}", "supervised.max_steps=4", "data.validation=[]", "trainer.evaluate_every=0")


@dataclass(frozen=True)
class JobOfTheRecipe:
    """A submitted job, and where it writes."""

    cluster: Cluster
    number: str
    directory: Path

    @property
    def log(self) -> str:
        """Output of the batch script, of all attempts."""
        path = self.directory / "slurm.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for_text(self, text: str, timeout_seconds: float) -> None:
        """Until the job's log has it."""
        deadline = time.monotonic() + timeout_seconds
        while text not in self.log:
            state = self.cluster.job(self.number)["JobState"]
            assert state in ("PENDING", "RUNNING") and time.monotonic() < deadline, f"{state}, no {text!r} in:\n{self.log}"
            time.sleep(0.2)

    def finish(self, timeout_seconds: float) -> None:
        """Until it is over, and well."""
        job = self.cluster.wait_for(self.number, {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}, timeout_seconds)
        assert job["JobState"] == "COMPLETED", f"{job['JobState']}:\n{self.log}"

    def attempts(self) -> list[str]:
        """The folders of rank output, one for each attempt."""
        return sorted(path.name for path in (self.directory / "logs" / self.number).iterdir())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), cpus=2) as running:
        yield running


def submit(cluster: Cluster, directory: Path, *options: str) -> JobOfTheRecipe:
    """One rank on one processor."""
    directory.mkdir()
    environment = {
        "NPROC": "1",
        "OMP_NUM_THREADS": "1",
        "RUN_DIR": str(directory / "run"),
        "LOG_ROOT": str(directory / "logs"),
        "RLHF_MC_VENV": sys.prefix,
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    }
    wanted = ["--cpus-per-task=1", f"--output={directory / 'slurm.log'}", *options]
    script = ROOT / "scripts" / "submit_ppo_tiny.sbatch"
    return JobOfTheRecipe(cluster, cluster.submit(script, *wanted, arguments=SHORT, directory=ROOT, **environment), directory)


def test_a_job_that_is_told_to_leave_goes_on_and_ends_as_one_that_was_not(cluster: Cluster, tmp_path: Path) -> None:
    straight, broken = (submit(cluster, tmp_path / name) for name in ("straight", "broken"))
    broken.wait_for_text("PPO", 240)
    broken.wait_for_text("iteration 2", 240)
    assert cluster.job(straight.number)["JobState"] == "RUNNING", "both at once on the node"
    cluster.command("scancel", "--signal=USR1", "--batch", broken.number)
    broken.wait_for_text("goes back into the queue", 120)
    straight.finish(400)
    broken.finish(400)

    assert (straight.attempts(), broken.attempts()) == (["attempt_0"], ["attempt_0", "attempt_1"])
    assert cluster.job(broken.number)["Restarts"] == "1"
    runs = [job.directory / "run" / "ppo" for job in (straight, broken)]
    for role in ("actor", "critic"):
        weights = [(run / role / "model.safetensors").read_bytes() for run in runs]
        assert weights[0] == weights[1], f"{role} is not that of the job that ran straight through"
    assert len((runs[1] / "metrics.jsonl").read_text().splitlines()) == ITERATIONS
    # Both lifetimes of the one wandb run, under one id; and models that the first attempt had made were not made again.
    run_id = (runs[1] / "wandb_run_id").read_text().strip()
    assert [path.name.endswith(run_id) for path in (runs[1] / "wandb").glob("offline-run-*")] == [True, True]
    assert broken.log.count("was made before") == 3
