"""The page about one run."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..privacy.display import shown_epsilon
from ..storage import TRACE
from ..storage.history import NOT_COVERED, STARTED_BY
from . import charts, formatting, guarantee
from .document import Section, cards, copyable, document, notes_of, pill, tag_mark
from .html import Html, e, join, table
from .run_view import STATUS, RunView

NOT_SHOWN = ("data_dir", "checkpoint_seconds")
# The headline has the first of these that was measured.
RESULTS = ("accuracy", "validation_accuracy", "test_loss", "grad_norm", "loss")
# Settings besides the method's own that are shown at the top of the page where they are used.
TUNED = (
    "lr_schedule",
    "server_optimizer",
    "averaging",
    "warmup",
    "batch_size",
    "batch_rate",
    "sample_rate",
    "sample_count",
    "groups",
    "noise_bands",
    "local_steps",
    "local_epochs",
    "local_lr",
    "local_optimizer",
    "local_momentum",
    "prox",
)
OF_THE_RECORDS = ("data", "value at the start")  # of a checkpoint's identity: functions of the clients' records
PARTS = {
    "gradients": "gradients",
    "update": "messages and steps",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
}


def render(view: RunView, served: str | None = None, live: str | None = None) -> str:
    """The whole page; `live` is the URL of new rows, for a page that a server updates."""
    histories = [view.history]
    result, spent, health = (
        charts.measured(group, histories, view.uncovered) for group in (charts.RESULT, charts.SPENT, charts.HEALTH)
    )
    result += charts.own_metrics(histories)
    references = references_of(view)
    data = charts.payload(
        [*result, *spent, *health],
        [{"name": view.name, "columns": charts.columns_of(histories)}],
        references,
    )
    data["live"] = live
    if view.status == "diverged":
        data["events"] = [{"round": view.round, "name": "diverged"}]
    thinned = len(view.history) - len(charts.thinned(view.history.rows))
    note = (
        f"{thinned:,} of {len(view.history):,} rows are left out of the curves; metrics.jsonl has all."
        if thinned
        else ""
    )
    parts = [
        Section("curves", "Curves", join(axis_choice(view.private), charts.figures(result, note)))
        if result
        else Section("curves", "Curves", e("p", "Nothing was measured yet.")),
        *guarantee.sections(view, charts.figures(spent)),
        Section("clients", "Clients", _clients(view, charts.figures(health) if health else None)),
        Section("timing", "Timing", join(_timing(view), _profile(view, linked=served is None))),
        Section("configuration", "Configuration", _configuration(view)),
        Section("rerun", "Run it again", _rerun(view)),
    ]
    kicker = e("p", f"{view.name} ", pill(view.status), [tag_mark(tag) for tag in view.tags], class_="kicker")
    lead = e("div", kicker, guarantee.badge([view]), heading(view), _settings(view), _cards(view), class_="lead")
    scripts = ("live.js",) if live else ()
    return document(
        f"{view.name} · normec", join(lead, notes_of(view.notes)), parts, data, scripts=scripts, served=served
    )


def heading(view: RunView) -> Html:
    return join(e("h1", headline(view), id="headline"), e("p", what(view), class_="what"))


def headline(view: RunView) -> str:
    """The result in one sentence."""
    method, protected = formatting.method(view.method), guarantee.phrase(view)
    final, k, of = view.final, view.round, view.rounds
    if view.status in ("diverged", "failed"):
        why = str(view.summary.get("error") or "no reason was recorded")
        return formatting.sentence(f"{method} {STATUS[view.status]}: {why}")
    reached = _reached(final, view.uncovered)
    if view.status == "training":
        there = _when(view, reached) if reached else "nothing measured yet"
        return formatting.sentence(f"{method} is training: round {k}{f' of {of}' if of else ''}, {there}, {protected}")
    if not reached:
        return formatting.sentence(f"{method} {STATUS.get(view.status, view.status)} with nothing measured")
    after = f"after {k} rounds"
    if view.status != "finished":
        after = f"after {k}{f' of {of}' if of else ''} rounds, when it {STATUS.get(view.status, view.status)},"
    return formatting.sentence(f"{method} reached {reached} {after} {protected}")


def _reached(final: dict[str, Any], uncovered: Sequence[str]) -> str:
    texts = {
        "accuracy": f"{formatting.percent(final.get('accuracy'))} test accuracy",
        "validation_accuracy": f"{formatting.percent(final.get('validation_accuracy'))} validation accuracy",
        "test_loss": f"a test loss of {formatting.number(final.get('test_loss'))}",
        "grad_norm": f"a gradient norm of {formatting.number(final.get('grad_norm'))}",
        "loss": f"a training loss of {formatting.number(final.get('loss'))}",
    }
    column = next((column for column in RESULTS if final.get(column) is not None), None)
    if column is None:
        return ""
    return f"{texts[column]} ({NOT_COVERED})" if column in uncovered else texts[column]


def _when(view: RunView, reached: str) -> str:
    """A result of a run that trains, with the round of its measurement where later rounds are known."""
    column = next(column for column in RESULTS if view.final.get(column) is not None)
    measured = view.history.rounds(column)[-1:]
    return f"{reached} in round {measured[0]}" if measured and measured[0] < view.round else f"{reached} so far"


def what(view: RunView) -> str:
    """The run in one line."""
    s, summary = view.settings, view.summary
    clients = summary.get("clients") or view.identity.get("clients") or s.get("clients")
    size = summary.get("dimension") or view.identity.get("dimension")
    parts = [
        f"{s['data']}, {s.get('model')}" if "data" in s else "",
        f"{formatting.number(clients)} clients ({s['split']})" if clients and "split" in s else "",
        f"{formatting.number(size)} parameters" if size else "",
        f"seed {s['seed']}" if "seed" in s else "",
    ]
    return " · ".join(filter(None, parts))


def _settings(view: RunView) -> Html:
    """The settings that are usually tuned: the method's own, the step size, and `TUNED`."""
    tuned = {**view.method_settings, "lr": view.lr if view.lr is not None else "of the method"}
    tuned |= {name: view.settings[name] for name in TUNED if view.settings.get(name) not in (None, 0, False)}
    pairs = [e("div", e("dt", formatting.setting(name)), e("dd", _value(value))) for name, value in tuned.items()]
    return e("dl", pairs, class_="settings", aria_label="Settings")


