"""Training with offload between every two stages is the training without, bit for bit."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from ranks import Layout

from rlhf_mc.batch import SequenceBatch, offsets_of


def random_batch(seed: int = 0) -> SequenceBatch:
    """Six sequences."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([9, 13, 5, 20, 11, 7])
    tokens = torch.randint(0, tiny_models.VOCAB, (int(lengths.sum()),), generator=generator)
    mask = torch.ones(tokens.numel(), dtype=torch.bool)
    mask[offsets_of(lengths)[:-1]] = False
    return SequenceBatch(tokens, lengths, mask)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("layout", "steps"), [(Layout(), 20), (Layout(data=2), 5), (Layout(tensor=2), 3), (Layout(pipeline=2), 3)], ids=str)
def test_offload_changes_no_bit_of_training(ranks, language_model, value_model, layout, steps, dtype, distributed):
    if layout.size > 1 and not distributed and dtype == "fp32":
        pytest.skip("nothing here that one rank, or the other combinations on two ranks, do not show")
    arguments = dict(language=language_model("llama"), value=value_model("qwen2"), batch=random_batch(), dtype=dtype, distributed=distributed)
    different = ranks.run("offload.on_ranks:compare_training", layout, steps=steps, **arguments)
    assert different == [[]] * layout.size
