"""What a user would write by hand: a loop over clients in plain PyTorch, lists of tensors, no library."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from .clock import Clock, drive
from .workloads import ALPHA, BETA, LR, Material


def run(material: Material, clock: Clock) -> str:
    case = material.case
    model, loss = material.built.model.to(case.device), material.built.loss
    parameters = list(model.parameters())
    memories = [[torch.zeros_like(p) for p in parameters] for _ in range(case.clients)]
    estimate = [torch.zeros_like(p) for p in parameters]

    def once() -> None:
        total = [torch.zeros_like(p) for p in parameters]
        for client in material.draw():
            inputs, targets = material.client_batch(client)
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

    drive(once, clock)
    return ""


def _gradient(parameter: Tensor) -> Tensor:
    return cast(Tensor, parameter.grad)
