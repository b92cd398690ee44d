"""Splits: every record to exactly one client, and each scheme's own promise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normec.data import split
from normec.errors import UsageError

from ..support.work import calls

TARGETS = st.lists(st.integers(0, 5), min_size=1, max_size=120).map(torch.tensor)
SEEDS = st.integers(0, 2**32)


@st.composite
def cuts(draw: st.DrawFn, shards: int = 1) -> tuple[Tensor, int, int]:
    """Targets with as many clients and shards a client as they can bear."""
    targets = draw(TARGETS)
    each = draw(st.integers(1, min(shards, len(targets))))
    return targets, draw(st.integers(1, len(targets) // each)), each


def is_partition(parts: list[Tensor], records: int) -> None:
    assert all(part.dtype == torch.int64 and len(part) > 0 for part in parts)
    assert all(torch.equal(part, part.sort().values) for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(records))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=60, deadline=None)
@given(cut=cuts(), seed=SEEDS)
def test_iid_is_even(cut: tuple[Tensor, int, int], seed: int) -> None:
    targets, clients, _ = cut
    parts = split(targets, clients, "iid", seed)
    is_partition(parts, len(targets))
    sizes = [len(part) for part in parts]
    assert len(sizes) == clients
    assert max(sizes) - min(sizes) <= 1
    assert same(parts, split(targets, clients, "iid", seed))


@settings(max_examples=60, deadline=None)
@given(cut=cuts(shards=4), seed=SEEDS)
def test_label_cuts_the_sorted_records(cut: tuple[Tensor, int, int], seed: int) -> None:
    targets, clients, shards = cut
    parts = split(targets, clients, "label", seed, shards_per_client=shards)
    is_partition(parts, len(targets))
    assert same(parts, split(targets, clients, "label", seed, shards_per_client=shards))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= shards
    if shards == 1:
        walk = torch.cat([targets[part].sort().values for part in parts])
        assert torch.equal(walk, targets.sort().values), "client i's labels never exceed client i + 1's"


def test_two_shards_give_a_client_few_labels() -> None:
    targets = torch.arange(10).repeat(100)
    parts = split(targets, 20, "label", shards_per_client=2)
    assert max(len(targets[part].unique()) for part in parts) <= 2
    assert not same(parts, split(targets, 20, "label", seed=1, shards_per_client=2))


@settings(max_examples=60, deadline=None)
@given(cut=cuts(), seed=SEEDS, concentration=st.floats(1e-3, 1e3))
def test_dirichlet_is_a_partition_or_a_refusal(cut: tuple[Tensor, int, int], seed: int, concentration: float) -> None:
    targets, clients = cut[0], min(cut[1], 8)
    try:
        parts = split(targets, clients, "dirichlet", seed, concentration=concentration)
    except UsageError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "would hold no record" in refusal
        assert "larger concentration or fewer clients" in refusal
        return
    is_partition(parts, len(targets))
    assert len(parts) == clients
    assert same(parts, split(targets, clients, "dirichlet", seed, concentration=concentration))


@pytest.mark.slow
def test_dirichlet_counts_have_the_moments_of_the_distribution() -> None:
    """One class, n clients, concentration c: a share has mean 1/n and variance (1/n)(1 − 1/n)/(n c + 1)."""
    targets, clients, concentration = torch.zeros(20_000, dtype=torch.int64), 4, 2.0
    shares = np.array(
        [
            [len(part) / 20_000 for part in split(targets, clients, "dirichlet", seed, concentration=concentration)]
            for seed in range(300)
        ]
    )
    variance = (1 / clients) * (1 - 1 / clients) / (clients * concentration + 1)
    assert np.abs(shares.mean(0) - 1 / clients).max() < 4 * (variance / 300) ** 0.5
    np.testing.assert_allclose(shares.var(0), variance, rtol=0.35)


def test_a_large_concentration_is_nearly_even_and_a_small_one_nearly_sorted() -> None:
    targets = torch.arange(10).repeat(500)
    even = split(targets, 5, "dirichlet", concentration=1e6)
    for part in even:
        assert (torch.bincount(targets[part], minlength=10) - 100).abs().max() <= 3
    skewed = split(targets, 2, "dirichlet", seed=1, concentration=1e-3)
    counts = torch.stack([torch.bincount(targets[part], minlength=10) for part in skewed])
    assert (counts.max(0).values >= 499).all(), "each class goes to one client as a whole"


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=50))
def test_column_gives_each_value_a_client(values: list[int]) -> None:
    targets = torch.zeros(len(values), dtype=torch.int64)
    expected = [torch.tensor([i for i, v in enumerate(values) if v == value]) for value in sorted(set(values))]
    assert same(split(targets, None, "column", groups=torch.tensor(values)), expected)
    assert same(split(targets, len(expected), "column", groups=np.array(values)), expected)


def test_column_takes_names() -> None:
    parts = split(torch.zeros(4), None, "column", groups=["zurich", "basel", "zurich", "bern"])
    assert [part.tolist() for part in parts] == [[1], [3], [0, 2]]
    objects = np.array(["b", "a"], dtype=object)
    assert [part.tolist() for part in split(torch.zeros(2), 2, "column", groups=objects)] == [[1], [0]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"clients": 0}, "clients must be a whole number >= 1, got 0"),
        ({"clients": 7}, "at most the number of records, 6, got 7; take fewer clients"),
        ({"clients": None}, "clients must be given for scheme 'iid'"),
        ({"scheme": "dirichlet", "clients": 2, "concentration": 0}, "concentration must be > 0"),
        ({"scheme": "dirichlet", "clients": 6, "concentration": 0.01}, "client 0 would hold no record"),
        ({"scheme": "label", "clients": 3, "shards_per_client": 3}, "6, got 3 × 3"),
        ({"scheme": "label", "clients": 3, "shards_per_client": 0}, "shards_per_client must be a whole number >= 1"),
        ({"scheme": "dirichlets", "clients": 2}, "did you mean 'dirichlet'"),
        ({"scheme": "column", "clients": None}, "needs groups"),
        ({"scheme": "column", "clients": 3, "groups": [0, 0, 0, 1, 1, 1]}, "distinct groups, 2, got 3; leave it out"),
        ({"scheme": "column", "clients": None, "groups": [0, 1]}, "one value per record, 6"),
        ({"scheme": "column", "clients": None, "groups": [0.5] * 6}, "integers or strings, got float64"),
        ({"clients": 2, "seed": -1}, "seed must be a whole number >= 0"),
    ],
)
def test_mistakes_are_named(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        split(torch.tensor([0, 0, 1, 1, 2, 2]), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["iid", "label"])
def test_five_thousand_clients_are_no_more_work_than_ten(scheme: str) -> None:
    targets = torch.arange(10).repeat(1_000)
    is_partition(split(targets, 5_000, scheme), 10_000)
    assert calls(lambda: split(targets, 5_000, scheme)) < 10 * calls(lambda: split(targets, 10, scheme))
