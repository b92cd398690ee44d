"""The page about several runs: a comparison of methods, or any runs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..privacy.display import shown_epsilon
from ..storage.history import NOT_COVERED
from . import charts, formatting, guarantee
from .document import Section, copyable, document, notes_of, pill, tag_mark
from .html import Html, e, join, table
from .result_metrics import BY_COLUMN, IN_ORDER, Metric
from .run_page import axis_choice, references_of, shown_path
from .run_view import RunView

BETTER = (
    ("accuracy", "highest test accuracy", max),
    ("test_loss", "smallest test loss", min),
    ("grad_norm", "smallest gradient norm", min),
    ("loss", "smallest training loss", min),
)
# The measured columns of the results; ε has a column of its own, and the time a table.
MEASURED = [metric for metric in IN_ORDER if metric.usual and metric.column not in ("epsilon", "seconds")]
HEALTH = {
    "memory_error": "memory error",
    "message_norm": "message norm",
    "message_norm_max": "largest message",
    "disagreement": "disagreement",
}


def render(
    views: dict[str, RunView],
    links: dict[str, str],
    *,
    title: str,
    notes: Sequence[str] = (),
    extra: Sequence[Section] = (),
    rerun: Html | None = None,
    served: str | None = None,
) -> str:
    """The whole page; `views` and `links` by the displayed names of the runs."""
    histories = [view.history for view in views.values()]
    uncovered = uncovered_of(views.values())
    drawn = charts.compared(list(charts.ALL.values()), histories, uncovered)
    series = [{"name": name, "columns": charts.columns_of([view.history])} for name, view in views.items()]
    data = charts.payload(drawn, series, _references(views))
    private = any(view.private for view in views.values())
    curves = join(axis_choice(private), e("div", id="legend", class_="legend"), charts.figures(drawn))
    parts = [
        Section("runs", "Results", results(views, links)),
        *extra,
        Section("curves", "Curves", curves),
        Section("privacy", "Privacy", privacy(list(views.items()))),
        Section("ledgers", "Ledgers", _ledgers(views)),
        Section("clients", "Clients", _health(views)),
        Section("timing", "Timing", _timing(views)),
        Section("configuration", "Configuration", configuration(list(views.items()))),
        *([Section("rerun", "Run it again", rerun)] if rerun else []),
    ]
    shown_views = list(views.values())
    lead = e(
        "div",
        e("p", title, class_="kicker"),
        guarantee.badge(shown_views),
        e("h1", headline(views)),
        guarantee.warning(shown_views),
        class_="lead",
    )
    return document(
        f"{title} · normec", join(lead, notes_of([*notes, *_other_data(views)])), parts, data, served=served
    )


def headline(views: dict[str, RunView]) -> str:
    """The best run, and the best private run."""
    for column, praise, choose in BETTER:
        known = {name: view for name, view in views.items() if view.final.get(column) is not None and _whole(view)}
        if not known:
            continue
        best = choose(known, key=lambda name: known[name].final[column])
        text = f"of {len(views)} runs, {best} reached the {praise}, {_in_words(known[best], column)}"
        private = {name: view for name, view in known.items() if view.private}
        if private and best not in private:
            safe = choose(private, key=lambda name: private[name].final[column])
            text += f"; with privacy it was {safe}, {_in_words(private[safe], column)}"
        return formatting.sentence(text)
    return "None of these runs has measured anything yet."


def _other_data(views: dict[str, RunView]) -> list[str]:
    """A note if the runs have different data, whose results no sentence should rank."""
    names = sorted({str(view.settings["data"]) for view in views.values() if view.settings.get("data")})
    if len(names) < 2:
        return []
    return [f"The runs have different data ({', '.join(names)}); compare only the results of runs on the same data."]


def _whole(view: RunView) -> bool:
    return view.status not in ("diverged", "failed")


def _in_words(view: RunView, column: str) -> str:
    value = view.final[column]
    shown = formatting.percent(value) if column == "accuracy" else formatting.number(value)
    mark = f" ({NOT_COVERED})" if column in view.uncovered else ""
    return f"{shown}{mark}, {guarantee.phrase(view)}"


def uncovered_of(views: Iterable[RunView]) -> list[str]:
    """The columns that some private run shows although the guarantee does not cover them."""
    return list(dict.fromkeys(name for view in views for name in view.uncovered))


def results(views: dict[str, RunView], links: dict[str, str]) -> Html:
    """The results of the runs; their settings, of which there may be many, come last."""
    rows, tuned = [], _tuned(views.values())
    losses = [BY_COLUMN["test_loss"]] if any(view.final.get("accuracy") is None for view in views.values()) else []
    known = [
        metric
        for metric in (*losses, *MEASURED)
        if any(view.final.get(metric.column) is not None for view in views.values())
    ]
    for name, view in views.items():
        final, good = view.final, _whole(view)
        rows.append(
            [
                [e("a", name, href=links[name]) if name in links else name, [tag_mark(tag) for tag in view.tags]],
                pill(view.status),
                shown_epsilon(view.epsilon) if view.private else "∞",
                *(_shown(final.get(metric.column), metric) if good else "" for metric in known),
                formatting.size(final.get("bytes")),
                formatting.number(view.round),
                formatting.number(view.lr),
                *(formatting.number(view.method_settings.get(one)) for one in tuned),
            ]
        )
    uncovered = uncovered_of(views.values())
    measured = [f">{one.title} ({NOT_COVERED})" if one.column in uncovered else f">{one.title}" for one in known]
    settings = (">lr", *(f">{formatting.setting(one)}" for one in tuned))
    heads = ("run", "status", ">ε", *measured, ">sent by a client", ">rounds", *settings)
    errors = [f"{name}: {view.summary['error']}." for name, view in views.items() if view.summary.get("error")]
    return join(table(heads, rows, class_="sortable", aria_label="Results"), notes_of(errors))


def _shown(value: float | None, metric: Metric) -> str:
    return formatting.percent(value) if metric.percent else formatting.number(value, 3)


def _tuned(views: Iterable[RunView]) -> list[str]:
    """The settings of methods that some of the runs do not share."""
    held = [view.method_settings for view in views]
    names = dict.fromkeys(name for one in held for name in one)
    return [name for name in names if any(one.get(name) != held[0].get(name) for one in held)]


def privacy(named: Sequence[tuple[str, RunView]]) -> Html:
    """One statement for all runs that share it, and their total ε."""
    groups: dict[tuple[str, ...], list[tuple[str, RunView]]] = {}
    for name, view in named:
        spent = guarantee.promised(view) if view.private else {}
        key = (guarantee.phrase(view), str(spent.get("statement", "")), *map(str, spent.get("notes", ())))
        groups.setdefault(key, []).append((name, view))
    parts: list[Html] = []
    for (phrase, statement, *notes), members in groups.items():
        names = formatting.listed([name for name, _ in members]) if len(members) <= 8 else f"{len(members)} runs"
        parts += [
            e("h3", formatting.sentence(phrase).rstrip(".")),
            e("p", names, class_="quiet"),
            e("p", statement or _said(members[0][1])),
            *(e("p", formatting.sentence(f"note: {note}")) for note in notes),
        ]
    sums = [view.epsilon for _, view in named if view.private and view.epsilon is not None]
    if len(sums) > 1:
        text = (
            f"Together: these are {len(sums)} private runs. Where they used the same data, their ε and δ add up for "
            f"whoever sees all of their messages, here to ε = {shown_epsilon(sum(sums))} at most; choosing the "
            "best of them looks at all."
        )
        parts.append(e("p", text, class_="callout"))
    gaps = list(
        dict.fromkeys(
            gap for _, view in named if view.private for gap in guarantee.promised(view).get("not_covered", [])
        )
    )
    if gaps:
        parts += [
            e("h3", "What is not covered"),
            e("ul", [e("li", formatting.sentence(gap)) for gap in gaps], class_="gaps"),
        ]
    return join(parts)


def _said(view: RunView) -> str:
    if view.private:
        return "The run has not written its summary yet."
    return "The messages left without noise: whoever saw them may learn about any client's data from them."


def _ledgers(views: dict[str, RunView]) -> Html:
    rows = []
    for name, view in views.items():
        if not view.private:
            continue
        lines, fault = guarantee.ledger_lines(view)
        last = lines[-1] if len(lines) > 1 else {}
        state = fault or f"whole, {len(lines)} lines"
        held = (last.get("releases"), last.get("sigma"), last.get("multiplier"))
        rows.append([name, *(formatting.number(value) for value in held), shown_epsilon(last.get("epsilon")), state])
    if not rows:
        return e("p", "No run was private, so there is no ledger.")
    return table(
        ("run", ">releases", ">σ per client", ">multiplier", ">ε", "chain of hashes"), rows, aria_label="Ledgers"
    )


def _health(views: dict[str, RunView]) -> Html:
    known = [column for column in HEALTH if any(view.final.get(column) is not None for view in views.values())]
    rows = []
    for name, view in views.items():
        final = view.final
        clients = view.summary.get("clients") or view.identity.get("clients")
        sent, rounds = final.get("messages"), final.get("round")
        missing = formatting.percent(max(0.0, 1 - sent / (rounds * clients))) if sent and rounds and clients else ""
        rows.append(
            [name, formatting.number(clients), missing, *(formatting.number(final.get(column)) for column in known)]
        )
    heads = ("run", ">clients", ">not drawn or dropped", *(f">{HEALTH[column]}" for column in known))
    listing = table(heads, rows, class_="sortable", aria_label="Clients")
    return join(guarantee.warning(list(views.values())) if known else None, listing)


def _timing(views: dict[str, RunView]) -> Html:
    rows = []
    for name, view in views.items():
        total = (view.summary.get("timings") or {}).get("total")
        each = total / view.round if total and view.round else None
        where = " on ".join(filter(None, (view.summary.get("engine"), view.summary.get("device"))))
        rows.append([name, formatting.seconds(total), formatting.seconds(each), where])
    return table(("run", ">time", ">per round", "engine and device"), rows, aria_label="Timing")


def shared_settings(named: Sequence[tuple[str, RunView]]) -> dict[str, Any]:
    """The settings that all runs agree on."""
    first = named[0][1].settings
    return {key: value for key, value in first.items() if all(view.settings.get(key) == value for _, view in named)}


def configuration(named: Sequence[tuple[str, RunView]]) -> Html:
    """The settings that the runs share, and those that differ."""
    shared = shared_settings(named)
    apart = list(dict.fromkeys(key for _, view in named for key in view.settings if key not in shared))
    rows = [[name, *(formatting.number(view.settings.get(key)) for key in apart)] for name, view in named]
    return join(
        e("h3", "What tells the runs apart") if apart else None,
        table(("run", *apart), rows, class_="sortable", aria_label="What tells the runs apart") if apart else None,
        e("h3", "What they share"),
        copyable(toml(shared), "the shared settings"),
    )


def toml(settings: dict[str, Any]) -> str:
    """Flat settings as TOML, whose texts are written as in JSON; a setting that is None is left out."""
    known = {key: value for key, value in settings.items() if value is not None}
    return "\n".join(
        f"{key} = {repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)}"
        for key, value in known.items()
    )


def _references(views: dict[str, RunView]) -> dict[str, list[dict[str, Any]]]:
    """Lines that all runs with such a line agree on."""
    held = [references_of(view) for view in views.values()]
    found = {}
    for key in ("epsilon", "message_norm"):
        own = [one[key] for one in held if key in one]
        if own and all(one == own[0] for one in own):
            found[key] = own[0]
    return found


def link_to(folder: Path, page: Path) -> str:
    """A run's own page, as seen from the file `page`."""
    return Path(os.path.relpath((folder / "report.html").resolve(), page.resolve().parent)).as_posix()


def many_command(folders: Sequence[Path], out: Path) -> Html:
    command = shlex.join(["normec", "report", *map(shown_path, folders), "--out", shown_path(out)])
    return join(e("p", "To put this page together again:"), copyable(command, "the command"))
