"""Which method serves best under the same guarantee: every method tuned alike, on validation data.

For each ε and split, every method gets the same number of settings, spread evenly over its own ranges, two seeds
each; the best by validation accuracy is trained anew on all training records with three other seeds, and its test
accuracy is reported. Results come as they are, and are kept: a table that was stopped goes on. Those of settings that
are not tried any more are dropped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from normec.system.files import write_atomic

from . import tuned
from .contenders import CONTENDERS
from .page import grids
from .work import percent


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
    """Fill `folder` with cells.jsonl (one line a method, ε and split) and table.md."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "cells.jsonl"
    found = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    done = [cell for cell in found if cell["chosen"] in tuned.Effort(cell["trials"]).settings(cell["method"])]
    known = {tuple(cell[key] for key in ("method", "epsilon", "split", "trials", "data", "clients")) for cell in done}
    todo = [
        (name, {"data": data, "clients": clients, "epsilon": float(epsilon), "split": split}, trials)
        for split in splits
        for epsilon in epsilons
        for name in CONTENDERS
        if (name, float(epsilon), split, trials, data, clients) not in known
    ]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        under_way = [pool.submit(_cell, *cell) for cell in todo]
        for future in as_completed(under_way):
            cell = future.result()
            done.append(cell)
            write_atomic(kept, "".join(json.dumps(one) + "\n" for one in sorted(done, key=_order)))
            report(f"{cell['split']}  ε = {cell['epsilon']:g}  {cell['method']}: {percent(cell)}")
    shown = [cell for cell in done if (cell["data"], cell["clients"]) == (data, clients)]
    alike = [cell for cell in shown if cell["trials"] == trials]
    write_atomic(folder / "table.md", "\n".join(grids(alike)))
    return folder / "table.md"


def _cell(name: str, where: dict[str, Any], trials: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    return {"method": name, **where, **tuned.cell(name, where, tuned.Effort(trials))}


def _order(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["split"], cell["epsilon"], list(CONTENDERS).index(cell["method"]), cell["trials"]
