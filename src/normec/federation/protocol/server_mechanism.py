"""The privacy mechanism of the server: σ from the statement, the server's ledger, and the noise of a central sum."""

from __future__ import annotations

from collections.abc import Sequence

from ...algorithms.method import Method
from ...errors import UsageError
from ...privacy.facts import FULL, Sampling, Setting
from ...privacy.mechanism import Mechanism
from ...privacy.statement import Privacy
from ...sampling.participation import Everyone
from ...training.run import Plan
from ...training.run_mechanism import RECORDED, message_weights_for, noise_name
from .price import release_of
from .terms import PlanTerms, RecordTerms

OWN_CODE = (
    "what a party's model or loss, if its code belongs to neither PyTorch nor normec, keeps of one record in global "
    "variables, files or other objects, and uses for others"
)


def record_terms(
    privacy: Privacy | None, plan: Plan, records: Sequence[float] | None, parties: int
) -> list[RecordTerms | None]:
    """The terms of each party on what one record may add, from the public numbers of records.

    Args:
        privacy: The privacy statement of the run.
        plan: The plan of the run.
        records: One number for each party, or one for all.
        parties: The number of parties.

    Raises:
        UsageError: The numbers are missing, too few or too small, or a batch rate has no clip per record.
    """
    if privacy is None or privacy.record_clip is None:
        if plan.batch_rate is not None:
            raise UsageError("batch_rate goes with record_clip in a federation; elsewhere give batch_size")
        return [None] * parties
    if records is None:
        raise UsageError(
            "record_clip divides each party's sum by a public number, because the number of its records stays at the "
            "party; give records, one number for each party or one for all"
        )
    given = list(records) if len(records) > 1 else list(records) * parties
    if len(given) != parties:
        raise UsageError(
            f"records must be one number for each of the {parties} parties, or one for all, got {len(given)}"
        )
    terms = [RecordTerms.of(privacy, number, plan.batch_rate) for number in given]
    for own in terms:
        if own is not None and not own.divisor >= 1:
            raise UsageError(f"records times batch_rate must be at least 1, got {own.divisor:g}; raise one of them")
    return terms


def noise_ratios(
    mechanism: Mechanism | None, method: Method, plans: Sequence[PlanTerms], dimension: int
) -> list[float]:
    """σ_i/σ of each party: with a clip per record, noise is proportional to what one of its own records can change.

    All parties then have the same noise multiplier and the same ε, namely that of the party with the largest σ_i = σ
    (rule C1 of `privacy.rules`). Raises `UsageError` if a party could not agree to its terms.
    """
    if mechanism is None or mechanism.privacy.record_clip is None:
        return [1.0] * len(plans)
    for plan in plans:
        release_of(method, mechanism.privacy, plan, parties=len(plans), dimension=dimension)
    return list(mechanism.release.relative or [1.0] * len(plans))


def mechanism_of(
    method: Method,
    plan: Plan,
    privacy: Privacy | None,
    parties: int,
    dimension: int,
    records: Sequence[RecordTerms | None],
) -> Mechanism | None:
    """The mechanism of a federated run, or None without noise. Raises `UsageError` for unsupported statements."""
    if privacy is None:
        return None
    if privacy.sampling is not None:
        raise UsageError(
            "a federation claims no amplification by sampling, because it is no secret who is asked; leave out sampling"
        )
    if privacy.correlates:
        raise UsageError(
            "in a federation a party may take part in every round, where correlated noise gains nothing; leave out "
            "noise_bands"
        )
    # Without a claim of amplification, any rate below 1 stands for rounds that do not ask everybody.
    drawn = FULL if isinstance(plan.participation, Everyone) else Sampling(0.5, amplify=False)
    divisors = tuple(own.divisor for own in records if own is not None)
    setting = Setting(
        clients=parties,
        rounds=plan.rounds,
        sampling=drawn,
        batch=Sampling(plan.batch_rate) if plan.batch_rate is not None else FULL,
        records=divisors or None,
        all_records=sum(divisors) / (plan.batch_rate or 1.0) if divisors else None,
        dimension=method.message_length(dimension),
        parameters=dimension,
        local_steps=plan.local is not None,
        message_weights=message_weights_for(method, plan, privacy),
        weights=tuple(plan.weights.tolist()) if plan.weights is not None else (),
    )
    gaps = [RECORDED] if plan.diagnostics else []
    if privacy.record_clip is not None:
        gaps.append(OWN_CODE)
    return Mechanism(privacy, method, setting, plan.seed, noise_name(method, privacy, plan, setting), gaps=tuple(gaps))
