"""The folder of a Flower app: `normec federation init` writes one that runs as it is; other commands read it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...storage import run_folder
from ...system.files import write_atomic

if TYPE_CHECKING:
    from ...data.table import TableSchema

TEMPLATE = Path(__file__).with_name("template")
SCHEMA = "table.toml"  # in the folder of an app: the description of the parties' tables
_TASK, _TABLE_TASK = "task.py", "table_task.py"
_LONGEST = 32  # Flower's limit for the name of an app


def write_app(folder: Path, *, schema: Path | None = None, task: str | None = None) -> list[Path]:
    """Write the app into a new or empty folder, which gives it its name.

    Args:
        folder: The folder.
        schema: A schema (`normec.data.load_schema`): the app is for tables. The schema is copied into it, and its model
            has the inputs and classes that the schema describes.
        task: Code that takes the place of the app's task.

    Returns:
        The files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; choose a new folder")
    if schema is not None:
        from ...data.table import load_schema  # which needs torch

        load_schema(schema)  # report a mistake before anything is written
    name = app_name(folder)
    written = []
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts or source.name == (_TASK if schema else _TABLE_TASK):
            continue
        target = folder / source.relative_to(TEMPLATE)
        target = target.with_name(_TASK) if source.name == _TABLE_TASK else target
        target.parent.mkdir(parents=True, exist_ok=True)
        text = task if task is not None and source.name == _TASK else source.read_text(encoding="utf-8")
        target.write_text(text.replace("@NAME@", name), encoding="utf-8")
        written.append(target)
    if schema is not None:
        (folder / SCHEMA).write_bytes(schema.read_bytes())
        written.append(folder / SCHEMA)
    return written


def app_table(app: Path) -> dict[str, Any]:
    """The table [tool.flwr.app] of an app's pyproject.toml. Raises `UsageError` if there is none."""
    try:
        table = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
        return dict(table)
    except (OSError, KeyError, TypeError, ValueError):
        raise UsageError(f"{app} contains no Flower app; create one with: normec federation init {app}") from None


def schema_of(app: Path) -> TableSchema:
    """The description of the parties' tables in an app's folder. Raises `UsageError` if there is none."""
    if not (app / SCHEMA).exists():
        raise UsageError(f"{app} has no {SCHEMA}, which describes the columns of a table; leave out the party's data")
    from ...data.table import load_schema

    return load_schema(app / SCHEMA)


def keep_schema(app: Path, out: Path) -> None:
    """Copy the description of the parties' tables, if an app has one, to the folder of a run, for `normec predict`."""
    if (app / SCHEMA).exists():
        write_atomic(out / run_folder.SCHEMA, (app / SCHEMA).read_bytes())


def needs_tables(app: Path) -> bool:
    """Whether the parties of an app have no data but their tables, because its task is still that of the template."""
    task = app / "learning" / _TASK
    return task.is_file() and task.read_bytes() == (TEMPLATE / "learning" / _TABLE_TASK).read_bytes()


def app_name(folder: Path) -> str:
    """The folder's name as Flower allows it: letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:_LONGEST].strip("-")
    return name if name and name[0].isalpha() else f"app-{name}".strip("-")[:_LONGEST]
