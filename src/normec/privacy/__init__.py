"""Differential privacy: the statement of a guarantee, the noise that it needs, the account of releases, and an audit.

statement → rules → release ⇄ accounting → noise, ledger, audit. Importing this package needs torch and NumPy; other
libraries are imported when they are used.
"""

from ..errors import BudgetSpent
from .accounting import Account, Event, epsilon_of, sigma_for
from .audit import Audit, View, audit, audit_releases, audit_scores
from .facts import FULL, Facts, Refused, Sampling, Setting
from .ledger import Head, Ledger, LedgerDamaged, LedgerInUse, Receipt
from .noise import ExactNoise, NoiseSource, SecureNoise, SeededNoise, noise_source, privatise, privatise_sum
from .release import Calibrated, Release, calibrate, paper_sigma
from .rules import release
from .secure_sum import SumGrid, honest_parties
from .statement import Privacy

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
