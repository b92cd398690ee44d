"""A table of all methods for given data, clients, ε and splits, each tuned with the same budget.

Finished cells are kept in cells.jsonl, so an interrupted table continues. Cells whose chosen setting is no longer in
the search space are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from normec.system.files import write_atomic

from . import tuning
from .page import grids
from .records import percent
from .search_space import SEARCH_SPACES


def table(
    folder: Path,
    epsilons: Sequence[float],
    splits: Sequence[str],
    trials: int,
    data: str = "digits",
    clients: int = 100,
    processes: int = 1,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write cells.jsonl, with one line per method, ε and split, and table.md; returns the path of the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "cells.jsonl"
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = [cell for cell in found if cell["chosen"] in tuning.TuningBudget(cell["trials"]).settings(cell["method"])]
    known = {tuple(cell[key] for key in ("method", "epsilon", "split", "trials", "data", "clients")) for cell in done}
    todo = [
        (name, {"data": data, "clients": clients, "epsilon": float(epsilon), "split": split}, trials)
        for split in splits
        for epsilon in epsilons
        for name in SEARCH_SPACES
        if (name, float(epsilon), split, trials, data, clients) not in known
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_cell, *cell) for cell in todo]
        for future in as_completed(futures):
            cell = future.result()
            done.append(cell)
            write_atomic(kept, "".join(json.dumps(one) + "\n" for one in sorted(done, key=_order)))
            report(f"{cell['split']}  ε = {cell['epsilon']:g}  {cell['method']}: {percent(cell)}")
    shown = [cell for cell in done if (cell["data"], cell["clients"]) == (data, clients)]
    alike = [cell for cell in shown if cell["trials"] == trials]
    write_atomic(folder / "table.md", "\n".join(grids(alike)))
    return folder / "table.md"


def _cell(name: str, shared: dict[str, Any], trials: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {"method": name, **shared, **tuning.tune_and_test(name, shared, tuning.TuningBudget(trials))}


def _order(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["split"], cell["epsilon"], list(SEARCH_SPACES).index(cell["method"]), cell["trials"]
