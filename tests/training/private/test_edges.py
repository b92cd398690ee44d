"""Where an account is easily wrong: nobody drawn, nothing left to run, the same seed twice, a given engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from normec import DPSGD, Clip, Compute, NormEC, Poisson, Privacy, Problem, SmoothedNorm, train
from normec.errors import UsageError
from normec.experiments import build
from normec.gradients.choice import choose_engine
from normec.settings import make

from ...support.datasets import Fetched
from ...support.runs import releases

SUM: dict[str, Any] = {"epsilon": 8, "trust": "secure-sum"}


def problem(model: torch.nn.Module | None = None, kind: Any = TensorDataset) -> Problem:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(0)
    data = [kind(torch.randn(6, 5, generator=draw), torch.randint(0, 3, (6,), generator=draw)) for _ in range(10)]
    return Problem(model or torch.nn.Linear(5, 3), torch.nn.functional.cross_entropy, data)


def released_rounds(folder: Path) -> list[int]:
    return [k for line in releases(folder) for k in range(line["round"], line["round"] + line["count"])]


def test_a_finished_run_opened_again_reports_what_it_spent(tmp_path: Path) -> None:
    first, again = (
        train(problem(), NormEC(0.1, 0.05), lr=0.1, rounds=20, privacy=Privacy(**SUM), out=tmp_path / "run")
        for _ in range(2)
    )
    assert first.privacy == again.privacy
    assert again.privacy is not None
    assert again.privacy.releases == 20
    latest = json.loads((tmp_path / "run/checkpoint/latest.json").read_text())
    assert latest["ledger"][0] == 21


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_round_in_which_nobody_was_drawn_is_a_release_too(seed: int, tmp_path: Path) -> None:
    privacy = Privacy(**SUM, sampling=0.1)
    run = train(problem(), NormEC(0.1, 0.05), lr=0.1, rounds=10, seed=seed, privacy=privacy, out=tmp_path / "run")
    assert released_rounds(tmp_path / "run") == list(range(10))
    assert run.privacy is not None
    assert run.privacy.releases == 10
    assert run.privacy.epsilon == pytest.approx(8, rel=1e-3)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
@pytest.mark.parametrize("engine", ["loop", "linear"])
def test_empty_rounds_run_in_every_engine_and_trust(engine: str, trust: str) -> None:
    of = build.problem(make({"clients": 12}))
    privacy = Privacy(sigma=1.0, trust=trust)  # type: ignore[arg-type]
    rate = Poisson(0.03)
    assert any(len(rate.draw(12, k, 0)) == 0 for k in range(15))  # type: ignore[arg-type]
    run = train(
        of, NormEC(0.1, 0.05), lr=0.1, rounds=15, compute=Compute(engine=engine), privacy=privacy, participation=rate
    )
    assert run.finished
    plain = train(of, NormEC(0.1, 0.05), lr=0.1, rounds=15, compute=Compute(engine=engine), participation=rate)
    assert plain.finished


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("kind", [TensorDataset, Fetched])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_empty_batches_are_zero_gradients(kind: Any, clip: float | None) -> None:
    privacy = Privacy(sigma=2.0, unit="record", trust="local", record_clip=clip)
    run = train(problem(kind=kind), DPSGD(Clip(1.0)), lr=0.1, rounds=8, batch_rate=0.05, privacy=privacy)
    assert run.finished
    assert bool(torch.isfinite(run.x).all())


def test_two_runs_of_one_seed_share_no_noise() -> None:
    """If they did, 2A − B would be the clean sum for σ_B = 2σ_A."""

    def noise(sigma: float, method: Any) -> Tensor:
        zeros = Problem.from_functions([lambda x: 0 * x.sum()] * 2, torch.zeros(3000, dtype=torch.float64))
        run = train(zeros, method, lr=0.1, rounds=1, seed=3, privacy=Privacy(sigma=sigma, trust="local"))
        return run.state.estimate / sigma

    first = noise(1.0, DPSGD(SmoothedNorm(0.1)))
    for other in (noise(2.0, DPSGD(SmoothedNorm(0.1))), noise(1.0, DPSGD(Clip(1.0))), noise(1.0, DPSGD(Clip(2.0)))):
        assert abs(float(torch.corrcoef(torch.stack([first, other]))[0, 1])) < 5 / 3000**0.5


def test_another_schedule_is_another_run(tmp_path: Path) -> None:
    privacy = Privacy(**SUM)
    train(problem(), NormEC(0.1, 0.05), lr=lambda _: 0.1, rounds=4, privacy=privacy, out=tmp_path / "run")
    with pytest.raises(UsageError, match="lr is"):
        train(problem(), NormEC(0.1, 0.05), lr=lambda _: 9.0, rounds=4, privacy=privacy, out=tmp_path / "run")


def test_the_ledger_says_nothing_of_the_data(tmp_path: Path) -> None:
    for name in ("a", "b"):
        of = problem()
        if name == "b":
            of.records.inputs[3] += 1  # type: ignore[attr-defined]
        train(of, NormEC(0.1, 0.05), lr=0.1, rounds=3, privacy=Privacy(**SUM), out=tmp_path / name)
    assert (tmp_path / "a/ledger.jsonl").read_bytes() == (tmp_path / "b/ledger.jsonl").read_bytes()


class Follows(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.mean(0)
        out: Tensor = self.inner(x)
        return out


@pytest.mark.slow
def test_what_a_private_run_cannot_use_is_refused(tmp_path: Path) -> None:
    common: dict[str, Any] = {"lr": 0.1, "rounds": 12, "out": tmp_path / "run"}
    with pytest.raises(UsageError, match="no secret"):
        train(problem(), NormEC(0.1, 0.05), privacy=Privacy(**SUM, sampling=0.5, noise="secure"), **common)
    with pytest.raises(UsageError, match="over their bound"):
        train(problem(), NormEC(0.1, 0.05), privacy=Privacy(**SUM), compute=Compute(dtype=torch.bfloat16), **common)
    clipped = Privacy(epsilon=8, unit="record", record_clip=0.1, trust="local")
    engine: Any = choose_engine("loop", problem(), None, 0)
    with pytest.raises(UsageError, match="may not clip"):
        train(problem(), NormEC(0.5, 0.05), privacy=clipped, compute=Compute(engine=engine), **common)
    with pytest.raises(UsageError, match="warmup"):
        train(problem(), NormEC(0.1, 0.05), privacy=Privacy(**SUM), warmup=12, **common)
    assert not (tmp_path / "run").exists()
    sampled = Privacy(**SUM, sampling=0.1)
    for seed in range(4):  # also where the first rounds draw nobody
        with pytest.raises(UsageError, match="the buffer seen changes"):
            train(problem(Follows()), NormEC(0.1, 0.05), lr=0.1, rounds=40, seed=seed, privacy=sampled)
