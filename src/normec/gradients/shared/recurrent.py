"""Recurrent layers (LSTM, GRU, RNN) with one weight gradient per client.

PyTorch's kernels for whole sequences give the sum of the weight gradients over the batch. Here a layer takes its steps
one by one, each for the records of all clients, and autograd differentiates them down to the sums that enter the gates.
The weight gradients are products of these with the layer's inputs and states, as in a linear layer.
"""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, misc"
# (autograd's Function is untyped)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active as under_vmap
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ...errors import UsageError
from ..precision import autocast_dtype
from .slots import Maybe, NoRule, ParameterSlot, factors, sum_positions, write_products

aten = torch.ops.aten

RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
Weight = tuple[Maybe, ParameterSlot | None]  # a parameter's value, and its slot unless it is frozen
Cell = Callable[[Tensor, Tensor, Tensor, Maybe], tuple[Tensor, Maybe]]


def _lstm(given: Tensor, own: Tensor, h: Tensor, c: Maybe) -> tuple[Tensor, Maybe]:
    """Return the next state from the gates' parts that come from the input (`given`) and from the state (`own`)."""
    if c is None:
        raise TypeError("an LSTM has two states")
    if given.is_cuda and not under_vmap():
        h, c, _ = aten._thnn_fused_lstm_cell(given.to(c.dtype), own.to(c.dtype), c)
        return h, c
    let_in, keep, new, out = (given + own).to(c.dtype).chunk(4, -1)
    c = keep.sigmoid() * c + let_in.sigmoid() * new.tanh()
    return out.sigmoid() * c.tanh(), c


def _gru(given: Tensor, own: Tensor, h: Tensor, c: Maybe) -> tuple[Tensor, Maybe]:
    if given.is_cuda and not under_vmap():
        return aten._thnn_fused_gru_cell(given.to(h.dtype), own.to(h.dtype), h)[0], c
    (reset, keep, new), (own_reset, own_keep, own_new) = (part.to(h.dtype).chunk(3, -1) for part in (given, own))
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return new + (keep + own_keep).sigmoid() * (h - new), c


def _rnn(squash: Callable[[Tensor], Tensor], given: Tensor, own: Tensor, h: Tensor, c: Maybe) -> tuple[Tensor, Maybe]:
    return squash(given + own).to(h.dtype), c


_CELLS: dict[str, Cell] = {
    "LSTM": _lstm,
    "GRU": _gru,
    "RNN_TANH": partial(_rnn, torch.tanh),
    "RNN_RELU": partial(_rnn, torch.relu),
}


