"""Runs that are generators, taken to their ends: one, or several on a GPU, each on a stream of its own, in turns.

A run's round is hundreds of small kernels that leave most of a large GPU idle; another run's kernels fill it. The host
only launches, and never waits for one run while another could go on.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar, cast

import torch

Result = TypeVar("Result")


def run_to_end(run: Generator[None, None, Result]) -> Result:
    """What one generator returns when it has been taken to its end."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return cast(Result, end.value)


def run_interleaved(runs: Sequence[Generator[None, None, Result]], device: torch.device) -> list[Result | Exception]:
    """Take all generators to their ends, a step of each in turn; what one raises is its result, the others go on."""
    streams: list[torch.cuda.Stream | None] = [None] * len(runs)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what they share is there before any of them begins
        streams = [torch.cuda.Stream(device) for _ in runs]
    ends: dict[int, Result | Exception] = {}
    while len(ends) < len(runs):
        for place, (run, stream) in enumerate(zip(runs, streams, strict=True)):
            if place in ends:
                continue
            try:
                with torch.cuda.stream(stream):  # None: no stream
                    next(run)
            except StopIteration as end:
                ends[place] = end.value
            except Exception as error:  # the border between one run and the others
                ends[place] = error
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # what they made may be used on any stream
    return [ends[place] for place in range(len(runs))]
