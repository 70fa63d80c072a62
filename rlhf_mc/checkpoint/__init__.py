"""Checkpoints: everything that a run is, on disk, such that what is found there is whole, and a run goes on from it bit for bit.

What does not live here: when a run saves and what of it must be put back (stages/checkpoint.py).
May import all but stages/, train, launch and plan. Nothing here is pickled: tensors are safetensors, the rest is JSON.
"""

from rlhf_mc.checkpoint.disk import CheckpointError, FileRecord, write_file, write_tensors
from rlhf_mc.checkpoint.identity import check_same_run, identity, settings_record
from rlhf_mc.checkpoint.origin import Origin, find_origin
from rlhf_mc.checkpoint.saving import Saving
from rlhf_mc.checkpoint.snapshot import Snapshot

__all__ = [
    "CheckpointError",
    "FileRecord",
    "Origin",
    "Saving",
    "Snapshot",
    "check_same_run",
    "find_origin",
    "identity",
    "settings_record",
    "write_file",
    "write_tensors",
]
