"""Each source: moments, tails, distribution, independence, distinctness; the grid; the exactness of the secure source.

Secure noise cannot be seeded, so each of its tests fails by chance with probability of about 1e-6 or less.
"""

from __future__ import annotations

import copy
import math
import os
import pickle
import sys

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from normec.errors import UsageError
from normec.privacy import ExactNoise, SecureNoise, SeededNoise, gaussian, noise_source, privatise, privatise_sum
from normec.privacy.grid_account import GRID_BITS
from normec.privacy.keystream import Keystream, _resolve, rounded_gaussians
from normec.privacy.rounding_grid import grid_step, snap

SOURCES = {"seeded": (lambda: SeededNoise(7), 400_000), "secure": (SecureNoise, 400_000), "exact": (ExactNoise, 8_000)}
Z = 4.9  # two-sided p = 1e-6


@pytest.fixture(params=SOURCES)
def sample(request) -> tuple[str, np.ndarray]:
    make, count = SOURCES[request.param]
    return request.param, make().draw(count, 2.5, "round", 0, dtype=torch.float64).numpy() / 2.5


def test_moments(sample) -> None:
    _, z = sample
    n = len(z)
    for power, expected, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10_170)]:
        if power <= 4 or n > 100_000:  # the mean of z^6 is far from normal in a small sample
            assert abs((z**power).mean() - expected) < 6 * math.sqrt(variance / n), power


def test_distribution(sample) -> None:
    _, z = sample
    assert stats.kstest(z, "norm").pvalue > 1e-6
    cells = stats.norm.ppf(np.linspace(0, 1, 65)[1:-1])
    assert stats.chisquare(np.bincount(np.searchsorted(cells, z), minlength=64)).pvalue > 1e-6


def test_tails(sample) -> None:
    _, z = sample
    for limit in (2.0, 3.0, 4.0):
        for side in (z, -z):
            assert stats.binomtest(int((side > limit).sum()), len(z), stats.norm.sf(limit)).pvalue > 1e-6 / 6


def test_coordinates_are_independent(sample) -> None:
    _, z = sample
    for lag in (1, 2, 3, 64):
        for f in (lambda x: x, np.sign, lambda x: x**2 - 1):
            a, b = f(z[:-lag]), f(z[lag:])
            assert abs((a * b).mean()) < 5.5 * math.sqrt(max((a**2).mean() * (b**2).mean(), 1e-9) / len(a))


@pytest.mark.parametrize("kind", SOURCES)
def test_rounds_and_runs_are_independent(kind: str) -> None:
    make, count = SOURCES[kind]
    count //= 4
    source, other = make(), SeededNoise(8) if kind == "seeded" else make()
    draws = [source.draw(count, 1.0, "round", k, dtype=torch.float64) for k in range(3)]
    draws.append(other.draw(count, 1.0, "round", 0, dtype=torch.float64))
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(float((a * b).mean())) < 5.5 / math.sqrt(count)
            assert int((a == b).sum()) <= 2  # equal by chance: about count·2^-32


def test_seeded_noise_repeats_and_depends_on_seed_and_path_only() -> None:
    source = SeededNoise(3)
    first = source.draw((4, 5), 2.0, "round", 1)
    source.draw(9, 1.0, "round", 2)
    assert torch.equal(first, SeededNoise(3).draw((4, 5), 2.0, "round", 1))
    assert first.dtype == torch.float32
    for other in (
        SeededNoise(4).draw((4, 5), 2.0, "round", 1),
        source.draw((4, 5), 2.0, "round", "1"),
        source.draw((4, 5), 2.0, "round1"),
    ):
        assert not torch.equal(first, other)


def test_a_seeded_draw_needs_a_name() -> None:
    with pytest.raises(UsageError, match="needs a path"):
        SeededNoise(1).draw(3, 1.0)


def test_seeds_are_not_cut_to_32_bits() -> None:
    """torch's CPU generator would give these two the same noise."""
    assert torch.equal(*(torch.randn(4, generator=torch.Generator().manual_seed(s)) for s in (5, 5 + 2**32)))
    assert not torch.equal(SeededNoise(5).draw(4, 1.0, "a"), SeededNoise(5 + 2**32).draw(4, 1.0, "a"))


@pytest.mark.parametrize("make", [SecureNoise, ExactNoise])
def test_fresh_noise_cannot_be_seeded_copied_or_saved(make) -> None:
    torch.manual_seed(0), np.random.seed(0)
    first = make().draw(50, 1.0, "same path")
    torch.manual_seed(0), np.random.seed(0)
    assert not torch.equal(first, make().draw(50, 1.0, "same path"))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="twice"):
            attempt(make())
    with pytest.raises(TypeError):
        make(0)


