"""Experience on disk: one JSONL file an iteration, written beside the update, and read back to the same bits.

What does not live here: when a run writes such a file or trains from one (stages/). Issues no collective.
May import config and batch only.
"""

from rlhf_mc.rollout_files.conditions import check_replay, conditions
from rlhf_mc.rollout_files.files import RolloutWriteError, read_header, read_rollout, write_rollout
from rlhf_mc.rollout_files.lines import Header
from rlhf_mc.rollout_files.writer import BackgroundWriter

__all__ = [
    "BackgroundWriter",
    "Header",
    "RolloutWriteError",
    "check_replay",
    "conditions",
    "read_header",
    "read_rollout",
    "write_rollout",
]
