"""Speculative decoding with draft heads: tokens of a forward against what acceptance promises, speed against plain decoding.

    bash scripts/bench/run.sh medusa [--models tiny smollm2] [--batches 1 4 16 64] [--repeats 7] [--drafted 2] [--dtype fp32]

The real engine (vLLM) with 3 heads, on one rank. The heads are trained here, on samples of the model and the hidden states of its
scoring pass; the model stays as it is. Of each batch size B:
  acceptance  share of drafts accepted at each position, of those whose drafts before it were
  E           1 + a_1 + a_1 a_2 + ...: tokens of a forward and sequence that this acceptance promises (arXiv:2401.10774)
  tokens      a count: tokens of the responses, but for the first, which needs no draft, over the forwards of each that checked drafts
  predicted   E T(B, 0) / T(B, k), from the times of steps measured in runs of their own
  measured    seconds of the same requests without drafts over those with k, by turns, medians; what is sampled is the same, token
              for token (asserted in fp32). It has the prompts' forward and the last steps in it, the prediction has not.
k is the number of drafted tokens that the prediction likes best, or --drafted. Its last line is one JSON object: the row where
tokens and E differ most.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from recipes import CONFIGS, RUNS, smollm2, tiny_sft, tiny_task

from rlhf_mc.config import Settings
from rlhf_mc.launch import quiet_libraries, use_share_of_cores
from rlhf_mc.medusa.draft_length import DraftStatistics, bucket_of, expected_tokens, fixed
from rlhf_mc.medusa.shape import HeadsShape
from rlhf_mc.models.hf_config import ModelShape
from rlhf_mc.recipe import load_settings

NUM_HEADS = 3
LARGEST_BATCH = 64
SHORT_TOKENS = 12  # of the responses by which steps are timed
VERSION = 0  # of the weights while the heads are measured


@dataclass(frozen=True)
class Trial:
    """One model, which a recipe uses. sequences: of a timed run, at least; a run has one whole batch at least.

    rounds: of samples that the heads are trained on, each `passes` times.
    """

    config: str
    model: Path
    prompts: Path
    sequences: int
    rounds: int
    passes: int
    overrides: tuple[str, ...] = ()


TRIALS = {
    "tiny": Trial(
        "ppo_tiny.yaml", RUNS / "ppo_tiny/sft/model", RUNS / "ppo_tiny/task/prompts.jsonl", sequences=64, rounds=8, passes=10
    ),
    "smollm2": Trial(
        "ppo_smollm2.yaml", RUNS / "ppo_smollm2/model", RUNS / "ppo_smollm2/prompts/prompts.jsonl", sequences=2, rounds=4, passes=2,
        overrides=("rollout.max_tokens=32",),
    ),
}  # fmt: skip


def prepare(name: str) -> None:
    """The model and its prompts, unless they are there."""
    if name == "smollm2":
        smollm2(RUNS / "ppo_smollm2")
    else:
        tiny_task(RUNS / "ppo_tiny")
        tiny_sft(RUNS / "ppo_tiny", num_ranks=1)


def settings_for(trial: Trial, dtype: str) -> Settings:
    """The recipe's, with heads."""
    overrides = [
        f"actor.path={trial.model}", f"data.train=[{trial.prompts}]", "data.validation=[]", f"trainer.dtype={dtype}", "trainer.device=cpu",
        f"rollout.max_running_sequences={LARGEST_BATCH}", "medusa.enabled=true", f"medusa.num_heads={NUM_HEADS}",
        "medusa.optim.lr=3e-3", "medusa.steps=8", *trial.overrides,
    ]  # fmt: skip
    settings, _ = load_settings(["--config", str(CONFIGS / trial.config), *overrides], "train")
    return settings


