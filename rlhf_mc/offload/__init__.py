"""Where a model's memory is, and moving it: parts, arenas, host buffers, copy lanes, residency, the ledger of bytes.

What does not live here: when a role is needed (stages/), what its tensors mean (models/).
May import: config, batch, algorithms, parallel, models, and of medusa/ the shape of the heads.
"""

from rlhf_mc.offload.host_plan import plan_residency
from rlhf_mc.offload.ledger import Ledger
from rlhf_mc.offload.minimum import EMPTY, Visit
from rlhf_mc.offload.model_state import ModelState
from rlhf_mc.offload.parts import TRAINING, Part
from rlhf_mc.offload.residency import Residency, ResidencyError

__all__ = ["EMPTY", "TRAINING", "Ledger", "ModelState", "Part", "Residency", "ResidencyError", "Visit", "plan_residency"]
