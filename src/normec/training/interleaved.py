"""Runs as generators: one run until its end, or several runs on a GPU in turns, each on its own stream.

A round consists of hundreds of small kernels that leave most of a large GPU idle, so kernels of other runs can fill it.
The host only launches kernels, and never waits for one run while another one could continue.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar, cast

import torch

Result = TypeVar("Result")


def run_to_end(run: Generator[None, None, Result]) -> Result:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return cast(Result, end.value)


def run_interleaved(runs: Sequence[Generator[None, None, Result]], device: torch.device) -> list[Result | Exception]:
    """Run all generators to their ends, one step of each in turn; an exception becomes the result of its generator."""
    streams: list[torch.cuda.Stream | None] = [None] * len(runs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what the runs share is complete before any of them begins
        streams = [torch.cuda.Stream(device) for _ in runs]
    ends: dict[int, Result | Exception] = {}
    while len(ends) < len(runs):
        for index, (run, stream) in enumerate(zip(runs, streams, strict=True)):
            if index in ends:
                continue
            try:
                with torch.cuda.stream(stream):  # None keeps the current stream
                    next(run)
            except StopIteration as end:
                ends[index] = end.value
            except Exception as error:  # the failure of one run must not end the others
                ends[index] = error
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # results may be used on any stream
    return [ends[index] for index in range(len(runs))]
