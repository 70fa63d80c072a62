r"""Chat prompts for the SmolLM2 recipe: python scripts/make_smollm2_prompts.py OUT_DIR [--seed N ...]

Three kinds of short request, each with the field that its reward function in rlhf_mc.rewards.builtin reads:

    data_source  asks for                                 field      function
    explain      an explanation                           -          plain_words
    keywords     one sentence that contains given words   keywords   keywords
    arithmetic   a sum or a difference                    answer     final_answer, with pattern (-?\d+)

Writes prompts.jsonl and validation.jsonl, which share no row. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from jsonl import write_jsonl
from whole_directory import is_made, whole_directory

THINGS = (
    "a volcano|the Moon|a rainbow|a bridge|a library|an engine|the heart|a glacier|a magnet|a telescope|a river|"
    "an earthquake|a battery|a compass|a desert|the Sun|a forest|money|a map|a clock|electricity|a whale|bread|"
    "music|a hospital|a rocket|a vaccine|a computer|the internet|a school|gravity|"
    "a shadow|sleep|a market|a lighthouse|a seed|an echo|a tide|a city|steam"
).split("|")
EXPLAIN = (
    "Explain what {} is.",
    "How would you describe {} to a child?",
    "Tell me about {} in a few sentences.",
    "Why does {} matter?",
)

NOUNS = (
    "river bridge dog garden letter train window moon apple teacher boat mountain book friend rain horse kitchen song star winter"
).split()
SENTENCE = "Write one short sentence with the words {} and {}."

LARGEST_NUMBER = 10

Row = dict[str, Any]


def _row(data_source: str, prompt: str, **fields: Any) -> Row:
    return {"data_source": data_source, "prompt": [{"role": "user", "content": prompt}], **fields}


def explain_rows() -> list[Row]:
    """Every thing in every wording."""
    return [_row("explain", wording.format(thing)) for thing in THINGS for wording in EXPLAIN]


def keyword_rows() -> list[Row]:
    """Every pair of nouns."""
    return [_row("keywords", SENTENCE.format(a, b), keywords=[a, b]) for a, b in combinations(NOUNS, 2)]


def arithmetic_rows() -> list[Row]:
    """Every sum, and every difference that is not negative, of two numbers from 1 to LARGEST_NUMBER."""
    numbers = range(1, LARGEST_NUMBER + 1)
    sums = [(f"{a} + {b}", a + b) for a in numbers for b in numbers]
    differences = [(f"{a} - {b}", a - b) for a in numbers for b in numbers if a >= b]
    question = "What is {}? Answer with the number only."
    return [_row("arithmetic", question.format(term), answer=str(value)) for term, value in sums + differences]


def draw_rows(num_rows: int, seed: int) -> list[Row]:
    """`num_rows` different rows, the three kinds in turn, in an order fixed by `seed`."""
    kinds = [explain_rows(), keyword_rows(), arithmetic_rows()]
    available = len(kinds) * min(map(len, kinds))
    if num_rows > available:
        raise SystemExit(
            f"{num_rows} rows were asked for, and there are {available} different ones; lower --num-train or --num-validation"
        )
    rng = random.Random(seed)
    for rows in kinds:
        rng.shuffle(rows)
    return list(chain.from_iterable(zip(*kinds)))[:num_rows]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-train", type=int, default=384)
    parser.add_argument("--num-validation", type=int, default=48)
    arguments = parser.parse_args(argv)
    recipe = {name: value for name, value in vars(arguments).items() if name != "out_dir"}
    if is_made(arguments.out_dir, recipe):
        print(f"The prompts are in {arguments.out_dir} already.")
        return
    rows = draw_rows(arguments.num_validation + arguments.num_train, arguments.seed)
    with whole_directory(arguments.out_dir, recipe) as work:
        write_jsonl(work / "validation.jsonl", rows[: arguments.num_validation])
        write_jsonl(work / "prompts.jsonl", rows[arguments.num_validation :])
    print(f"{arguments.num_train} prompts and {arguments.num_validation} for validation are in {arguments.out_dir}")


if __name__ == "__main__":
    main()
