"""A task with exactly checkable answers, and a tiny Llama to learn it: python scripts/make_tiny_task.py OUT_DIR [--seed N ...]

    shift 5 3 8 0 9 =    ->    7 5 0 2 1        a careless writer's: 7 5 9 2 9

Each word and digit is a token. The answer raises each digit by two, going round from 9 to 0. Demonstrations come from
careful writers and from more careless ones, who stop at 9; so a model that imitates them is wrong wherever a digit
goes round, and preferences can teach it better.
Written to OUT_DIR:

    model/                           Hugging Face directory, randomly initialised
    sft.jsonl                        prompt, completion (a careful or a careless writer's)
    preferences.jsonl                prompt, chosen (the right answer), rejected (a wrong one)
    prompts.jsonl, validation.jsonl  prompt, answer, data_source
    sft_validation.jsonl, preferences_validation.jsonl

No prompt occurs twice, in whatever file: validation is held out from everything. The same arguments give the same bytes.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jsonl import write_jsonl
from tiny_task_answers import Digits, shifted, shifted_carelessly, wrong_answer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar
from whole_directory import is_made, whole_directory

UNKNOWN, BOS, EOS, TASK, EQUALS = "<unk>", "<s>", "</s>", "shift", "="


@dataclass(frozen=True)
class Split:
    """One file: its name, how many rows, and how a row is made from the digits of its prompt."""

    name: str
    num_rows: int
    make_row: Callable[[Digits], dict[str, Any]]


def spell(digits: Digits) -> str:
    """Digits as text, a space between each two."""
    return " ".join(map(str, digits))


def draw_prompts(num_prompts: int, num_digits: int, rng: random.Random) -> list[Digits]:
    """`num_prompts` different strings of `num_digits` digits."""
    # Drawing without repetition slows down as the strings that exist are used up.
    if num_prompts > 10**num_digits // 2:
        raise SystemExit(
            f"{num_prompts} different prompts of {num_digits} digits are too many to draw; "
            "ask for fewer rows, or raise --num-digits"
        )
    prompts: dict[Digits, None] = {}
    while len(prompts) < num_prompts:
        prompts[tuple(rng.randrange(10) for _ in range(num_digits))] = None
    return list(prompts)


def make_splits(arguments: argparse.Namespace, rng: random.Random) -> list[Split]:
    """The files, in the order in which they take their prompts."""

    def prompt(digits: Digits) -> str:
        return f"{TASK} {spell(digits)} {EQUALS}"

    def demonstration(digits: Digits) -> dict[str, Any]:
        write = shifted_carelessly if rng.random() < arguments.careless_share else shifted
        return {"prompt": prompt(digits), "completion": spell(write(digits))}

    def preference(digits: Digits) -> dict[str, Any]:
        return {"prompt": prompt(digits), "chosen": spell(shifted(digits)), "rejected": spell(wrong_answer(digits, rng))}

    def question(digits: Digits) -> dict[str, Any]:
        return {"prompt": prompt(digits), "answer": spell(shifted(digits)), "data_source": TASK}

    return [
        Split("validation", arguments.num_validation, question),
        Split("preferences_validation", arguments.num_validation, preference),
        Split("sft_validation", arguments.num_validation, demonstration),
        Split("sft", arguments.num_sft, demonstration),
        Split("preferences", arguments.num_preferences, preference),
        Split("prompts", arguments.num_train, question),
    ]


def write_data(directory: Path, arguments: argparse.Namespace) -> None:
    """All JSONL files, from one stream of random numbers."""
    rng = random.Random(arguments.seed)
    splits = make_splits(arguments, rng)
    num_prompts = sum(split.num_rows for split in splits)
    prompts = iter(draw_prompts(num_prompts, arguments.num_digits, rng))
    for split in splits:
        write_jsonl(directory / f"{split.name}.jsonl", [split.make_row(next(prompts)) for _ in range(split.num_rows)])


def make_tokenizer() -> PreTrainedTokenizerBase:
    """One token a word or digit. BOS before every text, as Llama's has it; padding is EOS."""
    words = [UNKNOWN, BOS, EOS, TASK, EQUALS, *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, words.index(BOS))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        clean_up_tokenization_spaces=False,
    )


def write_model(directory: Path, tokenizer: PreTrainedTokenizerBase, arguments: argparse.Namespace) -> None:
    """A randomly initialised Llama and its tokenizer, as a Hugging Face directory."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.ffn_size,
        num_hidden_layers=arguments.num_layers,
        num_attention_heads=arguments.num_heads,
        num_key_value_heads=arguments.num_kv_heads,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    torch.manual_seed(arguments.seed)
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    rows = parser.add_argument_group("rows")
    rows.add_argument("--num-train", type=int, default=4096, help="rows of prompts.jsonl")
    rows.add_argument("--num-validation", type=int, default=512, help="rows of each validation file")
    rows.add_argument("--num-sft", type=int, default=20480)
    rows.add_argument("--num-preferences", type=int, default=20480)
    rows.add_argument("--num-digits", type=int, default=5, help="digits of a prompt")
    rows.add_argument("--careless-share", type=float, default=0.65, help="share of the demonstrations that stop at 9")
    model = parser.add_argument_group("model")
    model.add_argument("--hidden-size", type=int, default=128)
    model.add_argument("--num-layers", type=int, default=4)
    model.add_argument("--num-heads", type=int, default=4)
    model.add_argument("--num-kv-heads", type=int, default=2)
    model.add_argument("--ffn-size", type=int, default=384)
    arguments = parser.parse_args(argv)
    if not 0 <= arguments.careless_share <= 1:
        parser.error(f"--careless-share ({arguments.careless_share}) is a share; give a number from 0 to 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    recipe = {name: value for name, value in vars(arguments).items() if name != "out_dir"}
    if is_made(arguments.out_dir, recipe):
        print(f"The task and its model are in {arguments.out_dir} already.")
        return
    disable_progress_bar()
    with whole_directory(arguments.out_dir, recipe) as work:
        write_data(work, arguments)
        write_model(work / "model", make_tokenizer(), arguments)
    print(f"The task and its model are in {arguments.out_dir}")


if __name__ == "__main__":
    main()
