"""normec train: one run, from a file of settings, flags, or defaults."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import at_least
from ..storage import PROFILE, TRACE
from . import options as o
from .output import printable

if TYPE_CHECKING:
    from ..settings.config import RunConfig
    from ..trackers import Tracker
    from ..training.saved_run import Result


def train(
    config: o.ConfigFile = None,
    set_: o.Set = None,
    out: o.Out = None,
    track: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACKER", help="tensorboard[:FOLDER] or mlflow[:URI], in addition to the run's folder."),
    ] = None,
    tag: Annotated[
        list[str] | None,
        typer.Option(metavar="TAG", help="Tag the run, to find it again in `normec ui`; may be repeated."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Number of processes on this machine that share the clients.", show_default=False)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a process that does not answer ends the job.")
    ] = 600.0,
    max_restarts: Annotated[
        int, typer.Option(help="With --processes: how often to restart after a process was killed.")
    ] = 3,
    settings: Annotated[bool, typer.Option("--settings", help="List every setting with its value, and exit.")] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
    **flags: Any,
) -> int:
    """Train one model across clients.

    Without arguments, DP-α-NormEC trains on scikit-learn's digits with 100 clients, each protected with (ε, δ) =
    (8, 1e-5) against a server that sees only sums. The run has a folder: the same command continues after a stop, and
    shows the result of a finished run.
    """
    from ..settings.validation import load
    from ..storage.tags import change_tags, check_tags

    given = o.overrides(set_, flags)
    chosen = load(config, given)
    check_tags(tag or ())
    if settings:
        _show_settings(chosen, as_json)
        return 0

    from ..distributed import launch, process_group
    from ..experiments import build, runs
    from .progress import progress_display
    from .tagging import Tagging

    folder = runs.default_folder(chosen) if out is None else out
    if processes is not None and not process_group.launched():
        at_least(1, processes=processes)
        at_least(0, max_restarts=max_restarts)
        if processes > 1:
            return launch.launch([sys.executable, "-m", "normec", *sys.argv[1:]], processes, max_restarts)
    with ExitStack() as stack:
        communicator = stack.enter_context(process_group.join(build.device(chosen.device), timeout))
        asked = _trackers(track, folder, runs.settings_of(chosen)) if communicator.rank == 0 else []
        trackers = [stack.enter_context(tracker) for tracker in asked]
        watching = [progress_display(chosen.method, quiet), Tagging(folder, tag or ()), *trackers]
        before = _written(folder)
        result = runs.execute(chosen, folder, watching, communicator)
    if communicator.rank:
        return 130 if result.summary["status"] == "interrupted" else 0
    if tag:
        change_tags(folder, tag)  # a finished run is only read, and no callback sees it
    if as_json:
        print(json.dumps({"folder": str(result.folder), **result.summary}))
    else:
        show_result(result)
        if before is not None and _written(folder) == before:
            profiled = " or profiled" if chosen.profile and not (folder / PROFILE).exists() else ""
            print(
                f"This run was finished already, and nothing was trained{profiled}; a new folder (--out) begins again.",
                file=sys.stderr,
            )
        if config is None and not given and out is None and not track and not tag:
            _compare_baselines(result, quiet)
    if result.summary["status"] == "stopped":
        print(result.summary["stopped"], file=sys.stderr)
    if result.summary["status"] == "interrupted":
        again = shlex.join(["normec", *sys.argv[1:]])
        print(f"stopped after round {result.summary['round']}; to continue: {again}", file=sys.stderr)
        return 130
    return 0


def _show_settings(config: RunConfig, as_json: bool) -> None:
    """Print every setting with its value, as far as it is known without the data."""
    from ..experiments import build
    from ..experiments.resolve import Measured, resolved
    from ..settings.config import SETTINGS

    used = resolved(config, Measured(device=str(build.device(config.device)))).model_dump()
    if as_json:
        print(json.dumps(used))
        return
    for group, title in o.SECTIONS.items():
        print(f"{title}:")
        for one in SETTINGS.values():
            if one.group == group:
                value = "(not set)" if used[one.name] is None else json.dumps(used[one.name])
                print(f"  {f'{one.name} = {value}':<32} {one.help}")


def _written(folder: Path) -> int | None:
    """When the run in the folder was finished, if it is."""
    path = folder / "summary.json"
    return path.stat().st_mtime_ns if path.exists() else None


def _trackers(asked: list[str] | None, folder: Path, settings: dict[str, Any]) -> list[Tracker]:
    if not asked:
        return []
    from ..trackers import named

    return [named(text, folder, settings) for text in asked]


def privacy_line(spent: dict[str, Any]) -> str:
    """Return ε, δ and σ in one line, which says so if ε was not a target."""
    from ..privacy.display import shown_delta, shown_epsilon

    kind = "" if spent["is_target"] else " (reported, not a target)"
    strength = f"ε = {shown_epsilon(spent['epsilon'])} at δ = {shown_delta(spent['delta'])}"
    return f"{strength}{kind}, σ = {spent['sigma']:.4g} per client"


def _compare_baselines(result: Result, quiet: bool) -> None:
    """Compare the default run with baselines under the same guarantee, and with training without privacy."""
    from ..experiments import compare
    from .compare import show_rows
    from .progress import progress_display

    names = ("normec", "dpsgd-norm", "dpsgd-clip", "normec:private=false")
    outcomes = compare.run(
        compare.candidates(names, {}), result.folder.parent / "default", lambda label: progress_display(label, quiet)
    )
    show_rows([compare.row(outcome) for outcome in outcomes])
    print("The private settings were chosen on validation data, with 16 trials per method; see benchmarks/privacy.")


def show_result(result: Result) -> None:
    """Print the summary as a table, and the privacy statement."""
    from ..report.result_metrics import own_metrics
    from ..report.run_view import SIMULATION, simulated
    from ..storage.history import NOT_COVERED, uncovered
    from .output import number, percent, show

    summary, final = result.summary, result.summary["final"]
    settings = summary["config"]
    unprotected = uncovered(final)

    def measured(column: str) -> str:
        value = number(final.get(column), 4)
        return f"{value} ({NOT_COVERED})" if column in unprotected else value

    rows = [
        ("status", f"{summary['status']}, {summary['round']} of {summary['rounds']} rounds"),
        ("clients × parameters", f"{summary['clients']} × {summary['dimension']:,}"),
        ("training loss", measured("loss")),
        ("gradient norm", measured("grad_norm")),
        ("memory error", measured("memory_error")),
        ("test accuracy", percent(final.get("accuracy"))),
        ("test loss", number(final.get("test_loss"), 4) if final.get("accuracy") is None else ""),
        ("mean over clients", percent(final.get("accuracy_mean_over_clients"))),
        ("best test accuracy", percent(summary["best_accuracy"])),
        ("majority-class baseline", percent(summary.get("majority"))),
        *((name.replace("_", " "), number(value, 4)) for name, value in own_metrics(final).items()),
        ("sent by a client", f"{final.get('bytes', 0) / 1e6:.3g} MB"),
        ("time", f"{summary['timings']['total']:.1f} s, engine {summary['engine']} on {summary['device']}"),
        ("page", str(result.folder / "report.html")),
        ("trace", str(result.folder / TRACE) if (result.folder / TRACE).exists() else ""),
    ]
    if summary["privacy"] is not None:
        rows.insert(2, ("privacy", privacy_line(summary["privacy"])))
    show([row for row in rows if row[1]], title=f"{settings['method']} on {settings['data']}, {settings['model']}")
    if summary["privacy"] is not None:
        statement = printable(summary["privacy"]["statement"])
        if simulated(summary["privacy"], settings) and not statement.startswith(SIMULATION):
            print(f"{SIMULATION}.")
        print(statement)
        for note in summary["privacy"]["notes"]:
            print(f"Note: {printable(note)}.")
        if settings.get("unit") == "record" and settings["method"] not in ("dpsgd-clip", "dpsgd-adaptive"):
            print("Where records are protected, dpsgd-clip needs the least noise; `normec suggest` has its settings.")
