"""Server optimizers, schedules and averages against loops by hand, against torch, and in the limits that coincide."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from normec import (
    DPSGD,
    EF21,
    GD,
    AdaptiveClip,
    Averaging,
    Clip,
    Clip21,
    ErrorFeedback,
    FixedSize,
    Identity,
    LocalSteps,
    Logging,
    LRSchedule,
    MomentumNormEC,
    NormEC,
    Poisson,
    Privacy,
    Problem,
    Scaffold,
    ServerOptimizer,
    Storage,
    TopK,
    UsageError,
    train,
)
from normec.algorithms.adam_bc import AdamBC
from normec.sampling.participation import Everyone, Participation, drawn_clients
from normec.training.options import Options
from normec.training.train import prepare

from ..support import optimizers_by_hand as by_hand
from ..support.problems import quadratics
from ..support.reference import Vector, clip, norm, unit
from ..support.runs import StopAt, problem, same, snapshot

ROUNDS, SEED = 60, 3
PRIVATE = Privacy(sigma=0.05, delta=1e-5, unit="client", relation="zero-out", trust="secure-sum", noise="seeded")

OPTIMIZERS: dict[str, tuple[Any, float, Callable[[], by_hand.Step]]] = {
    "sgd": ("sgd", 0.05, by_hand.sgd),
    "momentum": ("momentum", 0.01, lambda: by_hand.momentum(0.9)),
    "nesterov": (ServerOptimizer("nesterov", momentum=0.8), 0.01, lambda: by_hand.momentum(0.8, nesterov=True)),
    "adam": ("adam", 0.01, lambda: by_hand.adam(0.9, 0.999, 1e-8)),
    "adam, other betas": (
        ServerOptimizer("adam", betas=(0.8, 0.95), eps=1e-3, weight_decay=0.02),
        0.02,
        lambda: by_hand.adam(0.8, 0.95, 1e-3, 0.02),
    ),
    "adamw": (
        ServerOptimizer("adamw", weight_decay=0.1),
        0.01,
        lambda: by_hand.adam(0.9, 0.999, 1e-8, 0.1, decoupled=True),
    ),
    "rmsprop": ("rmsprop", 0.003, lambda: by_hand.rmsprop(0.99, 1e-8)),
    "adambc without noise": (
        ServerOptimizer("adambc", floor=1e-4),
        0.01,
        lambda: by_hand.adam_bc(0.9, 0.999, 1e-4, [0.0] * ROUNDS),
    ),
    "a function": (lambda params: torch.optim.SGD(params, lr=9.0, momentum=0.5), 0.02, lambda: by_hand.momentum(0.5)),
}
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "normec": (NormEC(0.5, 0.4), {"alpha": 0.5, "beta": 0.4, "server_norm": True}),
    "normec without server norm, forgetting": (
        NormEC(1.0, 0.5, server_norm=False, decay=0.1),
        {"alpha": 1.0, "beta": 0.5, "decay": 0.1},
    ),
    "clip21": (Clip21(0.6), {"tau": 0.6}),
    "dpsgd": (DPSGD(Clip(0.8)), {"tau": 0.8, "memory": False}),
}


def loop(  # type: ignore[no-untyped-def]
    f,
    x: Vector,
    lrs: list[float],
    step: by_hand.Step,
    drawn: Callable[[int], set[int]],
    tau: float | None = None,
    alpha: float = 0.0,
    beta: float = 1.0,
    decay: float = 0.0,
    server_norm: bool = False,
    memory: bool = True,
    warmup: int = 0,
) -> list[Vector]:
    """Error feedback around clipping (tau) or normalisation (alpha), or neither memory nor feedback, line by line."""
    n = len(f)
    g, estimate, path = np.zeros((n, len(x))), np.zeros_like(x), [x]
    for k in range(len(lrs)):
        total = np.zeros_like(x)
        for i in range(n):
            v = f.grad(i, x) - g[i]
            if memory:
                g[i] = (1 - decay) * g[i]
            if i in drawn(k):
                message = clip(v, tau) if tau is not None else v / (alpha + norm(v))
                total = total + message
                if memory:
                    g[i] = g[i] + beta * message
        estimate = ((1 - decay) * estimate if memory else 0.0) + beta * total / n
        if k >= warmup:
            x = step(x, unit(estimate) if server_norm else estimate, lrs[k])
        path.append(x)
    return path


def participants(participation: Participation, n: int) -> Callable[[int], set[int]]:
    def drawn(k: int) -> set[int]:
        found = drawn_clients(participation, n, k, SEED)
        return set(range(n)) if found is None else set(found.tolist())

    return drawn


def iterates(of: Any, method: Any, **how: Any) -> tuple[list[Tensor], Any, Any]:
    """x⁰ … x^K of a run, its last state, and its loop."""
    under_way = prepare(of, method, Options(**{"seed": SEED, "logging": Logging(every=ROUNDS), **how}))
    state = under_way.initial()
    path = [state.x.clone()]
    while state.round < under_way.plan.rounds:
        under_way.step(state)
        path.append(state.x.clone())
    return path, state, under_way


def close(path: list[Tensor], expected: list[Vector], tolerance: float = 1e-10) -> None:
    assert len(path) == len(expected)
    for k, (x, wanted) in enumerate(zip(path, expected, strict=True)):
        np.testing.assert_allclose(x.numpy(), wanted, rtol=0, atol=tolerance, err_msg=f"x of round {k}")


PAIRS = [
    *((optimizer, list(METHODS)[number % len(METHODS)]) for number, optimizer in enumerate(OPTIMIZERS)),
    *(("adam", method) for method in METHODS if method != "dpsgd"),
]


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(("optimizer", "method"), PAIRS)
def test_optimizers_and_methods_against_a_loop_by_hand(optimizer: str, method: str) -> None:
    given, lr, step = OPTIMIZERS[optimizer]
    f, of = quadratics(5)
    chosen, settings = METHODS[method]
    path, state, _ = iterates(of, chosen, lr=lr, rounds=ROUNDS, server_optimizer=given, participation=FixedSize(3))
    drawn = participants(FixedSize(3), len(f))
    expected = loop(f, of.x0.numpy(), [lr] * ROUNDS, step(), drawn, **settings)
    close(path, expected)
    assert np.abs(expected[-1] - expected[0]).max() > 0.05, "x has moved"
    if "memory" in state.clients:  # the optimizer acts on x alone
        torch.testing.assert_close(state.estimate, state.memory.mean(0), rtol=0, atol=1e-12)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "name", ["sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "adamax", "nadam", "radam", "rprop"]
)
def test_against_torch_on_a_parameter_that_is_fed_the_same_directions(name: str) -> None:
    _, of = quadratics(6)
    path, _, _ = iterates(of, GD(), lr=0.02, rounds=15, server_optimizer=name)
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "momentum": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9),
        "nesterov": lambda params, lr: torch.optim.SGD(params, lr=lr, momentum=0.9, nesterov=True),
        **{
            title.lower(): getattr(torch.optim, title)
            for title in ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Rprop"]
        },
    }
    parameter = torch.nn.Parameter(of.x0.clone())
    optimizer = kinds[name]([parameter], lr=0.02)
    for x in path[1:]:
        optimizer.zero_grad()
        losses = [of.client_loss(parameter, i, None, {}, None) for i in range(of.clients)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        torch.testing.assert_close(x, parameter.detach(), rtol=1e-12, atol=1e-12)


SUMS: dict[str, tuple[Any, Privacy, Participation, tuple[float, float]]] = {
    "dpsgd with momentum": (DPSGD(Clip(0.5), 0.7, momentum=0.6), PRIVATE, Everyone(), (0.6, 0.7)),
    "normec without server norm": (NormEC(0.1, 0.3, server_norm=False), PRIVATE, Everyone(), (1.0, 0.3)),
    "forgetting, drawn": (Clip21(0.5, decay=0.2), PRIVATE, FixedSize(2), (0.8, 1.0)),
    "client momentum": (
        MomentumNormEC(0.1, 0.3, 0.5, server_norm=False, decay=0.1),
        replace(PRIVATE, trust="central"),
        Everyone(),
        (0.9, 0.3),
    ),
    "local, drawn by coins": (Clip21(0.5, decay=0.2), replace(PRIVATE, trust="local"), Poisson(0.5), (0.8, 1.0)),
}


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("case", SUMS)
def test_adambc_subtracts_the_variance_of_the_noise_that_was_added(case: str) -> None:
    """Server steps by hand from the sums that were released, with variances by the recursion s² ← κ² s² + β² ν²."""
    method, privacy, participation, (keep, gain) = SUMS[case]
    f, of = quadratics(5)
    n, warmup, released = len(f), 3, []
    options = Options(
        lr=0.01,
        rounds=ROUNDS,
        seed=SEED,
        warmup=warmup,
        privacy=privacy,
        participation=participation,
        logging=Logging(every=ROUNDS),
        server_optimizer=ServerOptimizer("adambc", betas=(0.9, 0.99), floor=1e-3),
    )
    under_way = prepare(of, method, options)
    mechanism = under_way.mechanism
    assert mechanism is not None
    received = mechanism.received

    def recording(*given: Any) -> Tensor:
        released.append(received(*given).numpy().copy())
        return received(*given)

    mechanism.received = recording  # type: ignore[method-assign]
    state = under_way.initial()
    path = [state.x.clone()]
    for _ in range(ROUNDS):
        under_way.step(state)
        path.append(state.x.clone())

    drawn, variance, variances = participants(participation, n), 0.0, []
    for k in range(ROUNDS):
        senders = len(drawn(k)) if privacy.trust == "local" else n
        variance = keep**2 * variance + gain**2 * senders * mechanism.sigma**2 / n**2
        variances.append(variance)
    step = by_hand.adam_bc(0.9, 0.99, 1e-3, variances[warmup:])
    x, estimate = of.x0.numpy(), np.zeros(len(of.x0))
    expected = [x]
    for k, total in enumerate(released):
        estimate = keep * estimate + gain * total / n
        x = step(x, estimate, 0.01) if k >= warmup else x
        expected.append(x)
    close(path, expected)
    assert float(state.optimizer["noise_variance"]) == pytest.approx(variances[-1], rel=1e-12)


class WatchedAdamBC(AdamBC):
    """Notes the mean square of every direction of `dimension` numbers, and the variance that is subtracted from it."""

    def __init__(self, params: Any, dimension: int, seen: list[tuple[float, float]]) -> None:
        super().__init__(params)
        self.dimension, self.seen = dimension, seen

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if len(group["params"][0]) == self.dimension:
            self.seen.append((group["params"][0].grad.square().mean().item(), group["noise_variance"]))
        super().step(closure)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("case", SUMS)
def test_the_variance_is_that_of_the_direction_where_all_of_it_is_noise(case: str) -> None:
    """Clients without a gradient: in 20,000 coordinates the variance shows to one part in a hundred (one σ)."""
    method, privacy, participation, _ = SUMS[case]
    d, seen = 20_000, []
    of = Problem.from_functions([lambda x: 0 * x.sum()] * 4, torch.zeros(d, dtype=torch.float64))

    # x stands still, so that clients stay without a gradient.
    train(
        of,
        method,
        lr=0.0,
        rounds=12,
        seed=SEED,
        privacy=privacy,
        participation=participation,
        server_optimizer=lambda params: WatchedAdamBC(params, d, seen),
        logging=Logging(every=12),
    )
    assert len(seen) == 12
    for found, variance in seen:
        assert found == pytest.approx(variance, rel=6 * math.sqrt(2 / d), abs=1e-300)
    assert max(variance for _, variance in seen) > 0


@pytest.mark.parametrize("participation", [Everyone(), FixedSize(2)])
@pytest.mark.parametrize("trust", ["local", "secure-sum"])
def test_adambc_knows_the_noise_of_weighted_messages(trust: Any, participation: Participation) -> None:
    """σ² Σ w_i² over the senders under local trust, σ²/n for a sum; the direction shows it to one part in a hundred."""
    d, weights, seen = 20_000, (0.6, 0.2, 0.15, 0.05), []
    of = Problem.from_functions([lambda x: 0 * x.sum()] * 4, torch.zeros(d, dtype=torch.float64))

    train(
        of,
        DPSGD(Clip(0.5)),
        lr=0.0,
        rounds=6,
        seed=SEED,
        privacy=replace(PRIVATE, trust=trust),
        participation=participation,
        weights=weights,
        server_optimizer=lambda params: WatchedAdamBC(params, d, seen),
        logging=Logging(every=3),
    )
    drawn = participants(participation, 4)
    expected = [
        PRIVATE.sigma**2 * (sum(weights[i] ** 2 for i in drawn(k)) if trust == "local" else 1 / 4)  # type: ignore[operator]
        for k in range(6)
    ]
    assert [variance for _, variance in seen] == pytest.approx(expected, rel=1e-12)
    assert [found for found, _ in seen] == pytest.approx(expected, rel=6 * math.sqrt(2 / d))


@pytest.mark.slow
def test_plain_sgd_is_no_optimizer_to_the_bit() -> None:
    how: dict[str, Any] = {"lr": 0.2, "rounds": 15, "seed": SEED, "privacy": PRIVATE, "batch_size": 4}
    alone = train(problem(), NormEC(0.1, 0.3), **how)
    for optimizer in ("sgd", ServerOptimizer("sgd", momentum=0.0), torch.optim.SGD):
        same(alone, train(problem(), NormEC(0.1, 0.3), server_optimizer=optimizer, **how))
    without = {**how, "privacy": None}  # a schedule has noise of its own
    constant = train(problem(), NormEC(0.1, 0.3), lr_schedule="constant", **without)
    same(train(problem(), NormEC(0.1, 0.3), **without), constant)


@pytest.mark.slow
def test_momentum_is_that_of_dpsgd() -> None:
    _, of = quadratics(7)
    how: dict[str, Any] = {"lr": 0.02, "rounds": ROUNDS, "participation": FixedSize(3)}
    own, _, _ = iterates(of, DPSGD(Clip(0.5), 0.7, momentum=0.8), **how)
    server, _, _ = iterates(of, DPSGD(Clip(0.5), 0.7), server_optimizer=ServerOptimizer("sgd", momentum=0.8), **how)
    close(server, [x.numpy() for x in own], 1e-12)


@pytest.mark.slow
def test_adambc_without_noise_is_adam_without_eps() -> None:
    _, of = quadratics(7)
    how: dict[str, Any] = {"lr": 0.02, "rounds": ROUNDS}
    corrected, _, _ = iterates(of, Clip21(0.5), server_optimizer=ServerOptimizer("adambc", floor=1e-300), **how)
    adam, _, _ = iterates(of, Clip21(0.5), server_optimizer=ServerOptimizer("adam", eps=0.0), **how)
    close(corrected, [x.numpy() for x in adam])


@pytest.mark.slow
def test_adambc_reaches_where_adam_does_not() -> None:
    """Where noise outweighs the gradient, Adam's coordinates all move alike; the correction restores their ratio."""
    variance, small = 1.0, 0.05
    draw = torch.Generator().manual_seed(0)
    signal = torch.full((400,), small, dtype=torch.float64)
    moved = {}
    for name in ("adam", "adambc"):
        parameter = torch.nn.Parameter(torch.zeros_like(signal))
        optimizer: Any = (
            torch.optim.Adam([parameter], lr=1e-3, betas=(0.0, 0.9999))
            if name == "adam"
            else AdamBC([parameter], lr=1e-3, betas=(0.0, 0.9999), floor=1e-4, noise_variance=variance)
        )
        for _ in range(2000):
            parameter.grad = signal + torch.randn(400, dtype=torch.float64, generator=draw) * math.sqrt(variance)
            optimizer.step()
        moved[name] = -float(parameter.detach().mean())
    # Adam divides by √(g² + s²) ≈ 1, the correction by about g where v̂ shows it and never by less than 0.01.
    assert moved["adam"] == pytest.approx(2000 * 1e-3 * small, rel=0.1)
    assert moved["adambc"] > 5 * moved["adam"]


