"""The server's part of the privacy of a federated run: σ from the statement, its ledger, and noise on a central sum."""

from __future__ import annotations

from ...algorithms.method import Method
from ...errors import UsageError
from ...privacy.mechanism import Mechanism
from ...privacy.setting import FULL, Sampling, Setting
from ...privacy.statement import Privacy
from ...sampling.participation import Everyone
from ...training.run import Plan
from ...training.train import noise_name
from .terms import LATER


def mechanism_of(method: Method, plan: Plan, privacy: Privacy | None, parties: int, dimension: int) -> Mechanism | None:
    """None for a run without noise; refuses what a federation cannot promise."""
    if privacy is None:
        return None
    if privacy.trust == "secure-sum":
        raise UsageError(LATER)
    if privacy.sampling is not None:
        raise UsageError("a federation claims no gain from sampling parties: who is asked is no secret; drop sampling")
    if privacy.record_clip is not None:
        raise UsageError("record_clip is not for federations yet; leave it out, a record then counts as a whole client")
    drawn = FULL if isinstance(plan.participation, Everyone) else Sampling(0.5, amplify=False)
    weights = tuple(plan.weights.tolist()) if plan.weights is not None else ()
    setting = Setting(parties, plan.rounds, sampling=drawn, dimension=dimension, weights=weights)
    return Mechanism(privacy, method, setting, plan.seed, noise_name(method, privacy, plan, setting))
