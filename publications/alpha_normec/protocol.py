"""The protocol of the paper's experiments: what the paper states, and a named default for everything it leaves open.

The defaults are the paper's own scale. The smaller scales change the data, the model and the number of rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from normec import Privacy, UsageError, models
from normec.data.entries import ENTRIES
from normec.data.folders import locate, missing
from normec.errors import nearest, one_of
from normec.experiments import build
from normec.privacy.record_sensitivity import Sensitivity
from normec.privacy.release import Release, paper_sigma
from normec.sampling.batches import rounds_of
from normec.settings import make as make_config

Origin = Literal["paper", "open", "reproduction"]


def _open(default: Any, says: str) -> Any:
    """A setting that the paper leaves open; `says` explains its values."""
    return Field(default, description=says, json_schema_extra={"origin": "open"})


def _stated(default: Any, says: str) -> Any:
    """A setting that the paper states."""
    return Field(default, description=says, json_schema_extra={"origin": "paper"})


def _own(default: Any, says: str) -> Any:
    """A setting of the reproduction, which the paper does not have."""
    return Field(default, description=says, json_schema_extra={"origin": "reproduction"})


class Protocol(BaseModel):
    """Every setting of the paper's experiments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scale: str = _own("paper", "smoke, small or paper; sets the defaults of the other settings")
    data: str = _stated("cifar10", "data set")
    records: int | None = _stated(None, "training images, drawn by the seed (default: all)")
    test_records: int | None = _stated(None, "test images (default: all)")
    model: str = _stated("resnet20", "model of the runs without noise")
    clients: int = _stated(10, "workers")
    batch_size: int | None = _stated(32, "images per gradient of a worker (None: all it has)")
    rounds: int = _stated(300, "communication rounds")
    short_rounds: int = _stated(
        150, "communication rounds of the short private runs (fig-dp-150); their noise is that of full runs"
    )
    alpha: float = _stated(0.01, "smoothing, except in the figures over alpha")
    alphas: tuple[float, ...] = _stated((0.01, 0.1, 1.0), "grid of alpha")
    betas: tuple[float, ...] = _stated((0.01, 0.1, 1.0, 10.0), "grid of beta, and of Clip21's threshold")
    lrs: tuple[float, ...] = _stated((0.001, 0.01, 0.1, 1.0), "grid of the step size gamma")
    seed: int = _stated(42, "seed of data, model, batches and noise")
    formula_epsilon: float = _stated(8.0, "epsilon that is put into the paper's noise formula; no run has this epsilon")
    delta: float = _stated(1e-5, "delta of the formula, and of the exact epsilon that is reported")

    round: Literal["epoch", "step"] = _open(
        "epoch", "a communication round is a pass over the worker's images (epoch) or one message (step)"
    )
    validation: float = _open(0.1, "share of the training images that is held out; the paper's 90/10")
    accuracy: Literal["test", "held-out"] = _open(
        "test", "test accuracy is that on the standard test images (test) or on the share held out (held-out)"
    )
    choose: Literal["validation", "paper"] = _open(
        "paper",
        "step size by the final accuracy on the share held out (validation), or as the paper prints it (paper); "
        "where it prints none, by validation",
    )
    split: Literal["iid", "label", "dirichlet"] = _open("iid", "how the images are split among the workers")
    augment: bool = _open(True, "random crop and flip, where the data set has them")
    memory_start: Literal["zero", "gradient"] = _open(
        "zero",
        "initial memories g_i: zero or the first gradient; always zero with noise, since the gradient would leak",
    )
    private_model: str = _open(
        "resnet20-gn", "model of the runs with noise; GroupNorm, because no noise covers the statistics of BatchNorm"
    )
    private_betas: tuple[float, ...] = _open((0.001, 0.01, 0.1, 1.0), "grid of beta with noise")
    private_lrs: tuple[float, ...] = _open((0.001, 0.01, 0.1), "grid of the step size gamma with noise")
    noise: Literal["total-variance", "total-norm", "variance", "per-coordinate"] = _open(
        "total-variance",
        "the formula's value s is E|z|^2 (total-variance), the square root of E|z|^2 (total-norm), a coordinate's "
        "variance (variance) or its standard deviation (per-coordinate)",
    )
    noise_rounds: Literal["rounds", "messages", "shared"] = _open(
        "rounds",
        "K in the formula counts communication rounds (rounds) or messages (messages); shared: K counts rounds, and "
        "the messages of a round share its noise",
    )
    trust: Literal["local", "secure-sum"] = _open(
        "local", "for the exact epsilon: the server sees each message (local) or their sum (secure-sum)"
    )
    relation: Literal["zero-out", "replace"] = _open(
        "zero-out", "for the exact epsilon: a worker is absent, or replaced"
    )
    short_server_norm: bool = _open(True, "server normalisation in fig-dp-150")
    precision: Literal["float32", "tf32", "bf16"] = _open("bf16", "arithmetic of gradients")
    few_logs: bool = _own(
        True,
        "log losses once per evaluation in the parts private and alpha, as in the committed records; they then have no "
        "training loss where a round is not evaluated",
    )
    device: str = _own("auto", "auto, cpu, cuda, cuda:1 …")

    @property
    def column(self) -> str:
        """The column of the records that the figures call test accuracy."""
        return "test" if self.accuracy == "test" else "held_out"


