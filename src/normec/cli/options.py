"""Flags that several commands share. The flags of settings follow from the declaration of the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
import typer.core
from typer.core import TyperCommand, TyperOption

if TYPE_CHECKING:
    from ..settings.declaration import Setting

typer.core.HAS_RICH = False  # help is plain text; with Rich, typer writes "\\[default: …]" into it

SECTIONS = {
    "data": "Data",
    "model": "Model",
    "method": "Method",
    "local": "Local steps",
    "privacy": "Privacy",
    "training": "Training",
    "logging": "Logging",
    "compute": "Compute",
    "storage": "Storage",
}


def complete_assignment(incomplete: str) -> list[str]:
    """Complete KEY=VALUE for `--set`: first the names of settings, then their values."""
    from ..settings.config import SETTINGS

    name, sign, _ = incomplete.partition("=")
    if not sign:
        return [f"{one}=" for one in SETTINGS]
    return [f"{name}={value}" for value in SETTINGS[name].all_values()] if name in SETTINGS else []


def complete_method(incomplete: str) -> list[str]:
    """Complete the name of a method; what follows a colon is left to the user."""
    from ..settings.config import SETTINGS

    return [] if ":" in incomplete else list(_offered(SETTINGS["method"]))


ConfigFile = Annotated[Path | None, typer.Argument(help="A TOML file of settings.", show_default=False)]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set any setting by name.", autocompletion=complete_assignment),
]
DataDir = Annotated[
    str | None,
    typer.Option(help="Folder of the data files (default: NORMEC_DATA, then the cache).", show_default=False),
]
Out = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def command(
    app: typer.Typer,
    name: str,
    only: Collection[str] | None = None,
    without: Collection[str] = (),
    defaults: Mapping[str, str] | str | None = None,
    federated: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command whose last parameter, ``**flags``, receives the settings that have flags.

    The flags are created when the command is used, so that `normec --help` need not import the settings.

    Args:
        app: The group of commands.
        name: The command's name.
        only: The settings that get flags (default: all that have one).
        without: Settings to leave out.
        defaults: The default that the help states, where it differs from that of a run: one text for all settings, or
            one for each.
        federated: Leave out the settings that a federation does not have.
    """

    class WithSettings(_WithSettings):
        @staticmethod
        def takes(setting: Setting) -> bool:
            wanted = (only is None or setting.name in only) and (setting.federated or not federated)
            return bool(setting.flag) and wanted and setting.name not in without

        @staticmethod
        def help_of(setting: Setting) -> str:
            known = defaults if isinstance(defaults, str) else (defaults or {}).get(setting.name)
            return setting.help if known is None else f"{setting.description} (default: {known})."

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        whole = inspect.signature(function, eval_str=True)
        own = [one for one in whole.parameters.values() if one.kind is not one.VAR_KEYWORD]
        function.__signature__ = whole.replace(parameters=own)  # type: ignore[attr-defined]  # typer reads this attribute
        app.command(name, cls=WithSettings)(function)
        return function

    return register


class _WithSettings(TyperCommand):
    """A command with a flag for every setting that it `takes`; its help shows them in groups."""

    _flags: list[TyperOption] | None = None

    @staticmethod
    def takes(setting: Setting) -> bool:
        raise NotImplementedError

    @staticmethod
    def help_of(setting: Setting) -> str:
        raise NotImplementedError

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        if self._flags is None:
            from ..settings.config import SETTINGS

            self._flags = [_flag(one, self.help_of(one)) for one in SETTINGS.values() if self.takes(one)]
        return [*super().get_params(ctx), *self._flags]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], **{title: [] for title in SECTIONS.values()}}
        for one in self.get_params(ctx):
            record = one.get_help_record(ctx)
            title = "Arguments" if isinstance(one, click.Argument) else getattr(one, "rich_help_panel", None) or "Other"
            if record is not None:
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _flag(setting: Setting, description: str) -> TyperOption:
    name = setting.flag_name
    shared: dict[str, Any] = {
        "param_decls": [setting.name, name],
        "default": None,
        "help": description,
        "rich_help_panel": SECTIONS[setting.group],
    }
    if "/" in name:
        return TyperOption(is_flag=True, type=click.BOOL, **shared)
    number = click.INT if setting.types == (int,) else click.FLOAT if setting.types == (float,) else click.STRING
    words = bool(setting.choices)
    kind = click.STRING if words else number
    metavar = "NUMBER" if words and float in setting.types else None if number is not click.STRING else "NAME"
    return TyperOption(type=kind, metavar=metavar, autocompletion=_values(setting), **shared)


def _values(setting: Setting) -> Callable[[click.Context, list[str], str], list[str]]:
    def complete(ctx: click.Context, args: list[str], incomplete: str) -> list[str]:  # noqa: ARG001
        return list(_offered(setting))

    return complete


def _offered(setting: Setting) -> Iterator[str]:
    yield from setting.all_values()
    if setting.name == "method":
        from ..algorithms.catalogue import installed

        yield from installed()


def overrides(assignments: list[str] | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Return the given settings, those of `--set` first and then those of flags."""
    from ..settings.assignments import parse_assignment

    given = {name: value for name, value in flags.items() if value is not None}
    if "lr" in given:
        given["lr"] = parse_assignment(f"lr={given['lr']}")[1]
    return {**dict(map(parse_assignment, assignments or [])), **given}
