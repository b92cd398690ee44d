"""The shared pass as one graph of operations, which TorchInductor compiles: it fuses the small ones between products.

The forward and backward pass of a block runs once under a tracer, with all rules, and the tracer keeps its operations:
a function from x and the records to the losses and the gradients of every parameter. The graph does in every round what
Python did once, as a CUDA graph does. So the tracer sees tensors without values: code that reads values in any way, as
C++ code does where lengths are given in a tensor, fails and is refused. Otherwise a number that was read in the data of
one client would decide in every later round.

With a clip for each record there are two graphs. The first ends with the gradients of single records, or what they are
made of; the second adds them up, with its products in the precision of x.

Compiling takes tens of seconds and depends on the shapes, so only rounds of the usual shape are compiled: those of all
clients, or of the usual number of drawn clients. All others, and evaluations, run uncompiled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ...problems.objective import Buffers
from ..precision import products
from ..record_clip import RecordClip
from .record_sums import Use, add_up, tables
from .slots import GradientSink, NoRule, ParameterSlot

Graph = Callable[..., tuple[Tensor, ...]]

_MOST = 2  # the most shapes that are compiled
_UNTRACED = "the model cannot be traced: it reads values, or leaves tensors of one pass for the next"

log = logging.getLogger("normec")


@dataclass(frozen=True)
class Compilation:
    """What is compiled: rounds of `drawn` clients (None: all of them; 0: their number varies, so nothing is).

    Without `compiling` the pass is traced and its graph runs as it is. With `every` shape, nothing else runs: this is
    for comparisons, whose few clients have none of the usual shapes.
    """

    drawn: int | None = None
    compiling: bool = True
    every: bool = False


class CompiledPass:
    """The passes of the usual shapes; nothing is chosen by measured times, so that a second run has the same bits."""

    def __init__(
        self,
        sink: GradientSink,
        back_and_forth: Callable[..., Tensor],
        loss: object,
        how: Compilation,
        clip: RecordClip | None = None,
    ) -> None:
        """`back_and_forth(inputs, targets, modes)` fills the sink and returns the losses, while `modes` are active.

        It calls the user's own `loss`.
        """
        self._sink, self._back_and_forth, self._loss, self._how = sink, back_and_forth, loss, how
        self._graphs: dict[tuple[int, ...], Graph] = {}
        self._clip = clip
        self._shapes: set[tuple[int, ...]] = set()
        self.failed = False  # whether a graph runs as it is because the compiler has failed

    def use(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Compile passes of so many clients and records of each; of many shapes, the most common ones."""
        self._shapes = {shape for shape, _ in Counter(shapes).most_common(_MOST)}
        self._graphs.clear()

    def suits(self, records: Tensor) -> bool:
        """Whether a pass over records of this shape, ``[clients, records, ...]``, is one of the usual ones."""
        return self._how.every or tuple(records.shape[:2]) in self._shapes

    @property
    def traced(self) -> set[tuple[int, ...]]:
        """The shapes that have occurred."""
        return set(self._graphs)

    def run(
        self, x: Tensor, grads: Tensor, own: Buffers, ready: Tensor, targets: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """Fill `grads` and update the buffers `own` of a block; returns the losses.

        With a clip, `weights` are those of `record_sums.add_up`, none of them zero; the buffers stay as they are.
        """
        inputs = (x, ready, targets, *own.values())
        if weights is not None and self._clip is not None:
            shape = tuple(weights.shape)
            if shape not in self._graphs:
                self._graphs[shape] = self._compile_clipped(list(own), inputs, weights, self._clip)
            losses, *found = self._graphs[shape](weights, *inputs)
        else:
            shape = tuple(targets.shape[:2])
            if shape not in self._graphs:
                self._graphs[shape] = self._compile(list(own), inputs)
            losses, *found = self._graphs[shape](*inputs)
        rows, values = found[: len(self._sink.slots)], found[len(self._sink.slots) :]
        torch.cat([part.reshape(len(grads), -1) for part in rows], 1, out=grads)
        for buffer, value in zip(own.values(), values, strict=weights is None):
            buffer.copy_(value)
        return losses

    def _compile(self, names: list[str], inputs: tuple[Tensor, ...]) -> Graph:
        """Return the pass as a function of x, the inputs, the targets and the buffers, which it leaves as they are."""

        def once(x: Tensor, ready: Tensor, targets: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
            rows = [x.new_empty(len(targets), *slot.shape) for slot in self._sink.slots]
            own = {name: buffer.clone() for name, buffer in zip(names, buffers, strict=True)}
            self._sink.fill(x, x.new_empty(len(targets), 0), own, rows)
            losses = self._back_and_forth(ready, targets, _modes())
            self._sink.finish()
            return losses, *rows, *own.values()

        return self._fused(self._pass_of(once, inputs), inputs)

    def _compile_clipped(
        self, names: list[str], inputs: tuple[Tensor, ...], weights: Tensor, clip: RecordClip
    ) -> Graph:
        """Return the pass as a function of the weights and the same; it returns the losses and the clipped sums."""
        sink, clients = self._sink, len(weights)
        held: list[ParameterSlot] = []  # with a table of all gradients, which is a result of the first graph
        uses: dict[ParameterSlot, list[tuple[Use, int]]] = {}  # the others: each use, and how many tensors it has

        def once(x: Tensor, ready: Tensor, targets: Tensor, *buffers: Tensor) -> tuple[Tensor, ...]:
            own = {name: buffer.clone() for name, buffer in zip(names, buffers, strict=True)}
            sink.fill(x, x.new_empty(clients, 0), own)
            losses = self._back_and_forth(ready, targets, _modes())
            found = tables(sink.uses, weights)
            parts = list(found.values())
            held[:] = found
            for slot, several in sink.uses.items():
                if slot not in found:
                    exact = [use.exact(x.dtype) for use in several]
                    uses[slot] = [(replace(use, tensors=()), len(use.tensors)) for use in exact]
                    parts += [tensor for use in exact for tensor in use.tensors]
            sink.clear()
            return losses, *parts

        def sums(weights: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
            given, rows = iter(parts), {slot: weights.new_zeros(clients, *slot.shape) for slot in sink.slots}
            grads = {slot: next(given) for slot in held}
            others = {
                slot: [replace(use, tensors=tuple(islice(given, count))) for use, count in several]
                for slot, several in uses.items()
            }
            add_up(others, grads, rows.__getitem__, clip, weights, len(sink.slots), whole=True)
            return tuple(rows.values())

        first = self._fused(self._pass_of(once, inputs), inputs)
        parts = first(*inputs)[1:]
        with products("float32"):
            second = self._fused(_traced(sums, (weights, *parts)), (weights, *parts))

        def clipped(weights: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
            losses, *parts = first(*inputs)
            with products("float32"):
                return losses, *second(weights, *parts)

        return clipped

    def _pass_of(self, once: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
        """Return the graph of a pass, which must not leave tensors without values in the user's loss."""
        from torch._subclasses.fake_tensor import FakeTensor

        graph = _traced(once, inputs)
        if any(isinstance(held, FakeTensor) for held in _attributes(self._loss)) or _changes_constants(graph):
            raise NoRule(_UNTRACED)
        return graph

    def _fused(self, graph: Any, inputs: tuple[Tensor, ...]) -> Graph:
        """Return the compiled graph, or the graph itself where TorchInductor cannot work."""
        if not self._how.compiling:
            plain: Graph = graph
            return plain
        try:
            with torch.no_grad(), torch._C.DisableTorchFunction():  # a compiler may read its own values
                with _deterministic():
                    fused: Graph = torch._inductor.compile(graph, list(inputs), options={"deterministic": True})
                fused(*inputs)  # kernels may be compiled at their first launch
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.warning("the pass is not compiled: TorchInductor failed (%s)", type(error).__name__)
            self.failed = True
            traced: Graph = graph
            return traced
        return fused


def _attributes(part: object) -> Iterator[object]:
    """Yield what an object, or a module and those inside it, hold in attributes, and in lists of them."""
    for one in part.modules() if isinstance(part, nn.Module) else [part]:
        for value in getattr(one, "__dict__", {}).values():
            yield from value if isinstance(value, list | tuple) else (value,)


def _changes_constants(graph: Any) -> bool:
    """Whether a graph writes to a tensor that is not made in it, such as one in an attribute, or to a view of one."""
    kept = set()
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            kept.add(node)
        schema = getattr(node.target, "_schema", None)
        for argument, given in zip(schema.arguments if schema is not None else (), node.args, strict=False):
            if argument.alias_info is not None and given in kept:
                if argument.alias_info.is_write:
                    return True
                kept.add(node)
    return False


def _modes() -> tuple[type, ...]:
    """Return what the tracer has at work: itself, and tensors without values."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

    return ProxyTorchDispatchMode, FakeTensorMode, FakeTensor


def _traced(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Any:
    """Return the function's operations as a graph."""
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        with torch.no_grad():
            return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)
    except (NoRule, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise NoRule(_UNTRACED) from error


@contextmanager
def _deterministic() -> Iterator[None]:
    """Let the compiler choose operations whose sums do not depend on the order in which threads arrive."""
    before = torch.are_deterministic_algorithms_enabled()
    warned = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
