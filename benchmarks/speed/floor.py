"""What no federated round can undercut by much: one step of SGD on all the round's records in one batch.

Beside it, the passes over the clients' memory [n, d] that error feedback cannot do without: one to read it for the
norms, one to read and write it for the update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from normec.system.processes import keep_freed_memory

from .clock import Clock, drive
from .workloads import LR, Case, Material

VARIANTS = ("eager", "kept", "one-thread", "channels-last", "compiled", "autotuned", "graphed")
COMPILED = {"compiled": "default", "autotuned": "max-autotune-no-cudagraphs", "graphed": "max-autotune-no-cudagraphs"}


def variants(case: Case) -> list[str]:
    """The ways to run one batch that are worth trying; the fastest is the floor."""
    if case.device != "cpu":
        return ["eager", *(["channels-last"] if case.images else []), "autotuned", "graphed"]
    return ["eager", "kept", "channels-last" if case.images else "one-thread", "compiled"]


def step(material: Material, clock: Clock, variant: str) -> str:
    """Forward, backward and a fused SGD step on the whole batch.

    On the CPU every variant but eager keeps its memory: glibc gives large blocks back to the system whenever they are
    freed, and fetching them anew costs a tenth or more. Compiled image models are in channels-last layout too.
    """
    case = material.case
    if case.device == "cpu" and variant != "eager":
        keep_freed_memory()
    if variant == "one-thread":  # small batches are done before a second thread has woken up
        torch.set_num_threads(1)
    model, loss = material.built.model.to(case.device), material.built.loss
    inputs, targets = material.batch()
    if case.images and variant in ("channels-last", *COMPILED):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, fused=True)
    forward = torch.compile(model, mode=COMPILED[variant]) if variant in COMPILED else model

    def once() -> None:
        optimizer.zero_grad()
        loss(forward(inputs), targets).backward()
        optimizer.step()

    drive(_captured(once) if variant == "graphed" else once, clock)
    return ""


def _captured(once: Callable[[], None]) -> Callable[[], None]:
    """The whole step as one CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            once()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()
    replay: Callable[[], None] = graph.replay
    return replay


def passes(material: Material, clock: Clock) -> str:
    """Two reads and one write of the drawn clients' rows of the memory."""
    case = material.case
    if case.device == "cpu":
        keep_freed_memory()
    dimension = sum(p.numel() for p in material.built.model.parameters())
    memory = torch.ones(case.drawn, dimension, device=case.device)

    def once() -> None:
        norms = torch.linalg.vector_norm(memory, dim=1, keepdim=True)
        memory.div_(norms)

    drive(once, clock)
    return f"[{case.drawn}, {dimension}]"
