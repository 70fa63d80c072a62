"""What is said of the replicas after a rollout."""

from __future__ import annotations

import pytest

from rlhf_mc.pipeline.control import ReplicaLoad
from rlhf_mc.pipeline.generation import load_metrics

FAST = ReplicaLoad(tokens=300, busy=1.0, idle=2.0, running=10.0, longest=40)
SLOW = ReplicaLoad(tokens=300, busy=3.0, idle=0.0, running=4.0, longest=128)
IDLE = ReplicaLoad(tokens=0, busy=0.0, idle=3.0, running=0.0, longest=0)


def test_the_slowest_replica_shows():
    metrics = load_metrics([FAST, SLOW])
    assert metrics["rollout/tokens_per_second"] == 200.0
    assert metrics["rollout/tokens_per_second/slowest_replica"] == 100.0
    assert metrics["rollout/slowest_replica_share"] == pytest.approx(1.5)
    assert (metrics["rollout/idle_seconds"], metrics["rollout/longest_response"], metrics["rollout/sequences_running"]) == (2.0, 128.0, 7.0)
    assert metrics["rollout/replica_0/tokens_per_second"] == 300.0 and metrics["rollout/replica_1/longest"] == 128.0


def test_a_replica_without_samples_slows_nobody():
    metrics = load_metrics([FAST, IDLE])
    assert metrics["rollout/tokens_per_second"] == metrics["rollout/tokens_per_second/slowest_replica"] == 300.0
    assert metrics["rollout/replica_1/tokens_per_second"] == 0.0
    assert load_metrics([IDLE]) == {}


def test_many_replicas_have_no_numbers_of_their_own():
    assert not any(name.startswith("rollout/replica_") for name in load_metrics([FAST] * 9))