def _value(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else formatting.number(value)


def card_facts(view: RunView) -> list[tuple[str, str, str]]:
    final, summary = view.final, view.summary
    best = max(view.history["accuracy"], default=None)
    at = view.history.rounds("accuracy")[view.history["accuracy"].index(best)] if best is not None else None
    total = (summary.get("timings") or {}).get("total") if view.status != "training" else None
    budget = f"of {formatting.number(view.budget)}" if view.budget is not None else "reported, no target"
    of = f"of {formatting.number(view.rounds)}" if view.rounds else ""
    beside = f"best {formatting.percent(best)} in round {at}"
    if summary.get("majority") is not None:
        beside += f"; majority-class baseline {formatting.percent(summary['majority'])}"
    test_loss = final.get("test_loss") if best is None else None  # beside an accuracy, its curve is enough
    return [
        ("Test accuracy", formatting.percent(final.get("accuracy")), beside),
        ("Test accuracy, mean over clients", formatting.percent(final.get("accuracy_mean_over_clients")), ""),
        ("Test loss", formatting.number(test_loss), ""),
        *((chart.title, _own_value(final, chart), "") for chart in charts.own_metrics([view.history])),
        ("Training loss", formatting.number(final.get("loss")), NOT_COVERED if view.private else ""),
        ("Gradient norm", formatting.number(final.get("grad_norm"), 3), NOT_COVERED if view.private else ""),
        ("ε spent", shown_epsilon(view.epsilon), budget) if view.private else ("Privacy", "none", "no noise"),
        ("Rounds", formatting.number(view.round), of),
        ("Sent by a client", formatting.size(final.get("bytes")), ""),
        ("Time", formatting.seconds(total), str(summary.get("device", ""))),
    ]


def _own_value(final: dict[str, Any], chart: charts.Chart) -> str:
    """The last value of a metric of the user's own."""
    value = final.get(next(iter(chart.columns)))
    return formatting.percent(value) if chart.percent else formatting.number(value)


def _cards(view: RunView) -> Html:
    return cards(card_facts(view))


def references_of(view: RunView) -> dict[str, list[dict[str, Any]]]:
    """Straight lines: the budget of ε, the bound of a message."""
    found: dict[str, list[dict[str, Any]]] = {}
    if view.budget is not None:
        found["epsilon"] = [{"value": view.budget, "name": "budget"}]
    if view.bound is not None:
        found["message_norm"] = [{"value": view.bound, "name": "bound"}]
    return found


def axis_choice(private: bool) -> Html:
    """What the curves run over."""
    options = [("round", "rounds"), ("bytes", "bytes sent by a client"), ("messages", "messages of all clients")]
    if private:
        options.append(("epsilon", "ε spent"))
    select = e("select", [e("option", name, value=key) for key, name in options], id="axis")
    return e("p", e("label", "Over ", select), class_="tools")


def _clients(view: RunView, curves: Html | None) -> Html:
    final = view.final
    rounds, clients = final.get("round"), view.summary.get("clients") or view.identity.get("clients")
    sent = final.get("messages")
    took = ""
    if rounds and clients and sent is not None:
        share = sent / (rounds * clients)
        took = f"{formatting.number(sent)} messages in {rounds} rounds of {formatting.number(clients)} clients: "
        took += (
            "nobody was missing." if share >= 1 else f"{formatting.percent(1 - share)} were not drawn or dropped out."
        )
    held = view.clients
    listing = None
    if held is not None:
        columns = [str(name) for name in held["columns"]]
        numeric = [all(not isinstance(row[k], str) for row in held["rows"]) for k in range(len(columns))]
        heads = [f">{name}" if number else name for name, number in zip(columns, numeric, strict=True)]
        rows = [[formatting.number(cell) for cell in row] for row in held["rows"]]
        listing = join(
            e("h3", "Client by client"), table(heads, rows, class_="sortable", aria_label="Client by client")
        )
    return join(
        e("p", took) if took else None,
        guarantee.warning([view]),
        curves,
        listing,
        None if curves or listing else e("p", _nothing_of_clients(view)),
    )


def _nothing_of_clients(view: RunView) -> str:
    if not view.private:
        return "No more was measured of the clients."
    return (
        "Nothing else is recorded of the clients. Their losses, norms and memory errors would be measured without "
        f"noise, and are {NOT_COVERED}; diagnostics = true (--diagnostics) records them."
    )


def _timing(view: RunView) -> Html:
    written = view.status != "training" and view.summary.get("timings")
    source, rounds = (view.summary, view.round) if written else (view.checkpoint, view.checkpoint.get("round"))
    timings = {key: spent for key, spent in (source.get("timings") or {}).items() if isinstance(spent, int | float)}
    total = timings.get("total")
    if not total:
        return e("p", "Not written down yet.")
    known = {PARTS.get(key, key): spent for key, spent in timings.items() if key != "total"}
    known["everything else"] = max(0.0, total - sum(known.values()))
    rows = [
        [name, _bar(spent / total), formatting.seconds(spent), formatting.percent(spent / total)]
        for name, spent in sorted(known.items(), key=lambda item: -item[1])
    ]
    each = f", {formatting.seconds(total / rounds)} per round" if rounds else ""
    where = " on ".join(
        filter(None, (view.summary.get("engine") and f"engine {view.summary['engine']}", view.summary.get("device")))
    )
    return join(
        e("p", f"{formatting.seconds(total)} in all{each}{'; ' + where if where else ''}."),
        None if written else e("p", f"As of the last checkpoint, after round {rounds}.", class_="quiet"),
        table(("part", "", ">time", ">share"), rows, aria_label="Timing"),
    )


def _profile(view: RunView, *, linked: bool) -> Html | None:
    """Where the time of the profiled rounds went; `linked`: whether the page lies beside the trace."""
    held = view.profile
    if held is None:
        return None
    first, last = held["first_round"], held["first_round"] + held["rounds"] - 1
    rounds = f"Round {first}" if last == first else f"Rounds {first} to {last}"
    trace = e("a", TRACE, href=TRACE) if linked else e("code", f"{shown_path(view.folder)}/{TRACE}")
    text = f"{rounds}, {_ms(held['ms_per_round'])} each with the profiler, which slows small operations down. "
    on_device = any(part["device_ms"] for part in held["parts"])
    operations = e(
        "details",
        e("summary", "Operations that take longest"),
        _spent("operation", held["operations"], held["ms_per_round"], on_device),
    )
    private = (
        f" Times depend on the clients' data and are {NOT_COVERED}: do not publish the trace. How often each operation "
        "ran is left out of this page, because it may show how many clients took part."
    )
    return join(
        e("h3", "Profile"),
        e("p", text, trace, " opens in ui.perfetto.dev.", private if view.private else ""),
        _spent("part of a round", held["parts"], held["ms_per_round"], on_device),
        None if view.private else operations,
    )


def _spent(kind: str, lines: Sequence[dict[str, Any]], whole: float, on_device: bool) -> Html:
    """A table of milliseconds per round, on the host and, where anything ran there, on the device."""
    counted = any("calls" in line for line in lines)
    heads = [kind, "", *([">calls"] if counted else []), ">time", *([">time on the device"] if on_device else [])]
    rows: list[list[Any]] = []
    for line in lines:
        row = [PARTS.get(line["name"], line["name"]), _bar(max(line["ms"], line["device_ms"]) / whole if whole else 0)]
        row += [formatting.number(line["calls"], 3)] if counted else []
        rows.append([*row, _ms(line["ms"]), *([_ms(line["device_ms"])] if on_device else [])])
    return table(heads, rows, aria_label=f"Profile by {kind}")


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms"


def _bar(share: float) -> Html:
    width = f"{100 * min(1.0, share):.2f}"
    inner = Html(f'<rect width="{width}" height="10" rx="2"></rect>')
    return e("svg", inner, class_="bar-of", viewBox="0 0 100 10", preserveAspectRatio="none", aria_hidden="true")


def _configuration(view: RunView) -> Html:
    if not view.settings:
        return e("p", "The folder has no config.toml.", _identity(view))
    rows = [[e("code", key), e("code", _toml(value))] for key, value in view.settings.items() if key not in NOT_SHOWN]
    versions = view.summary.get("versions") or {}
    return join(
        e("p", ", ".join(f"{name} {version}" for name, version in versions.items()), class_="quiet")
        if versions
        else None,
        copyable(view.toml.strip(), "config.toml"),
        e("details", e("summary", "As a table"), table(("setting", "value"), rows, aria_label="Settings")),
        e("details", e("summary", "With every default, as it was trained"), _identity(view)) if view.identity else None,
    )


def _identity(view: RunView) -> Html | None:
    hidden = OF_THE_RECORDS if view.private else ()
    rows = [[e("code", key), e("code", _toml(value))] for key, value in view.identity.items() if key not in hidden]
    return table(("name", "value"), rows, aria_label="What identifies the run") if rows else None


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rerun(view: RunView) -> Html:
    where = shown_path(view.folder)
    if not view.settings or STARTED_BY in view.settings:
        text = "The run was started from Python: call normec.train as before. With out= this folder, it continues."
        return e("p", text)
    if view.identity.get("parties"):
        return _rerun_federation(where, view.status)
    again = shlex.join(["normec", "train", f"{where}/config.toml", "--out", f"{where}-again"])
    lr = view.lr
    on = ["normec", "train", f"{where}/config.toml", "--out", where]
    smaller = (
        ["normec", "train", f"{where}/config.toml", "--lr", f"{lr / 10:g}", "--out", f"{where}-smaller-lr"]
        if (view.status == "diverged" and isinstance(lr, int | float))
        else None
    )
    return join(
        e("p", f"From the start, in a new folder; {_what_a_repetition_gives(view.settings)}:"),
        copyable(again, "the command"),
        join(e("p", "To go on where this one stopped:"), copyable(shlex.join(on), "the command to go on"))
        if view.status in ("interrupted", "unfinished")
        else None,
        join(e("p", "With a step size ten times smaller:"), copyable(shlex.join(smaller), "the gentler command"))
        if smaller
        else None,
    )


def _what_a_repetition_gives(settings: Mapping[str, Any]) -> str:
    """Return what a run with the same settings has in common with this one."""
    if settings.get("private") and settings.get("noise") != "seeded":
        return "its noise is fresh, so the numbers differ"
    if settings.get("private") and settings.get("seed") is None:
        return "its noise comes from a secret of its own, so the numbers differ (--seed makes them repeatable)"
    return "the same seed on the same kind of machine gives the same numbers"


def _rerun_federation(where: str, status: str) -> Html:
    on = copyable(_flower_command(where), "the command to go on")
    return join(
        e(
            "p",
            "A federated run is started from its app's folder. The command takes the settings of the app's "
            "pyproject.toml. If this run had a file of settings (-c FILE), change out in that file and give the file "
            "instead: Flower does not take both. In a new folder:",
        ),
        copyable(_flower_command(f"{where}-again"), "the command"),
        join(e("p", "To go on where this one stopped:"), on) if status not in ("finished", "training") else None,
        e("p", "With all parties on one machine: ", e("code", "normec federation local"), "."),
    )


def _flower_command(out: str) -> str:
    """The command that starts a run in the folder `out`, whose name is quoted for the shell and for TOML."""
    return shlex.join(["flwr", "run", ".", "-c", f"out={json.dumps(out, ensure_ascii=False)}"])


def shown_path(folder: Path) -> str:
    """A folder relative to the working directory."""
    resolved, here = folder.resolve(), Path.cwd()
    return os.path.relpath(resolved, here) if resolved.is_relative_to(here) else str(resolved)
