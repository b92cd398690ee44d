"""The page about a check of the theory: every bound compared with measurements."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system.files import read_json
from . import formatting, schema
from .document import Section, cards, copyable, document, notes_of
from .html import Html, e, join, table
from .run_page import shown_path
from .run_view import MOST_BYTES

FILE = "theory.json"
CHECK = schema.record(
    {
        **dict.fromkeys(("problem", "bound"), schema.text),
        **dict.fromkeys(("holds", "expected"), schema.truth),
        **dict.fromkeys(("rounds", "measured", "value", "tightness"), schema.number),
    }
)
VERIFICATION = schema.record(
    {
        "checks": schema.list_of(CHECK),
        "slopes": schema.table_of(schema.optional(schema.number)),
        "notes": schema.list_of(schema.text),
    }
)


def render(folder: Path, served: str | None = None) -> str:
    """The whole page about the results of `normec theory verify` in a folder."""
    path = folder / FILE
    try:
        facts = read_json(path, MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no verification (there is no {FILE})") from None
    if not VERIFICATION(facts):
        raise UsageError(f"{path} is not what a verification writes")
    checks: list[dict[str, Any]] = facts["checks"]
    broken = [check for check in checks if not check["holds"]]
    unexpected = [check for check in broken if check["expected"]]
    data = {"charts": [], "series": [], "bounds": _series(checks)}
    slopes = [
        f"Slope of {name} over K, log-log: {formatting.number(value)}." for name, value in facts["slopes"].items()
    ]
    parts = [
        Section("against", "Bound against measured", join(_chart(), e("ul", [e("li", line) for line in slopes]))),
        Section("checks", "Every check", _table(checks)),
        Section("rerun", "Run it again", _rerun(folder)),
    ]
    tight = min((check["tightness"] for check in checks if check["holds"]), default=math.nan)
    numbers = cards(
        [
            ("Checks", formatting.number(len(checks)), ""),
            ("Hold", formatting.number(len(checks) - len(broken)), ""),
            ("Broken as expected", formatting.number(len(broken) - len(unexpected)), "the errata say why"),
            ("Broken", formatting.number(len(unexpected)), "must be none"),
            ("Tightest", formatting.number(tight, 3), "bound over measured"),
        ]
    )
    lead = e(
        "div",
        e("p", folder.resolve().name, class_="kicker"),
        e("h1", _headline(checks, unexpected)),
        numbers,
        class_="lead",
    )
    title = f"{folder.resolve().name} · normec"
    return document(title, join(lead, notes_of(facts["notes"])), parts, data, scripts=("bounds.js",), served=served)


def _headline(checks: list[dict[str, Any]], unexpected: list[dict[str, Any]]) -> str:
    stated = [check for check in checks if check["expected"]]
    if unexpected:
        names = formatting.listed(sorted({f"{check['bound']} on {check['problem']}" for check in unexpected}))
        return formatting.sentence(f"{len(unexpected)} of {len(stated)} bounds that must hold were broken: {names}")
    return formatting.sentence(f"all {len(stated)} bounds that must hold did, in every run that was measured")


def _series(checks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One series per problem, with measured values on the x axis and bounds on the y axis."""
    names = dict.fromkeys(check["problem"] for check in checks)
    found = []
    for name in names:
        own = [check for check in checks if check["problem"] == name]
        found.append(
            {
                "name": name,
                "measured": [check["measured"] for check in own],
                "bound": [check["value"] for check in own],
                "text": [f"{check['bound']}, K + 1 = {check['rounds']}" for check in own],
            }
        )
    return found


def _chart() -> Html:
    said = "A point above the line is a bound that held; how far above is what it leaves on the table."
    head = e(
        "div", e("h3", "Promised over measured"), e("div", id="bounds-legend", class_="legend"), class_="chart-head"
    )
    plot = e("div", class_="plot tall", id="bounds", role="img", aria_label="Bounds over measured values")
    return e("figure", head, plot, e("figcaption", said, class_="quiet"), class_="chart")


def _table(checks: list[dict[str, Any]]) -> Html:
    rows = []
    for check in checks:
        word = "holds" if check["holds"] else "broken" if check["expected"] else "broken, as the errata say"
        numbers = (formatting.number(check[key]) for key in ("rounds", "measured", "value", "tightness"))
        rows.append([check["problem"], check["bound"], *numbers, word])
    columns = ("problem", "bound", ">K + 1", ">measured", ">bound", ">bound / measured", "")
    return table(columns, rows, class_="sortable", aria_label="Every check")


def _rerun(folder: Path) -> Html:
    return copyable(shlex.join(["normec", "theory", "verify", "--out", shown_path(folder)]), "the command")
