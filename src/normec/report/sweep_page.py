"""The page about a sweep: a heat map over any two settings, the cells, and their curves with the seeds' spread."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system.files import read_text, read_toml
from . import charts, formatting, guarantee, runs_page
from .cells import ENDED, Cell, best, grouped, measured, order, shown, varied
from .document import Section, cards, copyable, document, notes_of, pill
from .html import Html, e, join, table
from .result_metrics import BY_COLUMN, Metric
from .run_page import axis_choice, shown_path
from .run_view import MOST_BYTES, RunView, is_run, read_runs

DRAWN = 4
ROWS_A_CELL = 160
DRAWN_BY = ("column", "label", "better", "scale", "percent")  # what the heat map needs to know of a metric
MAIN = ("accuracy", "validation_accuracy", "loss", "epsilon")  # shown in the table of cells without being asked for


def render(folder: Path, served: str | None = None, link: Callable[[Path], str] | None = None) -> str:
    """The whole page; `link` returns the URL of a run's own page (default: next to this one)."""
    views, notes = read_runs(sorted(path for path in (folder / "cells").glob("*") if is_run(path)))
    if not views:
        raise UsageError(f"{folder} holds no cell of a sweep yet{': ' + '; '.join(notes) if notes else ''}")
    to = link or (lambda run: runs_page.link_to(run, folder / "report.html"))
    names = varied(views)
    cells = grouped(views, names)
    metrics = measured(cells)
    by = _by(folder, metrics)
    winner = best(cells, by) if by else None
    ranked = _ranked(cells, by)
    histories = [view.history for view in views]
    drawn = charts.compared(list(charts.ALL.values()), histories, runs_page.uncovered_of(views))
    data = charts.payload(drawn, [])
    data["sweep"] = {
        "settings": [{"name": name, "values": _values(cells, name)} for name in names],
        "metrics": [{name: getattr(metric, name) for name in DRAWN_BY} for metric in metrics],
        "metric": _first_metric(metrics, by),
        "drawn": [cells.index(cell) for cell in ranked[:DRAWN]],
        "cells": [{**_cell(cell, metrics, drawn, to), "best": cell is winner} for cell in cells],
    }
    parts = [
        Section("map", "Heat map", _map(names, metrics, by)),
        Section("cells", "Cells", _cells(cells, names, metrics, by, winner, to)),
        Section("curves", "Curves", _curves(views, drawn)),
        Section("privacy", "Privacy", runs_page.privacy([(view.name, view) for view in views])),
        Section("ledgers", "Ledgers", _ledgers(views)),
        Section("timing", "Timing", _timing(views)),
        Section("configuration", "Configuration", _configuration(folder, views)),
        Section("rerun", "Run it again", _rerun(folder)),
    ]
    kicker = e("p", folder.resolve().name, class_="kicker")
    lead = e(
        "div",
        kicker,
        guarantee.badge(views),
        e("h1", headline(cells, by, winner)),
        guarantee.warning(views),
        _cards(cells, views, metrics, winner),
        class_="lead",
    )
    title = f"{folder.resolve().name} · normec"
    return document(title, join(lead, notes_of(notes)), parts, data, scripts=("sweep.js",), served=served)


def headline(cells: Sequence[Cell], by: Metric | None, winner: Cell | None) -> str:
    seeds = sorted({len(cell.runs) for cell in cells})
    each = f" of {seeds[0]} seeds" if seeds == [seeds[0]] and seeds[0] > 1 else ""
    ended = [cell for cell in cells if cell.status in ENDED]
    if not ended:
        return formatting.sentence(f"none of {len(cells)} cells{each} has come to an end yet")
    if by is None or winner is None:
        return formatting.sentence(
            f"{len(ended)} of {len(cells)} cells{each} have come to an end; nothing that may choose between them was "
            "recorded, such as the accuracy on validation data (validation = 0.2)"
        )
    text = f"of {len(cells)} cells{each}, {winner.label} did best by {by.title} ({shown(winner, by)})"
    accuracy = shown(winner, BY_COLUMN["accuracy"]) if by.column != "accuracy" else ""
    reached = f": {accuracy} test accuracy" if accuracy else ""
    return formatting.sentence(f"{text}{reached}, {guarantee.phrase(winner.runs[0])}")


