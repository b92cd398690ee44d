"""The grid of a secure sum and its account, against exact distributions in one dimension and against measured noise.

Secure noise cannot be seeded, so each test of it fails by chance with probability of about 1e-6 or less.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from normec import DPSGD, Clip, NormEC
from normec.errors import UsageError
from normec.privacy import Facts, Privacy, Refused, SecureNoise, Setting, calibrate, gaussian, release
from normec.privacy.grid_account import SUM_GRID_BITS, aliasing, delta_surcharge, honest_parties
from normec.privacy.mechanism import Mechanism, facts_of
from normec.privacy.secure_sum import TAIL, SumGrid

Z = 4.9  # two-sided p = 1e-6


def total_of(grid: SumGrid, messages: torch.Tensor, noise: SecureNoise | None = None) -> torch.Tensor:
    """The decoded sum of the rows of `messages`."""
    weights = grid.weights or (1.0,) * grid.parties
    parts = [grid.encode(row, noise, weight) for row, weight in zip(messages, weights, strict=True)]
    return grid.decode(np.add.reduce(parts, dtype=grid.dtype))


# The grid.


@pytest.mark.parametrize("parties", [1, 3, 10, 200, 1000, 10_000, 10**6])
@pytest.mark.parametrize("epsilon", [0.1, 8.0, 100.0])
def test_the_step_follows_from_public_numbers_and_leaves_room(parties: int, epsilon: float) -> None:
    facts = Facts("normec", bound=1.0, feedback=True)
    sigma = release(facts, Privacy(epsilon=epsilon, trust="secure-sum"), Setting(parties, 300)).sigma(epsilon, 1e-5)
    grid = SumGrid(parties, 1.0, sigma)
    noise = math.sqrt(parties) * sigma
    assert math.frexp(grid.step)[0] == 0.5
    assert 2.0**grid.bits * grid.step > 2 * (parties + TAIL * noise)
    assert grid.step <= noise * 2.0**-SUM_GRID_BITS
    if grid.bits == 64:  # 32 bits with a step twice as fine as what is allowed leave too little room
        assert 2.0**32 * noise * 2.0 ** -(SUM_GRID_BITS + 1) < 2 * (parties + TAIL * noise)


def test_a_federation_of_two_hundred_parties_adds_up_32_bits() -> None:
    sigma = 10.4 / math.sqrt(200)  # epsilon = 8 in 300 rounds
    assert SumGrid(200, 1.0, sigma).bits == 32
    assert SumGrid(200, 1.0, sigma, weights=(1.5, 0.5) * 100).bits == 32


@pytest.mark.parametrize("weights", [(), (3.0, 0.5, 0.25, 0.25)])
@pytest.mark.parametrize("sigma", [0.0, 2.0])
def test_the_sum_is_exact_up_to_one_step_for_each_party(sigma: float, weights: tuple[float, ...]) -> None:
    """With noise, the sum without it is what is compared: the noise is drawn again from the same words."""
    draw = torch.Generator().manual_seed(0)
    messages = torch.randn(4, 1000, generator=draw, dtype=torch.float64)
    messages /= torch.linalg.vector_norm(messages, dim=1, keepdim=True) * 1.001
    grid = SumGrid(4, 1.0, sigma, weights)
    known = _Known(4 * 1000) if sigma else None
    found = total_of(grid, messages, known)
    expected = (messages * torch.tensor(weights or (1.0,) * 4, dtype=torch.float64)[:, None]).sum(0)
    if known is not None:
        expected += torch.from_numpy(known.used.reshape(4, 1000).sum(0) * grid.step)
    assert float((found - expected).abs().max()) < 4 * grid.step


class _Known(SecureNoise):
    """Secure noise that remembers what it drew."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.used, self._at = np.zeros(most, dtype=np.int64), 0

    def integers(self, count: int, scale: float) -> np.ndarray:
        drawn = super().integers(count, scale)
        self.used[self._at : self._at + count] = drawn
        self._at += count
        return drawn


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.floats(0.05, 50.0), st.floats(0.1, 3.0), st.integers(0, 2**32 - 1))
def test_a_message_on_the_grid_is_no_longer_than_its_bound(size: int, bound: float, weight: float, seed: int) -> None:
    """In exact arithmetic, for a message of just the bound; rounded to the nearest point it is longer half the time."""
    grid = SumGrid(2, bound, bound, (weight, 1.0))
    message = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    message *= bound / torch.linalg.vector_norm(message)
    silent = _Silent()
    integers = grid.encode(message, silent, weight).view(np.dtype(f"i{grid.bits // 8}")).tolist()
    limit = (Fraction(bound) * Fraction(weight) / Fraction(grid.step)) ** 2
    assert sum(k * k for k in integers) <= limit


