"""What a run tells: metrics, samples, time and memory by stage, trace, wandb.

Lives here: everything that is written or printed, by rank 0 only but for the traces. Not here: the numbers themselves, which
the stages compute and reduce. Issues no collective.
May import config, recipe and batch.
"""

from rlhf_mc.tracking.clock import StageClock
from rlhf_mc.tracking.data_metrics import rollout_metrics, sampling_metrics
from rlhf_mc.tracking.overlap import Overlap, overlap_of
from rlhf_mc.tracking.text import Comparison, SampleRow
from rlhf_mc.tracking.trace import Span, Trace
from rlhf_mc.tracking.tracker import Tracker

__all__ = ["Comparison", "Overlap", "SampleRow", "Span", "StageClock", "Trace", "Tracker", "overlap_of", "rollout_metrics", "sampling_metrics"]
