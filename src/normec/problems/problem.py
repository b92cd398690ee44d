"""The problem: minimise f(x) = (1/n) Σ f_i(x), where f_i is client i's mean loss, over a flat vector x.

Buffers (BatchNorm's running statistics) are not part of x and not part of any message. Each client keeps
its own: its forward passes in training update its own row, from its own records. For evaluation they are
averaged over the clients (whole-number counters: the largest). So: training never mixes clients through
buffers, and what is evaluated is one model, x with the averaged statistics. That average is an un-noised
function of the clients' data; no privacy guarantee covers it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import Dataset

from .. import kernels
from ..data.augment import Augment, Transform, treats_records_alone
from ..errors import UsageError
from . import client_data as records
from .functions import FunctionProblem
from .objective import Buffers

_LOOKED_AT = 1000  # records evaluated at once
_COMPARED, _CLOSE = 100, 1e-2  # records on which evaluations with kernels and without must agree, and how nearly

Loss = Callable[[Tensor, Tensor], Tensor]


class Problem:
    """A model, a loss, and one data set per client.

    Args:
        model: Any module. Its trainable parameters, flattened in order, are x. It is copied and never changed.
        loss: `loss(outputs, targets)`, the mean over a batch.
        clients: Map-style data sets of (input, target), one per client.
        test: Evaluated for the loss and, where targets are class numbers, the accuracy.
        validation: Evaluated like `test`; for choosing settings.
        penalty: `penalty(x)` is added to the loss of every client.
        augment: Applied to training batches.
        transform: Applied to every batch, after `augment`.

    Raises:
        UsageError: Something of the model, the loss or the data does not fit together.

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
        loss: Loss,
        clients: Sequence[Dataset[Any]],
        test: Dataset[Any] | None = None,
        *,
        validation: Dataset[Any] | None = None,
        penalty: Callable[[Tensor], Tensor] | None = None,
        augment: Augment | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.loss, self.penalty, self.augment, self.transform = loss, penalty, augment, transform
        trainable = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        if not trainable:
            raise UsageError("the model has no trainable parameters")
        self._shapes = {name: p.shape for name, p in trainable.items()}
        self.x0 = torch.cat([p.detach().flatten() for p in trainable.values()])
        self.records = records.gather(clients)
        self.test = records.gather([test]) if test is not None else None
        self.validation = records.gather([validation]) if validation is not None else None
        self.clients = len(clients)
        held = records.origins(clients)
        self.repeated = len(held.unique()) < len(held)  # whether a record is there more than once
        judged = {"test": test, "validation": validation}
        self.shown = [  # of the sets that are evaluated, those that hold records of the clients
            name
            for name, by in judged.items()
            if by is not None and bool(torch.isin(records.origins([by]), held).any())
        ]
        self.sizes: Tensor | None = self.records.sizes
        self._kernels_agree: bool | None = None  # not known yet
        # What training runs may keep what it saw in any attribute. These copies never see a client's records.
        self._untouched = _sharing_trainable(self.model)
        self._judges = {name: _copied(getattr(self, name)) for name in ("loss", "transform")}
        self._judge: Problem | None = None

    @staticmethod
    def from_functions(functions: Sequence[Callable[[Tensor], Tensor]], x0: Tensor) -> FunctionProblem:
        """f_i given as plain differentiable functions of a tensor: theory and counterexamples."""
        return FunctionProblem(functions, x0)

    @property
    def tensor_sizes(self) -> tuple[int, ...]:
        """How many numbers each trainable tensor of the model holds, in the order of x."""
        return tuple(shape.numel() for shape in self._shapes.values())

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """The model's parameters as views of the flat vector."""
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
        """f_i(x) on the given records (None: all), differentiable in x; updates `buffers` in place.

        `divisor`: divide the records' losses by this number instead of by how many they are.
        """
        if rows is not None and not len(rows):
            return 0 * x.sum() + (self.penalty(x) if self.penalty is not None else 0)
        inputs, targets = self.records.batch(client, rows)
        if self.augment is not None and uniforms is not None:
            inputs = self.augment(inputs, uniforms)
        self.model.train()
        with self._lent(buffers):
            value = self.loss(self.outputs(x, inputs), targets)
        if value.ndim:
            raise UsageError(f"the loss must return a scalar, got shape {tuple(value.shape)}; use its mean")
        if divisor is not None:
            value = value * (len(inputs) / divisor)
        return value + self.penalty(x) if self.penalty is not None else value

    def penalised(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The penalty and its gradient, the same for every client; (0, None) without one."""
        if self.penalty is None:
            return x.new_zeros(()), None
        point = x.detach().requires_grad_()
        with torch.enable_grad():
            value = self.penalty(point)
            (slope,) = torch.autograd.grad(value, point)
        return value.detach(), slope

    def initial_buffers(self) -> Buffers:
        """One row a client of every buffer of the model, as the caller gave it."""
        return {
            name: buffer.detach().expand(self.clients, *buffer.shape).clone()
            for name, buffer in self._untouched.named_buffers()
        }

    @torch.no_grad()
    def evaluate(self, x: Tensor, buffers: Buffers, batch_size: int | None = None) -> dict[str, float]:
        """Loss and accuracy on the test and validation sets, with the clients' averaged buffers.

        They come from copies of the model, the loss and the transform that never saw a client's records. `batch_size`:
        records at a time; by default as many as suit the device.
        """
        judge = self._judging()
        shared, found = averaged(buffers), {}
        x = x.clone()  # a model may write to its parameters
        judge.model.eval()
        for name, held, accuracy in (
            ("test_loss", self.test, "accuracy"),
            ("validation_loss", self.validation, "validation_accuracy"),
        ):
            if held is not None:
                size = batch_size or self._suiting(held, x.device)
                found[name], right = judge._score(held, x, shared, size)
                if right is not None:
                    found[accuracy] = right
        self._kernels_agree = judge._kernels_agree
        return found

    def _judging(self) -> Problem:
        """This problem with parts for evaluation, made when they are first needed."""
        if self._judge is None:
            self._judge = copy.copy(self)
            self._judge.model = _sharing_trainable(self._untouched)
            vars(self._judge).update(self._judges)
        return self._judge

    @staticmethod
    def _suiting(held: records.Records, device: torch.device) -> int:
        """How many records to evaluate at once: of small images on a GPU many, for launching is what takes time."""
        if device.type == "cuda":
            first, _ = held.batch(0, torch.zeros(1, dtype=torch.int64, device=device))
            if first.ndim == 4:
                return max(_LOOKED_AT, min(5 * _LOOKED_AT, 2**24 // first.numel()))
        return _LOOKED_AT

    def _score(self, held: records.Records, x: Tensor, buffers: Buffers, batch_size: int) -> tuple[float, float | None]:
        count = int(held.sizes[0])
        total, right = (
            x.new_zeros((), dtype=torch.float64),
            torch.zeros((), dtype=torch.int64, device=x.device),
        )
        judged = True
        eased = kernels.evaluating if self._eased(held, x, buffers) else nullcontext
        for rows in torch.arange(count, device=x.device).split(batch_size):
            inputs, targets = held.batch(0, rows)
            with eased():
                outputs = self.outputs(x, inputs, buffers)
            total += self.loss(outputs, targets).double() * len(targets)
            hits = correct(outputs, targets)
            judged = judged and hits is not None
            right += hits.sum() if hits is not None else 0
        return float(total) / count, float(right) / count if judged else None

    def _eased(self, held: records.Records, x: Tensor, buffers: Buffers) -> bool:
        """Whether kernels may help to evaluate: on a GPU, once they were seen to change nothing that matters."""
        if not kernels.usable(x):
            return False
        if self._kernels_agree is None:
            inputs, _ = held.batch(0, torch.arange(min(_COMPARED, int(held.sizes[0])), device=x.device))
            plain = self.outputs(x, inputs, buffers)
            with kernels.evaluating():
                eased = self.outputs(x, inputs, buffers)
            self._kernels_agree = bool((eased - plain).norm() <= _CLOSE * plain.norm())
            if not self._kernels_agree:
                logging.getLogger("normec").warning("kernels are not used in evaluations: their outputs differ")
        return self._kernels_agree

    def model_at(self, x: Tensor, buffers: Buffers) -> nn.Module:
        """A copy of the model with parameters x and the averaged buffers, ready for use.

        Everything else is as the caller gave it: nothing that training left in the model goes with it.
        """
        model = copy.deepcopy(self._untouched).eval()
        with torch.no_grad():
            for name, value in self.unflatten(x).items():
                model.get_parameter(name).copy_(value)
        for name, value in averaged(buffers).items():
            module, _, key = name.rpartition(".")
            model.get_submodule(module)._buffers[key] = value.clone()
        return model

    def to(self, device: torch.device, dtype: torch.dtype | None = None) -> Problem:
        """The same problem on another device, its model and floating inputs in `dtype`."""
        moved = copy.copy(self)
        moved._kernels_agree = moved._judge = None
        moved._untouched = copy.deepcopy(self._untouched).to(device=device, dtype=dtype)
        moved.model = _sharing_trainable(moved._untouched)
        moved.x0 = self.x0.to(device=device, dtype=dtype)
        moved.records = self.records.to(device)
        moved.test = self.test.to(device) if self.test is not None else None
        moved.validation = self.validation.to(device) if self.validation is not None else None
        return moved

    def fingerprint(self) -> dict[str, Any]:
        """What makes a checkpoint of this problem unfit for another."""
        return {
            "clients": self.clients,
            "dimension": len(self.x0),
            "start": records.checksum(self.x0),
            "data": self.records.digest(),
            "test": self.test.digest() if self.test is not None else None,
            "value at the start": self._probe(),
            "parts": [_named(part) for part in (self.loss, self.augment, self.transform)],
            "penalty": float(self.penalty(torch.ones_like(self.x0))) if self.penalty is not None else None,
        }

    @torch.no_grad()
    def _probe(self) -> str:
        """The loss of a few records at the start, to three digits: another loss, model or transform shows here.

        Computed by copies, which may keep what they saw: nothing else is made of them.
        """
        probe = copy.copy(self)
        probe.model = _sharing_trainable(self._untouched).eval()
        vars(probe).update({name: _copied(part) for name, part in self._judges.items()})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a transform may draw
            inputs, targets = self.records.batch(0, torch.arange(min(8, int(self.records.sizes[0]))))
            return f"{float(probe.loss(probe.outputs(self.x0.clone(), inputs), targets).mean()):.2e}"

    @contextmanager
    def _lent(self, buffers: Buffers) -> Iterator[None]:
        """The model with a client's buffers in place of its own; what forward makes of them is kept in `buffers`.

        `functional_call` would lose a buffer that forward assigns anew instead of changing it in place.
        """
        homes = {name: (self.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in buffers}
        own = {name: module._buffers[key] for name, (module, key) in homes.items()}
        for name, (module, key) in homes.items():
            module._buffers[key] = buffers[name].clone()
        try:
            yield
        finally:
            for name, (module, key) in homes.items():
                after = module._buffers[key]
                if after is not None:
                    buffers[name].copy_(after.detach())
                module._buffers[key] = own[name]

    def moved_constants(self) -> list[str] | None:
        """Frozen parameters that training has changed; None where the model has none."""
        now = dict(self.model.named_parameters())
        frozen = [(name, p) for name, p in self._untouched.named_parameters() if not p.requires_grad]
        return (
            None
            if not frozen
            else [name for name, before in frozen if name not in now or not torch.equal(before, now[name])]
        )

    @property
    def statistics(self) -> bool:
        """Whether the model keeps running statistics of the data (BatchNorm), which no noise covers."""
        return any(name.rpartition(".")[2].startswith("running_") for name, _ in self.model.named_buffers())

    def prepared(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """Records as the model takes them: transformed, in its precision, images with their channels last."""
        if self.transform is not None:
            inputs = self.transform(inputs)
        if inputs.is_floating_point():
            inputs = inputs.to(dtype)
        return inputs.contiguous(memory_format=torch.channels_last) if inputs.ndim == 4 else inputs

    def augmented_by_client(self, inputs: Tensor, uniforms: Tensor | None) -> Tensor:
        """Records ``[c, B, ...]`` of several clients after the augmentation, which sees one client at a time.

        One that is known to treat every record alone sees all at once.
        """
        augment = self.augment
        if augment is None or uniforms is None:
            return inputs
        if treats_records_alone(augment):
            return augment(inputs, uniforms)
        return torch.stack([augment(own, drawn) for own, drawn in zip(inputs, uniforms, strict=True)])

    def prepared_by_client(self, inputs: Tensor, uniforms: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Records ``[c, B, ...]`` augmented and `prepared`, one after another ``[c * B, ...]``.

        A transform sees the records of one client at a time, so that no statistic of it couples clients.
        """
        inputs = self.augmented_by_client(inputs, uniforms)
        if treats_records_alone(self.transform):
            return self.prepared(inputs.flatten(0, 1), dtype)
        return torch.cat([self.prepared(own, dtype) for own in inputs])

    def outputs(self, x: Tensor, inputs: Tensor, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """The model's outputs at x; `buffers` in place of its own."""
        inputs = self.prepared(inputs, x.dtype)
        outputs: Tensor = functional_call(self.model, {**self.unflatten(x), **(buffers or {})}, (inputs,))
        return outputs


def _sharing_trainable(model: nn.Module) -> nn.Module:
    """A copy of the model with the same trainable parameters, for x takes their place wherever it is run."""
    same = {id(parameter): parameter for parameter in model.parameters() if parameter.requires_grad}
    return copy.deepcopy(model, same)


def _copied(part: Any) -> Any:
    """A copy with a state of its own; what cannot be copied is used as it is."""
    try:
        return copy.deepcopy(part)
    except Exception:  # locks, open files, whatever a part holds
        return part


def _named(part: object) -> str:
    """A name that is the same in another process."""
    return repr(part) if is_dataclass(part) else getattr(part, "__qualname__", type(part).__qualname__)


def averaged(buffers: Buffers) -> Buffers:
    """One set of buffers for evaluation: means over the clients; the largest of whole-number counters."""
    return {name: rows.mean(0) if rows.is_floating_point() else rows.amax(0) for name, rows in buffers.items()}


def correct(outputs: Tensor, targets: Tensor) -> Tensor | None:
    """Which predictions are right, or None where targets are not class numbers."""
    if targets.is_floating_point() or targets.ndim != 1:
        return None
    if outputs.ndim == 2 and outputs.shape[1] > 1:
        return outputs.argmax(1) == targets
    if outputs.numel() == len(targets):
        return (outputs.flatten() > 0) == (targets > 0)
    return None
