"""The verifiers of the package reasoning-gym as a reward function: `rlhf_mc.rewards.reasoning_gym:verify`.

A module of its own, so that a recipe that names it without the package installed is refused at start.
"""

from __future__ import annotations

import re

from rlhf_mc.rewards.builtin import field
from rlhf_mc.rewards.interface import RewardSample

try:
    from reasoning_gym import get_score_answer_fn
except ImportError as error:
    raise ImportError("the reward function verify needs the package reasoning-gym: pip install reasoning-gym") from error


def verify(sample: RewardSample, answer_tag: str | None = None) -> float:
    """The score, 0 to 1, of reasoning-gym's own verifier for the row's task.

    The row is an entry as reasoning-gym makes it: question, answer, and metadata with source_dataset. The answer is
    the whole response, or with `answer_tag` what stands last between <tag> and </tag>; none there scores 0.
    """
    answer = sample.response.strip()
    if answer_tag is not None:
        found = re.findall(rf"<{answer_tag}>(.*?)</{answer_tag}>", sample.response, re.DOTALL)
        if not found:
            return 0.0
        answer = found[-1].strip()
    return float(get_score_answer_fn(field(sample.row, "metadata.source_dataset"))(answer, sample.row))
