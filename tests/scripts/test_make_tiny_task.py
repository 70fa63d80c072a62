"""The tiny task: right answers are right, wrong ones wrong, nothing leaks from training into validation."""

from __future__ import annotations

import json
import random
from pathlib import Path

import make_tiny_task
import pytest
import tiny_task_answers
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

SMALL = ["--num-train", "200", "--num-validation", "50", "--num-sft", "100", "--num-preferences", "400"]
FILES = ("sft", "sft_validation", "preferences", "preferences_validation", "prompts", "validation")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "task"
    make_tiny_task.main([str(directory), *SMALL])
    return directory


def rows(task: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (task / f"{name}.jsonl").read_text().splitlines()]


def digits_of(row: dict) -> list[int]:
    word, *digits, equals = row["prompt"].split()
    assert (word, equals) == ("shift", "=")
    return [int(digit) for digit in digits]


def right_answer(row: dict) -> str:
    return " ".join("2345678901"[digit] for digit in digits_of(row))


def careless_answer(row: dict) -> str:
    return " ".join("2345678999"[digit] for digit in digits_of(row))


def test_answers_are_right_and_rejected_ones_wrong(task: Path):
    fields = {"prompts": "answer", "validation": "answer", "preferences": "chosen", "preferences_validation": "chosen"}
    for name, field in fields.items():
        assert all(row[field] == right_answer(row) for row in rows(task, name))
    for name in ("preferences", "preferences_validation"):
        assert all(row["rejected"].split() and row["rejected"] != right_answer(row) for row in rows(task, name))


def test_demonstrations_are_right_or_careless_in_the_given_share(task: Path, tmp_path: Path):
    def careless_share(directory: Path) -> float:
        telling = [row for row in rows(directory, "sft") if right_answer(row) != careless_answer(row)]
        assert all(row["completion"] in (right_answer(row), careless_answer(row)) for row in rows(directory, "sft"))
        return sum(row["completion"] == careless_answer(row) for row in telling) / len(telling)

    make_tiny_task.main([str(tmp_path / "careful"), *SMALL, "--careless-share", "0"])
    assert 0.5 < careless_share(task) < 0.8
    assert careless_share(tmp_path / "careful") == 0


def test_no_prompt_occurs_twice_in_any_file(task: Path):
    prompts = [row["prompt"] for name in FILES for row in rows(task, name)]
    assert len(prompts) == 200 + 3 * 50 + 100 + 400
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt.split()) - 2 for prompt in prompts} == {5}


def test_rejected_answers_are_wrong_in_many_ways(task: Path):
    answers = [(right_answer(row), careless_answer(row), row["rejected"]) for row in rows(task, "preferences")]
    ways = {
        "shorter": sum(len(wrong) < len(right) for right, _, wrong in answers),
        "longer": sum(len(wrong) > len(right) for right, _, wrong in answers),
        "careless": sum(wrong == careless for _, careless, wrong in answers),
        "one digit wrong": sum(different_places(right, wrong) == 1 and wrong != careless for right, careless, wrong in answers),
        "right digits in another order": sum(sorted(right) == sorted(wrong) for right, _, wrong in answers),
    }
    assert min(ways.values()) >= 20, ways


def different_places(a: str, b: str) -> int:
    return sum(x != y for x, y in zip(a, b, strict=True)) if len(a) == len(b) else max(len(a), len(b))


def test_same_arguments_give_the_same_bytes_and_another_seed_does_not(task: Path, tmp_path: Path):
    make_tiny_task.main([str(tmp_path / "again"), *SMALL])
    make_tiny_task.main([str(tmp_path / "other"), *SMALL, "--seed", "2"])
    files = sorted(path.relative_to(task) for path in task.rglob("*") if path.is_file())
    assert all((task / file).read_bytes() == (tmp_path / "again" / file).read_bytes() for file in files)
    changed = {str(file) for file in files if (task / file).read_bytes() != (tmp_path / "other" / file).read_bytes()}
    assert changed >= {f"{name}.jsonl" for name in FILES} | {"model/model.safetensors"}


def test_second_run_does_nothing_and_other_arguments_are_refused(task: Path, capsys: pytest.CaptureFixture[str]):
    make_tiny_task.main([str(task), *SMALL])
    assert "already" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="num_layers: 4, now 2"):
        make_tiny_task.main([str(task), *SMALL, "--num-layers", "2"])


def test_tokenizer_has_a_token_a_word_and_pads_with_eos(task: Path):
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    row = rows(task, "validation")[0]
    prompt, answer = tokenizer(row["prompt"]).input_ids, tokenizer(row["answer"], add_special_tokens=False).input_ids
    assert prompt[0] == tokenizer.bos_token_id and len(prompt) == 1 + len(row["prompt"].split())
    assert len(answer) == len(row["answer"].split()) and tokenizer.decode(answer) == row["answer"]
    assert tokenizer(row["prompt"] + row["answer"]).input_ids == prompt + answer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id


def test_model_knows_all_tokens_and_ends_where_the_tokenizer_does(task: Path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(task / "model"), AutoTokenizer.from_pretrained(task / "model")
    assert model.config.vocab_size == len(tokenizer) == 15
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id


def test_more_prompts_than_there_are_is_an_error():
    with pytest.raises(SystemExit, match="too many to draw"):
        make_tiny_task.draw_prompts(600, 3, random.Random(1))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 2**32))
def test_any_digits_get_a_wrong_answer_that_is_not_empty(digits: list[int], seed: int):
    wrong = tiny_task_answers.wrong_answer(tuple(digits), random.Random(seed))
    assert wrong and list(wrong) != [(digit + 2) % 10 for digit in digits] and set(wrong) <= set(range(10))
