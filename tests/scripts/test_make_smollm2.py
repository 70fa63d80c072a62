"""SmolLM2 from its GGUF file: the weights, the tokenizer, and that it speaks."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import make_smollm2
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors import safe_open
from transformers import AutoTokenizer, PreTrainedTokenizerBase


@pytest.fixture(scope="module")
def making(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The model's directory, and what the script said."""
    directory = tmp_path_factory.mktemp("smollm2") / "model"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        make_smollm2.main([str(directory), "--dtype", "bf16"])
    return directory, said.getvalue()


@pytest.fixture(scope="module")
def model(making: tuple[Path, str]) -> Path:
    return making[0]


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


def llama_cpp_permute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What llama.cpp's converter does to q and k: row j of half s of a head goes to row 2j + s."""
    head_dim = weight.shape[0] // num_heads
    permuted = torch.empty_like(weight)
    for head in range(num_heads):
        for half in range(2):
            for j in range(head_dim // 2):
                permuted[head * head_dim + 2 * j + half] = weight[head * head_dim + half * head_dim // 2 + j]
    return permuted


def test_unpermute_undoes_llama_cpp():
    weight = torch.arange(3 * 8 * 5).reshape(24, 5)
    permuted = llama_cpp_permute(weight, num_heads=3)
    assert not torch.equal(permuted, weight)
    assert torch.equal(make_smollm2.unpermute(permuted, num_heads=3), weight)


def test_every_tensor_is_there_and_holds_what_the_file_holds(model: Path):
    reader = GGUFReader(make_smollm2.find_gguf())
    with safe_open(model / "model.safetensors", "pt") as file:
        assert len(file.keys()) == len(reader.tensors) == 272
        by_name = {tensor.name: tensor for tensor in reader.tensors}
        key = by_name["blk.7.attn_k.weight"]
        stored = file.get_tensor("model.layers.7.self_attn.k_proj.weight")
        expected = torch.tensor(dequantize(key.data, key.tensor_type)).bfloat16()
        assert torch.equal(llama_cpp_permute(stored, num_heads=3), expected)


def test_it_knows_the_capital_of_france(making: tuple[Path, str]):
    assert making[1].strip().endswith("What is the capital of France? The capital of France is Paris.")


def test_a_wrong_conversion_is_found_out_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(make_smollm2, "unpermute", lambda weight, num_heads: weight)
    with pytest.raises(SystemExit, match="should name Paris, so the conversion is wrong"):
        make_smollm2.main([str(tmp_path / "model")])
    assert not list(tmp_path.iterdir())


def test_special_tokens_are_single_ids_and_text_survives(tokenizer: PreTrainedTokenizerBase):
    assert tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids == [1, 4093, 198, 6004, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    for text in ("It's 1234 o'clock,  été\n\n\tend", " leading", "数 and 😀", "<|im_start|>a<|im_end|>"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_digits_are_split(tokenizer: PreTrainedTokenizerBase):
    assert tokenizer.convert_ids_to_tokens(tokenizer("12 x345").input_ids) == ["1", "2", "Ġx", "3", "4", "5"]


def test_chat_template_opens_the_assistants_turn(tokenizer: PreTrainedTokenizerBase):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_second_run_does_nothing_and_another_dtype_is_refused(model: Path, capsys: pytest.CaptureFixture[str]):
    make_smollm2.main([str(model), "--dtype", "bf16"])
    assert "already" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="dtype: bf16, now fp32"):
        make_smollm2.main([str(model), "--dtype", "fp32"])
