"""The page about a comparison: the best run of every method, and the results of the other step sizes."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..storage.history import NOT_COVERED
from ..storage.history import uncovered as not_covered
from ..system.files import read_json
from . import formatting, runs_page, schema
from .document import Section, copyable
from .html import Html, e, join, table
from .result_metrics import BY_COLUMN, IN_ORDER, METRICS, Metric, values_of
from .run_page import shown_path
from .run_view import MOST_BYTES, RunView, read_runs, trusted_run

FILE = "comparison.json"
CRITERIA = {metric.column: metric for metric in METRICS if metric.decides and not metric.on_test}


def render(folder: Path, served: str | None = None, link: Any = None) -> str:
    """The whole page; `link` returns the URL of a run's own page (default: next to this one)."""
    rows = _rows(folder)
    views: dict[str, RunView] = {}
    notes = []
    for row in rows:
        if row.get("folder") is None:
            notes.append(f"{row['method']}: every step size diverged")
            continue
        try:
            views[row["method"]] = trusted_run(folder / Path(row["folder"]).name)
        except UsageError as error:
            notes.append(f"{row['method']}: {error}")
    if not views:
        raise UsageError(f"{folder} holds no run of its comparison: {'; '.join(notes) or FILE + ' is empty'}")
    by = criterion(rows, views)
    to = link or (lambda run: runs_page.link_to(run, folder / "report.html"))
    links = {name: to(view.folder) for name, view in views.items()}
    return runs_page.render(
        views,
        links,
        title=folder.resolve().name,
        notes=notes,
        extra=[*_over_seeds(rows), *_tried(rows, by, any(view.private for view in views.values()))],
        rerun=_rerun(folder, rows, by),
        served=served,
    )


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / FILE
    try:
        rows = read_json(path, MOST_BYTES)
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no comparison (there is no {FILE})") from None
    if not schema.list_of(ROW)(rows):
        raise UsageError(f"{path} is not what a comparison writes")
    return list(rows)


def _step_sizes(tried: Any) -> bool:
    """A table of step sizes with their results."""
    if not schema.table_of(schema.optional(schema.number))(tried):
        return False
    try:
        return all(math.isfinite(float(size)) for size in tried)
    except ValueError:
        return False


ROW = schema.record(
    {"method": schema.text, "tried": _step_sizes},
    {
        "folder": schema.optional(schema.text),
        "lr": schema.optional(schema.number),
        "status": schema.text,
        "by": schema.text,
        "seeds": schema.number,
        "deviations": schema.table_of(schema.number),
        **dict.fromkeys(BY_COLUMN, schema.optional(schema.number)),
    },
)


def criterion(rows: list[dict[str, Any]], views: dict[str, RunView]) -> str:
    """The column that decided between step sizes.

    Tables of older versions do not name it: there it is the column whose final value is recorded with the winner.
    """
    for row in rows:
        if row.get("by") in CRITERIA:
            return str(row["by"])
        view, lr = views.get(row["method"]), row.get("lr")
        if view is None or not isinstance(lr, int | float):
            continue
        value = row.get("tried", {}).get(f"{lr:g}")
        found = values_of(view.summary | {"final": view.final})
        for name in CRITERIA:
            if value is not None and value == found[name]:
                return name
    return "loss"


def _over_seeds(rows: list[dict[str, Any]]) -> list[Section]:
    """Means and standard deviations, if the best runs were repeated with other seeds."""
    repeated = [row for row in rows if row.get("deviations")]
    if not repeated:
        return []
    asked = [metric for metric in IN_ORDER if metric.usual or metric.on_test]
    measured = [metric for metric in asked if any(metric.column in row["deviations"] for row in repeated)]
    body = [[row["method"], *(_mean(row, metric) for metric in measured)] for row in repeated]
    uncovered = {name for row in repeated for name in not_covered(row)}
    marks = [f" ({NOT_COVERED})" if metric.column in uncovered else "" for metric in measured]
    said = e(
        "p",
        f"Means over {repeated[0]['seeds']} seeds ± their standard deviation; splits, batches and first models are the "
        "same for all methods. The curves and the other tables are those of the first seed.",
    )
    columns = ("method", *(f">{metric.title}{mark}" for metric, mark in zip(measured, marks, strict=True)))
    return [Section("seeds", "Over seeds", join(said, table(columns, body, aria_label="Means over seeds")))]


