"""The shared pass for models of any structure: rules by operation instead of by module.

The model runs under vmap over clients, so its code sees the batch of one client. Every parameter is a table with a row
for each client, all of them views of the same numbers. Autograd therefore gives one gradient per client for whatever
the model does with a parameter: broadcast it, concatenate it, slice it, or use it twice. No use can be overlooked.

That alone would multiply every client's batch with a table of weights. `OperationRules` watches the operations instead.
Where a whole parameter meets an operation that has a rule (a linear map, a convolution, an embedding, a norm), the rule
computes the output of all clients at once and writes the gradients of this use itself (`ParameterSlot.put`). The
gradients of all other uses are read from the table (`OperationModel.collect`), and the two are added.

With clipping by record, vmap runs over records, and "client" means record in this module.
"""

# mypy: disable-error-code="override, no-untyped-def, no-untyped-call, no-any-return, misc"
# (autograd's Function is untyped)

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn, vmap
from torch._C._functorch import is_batchedtensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.modules import module as torch_modules
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ...problems.objective import Buffers
from ...problems.problem import Problem, buffer_owner
from ..own_vmap_rules import RefuseOwnVmapRules
from .convolution import ConvRows, Geometry
from .layers import AffineRows, EmbeddingRows, LayerNormRows, LinearRows
from .lazy_norms import may_wait, waiting
from .norms import BatchNormRows
from .recurrent import Recurrence
from .slots import GradientSink, Maybe, NoRule, ParameterSlot, parameter_slots, values_of


class OperationModel:
    """A copy of the model that computes the losses of many clients under vmap, with rules by operation."""

    def __init__(self, problem: Problem) -> None:
        """Raises `NoRule` if a parameter cannot be replaced, or the model draws random numbers or has backward hooks.

        The backward pass does not run under vmap, so a hook in it would see the gradients of several clients.
        """
        self._problem, self.model, self.sink = problem, copy.deepcopy(problem.model), GradientSink()
        slots = parameter_slots(self.model, self.sink)
        numbers = {parameter: number for number, parameter in enumerate(slots)}
        # Of each use of a parameter: the module, the name in it and the number of the slot.
        self._owners: list[tuple[nn.Module, str, int]] = []
        if torch_modules._global_backward_hooks or torch_modules._global_backward_pre_hooks:
            raise NoRule("a global backward hook would see the gradients of several clients together")
        for module in self.model.modules():
            kind = type(module).__name__
            if module._backward_hooks or module._backward_pre_hooks:
                raise NoRule(f"a backward hook of {kind} would see the gradients of several clients together")
            if any(isinstance(held, nn.Parameter) and held in slots for held in _attributes(module)):
                raise NoRule(f"{kind} keeps its parameters in a list of its own")
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise NoRule(f"{kind} draws random numbers client by client")
            if isinstance(module, nn.RNNBase):
                Recurrence.of(module)  # raises `NoRule`
            held = module._parameters.items()
            self._owners += [(module, key, numbers[p]) for key, p in held if p is not None and p in numbers]
        self.sink.waits = may_wait(self.model)
        self._buffers = {name: buffer_owner(self.model, name) for name, _ in self.model.named_buffers()}
        self._tables: list[Tensor] = []

    def losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each client, from inputs ``[c · B, ...]`` and targets ``[c, B, ...]``."""
        clients = len(targets)
        self._tables = [slot.value.detach().expand(clients, *slot.shape).requires_grad_() for slot in self.sink.slots]
        # A record alone has no statistics, so clipping by record leaves the model's own buffers in place.
        buffers: Buffers = {} if self.sink.by_record else self.sink.buffers
        self.model.train()
        try:
            each = vmap(self._one, randomness="error")
            losses, assigned = each(self._tables, buffers, inputs.unflatten(0, (clients, -1)), targets)
        except (RuntimeError, ValueError) as error:
            if "vmap" not in str(error):
                raise
            drawn = "random" in str(error)
            reason = "the model draws random numbers client by client" if drawn else "vmap has no rule for the model"
            raise NoRule(reason) from error
        for module in self.model.modules():
            if any(map(is_batchedtensor, _attributes(module))):
                raise NoRule(f"{type(module).__name__} keeps what it saw in an attribute")
        for name, values in assigned.items():
            buffers[name].copy_(values)
        return losses

    def guard(self, modes: Collection[type] = ()) -> RefuseOwnVmapRules:
        """Return the context of the forward and backward pass, in which no code of the user sees several clients."""
        return RefuseOwnVmapRules(NoRule, (_AcrossClients,), modes)

    @torch.no_grad()
    def collect(self) -> None:
        """After the backward pass: add the gradients of the uses that no rule has seen."""
        for slot, table in zip(self.sink.slots, self._tables, strict=True):
            if table.grad is not None:
                slot.put(_sum_parts, table.grad)
        self._tables = []

    def _one(
        self, parameters: Sequence[Tensor], buffers: Mapping[str, Tensor], inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Buffers]:
        """Return the loss of one client, and the buffers that the model has assigned instead of changed in place."""
        before = [module._parameters[key] for module, key, _ in self._owners]
        lists = [(m, m._flat_weights, m._flat_weight_refs) for m in self.model.modules() if isinstance(m, nn.RNNBase)]
        own = {name: self._buffers[name][0]._buffers[self._buffers[name][1]] for name in buffers}
        known = {id(tensor): (tensor, slot) for tensor, slot in zip(parameters, self.sink.slots, strict=True)}
        try:
            for module, key, number in self._owners:
                module._parameters[key] = parameters[number]  # type: ignore[assignment]
            for recurrent, _, _ in lists:
                weights = [recurrent._parameters[key] for key in recurrent._flat_weights_names]
                recurrent._flat_weights = weights
                # Otherwise the layer would notice other weights, and on a GPU join them in memory, which they have not.
                recurrent._flat_weight_refs = [None if one is None else weakref.ref(one) for one in weights]
            for name, value in buffers.items():
                module, key = self._buffers[name]
                module._buffers[key] = value
            with OperationRules(self.sink, known):
                with waiting(self.sink):
                    outputs = tree_map(self.sink.used, self.model(inputs))
                loss = self._problem.loss(outputs, targets)
            after = {name: self._buffers[name][0]._buffers[self._buffers[name][1]] for name in buffers}
            return loss, {n: value for n, value in after.items() if value is not None and value is not buffers[n]}
        finally:
            for recurrent, held, references in lists:
                recurrent._flat_weights, recurrent._flat_weight_refs = held, references
            for (module, key, _), parameter in zip(self._owners, before, strict=True):
                module._parameters[key] = parameter
            for name, buffer in own.items():
                module, key = self._buffers[name]
                module._buffers[key] = buffer


def _attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that a module holds in attributes and lists, beside its own parameters and buffers."""
    known = {"_parameters", "_modules", "_buffers"}
    if isinstance(module, nn.RNNBase):
        known.add("_flat_weights")  # `OperationModel` replaces this list
    stack = [value for name, value in vars(module).items() if name not in known]
    while stack:
        value = stack.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list | tuple | set):
            stack += value


