"""Runs whose noise changes by round: the trajectory by hand, the noise in the last model, the ledger, and the audit."""

from __future__ import annotations

import json
import math
import shutil
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normec import DPSGD, Callback, Clip, Logging, NormEC, Privacy, Problem, Run, Storage, UsageError, train
from normec.algorithms.method import Method
from normec.errors import BudgetSpent
from normec.experiments.audit import audit_method
from normec.privacy.mechanism import Mechanism
from normec.sampling.participation import Poisson, drawn_clients
from normec.training.options import Options
from normec.training.train import prepare

from ...support.reference import seeded_noise
from ...support.runs import StopAt, releases, snapshot

N, D, ROUNDS = 5, 6, 200
CENTRES = np.random.default_rng(0).normal(size=(N, D))


def bowls() -> Any:
    centres = torch.tensor(CENTRES)
    return Problem.from_functions(
        [lambda x, c=c: 0.5 * ((x - c) ** 2).sum() for c in centres], torch.zeros(D, dtype=torch.float64)
    )


def planes(dimension: int) -> Any:
    """Clients whose gradients do not depend on x, so that the noise changes no message."""
    slopes = torch.randn(4, dimension, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Problem.from_functions(
        [lambda x, s=s: (s * x).sum() for s in slopes], torch.zeros(dimension, dtype=torch.float64)
    )


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("decay", "rate"), [(0.0, 1.0), (0.1, 1.0), (0.1, 0.5)])
def test_the_trajectory_is_that_of_a_loop_by_hand(decay: float, rate: float) -> None:
    """Error feedback with smoothed normalisation; α = 1 keeps rounding errors from growing."""
    alpha, beta, lr, sigma = 1.0, 0.2, 0.1, 0.4
    left = ROUNDS - np.arange(ROUNDS)
    if rate < 1:
        relative = np.where(np.arange(ROUNDS) < 50, 3.0, 1.0)
        privacy = Privacy(sigma=sigma, trust="secure-sum", sampling=rate, noise_schedule=relative)
    else:
        relative = 1 / np.sqrt(left if not decay else 1 - (1 - decay) ** left)
        privacy = Privacy(sigma=sigma, trust="secure-sum", noise_schedule="best")
    sigmas = sigma * relative * math.sqrt(np.mean(relative**-2.0))
    method = NormEC(alpha, beta, server_norm=False, decay=decay)
    options = Options(lr=lr, rounds=ROUNDS, privacy=privacy, seed=1, logging=Logging(every=50))
    mechanism = prepare(bowls(), method, options).mechanism
    assert mechanism is not None
    x, estimate, memory = np.zeros(D), np.zeros(D), np.zeros((N, D))
    for t in range(ROUNDS):
        drawn = drawn_clients(Poisson(rate), N, t, 1) if rate < 1 else None
        total = sigmas[t] * math.sqrt(N) * seeded_noise(1, mechanism.name, t, D)
        for i in range(N):
            kept = (1 - decay) * memory[i]
            if drawn is None or i in drawn:
                v = (x - CENTRES[i]) - memory[i]
                message = v / (alpha + math.sqrt(v @ v))
                total = total + message
                kept = kept + beta * message
            memory[i] = kept
        estimate = (1 - decay) * estimate + beta * total / N
        x = x - lr * estimate
    run = train(bowls(), method, lr=lr, rounds=ROUNDS, privacy=privacy, seed=1, logging=Logging(every=50))
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    assert float(np.linalg.norm(x)) > 0.1


WIDE = 4000


def run_on_planes(decay: float, privacy: Privacy) -> Run:
    return train(planes(WIDE), NormEC(1.0, 0.2, server_norm=False, decay=decay), lr=0.1, rounds=ROUNDS, privacy=privacy)


@cache
def without_noise(decay: float) -> Tensor:
    return run_on_planes(decay, Privacy(sigma=1e-9, trust="secure-sum")).x


