"""Private runs: the noise is there, of the right size, in the right place; the account is exact."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import normec
from normec import DPSGD, Clip, Clip21, Logging, Memory, NormEC, Poisson, Privacy, Problem, SmoothedNorm, train
from normec.errors import Diverged, UsageError
from normec.experiments import build
from normec.settings import make

D = 40


def zeros(n: int, dimension: int = D) -> Any:
    """Clients whose gradients vanish: what the server gets is noise and nothing else."""
    return Problem.from_functions([lambda x: 0 * x.sum()] * n, torch.zeros(dimension, dtype=torch.float64))


def bowls(n: int) -> Any:
    draw = torch.Generator().manual_seed(3)
    centres = torch.randn(n, D, generator=draw, dtype=torch.float64)
    return Problem.from_functions(
        [lambda x, c=c: 0.5 * ((x - c) ** 2).sum() for c in centres], torch.zeros(D, dtype=torch.float64)
    )


def noise_of(n: int, rounds: int, dimension: int = 2000, **words: Any) -> Tensor:
    """The server's estimate of a stateless run of zeros: β/n times the noise of the last round."""
    privacy = Privacy(epsilon=8, **words)
    run = train(zeros(n, dimension), DPSGD(SmoothedNorm(0.1)), lr=0.1, rounds=rounds, privacy=privacy)
    assert run.privacy is not None
    return run.state.estimate * n / run.privacy.sigma


@pytest.mark.parametrize("noise", ["seeded", "secure"])
@pytest.mark.parametrize("trust", ["local", "secure-sum", "central"])
def test_the_sum_carries_the_noise_of_every_client(trust: str, noise: str) -> None:
    found = noise_of(9, 2, trust=trust, noise=noise)
    assert float(found.std()) == pytest.approx(3.0, rel=0.08)  # √9 in units of σ; 5 standard errors
    assert abs(float(found.mean())) < 5 * 3 / math.sqrt(2000)


@pytest.mark.slow
def test_sigma_follows_the_known_values() -> None:
    run = train(zeros(10), NormEC(0.1, 0.1), lr=0.1, rounds=300, privacy=Privacy(epsilon=8, trust="local"))
    assert run.privacy is not None
    assert run.privacy.sigma == pytest.approx(10.396, abs=5e-4)
    assert run.privacy.epsilon == pytest.approx(8, rel=1e-6)
    assert run.privacy.epsilon <= 8
    summed = train(zeros(10), NormEC(0.1, 0.1), lr=0.1, rounds=300, privacy=Privacy(epsilon=8, trust="secure-sum"))
    assert summed.privacy is not None
    assert summed.privacy.sigma == pytest.approx(10.396 / math.sqrt(10), abs=5e-4)
    clipped = train(zeros(10), Clip21(0.25), lr=0.1, rounds=300, privacy=Privacy(epsilon=8, trust="local"))
    assert clipped.privacy is not None
    assert clipped.privacy.sigma == pytest.approx(0.25 * 10.396, abs=5e-4)