class Bench:
    """One model, its heads and its engine on this rank."""

    def __init__(self, trial: Trial, dtype: str) -> None:
        from rlhf_mc.data import load_tokenizer
        from rlhf_mc.medusa.drafter import build_drafter
        from rlhf_mc.medusa.files import load_heads
        from rlhf_mc.models.role import Role, build_role
        from rlhf_mc.parallel.grids import RolloutGrid
        from rlhf_mc.parallel.world import join_world
        from rlhf_mc.pipeline.engine import Engine
        from rlhf_mc.pipeline.engine_limits import stop_token_ids
        from rlhf_mc.pipeline.weight_sync import plan_weight_sync
        from rlhf_mc.stages.start import read_sources
        from rlhf_mc.tracking import Trace

        self.trial, self.settings = trial, settings_for(trial, dtype)
        model = str(trial.model)
        tokenizer = load_tokenizer(model, trust_remote_code=False)
        self.prompts = read_sources(self.settings, tokenizer).prompts
        self.world = join_world(self.settings)
        self.actor = build_role(Role.ACTOR, "language", model, self.settings, self.world)
        heads = self.settings.medusa.path  # of the recipe's SFT, where it has them
        tensors = load_heads(heads, HeadsShape.of(self.settings.medusa, self.actor.shape)) if heads else None
        self.drafter = build_drafter(self.settings, self.actor, trained=True, tensors=tensors)
        grid, shape = RolloutGrid(self.world.grid, 1), self.drafter.shape
        stops = stop_token_ids(model, tokenizer.eos_token_id)
        data, rollout = self.settings.data, self.settings.rollout
        self.engine = Engine(model, rollout, dtype, grid, 0, data.max_prompt_tokens, stops, shape)
        self.reshard = plan_weight_sync(self.actor, grid, shape)
        self.trace = Trace(0)

    def sync(self) -> None:
        """The engine has the model's weights and the heads'."""
        params = self.actor.params() | self.drafter.params()
        with self.engine.weight_update(VERSION) as update:
            self.reshard.run(params, update)

    def requests(self, iteration: int) -> list:
        """All samples of one iteration."""
        from rlhf_mc.pipeline.dispatch import requests_for

        return requests_for(self.prompts.batch(iteration), self.settings.rollout, self.settings.trainer.seed, iteration)

    def decode(self, requests: Sequence, batch: int, drafted: int) -> tuple[float, list, DraftStatistics]:
        """Seconds, responses and statistics of the requests, `batch` at a time."""
        from rlhf_mc.pipeline.generation import Decoding

        responses, numbers = [], []
        start = time.perf_counter()
        for first in range(0, len(requests), batch):
            group = dict(enumerate(requests[first : first + batch]))
            decoding, found = Decoding(self.engine, group, VERSION, False, fixed(drafted), self.trace), {}
            while not decoding.done:
                found |= decoding.advance(1)
            responses += [found[number] for number in group]
            numbers.append(decoding.load().drafts)
        seconds = time.perf_counter() - start
        return seconds, responses, DraftStatistics.from_numbers(NUM_HEADS, [sum(sums) for sums in zip(*numbers)])

    def warm_up(self) -> dict[str, float]:
        """Trains the heads; what they knew of the last samples."""
        from rlhf_mc.medusa.hidden_states import HiddenStates
        from rlhf_mc.medusa.steps import samples_of_steps
        from rlhf_mc.medusa.training import measure_heads, train_heads
        from rlhf_mc.models.passes import score
        from rlhf_mc.pipeline.dispatch import assemble_rollout

        self.sync()
        for number in range(self.trial.rounds):
            requests = self.requests(number)
            _, responses, _ = self.decode(requests, LARGEST_BATCH, 0)
            samples = self.settings.rollout.samples_per_prompt
            rollout = assemble_rollout(self.prompts.batch(number), samples, dict(enumerate(responses)))
            steps = samples_of_steps(len(rollout), self.settings.medusa.steps, seed=1, iteration=number)
            hidden = HiddenStates(self.world, NUM_HEADS, steps)
            receiver = hidden.receiver(range(len(rollout)))
            score(self.actor, rollout.sequences, "predicted", self.settings.actor.scoring_micro_batch, hand_over=receiver)
            for step in range(self.trial.passes):
                train_heads(self.drafter, self.actor, hidden, self.settings, number * self.trial.passes + step)
        self.sync()
        return measure_heads(self.drafter, self.actor, hidden, self.settings.medusa.loss_decay)

    def tokens_of_a_forward(self, requests: Sequence, batch: int, drafted: int) -> float:
        """Tokens that sequences had more at their ends than after the prompt's forward, over the forwards of each that brought them."""
        tokens = forwards = 0
        for first in range(0, len(requests), batch):
            self.engine.submit(dict(enumerate(requests[first : first + batch])), version=VERSION)
            while self.engine.num_running:
                step = self.engine.step(drafted)
                forwards += len(step.accepted)
                tokens += sum(len(response.token_ids) - 1 for response in step.finished.values())
        return tokens / forwards

    def row(self, batch: int, repeats: int, drafted: int | None) -> dict:
        """All of one batch size."""
        count = max(self.trial.sequences, batch)
        all_requests = self.requests(self.trial.rounds)
        requests = all_requests[:: len(all_requests) // count][:count]
        short = [replace(request, max_tokens=min(SHORT_TOKENS, request.max_tokens)) for request in requests]
        samples: list[list[float]] = [[] for _ in range(NUM_HEADS + 1)]
        for _ in range(repeats):
            for k, seconds in enumerate(samples):
                seconds.append(self.decode(short, batch, k)[2].seconds(bucket_of(batch), k))
        steps = [statistics.median(seconds) for seconds in samples]
        _, expected, _ = self.decode(requests, batch, 0)
        acceptance = self.decode(requests, batch, NUM_HEADS)[2].acceptance
        speeds = [expected_tokens(acceptance, k) * steps[0] / steps[k] for k in range(NUM_HEADS + 1)]
        k = drafted or max(range(1, NUM_HEADS + 1), key=lambda k: speeds[k])
        spent: dict[int, list[float]] = {0: [], k: []}
        for _ in range(repeats):
            for way, seconds in spent.items():
                duration, responses, _ = self.decode(requests, batch, way)
                seconds.append(duration)
                if self.settings.trainer.dtype == "fp32":
                    assert [r.token_ids for r in responses] == [e.token_ids for e in expected], "drafts changed what is sampled"
        medians = {way: statistics.median(seconds) for way, seconds in spent.items()}
        return dict(
            batch=batch, drafted=k, acceptance=acceptance, expected=expected_tokens(acceptance, k),
            tokens=self.tokens_of_a_forward(requests, batch, k), step_seconds=steps, predicted=speeds[k], measured=medians[0] / medians[k],
            seconds=medians[k],
        )  # fmt: skip


def measure(arguments: argparse.Namespace) -> None:
    """One model in this process: its rows go to arguments.rows."""
    use_share_of_cores()
    (name,) = arguments.models
    bench = Bench(TRIALS[name], arguments.dtype)
    heads = bench.warm_up()
    rows = [dict(model=name) | bench.row(batch, arguments.repeats, arguments.drafted) for batch in arguments.batches]
    Path(arguments.rows).write_text(json.dumps(dict(heads=heads, rows=rows)))
    bench.engine.close()


def launch(arguments: argparse.Namespace, name: str) -> dict:
    """One model, in a process of its own: an engine ends with its process."""
    with tempfile.TemporaryDirectory() as directory:
        rows = Path(directory) / "rows.json"
        drafted = [f"--drafted={arguments.drafted}"] if arguments.drafted else []
        options = [f"--rows={rows}", f"--dtype={arguments.dtype}", f"--repeats={arguments.repeats}", *drafted]
        batches = ["--batches", *map(str, arguments.batches)]
        subprocess.run([sys.executable, __file__, *options, "--models", name, *batches], check=True, stdout=subprocess.DEVNULL)
        return json.loads(rows.read_text())


def shares_of_an_8b_model() -> dict[str, float]:
    """Parameters of heads on Llama-3 8B, over the model's. From the shapes alone."""
    model = ModelShape(
        family="llama", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab=128256, norm_eps=1e-5,
        tied=False, qkv_bias=False, qk_norm=False, rope={}, sliding_window=None, max_positions=8192, has_value_head=False,
    )  # fmt: skip
    kinds = {"3 heads, shared output layer": (3, True), "4 heads, shared output layer": (4, True), "4 heads, 4 output layers": (4, False)}
    heads = {name: HeadsShape(num_heads, 1, shared, model.hidden, model.vocab) for name, (num_heads, shared) in kinds.items()}
    return {name: shape.num_params / model.num_params for name, shape in heads.items()}


def main() -> None:
    """Measures, prints the table, the sizes, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=TRIALS, default=list(TRIALS))
    sizes = range(1, LARGEST_BATCH + 1)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64], choices=sizes, metavar="SEQUENCES")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--drafted", type=int, choices=range(1, NUM_HEADS + 1))
    parser.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.rows:
        measure(arguments)
        return
    print(f"{arguments.dtype}; medians of {arguments.repeats}; steps in ms, without drafts and with k")
    print(
        f"{'model':9}{'batch':>6}{'k':>3}{'acceptance':>18}{'E':>7}{'tokens':>8}{'/ E':>7}{'step':>8}{'with k':>8}{'predicted':>11}"
        f"{'measured':>10}",
        flush=True,
    )
    rows = []
    for name in arguments.models:
        prepare(name)
        found = launch(arguments, name)
        for row in found["rows"]:
            acceptance = " ".join(f"{share:.2f}" for share in row["acceptance"])
            print(
                f"{name:9}{row['batch']:6}{row['drafted']:3}{acceptance:>18}{row['expected']:7.3f}{row['tokens']:8.3f}"
                f"{row['tokens'] / row['expected']:7.3f}{row['step_seconds'][0] * 1e3:8.2f}{row['step_seconds'][row['drafted']] * 1e3:8.2f}"
                f"{row['predicted']:11.2f}{row['measured']:10.2f}"
            )
        accuracies = ", ".join(f"{found['heads'][f'medusa/head_{k}/accuracy']:.2f}" for k in range(1, NUM_HEADS + 1))
        print(f"{name}: heads know {accuracies} of the next tokens but one, two, three of what they were trained on", flush=True)
        rows += found["rows"]
    for kind, share in shares_of_an_8b_model().items():
        print(f"Llama-3 8B: {kind}: {share:.2%} of its parameters")
    worst = max(rows, key=lambda row: abs(row["tokens"] / row["expected"] - 1.0))
    ratio = worst["tokens"] / worst["expected"]
    result = dict(name="medusa", measured=worst["tokens"], limit=worst["expected"], ratio=ratio, unit="tokens a forward and sequence")
    print(json.dumps(result | {"model": worst["model"], "batch": worst["batch"], "drafted": worst["drafted"]}))


if __name__ == "__main__":
    main()
