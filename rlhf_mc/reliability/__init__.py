"""What keeps a run from losing work: requests to stop, the watchdog, the guard of updates, and the statuses that a rank ends with.

What does not live here: checkpoints (checkpoint/), and where in an iteration a run may be left (stages/leave.py). Issues no collective.
May import config and batch only.
"""

from rlhf_mc.reliability.guard import BadUpdateError, Guard, fault_of_experience, fault_of_norm, fault_of_sums
from rlhf_mc.reliability.stopping import StopAsked, Stopped, StopRequest
from rlhf_mc.reliability.watchdog import Watchdog

__all__ = [
    "BadUpdateError",
    "Guard",
    "StopAsked",
    "StopRequest",
    "Stopped",
    "Watchdog",
    "fault_of_experience",
    "fault_of_norm",
    "fault_of_sums",
]