def test_rounding_to_the_nearest_point_would_exceed_the_bound() -> None:
    """The planted bug that the test above detects: every coordinate lies 0.6 steps above a point of the grid."""
    step = SumGrid(2, 1.0, 1.0).step
    below = math.floor(math.sqrt(0.1) / step) - 1
    message = torch.full((10,), (below + 0.6) * step, dtype=torch.float64)
    grid = SumGrid(2, float(torch.linalg.vector_norm(message)), 1.0)
    assert grid.step == step
    limit = (Fraction(grid.bound) / Fraction(step)) ** 2
    nearest = torch.round(message / step).to(torch.int64).tolist()
    assert sum(k * k for k in nearest) > limit >= sum(k * k for k in grid.encode(message, _Silent()).tolist())


class _Silent(SecureNoise):
    """A source of zeros, for tests of what is added to it."""

    def integers(self, count: int, scale: float) -> np.ndarray:  # noqa: ARG002
        return np.zeros(count, dtype=np.int64)


def test_intermediate_sums_may_wrap_around_and_a_total_out_of_range_is_off_by_the_modulus() -> None:
    grid = SumGrid(3, 1.0, 1.0)
    half = 2**31 - 1
    parts = [np.array([value % 2**32], dtype=np.uint32) for value in (half, half, -half)]
    assert float(grid.decode(np.add.reduce(parts, dtype=np.uint32))[0]) == half * grid.step
    over = np.add.reduce(parts[:2], dtype=np.uint32)
    assert float(grid.decode(over)[0]) == (2 * half - 2**32) * grid.step


