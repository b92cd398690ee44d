"""The commands: study, table, heart, collect, pages."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from normec.cli import options as o

FOLDER = Path(__file__).parent
app = typer.Typer(
    name="python -m benchmarks.privacy",
    help="Compare methods under the same privacy guarantee.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Option("--out", help="Folder of README.md and records/.")]


@app.command("table")
def table(
    epsilons: Annotated[str, typer.Option("--epsilon", metavar="E[,E…]", help="Targets.")] = "1,2,4,8",
    splits: Annotated[str, typer.Option("--split", metavar="S[,S…]", help="iid, label or dirichlet.")] = "iid,label",
    data: Annotated[str, typer.Option(help="Data set.")] = "digits",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 100,
    trials: Annotated[int, typer.Option(help="Settings per method.")] = 15,
    processes: Annotated[int, typer.Option(help="Number of processes.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/private-table"),
    as_json: o.Json = False,
) -> None:
    """Make a table of all methods, each tuned with the same budget on validation data."""
    from normec.errors import at_least

    from . import method_table

    at_least(1, trials=trials, processes=processes)
    path = method_table.table(
        out,
        _numbers(epsilons),
        splits.split(","),
        trials,
        data,
        clients,
        processes,
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(json.dumps({"table": str(path)}) if as_json else path.read_text())


@app.command("study")
def study(
    names: Annotated[list[str], typer.Argument(metavar="STUDY…", help="a9a-100, w8a-1000, cifar10-10000 … or all.")],
    out: Folder = FOLDER,
    limit_seconds: Annotated[
        float | None, typer.Option(help="Start no run after this time.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    together: Annotated[int, typer.Option(help="Runs that take turns on a GPU, round by round.")] = 1,
    cell: Annotated[
        list[str] | None, typer.Option(metavar="SPLIT/EPSILON/METHOD", help="Run only this cell; may be repeated.")
    ] = None,
) -> None:
    """Run studies; the same command continues after an interruption."""
    from . import page, runner, studies

    chosen = studies.named(names)
    report = partial(print, file=sys.stderr, flush=True)
    done = runner.run(chosen, out / page.RECORDS, limit_seconds, device, report, together, cell or ())
    print("\n".join(map(str, page.write(out, pictures=find_spec("matplotlib") is not None))))
    print("done" if done else "time limit reached; the same command continues")


@app.command("heart")
def heart(
    processes: Annotated[int, typer.Option(help="Number of processes.")] = 2,
    record: Annotated[Path | None, typer.Option(help="File of the record.", show_default=False)] = None,
    page: Annotated[Path | None, typer.Option(help="File of the page.", show_default=False)] = None,
) -> None:
    """Train the four hospitals of heart-disease at patient level, beside FLamby's published results."""
    from normec.errors import at_least
    from normec.system.files import write_atomic

    from . import heart as hospitals

    at_least(1, processes=processes)
    path, target = record or hospitals.RECORD, page or hospitals.PAGE
    hospitals.run(processes, partial(print, file=sys.stderr, flush=True), path)
    write_atomic(target, hospitals.page(json.loads(path.read_text(encoding="utf-8"))))
    print(target)


@app.command("collect")
def collect(
    source: Annotated[Path, typer.Argument(metavar="FILE.tgz|FOLDER", help="Records from another machine.")],
    out: Folder = FOLDER,
    replace: Annotated[bool, typer.Option("--replace", help="Replace records that have other numbers.")] = False,
) -> None:
    """Add records from another machine; all are refused if one of them does not fit its study."""
    from . import page, records

    new = records.collect(source, out / page.RECORDS, replace)
    print(f"{len(new)} new records" + "".join(f"\n  {name}" for name in new))


@app.command("pages")
def pages(
    out: Folder = FOLDER, pictures: Annotated[bool, typer.Option(help="Draw the pictures as well.")] = True
) -> None:
    """Write README.md, the CSV files and the pictures from the records."""
    from . import page

    print("\n".join(map(str, page.write(out, pictures))))


def _numbers(text: str) -> list[float]:
    from normec import UsageError
    from normec.errors import positive

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"epsilon must be numbers separated by commas, got {text!r}") from None
    for value in found:
        positive(epsilon=value)
    return found
