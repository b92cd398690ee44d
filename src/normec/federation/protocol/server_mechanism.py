"""The privacy mechanism of the server: σ from the statement, the server's ledger, and the noise of a central sum."""

from __future__ import annotations

from ...algorithms.method import Method
from ...errors import UsageError
from ...privacy.mechanism import Mechanism
from ...privacy.setting import FULL, Sampling, Setting
from ...privacy.statement import Privacy
from ...sampling.participation import Everyone
from ...training.run import Plan
from ...training.train import RECORDED, message_weights_for, noise_name
from .terms import LATER


def mechanism_of(method: Method, plan: Plan, privacy: Privacy | None, parties: int, dimension: int) -> Mechanism | None:
    """The mechanism of a federated run, or None without noise. Raises `UsageError` for unsupported statements."""
    if privacy is None:
        return None
    if privacy.trust == "secure-sum":
        raise UsageError(LATER)
    if privacy.sampling is not None:
        raise UsageError(
            "a federation claims no amplification by sampling, for it is no secret who is asked; drop sampling"
        )
    if privacy.record_clip is not None:
        raise UsageError(
            "record_clip is not supported in federations yet; without it, a record counts as a whole client"
        )
    drawn = FULL if isinstance(plan.participation, Everyone) else Sampling(0.5, amplify=False)
    setting = Setting(
        clients=parties,
        rounds=plan.rounds,
        sampling=drawn,
        dimension=dimension,
        local_steps=plan.local is not None,
        message_weights=message_weights_for(method, plan, privacy),
        weights=tuple(plan.weights.tolist()) if plan.weights is not None else (),
    )
    gaps = (RECORDED,) if plan.diagnostics else ()
    return Mechanism(privacy, method, setting, plan.seed, noise_name(method, privacy, plan, setting), gaps=gaps)
