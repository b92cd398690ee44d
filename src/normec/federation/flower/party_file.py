"""The file of a party: where it finds the server, its key, its app, its folder, its policy and its table.

    superlink = "fed.example.org:9092"
    root_certificates = "ca.crt"
    key = "party"
    app = "app"
    folder = "state"
    policy = "policy.toml"
    data = "patients.csv"        # the party's table; default: the app's data()
    terms = "terms.json"         # the terms that all parties signed, or a folder of such files; default: none
    log_format = "text"          # or "json"
    partition = 0                # passed to the app's data(), like partitions = 1
    patience = 150.0             # seconds to keep trying if the server does not admit the party

Paths are relative to the folder of the file. The commands of a party take this file: `party`, `doctor`, `status`,
`backup`, `restore` and `leave`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import UsageError, first_mistake, nearest
from ...system.files import read_toml

LogFormat = Literal["text", "json"]
_PATHS = ("root_certificates", "key", "app", "folder", "policy", "data", "terms")
_LARGEST = 2**16  # bytes


class PartyFile(BaseModel):
    """The settings of one party's process."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    superlink: str = Field(pattern=r"^.+:\d{1,5}$")
    root_certificates: Path
    key: Path
    app: Path
    folder: Path
    policy: Path
    data: Path | None = None
    terms: Path | None = None
    log_format: LogFormat = "text"
    partition: int = Field(default=0, ge=0)
    partitions: int = Field(default=1, ge=1)
    patience: float = Field(default=150.0, ge=0)

    @property
    def node_config(self) -> dict[str, Any]:
        """The settings that the party's app receives from Flower."""
        named = {"folder": str(self.folder), "policy": str(self.policy)}
        for name in ("data", "terms"):
            if getattr(self, name) is not None:
                named[name] = str(getattr(self, name))
        if self.terms is not None:
            named |= {"key": str(self.key), "app": str(self.app)}
        return {"partition-id": self.partition, "num-partitions": self.partitions, **named}


def load_party_file(path: Path | None, given: Mapping[str, Any] | None = None) -> PartyFile:
    """Read a party's file; what is `given` on the command line takes precedence.

    Raises:
        UsageError: The file is missing or has a mistake, or something is neither in it nor given.
    """
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = read_toml(path, _LARGEST)
        except FileNotFoundError:
            raise UsageError(
                f"there is no party file {path}; `normec federation init FOLDER` writes one as a template"
            ) from None
        for name, value in table.items():
            if name not in PartyFile.model_fields:
                known = ", ".join(PartyFile.model_fields)
                raise UsageError(
                    f"{path}: there is no entry {name!r}{nearest(name, PartyFile.model_fields)}; use {known}"
                )
            if name in _PATHS and isinstance(value, str):
                table[name] = str(path.resolve().parent / Path(value).expanduser())
    table |= {name: value for name, value in (given or {}).items() if value is not None}
    where = str(path) if path is not None else "the command line"
    try:
        return PartyFile.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "missing":
            raise UsageError(f"{where}: {name} is missing; give it there, or as --{name.replace('_', '-')}") from None
        raise UsageError(f"{where}: {first_mistake(error)}") from None
