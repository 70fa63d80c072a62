"""What the fields of a row mean: the formats of TRL and verl, and plain question and answer.

A row becomes a prompt, an exchange (prompt and response), or a pair of exchanges. Still text and messages; tokens
are made in `encode.py`. The formats are listed in docs/data.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlhf_mc.data.rows import DataError, Row

Message = dict[str, Any]
Content = str | list[Message]

PROMPT_FIELDS = ("prompt", "question")
RESPONSE_FIELDS = ("completion", "response", "answer")


@dataclass(frozen=True)
class Exchange:
    """A prompt and the response to it: two strings, or messages and the assistant's message that ends them.

    `prompt` None means that the response is the whole text and follows nothing.
    """

    where: str
    prompt: Content | None
    response: str | Message


def prompt_of(row: Row) -> Content:
    """What the policy answers. Of whole conversations, all before the response."""
    prompt = _content(row, *PROMPT_FIELDS)
    if prompt is not None:
        return prompt
    messages = _conversation(row, "messages")
    if messages is not None:
        return messages if messages[-1]["role"] != "assistant" else _last_turn(row, messages).prompt
    chosen, rejected = _content(row, "chosen"), _content(row, "rejected")
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _common_start(row, chosen, rejected)
    raise row.missing("'prompt' (or 'question', or 'messages', or 'chosen' and 'rejected' as message lists)")


def exchange_of(row: Row) -> Exchange:
    """A supervised example. Of several assistant turns, the last is the response."""
    messages = _conversation(row, "messages")
    if messages is not None:
        return _last_turn(row, messages)
    prompt, response = _content(row, *PROMPT_FIELDS), _content(row, *RESPONSE_FIELDS)
    if prompt is None or response is None:
        raise row.missing("'messages', or 'prompt' (or 'question') with 'completion' (or 'response' or 'answer')")
    return _join(row, prompt, response)


def pair_of(row: Row) -> tuple[Exchange, Exchange]:
    """The chosen and the rejected exchange of a preference row."""
    chosen, rejected = _content(row, "chosen"), _content(row, "rejected")
    if chosen is None or rejected is None:
        raise row.missing("'chosen' and 'rejected'")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise DataError(f"{row.where}: one of 'chosen' and 'rejected' is a string and the other a message list; make them alike")
    prompt = _content(row, *PROMPT_FIELDS)
    if not isinstance(prompt, list) and isinstance(chosen, list) and chosen[0]["role"] != "assistant":
        # Such lists carry the whole conversation; a string beside them only repeats its start.
        return _last_turn(row, chosen), _last_turn(row, rejected)
    if prompt is None and isinstance(chosen, str):
        return Exchange(row.where, None, chosen), Exchange(row.where, None, rejected)
    if prompt is None:
        raise row.missing("'prompt', since 'chosen' begins with the assistant's turn")
    return _join(row, prompt, chosen), _join(row, prompt, rejected)


def text_of(row: Row) -> Exchange:
    """Pretraining text, or a supervised example in its place."""
    text = row.get("text")
    if text is None:
        return exchange_of(row)
    if not isinstance(text, str):
        raise DataError(f"{row.where}: 'text' is a {type(text).__name__}; it must be a string")
    return Exchange(row.where, None, text)


def _content(row: Row, *names: str) -> Content | None:
    value = row.get(*names)
    if value is None or isinstance(value, str):
        return value
    name = next(name for name in names if row.get(name) is not None)
    return _messages(row, name, value, "a string or a list of messages")


def _conversation(row: Row, name: str) -> list[Message] | None:
    value = row.get(name)
    return None if value is None else _messages(row, name, value, "a list of messages")


def _messages(row: Row, name: str, value: Any, wanted: str) -> list[Message]:
    """The message list, without the null fields that parquet adds to make all messages alike."""
    valid = isinstance(value, list) and value and all(_is_message(item) for item in value)
    if not valid:
        raise DataError(f"{row.where}: '{name}' must be {wanted} with 'role' and 'content'; it is {str(value)[:80]!r}")
    return [{field: part for field, part in message.items() if part is not None} for message in value]


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item


def _join(row: Row, prompt: Content, response: Content) -> Exchange:
    if isinstance(prompt, str) and isinstance(response, str):
        return Exchange(row.where, prompt, response)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    after = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
    return _last_turn(row, before + after)


def _last_turn(row: Row, conversation: list[Message]) -> Exchange:
    if len(conversation) < 2 or conversation[-1]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in conversation)
        raise DataError(f"{row.where}: a conversation must end with an assistant's message after another; its roles are {roles}")
    return Exchange(row.where, conversation[:-1], conversation[-1])


def _common_start(row: Row, chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Messages that both lists begin with, the last message of each left out: that one is a response."""
    shortest = min(len(chosen), len(rejected)) - 1
    same = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if same == 0:
        raise DataError(f"{row.where}: 'chosen' and 'rejected' share no first message, and there is no 'prompt'")
    return chosen[:same]