def _by(folder: Path, metrics: Sequence[Metric]) -> Metric | None:
    """The criterion of the sweep, or validation data, or the training loss; test data is used only on request."""
    try:
        chosen = read_toml(folder / "sweep.toml", MOST_BYTES).get("by")
    except (FileNotFoundError, UsageError):
        chosen = None
    for column in (chosen, "validation_accuracy", "validation_loss", "loss", "grad_norm"):
        for metric in metrics:
            if metric.column == column:
                return metric
    return None


def _first_metric(metrics: Sequence[Metric], by: Metric | None) -> str:
    known = [metric.column for metric in metrics]
    return "accuracy" if "accuracy" in known else by.column if by else known[0] if known else ""


def _ranked(cells: Sequence[Cell], by: Metric | None) -> list[Cell]:
    if by is None:
        return list(cells)
    known = [cell for cell in cells if cell.mean(by) is not None]
    return sorted(known, key=lambda cell: cell.mean(by) or 0.0, reverse=by.better == "max")


def _values(cells: Sequence[Cell], name: str) -> list[Any]:
    """The values of a setting in order; None if a cell uses the default of the method."""
    found = {cell.settings.get(name) for cell in cells}
    return sorted(found, key=order)


def _cell(
    cell: Cell, metrics: Sequence[Metric], drawn: Sequence[charts.Chart], to: Callable[[Path], str]
) -> dict[str, Any]:
    columns = charts.columns_of([run.history for run in cell.runs], ROWS_A_CELL)
    kept = {"round", "bytes", "messages", "epsilon"} | {name for chart in drawn for name in chart.columns}
    return {
        "label": cell.label,
        "settings": cell.settings,
        "status": cell.status,
        "href": to(cell.runs[0].folder),
        "values": {m.column: [cell.mean(m), cell.spread(m)] for m in metrics if cell.mean(m) is not None},
        "shown_epsilon": shown(cell, BY_COLUMN["epsilon"]),
        "columns": {name: values for name, values in columns.items() if name.partition(".")[0] in kept},
    }


def _map(names: Sequence[str], metrics: Sequence[Metric], by: Metric | None) -> Html:
    if not names or not metrics:
        return e("p", "All cells have the same settings except the seed, so there is no map.")
    selects = [
        e("label", "Shown ", e("select", [e("option", m.label, value=m.column) for m in metrics], id="map-metric")),
        e("label", "Across ", e("select", [e("option", n, value=n) for n in names], id="map-x")),
    ]
    if len(names) > 1:
        selects.append(e("label", "Down ", e("select", [e("option", n, value=n) for n in names], id="map-y")))
    framed = f"The frame marks the best cell by {by.title}. " if by is not None else ""
    return join(
        e("div", selects, class_="tools"),
        e("div", id="map-rest", class_="tools"),
        e(
            "figure",
            e("div", class_="plot tall", id="heat-map", role="img", aria_label="Heat map"),
            e("figcaption", f"{framed}Click a cell to open its run, or the first of its seeds.", class_="quiet"),
            class_="chart",
        ),
        e("details", e("summary", "The same as a table, with links"), e("div", id="heat-table")),
    )