@pytest.mark.parametrize("bits", [32, 64])
def test_the_largest_sum_does_not_wrap_around(bits: int) -> None:
    """All messages alike, in one coordinate, with 11.9 standard deviations of noise on top."""
    parties, sigma = (5, 2.0) if bits == 32 else (2000, 0.01)
    grid = SumGrid(parties, 1.0, sigma)
    assert grid.bits == bits
    one = grid.encode(torch.ones(1, dtype=torch.float64), _Silent())
    noise = int(11.9 * grid.sum_sigma / grid.step)
    total = (one * parties + np.array([noise], dtype=grid.dtype)).astype(grid.dtype)
    assert float(grid.decode(total)[0]) == pytest.approx(parties + 11.9 * grid.sum_sigma, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SumGrid(0, 1.0), "parties"),
        (lambda: SumGrid(3, 0.0), "bound"),
        (lambda: SumGrid(3, 1.0, -1.0), "sigma"),
        (lambda: SumGrid(3, 1.0, 1.0, (1.0,)), "one number for each of 3 parties"),
        (lambda: SumGrid(3, math.inf), "needs a bound"),
        (lambda: SumGrid(3, 1.0, 1e-12), "too small for a sum of 3"),
        (lambda: SumGrid(3, 1.0, 1.0).encode(torch.zeros(2)), "needs noise"),
        (lambda: SumGrid(3, 1.0).encode(torch.zeros(2), SecureNoise()), "takes no noise"),
        (lambda: SumGrid(3, 1.0).encode(torch.ones(2)), "longer than the bound"),
        (lambda: SumGrid(3, 1.0).encode(torch.tensor([math.nan])), "NaN"),
        (lambda: SumGrid(3, 1.0).encode(torch.zeros(2), weight=2.0), "not among the weights"),
        (lambda: SumGrid(3, 1.0, 1.0).decode(np.zeros(2, dtype=np.uint64)), "type uint32"),
        (lambda: honest_parties(3, 3), "no honest one"),
    ],
)
def test_what_a_grid_cannot_hold_is_refused(make, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def test_arrays_and_tensors_are_encoded_alike() -> None:
    values = np.array([0.1, -0.2, 0.3], dtype=np.float32)
    grid = SumGrid(3, 1.0)
    assert (grid.encode(values) == grid.encode(torch.from_numpy(values))).all()


def test_a_method_without_a_bound_has_64_bits() -> None:
    grid = SumGrid(4, math.inf, 0.5)
    assert grid.bits == 64
    found = total_of(grid, torch.full((4, 3), 1e5, dtype=torch.float64), SecureNoise())
    assert float((found - 4e5).abs().max()) < 12


# The noise.


def is_normal(scaled: np.ndarray) -> bool:
    """Whether variance, distribution and tails are those of N(0, 1)."""
    count = len(scaled)
    tails = [
        stats.binomtest(int((side > limit).sum()), count, stats.norm.sf(limit)).pvalue
        for limit in (2.0, 3.0, 4.0)
        for side in (scaled, -scaled)
    ]
    variance = abs(float((scaled**2).mean()) - 1) < Z * math.sqrt(2 / count)
    return variance and stats.kstest(scaled, "norm").pvalue > 1e-6 and min(tails) > 1e-6 / 6


@pytest.mark.parametrize("parties", [2, 5])
def test_the_noise_of_a_sum_is_that_of_the_account(parties: int) -> None:
    """Over 10^5 draws. A sum in which one party adds no noise fails the same test."""
    grid, source, zero = SumGrid(parties, 1.0, 0.7), SecureNoise(), torch.zeros(100_000)
    parts = [grid.encode(zero, source) for _ in range(parties)]
    assert is_normal((grid.decode(np.add.reduce(parts, dtype=grid.dtype)) / grid.sum_sigma).numpy())
    parts[0] = grid.encode(zero, _Silent())
    assert not is_normal((grid.decode(np.add.reduce(parts, dtype=grid.dtype)) / grid.sum_sigma).numpy())


def test_every_party_and_every_attempt_draws_its_own_noise() -> None:
    grid, source = SumGrid(3, 1.0, 1.0), SecureNoise()
    zero = torch.zeros(20_000)
    draws = [grid.decode(grid.encode(zero, source)).numpy() for _ in range(3)]
    for one, other in itertools.combinations(draws, 2):
        assert abs(float((one * other).mean())) < Z / math.sqrt(len(zero))


# The account, against exact distributions in one dimension. Lengths are in steps of the grid.


def rounded_gaussian(scale: float) -> tuple[np.ndarray, np.ndarray]:
    """The integers from −n to n, and their probabilities under round(N(0, scale²))."""
    reach = math.ceil(13 * scale) + 1
    points = np.arange(-reach, reach + 1)
    upper = np.abs(points)  # both tails from the upper one, which has all its digits
    return points, stats.norm.sf((upper - 0.5) / scale) - stats.norm.sf((upper + 0.5) / scale)


def discrete_gaussian(scale: float) -> tuple[np.ndarray, np.ndarray]:
    points = rounded_gaussian(scale)[0]
    weights = np.exp(-(points**2) / (2 * scale**2))
    return points, weights / weights.sum()


def power(probabilities: np.ndarray, parties: int) -> np.ndarray:
    """The probabilities of a sum of independent copies."""
    found = probabilities
    for _ in range(parties - 1):
        found = np.convolve(found, probabilities)
    return found


def exact_delta(probabilities: np.ndarray, shift: int, epsilon: float) -> float:
    """The hockey-stick divergence of a distribution on the integers and itself moved by `shift`."""
    one, other = np.pad(probabilities, (shift, 0)), np.pad(probabilities, (0, shift))
    return float(np.maximum(one - math.exp(epsilon) * other, 0).sum())


@pytest.mark.parametrize("parties", [2, 3, 5])
@pytest.mark.parametrize("scale", [2.0, 6.0, 40.0])
@pytest.mark.parametrize("multiplier", [0.5, 1.0, 3.0])
def test_the_account_covers_the_exact_delta_and_is_close_to_it(parties: int, scale: float, multiplier: float) -> None:
    """δ(ε) of σ_eff = σ√parties, with its surcharge, is at least that of the exact sum, and little more."""
    shift = max(1, round(math.sqrt(parties) * scale / multiplier))
    mu = shift / (math.sqrt(parties) * scale)
    probabilities = power(rounded_gaussian(scale)[1], parties)
    for epsilon in (0.0, 0.3, 1.0, 3.0):
        exact = exact_delta(probabilities, shift, epsilon)
        claimed = gaussian.delta(epsilon, mu) + delta_surcharge(epsilon, scale, parties, 1)
        assert exact <= claimed + 1e-14
        if claimed > 1e-9 and scale >= 6:
            assert exact > 0.97 * claimed


def test_the_account_would_not_cover_a_sum_in_which_one_party_has_no_noise() -> None:
    probabilities = power(rounded_gaussian(6.0)[1], 2)  # two of three
    shift = 10
    assert exact_delta(probabilities, shift, 1.0) > 1.5 * gaussian.delta(1.0, shift / (6.0 * math.sqrt(3)))


@pytest.mark.parametrize("parties", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [0.35, 0.5, 0.7])
def test_the_aliasing_of_coarse_grids_is_within_its_bound(parties: int, scale: float) -> None:
    """The sum of rounded Gaussians against round(N(0, parties·scale²) + parties − 1 uniform variables), by quadrature.

    The convolution of a Gaussian with as many uniform variables as there are parties, at the integers.
    """
    fine = 200  # cells per unit
    reach = math.ceil(8 * scale * math.sqrt(parties)) + parties
    grid = np.arange(-reach * fine, reach * fine + 1) / fine
    ideal = stats.norm.pdf(grid / (scale * math.sqrt(parties))) / (scale * math.sqrt(parties))
    box = np.full(fine + 1, 1 / fine)
    box[[0, -1]] /= 2  # the trapezium rule
    for _ in range(parties):
        ideal = np.convolve(ideal, box, mode="same")
    points, each = rounded_gaussian(scale)
    actual = power(each, parties)
    offset = len(points) // 2 * parties
    near = np.arange(-math.floor(3 * scale * math.sqrt(parties)), math.floor(3 * scale * math.sqrt(parties)) + 1)
    ratio = actual[near + offset] / ideal[near * fine + reach * fine]
    bound = aliasing(scale, parties)
    assert np.abs(ratio - 1).max() <= bound + 2e-4  # the error of the quadrature
    if parties == 2 and scale == 0.35:
        assert np.abs(ratio - 1).max() > bound / 20  # there is aliasing to bound


@pytest.mark.parametrize("parties", [2, 3, 4])
@pytest.mark.parametrize("ratio", [0.4, 0.7, 1.0])
def test_the_bound_of_the_aliasing_is_above_the_sum_over_frequencies(parties: int, ratio: float) -> None:
    """Σ over the non-zero vectors j of exp(−2π² ratio² (|j|² − (Σj)²/parties)), term by term."""
    exact = 0.0
    for frequencies in itertools.product(range(-8, 9), repeat=parties - 1):
        j = np.array(frequencies)
        if j.any():
            exact += math.exp(-2 * (math.pi * ratio) ** 2 * float((j**2).sum() - j.sum() ** 2 / parties))
    assert exact <= aliasing(ratio, parties)
    if ratio >= 0.7:
        assert parties > 2 or aliasing(ratio, parties) <= 2.1 * exact


def kairouz_liu_steinke(shift: float, scale: float, parties: int, delta: float) -> float:
    """ε at `delta` of a sum of discrete Gaussians in one dimension, by their bound on its Rényi divergence (2021).

    RDP(a) = a/2·Δ²/(n s²) + τ with τ = 10 Σ_{k<n} exp(−2π² s² k/(k+1)); the conversion to ε is that of Canonne, Kamath
    and Steinke (2020).
    """
    tau = 10 * sum(math.exp(-2 * math.pi**2 * scale**2 * k / (k + 1)) for k in range(1, parties))
    orders = 1 + np.logspace(-3, 5, 20_000)
    rdp = orders / 2 * shift**2 / (parties * scale**2) + tau
    return float((rdp + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)).min())


