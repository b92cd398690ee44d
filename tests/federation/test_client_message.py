"""The message of a party, made by a method that works in the memory of what it gets."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from normec import Method
from normec.algorithms.method import Steps
from normec.federation.protocol.client_message import client_message
from normec.federation.protocol.method_checks import as_used
from normec.federation.protocol.party_state import PartyState
from normec.federation.protocol.reconciliation import after_absence
from normec.federation.protocol.terms import MethodTerms, PlanTerms, PrivacyTerms, RecordTerms
from normec.federation.protocol.wire import Record, Request


@dataclasses.dataclass(frozen=True)
class InPlace(Method):
    """Ten times the gradient, clipped, in the gradient's own memory; `commit` clears what was sent."""

    tau: float = 1.0
    lipschitz = 10.0

    @property
    def bound(self) -> float:
        return self.tau

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        update.mul_(10.0)
        return update.mul_(self.tau / update.norm(dim=-1, keepdim=True).clamp_min(self.tau)), state

    def commit(self, draft: Any, sent: Tensor) -> Any:
        sent.zero_()
        return draft


class OneGradient:
    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def clipped_gradient(self, *_: Any, **__: Any) -> tuple[Tensor, float]:
        return self.gradient, 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_method_that_works_in_place_is_applied_once(dtype: torch.dtype) -> None:
    gradient, x = torch.tensor([0.001, 0.0, 0.0, 0.0], dtype=torch.float64), torch.zeros(4, dtype=dtype)
    request = Request(
        "a~" + "0" * 16,
        "a",
        0,
        0,
        1,
        x.numpy(),
        MethodTerms("inplace", "{}", ""),
        PrivacyTerms("secure", 1.0, 1.0, 1e-5, "record", "zero-out", "local", "clean"),
        PlanTerms(0, 0, 1, None, None, RecordTerms(100.0, False, 1.0)),
        Record(),
    )
    oracle: Any = OneGradient(gradient.clone())
    message, _, _ = client_message(oracle, request, Steps(InPlace(), x), {})
    assert float(message.norm()) == pytest.approx(0.01, rel=1e-6)
    assert torch.equal(oracle.gradient, gradient)


_KEPT = torch.zeros(1, 4)


class KeptState(Method):
    """Every state that it returns lies in the same memory."""

    bound = 1.0

    def client_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def message(self, update: Tensor, state: Tensor, key: Any = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return 0.1 * update, _KEPT.copy_(state + update)

    def absent(self, state: Tensor, rounds: int = 1) -> Tensor:
        return _KEPT.copy_(0.5**rounds * state)


def test_a_state_is_not_that_of_a_message_that_was_not_accepted() -> None:
    """The state after an absence stays what it is while the next message is made."""
    steps = Steps(KeptState(), torch.zeros(4))
    client = after_absence(steps, PartyState("", client={"memory": torch.ones(1, 4)}), 1, torch.zeros(4))
    _, draft = steps.message(torch.ones(1, 4), as_used(client, torch.zeros(4)), None)
    assert client["memory"].tolist() == [[0.5] * 4]
    assert draft["memory"].tolist() == [[1.5] * 4]