def test_a_forked_process_draws_other_noise() -> None:
    source = SecureNoise()
    source.draw(10, 1.0)
    receive, send = os.pipe()
    if (child := os.fork()) == 0:
        os.write(send, source.draw(100, 1.0, dtype=torch.float64).numpy().tobytes())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(receive, 10_000))
    assert len(theirs) == 100
    assert not np.isin(source.draw(100, 1.0, dtype=torch.float64).numpy(), theirs).any()


class Script:
    """A keystream of given words, for tests of the arithmetic."""

    def __init__(self, words: list[int]) -> None:
        self.left = list(words)

    def words(self, count: int) -> np.ndarray:
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, dtype=np.uint64)


def true_rounding(word: int, extra: list[int], scale: float) -> int:
    with mpmath.workprec(400):
        uniform = mpmath.ldexp(((word >> 1) << 128) + (extra[0] << 64) + extra[1], -192)
        size = int(mpmath.floor(mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * uniform) * scale + 0.5))
    return -size if word & 1 else size


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("scale", [2.0**31 * 0.999, 2.0**30, 1000.0, 1.0])
def test_secure_rounding_is_exact(scale: float) -> None:
    """Against 400-bit arithmetic, whatever the bits not drawn yet turn out to be."""
    rng = np.random.default_rng(0)
    words = [int(w) for w in rng.integers(0, 2**64 - 1, 60, dtype=np.uint64)]
    words += [int(w) >> int(s) for w, s in zip(rng.integers(0, 2**62, 25), rng.integers(0, 33, 25), strict=True)]
    for word in words:
        for extra in ([0, 0], [2**64 - 1, 2**64 - 1]):
            assert rounded_gaussians(Script([word, *extra]), 1, scale)[0] == true_rounding(word, extra, scale)


def test_close_calls_are_resolved_with_more_bits() -> None:
    """A uniform whose first 64 bits do not decide: the further bits do."""
    scale, below = 2.0**30, 3 * 2**29
    with mpmath.workprec(400):
        edge = mpmath.erfc((mpmath.mpf(below) + 0.5) / scale / mpmath.sqrt(2)) / 2
        bits = int(mpmath.floor(mpmath.ldexp(edge, 64)))
        rest = int(mpmath.floor(mpmath.ldexp(edge, 192))) & (2**128 - 1)
    for offset, expected in ((1, below), (0, below + 1), (-1, below + 1)):
        more = [(rest + offset) >> 64, (rest + offset) & (2**64 - 1)]
        assert _resolve(Script(more), bits, scale, below) == expected
        assert abs(rounded_gaussians(Script([2 * bits, *more]), 1, scale)[0]) == expected


def test_extreme_words() -> None:
    assert rounded_gaussians(Script([0, 0, 1]), 1, 2.0**30)[0] > 13 * 2**30  # the very tail, not infinity
    assert abs(rounded_gaussians(Script([2**64 - 1]), 1, 2.0**30)[0]) <= 1


def test_rounded_gaussians_have_the_right_probabilities_on_a_coarse_grid() -> None:
    count = 400_000
    drawn = rounded_gaussians(Keystream(), count, 1.5)
    edges = np.arange(-6, 6) + 0.5
    expected = np.diff(stats.norm.cdf(np.concatenate([[-np.inf], edges, [np.inf]]) / 1.5))
    assert stats.chisquare(np.bincount(np.searchsorted(edges, drawn), minlength=13), expected * count).pvalue > 1e-6


def test_the_sum_of_rounded_gaussians_is_as_private_as_one_gaussian() -> None:
    """Claim 4 of `rounding_grid`: the pmf of h rounded draws with σ of only 2 steps, against a shifted one by μ-GDP."""
    sigma = 2.0
    one = np.diff(stats.norm.cdf((np.arange(-201, 201) + 0.5) / sigma))
    pmf = one
    for clients in range(1, 9):
        for shift in (1, 3):
            moved = np.roll(pmf, shift)
            for eps in (0.0, 0.2, 0.7):
                exact = np.maximum(moved - math.exp(eps) * pmf, 0).sum()
                assert exact <= gaussian.delta(eps, shift / (sigma * math.sqrt(clients))) * (1 + 1e-9) + 1e-15
        pmf = np.convolve(pmf, one, mode="same")


