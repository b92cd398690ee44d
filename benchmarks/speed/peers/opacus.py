"""Opacus, the per-record case: each client one DP-SGD gradient, every record clipped, noise added; no client memory."""

from __future__ import annotations

import torch

from ..clock import Clock, drive
from ..workloads import LR, Material


def run(material: Material, clock: Clock) -> str:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    case = material.case
    model = GradSampleModule(material.built.model.to(case.device))
    parameters = list(model.parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters, lr=LR),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=case.spec.batch,
    )

    def once() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for client in material.draw():
            inputs, targets = material.client_batch(client)
            optimizer.zero_grad()
            material.built.loss(model(inputs), targets).backward()
            optimizer.pre_step()
            torch._foreach_add_(total, [p.grad for p in parameters])
        with torch.no_grad():
            torch._foreach_add_(parameters, total, alpha=-LR / case.clients)

    drive(once, clock)
    return "GroupNorm" if case.images else ""
