"""The commands, and their exit codes: 0 success, 1 failure, 2 a mistake of the user, 130 interrupted."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
import typer.core
from click import ClickException
from click.exceptions import NoArgsIsHelpError

from .. import __version__
from ..errors import Diverged, Interrupted, RankLost, UsageError
from . import compare, data, federation, privacy, report, results, suggest, sweep, tag, theory, train, ui
from . import options as o
from .output import printable

typer.core.HAS_RICH = False  # help is plain text; with Rich, typer writes "\\[default: …]" into it

app = typer.Typer(
    name="normec",
    help="Private distributed training: clients send bounded messages, and error feedback repairs the bias.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
o.command(app, "train")(train.train)
o.command(app, "suggest", only=suggest.SETTINGS)(suggest.suggest)
o.command(app, "compare", without=("method", "lr"))(compare.compare)
app.command("sweep")(sweep.sweep)
app.command("results")(results.results)
app.command("report")(report.report)
app.command("tag")(tag.tag)
app.command("ui")(ui.ui)
app.add_typer(data.app, name="data")
app.add_typer(federation.app, name="federation")
app.add_typer(privacy.app, name="privacy")
app.add_typer(theory.app, name="theory")


def _print_version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[  # the callback answers before a command is asked for
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take the options that come before a command."""


def run(arguments: list[str] | None = None, commands: typer.Typer = app) -> int:
    """Run a command line and return the exit code."""
    try:
        code = commands(args=arguments, standalone_mode=False)
    except UsageError as error:
        return _fail(str(error), 2)
    except Diverged as error:
        return _fail(str(error), 2 if error.round == 0 else 1)
    except NoArgsIsHelpError as error:  # a group without a command
        print(error.format_message())
        return 0
    except ClickException as error:
        return _fail(error.format_message(), 2)
    except RankLost as error:
        return _fail(str(error), 1)
    except (typer.Abort, KeyboardInterrupt, Interrupted):
        return _fail("interrupted; the same command continues where it stopped", 130)
    except OSError as error:
        return _fail(str(error), 1)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}: " * (rank != "0") + "error: " + printable(" ".join(message.split())), file=sys.stderr)
    return code
