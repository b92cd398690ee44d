"""The commands, and their exit codes: 0 success, 1 failure, 2 a mistake of the user, 130 interrupted."""

from __future__ import annotations

import functools
import os
import re
import sys
from typing import Annotated

import click
import typer
from click import ClickException
from click.exceptions import NoArgsIsHelpError, NoSuchOption

from .. import __version__
from ..errors import Diverged, Interrupted, RankLost, UsageError, nearest
from . import compare, data, federation, predict, privacy, report, results, suggest, sweep, tag, theory, train, ui
from . import options as o
from .output import printable

# Flags that other programs have under another name.
ELSEWHERE = {"--learning-rate": "--lr", "--dataset": "--data", "--gpu": "--device", "--no-private": "--no-privacy"}

app = typer.Typer(
    name="normec",
    help="Private distributed training: clients send bounded messages, and error feedback repairs the bias.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
o.command(app, "train")(train.train)
o.command(app, "suggest", only=suggest.SETTINGS)(suggest.suggest)
o.command(app, "compare", without=("method", "lr"))(compare.compare)
app.command("sweep")(sweep.sweep)
app.command("results")(results.results)
app.command("report")(report.report)
app.command("predict")(predict.predict)
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
        code = _parser(commands)(args=arguments, standalone_mode=False)
    except UsageError as error:
        return _fail(str(error), 2)
    except Diverged as error:
        return _fail(str(error), 2 if error.round == 0 else 1)
    except NoArgsIsHelpError as error:  # a group without a command
        print(error.format_message())
        return 0
    except ClickException as error:
        return _fail(_what_is_wrong(error), 2)
    except RankLost as error:
        return _fail(str(error), 1)
    except (typer.Abort, KeyboardInterrupt, Interrupted):
        return _fail("interrupted; the same command continues where it stopped", 130)
    except OSError as error:
        return _fail(str(error), 1)
    return code if isinstance(code, int) else 0


@functools.cache
def _parser(commands: typer.Typer) -> click.Command:
    """Return the parser of all commands, which takes a tenth of a second to make: once per process."""
    return typer.main.get_command(commands)


def _what_is_wrong(error: ClickException) -> str:
    """Return the message of an error, with a cure for an unknown option or command."""
    context = getattr(error, "ctx", None)
    if context is None:
        return error.format_message()
    there = f"`{context.command_path} --help` lists all"
    if isinstance(error, NoSuchOption):
        return f"there is no option {error.option_name}{_instead(error.option_name, context)}; {there}"
    unknown = re.match(r"No such command '(.*?)'\.", error.format_message())
    if unknown is not None:
        known = context.command.list_commands(context)
        return f"there is no command {unknown[1]!r}{nearest(unknown[1], known)}; {there}"
    return error.format_message()


def _instead(option: str, context: click.Context) -> str:
    """Return what to write instead of an unknown option: the assignment of a setting, or a similar flag."""
    options = [one for one in context.command.get_params(context) if isinstance(one, click.Option)]
    flags = [flag for one in options for flag in (*one.opts, *one.secondary_opts) if flag != "--help"]
    if "--set" in flags:
        from ..settings.config import SETTINGS

        name = option.lstrip("-").replace("-", "_")
        if name in SETTINGS and not SETTINGS[name].flag:
            return f"; write --set {name}=VALUE"
    longer = [flag for flag in flags if flag.startswith(option) or flag == ELSEWHERE.get(option)]
    return f", did you mean {longer[0]!r}?" if len(longer) == 1 else nearest(option, flags)


def _fail(message: str, code: int) -> int:
    rank = os.environ.get("RANK", "0")
    print(f"rank {rank}: " * (rank != "0") + "error: " + printable(" ".join(message.split())), file=sys.stderr)
    return code
