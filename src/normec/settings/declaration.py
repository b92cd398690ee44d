"""How a setting is declared, and what its declaration says to help texts, tables, records and completion.

`setting` declares one; `declared` reads the declarations of a class as a table of `Setting`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field

Group = Literal["data", "model", "method", "local", "privacy", "training", "logging", "compute", "storage"]
GROUPS: tuple[Group, ...] = get_args(Group)


def setting(
    default: Any,
    description: str,
    group: Group,
    *,
    unset: str = "",
    flag: bool | str = False,
    identity: bool = True,
    federated: bool = False,
    follows: tuple[str, ...] = (),
    values: tuple[str, ...] | str = (),
) -> Any:
    """Declare one setting of a configuration.

    Args:
        default: The value of a setting that is not given; None if there is none, or if it depends on others.
        description: One line of plain English without a full stop; "{values}" stands for the values that it takes.
        group: The group that help texts and tables show the setting in.
        unset: What None means, for help texts and tables.
        flag: Whether the command line has a flag for it; a text names the flag, as in "--private/--no-privacy".
        identity: Whether the run's numbers depend on it; then it is part of the run's name and fixed for a folder.
        federated: Whether a federated run takes it.
        follows: The settings that decide its value if none is given.
        values: The values that it usually takes, for help and completion, or the module:name of a table of them. The
            values of a Literal need not be listed.
    """
    facts: dict[str, Any] = {
        "group": group,
        "unset": unset,
        "flag": flag,
        "identity": identity,
        "federated": federated,
        "follows": list(follows),
        "values": values if isinstance(values, str) else list(values),
    }
    return Field(default=default, description=description, json_schema_extra=facts)


@dataclass(frozen=True)
class Setting:
    """The declaration of one setting, as the command line, the records and the documentation read it."""

    name: str
    kind: Any  # its annotation
    default: Any
    text: str
    group: Group
    unset: str
    flag: bool | str
    identity: bool
    federated: bool
    follows: tuple[str, ...]
    usual: tuple[str, ...] | str

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that the setting accepts; other values, if any, are not words."""
        return tuple(choice for part in _parts(self.kind) if get_origin(part) is Literal for choice in get_args(part))

    @property
    def values(self) -> tuple[str, ...]:
        """The values to show in help texts; empty if there are none, or too many."""
        return self.usual if isinstance(self.usual, tuple) and self.usual else self.choices

    def all_values(self) -> tuple[str, ...]:
        """Return the values for shell completion; may import the module that defines them."""
        if isinstance(self.usual, str):
            module, _, name = self.usual.partition(":")
            return tuple(getattr(import_module(module), name))
        return (*self.values, *(("true", "false") if bool in _parts(self.kind) else ()))

    @property
    def flag_name(self) -> str:
        """Its flag, such as "--lr" or "--private/--no-privacy"; empty if it has none."""
        usual = f"--{self.name.replace('_', '-')}" if self.flag else ""
        return self.flag if isinstance(self.flag, str) else usual

    @property
    def types(self) -> tuple[Any, ...]:
        """The types of its values, out of str, int, float and bool."""
        return tuple(part for part in _parts(self.kind) if get_origin(part) is not Literal)

    @property
    def description(self) -> str:
        """One sentence, without its full stop."""
        *most, last = self.values or ("",)
        return self.text.replace("{values}", f"{', '.join(most)} or {last}" if most else last)

    @property
    def default_text(self) -> str:
        """The default as text; a description if it depends on other settings."""
        return self.unset or "none" if self.default is None else text_of(self.default)

    @property
    def help(self) -> str:
        """The description with its default, as a sentence."""
        return f"{self.description} (default: {self.default_text})."


def _parts(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union except None."""
    whole = kind if get_origin(kind) is Literal or not get_args(kind) else None
    members = (whole,) if whole is not None else get_args(kind)
    return tuple(part for part in members if part is not NoneType)


def declared(config: type[BaseModel]) -> dict[str, Setting]:
    """Return the settings that a class declares, by name."""
    found = {}
    for name, field in config.model_fields.items():
        facts: dict[str, Any] = dict(field.json_schema_extra)  # type: ignore[arg-type]  # a mapping, by `setting`
        usual = facts.pop("values")
        facts |= {"follows": tuple(facts["follows"]), "usual": usual if isinstance(usual, str) else tuple(usual)}
        found[name] = Setting(name, field.annotation, field.default, field.description or "", **facts)
    return found


def text_of(value: Any) -> str:
    """Return a value as people write it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