@pytest.mark.parametrize("parties", [2, 3, 5])
@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
def test_the_account_agrees_with_sums_of_discrete_gaussians(parties: int, mu: float) -> None:
    """Our ε is below their bound, which is not tight, and near the exact one of discrete Gaussians."""
    scale, delta = 30.0, 1e-5
    shift = round(mu * scale * math.sqrt(parties))
    exact_mu = shift / (scale * math.sqrt(parties))
    ours = gaussian.epsilon(exact_mu, delta)
    theirs = kairouz_liu_steinke(shift, scale, parties, delta)
    assert ours < theirs < 1.3 * ours
    probabilities = power(discrete_gaussian(scale)[1], parties)
    for epsilon in (0.5 * ours, ours):
        assert exact_delta(probabilities, shift, epsilon) == pytest.approx(gaussian.delta(epsilon, exact_mu), rel=0.01)


def test_the_surcharge_is_never_counted_too_small() -> None:
    """Against the formula as it stands, where doubles hold it; and monotone where they do not."""
    for ratio, parties, coordinates, epsilon in ((1.0, 3, 10, 0.0), (1.5, 5, 1e6, 2.0), (2.0, 2, 1e9, 10.0)):
        direct = (1 + math.exp(epsilon)) / 2 * math.expm1(coordinates * math.log1p(aliasing(ratio, parties)))
        found = delta_surcharge(epsilon, ratio, parties, coordinates)
        assert min(1.0, direct) * (1 - 1e-12) <= found <= min(1.0, direct * 1.01)
    assert delta_surcharge(1.0, 0.3, 5, 1e9) == 1.0
    assert delta_surcharge(600.0, 9.0, 2, 1e12) > 0  # exp(−π²·81) alone is too small for a double
    assert delta_surcharge(1.0, 0.5, 1, 1e9) == 0.0


