"""Problems of plain functions f_1 … f_n of a tensor, such as quadratics and counterexamples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.augment import Augment
from ..errors import UsageError
from .objective import Buffers, checksum


class FunctionProblem:
    """f(x) = (1/n) Σ f_i(x), where autograd can differentiate each f_i; there are no test data."""

    sizes: Tensor | None = None
    augment: Augment | None = None
    statistics = False

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]], x0: Tensor) -> None:
        if not functions:
            raise UsageError("a problem needs at least one client, got none")
        start = torch.as_tensor(x0).detach()
        if not start.is_floating_point() or start.ndim > 1:
            raise UsageError(
                f"x0 must be a scalar or a vector of floats, got {start.dtype} of shape {tuple(start.shape)}; give "
                "x0.float().flatten(), and let the functions take a vector"
            )
        self.functions = list(functions)
        self.clients = len(self.functions)
        self.x0 = start.reshape(-1).clone()
        self._scalar = start.ndim == 0

    def client_loss(
        self,
        x: Tensor,
        client: int,
        rows: Tensor | None,  # noqa: ARG002
        buffers: Buffers,  # noqa: ARG002
        uniforms: Tensor | None,  # noqa: ARG002
        divisor: float | None = None,  # noqa: ARG002
    ) -> Tensor:
        value = self.functions[client](x[0] if self._scalar else x)
        if value.numel() != 1:
            raise UsageError(
                f"f_{client + 1} must return a scalar, got shape {tuple(value.shape)}; use its sum or mean"
            )
        return value.reshape(())

    def initial_buffers(self) -> Buffers:
        return {}

    def evaluate(self, x: Tensor, buffers: Buffers) -> dict[str, float]:  # noqa: ARG002
        return {}

    def model_at(self, x: Tensor, buffers: Buffers) -> None:  # noqa: ARG002
        return None

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> FunctionProblem:
        moved = copy.copy(self)
        moved.x0 = self.x0.to(device=device, dtype=dtype)
        return moved

    def fingerprint(self) -> dict[str, Any]:
        return {
            "clients": self.clients,
            "dimension": len(self.x0),
            "start": checksum(self.x0),
        }
