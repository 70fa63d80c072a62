"""What a checkpoint adds to an iteration while it is written beside the next one, and how fast it is read back.

    bash scripts/bench/run.sh checkpoint MODEL_DIR [--dtype fp32] [--repeats 7] [--directory DIR] [key=value ...]

PPO of the model in all four roles on one rank, 32 samples of 16 + 128 tokens. Iterations with a checkpoint and without take turns; both are
counted from the start of an iteration to its end, the saving begun at the end of the one before, so that all that it costs is inside: taking
the states, the writer beside generation and scoring, and waiting for it before the update.
  limit, saving   a plain write of the same bytes to the same directory, flushed. Where that takes longer than generation and scoring, the
                  disk does not keep up, and the rest is waited for.
  limit, loading  a plain read of the same files, one by one. Loading verifies every hash first, as a resume does, and then reads
                  them again, from the page cache where they fit. Nothing is in it before.
Its last line is one JSON object: what a checkpoint adds, as a share of an iteration.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from step import FixedPrompts, settings_for

from rlhf_mc.launch import quiet_libraries, use_share_of_cores
from rlhf_mc.models.hf_config import read_shape

RESPONSE_TOKENS = 128
_CHUNK_BYTES = 16 << 20


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def forget(directory: Path) -> None:
    """The page cache lets go of the files, which must be durable."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_plainly(path: Path, num_bytes: int) -> None:
    """One file, flushed to the disk."""
    part = os.urandom(_CHUNK_BYTES)
    with path.open("wb") as file:
        for start in range(0, num_bytes, len(part)):
            file.write(part[: num_bytes - start])
        file.flush()
        os.fsync(file.fileno())


def read_plainly(directory: Path) -> None:
    """Every file, into one buffer."""
    buffer = bytearray(_CHUNK_BYTES)
    for path in directory.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def measure(model: str, dtype: str, repeats: int, directory: str | None, overrides: list[str]) -> dict:
    """Runs the iterations and prints the tables; the JSON object of the last line."""
    from rlhf_mc.checkpoint import find_origin
    from rlhf_mc.parallel.job import Job
    from rlhf_mc.parallel.world import leave_world
    from rlhf_mc.stages.checkpoint import begin, finish_checkpoint, save_checkpoint
    from rlhf_mc.stages.make_experience import make_experience
    from rlhf_mc.stages.start import checkpoints_of, start_ppo
    from rlhf_mc.stages.sync_weights import sync_weights
    from rlhf_mc.stages.train import train

    times: dict[bool, list[float]] = {False: [], True: []}
    beside, writes, verifies, loads, reads = [], [], [], [], []
    with tempfile.TemporaryDirectory(dir=directory) as output:
        longer = [f"rollout.max_tokens={RESPONSE_TOKENS}", f"rollout.min_tokens={RESPONSE_TOKENS}", "trainer.save_every=1"]
        settings = settings_for(model, dtype, output, [*longer, *overrides])
        with start_ppo(settings, Job.of(os.environ)) as run:
            run.sources = replace(run.sources, prompts=FixedPrompts(read_shape(model).vocab))
            for iteration in range(2 * (repeats + 1)):
                saves = iteration % 2 == 1
                start = time.perf_counter()
                if saves:
                    save_checkpoint(run, iteration, {})
                sync_weights(run)
                experience = make_experience(run, iteration)
                before_update = time.perf_counter() - start
                train(run, experience, iteration)
                spent = time.perf_counter() - start
                finish_checkpoint(run)
                if iteration > 1:
                    times[saves].append(spent)
                    beside += [] if saves else [before_update]
            newest = max(path for path in checkpoints_of(settings).iterdir() if path.is_dir())
            num_bytes = sum(path.stat().st_size for path in newest.iterdir())
            run.residency.all_off()
            for _ in range(repeats):
                writes.append(seconds(lambda: write_plainly(Path(output, "plain"), num_bytes)))
                Path(output, "plain").unlink()
                forget(newest)
                reads.append(seconds(lambda: read_plainly(newest)))
                forget(newest)

                def verify() -> None:
                    run.origin = find_origin(run.world, checkpoints_of(settings), "auto", settings.trainer.iterations)

                verifies.append(seconds(verify))
                loads.append(verifies[-1] + seconds(lambda: begin(run)))
        leave_world()
    without, with_one = (statistics.median(times[saves]) for saves in (False, True))
    write, read, verified, load_seconds, free = map(statistics.median, (writes, reads, verifies, loads, beside))
    gib = num_bytes / 2**30
    print(f"{dtype}, checkpoint of {gib:.2f} GiB; medians of {repeats}")
    print(f"iteration without: {without:.2f} s, of these before the update {free:.2f} s; with a checkpoint: {with_one:.2f} s")
    print(f"plain write: {write:.2f} s, {gib / write:.2f} GiB/s; the disk {'keeps' if write <= free else 'does not keep'} up")
    loaded = f"verified: {verified:.2f} s; verified and loaded: {load_seconds:.2f} s, {gib / load_seconds:.2f} GiB/s"
    print(f"plain read: {read:.2f} s, {gib / read:.2f} GiB/s; {loaded}")
    added = (with_one - without) / without
    return {
        "name": "checkpoint", "measured": round(added, 4), "limit": 0.1, "ratio": round(added, 4), "unit": "of an iteration",
        "keeps_up": write <= free, "load_over_read": round(read / load_seconds, 3), "gib": round(gib, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--directory", help="where checkpoints go; null: the usual place of temporary files")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings other than the bench's own")
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    use_share_of_cores()
    print(json.dumps(measure(arguments.model, arguments.dtype, arguments.repeats, arguments.directory, arguments.overrides)))


if __name__ == "__main__":
    main()
