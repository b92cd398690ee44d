"""Noise schedules: their scale, the best one against a numerical minimum, and their exact account."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting as dp
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from scipy.optimize import minimize

from normec import DPSGD, GD, AdaptiveClip, Clip, Clip21, Method, NormEC, Privacy, Scaffold
from normec.algorithms.message_weights import message_weights
from normec.algorithms.tensor_norm import TensorNormEC
from normec.errors import UsageError
from normec.privacy import Account, Event, Facts, Ledger, Refused, Sampling, Setting, release
from normec.privacy.noise_schedule import LEVELS, relative_noise

from ..support.gaussian_mechanism import gaussian_mu

METHOD = Facts("a method", bound=1.0, feedback=True)


@pytest.mark.parametrize("schedule", ["linear:0.2", "exponential:7", "3 1 4 1 5 9 2 6", [8, 7, 6, 5, 4, 3, 2, 1]])
def test_the_mean_precision_is_one_and_the_ratios_are_those_asked_for(schedule: Any) -> None:
    asked = {"linear:0.2": np.linspace(1, 0.2, 8), "exponential:7": 7 ** np.linspace(0, 1, 8)}
    wanted = asked.get(str(schedule))
    if wanted is None:
        wanted = np.array(schedule.split() if isinstance(schedule, str) else schedule, float)
    text = Privacy(epsilon=8, noise_schedule=schedule, trust="local").schedule(8)
    found = np.array(relative_noise(text, 8))
    assert np.mean(found**-2.0) == pytest.approx(1, rel=1e-14)
    np.testing.assert_allclose(found / found[0], wanted / wanted[0], rtol=1e-14)


def test_a_function_is_evaluated_once_for_each_round() -> None:
    asked: list[int] = []

    def schedule(round: int) -> float:
        asked.append(round)
        return 1.0 + round

    stated = Privacy(epsilon=8, noise_schedule=schedule, trust="local").for_rounds(3)
    assert (asked, stated.noise_schedule) == ([0, 1, 2], "1.0 2.0 3.0")


@pytest.mark.parametrize("growing", [False, True])
def test_no_other_schedule_leaves_less_noise_in_the_last_model(growing: bool) -> None:
    """Σ a²σ² is minimised over all σ with Σ (Δ/σ)² = μ² by a solver that knows nothing of the formula."""
    draw = np.random.default_rng(1)
    rounds, mu = 12, 1.7
    weights, sensitivities = draw.uniform(0.1, 3, rounds), np.ones(rounds)
    if growing:
        sensitivities = np.sort(draw.uniform(0.2, 1, rounds))

    def scaled(log_sigma: Any) -> Any:
        sigma = np.exp(log_sigma)
        return sigma * math.sqrt(np.sum((sensitivities / sigma) ** 2)) / mu

    def noise(log_sigma: Any) -> float:
        return float(np.sum((weights * scaled(log_sigma)) ** 2))

    solved = minimize(noise, np.zeros(rounds), tol=1e-14)
    found = scaled(np.log(relative_noise("best", rounds, sensitivities.tolist(), weights.tolist())))
    assert np.sum((weights * found) ** 2) == pytest.approx(solved.fun, rel=1e-9)
    np.testing.assert_allclose(found, scaled(solved.x), rtol=1e-4)
    np.testing.assert_allclose(
        found**2, sensitivities * (weights @ sensitivities) / (mu**2 * weights), rtol=1e-12
    )  # the formula


def gain_of(weights: Any) -> float:
    """The best noise relative to the constant one: √((Σa)²/μ²) over √(Σa² T/μ²)."""
    return float(np.sum(weights) / math.sqrt(len(weights) * np.sum(weights**2)))


@pytest.mark.parametrize(
    ("method", "gain"),
    [
        (NormEC(0.1, 0.3, server_norm=False), math.sqrt(3 * 201 / (2 * 401))),  # Σ(T−t) / √(T Σ(T−t)²)
        (NormEC(0.1, 0.3, server_norm=False, decay=0.05), gain_of(1 - 0.95 ** np.arange(1, 201))),
        (DPSGD(Clip(1.0)), 1.0),
        (DPSGD(Clip(1.0), momentum=0.9), gain_of(1 - 0.9 ** np.arange(1, 201))),
    ],
)
def test_the_gain_over_constant_noise(method: Method, gain: float) -> None:
    """The noise in the last model after 200 rounds, relative to constant noise of the same ε."""
    weights = np.array(message_weights(method, [0.05] * 200))
    best = np.array(relative_noise("best", 200, [1.0] * 200, weights.tolist()))
    assert math.sqrt(np.sum((weights * best) ** 2) / np.sum(weights**2)) == pytest.approx(gain, rel=1e-9)


@pytest.mark.parametrize(
    "method",
    [
        NormEC(0.1, 0.3, server_norm=False),
        NormEC(0.1, 0.3, server_norm=False, decay=0.2),
        DPSGD(Clip(1.0), beta=0.5, momentum=0.9),
        GD(),
    ],
)
def test_weights_are_those_with_which_messages_enter_the_last_model(method: Method) -> None:
    draw = np.random.default_rng(2)
    steps, messages = draw.uniform(0, 1, 9), torch.tensor(draw.normal(size=(9, 4)))
    x: torch.Tensor = torch.zeros(4, dtype=torch.float64)
    state = method.server_init(x)
    for step, message in zip(steps, messages, strict=True):
        direction, state = method.server_step(message, state)
        x = x - step * direction
    weights = torch.tensor(message_weights(method, steps.tolist()), dtype=torch.float64)
    torch.testing.assert_close(x, -(weights[:, None] * messages).sum(0), rtol=1e-12, atol=1e-12)


def test_closed_forms_of_the_weights() -> None:
    rounds, lr, beta, keep = 7, 0.3, 0.5, 0.8
    left = rounds - np.arange(rounds)
    plain = message_weights(NormEC(0.1, beta, server_norm=False), [lr] * rounds)
    np.testing.assert_allclose(plain, lr * beta * left, rtol=1e-13)
    forgetting = message_weights(NormEC(0.1, beta, server_norm=False, decay=1 - keep), [lr] * rounds)
    np.testing.assert_allclose(forgetting, lr * beta * (1 - keep**left) / (1 - keep), rtol=1e-13)


class Signs(Method):
    """A server step that is not linear, in a class that says nothing about it."""

    bound = 1.0

    def message(self, update: Any, state: Any, key: Any = None) -> Any:  # noqa: ARG002
        return update, state

    def server_step(self, mean_message: Any, state: Any) -> Any:
        return mean_message.sign(), state


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (NormEC(0.1, 0.3), "use server_norm = false"),
        (TensorNormEC(0.1, 0.3, False, 0.0, (4,)), "its class does not state it"),
        (Signs(), "its class does not state it"),
        (Scaffold(1.0), "control variate"),
        (AdaptiveClip(Clip21(1.0)), "multiplied by the threshold"),
    ],
)
def test_weights_of_other_server_steps_are_refused(method: Method, reason: str) -> None:
    """The reason is that of the method, and only a method that has the setting is told to change it."""
    with pytest.raises(UsageError, match="weight of each round's message") as said:
        message_weights(method, [0.1] * 3)
    assert reason in str(said.value)
    assert ("server_norm" in str(said.value)) == ("server_norm" in reason)


@pytest.mark.parametrize("trust", ["local", "secure-sum"])
def test_without_sampling_the_account_is_the_sum_of_precisions(trust: Any) -> None:
    values = np.random.default_rng(3).uniform(0.5, 4, 50)
    privacy = Privacy(epsilon=3, trust=trust, noise_schedule=values)
    composed = release(METHOD, privacy, Setting(clients=16, rounds=50))
    sigma = composed.sigma(3, privacy.delta)
    gain = 1 if trust == "local" else 4
    used = np.array([composed.sigma_at(sigma, k) for k in range(50)])
    assert math.sqrt(np.sum((gain * used) ** -2.0)) == pytest.approx(gaussian_mu(3, 1e-5), rel=1e-8)
    constant = release(METHOD, Privacy(epsilon=3, trust=trust), Setting(clients=16, rounds=50))
    assert sigma == pytest.approx(constant.sigma(3, privacy.delta), rel=1e-9)
    one_by_one = Account(privacy.delta, [composed.event(sigma, k) for k in range(50)])
    together = Account(privacy.delta, [composed.event(sigma, 0, 20), composed.event(sigma, 20, 30)])
    assert one_by_one.epsilon() == pytest.approx(3, rel=1e-9)
    assert together.epsilon() == pytest.approx(3, rel=1e-9)
    assert one_by_one.epsilon() <= 3


@pytest.mark.slow
def test_with_sampling_every_round_is_composed_at_its_own_noise() -> None:
    privacy = Privacy(sigma=1.2, trust="central", sampling=0.2, noise_schedule="1 1 1 2 2 3 0.7 0.7 0.7 0.7")
    composed = release(METHOD, privacy, Setting(clients=1, rounds=10, sampling=Sampling(0.2)))
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for k in range(10):
        z = composed.sigma_at(1.2, k)
        accountant.compose(dp.PoissonSampledDpEvent(0.2, dp.GaussianDpEvent(z)))
    expected = accountant.get_epsilon(1e-5)
    assert composed.epsilon(1.2, 1e-5) == pytest.approx(expected, rel=2e-3)
    account, bounds = Account(1e-5, planned=composed.kinds(1.2)), []
    for k in range(10):
        account.add(composed.event(1.2, k))
        bounds.append(account.upper(10))
        assert bounds[-1] >= composed.epsilon(1.2, 1e-5, k + 1) * (1 - 1e-4)  # two discretisations of one number
    assert bounds == sorted(bounds)
    assert bounds[-1] == pytest.approx(composed.epsilon(1.2, 1e-5), rel=1e-12)


def test_with_sampling_many_values_become_a_few_that_are_close() -> None:
    privacy = Privacy(epsilon=8, trust="central", sampling=0.1, noise_schedule="exponential:0.2")
    composed = release(METHOD, privacy, Setting(clients=1, rounds=100, sampling=Sampling(0.1)))
    exact = np.array(relative_noise("exponential:0.2", 100))
    found = np.array(composed.schedule)
    assert len(set(found)) <= LEVELS
    assert np.mean(found**-2.0) == pytest.approx(1, rel=1e-12)
    assert np.abs(np.log(found / exact)).max() < math.log(5) / LEVELS


@pytest.mark.parametrize(
    ("words", "setting", "reason"),
    [
        ({"trust": "central", "sampling": 0.5}, {"sampling": Sampling(0.5)}, "amplification by sampling"),
        ({"memory": "noisy"}, {}, "correct the noise"),
        ({}, {"message_weights": None}, "the weight of each round's message"),
        ({}, {"message_weights": (1.0, 1.0, 0.0)}, "round 2 under infinite noise"),
    ],
)
def test_the_best_schedule_is_refused_where_it_is_not_known(words: Any, setting: Any, reason: str) -> None:
    privacy = Privacy(**{"epsilon": 8, "noise_schedule": "best", "trust": "local", **words})
    with pytest.raises(Refused, match=reason):
        release(METHOD, privacy, Setting(clients=4, rounds=3, **{"message_weights": (3.0, 2.0, 1.0), **setting}))


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ("falling", "must be constant, best"),
        ("linear:fast", "must be constant, best"),
        ("linear:-1", "must be > 0"),
        ("linear:", "must be constant, best"),
        ("linear:1 2", "must be constant, best"),
        ("linear", "must be constant, best"),
        ("", "must be constant, best"),
        ([], "must be constant, best"),
        ("1e-120 1", "from 1e-100 to 1e100"),
        ([1.0, 0.0], "must be > 0"),
        ([1.0, math.inf], "must be > 0"),
        ([1.0, None], "must be constant, best"),
    ],
)
def test_what_is_no_schedule_is_refused(schedule: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        Privacy(epsilon=8, noise_schedule=schedule, trust="local")


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="has 2 numbers, and the run has 3 rounds"):
        relative_noise("1 2", 3)
    with pytest.raises(UsageError, match="differs by a factor of 1e"):
        relative_noise("exponential:1e7", 3)
    with pytest.raises(UsageError, match="the same in every round"):
        Privacy(epsilon=8, replay="variance", noise_schedule="best", trust="local")


@pytest.mark.parametrize(("first", "second"), [("constant", "linear:2"), ("linear:2", "constant"), ("1 2", "2 1")])
def test_a_ledger_belongs_to_one_schedule(tmp_path: Path, first: str, second: str) -> None:
    path = tmp_path / "ledger.jsonl"
    with Ledger(path, Privacy(epsilon=8, noise_schedule=first, trust="local"), 2) as ledger:
        ledger.spend(0, Event(4.0), 4.0)
    with pytest.raises(UsageError, match="was opened for noise_schedule"):
        Ledger(path, Privacy(epsilon=8, noise_schedule=second, trust="local"), 2)
    stated = json.loads(path.read_text().splitlines()[0])["privacy"]
    assert stated.get("noise_schedule", "constant") == first


def test_the_best_schedule_follows_a_sensitivity_that_grows() -> None:
    """σ_t² ∝ Δ_t/a_t with Δ_t of the record rule, and μ² = Σ (Δ_t/σ_t)² is the target's."""
    alpha, beta, clip, records, rounds = 0.5, 0.2, 1.0, 50, 6
    facts = Facts("normec", bound=1.0, feedback=True, lipschitz=1 / alpha, beta=beta)
    weights = tuple(float(rounds - t) for t in range(rounds))
    privacy = Privacy(
        epsilon=2, unit="record", record_clip=clip, memory="clean", noise="seeded", noise_schedule="best", trust="local"
    )
    composed = release(facts, privacy, Setting(clients=3, rounds=rounds, records=records, message_weights=weights))
    shift = clip / records
    moved = shift / alpha * (1 + np.arange(rounds) * beta / alpha)
    sigma = composed.sigma(2, privacy.delta)
    used = np.array([composed.sigma_at(sigma, t) for t in range(rounds)])
    np.testing.assert_allclose(used**2 / used[0] ** 2, moved / weights * weights[0] / moved[0], rtol=1e-12)
    assert math.sqrt(np.sum((moved / used) ** 2)) == pytest.approx(gaussian_mu(2, 1e-5), rel=1e-8)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_correlated_noise_is_no_better_than_the_best_schedule_at_full_participation(decay: float) -> None:
    """Against the square-root factorisation of prefix sums, and bands of it: the noise in the last model at equal μ."""
    rounds = 40
    weights = [sum((1 - decay) ** k for k in range(rounds - t)) for t in range(rounds)]
    relative = relative_noise("best", rounds, [1.0] * rounds, weights)
    assert relative is not None
    best = float((np.array(weights) ** 2 * np.array(relative) ** 2).sum())  # at μ² = rounds
    coefficients = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, rounds))])
    for band in (1, 2, 5, rounds):
        factor = sum(np.diag(np.full(rounds - k, coefficients[k]), -k) for k in range(band))
        gram = factor.T @ factor
        noise = np.linalg.solve(factor.T, np.array(weights))  # the last model has the noise weightsᵀ factor⁻¹ z
        assert float(noise @ noise) * gram.sum() / rounds >= best * (1 - 1e-12)
        independent = gram.sum(axis=1)  # the precisions of independent noise with the same sensitivity
        assert np.linalg.eigvalsh(np.diag(independent) - gram).min() > -1e-9
