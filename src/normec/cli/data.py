"""normec data: list, download and check data sets."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from . import options as o

app = typer.Typer(help="List, download and check data sets.", no_args_is_help=True)


@app.command("list")
def list_(data_dir: o.DataDir = None, as_json: o.Json = False) -> None:
    """List every known data set, and whether it is available."""
    from .. import data

    found = data.listing(data_dir)
    if as_json:
        print(json.dumps([asdict(row) for row in found], default=str))
        return
    from .output import show

    rows = [(row.name, row.size, str(row.classes), row.origin, "yes" if row.present else "no") for row in found]
    show(rows, ("name", "records × features", ">classes", "origin", "here"))


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A CSV or Parquet file.", show_default=False)],
    schema: Annotated[Path, typer.Option(help="The TOML file that describes its columns.")],
    as_json: o.Json = False,
) -> int:
    """Check that a table fits its schema.

    The table is read as a run would read it; what is used, left out and clipped is shown. Nothing leaves this machine.
    """
    from ..data.table import load_schema, read_table

    known = load_schema(schema)
    table = read_table(file, known)
    counts = table.counts
    if as_json:
        print(json.dumps({"file": str(file), "inputs": known.width, "classes": len(known.classes), **asdict(counts)}))
        return 0
    print(
        f"{file} fits {schema}: {len(known.inputs)} columns become {known.width} inputs, {len(known.classes)} classes"
    )
    for line in counts.lines():
        print(f"  {line}")
    print("  These counts depend on the records without noise. Keep them to yourself.")
    return 0


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A name from `normec data list`.")],
    data_dir: o.DataDir = None,
    as_json: o.Json = False,
) -> None:
    """Download a data set, check it, and store it in the cache."""
    from .. import data

    folder = data.get(name, data_dir, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps({"name": name, "folder": str(folder) if folder else None}))
    else:
        print(f"{name} is in {folder}" if folder else f"{name}: there is nothing to download")
