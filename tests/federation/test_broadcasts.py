"""Methods that broadcast numbers beside x, or whose messages have another length than x, in a federation."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normec import DPSGD, AdaptiveClip, Clip, Clip21, LocalSteps, Method, Privacy, Scaffold, UsageError
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.party import Party
from normec.federation.protocol.policy import Policy
from normec.federation.protocol.wire import Refusal, Reply
from normec.privacy import gaussian

from . import hospitals
from .faulty_network import DIMENSION, Killed, Quadratic, dying
from .hospitals import FEATURES, NODES, SIZES, Hospitals, start
from .hostile import HostileServer, zeros

POLICY = Policy(
    epsilon=1e6,
    least_sigma=1e-3,
    allow_without_noise=True,
    simulation=True,
    trusts=["local", "central"],
    methods=["adaptive-clip", "scaffold"],
)
LOCAL = LocalSteps(steps=3, lr=0.2)


def gradient(index: int, x: Any) -> Any:
    return hospitals.gradient(index, x, math.inf, by_layer=False, divisor=SIZES[index])


def norm(v: Any) -> float:
    return float(np.sqrt((v * v).sum()))


def adaptive_by_hand(rounds: int, memory: bool) -> Any:
    """Adaptive clipping, line by line: q = 0.5, η = 0.2, first threshold 0.3, β = 1, γ = 0.3."""
    x, c = start().numpy().copy(), 0.3
    held, estimate = np.zeros((3, len(x))), np.zeros(len(x))
    for _ in range(rounds):
        mean, bit = np.zeros(len(x)), 0.0
        for i in range(3):
            v = gradient(i, x) - (held[i] if memory else 0)
            short = norm(v) <= c
            clipped = v if short else v * (c / norm(v))
            held[i] += clipped if memory else 0
            mean += clipped / 3
            bit += (1 if short else -1) / 3
        estimate = estimate + mean if memory else mean
        x = x - 0.3 * estimate
        c *= np.exp(-0.2 * (np.clip((1 + bit) / 2, -1, 2) - 0.5))
    return x


def scaffold_by_hand(rounds: int, tau: float) -> Any:
    """SCAFFOLD with a joint clip, line by line: three local steps of 0.2, γ = 0.3."""
    x = start().numpy().copy()
    control, own = np.zeros(len(x)), np.zeros((3, len(x)))
    for _ in range(rounds):
        total = np.zeros(2 * len(x))
        for i in range(3):
            y = x.copy()
            for _ in range(3):
                y = y - 0.2 * (gradient(i, y) + control - own[i])
            u = (x - y) / 0.6
            message = np.concatenate([u, u - control])
            message *= min(1.0, tau / norm(message))
            own[i] += message[len(x) :]
            total += message / 3
        x, control = x - 0.3 * total[: len(x)], control + total[len(x) :]
    return x


CASES: dict[str, tuple[Method, dict[str, Any], Any]] = {
    "dpsgd": (AdaptiveClip(DPSGD(Clip(0.3))), {}, lambda k: adaptive_by_hand(k, memory=False)),
    "clip21": (AdaptiveClip(Clip21(0.3)), {}, lambda k: adaptive_by_hand(k, memory=True)),
    "scaffold": (Scaffold(0.8), {"local": LOCAL}, lambda k: scaffold_by_hand(k, 0.8)),
}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", CASES)
def test_the_trajectory_by_hand(name: str, tmp_path: Path) -> None:
    method, changes, by_hand = CASES[name]
    x = Hospitals(tmp_path, method, 10, None, POLICY, plan_changes=changes).run()
    np.testing.assert_allclose(x.numpy(), by_hand(10), rtol=1e-10, atol=1e-10)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("trust", ["local", "central"])
@pytest.mark.parametrize("name", CASES)
def test_noise_covers_the_whole_message(name: str, trust: Any, tmp_path: Path) -> None:
    """One release of all its numbers: ε is that of the bound, and restarts of server and parties change nothing."""
    method, changes, _ = CASES[name]
    privacy = Privacy(sigma=2.0 * method.bound, noise="secure", trust=trust)
    federation = Hospitals(tmp_path, method, 4, privacy, POLICY, plan_changes=changes)
    sent = 0
    while not federation.server.finished:
        for node, request in federation.server.requests().items():
            federation.ask(node, request)
        for reply in federation.round().values():
            assert len(reply.message) == method.message_length(FEATURES + 1)
            sent += reply.message.nbytes
        federation.restart_server()
    gain = 2.0 if trust == "local" else 2.0 * np.sqrt(3)
    expected = gaussian.epsilon(float(np.sqrt(4) / gain), 1e-5)
    run = federation.server.finish()
    assert run.history["bytes"][-1] == sent / len(NODES)
    found = run.privacy
    assert found is not None
    assert found.epsilon == pytest.approx(expected, rel=1e-9)
    for node in NODES:
        assert read_releases(federation.home(node)).epsilon("client", 1e-5) == pytest.approx(expected, rel=1e-9)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", CASES)
def test_a_restarted_federation_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    method, changes, _ = CASES[name]
    whole = Hospitals(tmp_path / "whole", method, 5, None, POLICY, plan_changes=changes).run()
    parts = Hospitals(tmp_path / "parts", method, 5, None, POLICY, plan_changes=changes)
    while not parts.server.finished:
        request = parts.server.requests()["b"]
        try:
            with dying(3 + 2 * parts.server.round):
                parts.party("b").answer(request)
        except Killed:
            pass
        parts.round()
        parts.restart_server()
    torch.testing.assert_close(parts.server.finish().x, whole, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["clip21", "scaffold"])
def test_a_state_that_the_server_cannot_follow_is_lost_with_the_disk(name: str, tmp_path: Path) -> None:
    method, changes, _ = CASES[name]
    federation = Hospitals(
        tmp_path, method, 9, Privacy(sigma=3.0, noise="secure", trust="local"), POLICY, plan_changes=changes, minimum=2
    )
    federation.round()
    shutil.rmtree(federation.home("b"))
    for _ in range(2):
        federation.ask("b", federation.server.requests()["b"])
    assert federation.server.refusals == {"b": "lost"}
    assert (
        read_releases(federation.home("b")).recovered() == 2
    )  # the accepted one, and one that may have been under way


VECTORS = [
    None,
    np.zeros(0),
    np.zeros(2),
    np.array([np.nan]),
    np.array([1e31]),
    np.zeros(1, np.float32),
    np.zeros((1, 1)),
    [0.5],
    0.5,
]


@pytest.mark.parametrize("number", range(len(VECTORS)))
def test_what_is_no_broadcast_of_the_method_is_refused(number: int, tmp_path: Path) -> None:
    server = HostileServer(
        Party(tmp_path, POLICY, Quadratic(), node="a"), zeros(DIMENSION), method=AdaptiveClip(DPSGD(Clip(1.0)))
    )
    changed = {} if VECTORS[number] is None else {"public": VECTORS[number]}
    answer = server.ask(**changed)
    assert isinstance(answer, Refusal)
    assert answer.reason in ("malformed", "terms")
    assert read_releases(tmp_path).count() == 0


@pytest.mark.parametrize("threshold", [0.0, -1.0, 5e-324, 1e-300, 1.0, 1e30, -1e30])
def test_any_threshold_gets_a_message_within_the_bound_that_is_paid_for(threshold: float, tmp_path: Path) -> None:
    """The server chooses the threshold: a message that cannot be made with it is zero, under the same noise."""
    method = AdaptiveClip(DPSGD(Clip(1.0)))
    server = HostileServer(
        Party(tmp_path, POLICY, Quadratic(), node="a"), zeros(DIMENSION), method=method, sigma=1e-3 * 1.5
    )
    server.privacy = Privacy(sigma=1e-3 * 1.5, noise="secure", memory="noisy", trust="local")
    answer = server.ask(public=np.array([threshold]))
    assert isinstance(answer, Reply)
    assert len(answer.message) == DIMENSION + 1
    assert norm(answer.message) < 1 + 0.0015 * (np.sqrt(DIMENSION + 1) + 7.5)
    assert read_releases(tmp_path).count() == 1


def test_what_local_steps_lack_is_refused_by_both(tmp_path: Path) -> None:
    for changes in ({}, {"local": LocalSteps(steps=2, lr=0.1, scale="difference")}):
        with pytest.raises(UsageError, match="scaffold corrects local steps"):
            Hospitals(tmp_path, Scaffold(1.0), 3, None, POLICY, plan_changes=changes)
    federation = Hospitals(tmp_path, Scaffold(1.0), 3, None, POLICY, plan_changes={"local": LOCAL})
    request = federation.server.requests()["a"]
    plain = dataclasses.replace(request, plan=dataclasses.replace(request.plan, local=None))
    answer = federation.party("a").answer(plain)
    assert isinstance(answer, Refusal)
    assert answer.reason == "terms"
