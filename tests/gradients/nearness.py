"""How near a kernel's numbers are to the expected ones, and whether it wrote nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from normec import Problem

LAST = torch.channels_last


def near(found: Tensor, expected: Tensor, close: float, what: object) -> None:
    """Within `close` of the expected tensor's norm."""
    error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    assert error < close, f"{what}: off by {error:.1e} of its norm"


def framed(clients: int, *shape: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows inside a wider matrix of NaN, as one parameter's rows lie among those of all; (matrix, rows)."""
    size = torch.Size(shape).numel()
    matrix = torch.full((clients, size + 7), torch.nan, device=device)
    return matrix, matrix[:, 3:-4].view(clients, *shape)


def untouched(matrix: Tensor) -> None:
    assert matrix[:, :3].isnan().all()
    assert matrix[:, -4:].isnan().all()


def nodes(root: object) -> list[object]:
    """Every step of a backward pass."""
    found: dict[object, None] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting.extend(before for before, _ in node.next_functions)  # type: ignore[attr-defined]
    return list(found)


def by_autograd(of: Problem, grads: Tensor, x: Tensor, labels: Tensor, what: object) -> None:
    """Clients' gradients of the cross entropy at x₀ against autograd in float64, client by client."""
    reference = of.model.double().cpu().train()
    for i, (own, label) in enumerate(zip(x.double().chunk(len(grads)), labels.chunk(len(grads)), strict=True)):
        reference.zero_grad()
        F.cross_entropy(reference(own), label).backward()  # type: ignore[no-untyped-call]
        trained = [p for p in reference.parameters() if p.requires_grad]
        expected = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
        near(grads[i].cpu(), expected, 1e-4, (what, i))
