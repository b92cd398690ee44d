"""The problem: minimise f(x) = (1/n) Σ f_i(x), where f_i is client i's mean loss, over a flat vector x.

Buffers, such as BatchNorm's running statistics, are part neither of x nor of any message. Each client has its own row
of buffers, which its forward passes in training update from its own records. For evaluation the buffers are averaged
over the clients; of integer counters the largest is used. So training never mixes clients through buffers, and one
model is evaluated: x with the averaged statistics. This average is a function of the clients' data without noise, and
no privacy guarantee covers it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active as under_vmap
from torch.func import functional_call
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from .. import kernels
from ..data.augment import Augment, Transform, treats_records_alone
from ..errors import UsageError
from ..models.linear import NonconvexPenalty
from ..sampling.random_streams import own_numbers
from . import client_data as records
from .batch_form import BatchForm, Collate, Tree, moved, scores_of, size_of
from .functions import FunctionProblem
from .losses import cure, described, refuse_other_reductions, refuse_wrong_mean, weighted
from .objective import Buffers, checksum
from .shared_records import origins, perhaps_shared
from .user_metrics import Metric, SetMetrics, check_column_name, checked_metrics

_IGNORED = -100  # the target that the losses of PyTorch leave out
_EVALUATED = 1000  # records evaluated at once
_COMPARED, _CLOSE = 100, 1e-2  # records on which evaluations with and without kernels must agree, and how closely
_TRIED = 20  # clients on whose records a model is tried that has failed

Part = TypeVar("Part")
Loss = Callable[[Any, Any], Tensor]
BatchLoss = Callable[[nn.Module, Any], Any]
Evaluated = Any  # a data set, a list with one for each client, or data sets by name


class Problem:
    """A model, a loss, and one data set per client.

    A data set has one item per record: a pair (input, target), a tuple (a, b, …, target) for a model of several inputs,
    or a dict. `normec.problems.batch_form` lists the forms. Dicts, tuples and losses of the whole batch are computed
    client by client; pairs of tensors can use the faster engines.

    Args:
        model: Any module. Its trainable parameters, flattened in order, are x. It is copied and never changed.
        loss: `loss(outputs, targets)`, the mean over a batch; None if `batch_loss` is given.
        clients: Data sets, one per client: map-style (a `TensorDataset`, a `datasets.Dataset`, a list), iterable, in
            which case its records are read into memory, or a `DataLoader`, of which the data set is used.
        test: Evaluated for the loss and, where targets are class numbers, the accuracy: one data set, a list with one
            for each client, or a dict of data sets by name. With a list, the mean of the clients' accuracies is
            measured as well, and with names the loss and accuracy of each set, as in `shifted_accuracy`.
        validation: Evaluated like `test`, but without names; it is for choosing settings.
        penalty: `penalty(x)` is added to the loss of every client.
        augment: Applied to training batches.
        transform: Applied to the inputs of every batch, after `augment`.
        metrics: Further metrics of test and validation sets, by name: functions of all outputs and targets, or objects
            with update, compute and reset, such as those of torchmetrics. Their columns are called like the accuracy's.
        class_weights: The weight w_c of each class in a cross-entropy loss: the mean over the records of w_y times the
            loss. Weights that were computed from protected data are not covered by any guarantee.
        target: The key of the target in dicts (default: "labels", "label", "targets" or "target").
        collate: Makes a batch of a list of items, such as one that pads texts (default: PyTorch's).
        batch_loss: `batch_loss(model, batch)` in place of `loss`: the mean loss over the batch, or the model's outputs
            with an entry "loss", as Hugging Face models return them.
        name: The name of the data in tables of results (default: the data set of `normec.data` that the clients' or the
            test records belong to, if there is one).

    Raises:
        UsageError: The model, the loss and the data do not fit together.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> draw = torch.Generator().manual_seed(0)
        >>> data = [TensorDataset(torch.randn(8, 4, generator=draw), torch.arange(8) % 3) for _ in range(5)]
        >>> problem = Problem(nn.Linear(4, 3), nn.functional.cross_entropy, data)
        >>> problem.clients, len(problem.x0)
        (5, 15)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None,
        clients: Sequence[Any],
        test: Evaluated | None = None,
        *,
        validation: Evaluated | None = None,
        penalty: Callable[[Tensor], Tensor] | None = None,
        augment: Augment | None = None,
        transform: Transform | None = None,
        metrics: Mapping[str, Metric] | None = None,
        class_weights: Sequence[float] | Tensor | None = None,
        target: str | None = None,
        collate: Collate | None = None,
        batch_loss: BatchLoss | None = None,
        name: str | None = None,
    ) -> None:
        self.takes_batch = loss is None and batch_loss is not None
        loss = batch_loss if self.takes_batch else loss
        if not isinstance(model, nn.Module) or not callable(loss):
            raise UsageError(
                f"a problem needs a torch.nn.Module, a loss function and the clients' data sets, in this order; "
                f"got {type(model).__name__}, {type(loss).__name__} and {type(clients).__name__}"
            )
        if isinstance(loss, type):
            raise UsageError(f"the loss must be a function or an object, such as {loss.__name__}(), got the class")
        if isinstance(clients, Dataset | Tensor):
            raise UsageError(
                f"clients must be a list of data sets, one for each client, got one {type(clients).__name__}; "
                "normec.data.split divides a data set"
            )
        if batch_loss is not None and not self.takes_batch:
            raise UsageError("give loss or batch_loss, not both; with batch_loss, loss is None")
        refuse_other_reductions(loss)
        if class_weights is not None:
            loss = weighted(loss, class_weights)
        self.metrics = checked_metrics(metrics)
        self.model = copy.deepcopy(model)
        self.loss: Callable[..., Any] = loss
        self.penalty, self.augment, self.transform = penalty, augment, transform
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trainable:
            raise UsageError("the model has no trainable parameters")
        if any(p.is_complex() for p in trainable.values()):
            raise UsageError(
                "the model has complex parameters, and messages and their noise are real numbers; make them of real "
                "parameters by torch.view_as_complex"
            )
        self._shapes = {name: p.shape for name, p in trainable.items()}
        self.x0 = torch.cat([p.detach().flatten() for p in trainable.values()])
        if not isinstance(clients, Iterable):
            raise UsageError(f"clients must be a list of data sets, one for each client, got {clients!r}")
        clients, collate = records.with_items(clients, collate, "client")
        self.form = BatchForm(target, collate, self.takes_batch)
        self.records = records.gather(clients, self.form)
        self.test_names = tuple(test) if isinstance(test, Mapping) else ()
        for test_name in self.test_names:
            check_column_name("test set", test_name)
        given = {"test": tuple(test.values()) if isinstance(test, Mapping) else test, "validation": validation}
        counts = {"test": len(self.test_names) or len(clients), "validation": len(clients)}
        evaluated = {
            name: records.with_items(records.evaluation_sets(sets, counts[name]), collate, f"{name} set")[0]
            for name, sets in given.items()
        }
        self.test, self.validation = (
            records.gather(sets, self.form, f"{name} set") if sets else None for name, sets in evaluated.items()
        )
        if augment is not None and not isinstance(self.records, records.ResidentRecords):
            with self._restored(), own_numbers(0):
                first, _ = self.records.batch(0, torch.zeros(1, dtype=torch.int64))
            if not isinstance(first, Tensor):
                raise UsageError("augment is for inputs in one tensor; for dicts and tuples use transform")
        self.name = name if name is not None else records.name_of([*clients, *evaluated["test"]])
        self.clients = len(clients)
        held = origins(clients)
        self.repeated = len(held.unique()) < len(held)  # whether a record occurs more than once
        self.shown = [  # the evaluated sets that contain records of the clients
            name for name, sets in evaluated.items() if sets and bool(torch.isin(origins(sets), held).any())
        ]
        self.perhaps_shown = [  # those that use the same memory as the clients' data, in a way that is not known
            name for name, sets in evaluated.items() if name not in self.shown and perhaps_shared(sets, clients)
        ]
        self.sizes: Tensor | None = self.records.sizes
        self._kernels_agree: bool | None = None  # of the evaluation copy; None: not known yet
        # Code that training runs may store records in any attribute. These copies never see a client's records.
        self._untouched = _sharing_trainable(self.model)
        self._evaluation_parts = {name: own_copy(getattr(self, name)) for name in ("loss", "transform")}
        self._evaluation_copy: Problem | None = None
        if isinstance(self.records, records.ResidentRecords):
            self.refuse_wrong_loss()

    @staticmethod
    def from_functions(functions: Sequence[Callable[[Tensor], Tensor]], x0: Tensor) -> FunctionProblem:
        """Return a problem with plain differentiable functions f_i of a tensor, for theory and counterexamples.

        Args:
            functions: f_1 … f_n, each from a tensor of the shape of `x0` to a scalar.
            x0: The initial point, a scalar or a vector of floats.

        Returns:
            The problem, which has neither a model nor test data.

        Raises:
            UsageError: There is no function, or `x0` is not a scalar or a vector of floats.

        Example:
            >>> bowls = [lambda x, c=c: (x - c) ** 2 for c in (1.0, 3.0)]
            >>> problem = Problem.from_functions(bowls, torch.tensor(0.0))
            >>> problem.clients, problem.x0
            (2, tensor([0.]))
        """
        return FunctionProblem(functions, x0)

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """The number of elements of each trainable tensor of the model, in the order of x."""
        return tuple(shape.numel() for shape in self._shapes.values())

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """Return the model's parameters as views of the flat vector."""
        parts = x.split(self.tensor_sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    def client_loss(
        self,
        x: Tensor,
        client: int,
        rows: Tensor | None,
        buffers: Buffers,
        uniforms: Tensor | None,
        divisor: float | None = None,
    ) -> Tensor:
        """Return f_i(x) on the given records (None: all), differentiable in x, and update `buffers` in place.

        With `divisor`, the sum of the records' losses is divided by it instead of by the number of records.
        """
        if rows is not None and not len(rows):
            return 0 * x.sum() + (self.penalty(x) if self.penalty is not None else 0)
        inputs, targets = self.records.batch(client, rows)
        if self.augment is not None and uniforms is not None:
            inputs = self.augment(inputs, uniforms)
        self.model.train()
        with self._client_buffers(buffers):
            value = self.value(x, inputs, targets).loss
        if not isinstance(value, Tensor):
            raise UsageError(
                f"the loss must return a tensor, through which gradients flow, got {type(value).__name__}; leave out "
                "item() and the like"
            )
        if value.ndim:
            raise UsageError(f"the loss must return a scalar, got shape {tuple(value.shape)}; use its mean")
        if divisor is not None:
            value = value * (size_of(inputs) / divisor)
        return value + self.penalty(x) if self.penalty is not None else value

    def penalised(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the penalty and its gradient, which are the same for every client; (0, None) without a penalty."""
        if self.penalty is None:
            return x.new_zeros(()), None
        if type(self.penalty) is NonconvexPenalty:
            return self.penalty.with_gradient(x)
        point = x.detach().requires_grad_()
        with torch.enable_grad():
            value = self.penalty(point)
            (slope,) = torch.autograd.grad(value, point)
        return value.detach(), slope

    def initial_buffers(self) -> Buffers:
        """Return every buffer of the model as the user gave it, with one row per client."""
        return {
            name: buffer.detach().expand(self.clients, *buffer.shape).clone()
            for name, buffer in self._untouched.named_buffers()
        }

    @torch.no_grad()
    def evaluate(self, x: Tensor, buffers: Buffers, batch_size: int | None = None) -> dict[str, float]:
        """Return loss, accuracy and metrics on the test and validation sets, with the clients' averaged buffers.

        `accuracy` counts all records alike, and `accuracy_mean_over_clients` all clients, if each has a set of its own.
        All results are computed by copies of the model, the loss and the transform that never saw a client's records.
        `batch_size` is the number of records at a time; by default it depends on the device.
        """
        evaluator = self._evaluator()
        shared, found = averaged(buffers), {}
        x = x.clone()  # a model may write to its parameters
        evaluator.model.eval()
        for name, held, accuracy in (
            ("test_loss", self.test, "accuracy"),
            ("validation_loss", self.validation, "validation_accuracy"),
        ):
            if held is not None:
                size = batch_size or self._evaluation_batch(held, x.device)
                counts = held.sizes.tolist()
                together, names = SetMetrics(self.metrics), self.test_names if held is self.test else ()
                each = [SetMetrics(self.metrics if names else {}) for _ in counts]
                scores = [
                    evaluator._score(held, number, x, shared, size, (together, each[number]))
                    for number in range(len(counts))
                ]
                found[name] = sum(total for total, _ in scores) / sum(counts)
                right = [hits for _, hits in scores if hits is not None]
                if len(right) == len(counts):
                    found[accuracy] = sum(right) / sum(counts)
                    if len(counts) > 1 and not names:
                        shares = [hits / count for hits, count in zip(right, counts, strict=True)]
                        found[f"{accuracy}_mean_over_clients"] = sum(shares) / len(shares)
                prefix = accuracy.removesuffix("accuracy")
                found |= {f"{prefix}{column}": value for column, value in together.read().items()}
                for own, (total, hits), count, metrics in zip(names, scores, counts, each, strict=False):
                    found[f"{own}_loss"] = total / count
                    found |= {f"{own}_accuracy": hits / count} if hits is not None else {}
                    found |= {f"{own}_{column}": value for column, value in metrics.read().items()}
        return found

    @property
    def majority(self) -> float | None:
        """The accuracy on the test set of always naming its most frequent class; None if that is not in memory."""
        if not isinstance(self.test, records.ResidentRecords) or not isinstance(self.test.targets, Tensor):
            return None
        _, counts = self.test.targets[self.test.targets != _IGNORED].unique(return_counts=True)
        return float(counts.max() / counts.sum()) if len(counts) else None

    def _evaluator(self) -> Problem:
        """Return this problem with the parts for evaluation, which are created on first use."""
        if self._evaluation_copy is None:
            self._evaluation_copy = copy.copy(self)
            self._evaluation_copy.model = _sharing_trainable(self._untouched)
            vars(self._evaluation_copy).update(self._evaluation_parts)
        return self._evaluation_copy

    @property
    def evaluation_transform(self) -> Transform | None:
        """The copy of the transform that never saw a client's records."""
        held: Transform | None = self._evaluation_parts["transform"]
        return held

    @staticmethod
    def _evaluation_batch(held: records.Records, device: torch.device) -> int:
        """Return the number of records to evaluate at once; small images on a GPU are bound by kernel launches."""
        if device.type == "cuda":
            first, _ = held.batch(0, torch.zeros(1, dtype=torch.int64, device=device))
            if isinstance(first, Tensor) and first.ndim == 4:
                return max(_EVALUATED, min(5 * _EVALUATED, 2**24 // first.numel()))
        return _EVALUATED

    def _score(
        self,
        held: records.Records,
        number: int,
        x: Tensor,
        buffers: Buffers,
        batch_size: int,
        metrics: Sequence[SetMetrics],
    ) -> tuple[float, int | None]:
        """Return the sum of the losses on one of the `held` sets, and how many predictions are right, if known.

        Outputs and targets are also added to the `metrics`.
        """
        count = int(held.sizes[number])
        total, right = (
            x.new_zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.int64, device=x.device),
        )
        classified = True
        context = kernels.evaluating if self._use_kernels(held, x, buffers) else nullcontext
        for rows in torch.arange(count, device=x.device).split(batch_size):
            inputs, targets = held.batch(number, rows)
            with context():
                value = self.value(x, inputs, targets, buffers)
            total += value.loss.double() * len(rows)
            scores = scores_of(value.outputs)
            hits = correct(scores, value.targets) if scores is not None else None
            if self.metrics and (value.outputs is None or value.targets is None):
                raise UsageError(
                    "metrics need outputs and targets: with batch_loss, return the model's outputs with an entry "
                    '"loss", and give the targets in dicts'
                )
            for one in metrics:
                one.add(value.outputs, value.targets)
            classified = classified and hits is not None
            right += hits.sum() if hits is not None else 0
        return float(total), int(right) if classified else None

    def _use_kernels(self, held: records.Records, x: Tensor, buffers: Buffers) -> bool:
        """Whether evaluation may use kernels: on a GPU, if their outputs agree with those of PyTorch."""
        if not kernels.usable(x) or not isinstance(held, records.ResidentRecords):
            return False
        if self._kernels_agree is None:
            inputs, _ = held.batch(0, torch.arange(min(_COMPARED, int(held.sizes[0])), device=x.device))
            plain = self.outputs(x, inputs, buffers)
            with kernels.evaluating():
                fused = self.outputs(x, inputs, buffers)
            self._kernels_agree = bool((fused - plain).norm() <= _CLOSE * plain.norm())
            if not self._kernels_agree:
                logging.getLogger("normec").warning("evaluation does not use kernels, because their outputs differ")
        return self._kernels_agree

    def model_at(self, x: Tensor, buffers: Buffers) -> nn.Module:
        """Return a copy of the model with parameters x and the averaged buffers, ready for use.

        Everything else is as the user gave it; nothing that training left in the model is copied.
        """
        model = copy.deepcopy(self._untouched).eval()
        with torch.no_grad():
            for name, value in self.unflatten(x).items():
                model.get_parameter(name).copy_(value)
        for name, value in averaged(buffers).items():
            module, key = buffer_owner(model, name)
            module._buffers[key] = value.clone()
        return model

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Problem:
        """Return the same problem on another device, with its model and floating-point inputs in `dtype`."""
        there = copy.copy(self)
        there._evaluation_copy = None
        there._untouched = copy.deepcopy(self._untouched).to(device=device, dtype=dtype)
        there.model = _sharing_trainable(there._untouched)
        there.x0 = self.x0.to(device=device, dtype=dtype)
        there.records = self.records.to(device)
        there.test = self.test.to(device) if self.test is not None else None
        there.validation = self.validation.to(device) if self.validation is not None else None
        return there

    def fingerprint(self) -> dict[str, Any]:
        """Return the facts by which a checkpoint recognises this problem."""
        collate = [self.form.collate] if self.form.collate is not None else []
        return {
            "clients": self.clients,
            "dimension": len(self.x0),
            "start": checksum(self.x0),
            "data": self.records.digest(),
            "test": self.test.digest() if self.test is not None else None,
            "value at the start": self._probe(),
            "parts": [_named(part) for part in (self.loss, self.augment, self.transform, *collate)],
            "penalty": float(self.penalty(torch.ones_like(self.x0))) if self.penalty is not None else None,
        }

    @torch.no_grad()
    def _probe(self) -> str:
        """Return the loss of a few records at the start, to three digits; another loss, model or transform changes it.

        Copies compute it, because they may store what they saw; they are used for nothing else.
        """
        probe = copy.copy(self)
        probe.model = _sharing_trainable(self._untouched).eval()
        vars(probe).update({name: own_copy(part) for name, part in self._evaluation_parts.items()})
        with self._restored(), own_numbers(0):  # a transform may draw
            inputs, targets = self.records.batch(0, torch.arange(min(8, int(self.records.sizes[0]))))
            return f"{float(probe.value(self.x0.clone(), inputs, targets).loss.mean()):.2e}"

    def __repr__(self) -> str:
        return f"Problem({type(self.model).__name__}, {len(self.x0)} parameters, {self.clients} clients)"

    @torch.no_grad()
    def refuse_wrong_loss(self) -> None:
        """Refuse a loss that is not the mean over the records of a batch (`losses.refuse_wrong_mean`).

        Records that must be fetched are read when training starts, not when the problem is made, because a data set may
        keep what it saw first.

        A model or loss that cannot be computed here is left to training, which says what is wrong.
        """
        if self.takes_batch:
            return
        with self._restored(), own_numbers(0):
            found = None
            with suppress(Exception):
                found = self._first_outputs()
            if found is not None:
                refuse_wrong_mean(own_copy(self.loss), *found)

    @torch.no_grad()
    def refuse_misfit(self, name: str, *, fetch: bool = False) -> None:
        """Refuse a model or a loss that cannot be computed on the records; the message calls them `name`.

        A few records of the first clients and of the test and validation sets are tried. Records that are not in memory
        are read only with `fetch`, when training has failed already.
        """
        probe, loss = self._probing(), own_copy(self.loss)
        for kind, held in (("client", self.records), ("test set", self.test), ("validation set", self.validation)):
            if self.takes_batch or held is None or not (fetch or isinstance(held, records.ResidentRecords)):
                continue
            for number in range(min(_TRIED, len(held.sizes))):
                seen: dict[str, Any] = {}
                try:
                    with self._restored(), own_numbers(0):
                        seen["inputs"], seen["targets"] = self._first(held, number)
                        seen["outputs"] = probe.outputs(self.x0.clone(), seen["inputs"])
                        loss(seen["outputs"], seen["targets"])
                except Exception as error:  # whatever the caller's code raises
                    if not seen:  # the data set itself failed
                        return
                    text = f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
                    facts = ", ".join(described(part, value) for part, value in seen.items())
                    whose = "the first records" if held is self.records and not number else f"{kind} {number}"
                    raise UsageError(f"{name} fails on {whose}: {text}; {facts}{cure(self.loss, seen)}") from error

    def _restored(self) -> AbstractContextManager[None]:
        """A context that undoes what the user's code keeps where copies share it: in closures, defaults and classes."""
        from ..gradients.restored import state_of

        return state_of(self).restored()

    def _first_outputs(self) -> tuple[Any, Any]:
        """Return the outputs and targets of a few records, which only a copy of the model sees."""
        inputs, targets = self._first(self.records, 0)
        return self._probing().outputs(self.x0.clone(), inputs), targets

    def _first(self, held: records.Records, number: int) -> tuple[Tree, Tree]:
        """Return the inputs and targets of the first few records of one of the `held` sets, where the model is."""
        first = held.batch(number, torch.arange(min(4, int(held.sizes[number]))))
        inputs, targets = (moved(part, self.x0.device) for part in first)
        return inputs, targets

    def _probing(self) -> Problem:
        """Return this problem with copies of the model, for evaluation, and of the transform."""
        probe = copy.copy(self)
        probe.model, probe.transform = _sharing_trainable(self._untouched).eval(), own_copy(self.transform)
        return probe

    @contextmanager
    def _client_buffers(self, buffers: Buffers) -> Iterator[None]:
        """Give the model a client's buffers, and write their values after the forward pass back to `buffers`.

        `functional_call` would lose a buffer that the forward pass assigns instead of changing it in place.
        """
        owners = {name: buffer_owner(self.model, name) for name in buffers}
        own = {name: module._buffers[key] for name, (module, key) in owners.items()}
        for name, (module, key) in owners.items():
            module._buffers[key] = buffers[name].clone()
        try:
            yield
        finally:
            for name, (module, key) in owners.items():
                after = module._buffers[key]
                if after is not None:
                    buffers[name].copy_(after.detach())
                module._buffers[key] = own[name]

    def moved_constants(self, copies: Iterable[nn.Module] = ()) -> list[str] | None:
        """Return the frozen parameters that training has changed; None if the model has no frozen parameters.

        `copies` are copies of the model that an engine calls in its place.
        """
        frozen = [(name, p) for name, p in self._untouched.named_parameters() if not p.requires_grad]
        if not frozen:
            return None
        models = [dict(model.named_parameters()) for model in (self.model, *copies)]
        return [
            name
            for name, before in frozen
            if any(name not in now or not torch.equal(before, now[name]) for now in models)
        ]

    def undo_moved_constants(self) -> list[str]:
        """Give frozen parameters the values that they had at the start. Returns the names of those that had changed."""
        moved = self.moved_constants() or []
        before, now = dict(self._untouched.named_parameters()), dict(self.model.named_parameters())
        for name in moved:
            now[name].data.copy_(before[name])
        return moved

    @property
    def statistics(self) -> bool:
        """Whether the model keeps running statistics of the data (BatchNorm), which no noise covers."""
        return any(name.rpartition(".")[2].startswith("running_") for name, _ in self.model.named_buffers())

    def prepared(self, inputs: Tree, dtype: torch.dtype) -> Tree:
        """Return records as the model expects them: transformed, in its precision, images with channels last.

        Under vmap, which knows no channels last, images stay as they are.
        """
        if self.transform is not None:
            inputs = self.transform(inputs)
        if not isinstance(inputs, Tensor):
            return tree_map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, inputs)
        inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
        image = inputs.ndim == 4 and not under_vmap()
        return inputs.contiguous(memory_format=torch.channels_last) if image else inputs

    def augmented_by_client(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Return records ``[c, B, ...]`` of several clients after the augmentation, which sees one client at a time.

        An augmentation that is known to treat records independently sees all of them at once.
        """
        augment = self.augment
        if augment is None or uniforms is None:
            return inputs
        if treats_records_alone(augment):
            return augment(inputs, uniforms)
        # A copy at once: the function may return the same memory for the next client.
        return torch.stack([augment(own, drawn).clone() for own, drawn in zip(inputs, uniforms, strict=True)])

    def augmented_by_record(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Return records ``[B, ...]`` of one client after the augmentation, which sees one record at a time."""
        if uniforms is None:
            return inputs
        return self.augmented_by_client(inputs[:, None], uniforms[:, None])[:, 0]

    def prepared_by_client(self, inputs: Tensor, uniforms: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return records ``[c, B, ...]`` augmented and `prepared`, flattened to ``[c * B, ...]``.

        A transform sees the records of one client at a time, so that its statistics do not couple clients.
        """
        inputs = self.augmented_by_client(inputs, uniforms)
        if treats_records_alone(self.transform):
            flat: Tensor = self.prepared(inputs.flatten(0, 1), dtype)
            return flat
        return torch.cat([self.prepared(own, dtype).clone() for own in inputs])  # copied for the same reason

    def outputs(self, x: Tensor, inputs: Tree, buffers: Mapping[str, Tensor] | None = None) -> Any:
        """Return the model's outputs at x, with `buffers` instead of its own; dicts are keyword arguments."""
        inputs = self.prepared(inputs, x.dtype)
        held = {**self.unflatten(x), **(buffers or {})}
        if isinstance(inputs, Mapping):
            return functional_call(self.model, held, (), dict(inputs))
        return functional_call(self.model, held, tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,))

    def value(self, x: Tensor, inputs: Tree, targets: Tree, buffers: Mapping[str, Tensor] | None = None) -> BatchValue:
        """Return the mean loss over a batch at x, with the outputs and targets behind it as far as they are known."""
        if not self.takes_batch:
            outputs = self.outputs(x, inputs, buffers)
            return BatchValue(self.loss(outputs, targets), outputs, targets)
        held = {f"model.{name}": value for name, value in {**self.unflatten(x), **(buffers or {})}.items()}
        batch = self.prepared(inputs, x.dtype)
        found = functional_call(_WholeBatch(self.model, self.loss), held, (batch,))
        if isinstance(found, Tensor):
            return BatchValue(found)
        loss = found.get("loss") if isinstance(found, Mapping) else getattr(found, "loss", None)
        if not isinstance(loss, Tensor):
            raise UsageError(
                f'batch_loss must return the loss or outputs with an entry "loss", got {type(found).__name__}'
            )
        key = self.form.target_in(batch)
        return BatchValue(loss, found, batch[key] if key is not None else None)


@dataclass(frozen=True)
class BatchValue:
    """The mean loss over a batch, and the outputs and targets behind it, if a `batch_loss` returns them."""

    loss: Tensor
    outputs: Any = None
    targets: Any = None


class _WholeBatch(nn.Module):
    """A loss that calls the model itself, as a module, so that the model's parameters can be replaced by x."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self._loss = model, (loss,)  # a loss that is a module keeps its own parameters

    def forward(self, batch: Any) -> Any:
        return self._loss[0](self.model, batch)


def _sharing_trainable(model: nn.Module) -> nn.Module:
    """Copy the model but share its trainable parameters, because x replaces them whenever the model runs."""
    same = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    return copy.deepcopy(model, same)


def buffer_owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a buffer, and the buffer's name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key


def own_copy(part: Part) -> Part:
    """Return a copy with its own state; a part that cannot be copied is used as it is."""
    try:
        return copy.deepcopy(part)
    except Exception:  # for example, it holds a lock or an open file
        return part


def _named(part: object) -> str:
    """Return a name that is the same in every process."""
    return repr(part) if is_dataclass(part) else getattr(part, "__qualname__", type(part).__qualname__)


def averaged(buffers: Buffers) -> Buffers:
    """Return one set of buffers for evaluation: the means over the clients, and the largest of integer counters."""
    return {name: rows.mean(0) if rows.is_floating_point() else rows.amax(0) for name, rows in buffers.items()}


def correct(outputs: Tensor, targets: Any) -> Tensor | None:
    """Return which predictions are right, or None if the targets are not one class number for each record."""
    if not isinstance(targets, Tensor) or targets.is_floating_point() or targets.ndim != 1:
        return None
    chosen = chosen_classes(outputs, len(targets))
    if chosen is None:
        return None
    return chosen == (targets > 0 if chosen.dtype == torch.bool else targets)


def chosen_classes(outputs: Tensor, records: int) -> Tensor | None:
    """Return the class that a model chooses for each record, as a number, or as a bool if it has one output.

    None stands for outputs that are not scores of classes.
    """
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return outputs.argmax(1)
    return outputs.flatten() > 0 if outputs.numel() == records else None
