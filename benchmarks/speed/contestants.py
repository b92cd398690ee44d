"""Who takes part in the benchmark, under which name, and what each needs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch

from normec.errors import UsageError, one_of
from normec.gradients.choice import ENGINES
from normec.gradients.precision import autocast, products

from . import floor, naive, ours
from .clock import Clock
from .workloads import Case, Material

FLOOR, PASSES, ENGINE, NAIVE, RECORD, PEER = "floor", "passes", "engine", "naive", "record", "peer"

PEERS = {"pfl": "pfl", "flower": "flwr", "jax": "jax", "opacus": "opacus"}  # our name → the distribution's


@dataclass(frozen=True)
class Contestant:
    """One row of the table: how it runs is decided by its kind and `choice`."""

    kind: str
    choice: str = ""

    @property
    def name(self) -> str:
        return {
            FLOOR: f"floor, {self.choice}",
            PASSES: "memory passes",
            ENGINE: f"normec, {self.choice}",
            NAIVE: "hand-written loop",
            RECORD: "normec, per record",
            PEER: f"{self.choice}, per record" if self.per_record else self.choice,
        }[self.kind]

    @property
    def per_record(self) -> bool:
        """Whether every record's gradient is clipped on its own: other work, compared only among its like."""
        return self.kind == RECORD or (self.kind, self.choice) == (PEER, "opacus")

    @property
    def processes(self) -> bool:
        """Whether its memory is spread over several processes."""
        return (self.kind, self.choice) == (PEER, "flower")

    @property
    def needs(self) -> str | None:
        """The distribution that must be installed."""
        return PEERS[self.choice] if self.kind == PEER else None

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    def material(self, case: Case) -> Material:
        return Material(case, norm="group" if self.per_record else "batch")

    def run(self, material: Material, clock: Clock) -> str:
        """Rounds until the clock has seen enough; returns a remark for the table."""
        case = material.case
        if self.choice == "flower" and case.device != "cpu":
            raise UsageError("measured on the CPU only")
        if self.kind == ENGINE:
            return ours.run(material, clock, self.choice)
        if self.kind == RECORD:
            return ours.per_record(material, clock)
        with products(case.precision), autocast(torch.device(case.device), case.precision):
            if self.kind == FLOOR:
                return floor.step(material, clock, self.choice)
            if self.kind == PASSES:
                return floor.passes(material, clock)
            if self.kind == NAIVE:
                return naive.run(material, clock)
            said: str = importlib.import_module(f".peers.{self.choice}", __package__).run(material, clock)
            return said


def line_up(
    case: Case,
    engines: Sequence[str] | None = None,
    peers: Sequence[str] | None = None,
    floors: Sequence[str] | None = None,
) -> list[Contestant]:
    """The contestants of a case, in the order of the table; of what is not named, all.

    All engines are all but "auto", which is one of the others.
    """
    engines = engines if engines is not None else [name for name in ENGINES if name != "auto"]
    peers = peers if peers is not None else list(PEERS)
    found = [Contestant(FLOOR, name) for name in floor.variants(case) if floors is None or name in floors]
    found += [Contestant(PASSES), *(Contestant(ENGINE, engine) for engine in engines), Contestant(NAIVE)]
    found += [Contestant(PEER, peer) for peer in PEERS if peer in peers]
    if "opacus" in peers:
        found.insert(-1, Contestant(RECORD))
    return found


def check_names(engines: Sequence[str] | None, peers: Sequence[str] | None, floors: Sequence[str] | None) -> None:
    """Refuse a name that no contestant has."""
    for name in engines or []:
        one_of(ENGINES, engine=name)
    for name in peers or []:
        one_of(PEERS, peer=name)
    for name in floors or []:
        one_of(floor.VARIANTS, floor=name)
