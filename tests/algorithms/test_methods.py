"""The built-in methods: steps are pure and work on any shape, and every constructor makes the paper's choices."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from normec import DPSGD, EF21, GD, Clip, Clip21, ErrorFeedback, Identity, Method, NormEC, RandK, SmoothedNorm, TopK
from normec.algorithms import registry
from normec.algorithms.error_feedback import ErrorFeedbackScheme
from normec.errors import UsageError
from normec.sampling.random_streams import Key, Stream

from ..support.draws import normal

METHODS = {
    "normec": NormEC(0.1, 0.3),
    "normec-plain": NormEC(0.0, 2.0, server_norm=False),
    "normec-decay": NormEC(0.1, 0.3, decay=0.2),
    "clip21": Clip21(0.4),
    "clip21-decay": Clip21(0.4, decay=0.1),
    "ef21-top": EF21(TopK(2)),
    "ef21-rand": EF21(RandK(2)),
    "dpsgd-clip": DPSGD(Clip(0.5)),
    "dpsgd-norm": DPSGD(SmoothedNorm(0.1), beta=0.5),
    "dpsgd-momentum": DPSGD(Clip(0.5), beta=0.5, momentum=0.7),
    "gd": GD(),
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), n=st.integers(1, 6), d=st.integers(2, 9))
def test_the_estimate_stays_the_mean_memory(method: Method, seed: int, n: int, d: int) -> None:
    feedback = isinstance(method, ErrorFeedbackScheme)
    memory = normal(seed, n, d) if feedback else torch.zeros(n, d, dtype=torch.float64)
    estimate = velocity = memory.mean(0)
    for k in range(8):
        key = Key(Stream(0, "operator"), k, torch.arange(n))
        message, memory = method.client_step(normal(seed + k, n, d), memory, key)
        direction, estimate = method.server_step(message.mean(0), estimate)
        velocity = getattr(method, "momentum", 0.0) * velocity + method.beta * message.mean(0)  # type: ignore[attr-defined]
        expected = memory.mean(0) if feedback else velocity
        assert torch.allclose(estimate, expected, rtol=0, atol=1e-13)
        if getattr(method, "server_norm", False):
            assert float(direction.norm()) == pytest.approx(1, abs=1e-12)
            assert float(direction @ estimate) == pytest.approx(float(estimate.norm()), rel=1e-12)
        else:
            assert torch.equal(direction, estimate)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_steps_are_pure(method: Method) -> None:
    grad, memory, mean, estimate = normal(1, 3, 5), normal(2, 3, 5), normal(3, 5), normal(4, 5)
    copies = [tensor.clone() for tensor in (grad, memory, mean, estimate)]
    key = Key(Stream(0, "operator"), 0, torch.arange(3))
    first = (*method.client_step(grad, memory, key), *method.server_step(mean, estimate))
    again = (*method.client_step(grad, memory, key), *method.server_step(mean, estimate))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((grad, memory, mean, estimate), copies, strict=True))


@pytest.mark.parametrize("method", [m for name, m in METHODS.items() if name != "ef21-rand"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_leading_shape_and_dtype(method: Method, dtype: torch.dtype) -> None:
    grad, memory = normal(1, 2, 3, 5).to(dtype), normal(2, 2, 3, 5).to(dtype)
    message, after = method.client_step(grad, memory)
    alone_message, alone_after = method.client_step(grad[1, 2], memory[1, 2])
    assert message.shape == after.shape == grad.shape
    assert message.dtype == after.dtype == dtype
    tolerance = 4 * torch.finfo(dtype).eps
    assert torch.allclose(message[1, 2], alone_message, atol=tolerance)
    assert torch.allclose(after[1, 2], alone_after, atol=tolerance)


def test_the_message_comes_without_beta() -> None:
    grad, memory = 100 * normal(1, 4, 6), torch.zeros(4, 6, dtype=torch.float64)
    message, after = NormEC(0.0, 0.01).client_step(grad, memory)
    assert torch.allclose(message.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    assert torch.allclose(after.norm(dim=-1), torch.full((4,), 0.01, dtype=torch.float64))
    message, after = DPSGD(SmoothedNorm(0.0), beta=0.01).client_step(grad, memory)
    assert torch.allclose(message.norm(dim=-1), torch.ones(4, dtype=torch.float64))
    assert torch.equal(after, memory)


def test_a_zero_estimate_normalises_to_no_step() -> None:
    direction, estimate = NormEC(0.1, 0.1).server_step(torch.zeros(3), torch.zeros(3))
    assert direction.tolist() == estimate.tolist() == [0, 0, 0]


def test_a_client_not_drawn_keeps_or_forgets() -> None:
    memory = normal(1, 2, 3)
    assert torch.equal(NormEC(0.1, 0.1).absent(memory), memory)
    assert torch.allclose(Clip21(0.1, decay=0.25).absent(memory), 0.75 * memory, rtol=1e-15)
    assert torch.allclose(Clip21(0.1, decay=0.25).absent(memory, 3), 0.75**3 * memory, rtol=1e-15)


def test_constructors_state_the_paper_s_choices() -> None:
    names = ("operator", "beta", "server_norm", "decay")
    facts = {key: tuple(getattr(m, name, None) for name in names) for key, m in METHODS.items()}
    assert facts["normec"] == (SmoothedNorm(0.1), 0.3, True, 0.0)
    assert facts["normec-plain"] == (SmoothedNorm(0.0), 2.0, False, 0.0)
    assert facts["normec-decay"] == (SmoothedNorm(0.1), 0.3, True, 0.2)
    assert facts["clip21"] == (Clip(0.4), 1.0, False, 0.0)
    assert facts["ef21-top"] == (TopK(2), 1.0, False, 0.0)
    assert facts["dpsgd-norm"] == (SmoothedNorm(0.1), 0.5, None, None)
    assert facts["gd"] == (Identity(), 1.0, None, None)
    bounds = {name: m.bound for name, m in METHODS.items()}
    assert bounds["normec"] == 1
    assert bounds["clip21"] == 0.4
    assert bounds["ef21-top"] == bounds["gd"] == math.inf


def test_a_method_cannot_be_changed() -> None:
    method = NormEC(0.1, 0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.beta = 5.0  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [-0.1, 1.0, math.nan, "0.5"])
def test_settings_out_of_range_are_refused(wrong: Any) -> None:
    for make in (
        lambda: NormEC(0.1, 0.1, decay=wrong),
        lambda: Clip21(0.1, decay=wrong),
        lambda: ErrorFeedback(Clip(1.0), decay=wrong),
        lambda: DPSGD(Clip(1.0), momentum=wrong),
    ):
        with pytest.raises(UsageError, match=r"must lie in \[0, 1\)"):
            make()
    with pytest.raises(UsageError, match="alpha must be >= 0"):
        NormEC(-1.0, 0.1)
    with pytest.raises(UsageError, match="tau must be > 0"):
        Clip21(0.0)


@pytest.mark.parametrize("kind", [DPSGD, EF21, ErrorFeedback])
@pytest.mark.parametrize("wrong", [1.0, "clip", Clip], ids=["threshold", "text", "class"])
def test_what_is_no_operator_is_refused(wrong: Any, kind: Callable[[Any], Method]) -> None:
    with pytest.raises(UsageError, match=r"the operator must be an object such as Clip\(1\.0\)"):
        kind(wrong)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_method_is_made_again_from_its_name_and_its_spec(method: Method) -> None:
    spec = json.loads(json.dumps(method.spec()))
    assert registry.build(registry.name_of(method), spec) == method


def test_no_two_methods_have_the_same_identity() -> None:
    known = [registry.identity_of(method) for method in METHODS.values()]
    assert len(set(known)) == len(known)