def test_epsilon_grows_along_the_run_and_ends_at_the_target() -> None:
    run = train(bowls(4), NormEC(0.1, 0.1), lr=0.01, rounds=30, privacy=Privacy(epsilon=3, trust="central"))
    spent = run.history["epsilon"]
    assert spent == sorted(spent)
    assert spent[0] > 0
    assert spent[-1] == pytest.approx(3, rel=1e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("trust", ["local", "secure-sum"])
def test_without_noise_to_speak_of_it_is_the_plain_run(trust: str) -> None:
    plain = train(bowls(5), NormEC(0.1, 0.2), lr=0.05, rounds=40)
    quiet = train(bowls(5), NormEC(0.1, 0.2), lr=0.05, rounds=40, privacy=Privacy(sigma=1e-9, trust=trust))  # type: ignore[arg-type]
    torch.testing.assert_close(quiet.x, plain.x, rtol=0, atol=1e-6)
    assert quiet.privacy is not None
    assert not quiet.privacy.is_target


@pytest.mark.slow
def test_the_estimate_walks_away_from_the_memories_unless_they_forget() -> None:
    """‖ĝ − mean g_i‖² = β²σ²kd/n on average; with forgetting it stays below β²σ²d/(n(1 − (1−λ)²))."""
    n, rounds, sigma, beta, dimension = 4, 400, 0.5, 0.1, 500
    walked = {}
    for decay in (0.0, 0.2):
        run = train(
            zeros(n, dimension),
            NormEC(0.1, beta, decay=decay),
            lr=0.0,
            rounds=rounds,
            privacy=Privacy(sigma=sigma, trust="local"),
        )
        gap = run.state.estimate - run.state.memory.mean(0)
        walked[decay] = float((gap**2).sum())
    unit = beta**2 * sigma**2 * dimension / n
    assert walked[0.0] == pytest.approx(unit * rounds, rel=0.3)
    assert walked[0.2] == pytest.approx(unit / (1 - 0.8**2), rel=0.3)


def test_noisy_memory_keeps_the_estimate_equal_to_the_mean_of_memories() -> None:
    privacy = Privacy(epsilon=8, trust="local", memory="noisy")
    run = train(bowls(6), NormEC(0.1, 0.1), lr=0.05, rounds=50, privacy=privacy)
    torch.testing.assert_close(run.state.estimate, run.state.memory.mean(0), rtol=0, atol=1e-12)
    clean = train(bowls(6), NormEC(0.1, 0.1), lr=0.05, rounds=50, privacy=Privacy(epsilon=8, trust="local"))
    assert float((clean.state.estimate - clean.state.memory.mean(0)).norm()) > 0.1


def test_warm_up_moves_the_memories_and_not_x() -> None:
    run = train(
        bowls(3),
        Clip21(0.5),
        lr=0.1,
        rounds=21,
        warmup=20,
        privacy=Privacy(sigma=1e-9, trust="local"),
        logging=Logging(diagnostics=True),
    )
    torch.testing.assert_close(run.x, -0.1 * run.state.estimate)  # one step, after twenty rounds at the start
    errors = run.history["memory_error"]
    assert errors[-2] < 1e-6 < errors[0]
    assert run.privacy is not None
    assert run.privacy.releases == 21


def test_the_same_seed_is_the_same_private_run_and_secure_noise_never_is() -> None:
    def run(seed: int, noise: str) -> Tensor:
        privacy = Privacy(epsilon=8, trust="secure-sum", noise=noise)  # type: ignore[arg-type]
        return train(bowls(3), NormEC(0.1, 0.1), lr=0.05, rounds=5, seed=seed, privacy=privacy).x

    assert torch.equal(run(1, "seeded"), run(1, "seeded"))
    assert not torch.equal(run(1, "seeded"), run(2, "seeded"))
    assert not torch.equal(run(1, "secure"), run(1, "secure"))


def test_noise_differs_between_rounds_and_clients() -> None:
    one, two = noise_of(1, 1, trust="local"), noise_of(1, 2, trust="local")
    correlation = np.corrcoef(one.numpy(), two.numpy())[0, 1]
    assert abs(correlation) < 5 / math.sqrt(2000)


@pytest.mark.slow
def test_sampling_that_is_claimed_is_the_sampling_that_happens() -> None:
    privacy = Privacy(epsilon=2, trust="secure-sum", sampling=0.25)
    run = train(bowls(40), NormEC(0.1, 0.1), lr=0.01, rounds=40, privacy=privacy)
    full = train(bowls(40), NormEC(0.1, 0.1), lr=0.01, rounds=40, privacy=Privacy(epsilon=2, trust="secure-sum"))
    assert run.state.messages == pytest.approx(400, abs=5 * math.sqrt(1600 * 0.25 * 0.75))
    assert run.privacy is not None
    assert full.privacy is not None
    assert run.privacy.sigma < 0.5 * full.privacy.sigma
    assert run.privacy.epsilon <= 2
    with pytest.raises(UsageError, match="privacy claims clients sampled"):
        train(bowls(4), NormEC(0.1, 0.1), lr=0.1, rounds=3, privacy=privacy, participation=Poisson(0.5))


def test_sampling_that_is_not_claimed_gains_nothing_and_is_noted() -> None:
    run = train(
        bowls(8),
        NormEC(0.1, 0.1),
        lr=0.1,
        rounds=10,
        privacy=Privacy(sigma=2.0, trust="local"),
        participation=Poisson(0.5),
    )
    full = train(bowls(8), NormEC(0.1, 0.1), lr=0.1, rounds=10, privacy=Privacy(sigma=2.0, trust="local"))
    assert run.privacy is not None
    assert full.privacy is not None
    assert run.privacy.epsilon == full.privacy.epsilon
    assert any("without any gain" in note for note in run.privacy.notes)


REFUSED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "identity": (normec.GD(), {}, {}, "without a bound"),
    "top-k": (normec.EF21(normec.TopK(3)), {}, {}, "without a bound"),
    "first gradient": (NormEC(0.1, 0.1), {}, {"memory": Memory(initial="gradient")}, "a release of its own"),
    "noisy memory, sum": (NormEC(0.1, 0.1), {"trust": "secure-sum", "memory": "noisy"}, {}, "re-sends"),
    "local sampling": (NormEC(0.1, 0.1), {"trust": "local", "sampling": 0.5}, {}, "sees who sends"),
    "replace sampling": (
        NormEC(0.1, 0.1),
        {"trust": "central", "relation": "replace", "sampling": 0.5},
        {},
        "no proved",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rule_is_refused_before_anything_happens(case: str, tmp_path: Path) -> None:
    method, words, options, reason = REFUSED[case]
    with pytest.raises(UsageError, match=reason) as error:
        train(bowls(4), method, lr=0.1, rounds=3, out=tmp_path / "run", privacy=Privacy(epsilon=8, **words), **options)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_batch_norm_is_refused_and_so_is_any_buffer_that_follows_the_data(tmp_path: Path) -> None:
    data = [torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2) for _ in range(2)]

    class Follows(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 2)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.mean(0)
            out: Tensor = self.inner(x)
            return out

    network = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    for model, reason in ((network, "BatchNorm"), (Follows(), "the buffer seen changes")):
        problem = Problem(model, torch.nn.functional.cross_entropy, data)
        with pytest.raises(UsageError, match=reason):
            train(
                problem,
                NormEC(0.1, 0.1),
                lr=0.1,
                rounds=2,
                privacy=Privacy(epsilon=8, trust="local"),
                out=tmp_path / "run",
            )
        assert not (tmp_path / "run").exists()


def test_a_broken_gradient_is_never_sent(tmp_path: Path) -> None:
    problem = Problem.from_functions(
        [lambda x: (x**2).sum(), lambda x: x.sum() * math.nan], torch.zeros(3, dtype=torch.float64)
    )
    with pytest.raises(Diverged, match="client 1"):
        train(
            problem, NormEC(0.1, 0.1), lr=0.1, rounds=3, privacy=Privacy(epsilon=8, trust="local"), out=tmp_path / "run"
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("reading", ["per-coordinate", "total-norm", "variance"])
def test_the_paper_s_formula_reports_what_it_really_gives(reading: str) -> None:
    """The paper's 'epsilon = 8' for 300 messages, local, zero-out: what it really is."""
    privacy = Privacy(epsilon=8, replay=reading, trust="local")  # type: ignore[arg-type]
    run = train(zeros(1), NormEC(0.01, 0.1), lr=0.1, rounds=300, privacy=privacy)
    assert run.privacy is not None
    expected = {"per-coordinate": 7.3462, "variance": math.sqrt(7.3462), "total-norm": 7.3462 / math.sqrt(D)}
    assert run.privacy.sigma == pytest.approx(expected[reading], rel=1e-4)
    if reading != "total-norm":
        assert run.privacy.epsilon == pytest.approx({"per-coordinate": 12.267, "variance": 46.9}[reading], rel=1e-3)
    assert not run.privacy.is_target
    assert "NOT what it" in run.privacy.statement


def test_record_level_with_clipped_records_needs_less_noise_with_more_records() -> None:
    sigmas = []
    for clients in (40, 5):
        problem = build.problem(make({"clients": clients}))
        privacy = Privacy(epsilon=4, unit="record", trust="local", record_clip=0.5)
        run = train(problem, NormEC(0.5, 0.1), lr=0.1, rounds=10, privacy=privacy)
        assert run.privacy is not None
        sigmas.append(run.privacy.sigma)
    assert sigmas[1] < 0.3 * sigmas[0]


@pytest.mark.slow
def test_record_level_poisson_batches_amplify_without_memory() -> None:
    problem = build.problem(make({"clients": 5}))
    words: dict[str, Any] = {"epsilon": 2, "unit": "record", "trust": "local", "record_clip": 1e9}
    options: dict[str, Any] = {"lr": 0.1, "rounds": 20}
    full = train(problem, DPSGD(Clip(1.0)), privacy=Privacy(**words), **options)
    drawn = train(problem, DPSGD(Clip(1.0)), privacy=Privacy(**words), batch_rate=0.1, **options)
    noisy = train(problem, NormEC(0.1, 0.1), privacy=Privacy(memory="noisy", **words), batch_rate=0.1, **options)
    assert full.privacy is not None
    assert drawn.privacy is not None
    assert noisy.privacy is not None
    assert drawn.privacy.sigma < 0.5 * full.privacy.sigma
    assert noisy.privacy.sigma == pytest.approx(drawn.privacy.sigma, rel=1e-3)
    with pytest.raises(UsageError, match="remembers records"):
        train(problem, NormEC(0.1, 0.1), privacy=Privacy(memory="clean", **words), batch_rate=0.1, **options)
