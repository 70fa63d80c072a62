"""Draft heads that learn beside the policy, against heads that stay as they are: acceptance and time over a PPO run.

    bash scripts/bench/run.sh medusa_cotrain [--iterations 30] [--ranks 2] [--run-dir runs/ppo_tiny] [--heads DIR] [key=value ...]

The tiny recipe three times, from the same SFT model and the same heads: co-trained on each rollout, frozen, and without heads.
The real program (rlhf_mc.train), and what it wrote to metrics.jsonl. All three sample and train the same, but for rounding: which
tokens are drafted changes no sample. RUN_DIR is that of scripts/run_ppo_tiny.sh; task, SFT and reward model are made where they
are not there. --heads: RUN_DIR/sft/medusa unless given. Drafts are --drafted tokens in every step, so that all are measured.
Its last line is one JSON object: accepted drafts of a step and sequence with co-trained heads (accepted length less one), mean of the
last three iterations over that of the first three. Not the acceptance at position 1: of a response's last step no draft gains a token,
so that perfect heads, which need one step less, have a lower share of accepted first drafts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from recipes import CONFIGS, RUNS, launch, tiny_reward_model, tiny_sft, tiny_task

from rlhf_mc.launch import quiet_libraries

WAYS = {"co-trained": ["medusa.train=true"], "frozen": ["medusa.train=false"], "none": ["medusa.enabled=false"]}
FIRST, LENGTH = "medusa/acceptance/position_1", "medusa/accepted_length"
ROLLOUT, HEADS, WHOLE = "timing_s/generate", "timing_s/update_heads", "timing_s/step"
ENDS = 3  # iterations that are the start, and the end
SHOWN = 3  # one iteration of so many is in the table


def run(arguments: argparse.Namespace, heads: Path, way: str, output: Path) -> list[dict[str, float]]:
    """The metrics of each iteration of one whole PPO run."""
    models = [f"actor.path={arguments.run_dir / 'sft/model'}", f"reward_model.path={arguments.run_dir / 'reward_model/model'}"]
    data = [f"data.train=[{arguments.run_dir / 'task/prompts.jsonl'}]", "data.validation=[]"]
    medusa = [] if way == "none" else ["medusa.enabled=true", f"medusa.path={heads}", f"medusa.drafted_tokens={arguments.drafted}"]
    trainer = [f"trainer.output_dir={output}", f"trainer.iterations={arguments.iterations}", "trainer.evaluate_every=0"]
    overrides = [*models, *data, *trainer, "wandb.mode=disabled", *medusa, *WAYS[way], *arguments.overrides]
    launch("rlhf_mc.train", ["--config", str(CONFIGS / "ppo_tiny.yaml"), *overrides], arguments.ranks)
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if ROLLOUT in line]


def start_and_end(rows: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Means of the first and of the last iterations."""
    return statistics.mean(row[name] for row in rows[:ENDS]), statistics.mean(row[name] for row in rows[-ENDS:])


def median(rows: list[dict[str, float]], name: str) -> float:
    """Over all iterations but the first, which warms up."""
    return statistics.median(row[name] for row in rows[1:])


def print_iterations(found: dict[str, list[dict[str, float]]]) -> None:
    """The table."""
    columns = [(way, short, name) for way in ("co-trained", "frozen") for short, name in (("first", FIRST), ("length", LENGTH))]
    drafts = "".join(f"{f'{way} {short}':>19}" for way, short, _ in columns)
    print(f"{'iteration':>9}{drafts}" + "".join(f"{f'{way} s':>14}" for way in found))
    for iteration in range(0, len(found["none"]), SHOWN):
        drafts = "".join(f"{found[way][iteration][name]:19.3f}" for way, _, name in columns)
        print(f"{iteration:9}{drafts}" + "".join(f"{rows[iteration][ROLLOUT]:14.3f}" for rows in found.values()))


def main() -> None:
    """Runs the three, prints the table, the summary, and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--drafted", type=int, default=3)
    parser.add_argument("--run-dir", type=lambda path: Path(path).resolve(), default=RUNS / "ppo_tiny")
    parser.add_argument("--heads", type=lambda path: Path(path).resolve())
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of all three runs")
    arguments = parser.parse_intermixed_args()
    quiet_libraries()
    tiny_task(arguments.run_dir)
    tiny_sft(arguments.run_dir, arguments.ranks)
    tiny_reward_model(arguments.run_dir, arguments.ranks)
    heads = arguments.heads or arguments.run_dir / "sft/medusa"
    with tempfile.TemporaryDirectory() as directory:
        found = {way: run(arguments, heads, way, Path(directory) / way) for way in WAYS}
    print_iterations(found)
    accepted = {way: [length - 1 for length in start_and_end(found[way], LENGTH)] for way in ("co-trained", "frozen")}
    for way, (start, end) in accepted.items():
        first = " -> ".join(f"{share:.3f}" for share in start_and_end(found[way], FIRST))
        print(f"{way}: accepted drafts of a step: {start:.3f} -> {end:.3f}; acceptance at position 1: {first}")
    for way, rows in found.items():
        print(f"{way}: a rollout takes {median(rows, ROLLOUT):.3f} s, an iteration {median(rows, WHOLE):.3f} s (medians)")
    trained = found["co-trained"]
    cost = statistics.median(row[HEADS] / row[WHOLE] for row in trained[1:])
    print(f"training of the heads: {median(trained, HEADS):.3f} s, {cost:.1%} of an iteration")
    (start, end), (_, frozen_end) = accepted["co-trained"], accepted["frozen"]
    result = dict(name="medusa_cotrain", measured=end / start, limit=0.95, ratio=end / start / 0.95, unit="accepted drafts, end over start")
    others = {"end": end, "frozen_end": frozen_end, "above_frozen": end > frozen_end, "heads_share_of_time": cost}
    print(json.dumps(result | others))


if __name__ == "__main__":
    main()
