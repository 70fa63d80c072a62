"""A tokenizer made on the spot: one token a character, with a template like ChatML."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]


def character_tokenizer(
    template: str | None = CHATML, adds_bos: bool = False, eos: str | None = "<|im_end|>", characters: str = string.printable
) -> PreTrainedTokenizerFast:
    """One token a character; pad is eos on purpose."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A <|im_end|>", special_tokens=[("<s>", 0), ("<|im_end|>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token=eos,
        pad_token=eos,
        additional_special_tokens=SPECIAL,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
