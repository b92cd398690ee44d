"""Every record once a pass, and no client's batches disturbed by another's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normec import UsageError
from normec.sampling.batches import Batches, rounds_of

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def batches(sizes: list[int], batch_size: int, seed: int = 0) -> Batches:
    return Batches(torch.tensor(sizes), batch_size, seed)


def one(source: Batches, client: int, round: int) -> list[int]:
    (drawn,) = source.draw(torch.tensor([client]), round)
    return drawn.tolist()


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(sizes=SIZES, batch_size=st.integers(1, 12), seed=st.integers(0, 2**32))
def test_a_pass_takes_each_record_once_and_leaves_less_than_a_batch(
    sizes: list[int], batch_size: int, seed: int
) -> None:
    source = batches(sizes, batch_size, seed)
    for client, size in enumerate(sizes):
        steps = max(1, size // batch_size)
        for number in range(3):
            drawn = [one(source, client, number * steps + step) for step in range(steps)]
            assert all(len(batch) == min(size, batch_size) for batch in drawn)
            flat = [record for batch in drawn for record in batch]
            assert len(set(flat)) == len(flat) == size - (size % batch_size if size >= batch_size else 0)
            assert 0 <= min(flat) <= max(flat) < size


@settings(max_examples=30, deadline=None)
@given(sizes=SIZES, batch_size=st.integers(1, 12), seed=st.integers(0, 2**32), first=st.integers(0, 2**40))
def test_a_gpu_draws_the_same_orders_in_tensors(sizes: list[int], batch_size: int, seed: int, first: int) -> None:
    source = batches(sizes, batch_size, seed)
    clients = torch.arange(len(sizes)).repeat(3)
    passes = first + torch.arange(3).repeat_interleave(len(sizes))
    on_host, in_tensors = source._orders(clients, passes), source.orders_in_tensors(clients, passes)
    for client, one_way, other in zip(clients.tolist(), on_host, in_tensors, strict=True):
        assert one_way[: sizes[client]].tolist() == other[: sizes[client]].tolist()


def test_each_pass_has_an_order_of_its_own_and_leftovers_change() -> None:
    source = batches([23], 5)
    passes = [[one(source, 0, 4 * number + step) for step in range(4)] for number in range(30)]
    flat = [tuple(record for batch in one_pass for record in batch) for one_pass in passes]
    assert len(set(flat)) == 30
    left = [set(range(23)) - set(order) for order in flat]
    assert all(len(records) == 3 for records in left)
    assert set.union(*left) == set(range(23))  # nobody is left out for good


@pytest.mark.slow
def test_orders_are_uniform() -> None:
    """Which record comes first, over many passes."""
    source = batches([6], 1, seed=5)
    first = torch.tensor([one(source, 0, 6 * number)[0] for number in range(1200)])
    counts = first.bincount(minlength=6).double()
    chi = float(((counts - 200) ** 2 / 200).sum())
    assert chi < 5 + 5 * math.sqrt(2 * 5)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, batch_size=st.integers(1, 12), data=st.data())
def test_the_order_of_questions_does_not_matter(sizes: list[int], batch_size: int, data: st.DataObject) -> None:
    n = len(sizes)
    questions = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, 60)), min_size=1, max_size=12))
    asked = batches(sizes, batch_size, 3)
    answers = [one(asked, client, round) for client, round in questions]
    for (client, round), answer in zip(questions, answers, strict=True):
        assert one(batches(sizes, batch_size, 3), client, round) == answer
        together = batches(sizes, batch_size, 3).draw(torch.arange(n), round)
        assert together[client].tolist() == answer


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, more=SIZES, batch_size=st.integers(1, 12), round=st.integers(0, 100))
def test_a_client_s_batches_do_not_depend_on_other_clients(
    sizes: list[int], more: list[int], batch_size: int, round: int
) -> None:
    alone, among = batches(sizes, batch_size), batches(sizes + more, batch_size)
    for client in range(len(sizes)):
        assert one(alone, client, round) == one(among, client, round)


def test_seeds_and_clients_draw_differently() -> None:
    drawn = {tuple(one(batches([30, 30], 30, seed), client, 0)) for seed in range(5) for client in (0, 1)}
    assert len(drawn) == 10


def test_a_batch_once_drawn_stays() -> None:
    source = batches([20], 5)
    (first,) = source.draw(torch.tensor([0]), 0)
    before = first.tolist()
    source.draw(torch.tensor([0]), 4)  # the next pass
    assert first.tolist() == before


@pytest.mark.parametrize(
    ("epochs", "sizes", "batch_size", "expected"),
    [
        (3, [10, 10], None, 3),  # a full gradient is a pass
        (1, [10, 10], 5, 2),
        (4, [10, 10], 3, 4 * 3),
        (2, [5, 25], 5, 2 * 3),  # the average client: 15 records
        (7, [3, 3], 32, 7),  # fewer records than a batch: a pass is one round
    ],
)
def test_epochs_are_passes_of_the_average_client(
    epochs: int, sizes: list[int], batch_size: int | None, expected: int
) -> None:
    assert rounds_of(epochs, torch.tensor(sizes), batch_size) == expected


@pytest.mark.parametrize("epochs", [0, -1, 1.5, math.nan, True])
def test_epochs_must_be_whole(epochs: int) -> None:
    with pytest.raises(UsageError, match="epochs must be a whole number >= 1"):
        rounds_of(epochs, torch.tensor([4]), 2)
