"""The method as a user would write it by hand: a loop over clients in plain PyTorch with lists of tensors."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from .clock import Clock, run_rounds
from .workloads import ALPHA, BETA, LR, WorkloadData


def run(data: WorkloadData, clock: Clock) -> str:
    case = data.case
    model, loss = data.built.model.to(case.device), data.built.loss
    parameters = [p for p in model.parameters() if p.requires_grad]
    memories = [[torch.zeros_like(p) for p in parameters] for _ in range(case.clients)]
    estimate = [torch.zeros_like(p) for p in parameters]

    def once() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for client in data.draw():
            inputs, targets = data.client_batch(client)
            model.zero_grad()
            loss(model(inputs), targets).backward()
            with torch.no_grad():
                memory = memories[client]
                difference = [_gradient(p) - g for p, g in zip(parameters, memory, strict=True)]
                scale = 1 / (ALPHA + get_total_norm(difference))
                for d, g, t in zip(difference, memory, total, strict=True):
                    g += BETA * scale * d
                    t += scale * d
        with torch.no_grad():
            for e, t in zip(estimate, total, strict=True):
                e += BETA / case.clients * t
            scale = LR / get_total_norm(estimate)
            for p, e in zip(parameters, estimate, strict=True):
                p.sub_(scale * e)

    run_rounds(once, clock)
    return ""


def _gradient(parameter: Tensor) -> Tensor:
    return cast(Tensor, parameter.grad)
