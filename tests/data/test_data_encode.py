"""Tokens: templates, BOS, EOS, the border between prompt and response, and vocabularies that must agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from character_tokenizer import CHATML, character_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_mc.config import ConfigError
from rlhf_mc.data import DataError, Encoder, check_same_vocabulary, load_tokenizer
from rlhf_mc.data.formats import Exchange, Message

EOS = "<|im_end|>"
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "ok"}
TEXT = st.text(alphabet="ab \n.", max_size=8)


def text(encoder: Encoder, ids: list[int]) -> str:
    return "".join(encoder.tokenizer.convert_ids_to_tokens(ids))


def encode_one(encoder: Encoder, prompt: str | list[Message] | None, response: str | Message) -> tuple[str, str]:
    (encoded,) = encoder.exchanges([Exchange("f.jsonl:1", prompt, response)])
    return text(encoder, encoded.prompt), text(encoder, encoded.response)


def test_messages_and_strings_go_through_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer, chat_template=True)
    encoded = encoder.prompts([[USER], "hi"], ["f:1", "f:2"])
    assert encoded[0] == encoded[1] == tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert text(encoder, encoded[0]) == f"<|im_start|>user\nhi{EOS}\n<|im_start|>assistant\n"


def test_strings_stay_raw_without_wish_or_template() -> None:
    for encoder in (Encoder(character_tokenizer(), chat_template=False), Encoder(character_tokenizer(template=None))):
        assert text(encoder, encoder.prompts(["hi"], ["f:1"])[0]) == "hi"


def test_messages_use_the_template_even_where_strings_do_not(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer, chat_template=False)
    assert encoder.prompts([[USER]], ["f:1"])[0] == Encoder(tokenizer).prompts(["hi"], ["f:1"])[0]


def test_a_tokenizer_that_adds_bos_and_eos_keeps_only_bos_and_only_on_raw_text() -> None:
    tokenizer = character_tokenizer(adds_bos=True)
    assert tokenizer("hi").input_ids[-1] == tokenizer.eos_token_id, "the premise: this one would close a prompt with EOS"
    raw = Encoder(tokenizer, chat_template=False)
    assert text(raw, raw.prompts(["hi"], ["f:1"])[0]) == "<s>hi"
    assert encode_one(raw, "hi", "ok") == ("<s>hi", "ok" + EOS)
    assert "<s>" not in text(raw, raw.prompts([[USER]], ["f:1"])[0])


def test_a_begun_answer_is_continued(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer)
    (ids,) = encoder.prompts([[USER, {"role": "assistant", "content": "Let me"}]], ["f:1"])
    assert text(encoder, ids).endswith("<|im_start|>assistant\nLet me")


def test_many_texts_keep_their_places(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer, chat_template=False)
    prompts = [str(i) for i in range(2500)]
    assert [text(encoder, ids) for ids in encoder.prompts(prompts, prompts)] == prompts


def test_empty_prompt_is_an_error(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="f:2: the prompt is empty"):
        Encoder(tokenizer, chat_template=False).prompts(["a", ""], ["f:1", "f:2"])


def test_messages_without_template() -> None:
    with pytest.raises(DataError, match="f:1: the row holds messages, but the tokenizer has no chat template"):
        Encoder(character_tokenizer(template=None)).prompts([[USER]], ["f:1"])


def test_a_template_that_refuses_is_named() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    with pytest.raises(DataError, match="f:1: the chat template refuses the messages: no system role here"):
        Encoder(character_tokenizer(template)).prompts([[{"role": "system", "content": "s"}]], ["f:1"])


def test_response_ends_at_eos_not_at_the_newline_of_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt, response = encode_one(Encoder(tokenizer), [USER], ANSWER)
    assert prompt.endswith("<|im_start|>assistant\n")
    assert response == "ok" + EOS


def test_eos_is_added_where_the_template_has_another_end() -> None:
    _, response = encode_one(Encoder(character_tokenizer(eos="<s>")), [USER], ANSWER)
    assert response == f"ok{EOS}\n<s>"


def test_eos_is_added_once_to_raw_text(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = Encoder(tokenizer, chat_template=False)
    assert encode_one(encoder, "p", "r \n") == ("p", "r \n" + EOS)
    assert encode_one(encoder, "p", f"r{EOS}") == ("p", "r" + EOS)
    assert encode_one(encoder, "p", "") == ("p", EOS)
    assert encode_one(encoder, None, "whole") == ("", "whole" + EOS)


def test_no_eos_token() -> None:
    with pytest.raises(ConfigError, match="no EOS token"):
        encode_one(Encoder(character_tokenizer(eos=None), chat_template=False), "p", "r")


def test_a_template_that_rewrites_the_prompt_is_an_error() -> None:
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with pytest.raises(DataError, match=r"f\.jsonl:1: the chat template does not write .* as a continuation"):
        encode_one(Encoder(character_tokenizer(template)), [USER], ANSWER)


@settings(deadline=None, max_examples=50)
@given(prompt=TEXT.filter(bool), response=TEXT, chat_template=st.booleans(), adds_bos=st.booleans())
def test_sft_and_ppo_give_a_prompt_the_same_tokens(prompt: str, response: str, chat_template: bool, adds_bos: bool) -> None:
    encoder = Encoder(character_tokenizer(adds_bos=adds_bos), chat_template)
    (encoded,) = encoder.exchanges([Exchange("f:1", prompt, response)])
    assert encoded.prompt == encoder.prompts([prompt], ["f:1"])[0]
    assert encoded.response[-1] == encoder.eos
    assert encoded.response.count(encoder.eos) == 1


def test_a_merge_over_the_border_is_not_made() -> None:
    """'a' + 'b' has a token 'ab', which a sampler that was given 'a' cannot produce."""
    bpe = models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "</s>": 3}, merges=[("a", "b")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(bpe), eos_token="</s>")
    assert tokenizer("ab").input_ids == [2]
    (encoded,) = Encoder(tokenizer).exchanges([Exchange("f:1", "a", "bab")])
    assert (encoded.prompt, encoded.response) == ([0], [1, 2, 3])


def test_a_response_gets_no_word_start_of_its_own() -> None:
    """SentencePiece-like tokenizers begin every text with a space; a response is not the beginning."""
    vocabulary = {"▁": 0, "h": 1, "i": 2, "</s>": 3}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    assert tokenizer("i").input_ids == [0, 2]
    (encoded,) = Encoder(tokenizer).exchanges([Exchange("f:1", "h", "i")])
    assert (encoded.prompt, encoded.response) == ([0, 1], [2, 3])


def test_load_tokenizer(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    check_same_vocabulary(tokenizer, loaded, "actor.path", "reward_model.path")
    assert Encoder(loaded).prompts([[USER]], ["f:1"]) == Encoder(tokenizer).prompts([[USER]], ["f:1"])


def test_load_tokenizer_without_directory_or_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no model directory '.*nowhere'"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.add_tokens(AddedToken("<new>")),
            r"actor\.path \(103 tokens\).*reward_model\.path \(104 tokens\).*no token against '<new>'",
        ),
        (lambda t: setattr(t, "eos_token", "<s>"), "eos_token_id is 2 for actor.path and 0 for reward_model.path"),
        (lambda t: setattr(t, "bos_token", None), "bos_token_id is 0 for actor.path and None for reward_model.path"),
    ],
)
def test_different_vocabularies_are_named(change: Callable[[PreTrainedTokenizerFast], object], message: str) -> None:
    other = character_tokenizer()
    change(other)
    with pytest.raises(ConfigError, match=message):
        check_same_vocabulary(character_tokenizer(), other, "actor.path", "reward_model.path")


def test_swapped_tokens_are_named() -> None:
    with pytest.raises(ConfigError, match="differ, first at id 3: 'a' against 'b'"):
        check_same_vocabulary(character_tokenizer(characters="ab?"), character_tokenizer(characters="ba?"), "a", "b")


def test_another_padding_token_is_no_difference() -> None:
    other = character_tokenizer()
    other.pad_token = "<s>"
    check_same_vocabulary(character_tokenizer(), other, "actor.path", "reward_model.path")
