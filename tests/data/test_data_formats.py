"""The field formats of TRL, verl and plain rows, read without conversion."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_mc.data import DataError, Row
from rlhf_mc.data.formats import Exchange, exchange_of, pair_of, prompt_of, text_of

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "u"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
AGAIN = {"role": "user", "content": "again"}


def row(**fields: Any) -> Row:
    return Row(fields, "f.jsonl:1")


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"prompt": "p"}, "p"),
        ({"question": "q", "answer": "a"}, "q"),
        ({"prompt": [SYSTEM, USER], "data_source": "x", "reward_model": {"style": "rule", "ground_truth": "1"}}, [SYSTEM, USER]),
        ({"messages": [SYSTEM, USER]}, [SYSTEM, USER]),
        ({"messages": [USER, GOOD, AGAIN, BAD]}, [USER, GOOD, AGAIN]),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER]),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, [USER]),
        ({"chosen": [USER, GOOD, AGAIN, GOOD], "rejected": [USER, GOOD, AGAIN, BAD]}, [USER, GOOD, AGAIN]),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "p"),
        ({"prompt": None, "question": "q"}, "q"),
    ],
)
def test_prompt(fields: dict[str, Any], prompt: Any) -> None:
    assert prompt_of(row(**fields)) == prompt


@pytest.mark.parametrize(
    ("fields", "prompt", "response"),
    [
        ({"prompt": "p", "completion": "c"}, "p", "c"),
        ({"prompt": "p", "response": "r"}, "p", "r"),
        ({"question": "q", "answer": "a"}, "q", "a"),
        ({"prompt": [USER], "completion": [GOOD]}, [USER], GOOD),
        ({"prompt": [USER], "completion": "good"}, [USER], GOOD),
        ({"prompt": "u", "completion": [GOOD]}, [USER], GOOD),
        ({"messages": [SYSTEM, USER, GOOD]}, [SYSTEM, USER], GOOD),
        ({"messages": [USER, GOOD, AGAIN, BAD]}, [USER, GOOD, AGAIN], BAD),
        ({"prompt": "title", "messages": [USER, GOOD]}, [USER], GOOD),
        ({"prompt": "p", "completion": ""}, "p", ""),
    ],
)
def test_exchange(fields: dict[str, Any], prompt: Any, response: Any) -> None:
    assert exchange_of(row(**fields)) == Exchange("f.jsonl:1", prompt, response)


@pytest.mark.parametrize(
    ("fields", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "p", "c", "r"),
        ({"chosen": "whole c", "rejected": "whole r"}, None, "whole c", "whole r"),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, [USER], GOOD, BAD),
        ({"prompt": "u", "chosen": [GOOD], "rejected": [BAD]}, [USER], GOOD, BAD),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], GOOD, BAD),
        ({"prompt": "u", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, [USER], GOOD, BAD),
    ],
)
def test_pair(fields: dict[str, Any], prompt: Any, chosen: Any, rejected: Any) -> None:
    expected = (Exchange("f.jsonl:1", prompt, chosen), Exchange("f.jsonl:1", prompt, rejected))
    assert pair_of(row(**fields)) == expected


def test_text_and_its_replacement() -> None:
    assert text_of(row(text="t", prompt="p", completion="c")) == Exchange("f.jsonl:1", None, "t")
    assert text_of(row(prompt="p", completion="c")) == Exchange("f.jsonl:1", "p", "c")


def test_nulls_that_parquet_adds_to_messages_are_dropped() -> None:
    assert prompt_of(row(prompt=[{**USER, "tool_calls": None}])) == [USER]


@pytest.mark.parametrize(
    ("read", "fields", "message"),
    [
        (prompt_of, {"text": "t", "id": 1}, "needs 'prompt' .*it has text, id"),
        (prompt_of, {"chosen": "c", "rejected": "r"}, "needs 'prompt' .*it has chosen, rejected"),
        (prompt_of, {"chosen": [USER, GOOD], "rejected": [AGAIN, BAD]}, "share no first message"),
        (prompt_of, {"prompt": 5}, "'prompt' must be a string or a list of messages.*'5'"),
        (prompt_of, {"prompt": []}, "'prompt' must be a string or a list of messages"),
        (prompt_of, {"prompt": [{"from": "human"}]}, "'role' and 'content'.*human"),
        (prompt_of, {"messages": [GOOD]}, "roles are assistant"),
        (exchange_of, {"prompt": "p"}, "needs .*'completion'.*it has prompt"),
        (exchange_of, {}, "it has no field at all"),
        (exchange_of, {"messages": [USER, GOOD, AGAIN]}, "must end with an assistant's message.*user, assistant, user"),
        (exchange_of, {"messages": "plain"}, "'messages' must be a list of messages"),
        (pair_of, {"prompt": "p", "chosen": "c"}, "needs 'chosen' and 'rejected'; it has prompt, chosen"),
        (pair_of, {"prompt": "p", "chosen": "c", "rejected": [BAD]}, "make them alike"),
        (pair_of, {"chosen": [GOOD], "rejected": [BAD]}, "needs 'prompt'"),
        (text_of, {"text": 3}, "'text' is a int"),
    ],
)
def test_errors_name_the_row_and_the_field(read: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^f\.jsonl:1: (?s:.*){message}"):
        read(row(**fields))
