"""normec tag: words by which runs are found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from . import options as o
from .output import printable


def tag(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folders of runs.")],
    add: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Tag to add; may be repeated.", show_default=False)
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option(metavar="TAG", help="Tag to remove; may be repeated.", show_default=False)
    ] = None,
    as_json: o.Json = False,
) -> int:
    """Tag runs, for `normec ui` and their pages. Without --add and --remove, print their tags."""
    from ..errors import UsageError
    from ..report.run_view import is_run
    from ..storage.tags import change_tags, read_tags

    for folder in folders:
        if not is_run(folder):
            raise UsageError(f"{folder} holds no run; give the folder of a run")
    changes = bool(add or remove)
    found = {
        str(folder): change_tags(folder, add or (), remove or ()) if changes else read_tags(folder)
        for folder in folders
    }
    if as_json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        for name, tags in found.items():
            print(printable(f"{name}: {', '.join(tags) or 'no tags'}"))
    return 0
