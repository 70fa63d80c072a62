"""A real Slurm cluster of one node on loopback: munged, slurmctld and slurmd of Debian's slurm-wlm, in a directory of its own.

Ports, sockets and state are the cluster's own, so that it collides with no Slurm that the host may have. Needs root, as slurmd does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
_START_SECONDS = 30.0
_CONFIG = """\
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobRequeue=1
KillWait=30
NodeName={host} NodeAddr=127.0.0.1 NodeHostname={host} CPUs={cpus} State=UNKNOWN
PartitionName=cpu Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None where it can."""
    if os.geteuid() != 0:
        return "slurmd needs root"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    return f"{', '.join(lacking)} not installed: apt-get install slurm-wlm munge" if lacking else None


def _path() -> str:
    return os.environ["PATH"] + ":/usr/sbin:/sbin"


def _free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(num)]
        return [s.getsockname()[1] for s in sockets]


@dataclass(frozen=True)
class Cluster:
    """Where it keeps its files, and the environment in which Slurm's commands find it."""

    directory: Path
    environment: Mapping[str, str]

    def command(self, *arguments: str, **environment: str) -> str:
        """Standard output of one of Slurm's commands. Raises where it fails, with what it said."""
        done = subprocess.run(arguments, env={**self.environment, **environment}, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def submit(self, script: Path, *options: str, arguments: tuple[str, ...] = (), directory: Path, **environment: str) -> str:
        """The number of a new job, submitted from `directory`."""
        wanted = ["sbatch", "--parsable", f"--chdir={directory}", *options, str(script), *arguments]
        return self.command(*wanted, **environment).strip().split(";")[0]

    def job(self, number: str) -> dict[str, str]:
        """What the controller knows of a job."""
        words = self.command("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, number: str, states: set[str], timeout_seconds: float) -> dict[str, str]:
        """The job, once it is in one of `states`. Raises where it is not in time."""
        deadline = time.monotonic() + timeout_seconds
        while (job := self.job(number))["JobState"] not in states:
            assert time.monotonic() < deadline, f"job {number} is {job['JobState']} ({job['Reason']}), not {states}"
            time.sleep(0.5)
        return job


def _wait_until_up(cluster: Cluster, host: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        shown = subprocess.run(["scontrol", "show", "node", host], env=cluster.environment, capture_output=True, text=True)
        if "State=IDLE" in shown.stdout:
            return
        time.sleep(0.3)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(cluster.directory.glob("*.log")))
    raise RuntimeError(f"Slurm's node is not up after {_START_SECONDS:.0f} s:\n{shown.stdout}{shown.stderr}\n{logs}")


@contextmanager
def running_cluster(directory: Path, cpus: int) -> Iterator[Cluster]:
    """A node of `cpus` processors, up; at the end its jobs are cancelled and its daemons stopped."""
    host = socket.gethostname().split(".")[0]
    controller_port, node_port = _free_ports(2)
    for name in ("state", "spool"):
        (directory / name).mkdir()
    key, config = directory / "munge.key", directory / "slurm.conf"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    config.write_text(
        _CONFIG.format(host=host, directory=directory, controller_port=controller_port, node_port=node_port, cpus=cpus)
    )
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(config)}
    files = [f"--{kind}-file={directory}/munge.{kind}" for kind in ("key", "pid", "seed", "log")]
    daemons = [
        ["munged", "--foreground", "--force", f"--socket={directory}/munge.socket", *files],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-c", "-N", host],
    ]
    cluster = Cluster(directory, environment)
    with ExitStack() as stack:
        for daemon in daemons:
            stack.enter_context(_running(daemon, environment, directory / f"{daemon[0]}.output.log"))
        _wait_until_up(cluster, host)
        yield cluster
        subprocess.run(["scancel", "--user=root", "--full"], env=environment, timeout=30)
        deadline = time.monotonic() + 20
        while cluster.command("squeue", "--noheader").strip() and time.monotonic() < deadline:
            time.sleep(0.3)


@contextmanager
def _running(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    with log.open("w") as output:
        process = subprocess.Popen(command, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