@pytest.mark.slow
@pytest.mark.parametrize(("decay", "gain"), [(0.0, math.sqrt(3 * 201 / (2 * 401))), (0.05, 0.978)])
@pytest.mark.parametrize("noise", ["seeded", pytest.param("secure", marks=pytest.mark.slow)])
def test_the_best_schedule_leaves_less_noise_in_the_last_model(decay: float, gain: float, noise: Any) -> None:
    """At the same ε: 0.867 of the constant noise without forgetting; with it the gain is within the tolerance.

    The tolerance is five standard errors.
    """

    def noise_left(schedule: str) -> float:
        run = run_on_planes(decay, Privacy(epsilon=8, trust="secure-sum", noise=noise, noise_schedule=schedule))
        spent = run.privacy
        assert spent is not None
        assert spent.epsilon == pytest.approx(8, rel=1e-6)
        return float((run.x - without_noise(decay)).norm())

    assert noise_left("best") / noise_left("constant") == pytest.approx(gain, rel=5 / math.sqrt(WIDE))


@pytest.mark.parametrize("trust", ["local", "central"])
@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_each_round_has_its_own_noise(trust: Any, noise: Any) -> None:
    """A method without a memory, clients without gradients: the last estimate is the noise of the last round."""
    dimension, clients = 4000, 4
    problem = Problem.from_functions([lambda x: 0 * x.sum()] * clients, torch.zeros(dimension, dtype=torch.float64))
    for last in (1.0, 20.0):
        privacy = Privacy(sigma=0.5, trust=trust, noise=noise, noise_schedule=[5.0, 5.0, last])
        run = train(problem, DPSGD(Clip(1.0)), lr=0.1, rounds=3, privacy=privacy)
        expected = 0.5 * last * math.sqrt((2 / 25 + 1 / last**2) / 3) / math.sqrt(clients)
        assert float(run.state.estimate.std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * dimension))


METHOD = NormEC(0.1, 0.1, server_norm=False)
RUN: dict[str, Any] = {"lr": 0.05, "rounds": 12, "seed": 0, "storage": Storage(checkpoint_seconds=1000.0)}


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_the_ledger_pays_each_round_at_its_own_noise(tmp_path: Path, noise: Any) -> None:
    privacy = Privacy(epsilon=5, trust="secure-sum", noise=noise, noise_schedule="best")
    run = train(bowls(), METHOD, out=tmp_path / "run", privacy=privacy, **RUN)
    paid = releases(tmp_path / "run")
    left = 12 - np.arange(12)
    assert run.privacy is not None
    expected = run.privacy.sigma / np.sqrt(left) * math.sqrt(np.mean(left))
    np.testing.assert_allclose([line["sigma"] for line in paid], expected, rtol=1e-12)
    np.testing.assert_allclose([line["multiplier"] for line in paid], expected * math.sqrt(N), rtol=1e-12)
    assert paid[-1]["epsilon"] == pytest.approx(5, rel=1e-6)
    assert run.privacy.epsilon == paid[-1]["epsilon"] <= 5
    assert any("noise_schedule = best" in note for note in run.privacy.notes)
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["noise_schedule"] == "best"


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("schedule", ["best", [3.0, 1.0, 2.0] * 4])
def test_a_run_that_was_stopped_goes_on_with_its_own_noise(tmp_path: Path, noise: Any, schedule: Any) -> None:
    privacy = Privacy(epsilon=5, trust="secure-sum", noise=noise, noise_schedule=schedule)

    def run(folder: str, *callbacks: Callback) -> Any:
        return train(bowls(), METHOD, out=tmp_path / folder, privacy=privacy, callbacks=callbacks, **RUN)

    run("stopped", StopAt(5))
    assert len(releases(tmp_path / "stopped")) == 5
    resumed = run("stopped")
    assert resumed.finished
    assert resumed.privacy.epsilon == pytest.approx(5, rel=1e-6)
    assert [line["attempt"] for line in releases(tmp_path / "stopped")] == [0] * 12
    if noise == "seeded":
        whole = run("whole")
        assert torch.equal(resumed.x, whole.x)
        assert releases(tmp_path / "stopped") == releases(tmp_path / "whole")