def _sum_parts(rows: Tensor, grads: Tensor) -> None:
    """rows[i] = the sum of part i of the gradients."""
    rows.copy_(grads if len(grads) == len(rows) else grads.view(len(rows), -1, *grads.shape[1:]).sum(1))


class _AcrossClients(Function):
    """Calls a function with the tensors of all clients at once: `function(clients, batched, *tensors)`.

    Its results, a tensor or a tuple of them, have the clients in their first dimension.

    A tensor that differs from client to client, as `batched` says, has the clients in its first dimension. Autograd
    differentiates what the function does. `marker` is any tensor under vmap, so that this is true of the whole call.
    """

    @staticmethod
    def forward(function, marker, *tensors):  # noqa: ARG004
        raise NoRule("a rule by operation needs vmap over clients")

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def vmap(info, in_dims, function, marker, *tensors):  # noqa: ARG004
        dims = in_dims[2:]
        moved = [tensor if dim is None else tensor.movedim(dim, 0) for tensor, dim in zip(tensors, dims, strict=True)]
        found = function(info.batch_size, [dim is not None for dim in dims], *moved)
        return found, (0,) * len(found) if isinstance(found, tuple) else 0


def _expanded(clients: int, batched: bool, tensor: Tensor) -> Tensor:
    return tensor if batched else tensor.expand(clients, *tensor.shape)


def _without_override_check(function: Any) -> Any:
    """Return a function of PyTorch that does not ask for overrides, so that the functions inside it ask."""
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    plain = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    plain.__kwdefaults__ = function.__kwdefaults__
    return plain


_attention = _without_override_check(F.multi_head_attention_forward)


