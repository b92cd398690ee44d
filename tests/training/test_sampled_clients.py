"""Client sampling and initial memories: who is not drawn keeps what it had, and ĝ = mean g_i stays true."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from normec import DPSGD, EF21, Clip, Clip21, FixedSize, Logging, Memory, Method, NormEC, Poisson, RandK, TopK, train
from normec.sampling.participation import Participation

from ..support import reference
from ..support.problems import PROBLEMS, quadratics
from ..support.reference import norm
from .test_trajectories import close, rand_k

ROUNDS, SEED = 60, 11
SAMPLED = {"poisson": Poisson(0.4), "poisson-rare": Poisson(0.05), "fixed": FixedSize(2)}


def who(participation: Participation, n: int) -> list[set[int]]:
    """Read from the same stream, independently: its coins, its order."""
    out = []
    for k in range(ROUNDS):
        coins = reference.coins(SEED, "participation", k, n)
        if isinstance(participation, Poisson):
            out.append({i for i in range(n) if coins[i] < participation.rate})
        else:
            assert isinstance(participation, FixedSize)
            out.append(set(sorted(range(n), key=lambda i: coins[i])[: participation.count]))
    return out


def feedback(psi, decay=0.0):  # type: ignore[no-untyped-def]
    return lambda f, x, **more: reference.error_feedback(f, x, 0.05, ROUNDS, psi, decay, **more)


METHODS = {
    "normec": (NormEC(0.5, 0.4), lambda f, x, **more: reference.normec(f, x, 0.05, ROUNDS, 0.5, 0.4, True, **more)),
    "normec-decay": (
        NormEC(1.0, 0.5, server_norm=False, decay=0.1),
        lambda f, x, **more: reference.normec(f, x, 0.05, ROUNDS, 1.0, 0.5, False, 0.1, **more),
    ),
    "clip21": (Clip21(0.5), feedback(lambda v, *_: reference.clip(v, 0.5))),
    "clip21-decay": (Clip21(0.5, decay=0.05), feedback(lambda v, *_: reference.clip(v, 0.5), 0.05)),
    "top-k": (EF21(TopK(3)), feedback(lambda v, *_: reference.largest(v, 3))),
    "rand-k": (EF21(RandK(2)), feedback(rand_k)),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("sampling", SAMPLED)
@pytest.mark.parametrize("name", METHODS)
def test_sampled_paths_are_the_reference_s(name: str, sampling: str) -> None:
    method, run_reference = METHODS[name]
    f, problem = quadratics(2)
    drawn = who(SAMPLED[sampling], len(f))
    assert 0 < sum(map(len, drawn)) < ROUNDS * len(f)
    run = train(problem, method, lr=0.05, rounds=ROUNDS, seed=SEED, participation=SAMPLED[sampling])
    seen = run_reference(f, problem.x0.numpy().copy(), drawn=lambda k: drawn[k])
    close(run.x, seen.path[-1])
    close(run.state.memory, seen.memory)
    close(run.state.estimate, seen.estimate)
    assert run.state.messages == sum(map(len, drawn))


@pytest.mark.parametrize("sampling", SAMPLED)
def test_without_memory_the_undrawn_count_as_zero(sampling: str) -> None:
    f, problem = quadratics(3)
    drawn = who(SAMPLED[sampling], len(f))
    run = train(problem, DPSGD(Clip(0.8)), lr=0.1, rounds=ROUNDS, seed=SEED, participation=SAMPLED[sampling])
    seen = reference.dpsgd(
        f, problem.x0.numpy().copy(), 0.1, ROUNDS, lambda v: reference.clip(v, 0.8), drawn=lambda k: drawn[k]
    )
    close(run.x, seen.path[-1])


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize("sampling", SAMPLED)
def test_after_every_round_the_estimate_is_the_mean_memory(sampling: str, decay: float) -> None:
    """Rounds 1 … 12, each a run of its own: same seed, same beginning."""
    _, problem = quadratics(4)
    method, n = NormEC(0.3, 0.7, decay=decay), problem.clients
    drawn = who(SAMPLED[sampling], n)
    before = torch.zeros(n, len(problem.x0), dtype=torch.float64)
    for k in range(12):
        run = train(problem, method, lr=0.05, rounds=k + 1, seed=SEED, participation=SAMPLED[sampling])
        memory = run.state.memory
        assert float((memory.mean(0) - run.state.estimate).abs().max()) < 1e-14
        for i in range(n):
            if i in drawn[k]:
                assert not torch.equal(memory[i], (1 - decay) * before[i])
            else:
                assert torch.equal(memory[i], (1 - decay) * before[i] if decay else before[i])
        before = memory.clone()


def test_poisson_with_rate_one_and_all_of_a_fixed_size_are_everyone() -> None:
    _, problem = quadratics(4)
    everyone = train(problem, NormEC(0.3, 0.7), lr=0.05, rounds=20).x
    for participation in (Poisson(1.0), FixedSize(problem.clients)):
        assert torch.equal(
            train(problem, NormEC(0.3, 0.7), lr=0.05, rounds=20, participation=participation).x, everyone
        )


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("start", ["gradient", "rows", "vector"])
@pytest.mark.parametrize("method", [NormEC(0.3, 0.2), Clip21(0.2), EF21(TopK(2))], ids=lambda m: m.name)
def test_initial_memory(method: Method, start: str, problem: str) -> None:
    f, objective = PROBLEMS[problem](5)
    n, d, x = len(f), len(objective.x0), objective.x0.numpy().copy()
    generator = np.random.default_rng(1)
    if start == "gradient":
        g, given = np.stack([f.grad(i, x) for i in range(n)]), "gradient"
    elif start == "rows":
        g = generator.normal(size=(n, d))
        given = torch.tensor(g)
    else:
        vector = generator.normal(size=d)
        g, given = np.stack([vector] * n), torch.tensor(vector)
    run = train(objective, method, lr=0.03, rounds=25, logging=Logging(every=1), memory=Memory(initial=given))  # type: ignore[arg-type]
    if method.name == "normec":
        seen = reference.normec(f, x, 0.03, 25, 0.3, 0.2, True, memory=g)
    elif method.name == "clip21":
        seen = reference.error_feedback(f, x, 0.03, 25, lambda v, *_: reference.clip(v, 0.2), memory=g)
    else:
        seen = reference.error_feedback(f, x, 0.03, 25, lambda v, *_: reference.largest(v, 2), memory=g)
    close(run.x, seen.path[-1])
    close(run.state.memory, seen.memory)
    first = sum(norm(f.grad(i, x) - g[i]) for i in range(n)) / n
    assert run.history["memory_error"][0] == pytest.approx(first, abs=1e-12)
    if start == "gradient":
        assert run.history["memory_error"][0] == 0


def test_a_given_memory_is_not_changed_by_the_run() -> None:
    _, problem = quadratics(5)
    given = torch.ones(problem.clients, len(problem.x0), dtype=torch.float64)
    train(problem, Clip21(0.2), lr=0.1, rounds=5, memory=Memory(initial=given))
    assert torch.equal(given, torch.ones_like(given))