SCHEDULES: dict[str, tuple[Any, Callable[[int, int], float]]] = {
    "constant": ("constant", lambda _t, _T: 1.0),
    "cosine": ("cosine", lambda t, T: (1 + math.cos(math.pi * t / T)) / 2),
    "cosine with a ramp": (
        LRSchedule("cosine", ramp_up=4, end=0.1),
        lambda t, T: (t + 1) / 4 if t < 4 else 0.1 + 0.45 * (1 + math.cos(math.pi * (t - 4) / (T - 4))),
    ),
    "linear": (LRSchedule("linear", end=0.2), lambda t, T: 1 - 0.8 * t / T),
    "step": (LRSchedule("step", every=5, factor=0.5), lambda t, _T: 0.5 ** (t // 5)),
    "torch by name": (LRSchedule("ExponentialLR", gamma=0.9), lambda t, _T: 0.9**t),
    "torch by a function": (
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
        lambda t, _T: 1 / (1 + t),
    ),
    "torch in sequence": (
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=100),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
            ],
            milestones=[3],
        ),
        lambda t, _T: 0.5 if t < 3 else 0.5 ** (t - 3),
    ),
}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_schedules_against_their_formulas(name: str, optimizer: str) -> None:
    given, factor = SCHEDULES[name]
    f, of = quadratics(8)
    _, lr, step = OPTIMIZERS[optimizer]
    warmup, rounds = 2, 20
    how: dict[str, Any] = {"lr_schedule": given, "server_optimizer": optimizer, "warmup": warmup}
    path, _, _ = iterates(of, Clip21(0.6), lr=lr, rounds=rounds, **how)
    lrs = [0.0] * warmup + [lr * factor(t, rounds - warmup) for t in range(rounds - warmup)]
    everyone = participants(Everyone(), len(f))
    close(path, loop(f, of.x0.numpy(), lrs, step(), everyone, tau=0.6, warmup=warmup), 1e-12)


