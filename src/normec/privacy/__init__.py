"""Differential privacy: the statement of a guarantee, the noise that it needs, the account of releases, and an audit.

statement → rules → release ⇄ accounting → noise, ledger, audit. Importing this package needs NumPy; torch comes with
the first name that computes with tensors, and other libraries are imported when they are used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import BudgetSpent
from .accounting import Account, Event, epsilon_of, sigma_for
from .audit import Audit, View, audit, audit_releases, audit_scores
from .facts import FULL, Facts, Refused, Sampling, Setting
from .grid_account import honest_parties
from .ledger import Head, Ledger, LedgerDamaged, LedgerInUse, Receipt
from .release import Calibrated, Release, calibrate, paper_sigma
from .rules import release
from .statement import Privacy

if TYPE_CHECKING:
    from .noise import ExactNoise, NoiseSource, SecureNoise, SeededNoise, noise_source, privatise, privatise_sum
    from .secure_sum import SumGrid

_WITH_TENSORS = {
    **dict.fromkeys(("ExactNoise", "NoiseSource", "SecureNoise", "SeededNoise", "noise_source"), "noise"),
    **dict.fromkeys(("privatise", "privatise_sum"), "noise"),
    "SumGrid": "secure_sum",
}

__all__ = [
    "FULL",
    "Account",
    "Audit",
    "BudgetSpent",
    "Calibrated",
    "Event",
    "ExactNoise",
    "Facts",
    "Head",
    "Ledger",
    "LedgerDamaged",
    "LedgerInUse",
    "NoiseSource",
    "Privacy",
    "Receipt",
    "Refused",
    "Release",
    "Sampling",
    "SecureNoise",
    "SeededNoise",
    "Setting",
    "SumGrid",
    "View",
    "audit",
    "audit_releases",
    "audit_scores",
    "calibrate",
    "epsilon_of",
    "honest_parties",
    "noise_source",
    "paper_sigma",
    "privatise",
    "privatise_sum",
    "release",
    "sigma_for",
]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TENSORS:
        raise AttributeError(f"module 'normec.privacy' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WITH_TENSORS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
