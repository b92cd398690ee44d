"""python -m benchmarks.privacy: which method wins under the same guarantee, every method tuned alike."""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from normec.cli import app as cli
from normec.cli import options as o

FOLDER = Path(__file__).with_name("records")
app = typer.Typer(
    name="python -m benchmarks.privacy", help="Methods at a true epsilon.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("table")
def table(
    epsilons: Annotated[str, typer.Option("--epsilon", metavar="E[,E…]", help="Targets.")] = "1,2,4,8",
    splits: Annotated[str, typer.Option("--split", metavar="S[,S…]", help="iid, label or dirichlet.")] = "iid,label",
    data: Annotated[str, typer.Option(help="Data set.")] = "digits",
    clients: Annotated[int, typer.Option(help="Number of clients.")] = 100,
    trials: Annotated[int, typer.Option(help="Settings tried for each method.")] = 15,
    processes: Annotated[int, typer.Option(help="Processes to run in.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("runs/private-table"),
    as_json: o.Json = False,
) -> None:
    """Which method wins under the same guarantee: every method tuned alike, on validation data."""
    from normec.errors import at_least

    from . import digits_table

    at_least(1, trials=trials, processes=processes)
    path = digits_table.table(
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
    out: Annotated[Path, typer.Option(help="Folder of the records.")] = FOLDER,
    limit_seconds: Annotated[float | None, typer.Option(help="Begin no run after so long.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    together: Annotated[int, typer.Option(help="On a GPU: runs at a time, a round each in turn.")] = 1,
    cell: Annotated[
        list[str] | None, typer.Option(metavar="SPLIT/EPSILON/METHOD", help="Only this one; may be repeated.")
    ] = None,
) -> None:
    """A study of what a true guarantee leaves of each method; the same command goes on where it stopped."""
    from . import page, studies, work

    chosen = studies.named(names)
    tell = partial(print, file=sys.stderr, flush=True)
    done = work.run(chosen, out, limit_seconds, device, tell, together, cell or ())
    print("\n".join(map(str, page.write(out, pictures=find_spec("matplotlib") is not None))))
    print("done" if done else "the time is up; the same command goes on")


def _numbers(text: str) -> list[float]:
    from normec.errors import UsageError, positive

    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"epsilon must be numbers with commas between, got {text!r}") from None
    for value in found:
        positive(epsilon=value)
    return found


if __name__ == "__main__":
    sys.exit(cli.run(commands=app))
