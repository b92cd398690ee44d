"""The data of the curves on a page: charts, and the columns of each run or group of seeds.

The drawing itself is in assets/charts.js, which the live page uses too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..storage.history import NOT_COVERED, History, Row
from .html import Html, e
from .spread import over_seeds

MOST_ROWS = 1200


@dataclass(frozen=True)
class Chart:
    """One chart: its columns with their labels, its vertical axis, and a remark about what it shows."""

    key: str
    title: str
    columns: dict[str, str]
    label: str
    scale: str = "log"
    percent: bool = False
    explained: str = ""


RESULT = (
    Chart(
        "accuracy",
        "Accuracy",
        {
            "accuracy": "test",
            "accuracy_mean_over_clients": "test, mean over clients",
            "validation_accuracy": "validation",
            "validation_accuracy_mean_over_clients": "validation, mean over clients",
        },
        "accuracy, %",
        "linear",
        True,
    ),
    Chart("loss", "Loss", {"loss": "training", "test_loss": "test", "validation_loss": "validation"}, "loss"),
    Chart("grad_norm", "Gradient norm", {"grad_norm": "‖∇f(x)‖"}, "‖∇f(x)‖"),
)
SPENT = (Chart("epsilon", "Privacy spent", {"epsilon": "ε so far"}, "ε", "linear"),)
HEALTH = (
    Chart(
        "memory_error",
        "Memory error",
        {"memory_error": "mean ‖∇f_i − g_i‖"},
        "mean ‖∇f_i − g_i‖",
        explained="How far the clients' memories lie from their gradients: what error feedback brings down.",
    ),
    Chart(
        "message_norm",
        "Message norm",
        {"message_norm": "mean", "message_norm_max": "largest"},
        "norm of a message",
        "linear",
        explained="Measured before any noise; a private run rests on no message passing the bound.",
    ),
    Chart(
        "disagreement",
        "Client disagreement",
        {"disagreement": "√ mean ‖∇f_i − ∇f‖²"},
        "√ mean ‖∇f_i − ∇f‖²",
        explained="How different the clients' data make their gradients.",
    ),
)
ALL = {chart.key: chart for chart in (*RESULT, *SPENT, *HEALTH)}


def own_metrics(histories: Sequence[History]) -> list[Chart]:
    """A chart for every column that is no column of all runs: metrics of the user's own, and test sets by name."""
    known = {name for chart in ALL.values() for name in chart.columns} | {"round", "messages", "bytes"}
    names = dict.fromkeys(
        name
        for one in histories
        for row in one
        for name, value in row.items()
        if value is not None and name not in known
    )
    return [_own_chart(name) for name in names]


def _own_chart(name: str) -> Chart:
    title, percent = name.replace("_", " ").capitalize(), name.endswith("accuracy")
    scale = "log" if name.endswith("loss") else "linear"
    return Chart(f"own_{name}", title, {name: title}, f"{title}, %" if percent else title, scale, percent)


def columns_of(histories: Sequence[History], most: int = MOST_ROWS) -> dict[str, list[Any]]:
    """The columns of one run, or of seeds: the mean, and mean ± standard deviation as NAME.low and NAME.high."""
    if len(histories) == 1:
        rows = thinned(histories[0].rows, most)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}
    names = dict.fromkeys(name for history in histories for row in history for name in row)
    bands = {name: over_seeds(histories, name, "deviation") for name in names if name != "round"}
    merged: dict[int, Row] = {k: {"round": k} for k in sorted({k for band in bands.values() for k in band.rounds})}
    for name, band in bands.items():
        for position, k in enumerate(band.rounds):
            merged[k][name] = band.mean[position]
            if name not in ("messages", "bytes", "epsilon"):
                merged[k] |= {f"{name}.low": band.low[position], f"{name}.high": band.high[position]}
    rows = thinned(list(merged.values()), most)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def thinned(rows: list[Row], most: int = MOST_ROWS) -> list[Row]:
    """At most about `most` rows. The last row is kept, and rows with an accuracy are thinned separately."""
    if len(rows) <= most:
        return rows
    evaluated = {k for k, row in enumerate(rows) if row.get("accuracy") is not None}
    others = [k for k in range(len(rows)) if k not in evaluated]
    kept = {len(rows) - 1}
    for group in (sorted(evaluated), others):
        kept |= set(group[:: max(1, -(-len(group) * 2 // most))])
    return [rows[k] for k in sorted(kept)]


def measured(charts: Sequence[Chart], histories: Sequence[History], uncovered: Collection[str] = ()) -> list[Chart]:
    """The charts for which something was measured; those that draw a column of `uncovered` say so."""
    names = {name for one in histories for row in one for name, value in row.items() if value is not None}
    found = [_within(chart, names) for chart in charts]
    return [_marked(chart, [name for name in chart.columns if name in uncovered]) for chart in found if chart.columns]


def compared(charts: Sequence[Chart], histories: Sequence[History], uncovered: Collection[str] = ()) -> list[Chart]:
    """Charts for several runs; each shows only the column that most runs have, so that runs are comparable."""
    found = []
    for chart in measured(charts, histories):
        held = {name: sum(bool(one[name]) for one in histories) for name in chart.columns}
        name = max(held, key=lambda one: held[one])  # the first of equals
        label = chart.columns[name]
        title = f"{chart.title}, {label}" if len(ALL[chart.key].columns) > 1 else chart.title
        one = replace(chart, title=title, columns={name: label})
        found.append(_marked(one, [name] if name in uncovered else []))
    return found


def _within(chart: Chart, names: Collection[str]) -> Chart:
    """The chart with those of its columns that were measured."""
    return replace(chart, columns={name: label for name, label in chart.columns.items() if name in names})


def _marked(chart: Chart, uncovered: Sequence[str]) -> Chart:
    if not uncovered:
        return chart
    what = "" if len(uncovered) == len(chart.columns) else f" ({', '.join(chart.columns[name] for name in uncovered)})"
    said = f"Measured without noise{what}: {NOT_COVERED}."
    return replace(chart, explained=f"{said} {chart.explained}".strip())


def figures(charts: Sequence[Chart], note: str = "") -> Html:
    """Empty frames in the page; the script draws into them."""
    return e(
        "div", [_figure(chart) for chart in charts], e("p", note, class_="quiet") if note else None, class_="charts"
    )


def _figure(chart: Chart) -> Html:
    tools = e(
        "button",
        "log",
        type="button",
        class_="small scale",
        aria_pressed="true" if chart.scale == "log" else "false",
        title="logarithmic vertical axis",
        aria_label=f"{chart.title}: logarithmic axis",
    )
    head = e("div", e("h3", chart.title), e("div", class_="legend"), tools, class_="chart-head")
    explained = e("p", chart.explained, class_="quiet") if chart.explained else None
    plot = e("div", e("noscript", "The curve needs scripts."), class_="plot", role="img", aria_label=chart.title)
    return e("figure", head, plot, explained, class_="chart", id=f"chart-{chart.key}", data_chart=chart.key)


def payload(
    charts: Sequence[Chart], series: Sequence[dict[str, Any]], references: dict[str, list[dict[str, Any]]] | None = None
) -> dict[str, Any]:
    """The data for the script; each of `series` has "name", "columns" and "href"."""
    held = [asdict(chart) for chart in charts]
    for chart in held:
        chart["references"] = (references or {}).get(chart["key"], [])
    return {"charts": held, "series": list(series)}
