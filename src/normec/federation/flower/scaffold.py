"""`normec federation init`: write a Flower app that runs as it is, for the user's own model and data."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import UsageError

TEMPLATE = Path(__file__).with_name("template")
_LONGEST = 32  # Flower's limit for the name of an app


def write_app(folder: Path, task: str | None = None) -> list[Path]:
    """Write the app into a new or empty folder, which gives it its name; `task` replaces the code of its task.

    Returns:
        The files.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not empty; choose a new folder")
    name = app_name(folder)
    written = []
    for source in sorted(TEMPLATE.rglob("*")):
        if source.is_dir() or "__pycache__" in source.parts:
            continue
        target = folder / source.relative_to(TEMPLATE)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = task if task is not None and source.name == "task.py" else source.read_text(encoding="utf-8")
        target.write_text(text.replace("@NAME@", name), encoding="utf-8")
        written.append(target)
    return written


def app_name(folder: Path) -> str:
    """The folder's name as Flower allows it: letters, digits and dashes."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:_LONGEST].strip("-")
    return name if name and name[0].isalpha() else f"app-{name}".strip("-")[:_LONGEST]
