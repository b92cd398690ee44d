"""The methods under the names that the paper gives them, and the configuration of one run of a method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from normec.experiments.grid import check
from normec.settings import RunConfig, make

from . import protocol as protocols
from .protocol import Protocol

EVALUATIONS = 60  # in a run of full length


@dataclass(frozen=True)
class PaperMethod:
    """A method of the paper: its name in tables, its name in cells, its settings, and whether noise is added."""

    name: str
    slug: str
    settings: Mapping[str, Any] = field(hash=False)
    private: bool = False

    @property
    def smoothed(self) -> bool:
        """Whether the method has an α."""
        return bool(self.settings["method"] != "clip21")


_WITH_SN = {"method": "normec", "server_norm": True, "decay": 0.0}
_WITHOUT_SN = {"method": "normec", "server_norm": False, "decay": 0.0}
_CLIP21 = {"method": "clip21", "decay": 0.0}

NORMEC = PaperMethod("NormEC without SN", "normec", _WITHOUT_SN)
NORMEC_SN = PaperMethod("NormEC with SN", "normec-sn", _WITH_SN)
DPSGD = PaperMethod("DP-SGD, no noise", "dpsgd-norm", {"method": "dpsgd-norm"})
CLIP21 = PaperMethod("Clip21", "clip21", _CLIP21)
DP_NORMEC = PaperMethod("DP-NormEC without SN", "normec", _WITHOUT_SN, private=True)
DP_NORMEC_SN = PaperMethod("DP-NormEC with SN", "normec-sn", _WITH_SN, private=True)
DP_CLIP21 = PaperMethod("DP-Clip21", "clip21", _CLIP21, private=True)
SN_BY_TENSOR = PaperMethod("NormEC with SN by tensor", "normec-sn", {**_WITH_SN, "server_norm": "by-tensor"})
SN_IN_PLACE = PaperMethod("NormEC with SN in place", "normec-sn", {**_WITH_SN, "server_norm": "in-place"})

TABLE_METHODS = (NORMEC, NORMEC_SN, DPSGD, CLIP21)
PRIVATE_METHODS = (DP_NORMEC_SN, DP_NORMEC, DP_CLIP21)


@lru_cache(maxsize=4096)  # each figure asks for its runs again
def configure(
    protocol: Protocol,
    method: PaperMethod,
    beta: float,
    lr: float,
    alpha: float | None = None,
    *,
    short: bool = False,
    rows: int = 10,
) -> RunConfig:
    """The configuration of one run.

    Args:
        protocol: The paper's protocol.
        method: The method to train.
        beta: β, or the threshold τ of Clip21, which the paper's tables also call β.
        lr: The step size γ.
        alpha: α; by default the protocol's.
        short: Train for `short_rounds` communication rounds. The noise is that of a run of full length.
        rows: Rows of the history per evaluation.
    """
    own = {"tau": beta}
    if method.smoothed:
        own = {"beta": beta, "alpha": protocol.alpha if alpha is None else alpha}
    between = max(1, protocol.rounds // EVALUATIONS) * protocols.extent(protocol).steps
    settings = {
        **protocols.shared(protocol),
        **method.settings,
        **own,
        "lr": lr,
        "model": protocol.private_model if method.private else protocol.model,
        "epochs" if protocol.round == "epoch" else "rounds": protocol.short_rounds if short else protocol.rounds,
        "evaluate_every": between,
        "log_every": max(1, between // rows),
        **(_noise(protocol, 1.0 if method.smoothed else beta) if method.private else {"private": False}),
    }
    if not method.private and method is not DPSGD:  # DP-SGD has no memory
        settings["initial_memory"] = protocol.memory_start
    config = make(settings)
    check(config)
    return config


def _noise(protocol: Protocol, bound: float) -> dict[str, Any]:
    return {
        "private": True,
        "diagnostics": True,  # the paper draws the training loss of its private runs
        "sigma": protocols.sigma(protocol, bound),
        "delta": protocol.delta,
        "trust": protocol.trust,
        "relation": protocol.relation,
        # The paper's epochs are passes over a public data set that is split into equal parts.
        "public_sizes": protocol.round == "epoch",
    }
