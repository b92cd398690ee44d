"""Every method with drawn clients, weights and local steps at once, against one loop in NumPy: 60 rounds.

So are the optimizers of the server's step, and the thresholds that tune themselves. Step sizes are small enough that
rounding does not grow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from normec import (
    DPSGD,
    EF21,
    EF21SGDM,
    GD,
    AdaptiveClip,
    Clip,
    Clip21,
    Clip21SGD2M,
    FixedSize,
    LocalSteps,
    LRSchedule,
    Method,
    MomentumNormEC,
    NormEC,
    Poisson,
    Scaffold,
    ServerOptimizer,
    SmoothedNorm,
    TopK,
    train,
)

from ..support import optimizers_by_hand as optimizers
from ..support.problems import shifted
from ..support.reference import Vector, clip, largest, norm, unit

N, D, ROUNDS, SEED = 5, 7, 60, 1
DRAWN: dict[str, FixedSize | Poisson] = {"three of five": FixedSize(3), "coins": Poisson(0.6)}
SHARE = 0.6  # of the clients in a round, on average
WEIGHTS = (0.35, 0.3, 0.2, 0.1, 0.05)
STEPS, LOCAL_LR, PROX = 3, 0.05, 0.4
QUANTILE, THRESHOLD_LR = 0.6, 0.05


def smoothed(v: Vector) -> Vector:
    return v / (0.1 + norm(v))


def clipped(v: Vector) -> Vector:
    return clip(v, 0.05)


def two_largest(v: Vector) -> Vector:
    return largest(v, 2)


CASES: dict[str, tuple[Method, float, dict[str, Any]]] = {
    "normec": (NormEC(0.1, 0.3), 0.01, {"psi": smoothed, "memory": True, "beta": 0.3, "server_norm": True}),
    "normec, forgetting": (
        NormEC(0.1, 0.3, server_norm=False, decay=0.1),
        0.1,
        {"psi": smoothed, "memory": True, "beta": 0.3, "decay": 0.1},
    ),
    "normec-momentum": (
        MomentumNormEC(0.1, 0.3, 0.8, decay=0.1),
        0.01,
        {"psi": smoothed, "memory": True, "beta": 0.3, "decay": 0.1, "p": 0.8, "server_norm": True},
    ),
    "clip21": (Clip21(0.05), 0.1, {"psi": clipped, "memory": True}),
    "clip21-sgd2m": (Clip21SGD2M(0.05, 0.4, 0.8), 0.1, {"psi": clipped, "memory": True, "beta": 0.4, "p": 0.8}),
    "ef21": (EF21(TopK(2)), 0.1, {"psi": two_largest, "memory": True}),
    "ef21-sgdm": (
        EF21SGDM(TopK(2), 0.8, server_norm=True),
        0.01,
        {"psi": two_largest, "memory": True, "p": 0.8, "server_norm": True},
    ),
    "dpsgd-clip": (DPSGD(Clip(0.05), momentum=0.5), 0.2, {"psi": clipped, "momentum": 0.5}),
    "dpsgd-norm": (DPSGD(SmoothedNorm(0.1), beta=0.7), 0.02, {"psi": smoothed, "beta": 0.7}),
    "gd": (GD(), 0.1, {"psi": lambda v: v}),
}


def update(f: Any, i: int, x: Vector, correction: Vector | float = 0.0) -> Vector:
    """(x − y^K)/(K η) after the local steps of client i."""
    y = x.copy()
    for _ in range(STEPS):
        y = y - LOCAL_LR * (f.grad(i, y) + correction + PROX * (y - x))
    return (x - y) / (STEPS * LOCAL_LR)


def by_hand(
    drawn: str, lr: Callable[[int], float], psi: Callable[[Vector], Vector], *, step: optimizers.Step | None = None,
    memory: bool = False, beta: float = 1.0, decay: float = 0.0, p: float = 0.0, server_norm: bool = False,
    momentum: float = 0.0,
) -> Vector:  # fmt: skip
    f, x, move = shifted()[0], np.zeros(D), step or optimizers.sgd()
    v, g, estimate = np.zeros((N, D)), np.zeros((N, D)), np.zeros(D)
    for k in range(ROUNDS):
        total, chosen = np.zeros(D), drawn_in(k, drawn)
        for i in range(N):
            message = np.zeros(D)
            if i in chosen:
                v[i] = p * v[i] + (1 - p) * update(f, i, x)
                message = psi(v[i] - g[i])
            if memory:
                g[i] = (1 - decay) * g[i] + beta * message
            total += WEIGHTS[i] * message
        estimate = ((1 - decay) if memory else momentum) * estimate + beta * total
        x = move(x, unit(estimate) if server_norm else estimate, lr(k))
    return x


def drawn_in(k: int, drawn: str) -> list[int]:
    return DRAWN[drawn].draw(N, k, SEED).tolist()  # type: ignore[union-attr]


def trained(method: Method, lr: float, drawn: str, **more: Any) -> Any:
    local = LocalSteps(steps=STEPS, lr=LOCAL_LR, prox=PROX)
    how: dict[str, Any] = {"rounds": ROUNDS, "seed": SEED, "local": local, "weights": WEIGHTS, **more}
    return train(shifted()[1], method, lr=lr, participation=DRAWN[drawn], **how)


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize(("name", "drawn"), list(zip(CASES, [*DRAWN] * 5, strict=True)))
def test_the_path_is_the_loop_s(name: str, drawn: str) -> None:
    method, lr, settings = CASES[name]
    expected = by_hand(drawn, lambda _: lr, **settings)
    assert norm(expected) > 0.1, "x has moved"
    np.testing.assert_allclose(trained(method, lr, drawn).x.numpy(), expected, rtol=0, atol=1e-10)


# What the server does with the direction: the setting, its step size, the formula, and how the step size changes.
SERVER_STEPS: dict[str, tuple[dict[str, Any], float, Callable[[], optimizers.Step], Callable[[int], float]]] = {
    "momentum": ({"server_optimizer": "momentum"}, 0.01, lambda: optimizers.momentum(0.9), lambda _: 1.0),
    "nesterov": (
        {"server_optimizer": ServerOptimizer("nesterov", momentum=0.8)},
        0.02,
        lambda: optimizers.momentum(0.8, nesterov=True),
        lambda _: 1.0,
    ),
    "adam": ({"server_optimizer": "adam"}, 0.005, lambda: optimizers.adam(0.9, 0.999, 1e-8), lambda _: 1.0),
    "adamw": (
        {"server_optimizer": ServerOptimizer("adamw", weight_decay=0.1)},
        0.005,
        lambda: optimizers.adam(0.9, 0.999, 1e-8, 0.1, decoupled=True),
        lambda _: 1.0,
    ),
    "rmsprop": ({"server_optimizer": "rmsprop"}, 0.003, lambda: optimizers.rmsprop(0.99, 1e-8), lambda _: 1.0),
    "adam on a cosine with a ramp": (
        {"server_optimizer": "adam", "lr_schedule": LRSchedule("cosine", ramp_up=20, end=0.1)},
        0.01,
        lambda: optimizers.adam(0.9, 0.999, 1e-8),
        lambda k: (k + 1) / 20 if k < 20 else 0.1 + 0.9 * (1 + math.cos(math.pi * (k - 20) / (ROUNDS - 20))) / 2,
    ),
}
STEPPED = ["normec, forgetting", "clip21-sgd2m", "dpsgd-clip", "normec"]
COMBINED = [
    (step, STEPPED[(number + shift) % 4], drawn)
    for number, step in enumerate(SERVER_STEPS)
    for shift, drawn in enumerate(DRAWN)
]


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(("step", "name", "drawn"), COMBINED)
def test_optimizers_of_the_server_step(step: str, name: str, drawn: str) -> None:
    given, lr, formula, factor = SERVER_STEPS[step]
    method, _, settings = CASES[name]
    expected = by_hand(drawn, lambda k: lr * factor(k), step=formula(), **settings)
    assert norm(expected) > 0.1, "x has moved"
    np.testing.assert_allclose(trained(method, lr, drawn, **given).x.numpy(), expected, rtol=0, atol=1e-10)


ADAPTIVE: dict[str, tuple[Method, dict[str, Any]]] = {
    "clip21": (Clip21(0.2), {"memory": True}),
    "clip21-sgd2m": (Clip21SGD2M(0.2, 0.4, 0.8), {"memory": True, "beta": 0.4, "p": 0.8}),
    "dpsgd": (DPSGD(Clip(0.2), 0.7, momentum=0.5), {"beta": 0.7, "momentum": 0.5}),
}


def adapting_by_hand(
    drawn: str, lr: float, *, memory: bool = False, beta: float = 1.0, p: float = 0.0, momentum: float = 0.0
) -> tuple[Vector, list[float]]:
    """x, and the threshold before each round and at the end."""
    f, x, thresholds = shifted()[0], np.zeros(D), [0.2]
    v, g, estimate = np.zeros((N, D)), np.zeros((N, D)), np.zeros(D)
    for k in range(ROUNDS):
        total, signs = np.zeros(D), 0.0
        for i in drawn_in(k, drawn):
            v[i] = p * v[i] + (1 - p) * update(f, i, x)
            difference = v[i] - g[i]
            signs += WEIGHTS[i] * (1 if norm(difference) <= thresholds[-1] else -1)
            message = clip(difference, thresholds[-1])
            if memory:
                g[i] = g[i] + beta * message
            total += WEIGHTS[i] * message
        estimate = (1.0 if memory else momentum) * estimate + beta * total
        x = x - lr * estimate
        share = min(max((1 + signs / SHARE) / 2, -1.0), 2.0)
        thresholds.append(thresholds[-1] * math.exp(-THRESHOLD_LR * (share - QUANTILE)))
    return x, thresholds


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_adaptive_clipping_counts_clients_by_their_weights(name: str, drawn: str) -> None:
    """The additional number is weighted as all of the message is; its share is that of the drawn, 3 of 5 on average."""
    inner, settings = ADAPTIVE[name]
    x, thresholds = adapting_by_hand(drawn, 0.1, **settings)
    run = trained(AdaptiveClip(inner, QUANTILE, THRESHOLD_LR, participation=SHARE), 0.1, drawn)
    assert norm(x) > 0.1, "x has moved"
    assert len({round(one, 6) for one in thresholds}) > 20
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    assert float(run.state.server["threshold"]) == pytest.approx(thresholds[-1], rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", DRAWN)
def test_scaffold(drawn: str) -> None:
    f, x, c, own, tau = shifted()[0], np.zeros(D), np.zeros(D), np.zeros((N, D)), 0.3
    for k in range(ROUNDS):
        total = np.zeros(2 * D)
        for i in drawn_in(k, drawn):
            moved = update(f, i, x, c - own[i])
            message = clip(np.concatenate([moved, moved - c]), tau)
            own[i] = own[i] + message[D:]
            total += WEIGHTS[i] * message
        x, c = x - 0.1 * total[:D], c + total[D:]
    run = trained(Scaffold(tau), 0.1, drawn)
    assert norm(x) > 0.1
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.clients["control"].numpy(), own, rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.array(WEIGHTS) @ own, c, rtol=0, atol=1e-10)
