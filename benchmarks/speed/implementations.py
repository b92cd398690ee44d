"""The implementations that are compared, their names, and the packages they need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from normec.errors import one_of
from normec.gradients.choice import ENGINES
from normec.gradients.precision import autocast, products

from . import engines, floor, hand_written
from .clock import Clock
from .workloads import Case, WorkloadData

FLOOR, PASSES, ENGINE, HAND_WRITTEN, RECORD, PEER = "floor", "passes", "engine", "hand-written", "record", "peer"

PEERS = {"pfl": "pfl", "flower": "flwr", "jax": "jax", "opacus": "opacus"}  # name → distribution


@dataclass(frozen=True)
class Implementation:
    """One row of the table, which is determined by its kind and `choice`."""

    kind: str
    choice: str = ""

    @property
    def name(self) -> str:
        return {
            FLOOR: f"floor, {self.choice}",
            PASSES: "memory passes",
            ENGINE: f"normec, {self.choice}",
            HAND_WRITTEN: "hand-written loop",
            RECORD: f"normec, per record, {self.choice}" if self.choice else "normec, per record",
            PEER: f"{self.choice}, per record" if self.per_record else self.choice,
        }[self.kind]

    @property
    def per_record(self) -> bool:
        """Whether the gradient of every record is clipped; such rows are compared only with each other."""
        return self.kind == RECORD or (self.kind, self.choice) == (PEER, "opacus")

    @property
    def compiles(self) -> bool:
        """Whether TorchInductor compiles the model, which takes longer than all else before the first round."""
        return self.choice.startswith(("compiled", "autotuned"))

    @property
    def processes(self) -> bool:
        """Whether the implementation uses several processes."""
        return (self.kind, self.choice) == (PEER, "flower")

    @property
    def needs(self) -> str | None:
        """The distribution that must be installed, if any."""
        return PEERS[self.choice] if self.kind == PEER else None

    def misfit(self, case: Case) -> str | None:
        """Why the implementation cannot do a case, as far as that is known before its process is started."""
        if self.choice == "flower" and case.device != "cpu":
            return "measured on the CPU only"
        if (self.kind, self.choice) == (PEER, "jax") and case.precision == "bf16":
            return "JAX has no autocast, so it would need another model for bf16"
        if (self.kind, self.choice) == (PEER, "opacus") and case.precision == "bf16":
            return "Opacus 1.6 assigns gradients of bfloat16 to parameters of float32, which PyTorch refuses"
        return case.lack_of_records(case.spec.batch) if self.kind == RECORD else None

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def data(self, case: Case) -> WorkloadData:
        return WorkloadData(case, norm="group" if self.per_record else "batch")

    def run(self, data: WorkloadData, clock: Clock) -> str:
        """Run rounds until the clock has timed enough of them; returns a remark for the table."""
        case = data.case
        if self.kind == ENGINE:
            return engines.run(data, clock, self.choice)
        if self.kind == RECORD:
            return engines.per_record(data, clock, self.choice or "auto")
        with products(case.precision), autocast(torch.device(case.device), case.precision):
            if self.kind == FLOOR:
                return floor.step(data, clock, self.choice)
            if self.kind == PASSES:
                return floor.passes(data, clock)
            if self.kind == HAND_WRITTEN:
                return hand_written.run(data, clock)
            remark: str = importlib.import_module(f".peers.{self.choice}", __package__).run(data, clock)
            return remark


def implementations_of(
    case: Case,
    engines: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    floors: Sequence[str] | None = None,
) -> list[Implementation]:
    """The implementations of a case in the order of the table; by default those that may be the fastest.

    That leaves out the engine "auto", which is one of the others, "batched", which is for local steps, "linear" for
    networks, and on a GPU what takes minutes to compile and is slower: the floor that searches for kernels, and the
    compiled passes of models that are convolutions for the most part.
    """
    compiled = case.device == "cpu" or not case.spec.convolves
    if engines is None:
        left_out = {"auto", "batched"} | ({"linear"} if case.spec.model != "logistic" else set())
        left_out |= set() if compiled else {"compiled"}
        engines = [name for name in ENGINES if name not in left_out]
    peers = peers if peers is not None else list(PEERS)
    floors = floors if floors is not None else floor.usual(case)
    found = [Implementation(FLOOR, name) for name in floor.variants(case) if name in floors]
    found += [
        Implementation(PASSES),
        *(Implementation(ENGINE, engine) for engine in engines),
        Implementation(HAND_WRITTEN),
    ]
    found += [Implementation(PEER, peer) for peer in PEERS if peer in peers and peer in case.spec.peers]
    if "opacus" in peers:
        at = len(found) - ("opacus" in case.spec.peers)
        both = case.device != "cpu" and compiled
        found[at:at] = [Implementation(RECORD), *([Implementation(RECORD, "compiled")] if both else [])]
    return found


def check_names(engines: Sequence[str] | None, peers: Sequence[str] | None, floors: Sequence[str] | None) -> None:
    """Refuse unknown names."""
    for name in engines or []:
        one_of(ENGINES, engine=name)
    for name in peers or []:
        one_of(PEERS, peer=name)
    for name in floors or []:
        one_of(floor.VARIANTS, floor=name)
