"""Making experience, pipelined against serial: the speed-up, and the bound on it, with declared latencies and without.

    bash scripts/bench/run.sh pipeline [--repeats 7] [--reward-ms 40] [--load-ms 150] [--max-tokens 64]

Real engine (vLLM), real scoring (megatron-core), a random Llama on 2 data-parallel ranks, both modes in turn on the same prompts in
the same processes. With latencies: a reward function that answers after --reward-ms, as a remote model would, and copies of a
role's params onto the device that take --load-ms, as over a GPU's link; this host has neither. Then without them, whatever it is.
Then, still without, with the engine apart: one rank trains, the other runs the engine, and both really work at once. It decodes
16 of the 64 sequences at a time there, as a rollout that is larger than an engine's batch: else all would finish at the end.
The bound is the schedule's, from the costs that the serial runs measured. Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path

from rlhf_mc.launch import quiet_libraries, use_share_of_cores
from rlhf_mc.recipe import load_settings

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "scripts/configs/ppo_tiny.yaml"
NUM_RANKS = 2
REMOTE = '''import time


def remote(sample, seconds):
    time.sleep(seconds)
    return float(len(sample.response_ids))
'''


def save_model(task: Path) -> str:
    """A Llama of 14 million parameters with the task's tokenizer: scoring then takes about as long as sampling."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(task / "model")
    sizes = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=6, num_key_value_heads=6, head_dim=64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), **sizes, "max_position_embeddings": 512}))
    directory = task / "larger"
    model.save_pretrained(directory)
    for file in (task / "model").glob("token*"):
        (directory / file.name).write_bytes(file.read_bytes())
    return str(directory)


def recipe(arguments: argparse.Namespace, task: Path, latencies: bool, apart: bool) -> list[str]:
    """The recipe's settings for this bench."""
    model = save_model(task)
    (task / "remote.py").write_text(REMOTE)
    seconds = arguments.reward_ms / 1000 if latencies else 0.0
    function = f'{{path: "{task / "remote.py"}:remote", name: remote, weight: 1.0, arguments: {{seconds: {seconds}}}}}'
    return [
        "--config", str(RECIPE), f"actor.path={model}", f"reward_model.path={model}", f"data.train=[{task / 'prompts.jsonl'}]",
        "data.validation=[]", f"reward.functions=[{function}]", "wandb.mode=disabled", f"trainer.output_dir={task / 'out'}",
        "data.prompts_per_iteration=32", f"rollout.max_tokens={arguments.max_tokens}", "rollout.min_tokens=8",
        "algorithm.mini_batch_sequences=64", "pipeline.chunk_by=finished",
        # Room for the params of two roles, and not for the optimizer of the critic, which nothing here would use.
        "offload.device_budget_gib=0.125", "parallel.distributed_optimizer=false",
        *(["rollout.placement=separate", "rollout.engine_ranks=1", "rollout.max_running_sequences=16"]
          if apart else []),
    ]  # fmt: skip


def slow_link(seconds_of_a_role: float, bytes_of_a_role: int) -> None:
    """Copies onto the device run at that rate from now on, each in its turn; what leaves is not slowed."""
    from rlhf_mc.offload.lanes import HostLane

    run = HostLane._run

    def slowed(self, job, function, *arguments):
        if self._trace.track == "copies/in":
            time.sleep(job.num_bytes / bytes_of_a_role * seconds_of_a_role)
        return run(self, job, function, *arguments)

    HostLane._run = slowed


