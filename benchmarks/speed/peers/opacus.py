"""Opacus: one DP-SGD gradient per client with record-level clipping and noise, no client memory."""

from __future__ import annotations

import torch

from ..clock import Clock, run_rounds
from ..workloads import LR, WorkloadData


def run(data: WorkloadData, clock: Clock) -> str:
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    case = data.case
    model = GradSampleModule(data.built.model.to(case.device))
    parameters = list(model.parameters())
    optimizer = DPOptimizer(
        torch.optim.SGD(parameters, lr=LR),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=case.spec.batch,
    )

    def once() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for client in data.draw():
            inputs, targets = data.client_batch(client)
            optimizer.zero_grad()
            data.built.loss(model(inputs), targets).backward()
            optimizer.pre_step()
            torch._foreach_add_(total, [p.grad for p in parameters])
        with torch.no_grad():
            torch._foreach_add_(parameters, total, alpha=-LR / case.clients)

    run_rounds(once, clock)
    return "GroupNorm" if case.images else ""
