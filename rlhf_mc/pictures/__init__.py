"""Pictures of a run, from what it left on disk: what was learned, and where the time and the memory of an iteration went.

The only room that imports matplotlib. It imports settings' errors, the trace's names and texts of sizes, and no model.
"""

from rlhf_mc.pictures.draw import draw

__all__ = ["draw"]
