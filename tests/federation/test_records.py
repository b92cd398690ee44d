"""Protection of single records in a federation: trajectories, ε, batches by secret coins, and restarts."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normec import DPSGD, Clip, Clip21, Compute, Method, NormEC, Privacy, SmoothedNorm, UsageError, train
from normec.algorithms.method import MEMORY, Steps
from normec.federation.protocol import party_state
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.gradient_oracle import ProblemOracle
from normec.federation.protocol.policy import Policy, load_policy
from normec.federation.protocol.reconciliation import reconcile
from normec.federation.protocol.spending import spending
from normec.federation.protocol.terms import PlanTerms, RecordTerms
from normec.privacy import gaussian
from normec.privacy.accounting import Account, Event

from ..support.reference import uniforms
from .faulty_network import Killed, dying
from .hospitals import FEATURES, NODES, POLICY, SEED, SIZES, ByHand, Hospitals, gradient, patients, problem, scaled

SIGMA = 0.05


def normalised(alpha: float) -> Any:
    return lambda v: v / (alpha + math.sqrt(float(v @ v)))


METHODS: dict[str, tuple[Method, ByHand]] = {
    "dpsgd": (DPSGD(Clip(0.4)), ByHand(lambda v: scaled(v, 0.4), memory=False)),
    "normec": (NormEC(0.5, 0.4), ByHand(normalised(0.5), beta=0.4, normed=True)),
    "clip21 that forgets": (Clip21(0.3, 0.1), ByHand(lambda v: scaled(v, 0.3), decay=0.1)),
}


def sigmas(method: Method, clip: float = 1.0, sigma: float = SIGMA, divisors: Any = SIZES) -> list[float]:
    """The noise of each party: proportional to min(2b, L·C/B_i), and σ for the largest."""
    assert method.lipschitz is not None
    changes = [min(2 * method.bound, method.lipschitz * clip / divisor) for divisor in divisors]
    return [sigma * change / max(changes) for change in changes]


def by_record(**changes: Any) -> Privacy:
    stated = {"sigma": SIGMA, "unit": "record", "trust": "local", "record_clip": 1.0, "noise": "seeded"}
    return Privacy(**stated | changes)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("name", "by", "clip"),
    [
        ("dpsgd", "record", 0.7),
        ("normec", "record", "auto"),
        ("clip21 that forgets", "layer", 0.7),
        ("normec", "layer", "auto"),
    ],
)
def test_the_trajectory_by_hand(name: str, by: Any, clip: Any, tmp_path: Path) -> None:
    method, by_hand = METHODS[name]
    privacy = by_record(record_clip=clip, record_clip_by=by)
    x = Hospitals(tmp_path, method, 5, privacy, records=SIZES).run()
    noise = sigmas(method, 1.0 if clip == "auto" else clip)
    expected = by_hand.run(5, lambda i, x, _: gradient(i, x, clip, by == "layer", SIZES[i]), noise)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_weights_by_records_and_noise_by_party(name: str, tmp_path: Path) -> None:
    """w_i = n_i/N; each party has the noise that its own records need, and all parties have the same ε."""
    method, by_hand = METHODS[name]
    shares = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES)
    weighted = {"weights": 3 * shares}
    federation = Hospitals(tmp_path, method, 5, by_record(), plan_changes=weighted, records=SIZES)
    x = federation.run()
    grads = lambda i, x, _: gradient(i, x, 1.0, False, SIZES[i])  # noqa: E731
    expected = by_hand.run(5, grads, sigmas(method), shares.tolist())
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-10, atol=1e-10)
    slope = method.lipschitz or 0.0
    spent = gaussian.epsilon(math.sqrt(5) * min(2 * method.bound, slope / 9) / SIGMA, 1e-5)
    for node in NODES:
        assert read_releases(federation.home(node)).epsilon("record", 1e-5) == pytest.approx(spent, rel=1e-9)
    assert federation.server.finish().privacy.epsilon == pytest.approx(spent, rel=1e-9)  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_divisor_that_is_not_the_number_of_records(tmp_path: Path) -> None:
    method, by_hand = METHODS["normec"]
    x = Hospitals(tmp_path, method, 6, by_record(), records=[20.0]).run()
    expected = by_hand.run(6, lambda i, x, _: gradient(i, x, 1.0, False, 20.0), [SIGMA] * 3)
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batches", [{}, {"batch_rate": 0.4}])
def test_a_delta_that_is_large_for_all_records_is_noted(batches: dict[str, float], tmp_path: Path) -> None:
    for delta, noted in ((1 / sum(SIZES), True), (0.9 / sum(SIZES), False)):
        privacy = by_record(delta=delta, sigma=0.8)
        federation = Hospitals(
            tmp_path / str(delta), METHODS["dpsgd"][0], 2, privacy, records=SIZES, plan_changes=batches
        )
        assert federation.server.mechanism is not None
        notes = federation.server.mechanism.release.notes
        assert any(f"is not below 1/{sum(SIZES)} records" in note for note in notes) is noted


@pytest.mark.slow
def test_batches_by_coins_of_a_simulation(tmp_path: Path) -> None:
    method, by_hand = METHODS["normec"]
    changes = {"batch_rate": 0.4}
    x = Hospitals(tmp_path, method, 12, by_record(sigma=0.8), records=SIZES, plan_changes=changes).run()

    def grads(i: int, x: Any, k: int) -> Any:
        drawn = [coin < 0.4 for coin in uniforms(SEED, "batches", i, k, SIZES[i])]
        return gradient(i, x, 1.0, False, 0.4 * SIZES[i], drawn)

    np.testing.assert_allclose(
        x.numpy(),
        by_hand.run(12, grads, sigmas(method, sigma=0.8, divisors=[0.4 * size for size in SIZES])),
        rtol=1e-10,
        atol=1e-10,
    )
    multiplier = 0.8 / min(2.0, 2 / (0.4 * 9))
    found = read_releases(tmp_path / "a")
    expected = Account(1e-5, [Event(multiplier, 0.4, 12)]).epsilon()
    assert found.epsilon("record", 1e-5) == pytest.approx(expected, rel=1e-6)
    assert found.epsilon("client", 1e-5) == pytest.approx(gaussian.epsilon(math.sqrt(12) / 0.8, 1e-5), rel=1e-6)


@pytest.mark.slow
def test_secret_coins_are_fair_independent_and_not_of_the_seed() -> None:
    """Each record has a gradient of its own: a message tells who was drawn. 400 batches of 25 records at 0.3."""
    oracle = ProblemOracle(problem(2))
    terms, plan = (
        RecordTerms(divisor=1.0, by_layer=False, clip=1.0, batch_rate=0.3),
        PlanTerms(seed=SEED, batch_size=0, rounds=1),
    )
    x = torch.zeros(FEATURES + 1, dtype=torch.float64)
    sums = [oracle.clipped_gradient(x, 2, 0, plan, terms, secret_coins=True)[0].numpy().tobytes() for _ in range(400)]
    assert len(set(sums)) > 390
    whole = gradient(2, x.numpy(), 1.0, False, 1.0)
    each = np.array([np.frombuffer(one) for one in sums])
    inputs, targets = patients(2)
    shares = np.array([scaled((0.5 - t) * np.append(v, 1.0), 1.0) for v, t in zip(inputs, targets, strict=True)])
    error = np.sqrt(0.3 * 0.7 * (shares**2).sum(0) / len(sums))
    assert (np.abs(each.mean(0) - 0.3 * whole) < 6 * error).all()
    assert (np.abs(each.var(0) / (0.3 * 0.7 * (shares**2).sum(0)) - 1) < 0.5).all()
    same = {oracle.clipped_gradient(x, 2, 0, plan, terms, secret_coins=False)[0].numpy().tobytes() for _ in range(3)}
    assert len(same) == 1


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        (DPSGD(Clip(1.0)), Privacy(epsilon=2.0, unit="record", record_clip=0.5, trust="local")),
        (NormEC(0.5, 0.4), Privacy(epsilon=1.0, delta=1e-6, unit="record", record_clip="auto", trust="local")),
        (Clip21(0.5), Privacy(epsilon=1.0, unit="record", record_clip=1.0, relation="replace", trust="local")),
        (DPSGD(SmoothedNorm(1.0)), Privacy(epsilon=3.0, unit="record", trust="local")),
        (
            DPSGD(Clip(1.0)),
            Privacy(epsilon=2.0, unit="record", record_clip=0.5, noise_schedule="linear:3", trust="local"),
        ),
    ],
)
def test_noise_and_epsilon_are_those_of_one_process(method: Method, privacy: Privacy, tmp_path: Path) -> None:
    """The same statement has the same σ and ε in `train`, and every party's own account says the same."""
    stated = privacy.with_record_clip(1e9)  # parties that are asked for no clip use none, `train` would use "auto"
    reference = train(
        problem(), method, lr=0.3, rounds=5, seed=SEED, privacy=stated, compute=Compute(dtype=torch.float64)
    )
    policy = POLICY.model_copy(update={"relation": privacy.relation, "delta": privacy.delta, "least_sigma": 1e-6})
    federation = Hospitals(tmp_path, method, 5, privacy, policy, records=SIZES)
    federation.run()
    found = federation.server.finish().privacy
    assert found is not None
    assert reference.privacy is not None
    assert found.sigma == pytest.approx(reference.privacy.sigma, rel=1e-6)  # up to the grid of secure noise
    assert found.epsilon == pytest.approx(reference.privacy.epsilon, rel=1e-6)
    spent = [spending(federation.home(node), policy)["epsilon"] for node in NODES]
    assert spent == pytest.approx([found.epsilon] * 3, rel=1e-6)  # the grid of secure noise adds to Δ alike
    assert found.statement.startswith("Protected: each record of each client")


