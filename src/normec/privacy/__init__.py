"""Privacy that is true: who is protected, how much noise that takes, what was spent, and whether it holds.

statement → rules → release ⇄ accounting → noise, ledger, audit. Importing this needs torch and numpy; the rest is
asked for where it is used.
"""

from normec.privacy.accounting import Account, Event, epsilon_of, sigma_for
from normec.privacy.audit import Audit, View, audit, audit_releases, audit_scores
from normec.privacy.ledger import BudgetSpent, Head, Ledger, LedgerDamaged, LedgerInUse, Receipt
from normec.privacy.noise import (
    ExactNoise,
    NoiseSource,
    SecureNoise,
    SeededNoise,
    noise_source,
    privatise,
    privatise_sum,
)
from normec.privacy.release import Calibrated, Release, calibrate, paper_sigma
from normec.privacy.rules import release
from normec.privacy.setting import FULL, Facts, Refused, Sampling, Setting
from normec.privacy.statement import Privacy

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
    "View",
    "audit",
    "audit_releases",
    "audit_scores",
    "calibrate",
    "epsilon_of",
    "noise_source",
    "paper_sigma",
    "privatise",
    "privatise_sum",
    "release",
    "sigma_for",
]