AVERAGES: dict[str, tuple[Any, Callable[[list[Vector]], Vector]]] = {
    "polyak": (Averaging("polyak", start=6), lambda path: np.mean(path[6:], axis=0)),
    "polyak, half of the rounds": ("polyak", lambda path: np.mean(path[10:], axis=0)),
    "polyak, after the warm-up": (Averaging("polyak", start=0), lambda path: np.mean(path[3:], axis=0)),
    "ema": (
        Averaging("ema", decay=0.8),
        lambda path: np.average(path[3:], axis=0, weights=[0.8**j for j in reversed(range(len(path[3:])))]),
    ),
    "ema by name": (
        "ema",
        lambda path: np.average(path[3:], axis=0, weights=[0.99**j for j in reversed(range(len(path[3:])))]),
    ),
    "ema that forgets all": (Averaging("ema", decay=0.0), lambda path: path[-1]),
    "the last alone": (Averaging("polyak", start=20), lambda path: path[-1]),
}


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("optimizer", [None, "adam"])
def test_averages_by_hand(name: str, optimizer: str | None) -> None:
    given, average = AVERAGES[name]
    _, of = quadratics(9)
    how: dict[str, Any] = {"lr": 0.02, "rounds": 20, "warmup": 3, "server_optimizer": optimizer}
    path, state, _ = iterates(of, NormEC(0.5, 0.4), averaging=given, **how)
    np.testing.assert_allclose(state.result.numpy(), average([x.numpy() for x in path]), rtol=0, atol=1e-12)
    alone, _, _ = iterates(of, NormEC(0.5, 0.4), **how)
    assert all(map(torch.equal, path, alone)), "training goes on from x"


