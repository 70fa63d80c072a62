"""A reward model that was trained here is a classifier that transformers loads."""

from __future__ import annotations

import pytest
import torch
from ranks import Layout
from tiny_models import random_batch, reference_scores
from transformers import AutoModelForSequenceClassification

PAIRS = random_batch([9, 13, 5, 20, 11, 7])


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(pipeline=2)], ids=str)
def test_transformers_gives_the_scores_that_training_left(ranks, language_model, tmp_path, layout):
    """From a language model, so that the head starts at zero, as do the scores."""
    arguments = dict(directory=language_model("qwen3"), batch=PAIRS, num_steps=2, output=str(tmp_path))
    ours, _ = ranks.run("stages.on_ranks:trained_reward_model", layout, **arguments)
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True, attn_implementation="eager")
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.config.num_labels == 1
    with torch.no_grad():
        theirs = reference_scores(model, PAIRS).squeeze(-1)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert (theirs[0::2] > theirs[1::2]).all(), "it did not learn"
