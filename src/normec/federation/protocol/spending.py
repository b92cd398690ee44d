"""The privacy spending of a party, read from its folder: of all runs together, and of each run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .account import FILE, read_releases
from .journal import FULL, JOURNAL, read_journal
from .policy import Policy
from .price import UNITS


def spending(folder: str | Path, policy: Policy) -> dict[str, Any]:
    """The ε of all noisy messages of this party at the policy's δ, and counts of messages and refusals, fit for JSON.

    `epsilon` is that of the policy's unit; `epsilons` are those of the client and of a record, each over all messages.
    `recovered` counts releases that were charged after a disk was lost. `central` counts messages that were sent
    without noise because a trusted server adds it, `seeded` messages whose noise protects nobody, and `without_noise`
    messages that no ε covers. `failed` counts computations that failed at the party; each was paid for and answered
    with noise alone. If `journal_full`, later events are missing from `failed` and `refusals`.

    Raises:
        UsageError: The account was begun for another relation than the policy's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; a party creates it at its first request")
    releases = read_releases(folder, policy.witness)
    releases.check(policy.relation)
    epsilons = {unit: releases.epsilon(unit, policy.delta) for unit in UNITS}
    events = read_journal(folder / JOURNAL)
    return {
        "epsilon": epsilons[policy.unit],
        "epsilons": epsilons,
        "budget": policy.epsilon,
        "record_budget": policy.epsilon if policy.unit == "record" else policy.record_epsilon,
        "delta": policy.delta,
        "unit": policy.unit,
        "relation": policy.relation,
        "releases": releases.count(),
        "recovered": releases.recovered(),
        "central": releases.central(),
        "seeded": releases.seeded(),
        "without_noise": releases.without_noise(),
        "failed": sum(line.get("event") == "failed" for line in events),
        "journal_full": any(line.get("event") == FULL for line in events),
        "ledger": str(folder / FILE),
        "refusals": dict(Counter(line.get("reason", "?") for line in events if line.get("event") == "refused")),
        "runs": {
            run: {
                "epsilon": releases.epsilon(policy.unit, policy.delta, run),
                "releases": releases.count(run),
                "without_noise": releases.without_noise(run),
            }
            for run in releases.runs()
        },
    }