def test_an_average_is_what_is_evaluated_and_returned() -> None:
    how: dict[str, Any] = {"lr": 0.3, "rounds": 12, "seed": SEED, "privacy": PRIVATE}
    logging = Logging(every=3, evaluate_every=3, diagnostics=True)
    averaged = train(problem(), NormEC(0.1, 0.3), averaging=Averaging("polyak", start=5), logging=logging, **how)
    alone = train(problem(), NormEC(0.1, 0.3), logging=logging, **how)
    assert torch.equal(averaged.state.x, alone.x), "with the same noise"
    assert not torch.equal(averaged.x, alone.x)
    assert averaged.model is not None
    assert torch.equal(torch.nn.utils.parameters_to_vector(averaged.model.parameters()), averaged.x)
    of = problem()
    assert averaged.history["accuracy"][-1] == of.evaluate(averaged.x, {})["accuracy"]
    assert averaged.history["test_loss"][-1] == of.evaluate(averaged.x, {})["test_loss"]
    assert averaged.history["test_loss"][:2] == alone.history["test_loss"][:2], "before the average starts"
    assert averaged.history["loss"] == alone.history["loss"], "the clients' losses are at x"


RESUMED: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        name: (NormEC(0.1, 0.3), {"server_optimizer": name, "lr": 0.02})
        for name in ("momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam", "asgd")
    },
    "private": (Clip21(0.3, decay=0.1), {"server_optimizer": "adambc", "privacy": PRIVATE, "lr": 0.02}),
    "warm-up": (NormEC(0.1, 0.3), {"server_optimizer": "momentum", "warmup": 6, "lr_schedule": "cosine"}),
    "ema": (DPSGD(Clip(0.5)), {"averaging": "ema"}),
    "polyak": (DPSGD(Clip(0.5)), {"averaging": Averaging("polyak", start=4), "server_optimizer": "adam", "lr": 0.02}),
}


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    method, options = RESUMED[name]
    how: dict[str, Any] = {"lr": 0.2, "rounds": 13, "seed": 7, "logging": Logging(every=1, evaluate_every=2), **options}
    alone = train(problem(), method, out=tmp_path / "alone", **how)
    for stop in (1, 5, 7):
        assert train(problem(), method, out=tmp_path / "stopped", callbacks=[StopAt(stop)], **how).state.round == stop
    same(alone, train(problem(), method, out=tmp_path / "stopped", **how))
    same(alone, train(problem(), method, **how))
    here, there = snapshot(tmp_path / "stopped"), snapshot(tmp_path / "alone")
    timed = ("checkpoint/latest.json", "summary.json", "report.html")
    assert all(here[file] == there[file] for file in there if file not in timed)


