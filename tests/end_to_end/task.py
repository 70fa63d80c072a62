"""A task and models that PPO can run on in seconds: digits to sort, and random Llamas and their kin with 2 layers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import make_tiny_task
import tiny_models
import torch
from transformers import PreTrainedModel

_ROWS = {"train": 64, "validation": 6, "sft": 24, "preferences": 24}
# What both vLLM's CPU attention (heads of 32 and more) and two tensor-parallel or pipeline ranks can take.
_SIZES = dict(
    vocab_size=15, hidden_size=128, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, bos_token_id=1, eos_token_id=2, pad_token_id=2,
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Where the files are."""

    directory: Path

    @property
    def data(self) -> Path:
        """Rows and tokenizer, as scripts/make_tiny_task.py makes them."""
        return self.directory / "task"

    def model(self, family: str, value_head: bool = False, num_layers: int = 2) -> str:
        """The directory of a model of `family` with the task's tokenizer, made where it is not there yet."""
        path = self.directory / f"{family}-{num_layers}{'-value' if value_head else ''}"
        if not path.exists():
            make = tiny_models.tiny_value_model if value_head else tiny_models.tiny_language_model
            tiny_models.save_model(_calmed(make(family, **_SIZES, num_hidden_layers=num_layers)), path)
            for file in (self.data / "model").glob("token*"):
                shutil.copyfile(file, path / file.name)
        return str(path)

    def overrides(self, output_dir: Path, family: str = "llama") -> dict[str, str]:
        """Settings of a short PPO run in fp32, by key; 8 prompts of 2 samples an iteration."""
        return {
            "trainer.output_dir": str(output_dir),
            "trainer.dtype": "fp32",
            "trainer.iterations": "3",
            "data.train": f"[{self.data}/prompts.jsonl]",
            "data.validation": f"[{self.data}/validation.jsonl]",
            "data.chat_template": "false",
            "data.max_prompt_tokens": "16",
            "data.prompts_per_iteration": "8",
            "actor.path": self.model(family),
            "actor.optim.lr": "1e-3",
            "actor.micro_batch": "{tokens: null, sequences: 4}",
            "actor.scoring_micro_batch": "{tokens: null, sequences: 4}",
            "reference.scoring_micro_batch": "{tokens: null, sequences: 4}",
            "critic.optim.lr": "1e-3",
            "reward_model.path": self.model("llama", value_head=True),
            "rollout.samples_per_prompt": "2",
            "rollout.max_tokens": "8",
            "rollout.max_running_sequences": "16",
            "rollout.kv_cache_gib": "0.01",
            "wandb.mode": "disabled",
        }


def _calmed(model: PreTrainedModel) -> PreTrainedModel:
    """Smaller matrices: the logits of one that writes text are not larger, so rounding errors are what they are there."""
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.mul_(0.6)
    return model


def make_task(directory: Path) -> Task:
    """Writes rows and tokenizer into `directory`."""
    rows = [f"--num-{name}={number}" for name, number in _ROWS.items()]
    make_tiny_task.main([str(directory / "task"), "--hidden-size=32", "--num-layers=1", *rows])
    return Task(directory)


def written(overrides: dict[str, str]) -> list[str]:
    """As on a command line."""
    return [f"{key}={value}" for key, value in overrides.items()]
