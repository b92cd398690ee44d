"""The floor, a practical lower bound of a round: one step of SGD on all records of the round in one batch.

The passes over the clients' memory [n, d], which error feedback requires, are measured separately: one pass reads it
for the norms, and one reads and writes it for the update.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from normec.system.processes import keep_freed_memory

from .clock import Clock, run_rounds
from .workloads import LR, Case, WorkloadData

VARIANTS = (
    "eager",
    "kept",
    "one-thread",
    "channels-last",
    "compiled",
    "graphed",
    "compiled-graphed",
    "autotuned-graphed",
)
COMPILED = {
    "compiled": "default",
    "compiled-graphed": "default",
    "autotuned-graphed": "max-autotune-no-cudagraphs",
}


def usual(case: Case) -> list[str]:
    """The variants that may be the fastest, but for the search for kernels that takes minutes for each model."""
    return variants(case) if case.device == "cpu" else ["graphed", "compiled-graphed"]


def variants(case: Case) -> list[str]:
    """The variants for a case; the fastest one that is measured is the floor."""
    if case.device != "cpu":
        graphs = [name for name in VARIANTS if name.endswith("graphed")]
        return ["eager", *(["channels-last"] if case.images else []), *graphs]
    return ["eager", "kept", "channels-last" if case.images else "one-thread", "compiled"]


def step(data: WorkloadData, clock: Clock, variant: str) -> str:
    """Forward, backward and a fused SGD step on the whole batch.

    On the CPU every variant except eager keeps freed memory: glibc returns large freed blocks to the system, and
    allocating them again costs ten percent or more. Compiled image models also have the channels-last layout.
    """
    case = data.case
    if case.device == "cpu" and variant != "eager":
        keep_freed_memory()
    if variant == "one-thread":  # small batches finish before a second thread has started
        torch.set_num_threads(1)
    model, loss = data.built.model.to(case.device), data.built.loss
    inputs, targets = data.batch()
    if case.images and variant in ("channels-last", "graphed", *COMPILED):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR, fused=True)
    forward = torch.compile(model, mode=COMPILED[variant]) if variant in COMPILED else model

    def once() -> None:
        optimizer.zero_grad()
        loss(forward(inputs), targets).backward()
        optimizer.step()

    run_rounds(_captured(once) if variant.endswith("graphed") else once, clock)
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
    run: Callable[[], None] = graph.replay
    return run


def passes(data: WorkloadData, clock: Clock) -> str:
    """Two reads and one write of the participating clients' rows of the memory."""
    case = data.case
    if case.device == "cpu":
        keep_freed_memory()
    dimension = sum(p.numel() for p in data.built.model.parameters() if p.requires_grad)
    memory = torch.ones(case.drawn, dimension, device=case.device)

    def once() -> None:
        norms = torch.linalg.vector_norm(memory, dim=1, keepdim=True)
        memory.div_(norms)

    run_rounds(once, clock)
    return f"[{case.drawn}, {dimension}]"