def test_the_state_of_the_optimizer_goes_on_where_secure_noise_cannot_be_drawn_twice(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.02, "rounds": 13, "seed": 7, "privacy": replace(PRIVATE, noise="secure")}
    how |= {"server_optimizer": "adambc", "out": tmp_path}
    first = train(problem(), Clip21(0.3, decay=0.1), callbacks=[StopAt(5)], **how)
    assert (first.state.round, first.state.optimizer["state.step"]) == (5, 5)
    assert train(problem(), Clip21(0.3, decay=0.1), **how).state.optimizer["state.step"] == 13


class Counting(torch.optim.Optimizer):
    """An optimizer that keeps a Python number in its state and in its group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0, "seen": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        group = self.param_groups[0]
        group["seen"] += 1
        (parameter,) = group["params"]
        state = self.state[parameter]
        state["largest"] = max(state.get("largest", 0.0), float(parameter.grad.abs().max()))
        parameter -= group["lr"] / group["seen"] / state["largest"] * parameter.grad


def test_numbers_of_an_optimizer_of_the_users_own_are_kept_too(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.2, "rounds": 9, "seed": 7, "server_optimizer": Counting, "privacy": PRIVATE}
    storage = Storage(checkpoint_seconds=0)
    train(problem(), NormEC(0.1, 0.3), out=tmp_path, callbacks=[StopAt(4)], storage=storage, **how)
    resumed, alone = train(problem(), NormEC(0.1, 0.3), out=tmp_path, **how), train(problem(), NormEC(0.1, 0.3), **how)
    same(resumed, alone)
    assert alone.privacy is not None
    assert any("own optimizer counting moves the model" in note for note in alone.privacy.notes)


def test_another_optimizer_or_average_is_another_run(tmp_path: Path) -> None:
    how: dict[str, Any] = {"lr": 0.02, "rounds": 6, "seed": 7, "out": tmp_path}
    train(problem(), GD(), server_optimizer="adam", callbacks=[StopAt(3)], **how)
    for other in ({}, {"server_optimizer": ServerOptimizer("adam", betas=(0.9, 0.99))}, {"averaging": "ema"}):
        with pytest.raises(UsageError, match=r"a run of another configuration: (averaging|server_optimizer) is"):
            train(problem(), GD(), **{"server_optimizer": "adam", **other} if other else {}, **how)
    assert train(problem(), GD(), server_optimizer=torch.optim.Adam, **how).finished, "the same optimizer"


def test_an_optimizer_makes_noise_of_its_own() -> None:
    """Runs that differ in anything public share no noise."""
    how: dict[str, Any] = {"lr": 0.0, "rounds": 1, "seed": 7, "privacy": PRIVATE}
    plain, adam = (train(problem(), NormEC(0.1, 0.3), server_optimizer=one, **how) for one in (None, "adam"))
    assert not torch.equal(plain.state.estimate, adam.state.estimate)


class Random(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter += torch.rand_like(parameter)


class Hidden(torch.optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self.count += 1
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter -= parameter.grad / self.count


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"server_optimizer": "nesterow"}, "unknown server_optimizer 'nesterow', did you mean 'nesterov'"),
    "no optimizer": ({"server_optimizer": 3}, "server_optimizer must be a name such as 'adam'"),
    "closure": ({"server_optimizer": "lbfgs"}, "lbfgs cannot step along a direction"),
    "matrices": ({"server_optimizer": "muon"}, "muon cannot step along a direction"),
    "random": ({"server_optimizer": Random}, "does not repeat its steps from a saved state"),
    "hidden state": ({"server_optimizer": Hidden}, "does not repeat its steps from a saved state"),
    "no optimizer made": ({"server_optimizer": lambda params: params}, "must return a torch optimizer"),
    "other parameters": (
        {"server_optimizer": lambda _params: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])},
        "must use the one parameter",
    ),
    "theory": ({"server_optimizer": "adam", "lr": "theory"}, "lr='theory' is for plain steps"),
    "plateau": ({"lr_schedule": torch.optim.lr_scheduler.ReduceLROnPlateau}, "reads what the run measures"),
    "plateau by name": ({"lr_schedule": "ReduceLROnPlateau"}, "reads what the run measures"),
    "schedule": ({"lr_schedule": "cosin"}, "unknown lr_schedule 'cosin', did you mean 'cosine'"),
    "schedule of a schedule": ({"lr_schedule": "cosine", "lr": lambda _k: 0.1}, "lr_schedule scales a step size"),
    "cycle": (
        {"lr_schedule": LRSchedule("OneCycleLR", max_lr=1.0, total_steps=9)},
        "the scheduler changes momentum too",
    ),
    "short": (
        {"lr_schedule": LRSchedule("OneCycleLR", max_lr=1.0, total_steps=3, cycle_momentum=False)},
        "the scheduler ends in round 4",
    ),
    "long ramp": ({"lr_schedule": LRSchedule("constant", ramp_up=9)}, "ramp_up must be below the 9 rounds"),
    "average": ({"averaging": "mean"}, "unknown averaging 'mean'"),
    "late average": (
        {"averaging": Averaging("polyak", start=10)},
        "averaging_start must be at most the number of rounds, 9, got 10",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_said_in_one_line(name: str) -> None:
    options, words = REFUSED[name]
    with pytest.raises(UsageError, match=words) as said:
        train(problem(), GD(), **{"lr": 0.1, "rounds": 9, **options})
    assert "\n" not in str(said.value)


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="adam has no setting 'beta', did you mean 'betas'"):
        ServerOptimizer("adam", beta=0.9)
    with pytest.raises(UsageError, match="lr is not a setting of adam"):
        ServerOptimizer("adam", lr=0.9)
    with pytest.raises(UsageError, match="the schedule cosine has no setting 'every'"):
        LRSchedule("cosine", every=3)
    with pytest.raises(UsageError, match="decay of an average is for averaging='ema'"):
        Averaging("polyak", decay=0.9)


@pytest.mark.parametrize(
    ("method", "privacy", "words"),
    [
        (NormEC(0.1, 0.3), PRIVATE, "not known for normec: its server normalises the step; use server_norm = false"),
        (AdaptiveClip(Clip21(0.3)), PRIVATE, "not known for adaptive-clip: its noise is multiplied by the threshold"),
        (Scaffold(0.3), PRIVATE, "not known for scaffold: noise also enters the control variate"),
        (Clip21(0.3), replace(PRIVATE, trust="local", memory="noisy"), "not known with memory='noisy'"),
    ],
)
def test_adambc_is_refused_where_the_variance_is_not_known(method: Any, privacy: Privacy, words: str) -> None:
    local = LocalSteps(steps=2, lr=0.1) if isinstance(method, Scaffold) else None
    with pytest.raises(UsageError, match=words):
        train(problem(), method, lr=0.1, rounds=9, privacy=privacy, local=local, server_optimizer="adambc")


def test_a_claim_about_noise_holds_for_the_code_that_it_was_made_about() -> None:
    class Doubled(Clip21):
        def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            direction, estimate = super().server_step(mean_message, state)
            return 2 * direction, estimate

    class Wrong(Doubled):
        noise_response = (1.0, 1.0)

        def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return super().server_step(mean_message, state)

    class Right(Wrong):
        noise_response = (1.0, 1.0)

        def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            direction, estimate = super().server_step(mean_message, state)
            return direction / 2, estimate

    how: dict[str, Any] = {"lr": 0.1, "rounds": 3, "privacy": PRIVATE, "server_optimizer": "adambc"}
    for kind in (Doubled, Wrong):
        with pytest.raises(UsageError, match="not known"):
            train(problem(), kind(0.3), **how)
    assert train(problem(), Right(0.3), **how).finished


@pytest.mark.slow
def test_methods_without_a_bound_take_optimizers_too() -> None:
    for method in (EF21(TopK(3)), ErrorFeedback(Identity())):
        run = train(problem(), method, lr=0.05, rounds=60, server_optimizer="adam")
        assert run.history["loss"][-1] < 0.8 * run.history["loss"][0]
