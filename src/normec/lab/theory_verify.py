"""Every bound against runs: random quadratics and logistic regression, without and with noise.

A check is one bound on one family of problems: the measured left-hand side, the bound, and whether it holds. What the
paper states wrongly is expected to break; what is corrected must not. Measured is min_k ‖∇f(x^k)‖ without noise, and
min_k of the mean over seeds with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..atomic import write_atomic
from ..errors import one_of

Series = dict[str, tuple[list[float], list[float]]]
Panels = dict[str, Series]


@dataclass(frozen=True)
class Scale:
    instances: int
    seeds: int
    real_seeds: int
    horizons: tuple[int, ...]
    real_horizons: tuple[int, ...]
    sets: tuple[str, ...]
    duel_rounds: int


ALL_SETS = ("a9a", "w8a", "phishing", "mushrooms")
SCALES = {
    "smoke": Scale(20, 20, 3, (10, 30, 100, 300), (10, 30, 100), ("mushrooms", "phishing"), 100),
    "full": Scale(200, 100, 10, (10, 30, 100, 300, 1000, 3000, 10_000), (10, 30, 100, 300), ALL_SETS, 500),
}


@dataclass(frozen=True)
class Check:
    """One line of the table. `tightness`: bound over measured, the median where there are many instances."""

    problem: str
    bound: str
    rounds: int
    measured: float
    value: float
    tightness: float
    holds: bool
    expected: bool = True


@dataclass
class Verification:
    """All checks, and the pictures drawn of them."""

    checks: list[Check] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    slopes: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks if check.expected)

    def add(self, problem: str, bound: str, rounds: int, measured: Any, value: Any, *, expected: bool = True) -> None:
        left, right = np.atleast_1d(measured), np.atleast_1d(value)
        holds = bool((left <= right * (1 + 1e-6)).all())
        ratio = float(np.median(right / np.maximum(left, 1e-300)))
        self.checks.append(
            Check(problem, bound, rounds, float(np.median(left)), float(np.median(right)), ratio, holds, expected)
        )

    def facts(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "checks": [asdict(check) for check in self.checks],
            "slopes": self.slopes,
            "notes": self.notes,
            "pictures": [str(path) for path in self.pictures],
        }

    def table(self) -> str:
        """Markdown."""
        lines = [
            "| problem | bound | K+1 | measured | bound | bound/measured | |",
            "| --- | --- | --: | --: | --: | --: | --- |",
        ]
        for c in self.checks:
            word = "holds" if c.holds else "BROKEN" if c.expected else "broken, as the errata say"
            numbers = f"{c.rounds} | {c.measured:.4g} | {c.value:.4g} | {c.tightness:.3g}"
            lines.append(f"| {c.problem} | {c.bound} | {numbers} | {word} |")
        lines += ["", *(f"Slope of {name} over K, log-log: {value:.3f}." for name, value in self.slopes.items())]
        return "\n".join([*lines, *self.notes]) + "\n"


def verify(scale: str, out: Path, data_dir: str | None, say: Callable[[str], None]) -> Verification:
    """All checks at the given scale; table.md, theory.json and the pictures go to `out`."""
    from . import theory_quadratics, theory_real

    one_of(SCALES, scale=scale)
    size, found = SCALES[scale], Verification()
    out.mkdir(parents=True, exist_ok=True)
    say("random quadratics, no noise")
    panels = {"quadratics, no noise": theory_quadratics.clean(size, found)}
    say("bowls with noise")
    panels["noise, fixed step; mean over k"] = theory_quadratics.noisy(size, found)
    _draw(panels, out / "theory-quadratics.png", found)
    theory_quadratics.broken(size, found)
    real = theory_real.available(size.sets, data_dir, found)
    if real:
        panels = {}
        for name in real:
            say(f"logistic regression on {name}")
            panels[name] = theory_real.bounds(name, data_dir, size, found)
        _draw(panels, out / "theory-libsvm.png", found)
        say("Clip21 against NormEC")
        duel = {name: theory_real.duel(name, data_dir, size.duel_rounds, found) for name in real}
        _draw(duel, out / "theory-clip21.png", found, x_label="messages a client", scale=("linear", "log"))
    write_atomic(out / "table.md", found.table())
    write_atomic(out / "theory.json", json.dumps(found.facts(), indent=1) + "\n")
    return found


def slope(xs: list[float], ys: list[float]) -> float:
    """Of log y over log x, by least squares."""
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def _draw(
    panels: Panels, path: Path, found: Verification, x_label: str = "K + 1", scale: tuple[str, str] = ("log", "log")
) -> None:
    from ..report.pictures import COLOURS, STYLES, figure

    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    with figure(path, len(panels), 3.4) as (sheet, axes):
        for axis, (title, series) in zip(axes, panels.items(), strict=True):
            for name, (xs, ys) in series.items():
                place = names.index(name)
                turn = place // len(
                    COLOURS
                )  # colours and styles differ in length of cycle, so that pairs do not repeat
                style: dict[str, Any] = {
                    "color": COLOURS[place % len(COLOURS)],
                    "linestyle": STYLES[(place + 3 * turn) % len(STYLES)],
                    "marker": "o" if "measured" in name else None,
                }
                axis.plot(xs, ys, markersize=3, label=name, **style)
            axis.set_xscale(scale[0])
            axis.set_yscale(scale[1])
            axis.set_title(title, fontsize=9)
            axis.set_xlabel(x_label)
        axes[0].set_ylabel("smallest gradient norm")
        handles = {name: line for axis in axes for line, name in zip(*axis.get_legend_handles_labels(), strict=True)}
        sheet.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles)), fontsize=8
        )
    found.pictures.append(path)
