"""Rules: what each choice amounts to, what is refused, and the proofs' claims tried on real trajectories."""

from __future__ import annotations

import dataclasses
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normec.errors import UsageError
from normec.privacy import (
    Facts,
    Privacy,
    Refused,
    Sampling,
    Setting,
    audit_scores,
    calibrate,
    gaussian,
    paper_sigma,
    release,
)
from normec.privacy.accounting import Event, epsilon_of, mu_for
from normec.privacy.record_sensitivity import Sensitivity

NORMEC = Facts("NormEC", bound=1.0, feedback=True, lipschitz=100.0, beta=0.01)
DPSGD = Facts("DPSGD", bound=1.0, feedback=False, lipschitz=1.0)
TEN = Setting(clients=10, rounds=300)
GIVEN = Privacy(sigma=7.3462, trust="local")


def but(thing, **changes):
    return dataclasses.replace(thing, **changes)


@pytest.mark.parametrize(
    ("trust", "relation", "expected"),
    [
        ("local", "zero-out", 12.267),
        ("local", "replace", 30.519),
        ("secure-sum", "zero-out", 3.126),
        ("secure-sum", "replace", 7.002),
        ("central", "zero-out", 3.126),
        ("central", "replace", 7.002),
    ],
)
def test_known_values(trust: str, relation: str, expected: float) -> None:
    found = release(NORMEC, but(GIVEN, trust=trust, relation=relation), TEN)
    assert found.epsilon(7.3462, 1e-5) == pytest.approx(expected, abs=5e-4)
    assert found.rate == 1
    assert found.surcharge == 0
    assert found.sum_sigma(1.0) == pytest.approx(1.0 if trust == "local" else math.sqrt(10))


def test_honest_clients_only_count() -> None:
    three = release(NORMEC, but(GIVEN, trust="secure-sum", honest=3), TEN)
    assert three.gain == pytest.approx(math.sqrt(3))
    assert three.drawn == pytest.approx(math.sqrt(10))
    alone = release(NORMEC, but(GIVEN, trust="secure-sum", honest=1), TEN)
    assert alone.epsilon(7.3462, 1e-5) == pytest.approx(12.267, abs=5e-4)
    with pytest.raises(Refused, match="more than the 10 clients"):
        release(NORMEC, but(GIVEN, trust="secure-sum", honest=11), TEN)


def test_beta_and_memory_do_not_matter_at_client_level() -> None:
    base = release(NORMEC, GIVEN, TEN).epsilon(5.0, 1e-5)
    for facts in (but(NORMEC, beta=10.0), but(NORMEC, decay=0.5), but(NORMEC, feedback=False)):
        assert release(facts, GIVEN, TEN).epsilon(5.0, 1e-5) == base
    assert release(NORMEC, but(GIVEN, memory="noisy"), TEN).epsilon(5.0, 1e-5) == base


def test_the_bound_scales_the_noise() -> None:
    wide = release(but(NORMEC, bound=2.5), Privacy(epsilon=8, trust="local"), TEN)
    assert wide.sigma(8, 1e-5) == pytest.approx(2.5 * 10.396, rel=5e-5)


def test_sampling_clients() -> None:
    setting = but(TEN, clients=100, sampling=Sampling(0.1))
    found = release(NORMEC, but(GIVEN, trust="secure-sum"), setting)
    assert found.rate == 0.1
    assert found.event(2.0).multiplier == pytest.approx(20.0)
    assert found.epsilon(0.2, 1e-5) < release(NORMEC, but(GIVEN, trust="secure-sum"), but(TEN, clients=100)).epsilon(
        0.2, 1e-5
    )
    unclaimed = but(setting, sampling=Sampling(0.1, scheme="fixed", amplify=False))
    plain = release(NORMEC, but(GIVEN, trust="secure-sum"), unclaimed)
    assert plain.rate == 1
    assert any("without any gain" in note for note in plain.notes)
    assert any("every client adds its noise" in note for note in plain.notes)


RECORD = Privacy(sigma=1.0, unit="record", noise="seeded", memory="clean", trust="local")


