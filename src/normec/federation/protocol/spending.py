"""What a party has spent, read from its folder: over all runs together, and run by run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ...errors import UsageError
from .account import FILE, read_releases
from .journal import FULL, JOURNAL, read_journal
from .policy import Policy


def spending(folder: str | Path, policy: Policy) -> dict[str, Any]:
    """ε of every noisy message this party ever made, at the policy's δ; and what was refused. All of it fits JSON.

    `recovered`: releases charged after a disk was lost, as many as there may have been. `central`: messages that left
    the party bare, for a trusted server to add the noise. `seeded`: messages whose noise protects nobody.
    `without_noise`: messages that no ε covers. `failed`: computations that failed at the party; each was paid for and
    answered with noise alone. `journal_full`: `failed` and `refusals` lack what came later. Raises `UsageError` where
    the account was begun for another unit or relation than the policy's.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; a party has one once it was asked for the first time")
    releases = read_releases(folder, policy.witness)
    releases.check(policy.unit, policy.relation)
    events = read_journal(folder / JOURNAL)
    return {
        "epsilon": releases.epsilon(policy.delta),
        "budget": policy.epsilon,
        "delta": policy.delta,
        "unit": policy.unit,
        "relation": policy.relation,
        "releases": releases.count(),
        "recovered": releases.recovered(),
        "central": releases.central(),
        "seeded": releases.seeded(),
        "without_noise": releases.bare(),
        "failed": sum(line.get("event") == "failed" for line in events),
        "journal_full": any(line.get("event") == FULL for line in events),
        "ledger": str(folder / FILE),
        "refusals": dict(Counter(line.get("reason", "?") for line in events if line.get("event") == "refused")),
        "runs": {
            run: {
                "epsilon": releases.epsilon(policy.delta, run),
                "releases": releases.count(run),
                "without_noise": releases.bare(run),
            }
            for run in releases.runs()
        },
    }