def test_no_run_has_a_surcharge_and_one_that_would_is_refused() -> None:
    facts, privacy = Facts("normec", bound=1.0, feedback=True), Privacy(epsilon=8, trust="secure-sum")
    release(facts, privacy, Setting(clients=10**9, rounds=10**6, dimension=10**9))
    with pytest.raises(Refused, match="too coarse"):
        release(facts, privacy, Setting(clients=2**44, rounds=1))


# Simulations and deployments.


@pytest.mark.parametrize(
    ("method", "words", "weights"),
    [
        (NormEC(0.1, 0.1), {}, ()),
        (NormEC(0.1, 0.1), {"honest": 3, "relation": "replace"}, ()),
        (NormEC(0.1, 0.1), {"noise_schedule": "linear:0.2"}, (2.0, 1.0, 0.5, 0.5)),
        (DPSGD(Clip(1.0)), {"unit": "record", "record_clip": 1.0}, ()),
        (DPSGD(Clip(1.0)), {"unit": "record", "record_clip": 1.0, "honest": 2}, (2.0, 1.0, 0.5, 0.5)),
    ],
)
def test_a_simulation_states_the_noise_and_the_epsilon_of_the_deployment(method, words, weights) -> None:
    """A deployment calibrates by the rules alone, for n_min parties of which some collude."""
    setting = Setting(4, 20, records=50.0, dimension=7, weights=weights)
    stated = Privacy(epsilon=2, trust="secure-sum", **words)
    deployed = calibrate(release(facts_of(method, 7), dataclasses.replace(stated, noise="secure"), setting), stated)
    for noise in ("seeded", "secure", "exact"):
        simulated = Mechanism(dataclasses.replace(stated, noise=noise), method, setting, seed=0)
        assert (simulated.sigma, simulated.calibrated.epsilon) == (deployed.sigma, deployed.epsilon)


def test_records_pay_for_the_grid_of_the_sum() -> None:
    """Δ + step·√d with the coarsest step, by the closed form."""
    setting = Setting(4, 20, records=50.0, dimension=10**6)
    privacy = Privacy(sigma=0.1, unit="record", record_clip=1.0, trust="secure-sum", noise="seeded")
    run = release(facts_of(DPSGD(Clip(1.0))), privacy, setting)
    moved = 1 / 50 + 1000 * 2.0**-24 * 0.1 * 2
    assert run.epsilon(0.1, 1e-5) == pytest.approx(gaussian.epsilon(moved * math.sqrt(20) / 0.2, 1e-5), rel=1e-9)
    assert SumGrid(4, 1.0, 0.1).step * 1000 <= moved - 1 / 50
    with pytest.raises(Refused, match="dimension"):
        release(facts_of(DPSGD(Clip(1.0))), privacy, dataclasses.replace(setting, dimension=None))


def test_a_simulation_with_secure_noise_lies_on_the_grid_of_the_deployment() -> None:
    privacy = Privacy(sigma=0.5, trust="secure-sum", noise="secure")
    mechanism = Mechanism(privacy, NormEC(0.1, 0.1), Setting(4, 2, dimension=50_000), seed=0)
    mechanism.pay(0)
    messages = torch.zeros(4, 50_000, dtype=torch.float64)
    messages[:, 0] = 0.25
    mechanism.send(messages, torch.arange(4))
    found = mechanism.received(mechanism.outgoing(messages[0]), messages[0]).numpy()
    steps = found / SumGrid(4, 1.0, 0.5).step
    assert (steps == np.round(steps)).all()
    assert (steps % 2 == 1).any()  # and on no coarser one
    assert abs(float((found[1:] ** 2).mean()) - 4 * 0.25) < Z * math.sqrt(2 / 50_000)


def test_noise_too_small_for_the_grid_is_refused_before_the_first_round() -> None:
    privacy = Privacy(sigma=1e-12, trust="secure-sum", noise="secure")
    with pytest.raises(UsageError, match="too small for a sum"):
        Mechanism(privacy, NormEC(0.1, 0.1), Setting(4, 2, dimension=3), seed=0)


def test_dropouts_and_colluding_parties_are_counted_in_honest() -> None:
    """Ten parties, sums of at least eight of them, two colluding: the noise of six."""
    facts, setting = Facts("normec", bound=1.0, feedback=True), Setting(10, 100)
    privacy = Privacy(sigma=1.0, trust="secure-sum", honest=honest_parties(8, 2))
    found = release(facts, privacy, setting).epsilon(1.0, 1e-5)
    assert found == pytest.approx(gaussian.epsilon(math.sqrt(100 / 6), 1e-5), rel=1e-12)
