"""The table of the trial of momentum has the numbers of its runs."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "privacy" / "records"
METHODS = {"dpsgd-norm": "DP-SGD, norm", "normec": "NormEC, forgetting"}
SPLITS = {"iid": "alike", "label": "sorted by label"}


def test_the_table_is_that_of_the_runs() -> None:
    runs: dict[tuple[str, str, str], dict[int, float]] = defaultdict(dict)
    with (FOLDER / "momentum.csv").open() as file:
        for row in csv.DictReader(file):
            name = METHODS[row["method"]] + (", momentum 0.9" if row["momentum"] == "0.9" else "")
            runs[SPLITS[row["split"]], name, row["lr"]][int(row["round"])] = 100 * float(row["accuracy"])
    assert runs
    wanted = {" | ".join([*key, *(f"{values[at]:.1f}" for at in (50, 100, 150, 200))]) for key, values in runs.items()}
    text = (FOLDER / "momentum.md").read_text()
    assert wanted == {
        line.strip("| ") for line in text.splitlines() if line.startswith(tuple(f"| {s}" for s in SPLITS.values()))
    }
