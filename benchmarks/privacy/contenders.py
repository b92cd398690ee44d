"""The contenders: methods, the ranges from which their settings are drawn, and what they cost.

A new contender is one entry of `CONTENDERS`; one of your own may also stand in a file beside its study. A range is
written by its role, such as `steps` or `memory`; a study may give a role other bounds, so that all contenders with that
role get them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Range = tuple[float, float]
Roles = tuple[tuple[str, Range], ...]  # bounds of some roles
Setting = dict[str, Any]
Family = Literal["plain", "momentum", "local", "error feedback"]

ROUNDS = (50, 100, 200)
_SHORTER = 0.3  # momentum 0.9 adds up ten steps, which partly cancel
ROLES: Mapping[str, Range] = {
    "steps": (0.02, 2.0),  # step sizes where directions have norm one, or are means of vectors of norm one
    "plain_steps": (0.1, 30.0),  # step sizes of other directions
    "adam_steps": (0.001, 0.1),
    "server_steps": (0.3, 3.0),  # step sizes for means of model updates
    "local_steps": (0.03, 3.0),  # step sizes of the clients' own steps
    "memory": (0.003, 0.3),  # the change of a memory per round: β, or the threshold of Clip21
    "threshold": (0.05, 3.0),  # the clipping threshold of DP-SGD and DP-FedAvg
}


@dataclass(frozen=True)
class Contender:
    """A method with its ranges.

    Attributes:
        method: A name of the catalogue, or FILE.py:CLASS.
        family: What sets it apart: nothing, a step that remembers, local steps, or error feedback.
        ranges: For each setting that is drawn, a role or two bounds (a log-uniform range), or a list of choices.
        fixed: The other settings.
        scale: A factor of the bounds of the step size.
    """

    method: str
    family: Family
    ranges: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def error_feedback(self) -> bool:
        return self.family == "error feedback"

    @property
    def local(self) -> bool:
        """Whether clients make steps of their own."""
        return "local_lr" in self.ranges

    def bounds(self, roles: Mapping[str, Range]) -> dict[str, Any]:
        """The bounds or choices of each setting that is drawn, with the bounds of these roles."""
        found: dict[str, Any] = {}
        for name, values in self.ranges.items():
            given: Any = roles[values] if isinstance(values, str) else values
            found[name] = type(given)(self.scale * one for one in given) if name == "lr" else given
        return found


def _momentum(contender: Contender) -> Contender:
    family: Family = contender.family if contender.error_feedback else "momentum"
    fixed = {**contender.fixed, "server_optimizer": "momentum"}
    return Contender(contender.method, family, contender.ranges, fixed, _SHORTER)


def _adam(contender: Contender) -> Contender:
    family: Family = contender.family if contender.error_feedback else "momentum"
    fixed = {**contender.fixed, "server_optimizer": "adam"}
    return Contender(contender.method, family, {**contender.ranges, "lr": "adam_steps"}, fixed)


_RECORD = Contender("dpsgd-clip", "plain", {"record_clip": "threshold", "lr": "plain_steps"}, {"tau": 10.0})
_AUTO = Contender("dpsgd-clip", "plain", {"lr": "steps"}, {"tau": 10.0, "record_clip": "auto"})
_FORGETTING = [0.05, 0.1, 0.2, 0.4]
_NORM = Contender("dpsgd-norm", "plain", {"lr": "steps"})
_CLIP = Contender("dpsgd-clip", "plain", {"tau": "threshold", "lr": "plain_steps"})
_FORGETS = Contender("normec", "error feedback", {"beta": "memory", "decay": _FORGETTING, "lr": "steps"})
_LOCAL = {"local_steps": [2, 5], "local_lr": "local_steps"}

CONTENDERS: Mapping[str, Contender] = {
    "DP-SGD, norm": _NORM,
    "DP-SGD, clip": _CLIP,
    "DP-SGD, adaptive clip": Contender(
        "dpsgd-adaptive", "plain", {"quantile": [0.3, 0.5, 0.7, 0.9], "lr": "plain_steps"}
    ),
    "DP-SGD, norm, momentum": _momentum(_NORM),
    "DP-SGD, clip, momentum": _momentum(_CLIP),
    "DP-SGD, norm, Adam": _adam(_NORM),
    "DP-SGD, clip, Adam": _adam(_CLIP),
    "DP-FedAvg": Contender("fedavg", "local", {"tau": "threshold", **_LOCAL, "lr": "server_steps"}),
    "DP-SCAFFOLD": Contender("scaffold", "local", {"tau": "threshold", **_LOCAL, "lr": "server_steps"}),
    "NormEC": Contender("normec", "error feedback", {"beta": "memory", "lr": "steps"}, {"decay": 0.0}),
    "NormEC, no SN": Contender(
        "normec", "error feedback", {"beta": "memory", "lr": "plain_steps"}, {"decay": 0.0, "server_norm": False}
    ),
    "NormEC, forgetting": _FORGETS,
    "NormEC, forgetting, momentum": _momentum(_FORGETS),
    "NormEC, forgetting, Adam": _adam(_FORGETS),
    "NormEC, client momentum": Contender(
        "normec-momentum",
        "error feedback",
        {"beta": "memory", "decay": _FORGETTING, "client_momentum": [0.5, 0.9], "lr": "steps"},
    ),
    "DP-Clip21": Contender("clip21", "error feedback", {"tau": "memory", "lr": "plain_steps"}),
    "Clip21-SGD2M": Contender(
        "clip21-sgd2m", "error feedback", {"tau": "memory", "client_momentum": [0.5, 0.9], "lr": "plain_steps"}
    ),
    "Fed-NormEC": Contender(
        "fed-normec", "error feedback", {"beta": "memory", "decay": _FORGETTING, **_LOCAL, "lr": "steps"}
    ),
}

# Contenders at record level: the gradient of each record is clipped. A client's message stays far below tau.
RECORD_CONTENDERS: Mapping[str, Contender] = {
    "DP-GD, records clipped": _RECORD,
    "DP-GD, records clipped, momentum": _momentum(_RECORD),
    "DP-GD, records clipped, Adam": _adam(_RECORD),
    "DP-GD, AUTO-S, momentum": _momentum(_AUTO),
}
ALL: Mapping[str, Contender] = {**CONTENDERS, **RECORD_CONTENDERS}