def _cells(
    cells: Sequence[Cell],
    names: Sequence[str],
    metrics: Sequence[Metric],
    by: Metric | None,
    winner: Cell | None,
    to: Callable[[Path], str],
) -> Html:
    rows = []
    for index, cell in enumerate(cells):
        box = e("input", type="checkbox", class_="draw", value=index, aria_label=f"Draw {cell.label}")
        pages = [join(e("a", f"seed {run.settings.get('seed', '?')}", href=to(run.folder)), " ") for run in cell.runs]
        status = [pill(cell.status)] + ([" best"] if cell is winner else [])
        values = (shown(cell, metric) for metric in metrics)
        settings = ("default" if (v := cell.settings.get(name)) is None else formatting.number(v) for name in names)
        rows.append([box, *settings, status, pages, *values])
    fixed = ("draw", *map(formatting.setting, names), "status", "runs")
    heads = (*fixed, *(f">{metric.title}" for metric in metrics))
    main = [by, *(metric for metric in metrics if metric.column in MAIN)]
    more = [len(fixed) + position for position, metric in enumerate(metrics) if metric not in main]
    tick = e("label", e("input", type="checkbox", id="all-numbers"), " all numbers", class_="tick")
    said = "Mean ± one standard deviation over the seeds, once all have come to an end. Ticked cells are drawn below."
    errors = [
        f"{view.name}: {view.summary['error']}." for cell in cells for view in cell.runs if view.summary.get("error")
    ]
    return join(
        e("p", said, class_="quiet"),
        e("p", tick, class_="tools") if more else None,
        table(heads, rows, more, class_="sortable cells", aria_label="Cells"),
        e("details", e("summary", f"What broke ({len(errors)})"), notes_of(errors)) if errors else None,
    )


def _curves(views: Sequence[RunView], drawn: Sequence[charts.Chart]) -> Html:
    said = e(
        "p",
        f"The best {DRAWN} cells unless others are ticked above; bands are one standard deviation over the seeds.",
        class_="quiet",
    )
    private = any(view.private for view in views)
    return join(said, axis_choice(private), e("div", id="legend", class_="legend"), charts.figures(drawn))


def _ledgers(views: Sequence[RunView]) -> Html:
    faults, whole, none = [], 0, 0
    for view in views:
        if not view.private:
            none += 1
            continue
        _, fault = guarantee.ledger_lines(view)
        if fault:
            faults.append(f"{view.name}: {fault}")
        else:
            whole += 1
    text = (
        f"{whole} ledgers have an unbroken chain of hashes; {none} runs were not private. Each run's page has its own."
    )
    return join(e("p", text), notes_of(faults))


def _timing(views: Sequence[RunView]) -> Html:
    totals = sorted((view.summary.get("timings") or {}).get("total") or 0.0 for view in views)
    middle = totals[len(totals) // 2]
    devices = formatting.listed(sorted({str(view.summary["device"]) for view in views if view.summary.get("device")}))
    return e(
        "p",
        f"{formatting.seconds(sum(totals))} of training in {len(views)} runs; from {formatting.seconds(totals[0])} to "
        f"{formatting.seconds(totals[-1])} per run, half of them below {formatting.seconds(middle)}"
        f"{', on ' + devices if devices else ''}.",
    )


def _configuration(folder: Path, views: Sequence[RunView]) -> Html:
    named = [(view.name, view) for view in views]
    try:
        text = read_text(folder / "sweep.toml", MOST_BYTES).strip()
    except (FileNotFoundError, UsageError):
        return runs_page.configuration(named)
    return join(
        copyable(text, "sweep.toml"),
        e("h3", "What all cells share"),
        copyable(runs_page.toml(runs_page.shared_settings(named)), "shared settings"),
    )


def _rerun(folder: Path) -> Html:
    where = shown_path(folder)
    again = shlex.join(["normec", "sweep", f"{where}/sweep.toml", "--out", f"{where}-again"])
    on = shlex.join(["normec", "sweep", f"{where}/sweep.toml", "--out", where])
    return join(
        e("p", "From the start, in a new folder:"),
        copyable(again, "the command"),
        e("p", "To go on with cells that are missing:"),
        copyable(on, "the command to go on"),
    )


def _cards(cells: Sequence[Cell], views: Sequence[RunView], metrics: Sequence[Metric], winner: Cell | None) -> Html:
    counts = Counter(view.status for view in views)
    broken = counts["diverged"] + counts["failed"]
    facts = [
        ("Cells", formatting.number(len(cells)), ""),
        ("Runs", formatting.number(len(views)), f"{counts['finished']} finished"),
        ("Broken", formatting.number(broken), f"{counts['diverged']} diverged, {counts['failed']} failed"),
        ("Training", formatting.number(counts["training"]) if counts["training"] else "", "now"),
    ]
    if winner is not None:
        facts += [(f"Best cell: {m.title}", shown(winner, m), winner.label) for m in metrics[:2]]
    return cards(facts)
