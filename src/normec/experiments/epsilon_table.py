"""Tables of ε over rounds for several observers: what the same noise guarantees depends on who is trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import at_least, fraction
from ..privacy import FULL, Facts, Privacy, Sampling, Setting, release
from ..privacy.display import shown_delta


@dataclass(frozen=True)
class EpsilonTable:
    """ε for each number of rounds, with one column per observer and relation."""

    title: str
    rounds: list[int]
    columns: dict[str, list[float]]


def build(
    sigma: float, rounds: int, delta: float, clients: int, sampling_rate: float | None = None, bound: float = 1.0
) -> EpsilonTable:
    """Return ε for up to ten numbers of rounds.

    Args:
        sigma: The noise of a client, per coordinate of its message.
        rounds: The largest number of rounds.
        delta: δ.
        clients: The number of clients.
        sampling_rate: The rate of secret sampling; None leaves out its column.
        bound: The largest norm of a message.
    """
    at_least(1, releases=rounds)
    if sampling_rate is not None:
        fraction(sampling_rate=sampling_rate)
    counts = sorted({max(1, round(value)) for value in np.geomspace(1, rounds, 10)})
    cases: dict[str, tuple[dict[str, Any], Sampling]] = {}
    for trust in ("local", "secure-sum"):
        for relation in ("zero-out", "replace"):
            cases[f"{trust}, {relation}"] = ({"trust": trust, "relation": relation}, FULL)
    if clients > 1:
        half = math.ceil(clients / 2)
        cases[f"secure-sum, {half} honest"] = ({"trust": "secure-sum", "honest": half}, FULL)
    if sampling_rate is not None:
        claimed = {"trust": "secure-sum", "sampling": sampling_rate}
        cases[f"secure-sum, sampled {sampling_rate:g}"] = (claimed, Sampling(sampling_rate))
    columns = {}
    for name, (words, sampling) in cases.items():
        privacy = Privacy(sigma=sigma, delta=delta, **words)
        composed = release(Facts("a message", bound, feedback=True), privacy, Setting(clients, rounds, sampling))
        columns[name] = [composed.epsilon(sigma, delta, count) for count in counts]
    return EpsilonTable(f"ε at δ = {shown_delta(delta)}, σ = {sigma:g} per client, {clients} clients", counts, columns)


def draw(table: EpsilonTable, path: Path) -> None:
    """Draw the table as curves, one for each observer."""
    from ..report import pictures

    pictures.lines(
        {name: (table.rounds, values) for name, values in table.columns.items()},
        path,
        x_label="rounds",
        y_label="ε",
        title=table.title,
    )
