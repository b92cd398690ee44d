"""The methods as the paper's figures name them, and the run that each is at a point (α, β, γ) of the grids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normec.experiments.config import Scalar, make
from normec.experiments.grid import Cell, check

from . import protocol as protocols
from .protocol import Protocol


@dataclass(frozen=True)
class Arm:
    """A method: its settings of a run, with noise or not, for all rounds or the short run."""

    name: str
    settings: Mapping[str, Any]
    private: bool = False
    short: bool = False

    @property
    def smoothed(self) -> bool:
        """Whether it has an α."""
        return bool(self.settings["method"] != "clip21")


_WITH_SN = {"method": "normec", "server_norm": True, "decay": 0.0}
_WITHOUT_SN = {"method": "normec", "server_norm": False, "decay": 0.0}
_CLIP21 = {"method": "clip21", "decay": 0.0}

NORMEC = Arm("NormEC without SN", _WITHOUT_SN)
NORMEC_SN = Arm("NormEC with SN", _WITH_SN)
DPSGD = Arm("DP-SGD, no noise", {"method": "dpsgd-norm"})
CLIP21 = Arm("Clip21", _CLIP21)
DP_NORMEC = Arm("DP-NormEC without SN", _WITHOUT_SN, private=True)
DP_NORMEC_SN = Arm("DP-NormEC with SN", _WITH_SN, private=True)
DP_CLIP21 = Arm("DP-Clip21", _CLIP21, private=True)
DP_SHORT = Arm("DP-NormEC without SN, short", _WITHOUT_SN, private=True, short=True)
DP_SHORT_SN = Arm("DP-NormEC with SN, short", _WITH_SN, private=True, short=True)


def cell(protocol: Protocol, arm: Arm, beta: float, lr: float, alpha: float | None = None) -> Cell:
    """One run; β is Clip21's threshold τ, as in the paper's tables."""
    point: dict[str, Scalar] = {"beta": beta, "lr": lr}
    own = {"tau": beta} if not arm.smoothed else {"beta": beta}
    if arm.smoothed:
        own["alpha"] = point["alpha"] = protocol.alpha if alpha is None else alpha
    steps = protocols.extent(protocol).steps
    rounds = protocol.short_rounds if arm.short else protocol.rounds
    settings = {
        **protocols.shared(protocol),
        **arm.settings,
        **own,
        "lr": lr,
        "model": protocol.private_model if arm.private else protocol.model,
        "epochs" if protocol.round == "epoch" else "rounds": rounds,
        "evaluate_every": steps,
        "log_every": max(1, steps // 10),
        **(_noise(protocol, beta if not arm.smoothed else 1.0, rounds) if arm.private else {"private": False}),
    }
    if not arm.private and arm is not DPSGD:  # which has no memory
        settings["initial_memory"] = protocol.memory_start
    config = make(settings)
    check(config)
    return Cell(config, {"method": arm.name, **dict(sorted(point.items()))})


def cells(
    protocol: Protocol, arm: Arm, betas: Sequence[float], lrs: Sequence[float], alphas: Sequence[float | None] = (None,)
) -> list[Cell]:
    """Every combination."""
    return [cell(protocol, arm, beta, lr, alpha) for alpha in alphas for beta in betas for lr in lrs]


def _noise(protocol: Protocol, bound: float, rounds: int) -> dict[str, Any]:
    return {
        "private": True,
        "diagnostics": True,  # the paper draws the training loss of its private runs
        "sigma": protocols.sigma(protocol, bound, rounds),
        "delta": protocol.delta,
        "trust": protocol.trust,
        "relation": protocol.relation,
        # The paper's epochs are of a public data set, dealt in equal parts.
        "public_sizes": protocol.round == "epoch",
    }