@pytest.mark.slow
def test_several_runs_add_up_in_both_accounts(tmp_path: Path) -> None:
    """A run for records, one for clients and one for records again: each message is charged to both accounts."""
    policy = POLICY.model_copy(update={"units": ["client", "record"]})
    kinds = [
        ("first", by_record(), 1.0 / 9, 1.0),
        ("second", Privacy(sigma=3.0, noise="seeded", memory="noisy", trust="local"), 2.0, 1.0),
        ("third", by_record(record_clip=0.5, sigma=0.2), 0.5 / 9, 1.0),
    ]
    record = client = 0.0
    for run, privacy, change, bound in kinds:
        Hospitals(tmp_path, DPSGD(Clip(1.0)), 4, privacy, policy, records=SIZES, run=run).run()
        assert privacy.sigma is not None
        record += 4 * (change / privacy.sigma) ** 2
        client += 4 * (bound / privacy.sigma) ** 2
    found = spending(tmp_path / "a", policy)
    assert found["epsilons"]["record"] == pytest.approx(gaussian.epsilon(math.sqrt(record), 1e-5), rel=1e-9)
    assert found["epsilons"]["client"] == pytest.approx(gaussian.epsilon(math.sqrt(client), 1e-5), rel=1e-9)
    assert found["epsilon"] == found["epsilons"]["record"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpsgd", "normec"])
def test_restarts_of_everyone_change_nothing(name: str, tmp_path: Path) -> None:
    method, _ = METHODS[name]
    whole = Hospitals(tmp_path / "whole", method, 8, by_record(), records=SIZES).run()
    federation = Hospitals(tmp_path / "parts", method, 8, by_record(), records=SIZES)
    while not federation.server.finished:
        for node, request in federation.server.requests().items():
            federation.ask(node, request)
            federation.restart_server()  # before the round closes: the parties send the same messages again
        federation.round()
        federation.restart_server()
    torch.testing.assert_close(federation.server.finish().x, whole, rtol=0, atol=0)
    for node in NODES:
        assert read_releases(federation.home(node)).count() == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpsgd", "normec"])
def test_a_party_killed_at_every_write_is_never_charged_too_little(name: str, tmp_path: Path) -> None:
    method, _ = METHODS[name]
    federation = Hospitals(tmp_path, method, 1000, by_record(noise="secure"), records=SIZES)
    federation.round()
    left, point, survived = set[bytes](), 0, False
    while not survived:
        request = federation.server.requests()["a"]
        try:
            with dying(point):
                answer = federation.party("a").answer(request)
            survived = True
        except Killed:
            point += 1
            answer = federation.party("a").answer(request)
        assert hasattr(answer, "message")
        left.add(answer.message.tobytes())
        federation.server.receive("a", answer)
        federation.round()
    assert point > 4
    releases = read_releases(federation.home("a"))
    assert releases.count() >= len(left) + 1
    multiplier = SIGMA / min(2.0, (2.0 if name == "normec" else 1.0) / 9)
    charged = gaussian.epsilon(math.sqrt(releases.count()) / multiplier, 1e-5)
    assert releases.epsilon("record", 1e-5) == pytest.approx(charged, rel=1e-6)


@pytest.mark.slow
def test_a_lost_disk_gets_the_noisy_memory_back_and_is_charged_at_record_level(tmp_path: Path) -> None:
    method = NormEC(0.5, 0.4)
    federation = Hospitals(tmp_path, method, 20, by_record(noise="secure"), records=SIZES)
    for _ in range(5):
        federation.round()
    shutil.rmtree(federation.home("b"))
    for _ in range(3):
        federation.round()
    releases = read_releases(federation.home("b"))
    assert releases.recovered() == 6  # the accepted ones, and one that may have been under way
    charged = gaussian.epsilon(math.sqrt(9) * (2 / 9) / SIGMA, 1e-5)  # of the smallest party, as of every party
    assert releases.epsilon("record", 1e-5) == pytest.approx(charged, rel=1e-6)
    request = federation.server.requests()["b"]
    state = party_state.load(party_state.path_of(federation.home("b"), request.run, "b"))
    assert state is not None
    agreed = reconcile(state, request, Steps(method, torch.zeros(FEATURES + 1, dtype=torch.float64)))
    assert agreed is not None
    assert agreed.client is not None
    assert agreed.released
    torch.testing.assert_close(agreed.client[MEMORY][0], federation.server.state.run.memory[1], rtol=0, atol=0)


REFUSED: dict[str, tuple[Method, Privacy, dict[str, Any], str]] = {
    "no public number": (DPSGD(Clip(1.0)), by_record(), {}, "give records, one number for each party or one for all"),
    "two numbers": (DPSGD(Clip(1.0)), by_record(), {"records": [3, 4]}, "one number for each of the 3 parties"),
    "a sum": (DPSGD(Clip(1.0)), by_record(trust="central"), {"records": SIZES}, "record_clip needs trust='local'"),
    "a clean memory": (NormEC(0.1, 0.1), by_record(memory="clean"), {"records": SIZES}, "needs memory='noisy'"),
    "a batch of fixed size": (
        DPSGD(Clip(1.0)),
        by_record(),
        {"records": SIZES, "plan_changes": {"batch_size": 4}},
        "not with batch_size",
    ),
    "coins without a clip": (
        DPSGD(Clip(1.0)),
        by_record(record_clip=None),
        {"plan_changes": {"batch_rate": 0.5}},
        "batch_rate goes with record_clip",
    ),
    "tiny batches": (
        DPSGD(Clip(1.0)),
        by_record(),
        {"records": SIZES, "plan_changes": {"batch_rate": 0.1}},
        "records times batch_rate must be at least 1",
    ),
    "coins of replaced records": (
        DPSGD(Clip(1.0)),
        by_record(relation="replace"),
        {"records": SIZES, "plan_changes": {"batch_rate": 0.5}},
        "no proved gain from batches in the 'replace' relation",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_rule_covers_is_refused_at_the_start(name: str, tmp_path: Path) -> None:
    method, privacy, changes, says = REFUSED[name]
    with pytest.raises(UsageError, match=says):
        Hospitals(tmp_path, method, 5, privacy, **changes)


def test_a_policy_for_records(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('epsilon = 8\nunits = ["client", "record"]\nrecord_epsilon = 1\nlargest_record_clip = 2\n')
    policy = load_policy(path)
    assert policy.budgets == {"client": 8.0, "record": 1.0}
    assert policy.accepted_units == ["client", "record"]
    assert Policy(epsilon=2.0, unit="record").budgets == {"record": 2.0}
    path.write_text('epsilon = 8\nunit = "record"\nrecord_epsilon = 1\n')
    with pytest.raises(UsageError, match="drop record_epsilon"):
        load_policy(path)
    path.write_text("epsilon = 8\nunits = []\n")
    with pytest.raises(UsageError, match="units"):
        load_policy(path)