@pytest.mark.parametrize(
    ("facts", "privacy", "setting", "reason"),
    [
        (but(NORMEC, bound=math.inf), GIVEN, TEN, "without a bound"),
        (Facts("Top-k", math.inf, True), but(RECORD, record_clip=1.0), but(TEN, records=9), "without a bound"),
        (NORMEC, GIVEN, but(TEN, buffers=True), "BatchNorm"),
        (NORMEC, GIVEN, but(TEN, start="gradients"), "warm-up"),
        (NORMEC, GIVEN, but(TEN, sampling=Sampling(0.5)), "sees who sends"),
        (NORMEC, but(GIVEN, trust="central", relation="replace"), but(TEN, sampling=Sampling(0.5)), "'replace'"),
        (NORMEC, but(GIVEN, trust="central"), but(TEN, sampling=Sampling(0.5, "fixed")), "fixed number"),
        (NORMEC, but(GIVEN, trust="central"), but(TEN, sampling=Sampling(0.5, normaliser="count")), "private count"),
        (NORMEC, but(GIVEN, trust="secure-sum", memory="noisy"), TEN, "uncovers the sum"),
        (NORMEC, but(GIVEN, trust="central", memory="noisy"), TEN, "uncovers the sum"),
        (NORMEC, RECORD, but(TEN, batch=Sampling(0.1)), "remembers"),
        (NORMEC, but(RECORD, trust="central"), but(TEN, sampling=Sampling(0.5)), "record level"),
        (NORMEC, RECORD, but(TEN, local_steps=True), "local steps have no rule at record level"),
        (DPSGD, but(RECORD, relation="replace"), but(TEN, batch=Sampling(0.1)), "'replace'"),
        (DPSGD, RECORD, but(TEN, batch=Sampling(0.1, "fixed")), "fixed size"),
        (DPSGD, but(RECORD, record_clip=1.0), TEN, "public number"),
        (DPSGD, but(RECORD, record_clip=1.0), but(TEN, records=9, batch=Sampling(0.1, normaliser="count")), "public"),
        (but(NORMEC, beta=0.021), but(RECORD, record_clip=0.1), but(TEN, records=9), "beta <= 0.02"),
        (NORMEC, but(RECORD, record_clip=1e-4, noise="secure"), but(TEN, records=9), "dimension"),
    ],
)  # fmt: skip
def test_refusals_name_the_reason(facts: Facts, privacy: Privacy, setting: Setting, reason: str) -> None:
    with pytest.raises(Refused, match=reason) as caught:
        release(facts, privacy, setting)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, UsageError)


def test_a_record_without_a_clip_counts_as_a_replaced_client() -> None:
    for relation in ("zero-out", "replace"):
        found = release(NORMEC, but(RECORD, relation=relation), TEN)
        assert found.event(1.0).multiplier == 0.5
        assert any("no better" in note for note in found.notes)


def test_a_clip_that_gains_nothing_counts_as_none() -> None:
    """Also where β is too large for the rule: a message moves by 2b at most, whatever the memory holds."""
    wide = but(RECORD, record_clip=1e9)
    for facts in (NORMEC, but(NORMEC, beta=0.9)):
        assert release(facts, wide, but(TEN, records=9)).event(1.0) == release(facts, RECORD, TEN).event(1.0)


def test_clipped_records_without_a_rule_count_as_clients_and_say_so() -> None:
    facts = but(DPSGD, name="mine", lipschitz=math.inf)
    found = release(facts, but(RECORD, record_clip=1.0), but(TEN, records=9))
    assert found.event(1.0) == release(facts, RECORD, TEN).event(1.0)
    assert any("no rule covers clipped records with mine" in note for note in found.notes)


def test_record_batches() -> None:
    setting = but(TEN, records=64.0, batch=Sampling(0.01))
    stateless = release(DPSGD, but(RECORD, record_clip=1.0), setting)
    assert stateless.rate == 0.01
    assert stateless.event(1.0).multiplier == pytest.approx(64.0)
    noisy = release(but(NORMEC, lipschitz=1.0), but(RECORD, record_clip=1.0, memory="noisy"), setting)
    assert noisy.rate == 0.01
    assert noisy.event(1.0).multiplier == pytest.approx(64.0)
    no_clip = release(DPSGD, RECORD, setting)
    assert no_clip.rate == 0.01
    assert no_clip.event(1.0).multiplier == 0.5
    classic = release(but(DPSGD, bound=math.inf), but(RECORD, record_clip=2.0), setting)
    assert classic.event(1.0).multiplier == pytest.approx(32.0)
    swapped = release(
        DPSGD, but(RECORD, record_clip=1.0, relation="replace"), but(setting, batch=Sampling(0.01, amplify=False))
    )
    assert swapped.rate == 1
    assert swapped.event(1.0).multiplier == pytest.approx(32.0)


