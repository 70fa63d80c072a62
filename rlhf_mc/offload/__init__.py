"""Where a model's memory is, and moving it: parts, arenas, host buffers, copy lanes, residency, the ledger of bytes.

What does not live here: when a role is needed (stages/), what its tensors mean (models/).
May import: config, batch, algorithms, parallel, models, and of medusa/ the shape of the heads.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_mc.offload.host_plan import plan_residency
    from rlhf_mc.offload.ledger import Ledger
    from rlhf_mc.offload.minimum import EMPTY, Visit
    from rlhf_mc.offload.model_state import ModelState
    from rlhf_mc.offload.parts import TRAINING, Part
    from rlhf_mc.offload.residency import Residency, ResidencyError

__all__ = ["EMPTY", "TRAINING", "Ledger", "ModelState", "Part", "Residency", "ResidencyError", "Visit", "plan_residency"]

_HOMES = {
    "EMPTY": "minimum",
    "Ledger": "ledger",
    "ModelState": "model_state",
    "Part": "parts",
    "Residency": "residency",
    "ResidencyError": "residency",
    "TRAINING": "parts",
    "Visit": "minimum",
    "plan_residency": "host_plan",
}


def __getattr__(name: str) -> Any:
    """Loads the file that has `name` when it is first asked for: plans read the sizes that are here without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
