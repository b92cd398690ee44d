"""Rows of results as CSV, JSON, Parquet or Markdown."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..system.files import write_atomic

Row = dict[str, Any]
FORMATS = ("table", "markdown", "csv", "json", "parquet")


def to_csv(rows: Sequence[Row]) -> str:
    """Return a header and one line per row; missing values are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(rows: Sequence[Row]) -> str:
    """Return the rows as a list of JSON objects."""
    return json.dumps(rows, indent=1) + "\n"


def to_markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in rows)]


def write_parquet(rows: Sequence[Row], path: Path) -> None:
    """Write a Parquet file; a column of mixed types, such as a step size that may be "theory", becomes text."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise UsageError("parquet needs the package pyarrow: pip install 'normec[tables]'") from None
    columns = {name: pa.array(_alike([row[name] for row in rows])) for name in (rows[0] if rows else {})}
    write_atomic(path, lambda aside: parquet.write_table(pa.table(columns), str(aside)))


def _alike(values: list[Any]) -> list[Any]:
    """Return values of one type, or None."""
    types = {type(value) for value in values if value is not None}
    if types == {int, float}:
        return [None if value is None else float(value) for value in values]
    return values if len(types) < 2 else [None if value is None else str(value) for value in values]