def measure(arguments: argparse.Namespace) -> None:
    """One rank's part."""
    from rlhf_mc.models.role import Role
    from rlhf_mc.offload import Part
    from rlhf_mc.parallel.job import Job
    from rlhf_mc.pipeline.schedule import CHUNK_COUNTS, bound
    from rlhf_mc.stages.make_experience import make_experience, num_chunks, resources_of
    from rlhf_mc.stages.serve import serve
    from rlhf_mc.stages.start import start_ppo
    from rlhf_mc.stages.sync_weights import sync_weights

    settings, _ = load_settings(arguments.settings, "train")
    use_share_of_cores()
    spent: dict[str, list[float]] = {"serial": [], "pipelined": []}
    bounds = []
    job = Job.of(os.environ, settings.rollout.engine_ranks)
    if job.has_engine_only:
        serve(settings, job)
        return
    with start_ppo(settings, job) as run:
        if arguments.latencies:
            params = run.residency.state(Role.REFERENCE).num_bytes(Part.PARAMS)
            slow_link(arguments.load_ms / 1000, params)
        for iteration in range(arguments.repeats + 1):
            for mode in spent:
                run.settings = replace(settings, pipeline=replace(settings.pipeline, mode=mode))
                sync_weights(run)
                start = time.perf_counter()
                chunks = num_chunks(run, run.sources.prompts.batch(iteration))
                make_experience(run, iteration)
                seconds = time.perf_counter() - start
                if mode == "serial":
                    costs = run.costs
                if iteration:
                    spent[mode].append(seconds)
                    bounds += [bound(costs, resources_of(run), CHUNK_COUNTS[-1])] if mode == "pipelined" else []
        if run.world.rank == 0:
            medians = {mode: statistics.median(values) for mode, values in spent.items()}
            Path(arguments.row).write_text(json.dumps(medians | {"bound": statistics.median(bounds), "costs": asdict(costs), "chunks": chunks}))


def launch(arguments: argparse.Namespace, latencies: bool, apart: bool) -> dict:
    """One run of both modes."""
    with tempfile.TemporaryDirectory() as directory:
        task, row = Path(directory) / "task", Path(directory) / "row.json"
        make = [sys.executable, str(ROOT / "scripts/make_tiny_task.py"), str(task)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}", __file__]
        options = [f"--row={row}", f"--repeats={arguments.repeats}", f"--load-ms={arguments.load_ms}", *["--latencies"] * latencies]
        arguments_of_ranks = [*options, "--settings", *recipe(arguments, task, latencies, apart)]
        threads = {**os.environ, "OMP_NUM_THREADS": str(max(1, os.cpu_count() // NUM_RANKS))}  # each its share, as scripts/launch.sh
        subprocess.run([*command, *arguments_of_ranks], check=True, stdout=subprocess.DEVNULL, env=threads)
        return json.loads(row.read_text())


def main() -> None:
    """Measures, prints the table, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--reward-ms", type=float, default=40)
    parser.add_argument("--load-ms", type=float, default=150)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--engines", nargs="+", default=["colocated", "apart"], choices=["colocated", "apart"])
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--latencies", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--settings", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.row:
        measure(arguments)
        return
    print(f"{'engine':>10}{'latencies':>10}{'serial s':>10}{'pipelined s':>13}{'bound s':>9}{'speed-up':>10}{'its bound':>11}{'ratio':>7}")
    rows = {}
    for engine, latencies in (("colocated", True), ("colocated", False), ("apart", False)):
        if engine not in arguments.engines:
            continue
        row = launch(arguments, latencies, engine == "apart")
        rows[engine, latencies] = row
        speedup, limit = row["serial"] / row["pipelined"], row["serial"] / row["bound"]
        print(
            f"{engine:>10}{'declared' if latencies else 'none':>10}{row['serial']:10.3f}{row['pipelined']:13.3f}{row['bound']:9.3f}"
            f"{speedup:10.2f}{limit:11.2f}{speedup / limit:7.2f}  {row['chunks']} chunks",
            flush=True,
        )
    row = next(iter(rows.values()))
    print("costs of a serial run, seconds:", json.dumps(row["costs"]))
    measured, limit = row["serial"] / row["pipelined"], row["serial"] / row["bound"]
    print(json.dumps(dict(name="pipeline", measured=measured, limit=limit, ratio=measured / limit, unit="speed-up over serial")))


if __name__ == "__main__":
    main()