def test_record_rule_is_the_notes_formula() -> None:
    alpha, beta, clip, records = 0.5, 0.1, 1.0, 400
    facts = Facts("NormEC", 1.0, True, 1 / alpha, beta)
    found = release(facts, but(RECORD, record_clip=clip, relation="replace"), but(TEN, records=records))
    k = np.arange(300.0)
    notes = np.minimum(2, 2 * clip / records * (1 + k * beta / alpha) / alpha)
    assert found.sensitivity.at(k) == pytest.approx(notes)
    assert found.epsilon(3.0, 1e-5) == pytest.approx(gaussian.epsilon(math.sqrt((notes**2).sum()) / 3, 1e-5), rel=1e-9)
    whole, parts = found.event(3.0, 0, 300), [found.event(3.0, i, 50) for i in range(0, 300, 50)]
    assert epsilon_of([whole], 1e-5) == pytest.approx(found.epsilon(3.0, 1e-5), rel=1e-9)
    assert epsilon_of(parts, 1e-5) == pytest.approx(found.epsilon(3.0, 1e-5), rel=1e-9)
    assert found.epsilon(found.sigma(8, 1e-5), 1e-5) == pytest.approx(8, rel=1e-6)


def smoothed(v: np.ndarray, alpha: float) -> np.ndarray:
    return v / (alpha + np.linalg.norm(v, axis=-1, keepdims=True))


def clipped(v: np.ndarray, tau: float) -> np.ndarray:
    return v * np.minimum(1, tau / np.maximum(np.linalg.norm(v, axis=-1, keepdims=True), 1e-300))


