"""A copy of the model that computes one client's gradient by plain autograd, with as little Python as possible."""

from __future__ import annotations

import copy
from collections.abc import Callable
from operator import is_

import torch
from torch import Tensor

from ..problems.client_data import ResidentRecords
from ..problems.objective import Buffers
from ..problems.problem import Problem, buffer_owner
from .precision import Precision, autocast
from .restored import UserState


class ModelCopy:
    """The model with parameters and buffers of its own; several copies may run at the same time.

    The reference loop calls the user's model with views of x in place of its parameters. Here `set` copies x into the
    parameters, so that the model is called without `functional_call`, and can be compiled or recorded.
    """

    def __init__(
        self, problem: Problem, records: ResidentRecords, precision: Precision, *, private: bool = False
    ) -> None:
        """In a `private` run code of the user's own starts every client as it was before (`restored`)."""
        self._problem, self._records, self._precision = problem, records, precision
        self.model = copy.deepcopy(problem.model)
        if records.inputs.ndim == 4:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.forward: Callable[[Tensor], Tensor] = self.model
        self._parameters: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        self._private, self._called = private, self._calls()
        self._state = UserState(*self._called, model=self.model) if private else UserState()
        self._buffer_owners = {name: buffer_owner(self.model, name) for name, _ in self.model.named_buffers()}

    @torch.no_grad()
    def set(self, x: Tensor) -> None:
        """Copy the parameters from the flat `x`."""
        torch._foreach_copy_(self._parameters, self._parts(x))

    def holds(self, x: Tensor) -> bool:
        """Whether the parameters are still those of `x`: a model may write to them. Waits for the device."""
        return all(map(torch.equal, self._parameters, self._parts(x)))

    def gradient(self, buffers: Buffers, numbers: Tensor, uniforms: Tensor | None, grad: Tensor) -> Tensor:
        """Write the gradient on the records `numbers` to `grad`, update `buffers` in place, and return the loss.

        The penalty is left out, because it is the same for every client.
        """
        if self._private and not all(map(is_, self._called, self._calls())):  # a callback has exchanged one
            self._called = self._calls()
            self._state = UserState(*self._called, model=self.model)
        with self._state.restored():
            return self._gradient(buffers, numbers, uniforms, grad)

    def _calls(self) -> tuple[object, ...]:
        return self._problem.loss, self._problem.augment, self._problem.transform

    def _gradient(self, buffers: Buffers, numbers: Tensor, uniforms: Tensor | None, grad: Tensor) -> Tensor:
        inputs, targets = self._records.inputs.index_select(0, numbers), self._records.targets[numbers]
        if self._problem.augment is not None and uniforms is not None:
            inputs = self._problem.augment(inputs, uniforms)
        inputs = self._problem.prepared(inputs, grad.dtype)
        for name, (module, key) in self._buffer_owners.items():
            module._buffers[key] = buffers[name]
        self.model.train()
        with torch.enable_grad(), autocast(grad.device, self._precision):
            loss: Tensor = self._problem.loss(self.forward(inputs), targets)
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        with torch.no_grad():
            for name, (module, key) in self._buffer_owners.items():
                after = module._buffers[key]
                if after is not None and after is not buffers[name]:  # assigned, not changed in place
                    buffers[name].copy_(after)
            flat = [
                g.reshape(-1) if g is not None else p.new_zeros(p.numel())
                for g, p in zip(found, self._parameters, strict=True)
            ]
            torch.cat(flat, out=grad)
        return loss.detach()

    def _parts(self, x: Tensor) -> list[Tensor]:
        parts = x.detach().split([p.numel() for p in self._parameters])
        return [part.view(p.shape) for part, p in zip(parts, self._parameters, strict=True)]
