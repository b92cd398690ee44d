"""CUDA graphs: the hundreds of small kernels of a round are captured once and then launched together."""

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

_PATIENCE = 3  # a call is captured when it has occurred this often
MOST = 16  # the most graphs that are kept; each holds the memory of its activations


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Any


class CudaGraphs:
    """Runs a function, and replays a captured graph of it once the same call has occurred often enough."""

    def __init__(self, what: str = "this model", patience: int = _PATIENCE) -> None:
        """`what` names the function in the warning that it cannot be captured.

        A call is captured when it occurs for the `patience`-th time.
        """
        self._what, self._patience = what, patience
        self._seen: dict[tuple[object, ...], int] = {}
        self._kept: dict[tuple[object, ...], _Recorded] = {}
        self._pool: Any = None
        self.off = False  # whether nothing is recorded any more

    def run(
        self,
        function: Callable[..., Result],
        moving: Sequence[Tensor],
        fixed: Sequence[Tensor],
        name: str,
        changed: Buffers | None = None,
        generators: Sequence[torch.Generator] = (),
        seed: Callable[[], None] = lambda: None,
    ) -> Result:
        """Return function(*moving). It uses the tensors `fixed` in place; a graph is valid for their addresses only.

        `changed` are the fixed tensors that the function changes; they are restored after trial runs before the
        capture. Without `changed` there are no trial runs, and the call before is checked for synchronisation instead.
        This suits functions for which no library has to choose kernels or allocate workspaces.

        The function may draw random numbers from `generators`; `seed` is called before it runs and before each replay.
        """
        key = (name, *(tuple(t.shape) for t in moving), *(t.data_ptr() for t in fixed))
        kept = self._kept.get(key)
        if kept is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self.off or self._seen[key] < self._patience or len(self._kept) >= MOST:
                watched = changed is None and not self.off and self._seen[key] == self._patience - 1
                seed()
                return self._watched(function, moving) if watched else function(*moving)
            kept = self._record(function, moving, changed, generators)
            if kept is None:
                seed()
                return function(*moving)
            self._kept[key] = kept
        for held, given in zip(kept.inputs, moving, strict=True):
            held.copy_(given)
        seed()
        kept.graph.replay()
        output: Result = kept.output
        return output

    def _watched(self, function: Callable[..., Result], moving: Sequence[Tensor]) -> Result:
        """Return function(*moving); a function that waits for the device will not be captured."""
        with _waits() as found:
            result = function(*moving)
        if found:
            self.give_up("it waits for the device")
        return result

    def give_up(self, reason: str) -> None:
        """Record nothing from now on."""
        self.off = True
        logging.getLogger("normec").warning("no CUDA graph for %s: %s", self._what, reason)

    def _record(
        self,
        function: Callable[..., Any],
        moving: Sequence[Tensor],
        changed: Buffers | None,
        generators: Sequence[torch.Generator],
    ) -> _Recorded | None:
        inputs = [tensor.clone() for tensor in moving]
        before = {name: tensor.clone() for name, tensor in (changed or {}).items()}
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        try:
            if changed is not None:
                side.wait_stream(here)
                with torch.cuda.stream(side):
                    function(*inputs)  # libraries choose kernels and allocate workspaces before the capture
                    with _unwaiting():
                        function(*inputs)
                here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            with torch.cuda.graph(graph, pool=self._pool):
                output = function(*inputs)
            self._pool = graph.pool()
            return _Recorded(graph, inputs, output)
        except RuntimeError as error:  # a model that waits for the device cannot be captured
            torch.cuda.set_stream(here)  # a failed capture leaves its own stream as the current one
            here.wait_stream(side)
            self.give_up(str(error).splitlines()[0])
            return None
        finally:
            for name, tensor in (changed or {}).items():
                tensor.copy_(before[name])


@contextmanager
def _unwaiting() -> Iterator[None]:
    """Make waiting for the device an error; during a capture it would leave torch's allocator in a bad state."""
    with _sync_mode("error"):
        yield


@contextmanager
def _waits() -> Iterator[list[str]]:
    """Collect warnings about waiting for the device, without preventing it."""
    found: list[str] = []
    with _sync_mode("warn"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        yield found
        found += [str(line.message) for line in said if "synchroniz" in str(line.message)]


@contextmanager
def _sync_mode(mode: str) -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it does not detect every wait
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