@given(
    st.sampled_from(["norm", "clip"]),
    st.floats(0.01, 2),
    st.floats(0.02, 1.999),
    st.floats(0, 0.6),
    st.floats(1e-3, 1),
    st.floats(0.01, 30),
    st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_record_rule_holds_on_trajectories(
    kind: str, size: float, part: float, decay: float, shift: float, spread: float, seed: int
) -> None:
    """Two clients whose gradients differ by at most s in every round, moved by 40 random or adversarial pairs."""
    lipschitz, bound = (1 / size, 1.0) if kind == "norm" else (1.0, size)
    psi = (lambda v: smoothed(v, size)) if kind == "norm" else (lambda v: clipped(v, size))
    beta = part * (1 - decay) / lipschitz
    facts = Facts(kind, bound, True, lipschitz, beta, decay)
    privacy = Privacy(sigma=1.0, unit="record", record_clip=shift, noise="seeded", memory="clean", trust="local")
    claimed = release(facts, privacy, Setting(clients=1, rounds=60, records=1)).sensitivity.at(np.arange(60.0))
    rng = np.random.default_rng(seed)
    pairs, dimension = 40, 3
    g, h = np.zeros((2, pairs, dimension))
    drift = rng.normal(size=(pairs, dimension))
    for k in range(60):
        mean = spread * rng.normal(size=(pairs, dimension)) * (rng.random() < 0.5) + g * (rng.random() < 0.5)
        away = np.where(rng.random((pairs, 1)) < 0.7, g - h + 1e-9 * drift, drift * rng.choice([-1, 1]))
        other = mean - shift * away / np.linalg.norm(away, axis=1, keepdims=True)
        m, n = psi(mean - g), psi(other - h)
        assert np.linalg.norm(m - n, axis=1).max() <= claimed[k] * (1 + 1e-9)
        g, h = (1 - decay) * g + beta * m, (1 - decay) * h + beta * n


def test_record_rule_is_nearly_attained() -> None:
    """In one dimension, when both memories follow gradients that part company, the drift is what the rule says."""
    alpha, beta, s = 1.0, 0.01, 1e-4
    claimed = Sensitivity(2.0, 1 / alpha, s, beta * s / alpha).at(np.arange(30.0))
    g = h = 0.0
    for k in range(30):
        target = (g + h) / 2  # where Ψ is steepest
        lead, trail = g - target, h - target
        m = (s / 2 - lead) / (alpha + abs(s / 2 - lead))
        n = (-s / 2 - trail) / (alpha + abs(-s / 2 - trail))
        assert abs(m - n) <= claimed[k]
        g, h = g + beta * m, h + beta * n
    # then the record changes sides: the memories' distance adds to the gradients'
    m = (-s / 2 - (g - h) / 2) / (alpha + abs(s / 2 + (g - h) / 2))
    assert 2 * abs(m) >= 0.85 * claimed[-1]


def test_client_bound_holds_whatever_the_memory() -> None:
    rng = np.random.default_rng(1)
    g = rng.normal(size=(1000, 5)) * 100
    message = smoothed(rng.normal(size=(1000, 5)) * 50 - g, 0.01)
    assert np.linalg.norm(message, axis=1).max() <= 1


@pytest.mark.slow
def test_noisy_memory_leaks_through_a_secure_sum() -> None:
    """Why memory='noisy' is refused there: the others re-send their noise, and the sum's can be taken off again."""
    n, sigma, rounds, trials = 400, 0.05, 5, 3000
    rng = np.random.default_rng(2)

    def observed(canary: float) -> np.ndarray:
        memory, sums = np.zeros((trials, n)), []
        for _ in range(rounds):
            message = -memory / (1e-3 + np.abs(memory))  # gradients are 0, α is small
            noisy = message + sigma * rng.standard_normal((trials, n))
            sums.append(noisy.sum(1) + canary)
            memory = memory + noisy
        return np.stack(sums, 1)

    claim = gaussian.epsilon(math.sqrt(rounds) / (sigma * math.sqrt(n)), 1e-5)
    assert audit_scores(observed(1.0), observed(0.0), 1e-5, 0.9999, claim).violated


@pytest.mark.slow
def test_clean_memory_undoes_record_amplification() -> None:
    """Why batches give no gain there: drawn in round 0 only, the record still shows in round 1, by the same coin.

    So the two rounds are one release of sensitivity 2√2 with one coin: worse than two of 2 with a coin each.
    """
    beta, alpha, rate, sigma = 1.0, 1e-9, 0.01, 2.0

    def messages(drawn: bool) -> np.ndarray:
        first = smoothed(np.array([1e6 if drawn else -1e6]), alpha)
        return np.concatenate([first, smoothed(0.0 - beta * first, alpha)])  # round 1: gradient 0, whatever is drawn

    moved = float(np.linalg.norm(messages(True) - messages(False)))
    assert moved == pytest.approx(2 * math.sqrt(2), rel=1e-6)
    true_epsilon = epsilon_of([Event(sigma / moved, rate)], 1e-5)
    amplified_claim = epsilon_of([Event(sigma / 2, rate, 2)], 1e-5)
    assert true_epsilon > 1.3 * amplified_claim
    assert true_epsilon < epsilon_of([Event(sigma / 2, 1.0, 2)], 1e-5)  # what the rules say instead


def test_the_papers_formula_is_replayed_and_not_believed() -> None:
    setting = but(TEN, dimension=269_722)
    for reading, sigma, eps in [
        ("per-coordinate", 7.3462, 12.267),
        ("variance", 2.7104, 46.9),
        ("total-norm", 0.014145, 7.5e5),
    ]:
        privacy = Privacy(epsilon=8, replay=reading, trust="local")
        found = calibrate(release(NORMEC, privacy, setting), privacy)
        assert found.sigma == pytest.approx(sigma, rel=1e-4)
        assert found.epsilon == pytest.approx(eps, rel=7e-3)
        assert not found.is_target
        assert privacy.budget == math.inf
        assert any("not a promise" in note for note in release(NORMEC, privacy, setting).notes)
    with pytest.raises(UsageError, match="dimension"):
        paper_sigma(
            release(NORMEC, Privacy(epsilon=8, trust="local"), TEN),
            Privacy(epsilon=8, replay="total-norm", trust="local"),
        )


def test_calibrate_reaches_the_target_exactly() -> None:
    privacy = Privacy(epsilon=8, trust="secure-sum")
    found = calibrate(release(NORMEC, privacy, but(TEN, clients=100)), privacy)
    assert found.sigma == pytest.approx(1.0396, rel=5e-5)
    assert 8 * (1 - 1e-6) <= found.epsilon <= 8
    assert found.is_target


def test_the_grid_costs_records_a_little_and_says_so() -> None:
    privacy = but(RECORD, record_clip=1.0, noise="secure")
    setting = but(TEN, records=100, dimension=10**6, batch=Sampling(0.5, amplify=False))
    facts = but(DPSGD, lipschitz=1.0)
    with_grid, without = release(facts, privacy, setting), release(facts, but(privacy, noise="seeded"), setting)
    assert without.epsilon(1.0, 1e-5) < with_grid.epsilon(1.0, 1e-5) < without.epsilon(1.0, 1e-5) * 1.001
    assert release(NORMEC, but(GIVEN, noise="secure"), TEN).surcharge == 0


@pytest.mark.parametrize(
    ("unit", "all_records", "delta", "said"),
    [
        ("client", None, 0.1, "1/10 clients: publishing one client"),
        ("client", 50.0, 0.05, None),  # which numbers of records protected clients hold is no matter
        ("record", 50.0, 0.02, "1/50 records: publishing one record"),
        ("record", 50.0, 0.019, None),
        ("record", None, 0.9, None),
    ],
)
def test_a_large_delta_is_noted(unit: str, all_records: float | None, delta: float, said: str | None) -> None:
    privacy = Privacy(epsilon=8, delta=delta, trust="local", unit=unit)
    notes = [note for note in release(NORMEC, privacy, but(TEN, all_records=all_records)).notes if "not below" in note]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize(("epsilon", "noted"), [(19.9, False), (20, True), (1e6, True)])
def test_an_epsilon_that_promises_little_is_noted(epsilon: float, noted: bool) -> None:
    found = release(NORMEC, Privacy(epsilon=epsilon, trust="local"), TEN).notes
    assert any("promises little" in note for note in found) is noted
    assert not any("promises little" in note for note in release(NORMEC, Privacy(sigma=1e-3, trust="local"), TEN).notes)
    seen = NormalDist().cdf(NormalDist().inv_cdf(0.01) + mu_for(20.0, 1e-5))
    assert 0.86 < seen < 0.88  # most of the units, as the note says


@given(st.floats(0.1, 50), st.floats(1.0, 3), st.integers(1, 400), st.integers(1, 50), st.floats(0.2, 5))
@settings(max_examples=60, deadline=None)
def test_monotone_in_every_argument(sigma: float, more: float, rounds: int, clients: int, bound: float) -> None:
    def eps(sigma=sigma, rounds=rounds, clients=clients, bound=bound, delta=1e-5, **words) -> float:
        words = {"trust": "secure-sum", **words}
        facts, setting = but(NORMEC, bound=bound), Setting(clients=clients, rounds=rounds)
        return release(facts, Privacy(sigma=1.0, **words), setting).epsilon(sigma, delta)

    base, up = eps(), 1 + 1e-12
    for less in (eps(sigma=sigma * more), eps(clients=clients + 1), eps(delta=1e-4)):
        assert less <= base * up
    for greater in (eps(bound=bound * more), eps(rounds=rounds + 1), eps(relation="replace"), eps(honest=1)):
        assert base <= greater * up


@pytest.mark.parametrize(
    "make",
    [
        lambda: Facts("x", math.nan, True),
        lambda: Facts("x", 1.0, True, lipschitz=math.nan),
        lambda: Facts("x", 1.0, True, beta=math.nan),
        lambda: Facts("x", 1.0, True, decay=math.nan),
        lambda: Facts("x", 1.0, True, decay=1.0),
        lambda: Sampling(math.nan),
        lambda: Sampling(0.0),
        lambda: Setting(0, 1),
        lambda: Setting(1, 1, records=math.nan),
        lambda: release(NORMEC, GIVEN, TEN).epsilon(math.nan, 1e-5),
        lambda: release(NORMEC, GIVEN, TEN).sigma(math.nan, 1e-5),
        lambda: release(NORMEC, GIVEN, TEN).sigma(1.0, math.nan),
    ],
)
def test_nan_is_refused_everywhere(make) -> None:
    with pytest.raises(UsageError):
        make()


HOSPITALS = (199, 172, 30, 85)
SHARES = tuple(4 * size / 486 for size in HOSPITALS)  # n·w_i, by records
WEIGHTED = Setting(clients=4, rounds=50, weights=SHARES, records=HOSPITALS)


@pytest.mark.parametrize("relation", ["zero-out", "replace"])
@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
def test_a_client_moves_a_sum_by_its_weight(trust: str, relation: str) -> None:
    """Against the Gaussian mechanism's closed form, with the sensitivity written out."""
    found = release(NORMEC, but(GIVEN, trust=trust, relation=relation), WEIGHTED)
    moved = (1 if relation == "zero-out" else 2) * (1.0 if trust == "local" else 4 * 199 / 486)
    noise = 7.3462 * (1 if trust == "local" else 2)
    assert found.epsilon(7.3462, 1e-5) == pytest.approx(gaussian.epsilon(moved * math.sqrt(50) / noise, 1e-5))


def test_sampled_clients_count_with_the_heaviest_weight() -> None:
    """S1 with Δ = b·max n·w_i: as if every client had the bound of the heaviest."""
    sampled = but(WEIGHTED, sampling=Sampling(0.1))
    found = release(NORMEC, but(GIVEN, trust="secure-sum"), sampled)
    all_heavy = release(but(NORMEC, bound=4 * 199 / 486), but(GIVEN, trust="secure-sum"), but(sampled, weights=()))
    assert found.rate == 0.1
    assert found.epsilon(7.3462, 1e-5) == pytest.approx(all_heavy.epsilon(7.3462, 1e-5), rel=1e-12)


@pytest.mark.parametrize("clip", [0.5, 60.0])
@pytest.mark.parametrize("weights", [SHARES, (1.0, 1.2, 1.0, 0.8)])
def test_a_record_moves_a_weighted_sum_by_its_client_s_share(clip: float, weights: tuple[float, ...]) -> None:
    """max over the clients of n·w_i min(2b, C/n_i); with the larger clip, single messages reach their bound."""
    privacy = Privacy(sigma=1.0, unit="record", record_clip=clip, trust="secure-sum", noise="seeded")
    found = release(DPSGD, privacy, but(WEIGHTED, weights=weights, dimension=5))
    expected = max(w * min(2.0, clip / size) for w, size in zip(weights, HOSPITALS, strict=True))
    assert float(found.sensitivity.at(np.zeros(1))[0]) == pytest.approx(expected, rel=1e-12)
    local = release(DPSGD, but(privacy, trust="local"), but(WEIGHTED, weights=weights))
    assert float(local.sensitivity.at(np.zeros(1))[0]) == pytest.approx(min(2.0, clip / 30), rel=1e-12)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.floats(0.1, 3.0), st.integers(1, 50)), min_size=2, max_size=4), st.floats(0.0, 0.5))
