"""Methods that are wrong, each in its own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normec import Clip, Method


@dataclass(frozen=True)
class Direct(Method):
    """Sends Clip(∇f), and keeps nothing."""

    @property
    def bound(self) -> float:
        return 1.0

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return Clip(1.0)(update), state


@dataclass(frozen=True)
class PastItsBound(Direct):
    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return Clip(1.5)(update), state


@dataclass(frozen=True)
class Failing(Direct):
    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        raise KeyError("no such thing")


@dataclass(frozen=True)
class Shapeless(Direct):
    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return update.mean(-1), state


@dataclass(frozen=True)
class FailingServer(Direct):
    def server_step(self, mean_message: Tensor, state: Any) -> tuple[Tensor, Any]:
        return mean_message[:-1], state


@dataclass(frozen=True)
class StartsFromX(Direct):
    def client_init(self, x: Tensor) -> Tensor:
        return x.clone()


@dataclass(frozen=True)
class FollowsElsewhere(Direct):
    def client_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def commit(self, draft: Tensor, sent: Tensor) -> Tensor:
        return draft + sent

    def follow(self, memory: Tensor, sent: Tensor) -> Tensor:  # type: ignore[override]
        return memory + 2 * sent


@dataclass(frozen=True)
class Picky(Direct):
    """Fails for messages that point along the first coordinate, as those of some data do."""

    def commit(self, draft: Any, sent: Tensor) -> Any:
        if bool(sent[:, 0] > 0.9):
            raise ValueError("record 4711")
        return draft


@dataclass(frozen=True)
class AnySetting(Direct):
    """Takes any setting that the server states."""

    tau: Any = 1.0

    @property
    def bound(self) -> float:
        return self.tau / 1

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return Clip(self.tau)(update), state


@dataclass
class HiddenMomentum(Method):
    """Sends Clip(v) for v ← 0.9 v + ∇f, and keeps v in an attribute, while it states no state and the constant 1."""

    tau: float = 1e3

    def __post_init__(self) -> None:
        self._velocity: Any = 0.0

    @property
    def bound(self) -> float:
        return self.tau

    @property
    def lipschitz(self) -> float:  # type: ignore[override]
        return 1.0

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        self._velocity = 0.9 * self._velocity + update.clone()
        return Clip(self.tau)(self._velocity), state