@given(st.floats(1e-6, 1e6))
@settings(max_examples=100, deadline=None)
def test_grid_step_is_a_power_of_two_just_under_sigma(sigma: float) -> None:
    step = grid_step(sigma)
    assert math.frexp(step)[0] == 0.5
    assert 2.0**GRID_BITS <= sigma / step < 2.0 ** (GRID_BITS + 1)


@given(st.integers(0, 10**6), st.integers(1, 300), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(0.5, 1.5))
@settings(max_examples=100, deadline=None)
def test_snapping_never_passes_the_bound(seed: int, dimension: int, bound: float, sigma: float, length: float) -> None:
    """In exact integer arithmetic, for messages at, above and below the bound."""
    direction = torch.from_numpy(np.random.default_rng(seed).standard_normal(dimension))
    message = direction / direction.norm() * bound * length
    step = grid_step(sigma)
    integers = [int(k) for k in snap(message, step, bound)]
    limit = mpmath.mpf(bound) / step
    assert sum(k * k for k in integers) <= limit * limit
    if length < 0.99:
        values = message.tolist()
        assert all(abs(k * step) <= abs(v) and abs(k * step - v) < step for k, v in zip(integers, values, strict=True))


def test_snapping_costs_no_accuracy() -> None:
    message = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    message /= message.norm() * 1.01
    step = grid_step(10.0)
    assert (snap(message, step, 1.0) * step - message).abs().max() < 2e-8


@pytest.mark.parametrize("source", [SeededNoise(0), SecureNoise(), ExactNoise()])
def test_privatise_adds_the_noise_it_says(source) -> None:
    dimension = 2000
    message = torch.zeros(dimension, dtype=torch.float64)
    message[0] = 1.0
    out = torch.stack([privatise(message, 0.5, source, "round", k, bound=1.0) for k in range(4)])
    centred = (out - message).numpy() / 0.5
    assert abs(centred.mean()) < Z / math.sqrt(centred.size)
    assert abs((centred**2).mean() - 1) < Z * math.sqrt(2 / centred.size)
    assert out.dtype == message.dtype


@pytest.mark.parametrize("source", [SeededNoise(0), SecureNoise()])
def test_privatise_bounds_every_row_whatever_comes_in(source) -> None:
    rows = torch.full((3, 4), 100.0)
    tiny = 1e-4
    assert torch.linalg.vector_norm(
        privatise(rows, tiny, source, "round", 0, bound=2.0), dim=1
    ).numpy() == pytest.approx(2.0, abs=2e-3)
    assert privatise_sum(rows, tiny, source, "round", 0, bound=2.0).numpy() == pytest.approx(3.0, abs=2e-3)
    assert privatise(rows, tiny, source, "round", 0, bound=2.0).dtype == torch.float32


def test_secure_output_lies_on_the_grid_for_any_message() -> None:
    source, step = SecureNoise(), grid_step(0.3)
    for message in (torch.zeros(500, dtype=torch.float64), torch.rand(500, dtype=torch.float64) / 30):
        out = privatise(message, 0.3, source, bound=1.0) / step
        assert torch.equal(out, out.round())
        low = (out.to(torch.int64) & 1).sum().item()  # the last bit is a fair coin, whatever the message
        assert stats.binomtest(low, 500, 0.5).pvalue > 1e-6


@pytest.mark.parametrize("source", [SeededNoise(0), SecureNoise()])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nothing_is_sent_after_an_error(source, bad: float) -> None:
    message = torch.tensor([1.0, bad])
    with pytest.raises(UsageError, match="not sent"):
        privatise(message, 1.0, source, bound=1.0)
    with pytest.raises(UsageError, match="not sent"):
        privatise_sum(message[None], 1.0, source, bound=1.0)
    with pytest.raises(UsageError):
        privatise(torch.ones(2), bad, source, bound=1.0)
    with pytest.raises(UsageError):
        privatise(torch.ones(2), 1.0, source, bound=math.nan)
    with pytest.raises(UsageError, match="no meaningful privacy"):
        privatise(torch.ones(2), 1e-9, SecureNoise(), bound=1.0)


def test_choice_by_name() -> None:
    assert isinstance(noise_source("seeded", 1), SeededNoise)
    assert isinstance(noise_source("secure"), SecureNoise)
    assert isinstance(noise_source("exact"), ExactNoise)
    for wrong in (lambda: noise_source("seeded"), lambda: noise_source("secure", 1), lambda: noise_source("gauss")):
        with pytest.raises(UsageError):
            wrong()


def test_a_missing_package_is_asked_for(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    with pytest.raises(UsageError, match=r"pip install 'normec\[exact-noise\]'"):
        ExactNoise()
