"""Order: each epoch holds each row once, and a batch depends on its number only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_mc.data import Order

SIZES = st.integers(1, 40)
SEEDS = st.integers(-(2**63), 2**63)


def batch(order: Order, index: int, size: int) -> list[int]:
    return order.rows(order.positions(index, size)).tolist()


@settings(deadline=None, max_examples=50)
@given(num_rows=SIZES, size=SIZES, seed=SEEDS, shuffle=st.booleans(), epochs=st.integers(1, 4))
def test_every_epoch_holds_every_row_once(num_rows: int, size: int, seed: int, shuffle: bool, epochs: int) -> None:
    order = Order(num_rows, seed, shuffle)
    num_batches = order.num_batches(size, epochs)
    seen = [row for index in range(num_batches) for row in batch(order, index, size)]
    assert (num_batches - 1) * size < num_rows * epochs <= len(seen)
    for epoch in range(epochs):
        assert sorted(seen[epoch * num_rows : (epoch + 1) * num_rows]) == list(range(num_rows))


@settings(deadline=None, max_examples=50)
@given(num_rows=SIZES, size=SIZES, seed=SEEDS, indices=st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_a_batch_does_not_depend_on_the_batches_before_it(num_rows: int, size: int, seed: int, indices: list[int]) -> None:
    used = Order(num_rows, seed)
    visited = [batch(used, index, size) for index in indices]
    assert visited == [batch(Order(num_rows, seed), index, size) for index in indices]


@settings(deadline=None, max_examples=50)
@given(num_rows=SIZES, size=SIZES, other=SIZES, seed=SEEDS)
def test_the_batch_size_does_not_change_the_sequence(num_rows: int, size: int, other: int, seed: int) -> None:
    order = Order(num_rows, seed)
    as_one = batch(order, 0, size * other)
    assert [row for index in range(other) for row in batch(order, index, size)] == as_one


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = [Order(100, seed).epoch(epoch).tolist() for seed in (1, 2) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert list(range(100)) not in orders


def test_the_order_of_a_seed_is_fixed() -> None:
    """A resumed run must meet the order it left, after a library update too."""
    assert Order(8, seed=1).epoch(0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]


def test_without_shuffle_rows_come_in_file_order() -> None:
    assert batch(Order(3, seed=1, shuffle=False), 1, 4) == [1, 2, 0, 1]


def test_rows_keep_the_type_of_positions() -> None:
    order = Order(5, seed=3)
    assert order.rows(order.positions(2, 3)).dtype == torch.int64


def test_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_rows=0"):
        Order(0, seed=1)