@pytest.mark.parametrize("noise", ["seeded", "secure"])
def test_a_killed_run_goes_on_without_paying_again(tmp_path: Path, noise: Any) -> None:
    """The folder as it is after round 7, with the checkpoint of round 1: what a kill leaves."""
    privacy = Privacy(epsilon=5, trust="secure-sum", noise=noise, noise_schedule="best")

    class Copy(Callback):
        def round(self, round: int) -> None:
            if round == 7:
                shutil.copytree(tmp_path / "whole", tmp_path / "killed")

    whole = train(bowls(), METHOD, out=tmp_path / "whole", privacy=privacy, callbacks=[Copy()], **RUN)
    assert json.loads((tmp_path / "killed" / "checkpoint" / "latest.json").read_text())["round"] == 1
    resumed = train(bowls(), METHOD, out=tmp_path / "killed", privacy=privacy, **RUN)
    paid = releases(tmp_path / "killed")
    assert [(line["round"], line["attempt"]) for line in paid] == [(k, 0) for k in range(12)]
    assert [line["sigma"] for line in paid] == [line["sigma"] for line in releases(tmp_path / "whole")]
    assert resumed.privacy is not None
    assert resumed.privacy.epsilon == pytest.approx(5, rel=1e-6)
    assert torch.equal(resumed.x, whole.x) == (noise == "seeded")  # rounds 8 to 12 have other secure noise


def test_a_folder_of_another_schedule_is_refused(tmp_path: Path) -> None:
    def run(schedule: Any) -> Any:
        privacy = Privacy(epsilon=5, trust="secure-sum", noise_schedule=schedule)
        return train(bowls(), METHOD, out=tmp_path / "run", privacy=privacy, **RUN)

    run(lambda t: 1.0 + t)
    files = snapshot(tmp_path / "run")
    assert run([1.0 + t for t in range(12)]).finished  # the same numbers
    for other in ("constant", "best"):
        with pytest.raises(UsageError, match="noise_schedule is "):
            run(other)
    assert files["ledger.jsonl"] == snapshot(tmp_path / "run")["ledger.jsonl"]


def test_releases_beyond_the_schedule_exceed_the_budget() -> None:
    """Secure noise that is drawn again is paid for again, at the noise of its round, until nothing is left."""
    privacy = Privacy(epsilon=5, trust="secure-sum", noise="secure", noise_schedule="linear:0.1")
    loop = prepare(bowls(), METHOD, Options(lr=0.05, rounds=4, privacy=privacy))
    mechanism = loop.mechanism
    assert mechanism is not None
    for round in range(4):
        mechanism.pay(round)
    with pytest.raises(BudgetSpent):
        mechanism.pay(3)
    with pytest.raises(UsageError, match="scheduled for 4 rounds"):
        mechanism.pay(4)


@pytest.mark.parametrize("method", [METHOD, DPSGD(Clip(0.5), momentum=0.5)])
def test_constant_numbers_are_the_constant_schedule_but_for_its_name(method: Method) -> None:
    """The same σ in every round, to rounding; the noise has another name, for the statement is another one."""
    found = [
        train(
            bowls(), method, lr=0.05, rounds=9, privacy=Privacy(epsilon=5, noise_schedule=schedule, trust="local")
        ).privacy
        for schedule in ("constant", [7.0] * 9, "linear:1", "exponential:1")
    ]
    sigmas = [spent.sigma for spent in found if spent is not None]
    assert sigmas == pytest.approx([sigmas[0]] * 4, rel=1e-12)


def test_the_constant_schedule_leaves_no_trace() -> None:
    """Names of noise, folders and ledgers of runs without a schedule are those of earlier versions."""
    assert "noise_schedule" not in Privacy(epsilon=5, noise_schedule="constant", trust="local").to_dict()
    assert Privacy(epsilon=5, trust="local") == Privacy(epsilon=5, noise_schedule="constant", trust="local")


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["local", "secure-sum"])
@pytest.mark.parametrize("schedule", ["best", "exponential:0.2"])
def test_the_audit_does_not_refute_a_schedule(trust: Any, schedule: str) -> None:
    privacy = Privacy(epsilon=8, trust=trust, noise_schedule=schedule)
    found = audit_method(METHOD, privacy, rounds=3, trials=240, dimension=6)
    assert not found.violated, found
    assert found.epsilon > 0.25 * found.claim


@pytest.mark.slow
def test_the_audit_refutes_noise_that_is_smaller_than_its_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: every round is paid for at its own σ, and drawn with the smallest."""
    monkeypatch.setattr(
        Mechanism, "round_sigma", property(lambda self: min(self.sigma_at(k) for k in range(self.setting.rounds)))
    )
    privacy = Privacy(epsilon=2, trust="secure-sum", noise_schedule=[1.0] + [10.0] * 7)
    assert audit_method(METHOD, privacy, rounds=8, trials=300, dimension=6).violated