class OperationRules(TorchFunctionMode):
    """Replaces operations on whole parameters by rules that share the work between clients."""

    def __init__(self, sink: GradientSink, known: dict[int, tuple[Tensor, ParameterSlot]]) -> None:
        """`known`: each parameter's tensor under vmap by its id, which is unique while the tensor is held here."""
        super().__init__()
        self._sink, self._known = sink, known
        self._flipped: dict[int, tuple[Tensor, ParameterSlot]] = {}  # parameters transposed, by the id of the view

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (rule := _RULES.get(func)) is not None:
            found = rule(self, func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        return func(*args, **kwargs)

    def _slot(self, tensor: object) -> ParameterSlot | None:
        held, slot = self._known.get(id(tensor), (None, None))
        return slot if held is tensor else None

    def _across(self, function: Callable[..., Any], *tensors: Maybe) -> Any:
        marker, _ = next(iter(self._known.values()))
        return _AcrossClients.apply(function, marker, *tensors)

    def _affine_slots(self, weight: Maybe, bias: Maybe) -> tuple[ParameterSlot, ParameterSlot | None] | None:
        """Return the slots of weight and bias if both are whole parameters, or the bias is None."""
        for_weight, for_bias = self._slot(weight), self._slot(bias)
        if for_weight is None or (bias is not None and for_bias is None):
            return None
        return for_weight, for_bias

    def linear(self, func: Any, x: Tensor, weight: Tensor, bias: Maybe = None) -> Any:  # noqa: ARG002
        slot = self._slot(weight)
        return NotImplemented if slot is None else self._product(x, slot, bias, flipped=False)

    def matmul(self, func: Any, x: Tensor, weight: Tensor, bias: Maybe = None) -> Any:  # noqa: ARG002
        if (slot := self._slot(weight)) is not None and weight.ndim == 2:
            return self._product(x, slot, bias, flipped=True)
        held, slot = self._flipped.get(id(weight), (None, None))
        if slot is not None and held is weight:
            return self._product(x, slot, bias, flipped=False)
        return NotImplemented

    def addmm(self, func: Any, bias: Tensor, x: Tensor, weight: Tensor, **scales: Any) -> Any:
        return NotImplemented if scales or bias.ndim != 1 else self.matmul(func, x, weight, bias)

    def transpose(self, func: Any, tensor: Tensor, *dims: int) -> Any:
        slot = self._slot(tensor)
        if slot is None or tensor.ndim != 2 or (dims and {dim % 2 for dim in dims} != {0, 1}):
            return NotImplemented
        found = func(tensor, *dims)
        self._flipped[id(found)] = (found, slot)
        return found

    def _product(self, x: Tensor, slot: ParameterSlot, bias: Maybe, flipped: bool) -> Tensor:
        for_bias = self._slot(bias)

        def apply(clients: int, batched: Sequence[bool], x: Tensor) -> Tensor:
            own_bias = for_bias.value if for_bias is not None else None
            given = _expanded(clients, batched[0], x)
            return LinearRows.apply(given, slot.value, own_bias, (slot, for_bias), flipped)

        found = self._across(apply, x)
        return found if bias is None or for_bias is not None else found + bias

    def embedding(
        self,
        func: Any,  # noqa: ARG002
        numbers: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,  # noqa: ARG002
        scale_grad_by_freq: bool = False,
        sparse: bool = False,  # noqa: ARG002
    ) -> Any:
        slot = self._slot(weight)
        if max_norm is not None or scale_grad_by_freq:
            raise NoRule("there is no rule for an Embedding with max_norm or scale_grad_by_freq")
        if slot is None:
            return NotImplemented
        padding = -1 if padding_idx is None else padding_idx % slot.shape[0]

        def apply(clients: int, batched: Sequence[bool], numbers: Tensor) -> Tensor:
            return EmbeddingRows.apply(_expanded(clients, batched[0], numbers), slot.value, slot, padding)

        return self._across(apply, numbers)

    def convolution(
        self,
        func: Any,  # noqa: ARG002
        x: Tensor,
        weight: Tensor,
        bias: Maybe = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if (slots := self._affine_slots(weight, bias)) is None or x.ndim != weight.ndim:
            return NotImplemented
        steps, dilations = (_each(part, x.ndim - 2) for part in (stride, dilation))
        if padding == "same":
            reach = [far * (size - 1) for far, size in zip(dilations, weight.shape[2:], strict=True)]
            x = F.pad(x, [part for far in reversed(reach) for part in (far // 2, far - far // 2)])
        moves = steps, _each(0 if isinstance(padding, str) else padding, x.ndim - 2), dilations
        return self._convolved(x, slots, Geometry(*moves, groups))

    def transposed_convolution(
        self,
        func: Any,  # noqa: ARG002
        x: Tensor,
        weight: Tensor,
        bias: Maybe = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Any:
        if (slots := self._affine_slots(weight, bias)) is None or x.ndim != weight.ndim:
            return NotImplemented
        steps, margins, dilations = (_each(part, x.ndim - 2) for part in (stride, padding, dilation))
        geometry = Geometry(steps, margins, dilations, groups, True, _each(output_padding, x.ndim - 2))
        return self._convolved(x, slots, geometry)

    def _convolved(self, x: Tensor, slots: tuple[ParameterSlot, ParameterSlot | None], geometry: Geometry) -> Tensor:
        def apply(clients: int, batched: Sequence[bool], x: Tensor) -> Tensor:
            found = ConvRows.apply(_expanded(clients, batched[0], x).flatten(0, 1), *values_of(slots), slots, geometry)
            return found.unflatten(0, (clients, -1))

        return self._across(apply, x)

    def layer_norm(
        self,
        func: Any,  # noqa: ARG002
        x: Tensor,
        normalized_shape: Sequence[int],  # noqa: ARG002  # it is the weight's shape
        weight: Maybe = None,
        bias: Maybe = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        if (slots := self._affine_slots(weight, bias)) is None:
            return NotImplemented

        def apply(clients: int, batched: Sequence[bool], x: Tensor) -> Tensor:
            return LayerNormRows.apply(_expanded(clients, batched[0], x), *values_of(slots), slots, eps)

        return self._across(apply, x)

    def group_norm(
        self,
        func: Any,
        x: Tensor,
        num_groups: int,
        weight: Maybe = None,
        bias: Maybe = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        return self._norm_of_records(x, weight, bias, lambda given, *affine: func(given, num_groups, *affine, eps))

    def instance_norm(
        self,
        func: Any,
        x: Tensor,
        running_mean: Maybe = None,
        running_var: Maybe = None,
        weight: Maybe = None,
        bias: Maybe = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if running_mean is not None or running_var is not None or not use_input_stats:
            return NotImplemented
        return self._norm_of_records(
            x, weight, bias, lambda given, *affine: func(given, None, None, *affine, True, momentum, eps)
        )

    def _norm_of_records(self, x: Tensor, weight: Maybe, bias: Maybe, norm: Callable[..., Tensor]) -> Any:
        """Return `norm(x, weight, bias)`, which treats every record alone, with weights by channel."""
        slots = self._affine_slots(weight, bias)
        if slots is None and any(part is not None and is_batchedtensor(part) for part in (weight, bias)):
            return NotImplemented

        def apply(clients: int, batched: Sequence[bool], x: Tensor) -> Tensor:
            given = _expanded(clients, batched[0], x).flatten(0, 1)
            if slots is None:  # the norm is frozen, or has no parameters
                return norm(given, weight, bias).unflatten(0, (clients, -1))
            normed = norm(given, None, None)
            return AffineRows.apply(normed, *values_of(slots), slots, True).unflatten(0, (clients, -1))

        return self._across(apply, x)

    def batch_norm(
        self,
        func: Any,  # noqa: ARG002
        x: Tensor,
        running_mean: Maybe,
        running_var: Maybe,
        weight: Maybe = None,
        bias: Maybe = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if self._sink.by_record:
            raise NoRule("BatchNorm mixes the records of a batch, so no record has a gradient of its own")
        slots = self._affine_slots(weight, bias)
        if not training or (slots is None and weight is not None):
            return NotImplemented
        pair = slots if slots is not None else (None, None)

        lazy = self._sink.lazy if BatchNormRows.fits(x, 1) else None

        def norm(shortcut: Maybe, relu: bool, counted: bool) -> Any:
            def apply(
                clients: int, batched: Sequence[bool], x: Tensor, shortcut: Maybe, *running: Maybe
            ) -> tuple[Tensor, ...]:
                given = _expanded(clients, batched[0], x).flatten(0, 1)
                added = None if shortcut is None else _expanded(clients, batched[1], shortcut).flatten(0, 1)
                if given.numel() < 2 * clients * given.shape[1]:
                    raise NoRule("BatchNorm needs more than one value per channel for a variance")
                tables = running if counted and running[0] is not None and running[1] is not None else None
                both = BatchNormRows.apply(given, added, *values_of(pair), pair, tables, clients, momentum, eps, relu)
                return tuple(one.unflatten(0, (clients, -1)) for one in both)

            return self._across(apply, x, shortcut, running_mean, running_var)

        if lazy is None:
            return norm(None, False, True)[0]
        return lazy.promise(x, norm, [one for one in (running_mean, running_var) if one is not None])

    def attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Maybe = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Attention has no parameters; the clients become a part of the batch, for which PyTorch has fused kernels."""
        if dropout_p > 0:
            raise NoRule("scaled_dot_product_attention draws random numbers client by client")
        if (
            not query.ndim == key.ndim == value.ndim
            or query.ndim < 3
            or len(query) != len(key)
            or len(query) != len(value)
        ):
            return NotImplemented
        batch, dimensions = len(query), query.ndim

        def apply(clients: int, batched: Sequence[bool], *given: Maybe) -> Tensor:
            tensors: list[Maybe] = []
            for tensor, own in zip(given, batched, strict=True):
                if tensor is None:
                    tensors.append(None)
                    continue
                each = _expanded(clients, own, tensor)
                each = each[(slice(None), *[None] * (dimensions + 1 - each.ndim))]
                tensors.append(each.expand(clients, batch, *each.shape[2:]).flatten(0, 1))
            options = {"dropout_p": 0.0, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            return func(*tensors, **options).unflatten(0, (clients, batch))

        return self._across(apply, query, key, value, attn_mask)

    def recurrent(self, kind: str, func: Any, x: Tensor, states: Any, weights: Any, *options: Any) -> Any:  # noqa: ARG002
        """The layers of an LSTM, a GRU or an RNN; `options` are those of PyTorch's function, by position."""
        if len(options) != 6:
            raise NoRule("there is no rule for recurrent layers on packed sequences")
        biases, layers, dropout, training, both_ways, batch_first = options
        if dropout > 0 and training and layers > 1:
            raise NoRule("a recurrent layer draws random numbers client by client")
        known = [self._slot(weight) for weight in weights]
        if any(slot is None and is_batchedtensor(weight) for slot, weight in zip(known, weights, strict=True)):
            return NotImplemented
        recurrence = Recurrence(kind, layers, both_ways, biases)
        pair = kind == "LSTM"

        def apply(clients: int, batched: Sequence[bool], *tensors: Tensor) -> tuple[Tensor, ...]:
            given, *starts = (_expanded(clients, own, tensor) for own, tensor in zip(batched, tensors, strict=True))
            given = given if batch_first else given.transpose(1, 2)
            flat = [start.movedim(0, 1).flatten(1, 2) for start in starts]
            values = [
                (weight if slot is None else slot.value, slot) for slot, weight in zip(known, weights, strict=True)
            ]
            outputs, *ends = recurrence(given.flatten(0, 1), flat, values)
            outputs = outputs.unflatten(0, (clients, -1))
            outputs = outputs if batch_first else outputs.transpose(1, 2)
            return outputs, *(end.unflatten(1, (clients, -1)).movedim(1, 0) for end in ends)

        return self._across(apply, x, *(states if pair else [states]))

    def multi_head_attention(self, func: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        with self:
            return _attention(*args, **kwargs)


def _each(value: Any, dimensions: int) -> tuple[int, ...]:
    given = tuple(value) if isinstance(value, list | tuple) else (value,)
    return given * dimensions if len(given) == 1 else given


def _recurrent(kind: str, rules: OperationRules, func: Any, *args: Any, **kwargs: Any) -> Any:
    return rules.recurrent(kind, func, *args, **kwargs)


_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: OperationRules.linear,
    **dict.fromkeys((torch.addmm, Tensor.addmm), OperationRules.addmm),
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.mm), OperationRules.matmul),
    **dict.fromkeys(
        (torch.t, Tensor.t, torch.transpose, Tensor.transpose, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
        OperationRules.transpose,
    ),
    F.embedding: OperationRules.embedding,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), OperationRules.convolution),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), OperationRules.transposed_convolution
    ),
    F.layer_norm: OperationRules.layer_norm,
    F.group_norm: OperationRules.group_norm,
    F.instance_norm: OperationRules.instance_norm,
    F.batch_norm: OperationRules.batch_norm,
    F.scaled_dot_product_attention: OperationRules.attention,
    F.multi_head_attention_forward: OperationRules.multi_head_attention,
    torch.lstm: partial(_recurrent, "LSTM"),
    torch.gru: partial(_recurrent, "GRU"),
    torch.rnn_tanh: partial(_recurrent, "RNN_TANH"),
    torch.rnn_relu: partial(_recurrent, "RNN_RELU"),
}
