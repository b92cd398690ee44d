"""The user's code in an app (`Task`), and what is made of it: a party's problem, the first model, its evaluation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import Dataset

from ...errors import UsageError
from ...problems.problem import Problem


class Task(Protocol):
    """The code of the user. It may also define `transform`, `augment` and `penalty`, as in `normec.Problem`.

    `test` returns the test data of the server: None, one set, or one set for each party.
    """

    def model(self) -> nn.Module: ...
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def data(self, partition: int, partitions: int) -> Dataset[Any]: ...
    def test(self) -> Dataset[Any] | list[Dataset[Any]] | None: ...


def start_of(
    task: Task, model: nn.Module, test: Dataset[Any] | list[Dataset[Any]] | None
) -> tuple[Tensor, Callable[[Tensor], Mapping[str, float]] | None, float | None]:
    """The initial x, the evaluation of a model on the server's own test data, if it has any, and `Problem.majority`."""
    trainable = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UsageError("the model has no trainable parameters")
    if test is None:
        return torch.cat(trainable), None, None
    problem = _problem(task, model, test if isinstance(test, list) else [test], test)
    buffers = problem.initial_buffers()
    return problem.x0, lambda x: problem.evaluate(x, buffers), problem.majority


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """Return a copy of the model with x as its trainable parameters."""
    found = copy.deepcopy(model)
    vector_to_parameters(x.detach().clone(), (p for p in found.parameters() if p.requires_grad))
    return found


def first_model(task: Task) -> Tensor:
    """The parameters of the app's model, as one vector."""
    return start_of(task, task.model(), None)[0]


def party_problem(task: Task, records: Dataset[Any]) -> Problem:
    """The problem of a party, whose one client has these records."""
    return _problem(task, task.model(), [records], None)


def _problem(
    task: Task, model: nn.Module, clients: list[Dataset[Any]], test: Dataset[Any] | list[Dataset[Any]] | None
) -> Problem:
    extra: dict[str, Any] = {name: getattr(task, name, None) for name in ("penalty", "augment", "transform")}
    return Problem(model, task.loss, clients, test, **extra)


def folder_of(task: Task) -> Path:
    """The folder of the app to which a task belongs: the nearest one with a pyproject.toml."""
    file = getattr(task, "__file__", None)
    for folder in Path(file).resolve().parents if file else ():
        if (folder / "pyproject.toml").exists():
            return folder
    return Path.cwd()
