"""Metrics that compare the ranks."""

from __future__ import annotations

import pytest
from ranks import Layout


def test_the_slowest_rank_of_a_stage_shows(ranks):
    for found in ranks.run("stages.on_ranks:stragglers", Layout(data=2)):
        assert found == {"straggler/score": pytest.approx(2.0 / 1.5), "straggler/train": 1.0}
