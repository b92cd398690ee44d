"""Every bound compared with runs on random quadratics and logistic regression, without and with noise.

A check is one bound on one family of problems: the measured left-hand side, the bound, and whether it holds. False
statements of the paper are expected to fail, and corrected ones must hold. Without noise, min_k ‖∇f(x^k)‖ is measured.
With noise, the mean over seeds is taken first, and then the smallest value over k or, for pseudo-Huber losses, the mean
over k, which the proofs bound as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import one_of
from ...system.files import write_atomic
from . import logistic, quadratics
from .checks import Scale, Series, Verification

Panels = dict[str, Series]

ALL_SETS = ("a9a", "w8a", "phishing", "mushrooms")
SCALES = {
    "smoke": Scale(20, 20, 3, (10, 30, 100, 300), (10, 30, 100), ("mushrooms", "phishing"), 100),
    "full": Scale(200, 100, 10, (10, 30, 100, 300, 1000, 3000, 10_000), (10, 30, 100, 300), ALL_SETS, 500),
}


def verify(scale: str, out: Path, data_dir: str | None, say: Callable[[str], None]) -> Verification:
    """Run all checks at the given scale; write table.md, theory.json and the pictures to `out`."""
    one_of(SCALES, scale=scale)
    size, found = SCALES[scale], Verification()
    out.mkdir(parents=True, exist_ok=True)
    say("random quadratics, no noise")
    panels = {"quadratics, no noise": quadratics.without_noise(size, found)}
    say("pseudo-Huber losses with noise")
    panels["noise, fixed step; mean over k"] = quadratics.with_noise(size, found)
    _draw(panels, out / "theory-quadratics.png", found)
    say("local steps, drawn clients and client momentum")
    quadratics.local_steps(size, found)
    quadratics.client_momentum(size, found)
    quadratics.counterexamples(size, found)
    sets = logistic.available(size.sets, data_dir, found)
    if sets:
        panels = {}
        for name in sets:
            say(f"logistic regression on {name}")
            panels[name] = logistic.bounds(name, data_dir, size, found)
        _draw(panels, out / "theory-libsvm.png", found)
        say("Clip21 against NormEC")
        comparisons = {
            name: logistic.compare_with_clip21(name, data_dir, size.comparison_rounds, found) for name in sets
        }
        _draw(comparisons, out / "theory-clip21.png", found, x_label="messages per client", scale=("linear", "log"))
    write_atomic(out / "table.md", found.table())
    write_atomic(out / "theory.json", json.dumps(found.facts(), indent=1) + "\n")
    return found


def _draw(
    panels: Panels, path: Path, found: Verification, x_label: str = "K + 1", scale: tuple[str, str] = ("log", "log")
) -> None:
    from ...report.pictures import COLOURS, STYLES, figure

    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    with figure(path, len(panels), 3.4) as (sheet, axes):
        for axis, (title, series) in zip(axes, panels.items(), strict=True):
            for name, (xs, ys) in series.items():
                index = names.index(name)
                # The numbers of colours and styles differ, so that pairs do not repeat.
                turn = index // len(COLOURS)
                style: dict[str, Any] = {
                    "color": COLOURS[index % len(COLOURS)],
                    "linestyle": STYLES[(index + 3 * turn) % len(STYLES)],
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