def test_a_weighted_record_rule_covers_every_client(clients: list[tuple[float, int]], decay: float) -> None:
    """The rule of a client alone, times its weight, is never above the rule of the weighted sum; nor far below it."""
    facts = Facts("NormEC", bound=1.0, feedback=True, lipschitz=2.0, beta=0.4, decay=decay)
    privacy = Privacy(sigma=1.0, unit="record", record_clip=1.0, trust="secure-sum", noise="seeded")
    weights, sizes = zip(*clients, strict=True)
    together = release(facts, privacy, Setting(len(clients), 30, weights=weights, records=sizes, dimension=5))
    k = np.arange(30.0)
    alone = [
        weight * release(facts, privacy, Setting(1, 30, records=size, dimension=5)).sensitivity.at(k)
        for weight, size in clients
    ]
    assert (together.sensitivity.at(k) >= np.max(alone, axis=0) * (1 - 1e-12)).all()
    assert together.sensitivity.at(k)[0] == pytest.approx(min(2 * max(weights), 2 * max(w / s for w, s in clients)))


def test_weights_and_sizes_must_be_one_for_each_client() -> None:
    with pytest.raises(UsageError, match="weights must be one number, or one for each of 4 clients"):
        Setting(4, 10, weights=(1.0, 1.0))
    with pytest.raises(UsageError, match="records must be one number, or one for each"):
        Setting(4, 10, records=(3.0, 4.0))


