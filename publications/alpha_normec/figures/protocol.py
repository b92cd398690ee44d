"""How the paper's experiments are run: what it says, and a name and a default for everything that it leaves open.

The defaults are the paper's own scale; the smaller scales change what is trained and for how long, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from normec import models
from normec.data.entries import ENTRIES
from normec.data.folders import locate, missing
from normec.errors import UsageError, nearest, one_of
from normec.experiments import build
from normec.experiments.config import make as make_config
from normec.privacy.records import Sensitivity
from normec.privacy.release import Release, paper_sigma
from normec.privacy.statement import Privacy
from normec.sampling.batches import rounds_of


def _open(default: Any, says: str) -> Any:
    """A setting that the paper leaves open; `says` is what its values mean."""
    return Field(default, description=says, json_schema_extra={"reading": True})


def _said(default: Any, says: str) -> Any:
    """A setting that the paper states."""
    return Field(default, description=says)


class Protocol(BaseModel):
    """Every setting of the paper's experiments."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    scale: str = _said("paper", "smoke, small or paper: which defaults the other settings have")
    data: str = _said("cifar10", "data set")
    records: int | None = _said(None, "training images, drawn by the seed; None: all")
    test_records: int | None = _said(None, "test images; None: all")
    model: str = _said("resnet20", "model of the runs without noise")
    clients: int = _said(10, "workers")
    batch_size: int | None = _said(32, "images a worker and gradient; None: all it has")
    rounds: int = _said(300, "communication rounds")
    short_rounds: int = _said(150, "communication rounds of fig-dp-150")
    alpha: float = _said(0.01, "smoothing, in all figures but those over alpha")
    alphas: tuple[float, ...] = _said((0.01, 0.1, 1.0), "grid of alpha")
    betas: tuple[float, ...] = _said((0.01, 0.1, 1.0, 10.0), "grid of beta, and of Clip21's threshold")
    lrs: tuple[float, ...] = _said((0.001, 0.01, 0.1, 1.0), "grid of the step size gamma")
    seed: int = _said(42, "seed of data, model, batches and noise")
    formula_epsilon: float = _said(8.0, "what the paper's noise formula is asked for; no run has this epsilon")
    delta: float = _said(1e-5, "delta of the formula, and at which the exact epsilon is told")

    round: Literal["epoch", "step"] = _open(
        "epoch", "a communication round is a pass over the worker's images (epoch) or one message (step)"
    )
    validation: float = _open(0.1, "share of the training images held out; the paper's 90/10")
    accuracy: Literal["test", "held-out"] = _open(
        "test", "test accuracy is that on the standard test images (test) or on the share held out (held-out)"
    )
    choose: Literal["validation", "paper"] = _open(
        "paper",
        "step size by the final accuracy on the share held out (validation), or as the paper prints it (paper); "
        "where it prints none, by validation",
    )
    split: Literal["iid", "label", "dirichlet"] = _open("iid", "how the images are dealt to the workers")
    augment: bool = _open(True, "random crop and flip, where the data set has them")
    memory_start: Literal["zero", "gradient"] = _open(
        "zero", "g_i at the start: zero or the first gradient; with noise always zero, the other would leak"
    )
    private_model: str = _open(
        "resnet20-gn", "model of the runs with noise; BatchNorm's statistics are not covered by any noise, so GroupNorm"
    )
    private_betas: tuple[float, ...] = _open((0.001, 0.01, 0.1, 1.0), "grid of beta with noise")
    noise: Literal["total-variance", "total-norm", "variance", "per-coordinate"] = _open(
        "total-variance",
        "the formula's value s is E|z|^2 (total-variance), the square root of E|z|^2 (total-norm), a coordinate's "
        "variance (variance) or its standard deviation (per-coordinate)",
    )
    noise_rounds: Literal["rounds", "messages", "shared"] = _open(
        "rounds",
        "K in the formula is the communication rounds (rounds) or all messages (messages); shared: the rounds, and "
        "the messages of a round share its noise",
    )
    trust: Literal["local", "secure-sum"] = _open(
        "local", "for the exact epsilon: the server sees each message (local) or their sum (secure-sum)"
    )
    relation: Literal["zero-out", "replace"] = _open("zero-out", "for the exact epsilon: a worker absent, or another")
    short_server_norm: bool = _open(True, "server normalisation in fig-dp-150")
    precision: Literal["float32", "tf32", "bf16"] = _open("tf32", "arithmetic of gradients on a GPU")
    device: str = _said("auto", "auto, cpu, cuda, cuda:1 …")

    @property
    def column(self) -> str:
        """The history's column that the figures call test accuracy."""
        return "accuracy" if self.accuracy == "test" else "validation_accuracy"


SCALES: Mapping[str, Mapping[str, Any]] = {
    "smoke": {
        "data": "digits",
        "model": "softmax",
        "private_model": "softmax",
        "rounds": 6,
        "short_rounds": 3,
        "lrs": (0.01, 0.1, 1.0),
        "choose": "validation",
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
        "choose": "validation",
    },
    "paper": {},
}


def make(scale: str, readings: Mapping[str, Any] | None = None) -> Protocol:
    """The protocol at a scale, with some settings read otherwise; what is wrong is said in one line."""
    one_of(SCALES, scale=scale)
    for name in readings or {}:
        if name not in Protocol.model_fields or name == "scale":
            guess = nearest(name, Protocol.model_fields)
            raise UsageError(f"there is no reading {name!r}{guess}; `normec reproduce --list` names all")
    try:
        return Protocol.model_validate({**SCALES[scale], **(readings or {}), "scale": scale})
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{first['loc'][0]}: {first['msg'].lower()}, got {first['input']!r}") from None


def is_reading(name: str) -> bool:
    """Whether the paper leaves a setting open."""
    extra = Protocol.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("reading"))


@dataclass(frozen=True)
class Extent:
    """Messages that a client sends in a communication round, and the numbers in one."""

    steps: int
    dimension: int


@lru_cache(maxsize=32)
def extent(protocol: Protocol) -> Extent:
    """Read off the private model and the data; a set published with its test part is known without being here."""
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


def at_hand(protocol: Protocol) -> None:
    """Refuse a protocol whose data set is not here, before anything runs."""
    entry = ENTRIES.get(protocol.data)
    if entry is not None and entry.files and locate(entry) is None:
        raise UsageError(missing(entry))


def shared(protocol: Protocol) -> dict[str, Any]:
    """The settings of a run that all runs have alike."""
    names = ("data", "records", "test_records", "clients", "batch_size", "split", "augment", "validation", "seed")
    return {name: getattr(protocol, name) for name in (*names, "precision", "device")}


def sigma(protocol: Protocol, bound: float, rounds: int) -> float:
    """The noise a coordinate of a message of norm at most `bound`, by the paper's formula as `noise` reads it."""
    found = extent(protocol)
    counted = rounds * (found.steps if protocol.noise_rounds == "messages" else 1)
    privacy = Privacy(
        epsilon=protocol.formula_epsilon,
        delta=protocol.delta,
        replay="variance" if protocol.noise.endswith("variance") else "per-coordinate",
    )
    release = Release(Sensitivity(bound), gain=1.0, drawn=1.0, rate=1.0, rounds=counted, bound=bound)
    size = paper_sigma(release, privacy)
    if protocol.noise.startswith("total"):
        size /= math.sqrt(found.dimension)
    return size / math.sqrt(found.steps) if protocol.noise_rounds == "shared" else size
