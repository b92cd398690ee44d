"""The contractive compressors: Top-k in the worst case, Rand-k in expectation; what each sends."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normec import EF21, Identity, RandK, TopK, UsageError
from normec.sampling.random_streams import Key, Stream

from ..support.draws import normal

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    d=st.integers(1, 40),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
)
def test_top_k_keeps_the_k_largest_and_contracts(
    seed: int, d: int, data: st.DataObject, dtype: torch.dtype, scale: float
) -> None:
    k = data.draw(st.integers(1, d))
    v = (normal(seed, 3, d) * min(scale, float(torch.finfo(dtype).max) / 100)).to(dtype)
    kept = TopK(k)(v)
    assert kept.dtype == dtype
    for row, sent in zip(v.double().numpy(), kept.double().numpy(), strict=True):
        threshold = np.sort(np.abs(row))[d - k]
        assert np.count_nonzero(sent) <= k
        assert np.array_equal(sent[sent != 0], row[sent != 0])
        assert np.all(np.abs(row[sent == 0]) <= threshold)
        assert np.all(sent[np.abs(row) > threshold] != 0)
        lost, whole = np.sum(((row - sent) / (scale or 1)) ** 2), np.sum((row / (scale or 1)) ** 2)
        assert lost <= (1 - k / d) * whole * (1 + 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k", "d"), [(1, 1), (1, 8), (3, 12), (7, 8), (8, 8)])
def test_the_all_equal_vector_is_top_k_s_worst_case(k: int, d: int, dtype: torch.dtype) -> None:
    v = torch.full((d,), -2.0, dtype=dtype)
    lost = float((TopK(k)(v) - v).double().norm() / v.double().norm())
    assert lost == pytest.approx(math.sqrt(1 - k / d), abs=1e-12)
    assert TopK(k).contraction(float(v.double().norm()), d) == pytest.approx(lost, abs=1e-12)


def test_rand_k_contracts_in_expectation_and_keeps_all_coordinates_alike() -> None:
    d, k, draws = 10, 3, 20_000
    v = normal(4, d)
    kept = RandK(k)(v.expand(draws, d), Key(Stream(7, "operator"), 5, torch.arange(draws)))
    chosen = kept != 0
    assert torch.equal(kept, torch.where(chosen, v, torch.zeros_like(v)))  # unscaled
    assert bool((chosen.sum(1) == k).all())
    spread = math.sqrt(k / d * (1 - k / d) / draws)
    assert float((chosen.double().mean(0) - k / d).abs().max()) < 5 * spread
    lost = (kept - v).square().sum(1) / v.square().sum()
    expected = 1 - k / d
    assert abs(float(lost.mean()) - expected) < 5 * float(lost.std()) / math.sqrt(draws)
    assert RandK(k).contraction(1.0, d) ** 2 == pytest.approx(expected)
    subsets = {tuple(row.nonzero()[:, 0].tolist()) for row in chosen}
    assert subsets == set(itertools.combinations(range(d), k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rand_k_without_a_key_uses_torch_s_generator(dtype: torch.dtype) -> None:
    v = normal(1, 50, 30).to(dtype)
    torch.manual_seed(3)
    first = RandK(4)(v)
    torch.manual_seed(3)
    assert torch.equal(RandK(4)(v), first)
    assert not torch.equal(RandK(4)(v), first)
    assert bool(((first != 0).sum(1) == 4).all())


def test_rand_k_draws_anew_for_each_client_and_round_and_the_same_for_the_same() -> None:
    v = normal(2, 40).expand(6, 40)
    stream, clients = Stream(0, "operator"), torch.arange(6)
    first = RandK(5)(v, Key(stream, 0, clients))
    assert torch.equal(RandK(5)(v, Key(stream, 0, clients)), first)
    assert not torch.equal(RandK(5)(v, Key(stream, 1, clients)), first)
    assert len({tuple(row.tolist()) for row in first}) == 6
    alone = RandK(5)(v[:2], Key(stream, 0, torch.tensor([4, 1])))
    assert torch.equal(alone, first[[4, 1]])


def test_rand_k_takes_a_single_vector_and_its_client_s_key() -> None:
    v = normal(2, 40)
    alone = RandK(5)(v, Key(Stream(0, "operator"), 0, torch.tensor([4])))
    assert torch.equal(alone, RandK(5)(v[None], Key(Stream(0, "operator"), 0, torch.tensor([4])))[0])


def test_identity_is_exact_and_unbounded() -> None:
    v = normal(3, 2, 5)
    assert torch.equal(Identity()(v), v)
    assert Identity().bound == math.inf
    assert Identity().contraction(3.0, 5) == 0


def test_a_number_of_numpy_is_kept_as_a_plain_one() -> None:
    assert json.dumps(EF21(TopK(np.int64(3))).spec()) == '{"compressor": {"operator": "TopK", "k": 3}}'  # type: ignore[arg-type]


def test_payloads_are_the_bytes_of_a_message() -> None:
    assert Identity().payload(10, 4) == 40
    assert Identity().payload(10, 8) == 80
    assert TopK(3).payload(10, 4) == 3 * (4 + 4)  # a value and a 32-bit position each
    assert RandK(3).payload(10, 8) == 3 * (8 + 4)


@pytest.mark.parametrize("operator", [TopK(4), RandK(4)])
def test_more_coordinates_than_there_are_is_refused(operator: TopK | RandK) -> None:
    for ask in (lambda: operator(torch.ones(3)), lambda: operator.payload(3, 4), lambda: operator.contraction(1, 3)):
        with pytest.raises(UsageError, match="k must be at most the dimension 3, got 4"):
            ask()