@pytest.mark.parametrize("weights", [(), SHARES])
@pytest.mark.parametrize("clip", [0.5, 1.0, 60.0, 200.0])
def test_a_client_adds_the_noise_of_its_own_records(clip: float, weights: tuple[float, ...]) -> None:
    """Each client's ε, computed alone from its own Δ_i and σ_i, is that of the run; weights change nothing."""
    privacy = Privacy(sigma=0.3, unit="record", record_clip=clip, noise="seeded", trust="local")
    run = release(DPSGD, privacy, but(WEIGHTED, weights=weights))
    for size, relative in zip(HOSPITALS, run.relative or (), strict=True):
        alone = release(DPSGD, privacy, Setting(1, 50, records=size))
        assert alone.relative is None
        assert alone.epsilon(0.3 * relative, 1e-5) == pytest.approx(run.epsilon(0.3, 1e-5), rel=1e-9)
    assert max(run.relative or ()) == 1
    if clip <= 1:
        assert run.relative == pytest.approx([30 / size for size in HOSPITALS], rel=1e-9)


def test_clients_whose_messages_may_turn_around_add_the_same_noise() -> None:
    privacy = Privacy(sigma=0.3, unit="record", record_clip=400.0, noise="seeded", trust="local")
    assert release(DPSGD, privacy, WEIGHTED).relative is None
    assert release(DPSGD, but(privacy, record_clip=None), WEIGHTED).relative is None
    summed = but(privacy, record_clip=1.0, trust="secure-sum")
    assert release(DPSGD, summed, but(WEIGHTED, dimension=10)).relative is None
    assert release(DPSGD, but(privacy, record_clip=1.0), but(WEIGHTED, records=(30,) * 4)).relative is None


