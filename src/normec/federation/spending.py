"""What a party has spent, read from its folder: over all runs together, and run by run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import party_state
from .account import FILE, read_releases
from .journal import JOURNAL, read_journal
from .policy import Policy


def spending(folder: str | Path, policy: Policy) -> dict[str, Any]:
    """ε of every noisy message this party ever made, at the policy's δ; and what was refused. All of it fits JSON.

    `recovered`: releases charged after a disk was lost, as many as there may have been. `without_noise`: messages that
    no ε covers. `failed`: computations that failed at the party; each was paid for and answered with noise alone.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}; a party has one once it was asked for the first time")
    releases = read_releases(folder)
    events = read_journal(folder / JOURNAL)
    clean = _without_noise(folder)
    names = sorted({*releases.runs(), *clean})
    epsilon = releases.epsilon(policy.delta)
    return {
        "epsilon": epsilon,
        "budget": policy.epsilon,
        "delta": policy.delta,
        "unit": policy.unit,
        "relation": policy.relation,
        "releases": releases.count(),
        "recovered": releases.recovered(),
        "without_noise": sum(clean.values()),
        "failed": sum(line.get("event") == "failed" for line in events),
        "ledger": str(folder / FILE),
        "refusals": dict(Counter(line.get("reason", "?") for line in events if line.get("event") == "refused")),
        "runs": {
            run: {
                "epsilon": releases.epsilon(policy.delta, run),
                "releases": releases.count(run),
                "without_noise": clean.get(run, 0),
            }
            for run in names
        },
    }


def _without_noise(folder: Path) -> dict[str, int]:
    """Messages sent without noise, by run, as the states on the disk have counted them."""
    found: Counter[str] = Counter()
    for path in sorted((folder / "runs").glob("*/*.safetensors")):
        try:
            state = party_state.load(path)
        except UsageError:
            continue  # damaged: the party itself will say so, and begin anew
        if state is not None and state.clean:
            found[path.parent.name] += state.clean
    return dict(found)