class RecurrentRows(Function):
    """One layer in one direction on records ``[records, steps, inputs]``, from the states `h` and, in an LSTM, `c`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h: Tensor,
        c: Maybe,
        w_in: Tensor,
        w_own: Tensor,
        b_in: Maybe,
        b_own: Maybe,
        slots: Sequence[ParameterSlot | None],
        cell: Cell,
    ):
        kind = autocast_dtype(x)
        x, w_in, w_own = x.to(kind), w_in.to(kind), w_own.to(kind)
        biases = [None if bias is None else bias.to(kind) for bias in (b_in, b_own)]
        states = [state for state in (h, c) if state is not None]
        with torch.enable_grad():
            given = F.linear(x.transpose(0, 1), w_in, biases[0]).detach().requires_grad_()
            starts = [state.detach().requires_grad_() for state in states]
            h, c = starts[0], starts[1] if c is not None else None
            before, own, after = [], [], []
            for part in given.unbind(0):
                before.append(h.detach().to(kind))
                own.append(F.linear(h.to(kind), w_own.detach(), biases[1]))
                h, c = cell(part, own[-1], h, c)
                after.append(h)
            found = torch.stack(after, 1).to(kind)
        ends = [state for state in (h, c) if state is not None]
        ctx.steps = [found, *ends], [given, *own, *starts]
        ctx.save_for_backward(x, w_in, torch.stack(before, 1))
        ctx.slots = slots
        return found.detach(), h.detach(), None if c is None else c.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Maybe):
        x, w_in, before = ctx.saved_tensors
        outputs, inputs = ctx.steps
        asked = [grad for grad in grads if grad is not None]
        found = torch.autograd.grad(outputs, inputs, asked)
        steps = x.shape[1]
        given, own, starts = found[0].transpose(0, 1), torch.stack(found[1 : 1 + steps], 1), found[1 + steps :]
        w_in_slot, w_own_slot, b_in_slot, b_own_slot = ctx.slots
        for slot, gates, other in ((w_in_slot, given, x), (w_own_slot, own, before)):
            if slot is not None:
                slot.put(partial(write_products, False), gates, other, products=partial(factors, False))
        for slot, gates in ((b_in_slot, given), (b_own_slot, own)):
            if slot is not None:
                slot.put(sum_positions, gates)
        data = given @ w_in if ctx.needs_input_grad[0] else None
        return data, starts[0], starts[1] if len(starts) > 1 else None, *[None] * 6


def _step_by_step(
    x: Tensor,
    h: Tensor,
    c: Maybe,
    w_in: Tensor,
    w_own: Tensor,
    b_in: Maybe,
    b_own: Maybe,
    slots: object,  # noqa: ARG001
    cell: Cell,
) -> tuple[Tensor, Tensor, Maybe]:
    """What `RecurrentRows` computes, differentiated by autograd."""
    after = []
    for part in F.linear(x, w_in, b_in).unbind(1):
        h, c = cell(part, F.linear(h, w_own, b_own), h, c)
        after.append(h)
    return torch.stack(after, 1), h, c


class RecurrentByStep(TorchFunctionMode):
    """Computes the recurrent layers of a model by operations that vmap knows; PyTorch's own need a state per record.

    On a GPU a layer that notices other weights joins them in memory, and weights under vmap have none of their own.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._attributes = [vars(module) for module in model.modules() if isinstance(module, nn.RNNBase)]

    def __enter__(self) -> RecurrentByStep:
        for attributes in self._attributes:
            attributes["flatten_parameters"] = lambda: None
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for attributes in self._attributes:
            attributes.pop("flatten_parameters", None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _FUNCTIONS or len(args) != 9 or isinstance(args[3], Sequence):  # packed sequences
            return func(*args, **(kwargs or {}))
        x, states, weights, biases, layers, dropout, training, both_ways, batch_first = args
        kind = _FUNCTIONS[func]
        if len(weights) != layers * (2 if both_ways else 1) * (4 if biases else 2):
            raise UsageError("the records of an LSTM with proj_size cannot be clipped one by one; leave proj_size out")
        recurrence = Recurrence(kind, layers, both_ways, biases, _step_by_step, dropout if training else 0.0)
        values = [(weight, None) for weight in weights]
        starts = states if kind == "LSTM" else [states]
        found, *ends = recurrence(x if batch_first else x.transpose(0, 1), starts, values)
        return found if batch_first else found.transpose(0, 1), *ends


_FUNCTIONS = {torch.lstm: "LSTM", torch.gru: "GRU", torch.rnn_tanh: "RNN_TANH", torch.rnn_relu: "RNN_RELU"}


@dataclass(frozen=True)
class Recurrence:
    """The layers of a module, as PyTorch's functions describe them."""

    kind: str
    layers: int
    both_ways: bool
    biases: bool
    layer: Callable[..., tuple[Tensor, Tensor, Maybe]] = RecurrentRows.apply
    dropout: float = 0.0  # between layers

    def __call__(self, x: Tensor, states: Sequence[Tensor], weights: Sequence[Weight]) -> tuple[Tensor, ...]:
        """Return outputs and last states from records ``[records, steps, ·]`` and states ``[layers, records, ·]``.

        `weights` are in the order of the module's parameters.
        """
        each, directions = 4 if self.biases else 2, 2 if self.both_ways else 1
        ends: list[tuple[Tensor, ...]] = []
        for layer in range(self.layers):
            if layer and self.dropout:
                x = F.dropout(x, self.dropout)
            ways = []
            for back in range(directions):
                number = layer * directions + back
                own = [*weights[number * each : (number + 1) * each], *[(None, None)] * (4 - each)]
                start = [state[number] for state in states]
                given = x.flip(1) if back else x
                h, c = start[0], start[1] if len(start) > 1 else None
                slots = tuple(slot for _, slot in own)
                way, *last = self.layer(given, h, c, *(value for value, _ in own), slots, _CELLS[self.kind])
                ways.append(way.flip(1) if back else way)
                ends.append(tuple(end for end in last if end is not None))
            x = torch.cat(ways, -1) if len(ways) > 1 else ways[0]
        return x, *(torch.stack(several) for several in zip(*ends, strict=True))

    @staticmethod
    def of(module: nn.RNNBase) -> Recurrence:
        """Raises `NoRule` if the module does more than these layers."""
        if module.proj_size:
            raise NoRule(f"there is no rule for {type(module).__name__} with proj_size")
        if module.dropout > 0 and module.num_layers > 1:
            raise NoRule(f"{type(module).__name__} draws random numbers client by client")
        return Recurrence(module.mode, module.num_layers, module.bidirectional, module.bias)


def run_module(module: nn.RNNBase, weights: Sequence[Weight], x: Tensor, states: Any = None) -> tuple[Tensor, Any]:
    """Return what the module returns for a batch, by the rule."""
    if not isinstance(x, Tensor) or x.ndim != 3:
        raise NoRule(f"there is no rule for {type(module).__name__} on packed sequences, or on one record alone")
    recurrence = Recurrence.of(module)
    pair = module.mode == "LSTM"
    x = x if module.batch_first else x.transpose(0, 1)
    if states is None:
        blank = x.new_zeros(module.num_layers * (2 if module.bidirectional else 1), len(x), module.hidden_size)
        states = (blank, blank) if pair else blank
    outputs, *ends = recurrence(x, states if pair else [states], weights)
    return (outputs if module.batch_first else outputs.transpose(0, 1)), tuple(ends) if pair else ends[0]
