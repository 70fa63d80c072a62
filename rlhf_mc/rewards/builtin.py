"""Reward functions that come with the package, and examples of how to write one.

Name one in a recipe as `rlhf_mc.rewards.builtin:exact_match`; its keyword arguments are `reward.functions[i].arguments`.
The verifiers of reasoning-gym are in `reasoning_gym.py`, since they need that package.
"""

from __future__ import annotations

import re
from typing import Any

from rlhf_mc.rewards.interface import RewardSample


def exact_match(sample: RewardSample, answer_field: str = "answer", ignore_case: bool = False) -> float:
    """1 where the response equals the row's answer, without the white space around both; else 0.

    `answer_field` may go into nested fields: "reward_model.ground_truth" reads verl's rows.
    """
    return float(_normal(sample.response, ignore_case) == _normal(field(sample.row, answer_field), ignore_case))


def final_answer(
    sample: RewardSample,
    answer_field: str = "reward_model.ground_truth",
    pattern: str = r"####\s*(-?[\d.,]+)",
    ignore_case: bool = False,
    format_score: float = 0.0,
) -> float:
    """1 where the last match of `pattern` in the response is the row's answer; `format_score` for another answer; 0 for none.

    `pattern` is a regular expression whose first group is the answer; the default reads GSM8K's "#### 42". Two
    answers that are numbers are compared as numbers: 1,000 equals 1000.0.
    """
    found = re.findall(pattern, sample.response, re.DOTALL)
    if not found:
        return 0.0
    given = found[-1] if isinstance(found[-1], str) else found[-1][0]
    given, wanted = _normal(given, ignore_case), _normal(field(sample.row, answer_field), ignore_case)
    return 1.0 if given == wanted or _same_number(given, wanted) else format_score


def regex_match(sample: RewardSample, pattern: str, whole: bool = False) -> float:
    """1 where the regular expression is found in the response, or with `whole` matches all of it; else 0.

    A dot matches newlines.
    """
    match = re.fullmatch if whole else re.search
    return float(match(pattern, sample.response, re.DOTALL) is not None)


def keywords(sample: RewardSample, words: list[str] | None = None, words_field: str = "keywords") -> float:
    """Share of the given words, or else of the row's, that occur in the response as whole words, whatever their case."""
    wanted = field(sample.row, words_field) if words is None else words
    if not wanted:
        raise ValueError("there are no keywords to look for")
    found = [re.search(rf"(?<!\w){re.escape(word)}(?!\w)", sample.response, re.IGNORECASE) for word in wanted]
    return sum(match is not None for match in found) / len(wanted)


def target_length(sample: RewardSample, target_tokens: int) -> float:
    """Minus the relative distance of the response's token count from `target_tokens`, from 0 (met) down to -1."""
    return max(-1.0, -abs(len(sample.response_ids) - target_tokens) / target_tokens)


def length_penalty(sample: RewardSample, max_tokens: int, free_tokens: int) -> float:
    """0 up to `free_tokens`, then falling linearly to -1 at `max_tokens` and beyond (arXiv:2503.14476, equation 13)."""
    if not 0 <= free_tokens < max_tokens:
        raise ValueError(f"need 0 <= free_tokens ({free_tokens}) < max_tokens ({max_tokens})")
    return -min(max(len(sample.response_ids) - free_tokens, 0) / (max_tokens - free_tokens), 1.0)


def plain_words(sample: RewardSample, target_grade: float = 6.0) -> float:
    """0 for text that a pupil of school grade `target_grade` can read, down to -1 at ten grades above; -1 without words.

    The grade is the Automated Readability Index (Smith and Senter, AMRL-TR-66-220, 1967):
    4.71 letters/words + 0.5 words/sentences - 21.43. It differs between any two responses, so that even a small model
    learns from it within a few iterations. Short words alone satisfy it: mix it with a reward model or a KL penalty.
    """
    words = re.findall(r"\w+(?:['’-]\w+)*", sample.response)
    if not words:
        return -1.0
    num_letters = sum(character.isalnum() for word in words for character in word)
    num_sentences = max(len(re.findall(r"[.!?]+(?=\s|$)", sample.response)), 1)
    grade = 4.71 * num_letters / len(words) + 0.5 * len(words) / num_sentences - 21.43
    return -min(max(grade - target_grade, 0.0) / 10.0, 1.0)


def field(row: dict[str, Any], path: str) -> Any:
    """The value of a field, where dots go into nested ones; KeyError names the fields that there are."""
    value: Any = row
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise KeyError(f"the row has no field '{path}'; its fields are {', '.join(row)}")
        value = value[name]
    return value


def _normal(value: Any, ignore_case: bool) -> str:
    text = str(value).strip()
    return text.casefold() if ignore_case else text


def _same_number(a: str, b: str) -> bool:
    try:
        return float(a.rstrip(".").replace(",", "")) == float(b.rstrip(".").replace(",", ""))
    except ValueError:
        return False
