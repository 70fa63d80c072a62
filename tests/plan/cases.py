"""Cases for the tests of plan/: the recipes of Llama 3 on GPUs, with changes."""

from __future__ import annotations

from pathlib import Path

from rlhf_mc.plan.case import Case
from rlhf_mc.plan.machine import Machine
from rlhf_mc.recipe import load_settings

CONFIGS = Path(__file__).resolve().parents[2] / "scripts" / "configs"
SHAPES = CONFIGS / "shapes"


def llama_case(size: str, num_gpus: int, *overrides: str, host_gib: float = 2000, **machine) -> Case:
    """The recipe of Llama 3 `size` (8b or 70b) on H100s."""
    path = SHAPES / f"llama3_{size}"
    paths = [f"{role}.path={path}" for role in ("actor", "critic", "reward_model")]
    settings, _ = load_settings(["--config", str(CONFIGS / f"ppo_llama3_{size}.yaml"), *paths, *overrides], "train")
    return Case.of(settings, Machine.of("h100", num_gpus, host_gib, **machine))
