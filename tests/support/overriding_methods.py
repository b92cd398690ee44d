"""Methods that override one function or several, in a file that a party can load by its path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import normec
from normec import Clip, NormEC


@dataclass(frozen=True)
class Signs(normec.Method):
    """Sends ±1/√d in every coordinate; no state anywhere."""

    @property
    def bound(self) -> float:
        return 1.0

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        return update.sign() / update.shape[-1] ** 0.5, state


@dataclass(frozen=True)
class Counting(normec.Method):
    """Clients have two states, of which one is a whole number; absent clients halve the other. The server has two."""

    @property
    def bound(self) -> float:
        return 2.0

    def client_init(self, x: Tensor) -> dict[str, Tensor]:
        return {"last": torch.ones_like(x), "rounds": torch.zeros((), dtype=torch.int64)}

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        weight = 1 / (1 + state["rounds"].to(update.dtype))[:, None]
        v = update - weight * state["last"]
        return Clip(2.0)(v), {"last": update, "rounds": state["rounds"] + 1}

    def commit(self, draft: Any, sent: Tensor) -> Any:
        return {**draft, "last": 0.5 * draft["last"] + 0.1 * sent}

    def absent(self, state: Any, rounds: int = 1) -> Any:
        return {**state, "last": state["last"] * 0.5**rounds}

    def server_init(self, x: Tensor) -> dict[str, Tensor]:
        return {"velocity": torch.zeros_like(x), "step": torch.zeros((), dtype=torch.float64)}

    def server_step(self, mean_message: Tensor, state: Any) -> tuple[Tensor, Any]:
        velocity = 0.5 * state["velocity"] + mean_message
        return velocity / (1 + state["step"]).to(velocity), {"velocity": velocity, "step": state["step"] + 0.1}


class Stubborn(NormEC):
    """Memories never move, though the estimate does."""

    def commit(self, draft: Tensor, sent: Tensor) -> Tensor:  # noqa: ARG002
        return draft


class Forgetful(NormEC):
    """Clients that are absent forget everything, though decay is 0."""

    def absent(self, state: Tensor, rounds: int = 1) -> Tensor:  # noqa: ARG002
        return 0 * state


class Started(NormEC):
    """Memories begin at one."""

    def client_init(self, x: Tensor) -> Tensor:
        return torch.ones_like(x)


class Still(NormEC):
    """The server never moves."""

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(mean_message), state


class Rotated(NormEC):
    """Messages have their coordinates in reverse order."""

    def message(self, update: Tensor, state: Tensor, key: Any = None) -> tuple[Tensor, Tensor]:
        message, draft = super().message(update, state, key)
        return message.flip(-1), draft
