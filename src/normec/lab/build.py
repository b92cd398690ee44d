"""From a configuration to what `train` takes: data dealt to clients, a model, a method."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Subset

from .. import data, models
from ..errors import UsageError
from ..problem import Problem
from ..sampling import FixedSize, Participation, Poisson
from ..streams import derive_seed
from .config import RunConfig

DEFAULT_CLIENTS = 10
DEFAULT_ROUNDS = 300


def problem(config: RunConfig) -> Problem:
    """The clients' data and the model at its start; the seed decides the split and the parameters."""
    clients = config.clients
    if clients is None and config.split != "column":  # a column says itself how many there are
        clients = DEFAULT_CLIENTS
    found = data.load(config.data, config.data_dir)
    inputs, targets = found.train.tensors
    groups = found.groups
    if config.column is not None:
        if config.split != "column":
            raise UsageError(f"column is for split = 'column', got split = {config.split!r}")
        if inputs.ndim != 2 or not 0 <= config.column < inputs.shape[1]:
            raise UsageError(f"column must name one of the {inputs[0].numel()} inputs, got {config.column}")
        groups = inputs[:, config.column]
    parts = data.split(
        targets,
        clients,
        config.split,
        derive_seed(config.seed, "split"),
        concentration=config.concentration,
        shards_per_client=config.shards,
        groups=groups,
    )
    built = models.build(
        config.model, found.shape, found.classes, hidden=config.hidden, seed=derive_seed(config.seed, "model")
    )
    return Problem(
        built.model,
        built.loss,
        clients=[Subset(found.train, part) for part in parts],  # type: ignore[arg-type]  # a tensor of indices
        test=found.test,
        penalty=models.nonconvex_penalty(config.penalty) if config.penalty else None,
        augment=found.augment if config.augment else None,
        transform=found.transform,
    )


def training(config: RunConfig) -> dict[str, Any]:
    """The keyword arguments of `train` that a configuration states."""
    rounds = DEFAULT_ROUNDS if config.rounds is None and config.epochs is None else config.rounds
    return {
        "lr": config.lr,
        "rounds": rounds,
        "epochs": config.epochs,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "participation": _participation(config),
        "initial_memory": config.initial_memory,
        "log_every": config.log_every,
        "evaluate_every": config.evaluate_every,
        "full_gradient": config.full_gradient,
        "device": device(config.device),
        "dtype": getattr(torch, config.dtype),
        "engine": config.engine,
        "checkpoint_seconds": config.checkpoint_seconds,
    }


def device(name: str) -> torch.device:
    """A device by name; "auto" is the GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):
        raise UsageError(f"there is no device {name!r} here; use auto, cpu or cuda") from None
    return found


def _participation(config: RunConfig) -> Participation | None:
    if config.sample_rate is not None and config.sample_count is not None:
        raise UsageError("give sample_rate or sample_count, not both")
    if config.sample_rate is not None:
        return Poisson(config.sample_rate)
    return FixedSize(config.sample_count) if config.sample_count is not None else None
