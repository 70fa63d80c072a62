"""An update whose gradient is not finite, or too large, changes nothing on any rank; and a good one is megatron's own step."""

from __future__ import annotations

import math

import pytest
from ranks import Layout, RankPool
from tiny_models import random_batch

BATCH = random_batch([9, 4, 12, 5])


@pytest.mark.parametrize("max_norm", [None, 1e-6], ids=["nan", "beyond the bound"])
@pytest.mark.parametrize("distributed_optimizer", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize(("layout", "dtype"), [(Layout(data=2), "bf16"), (Layout(tensor=2), "fp32"), (Layout(pipeline=2), "fp32")], ids=str)
def test_no_bit_changes(ranks: RankPool, language_model, layout, dtype, distributed_optimizer, max_norm) -> None:
    arguments = dict(directory=language_model("qwen2"), batch=BATCH, dtype=dtype, distributed_optimizer=distributed_optimizer)
    answers = ranks.run("models.on_ranks:steps_around_a_bad_one", layout, spoilt=1, max_norm=max_norm, **arguments)
    for answer in answers:
        first, bad, last = answer["norms"]
        assert first > 0.1 and last > 0.1, "clipping takes part"
        assert bad > 1e-6 if max_norm else math.isnan(bad)
        assert answer["unchanged"] and answer["as_the_twin"] and answer["moved"]
    assert any(answer["bad"] for answer in answers) == (max_norm is None), "the ranks that have it can be named"
