"""Methods as users write them, in a file that server and parties both have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normec import Clip, Method, NormEC, UsageError


@dataclass(frozen=True)
class Clip21SGDM(Method):
    """v ← (1−η)v + η∇f;  m = Clip_τ(v − g);  g ← g + m;  ĝ ← ĝ + mean m;  x ← x − γĝ."""

    tau: float = 0.5
    eta: float = 0.3

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise UsageError(f"eta must lie in (0, 1], got {self.eta}")

    @property
    def bound(self) -> float:
        return self.tau

    def client_init(self, x: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(x), "memory": torch.zeros_like(x)}

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        v = (1 - self.eta) * state["momentum"] + self.eta * update
        return Clip(self.tau)(v - state["memory"]), {**state, "momentum": v}

    def commit(self, draft: Any, sent: Tensor) -> Any:
        return {**draft, "memory": draft["memory"] + sent}

    def follow(self, memory: Tensor, sent: Tensor) -> Tensor:  # type: ignore[override]
        return memory + sent

    def server_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def server_step(self, mean_message: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state + mean_message, state + mean_message


@dataclass(frozen=True)
class Averaging(Method):
    """Sends Clip(∇f − a/(1 + s)) for an average a and a count s; absent clients halve a. The server cannot follow a."""

    tau: float = 0.5

    @property
    def bound(self) -> float:
        return self.tau

    def client_init(self, x: Tensor) -> dict[str, Tensor]:
        return {"average": torch.ones_like(x), "seen": torch.zeros((), dtype=torch.int64)}

    def message(self, update: Tensor, state: Any, key: Any = None) -> tuple[Tensor, Any]:  # noqa: ARG002
        message = Clip(self.tau)(update - state["average"] / (1 + state["seen"])[:, None])
        return message, {"average": 0.9 * state["average"] + 0.1 * update, "seen": state["seen"] + 1}

    def commit(self, draft: Any, sent: Tensor) -> Any:
        return {**draft, "average": draft["average"] + 0.01 * sent}

    def absent(self, state: Any, rounds: int = 1) -> Any:
        return {**state, "average": state["average"] * 0.5**rounds}


@dataclass(frozen=True)
class LocalAverage(Method):
    """Sends Clip(a) for an average a of the gradients, which is the whole state: no message says what it is."""

    tau: float = 0.5

    @property
    def bound(self) -> float:
        return self.tau

    def client_init(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def message(self, update: Tensor, state: Tensor, key: Any = None) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        average = 0.9 * state + 0.1 * update
        return Clip(self.tau)(average), average


@dataclass(frozen=True)
class ServerMomentum(NormEC):
    """NormEC whose server keeps a velocity: w ← 0.9 w + ĝ, x ← x − γw. `steps` are the calls of server_step."""

    steps = 0

    def server_init(self, x: Tensor) -> Any:
        return {"estimate": torch.zeros_like(x), "velocity": torch.zeros_like(x), "rounds": torch.zeros(1)}

    def server_step(self, mean_message: Tensor, state: Any) -> tuple[Tensor, Any]:
        type(self).steps += 1
        estimate = state["estimate"] + self.beta * mean_message
        velocity = 0.9 * state["velocity"] + estimate
        return velocity, {"estimate": estimate, "velocity": velocity, "rounds": state["rounds"] + 1}


@dataclass(frozen=True)
class Unbounded(Clip21SGDM):
    """Clip21SGDM that states no bound."""

    @property
    def bound(self) -> float:
        return float("inf")


@dataclass(frozen=True)
class Biased(Clip21SGDM):
    """Clip21SGDM whose memory starts at 0.25 and is kept in double precision."""

    def client_init(self, x: Tensor) -> dict[str, Tensor]:
        return {"momentum": torch.zeros_like(x), "memory": torch.full_like(x, 0.25, dtype=torch.float64)}

    def follow(self, memory: Tensor, sent: Tensor) -> Tensor:
        return memory + sent

    def server_init(self, x: Tensor) -> Tensor:
        return torch.full_like(x, 0.25)
