"""Text and messages become token ids: the tokenizer, its chat template, and where a response starts and ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jinja2
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf_mc.config import ConfigError
from rlhf_mc.data.formats import Content, Exchange, Message
from rlhf_mc.data.rows import DataError

TEXTS_PER_CALL = 1024


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face directory. Never downloads. Raises ConfigError."""
    if not Path(path).is_dir():
        raise ConfigError(f"there is no model directory '{path}'; name a local Hugging Face directory")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # of many kinds: a broken file, a config.json that contradicts itself, a class that is not there
        raise ConfigError(f"the tokenizer in '{path}' cannot be loaded: {error}") from error


def check_same_vocabulary(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase, key_a: str, key_b: str) -> None:
    """Raise ConfigError unless both tokenizers give every id the same token, and agree on BOS and EOS.

    The padding token may differ: sequences are never padded. `key_a` and `key_b` are the settings that name the models.
    """
    tokens_a, tokens_b = ({index: token for token, index in t.get_vocab().items()} for t in (a, b))
    fix = f"token ids pass between these models as they are; take {key_a} and {key_b} from one family"
    ids = sorted(tokens_a.keys() | tokens_b.keys())
    different = next((i for i in ids if tokens_a.get(i) != tokens_b.get(i)), None)
    if different is not None:
        raise ConfigError(
            f"the vocabularies of {key_a} ({len(tokens_a)} tokens) and {key_b} ({len(tokens_b)} tokens) differ, "
            f"first at id {different}: {_shown(tokens_a.get(different))} against {_shown(tokens_b.get(different))}; {fix}"
        )
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(a, name) != getattr(b, name):
            raise ConfigError(f"{name} is {getattr(a, name)} for {key_a} and {getattr(b, name)} for {key_b}; {fix}")


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


@dataclass(frozen=True)
class EncodedExchange:
    """Token ids of a prompt and of the response, which ends with EOS."""

    prompt: list[int]
    response: list[int]


@dataclass(frozen=True)
class _Text:
    """Text as the tokenizer gets it. `raw` text gets a BOS if the tokenizer is of that habit; a template writes its own."""

    text: str
    raw: bool


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with the rule for strings: `chat_template` wraps a string prompt as one user message.

    Message lists always go through the tokenizer's chat template; without one they raise DataError. A string prompt stays
    as it is where the tokenizer has no template.
    """

    tokenizer: PreTrainedTokenizerBase
    chat_template: bool = True

    @cached_property
    def eos(self) -> int:
        """Id of the token that ends a response. Raises ConfigError where the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise ConfigError("the tokenizer has no EOS token, so no response can end; set eos_token in tokenizer_config.json")
        return self.tokenizer.eos_token_id

    @cached_property
    def _bos(self) -> list[int]:
        """[BOS] if the tokenizer itself puts it before a text, else []. Other special tokens it would add are left out."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer("").input_ids[:1] == [bos] else []

    def prompts(self, prompts: Sequence[Content], wheres: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt, ready for a response to follow. `wheres` names the row of each, for errors."""
        encoded = self._encode([self._prompt_text(prompt, where) for prompt, where in zip(prompts, wheres, strict=True)])
        for tokens, where in zip(encoded, wheres, strict=True):
            if not tokens:
                raise DataError(f"{where}: the prompt is empty; at least one token is needed to answer to")
        return encoded

    def exchanges(self, exchanges: Sequence[Exchange]) -> list[EncodedExchange]:
        """Token ids of prompts and responses. A prompt has the same ids as `prompts` gives it; EOS ends each response."""
        before = [self._text_before(exchange) for exchange in exchanges]
        after = [self._response_text(exchange, head) for exchange, head in zip(exchanges, before, strict=True)]
        heads = self._encode(before)
        wholes = self._encode([_Text(head.text + tail, head.raw) for head, tail in zip(before, after, strict=True)])
        return [
            EncodedExchange(head, self._response(head, whole, tail))
            for head, whole, tail in zip(heads, wholes, after, strict=True)
        ]

    def _encode(self, texts: Sequence[_Text]) -> list[list[int]]:
        encoded = self._token_ids([text.text for text in texts])
        return [self._bos + ids if text.raw else ids for text, ids in zip(texts, encoded, strict=True)]

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        """Ids of the texts alone. In blocks, because the tokenizer's own records of a text are many times its size."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), TEXTS_PER_CALL):
            block = texts[start : start + TEXTS_PER_CALL]
            ids += self.tokenizer(block, add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
        return ids

    def _response(self, head: list[int], whole: list[int], tail: str) -> list[int]:
        """Ids after the prompt. Where the tokenizer merges over the border, the response is encoded alone: a sampled
        response can only begin behind the prompt's own last token."""
        response = whole[len(head) :] if whole[: len(head)] == head else self._token_ids([tail])[0]
        return response if response[-1:] == [self.eos] else [*response, self.eos]

    def _text_before(self, exchange: Exchange) -> _Text:
        return _Text("", raw=True) if exchange.prompt is None else self._prompt_text(exchange.prompt, exchange.where)

    def _prompt_text(self, prompt: Content, where: str) -> _Text:
        if isinstance(prompt, str) and not self._wraps_strings:
            return _Text(prompt, raw=True)
        messages = _as_messages(prompt)
        return _Text(self._render(messages, where, open_end=True), raw=False)

    def _response_text(self, exchange: Exchange, before: _Text) -> str:
        """The response as the template writes it, without the white space that some put behind EOS."""
        if before.raw:
            text = exchange.response
        else:
            whole = self._render([*_as_messages(exchange.prompt), _as_answer(exchange.response)], exchange.where, open_end=False)
            if not whole.startswith(before.text):
                raise DataError(
                    f"{exchange.where}: the chat template does not write the conversation as a continuation of its prompt; "
                    "use another template, or give prompt and completion as strings with data.chat_template=false"
                )
            text = whole[len(before.text) :]
        end = self.tokenizer.convert_ids_to_tokens(self.eos)
        return text.rstrip() if text.rstrip().endswith(end) else text

    @property
    def _wraps_strings(self) -> bool:
        return self.chat_template and self.tokenizer.chat_template is not None

    def _render(self, messages: list[Message], where: str, open_end: bool) -> str:
        """Text of the messages; `open_end` leaves it where the assistant's text starts, or goes on if it has begun."""
        if self.tokenizer.chat_template is None:
            raise DataError(f"{where}: the row holds messages, but the tokenizer has no chat template to write them with")
        begun = messages[-1]["role"] == "assistant"
        try:
            return self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=open_end and not begun,
                continue_final_message=open_end and begun,
            )
        except (jinja2.TemplateError, ValueError, TypeError) as error:
            raise DataError(f"{where}: the chat template refuses the messages: {error}") from error


def _as_messages(prompt: Content) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _as_answer(response: str | Message) -> Message:
    return {"role": "assistant", "content": response} if isinstance(response, str) else response
