"""Lemma 1 and Table 1 for smoothed normalisation and clipping, as properties over vectors, dtypes, shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from normec import Clip, SmoothedNorm
from normec.algorithms.operators import Operator

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALPHAS = st.sampled_from([0.0, 1e-6, 0.01, 1.0, 50.0])
TAUS = st.sampled_from([1e-3, 0.1, 1.0, 30.0])


def vectors(seed: int, shape: tuple[int, ...], exponent: float, dtype: torch.dtype) -> Tensor:
    """Normal vectors of about 10^exponent, kept finite in their dtype; some coordinates are zero."""
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(shape, generator=generator, dtype=torch.float64) * 10.0**exponent
    v = v * (torch.rand(shape, generator=generator) > 0.2)
    top = torch.finfo(dtype).max
    return v.clamp(-top, top).to(dtype)


def lengths(v: Tensor) -> Tensor:
    """‖v‖ over the last dimension in float64, scaled so that squares neither overflow nor vanish."""
    v = v.double()
    largest = v.abs().amax(-1, keepdim=True).clamp(min=1e-300)
    return ((v / largest).square().sum(-1, keepdim=True).sqrt() * largest)[..., 0]


VECTORS = st.builds(
    vectors,
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(1,), (7,), (64,), (3, 5), (2, 3, 16), (1, 33), (4, 1)]),
    exponent=st.sampled_from([-30.0, -22.5, -20.0, -12.0, -7.0, -2.0, 0.0, 2.0, 5.0, 19.0, 30.0]),
    dtype=st.sampled_from(DTYPES),
)


def slack(v: Tensor) -> float:
    """Rounding to the dtype, coordinate by coordinate, and of the norm itself."""
    return 4 * torch.finfo(v.dtype).eps


@settings(max_examples=400, deadline=None)
@given(v=VECTORS, alpha=ALPHAS)
@example(v=torch.full((5,), 1e30), alpha=0.0)
@example(v=torch.full((5,), 1e-30), alpha=0.0)
@example(v=torch.full((9,), 6e-8, dtype=torch.float16), alpha=0.0)
@example(v=torch.full((9,), 65504.0, dtype=torch.float16), alpha=0.0)
@example(v=torch.full((9,), 1e200, dtype=torch.float64), alpha=0.0)
@example(v=torch.full((9,), 5e-324, dtype=torch.float64), alpha=0.0)
@example(v=torch.full((3,), 4.5e-23), alpha=0.0)  # its square rounds down: the norm comes out too small
@example(v=torch.full((3,), 2.667e-162, dtype=torch.float64), alpha=0.0)
def test_smoothed_norm_never_exceeds_one(v: Tensor, alpha: float) -> None:
    message = SmoothedNorm(alpha)(v)
    assert message.dtype == v.dtype
    assert message.shape == v.shape
    assert bool(torch.isfinite(message).all())
    assert float(lengths(message).max()) <= SmoothedNorm(alpha).bound * (1 + slack(v))


@settings(max_examples=400, deadline=None)
@given(v=VECTORS, tau=TAUS)
@example(v=torch.full((5,), 1e30), tau=1.0)
@example(v=torch.full((5,), 1e-30), tau=1.0)
@example(v=torch.full((9,), 65504.0, dtype=torch.float16), tau=1e-3)
@example(v=torch.full((9,), 1e200, dtype=torch.float64), tau=1.0)
def test_clip_never_exceeds_tau(v: Tensor, tau: float) -> None:
    message = Clip(tau)(v)
    assert message.dtype == v.dtype
    assert message.shape == v.shape
    assert bool(torch.isfinite(message).all())
    assert float(lengths(message).max()) <= Clip(tau).bound * (1 + slack(v))


def test_clip_keeps_a_bound_below_the_root_of_the_smallest_normal() -> None:
    assert float(lengths(Clip(1e-25)(torch.full((4,), 1e-23)))) <= 1.001e-25


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from([(1,), (12,), (3, 5), (2, 2, 30)]),
    exponent=st.floats(-5, 4),
    dtype=st.sampled_from(DTYPES),
    alpha=ALPHAS,
    beta=st.sampled_from([1e-3, 0.5, 1.0, 10.0]),
)
def test_lemma_1_is_an_equality(
    seed: int, shape: tuple[int, ...], exponent: float, dtype: torch.dtype, alpha: float, beta: float
) -> None:
    v = vectors(seed, shape, exponent, dtype)
    length = lengths(v)
    left = lengths(v.double() - beta * SmoothedNorm(alpha)(v).double())
    right = torch.where(length > 0, (1 - beta / (alpha + length)).abs() * length, length)
    # Both terms round: ‖v‖ is exact here, β Norm_α(v) is of size β at most (and float16 has subnormals).
    allowed = beta * (slack(v) + 1e-7 * (dtype == torch.float16) * shape[-1]) + 1e-13 * length
    assert bool(((left - right).abs() <= allowed).all())


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(v=VECTORS.filter(lambda v: v.dtype != torch.float16), tau=TAUS)
def test_clipping_leaves_what_is_short_and_scales_what_is_long(v: Tensor, tau: float) -> None:
    length, message = lengths(v), Clip(tau)(v)
    inside = length <= tau * (1 - slack(v))
    assert torch.equal(message[inside], v[inside])
    beyond = (length > tau) & (length < 1e18)  # past that, float32's norm overflows and the message is zero
    moved = lengths(message.double() - v.double())[beyond]
    expected = (length - tau)[beyond]
    assert bool(((moved - expected).abs() <= slack(v) * tau + 1e-14 * expected).all())


@pytest.mark.parametrize("operator", [SmoothedNorm(0.0), SmoothedNorm(0.3), Clip(0.7)])
@pytest.mark.parametrize("norm", [1e-6, 0.2, 0.7, 1.0, 3.0, 400.0])
def test_contraction_is_what_table_1_says_and_is_attained(operator: Operator, norm: float) -> None:
    v = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    v *= norm / lengths(v)
    ratio = float(lengths(operator(v) - v)) / norm
    table = (
        max(0.0, norm - operator.tau) / norm if isinstance(operator, Clip) else abs(1 - 1 / (operator.alpha + norm))  # type: ignore[attr-defined]
    )
    assert operator.contraction(norm, 11) == pytest.approx(table, rel=1e-12, abs=1e-15)
    assert ratio == pytest.approx(table, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operator", [SmoothedNorm(0.0), SmoothedNorm(0.5), Clip(1.0)])
def test_zero_over_zero_is_zero(operator: Operator, dtype: torch.dtype) -> None:
    v = torch.zeros(2, 3, 5, dtype=dtype)
    v[0, 1, 2] = 3.0  # a zero row beside another is still zero, and does not disturb it
    message = operator(v)
    assert float(message.abs().sum()) == float(message[0, 1, 2]) > 0
    assert bool(torch.isfinite(message).all())


@pytest.mark.parametrize("exponent", [-6, 0, 8])
def test_alpha_zero_is_plain_normalisation(exponent: int) -> None:
    v = vectors(5, (6, 20), exponent, torch.float64)
    assert torch.allclose(SmoothedNorm(0.0)(v), v / lengths(v)[:, None], rtol=1e-14, atol=0)


@pytest.mark.parametrize("operator", [SmoothedNorm(0.1), Clip(0.5)])
def test_rows_are_independent_and_the_input_is_left_alone(operator: Operator) -> None:
    v = vectors(8, (3, 4, 9), 0.0, torch.float64)
    before = v.clone()
    together = operator(v)
    apart = torch.stack([torch.stack([operator(row) for row in block]) for block in v])
    assert torch.allclose(together, apart, rtol=1e-15, atol=0)
    assert torch.equal(v, before)


@pytest.mark.parametrize("d", [1000, 1023, 1024, 270_000, pytest.param(10_000_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("small", [2.4e-4, 5e-4])
@pytest.mark.parametrize("operator", [SmoothedNorm(0.0), Clip(1.0)])
def test_many_small_coordinates_after_a_few_large_ones_do_not_lengthen_a_message(
    d: int, small: float, operator: Operator
) -> None:
    # In float32 the squares of the small ones vanish beside the sum of the large ones, if all are added up in a row.
    v = torch.full((1, d), small)
    v[0, :64] = 1.0
    assert float(lengths(operator(v))) <= 1 + 1e-5
    strided = torch.stack([v[0], v[0]], dim=-1).T
    assert float(lengths(operator(strided)).max()) <= 1 + 1e-5
