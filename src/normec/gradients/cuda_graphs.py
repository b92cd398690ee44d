"""CUDA graphs: a round's hundreds of small kernels recorded once and launched as one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..problems.objective import Buffers

Result = TypeVar("Result")

_PATIENCE = 3  # a shape is recorded when it has been seen so often
MOST = 16  # graphs kept; each holds the memory of its activations


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Any


class CudaGraphs:
    """Calls of one function, replayed from a recording once the same call has come often enough."""

    def __init__(self, what: str = "this model") -> None:
        """`what` it is that is recorded, for the line that says why it cannot be."""
        self._what = what
        self._seen: dict[tuple[object, ...], int] = {}
        self._kept: dict[tuple[object, ...], _Recorded] = {}
        self._pool: Any = None
        self._off = False

    def run(
        self,
        function: Callable[..., Result],
        moving: Sequence[Tensor],
        fixed: Sequence[Tensor],
        name: str,
        changed: Buffers | None = None,
    ) -> Result:
        """function(*moving). `fixed` are tensors it uses in place: a recording is good for these addresses only.

        `changed`: those of them that the function changes, kept whole while it is tried out for recording. Without
        them it is not tried out, but watched in the call before: for functions that no library's choices depend on.
        """
        key = (name, *(tuple(t.shape) for t in moving), *(t.data_ptr() for t in fixed))
        kept = self._kept.get(key)
        if kept is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._off or self._seen[key] < _PATIENCE or len(self._kept) >= MOST:
                watched = changed is None and not self._off and self._seen[key] == _PATIENCE - 1
                return self._watched(function, moving) if watched else function(*moving)
            kept = self._record(function, moving, changed)
            if kept is None:
                return function(*moving)
            self._kept[key] = kept
        for held, given in zip(kept.inputs, moving, strict=True):
            held.copy_(given)
        kept.graph.replay()
        output: Result = kept.output
        return output

    def _watched(self, function: Callable[..., Result], moving: Sequence[Tensor]) -> Result:
        """function(*moving); if it waits for the device, it will not be recorded."""
        with _waits() as found:
            result = function(*moving)
        if found:
            self._give_up("it waits for the device")
        return result

    def _give_up(self, reason: str) -> None:
        self._off = True
        logging.getLogger("normec").warning("no CUDA graph for %s: %s", self._what, reason)

    def _record(
        self, function: Callable[..., Any], moving: Sequence[Tensor], changed: Buffers | None
    ) -> _Recorded | None:
        inputs = [tensor.clone() for tensor in moving]
        before = {name: tensor.clone() for name, tensor in (changed or {}).items()}
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        try:
            if changed is not None:
                side.wait_stream(here)
                with torch.cuda.stream(side):
                    function(*inputs)  # libraries choose their kernels and take their workspaces before the recording
                    with _unwaiting():
                        function(*inputs)
                here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = function(*inputs)
            self._pool = graph.pool()
            return _Recorded(graph, inputs, output)
        except RuntimeError as error:  # a model that waits for the device cannot be recorded
            torch.cuda.set_stream(here)  # a recording that fails leaves its own in place
            here.wait_stream(side)
            self._give_up(str(error).splitlines()[0])
            return None
        finally:
            for name, tensor in (changed or {}).items():
                tensor.copy_(before[name])


@contextmanager
def _unwaiting() -> Iterator[None]:
    """A wait for the device within is an error; met in a recording it would leave torch's allocator in disorder."""
    with _sync_mode("error"):
        yield


@contextmanager
def _waits() -> Iterator[list[str]]:
    """What is said of waits for the device within; they happen all the same."""
    found: list[str] = []
    with _sync_mode("warn"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield found
        found += [str(line.message) for line in said if "synchroniz" in str(line.message)]


@contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that not every wait is found
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