SCALES: Mapping[str, Mapping[str, Any]] = {
    "smoke": {
        "data": "digits",
        "model": "softmax",
        "private_model": "softmax",
        "rounds": 6,
        "short_rounds": 3,
        "lrs": (0.01, 0.1, 1.0),
        "private_lrs": (0.01, 0.1, 1.0),
        "choose": "validation",
        "precision": "float32",
        "few_logs": False,
        "device": "cpu",
    },
    "small": {
        "data": "fashion-mnist",
        "records": 4000,
        "test_records": 1000,
        "model": "cnn",
        "private_model": "cnn",
        "rounds": 20,
        "short_rounds": 10,
        "private_lrs": (0.001, 0.01, 0.1, 1.0),
        "choose": "validation",
        "precision": "tf32",
        "few_logs": False,
    },
    "paper": {},
}


def make(scale: str, readings: Mapping[str, Any] | None = None) -> Protocol:
    """The protocol at a scale.

    Args:
        scale: A name in `SCALES`.
        readings: Settings that differ from the defaults of the scale.

    Raises:
        UsageError: A name or a value is unknown.
    """
    one_of(SCALES, scale=scale)
    for name in readings or {}:
        if name not in Protocol.model_fields or name == "scale":
            guess = nearest(name, Protocol.model_fields)
            raise UsageError(
                f"there is no setting {name!r}{guess}; `python -m publications.alpha_normec figures --list` names all"
            )
    try:
        return Protocol.model_validate({**SCALES[scale], **(readings or {}), "scale": scale})
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg'].lower()}, got {first['input']!r}") from None


def origin(name: str) -> Origin:
    """Whether the paper states a setting, leaves it open, or does not have it."""
    extra: Any = Protocol.model_fields[name].json_schema_extra
    found: Origin = extra["origin"]
    return found


@dataclass(frozen=True)
class Extent:
    """Messages that a client sends per communication round, and the dimension of a message."""

    steps: int
    dimension: int


@lru_cache(maxsize=32)
def extent(protocol: Protocol) -> Extent:
    """The extent of the private model on the data; a data set of known size need not be installed."""
    entry = ENTRIES.get(protocol.data)
    if entry is None or entry.test_rows is None:
        problem = build.problem(make_config({**shared(protocol), "model": protocol.private_model}))
        if problem.sizes is None:
            raise UsageError(f"{protocol.data} has no records to pass over")
        sizes, dimension = problem.sizes, len(problem.x0)
    else:
        count = entry.rows if protocol.records is None else protocol.records
        kept = count - build.held_out(count, protocol.validation)
        sizes = torch.bincount(torch.arange(kept) * protocol.clients // kept)
        model = models.build(protocol.private_model, entry.shape, entry.classes).model
        dimension = sum(p.numel() for p in model.parameters() if p.requires_grad)
    steps = rounds_of(1, sizes, protocol.batch_size) if protocol.round == "epoch" else 1
    return Extent(steps, dimension)


def require_data(protocol: Protocol) -> None:
    """Raise `UsageError` if the data set of the protocol is not installed."""
    entry = ENTRIES.get(protocol.data)
    if entry is not None and entry.files and locate(entry) is None:
        raise UsageError(missing(entry))


def shared(protocol: Protocol) -> dict[str, Any]:
    """The settings that all runs share."""
    names = ("data", "records", "test_records", "clients", "batch_size", "split", "augment", "validation", "seed")
    return {name: getattr(protocol, name) for name in (*names, "precision", "device")}


def sigma(protocol: Protocol, bound: float) -> float:
    """The standard deviation per coordinate of a message whose norm is at most `bound`, by the paper's formula."""
    found = extent(protocol)
    counted = protocol.rounds * (found.steps if protocol.noise_rounds == "messages" else 1)
    privacy = Privacy(
        epsilon=protocol.formula_epsilon,
        delta=protocol.delta,
        trust="local",
        replay="variance" if protocol.noise.endswith("variance") else "per-coordinate",
    )
    release = Release(Sensitivity(bound), gain=1.0, drawn=1.0, rate=1.0, rounds=counted, bound=bound)
    size = paper_sigma(release, privacy)
    if protocol.noise.startswith("total"):
        size /= math.sqrt(found.dimension)
    return size / math.sqrt(found.steps) if protocol.noise_rounds == "shared" else size