def _mean(row: dict[str, Any], metric: Metric) -> str:
    """A mean and its standard deviation over seeds."""
    mean, deviation = row.get(metric.column), row["deviations"].get(metric.column)
    if mean is None or deviation is None:
        return ""
    if metric.percent:
        return f"{100 * mean:.1f} ± {100 * deviation:.1f} %"
    return f"{formatting.number(mean)} ± {formatting.number(deviation)}"


def _tried(rows: list[dict[str, Any]], by: str, private: bool) -> list[Section]:
    sizes = sorted({float(size) for row in rows for size in row.get("tried", {})})
    if all(len(row.get("tried", {})) < 2 for row in rows):
        return []
    body = []
    for row in rows:
        tried = {float(size): value for size, value in row.get("tried", {}).items()}
        cells: list[str | Html] = []
        for size in sizes:
            value = tried.get(size)
            text = formatting.number(value)
            if value is None and size in tried:
                text = "diverged" if len(tried) > 1 or row.get("status") == "diverged" else "not compared"
            cells.append(e("strong", text) if size == row.get("lr") else text)
        body.append([row["method"], *cells])
    metric = CRITERIA[by]
    mark = f" For private runs it is measured without noise: {NOT_COVERED}." if private and metric.unnoised else ""
    said = e(
        "p",
        f"The {metric.title} at the end with each step size; the best is shown above. Test data played no part in this "
        f"choice.{mark}",
    )
    columns = ("method", *(f">{size:g}" for size in sizes))
    return [Section("tried", "Step sizes tried", join(said, table(columns, body, aria_label="Step sizes tried")))]


def _rerun(folder: Path, rows: list[dict[str, Any]], by: str) -> Html:
    """The shared settings as a file, and the command that runs the same comparison from it."""
    cells = sorted(path.parent for path in folder.glob("*/config.toml"))
    views, _ = read_runs(cells)
    labels = [str(row["method"]) for row in rows]
    shared = shared_by_all(labels, views, folder)
    lists = {tuple(row["tried"]) for row in rows if "lr=" not in row["method"]}
    sizes = next(iter(lists)) if len(lists) == 1 else ()
    command = ["normec", "compare", *labels, "--config", "shared.toml"]
    command += ["--lr", ",".join(sizes)] if sizes else []
    command += ["--by", by] if by != "loss" else []
    seeds = max(row.get("seeds", 1) for row in rows)
    command += ["--seeds", str(seeds)] if seeds > 1 else []
    command += ["--out", f"{shown_path(folder)}-again"]
    return join(
        e("p", "Save what all methods share as shared.toml:"),
        copyable(runs_page.toml(shared), "shared.toml"),
        e("p", "and run"),
        copyable(shlex.join(command), "the command"),
    )


def shared_by_all(labels: list[str], views: list[RunView], folder: Path) -> dict[str, Any]:
    """Settings that all runs share, unless a label says otherwise; without the method and its step size.

    Settings of methods are shared by those methods that have them. So are those of local steps, except their number.
    """
    from ..settings import config  # it needs pydantic, which pages of single runs do without

    own = {label: re.findall(r"(\w+)\s*=", label) for label in labels}
    held: dict[str, list[Any]] = {}
    of_methods = set(config.in_groups("method", "local")) - {"local_steps", "local_epochs"}
    absent = set[str]()
    implied = () if all("seed" in view.settings for view in views) else ("seed",)  # 0 where nothing is secret
    for view in views:
        name = view.folder.relative_to(folder).name
        named = max((label for label in labels if name.startswith(folder_prefix(label))), key=len, default="")
        hidden = {"method", "lr", *implied, *own.get(named, ())}
        for key, value in view.settings.items():
            if key not in hidden:
                held.setdefault(key, []).append(value)
        absent |= config.SETTINGS.keys() - view.settings.keys() - hidden - of_methods
    return {
        key: values[0]
        for key, values in held.items()
        if key not in absent and all(value == values[0] for value in values)
    }


def folder_prefix(label: str) -> str:
    """How the names of the folders of a method's runs begin; the step size follows."""
    return re.sub("[:=,/]", "-", label) + "-lr-"
