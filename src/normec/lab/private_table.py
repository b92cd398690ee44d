"""Which method serves best under the same guarantee: every method tuned alike, on validation data.

For each ε and split, every method gets the same number of settings, drawn at random from its own ranges, two seeds
each; the best by validation accuracy is trained anew on all training records with three other seeds, and its test
accuracy is reported. Results come as they are, and are kept: a table that was stopped goes on.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..atomic import write_atomic
from ..errors import Diverged
from ..training import train
from . import build, methods
from .config import RunConfig, make

TUNING_SEEDS = (0, 1)
TEST_SEEDS = (2, 3, 4)
VALIDATION = 0.2


@dataclass(frozen=True)
class Contender:
    """A method and the ranges of its settings: (low, high) is log-uniform, a list is a choice, else a constant."""

    method: str
    ranges: dict[str, Any]


ROUNDS = [50, 100, 200]
CONTENDERS = {
    "NormEC": Contender("normec", {"beta": (0.01, 0.3), "decay": 0.0, "lr": (0.02, 1.0)}),
    "NormEC, no SN": Contender("normec", {"beta": (0.01, 0.3), "decay": 0.0, "server_norm": False, "lr": (0.2, 10.0)}),
    "NormEC, forgetting": Contender("normec", {"beta": (0.01, 0.3), "decay": [0.05, 0.1, 0.2, 0.4], "lr": (0.02, 1.0)}),
    "DP-Clip21": Contender("clip21", {"tau": (0.01, 0.3), "lr": (0.2, 10.0)}),
    "DP-SGD, norm": Contender("dpsgd-norm", {"lr": (0.02, 1.0)}),
    "DP-SGD, clip": Contender("dpsgd-clip", {"tau": (0.05, 1.0), "lr": (0.2, 10.0)}),
}


def draw(contender: Contender, number: int, seed: int = 0) -> dict[str, Any]:
    """Setting `number` of a contender: the same for every ε and split."""
    chance = random.Random(f"{seed}/{contender.method}/{sorted(contender.ranges)}/{number}")
    found: dict[str, Any] = {"method": contender.method, "rounds": chance.choice(ROUNDS)}
    for name, values in contender.ranges.items():
        if isinstance(values, tuple):
            low, high = map(math.log, values)
            found[name] = float(f"{math.exp(chance.uniform(low, high)):.3g}")
        else:
            found[name] = chance.choice(values) if isinstance(values, list) else values
    return found


def score(settings: dict[str, Any], seeds: Sequence[int], validation: float) -> list[float]:
    """Final accuracy of each seed: on validation data if some is held out, else on the test set; 0 if it diverged."""
    found = []
    for seed in seeds:
        config: RunConfig = make({**settings, "seed": seed, "validation": validation})
        problem = build.problem(config)
        asked = build.training(config)
        asked |= {"log_every": config.rounds, "evaluate_every": config.rounds}
        try:
            run = train(problem, methods.build(config, len(problem.x0)), **asked)
        except Diverged:
            found.append(0.0)
            continue
        found.append(run.history.rows[-1]["validation_accuracy" if validation else "accuracy"])
    return found


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
    done = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
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
            report(f"{cell['split']}  ε = {cell['epsilon']:g}  {cell['method']}: {_percent(cell)}")
    shown = [cell for cell in done if (cell["data"], cell["clients"]) == (data, clients)]
    write_atomic(folder / "table.md", markdown(shown, trials))
    return folder / "table.md"


def markdown(cells: Sequence[dict[str, Any]], trials: int) -> str:
    """One table a split: methods down, ε across."""
    lines = []
    for split in sorted({cell["split"] for cell in cells}):
        held = {(c["method"], c["epsilon"]): c for c in cells if c["split"] == split and c["trials"] == trials}
        epsilons = sorted({epsilon for _, epsilon in held})
        lines += [f"| {split} | " + " | ".join(f"ε = {e:g}" for e in epsilons) + " |"]
        lines += ["| --- |" + " --- |" * len(epsilons)]
        best = {e: max(held[n, e]["accuracy"] for n in CONTENDERS if (n, e) in held) for e in epsilons}
        for name in CONTENDERS:
            row = []
            for epsilon in epsilons:
                cell = held.get((name, epsilon))
                text = _percent(cell) if cell else "not run"
                row.append(f"**{text}**" if cell and cell["accuracy"] == best[epsilon] else text)
            lines.append(f"| {name} | " + " | ".join(row) + " |")
        lines.append("")
    return "\n".join(lines)


def _cell(name: str, where: dict[str, Any], trials: int) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    contender = CONTENDERS[name]
    tried = []
    for number in range(trials):
        settings = {**where, **draw(contender, number)}
        tried.append((statistics.mean(score(settings, TUNING_SEEDS, VALIDATION)), number))
    validated, number = max(tried)
    chosen = draw(contender, number)
    tested = score({**where, **chosen}, TEST_SEEDS, 0.0)
    return {
        "method": name,
        **where,
        "trials": trials,
        "chosen": chosen,
        "validation": validated,
        "accuracies": tested,
        "accuracy": statistics.mean(tested),
        "spread": statistics.stdev(tested),
    }


def _order(cell: dict[str, Any]) -> tuple[Any, ...]:
    return cell["split"], cell["epsilon"], list(CONTENDERS).index(cell["method"]), cell["trials"]


def _percent(cell: dict[str, Any]) -> str:
    return f"{100 * cell['accuracy']:.1f} ± {100 * cell['spread']:.1f}"