@pytest.mark.parametrize("clip", [0.01, 0.1, 5.0])
def test_hidden_memories_grow_in_proportion_or_all_add_the_same_noise(clip: float) -> None:
    """With a clean memory Δ_k grows; the ε of every client alone is never above that of the run."""
    privacy = Privacy(sigma=0.3, unit="record", record_clip=clip, memory="clean", noise="seeded", trust="local")
    facts = Facts("NormEC", bound=1.0, feedback=True, lipschitz=10.0, beta=0.1, decay=0.02)
    run = release(facts, privacy, WEIGHTED)
    alone = [release(facts, privacy, Setting(1, 50, records=size)) for size in HOSPITALS]
    spent = run.epsilon(0.3, 1e-5)
    for own, relative in zip(alone, run.relative or (1.0,) * 4, strict=True):
        assert own.epsilon(0.3 * relative, 1e-5) <= spent * (1 + 1e-9)
    assert (run.relative is None) == (clip == 5.0)
    if run.relative is not None:
        assert alone[0].epsilon(0.3 * run.relative[0], 1e-5) == pytest.approx(spent, rel=1e-9)


def test_the_grid_costs_every_client_alike() -> None:
    """Rounding to a grid adds to Δ in proportion to σ_i, so that one multiplier holds for all."""
    privacy = Privacy(sigma=0.3, unit="record", record_clip=60.0, noise="secure", trust="local")
    run = release(DPSGD, privacy, but(WEIGHTED, dimension=10**6))
    for size, relative in zip(HOSPITALS, run.relative or (), strict=True):
        alone = release(DPSGD, privacy, Setting(1, 50, records=size, dimension=10**6))
        assert alone.epsilon(0.3 * relative, 1e-5) <= run.epsilon(0.3, 1e-5) * (1 + 1e-9)


@pytest.mark.slow
def test_sampled_records_add_the_noise_of_their_own_client() -> None:
    batch = Sampling(0.5)
    sizes = tuple(0.5 * size for size in HOSPITALS)
    privacy = Privacy(sigma=0.3, unit="record", record_clip=1.0, noise="seeded", trust="local")
    run = release(DPSGD, privacy, Setting(4, 20, batch=batch, records=sizes))
    assert run.rate == 0.5
    for size, relative in zip(sizes, run.relative or (), strict=True):
        alone = release(DPSGD, privacy, Setting(1, 20, batch=batch, records=size))
        assert alone.epsilon(0.3 * relative, 1e-5) == pytest.approx(run.epsilon(0.3, 1e-5), rel=1e-6)
