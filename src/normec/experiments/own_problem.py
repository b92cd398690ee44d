"""Models and data from a user's own file: `--model FILE.py:NAME` and `--data FILE.py:NAME`.

A model is a class or a function without arguments that returns a `torch.nn.Module`. Data are a function without
arguments, or its result: the clients' data sets, or a dict with the entry `clients` and any other arguments of
`normec.Problem` but the model, such as `test`, `validation`, `loss`, `target` or `metrics`. A model of this library
also needs the entry `classes`, the number of classes, which cannot be read from protected data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import models
from ..errors import UsageError, at_least
from ..problems.problem import Problem
from ..sampling.random_streams import derive_seed
from ..settings.config import RunConfig
from ..system.code_files import in_a_file, object_in_file

MODEL, DATA = "model of your own as FILE.py:NAME", "data set of your own as FILE.py:NAME"
# Settings that divide one table of records among clients. Data from a user's file are divided already.
OF_A_TABLE = (
    "records",
    "test_records",
    "split",
    "concentration",
    "shards",
    "column",
    "scaling",
    "validation",
)


def has_own_data(config: RunConfig) -> bool:
    """Whether the data come from a user's file."""
    return in_a_file(config.data)


def problem(config: RunConfig, penalty: Callable[[Tensor], Tensor] | None) -> Problem:
    """Return the problem with the data in a user's file and the model that the configuration names.

    Args:
        config: The configuration, whose data come from a file.
        penalty: The penalty that the configuration states.

    Raises:
        UsageError: A setting does not apply to such data, or the file does not fit.
    """
    defaults = RunConfig()
    for name in OF_A_TABLE:
        if name in config.model_fields_set and getattr(config, name) != getattr(defaults, name):
            raise UsageError(
                f"{name} does not apply to data from a file, which name the clients themselves; leave it out"
            )
    given = _arguments(config.data)
    classes = given.pop("classes", None)
    clients = given.pop("clients")
    if config.clients not in (None, len(clients)):
        raise UsageError(f"clients is {config.clients}, but {config.data} has {len(clients)}; leave it out")
    built = None if in_a_file(config.model) else _known_model(config, clients, classes)
    usual_loss = built.loss if built is not None else F.cross_entropy
    given.setdefault("loss", None if "batch_loss" in given else usual_loss)
    try:
        made = Problem(built.model if built is not None else model(config), clients=clients, penalty=penalty, **given)
    except TypeError as error:
        raise UsageError(f"{config.data} does not describe a problem: {error}") from None
    made.refuse_misfit(config.model)
    return made


def model(config: RunConfig) -> nn.Module:
    """Return the model in a user's file; its random parameters follow from the seed."""
    made = object_in_file(config.model, MODEL)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.public_seed, "model"))
        found = _called(made, config.model) if not isinstance(made, nn.Module) else made
    if not isinstance(found, nn.Module):
        raise UsageError(f"{config.model} must be a torch.nn.Module or return one, got {type(found).__name__}")
    return found


def _arguments(name: str) -> dict[str, Any]:
    """Return the arguments of the problem that a file gives."""
    found = object_in_file(name, DATA)
    found = _called(found, name) if callable(found) else found
    if isinstance(found, list | tuple):
        return {"clients": list(found)}
    if not isinstance(found, Mapping) or "clients" not in found:
        raise UsageError(
            f"{name} must return the clients' data sets in a list, or a dict with 'clients', got {type(found).__name__}"
        )
    known = {*inspect.signature(Problem).parameters, "classes"} - {"model", "penalty"}
    for key in found:
        if key not in known:
            raise UsageError(f"{name} has an entry {key!r}; a problem takes {', '.join(sorted(known))}")
    return dict(found)


def _called(made: Any, name: str) -> Any:
    required = [
        one.name
        for one in inspect.signature(made).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if required:
        raise UsageError(f"{name} must be callable without arguments, but needs {', '.join(required)}")
    return made()


def _known_model(config: RunConfig, clients: Any, classes: Any) -> models.Built:
    """Return a model of this library for the shape of the first record."""
    if classes is None:
        raise UsageError(
            f"{config.model} needs the number of classes: let {config.data} return a dict with 'clients' and 'classes'"
        )
    at_least(2, classes=classes)
    try:
        shape = tuple(clients[0][0][0].shape)
    except (TypeError, KeyError, IndexError, AttributeError):
        raise UsageError(
            f"{config.model} takes pairs of an input tensor and a class; give a model of your own for other data"
        ) from None
    seed = derive_seed(config.public_seed, "model")
    return models.build(config.model, shape, classes, hidden=config.hidden, seed=seed)


def short_name(name: str) -> str:
    """Return a name for folders: that of a data set or model, or of the object in a file."""
    return name.rpartition(":")[2] if in_a_file(name) else name.replace("/", "_")
