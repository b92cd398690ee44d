"""Every method with drawn clients, weights and local steps at once, against one loop in NumPy: 200 rounds."""

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
    Method,
    MomentumNormEC,
    NormEC,
    Scaffold,
    SmoothedNorm,
    TopK,
    train,
)

from ..support.problems import shifted
from ..support.reference import Vector, clip, largest, norm, unit

N, D, ROUNDS, SEED = 5, 7, 200, 1
DRAWN = FixedSize(3)
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
    lr: float, psi: Callable[[Vector], Vector], *, memory: bool = False, beta: float = 1.0, decay: float = 0.0,
    p: float = 0.0, server_norm: bool = False, momentum: float = 0.0,
) -> Vector:  # fmt: skip
    f, x = shifted()[0], np.zeros(D)
    v, g, estimate = np.zeros((N, D)), np.zeros((N, D)), np.zeros(D)
    for k in range(ROUNDS):
        total, chosen = np.zeros(D), drawn_in(k)
        for i in range(N):
            message = np.zeros(D)
            if i in chosen:
                v[i] = p * v[i] + (1 - p) * update(f, i, x)
                message = psi(v[i] - g[i])
            if memory:
                g[i] = (1 - decay) * g[i] + beta * message
            total += WEIGHTS[i] * message
        estimate = ((1 - decay) if memory else momentum) * estimate + beta * total
        x = x - lr * (unit(estimate) if server_norm else estimate)
    return x


def drawn_in(k: int) -> list[int]:
    return DRAWN.draw(N, k, SEED).tolist()  # type: ignore[union-attr]


def trained(method: Method, lr: float) -> Any:
    local = LocalSteps(steps=STEPS, lr=LOCAL_LR, prox=PROX)
    how: dict[str, Any] = {"rounds": ROUNDS, "seed": SEED, "local": local, "weights": WEIGHTS, "participation": DRAWN}
    return train(shifted()[1], method, lr=lr, **how)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", CASES)
def test_the_path_is_the_loop_s(name: str) -> None:
    method, lr, settings = CASES[name]
    expected = by_hand(lr, **settings)
    assert norm(expected) > 0.1, "x has moved"
    np.testing.assert_allclose(trained(method, lr).x.numpy(), expected, rtol=0, atol=1e-10)


def test_adaptive_clipping_counts_clients_by_their_weights() -> None:
    """The additional number is weighted as all of the message is; its share is that of the drawn, 3 of 5 on average."""
    f, x, threshold, thresholds = shifted()[0], np.zeros(D), 0.2, set()
    g, estimate = np.zeros((N, D)), np.zeros(D)
    for k in range(ROUNDS):
        total, signs = np.zeros(D), 0.0
        for i in drawn_in(k):
            difference = update(f, i, x) - g[i]
            signs += WEIGHTS[i] * (1 if norm(difference) <= threshold else -1)
            message = clip(difference, threshold)
            g[i] = g[i] + message
            total += WEIGHTS[i] * message
        estimate = estimate + total
        x = x - 0.1 * estimate
        share = (1 + signs / (3 / N)) / 2
        threshold *= math.exp(-THRESHOLD_LR * (share - QUANTILE))
        thresholds.add(round(threshold, 6))
    method = AdaptiveClip(Clip21(0.2), QUANTILE, THRESHOLD_LR, participation=3 / N)
    run = trained(method, 0.1)
    assert len(thresholds) > 20
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    assert float(run.state.server["threshold"]) == pytest.approx(threshold, rel=1e-10)


def test_scaffold() -> None:
    f, x, c, own, tau = shifted()[0], np.zeros(D), np.zeros(D), np.zeros((N, D)), 0.3
    for k in range(ROUNDS):
        total = np.zeros(2 * D)
        for i in drawn_in(k):
            moved = update(f, i, x, c - own[i])
            message = clip(np.concatenate([moved, moved - c]), tau)
            own[i] = own[i] + message[D:]
            total += WEIGHTS[i] * message
        x, c = x - 0.1 * total[:D], c + total[D:]
    run = trained(Scaffold(tau), 0.1)
    assert norm(x) > 0.1
    np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-10)
    np.testing.assert_allclose(run.state.clients["control"].numpy(), own, rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.array(WEIGHTS) @ own, c, rtol=0, atol=1e-10)
