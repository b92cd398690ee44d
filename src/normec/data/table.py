"""Tables of records in CSV and Parquet files, and the public description of their columns.

A `TableSchema` names the target, the input columns, and for each of them a public range or a list of categories. It is
the same for all parties of a federation:

    target = "disease"
    classes = ["no", "yes"]                          # or groups of values: [["0"], ["1", "2", "3", "4"]]
    missing = "refuse"                               # or "drop", or "middle"
    centre = "hospital"                              # the column that names the owner of a record; optional

    [inputs]
    age = {low = 20, high = 90}
    sex = {categories = ["female", "male"]}

Privacy. A number becomes (value − middle) / (half of the range), after it is clipped to its range, so that it lies in
[−1, 1]. A category becomes one number for each of its values except the first: 1 if the record has this value, and −1
otherwise. So an input is a function of its own record and of public constants. No statistic of the records is used, and
a guarantee for single records or for clients covers the result. The same holds for records with missing values: a
record is left out ("drop"), or the value becomes 0, the middle of the range ("middle"), whatever the other records are.
What is counted on the way (`TableCounts`) depends on the records without noise and is for their owner alone.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..errors import UsageError, finite, nearest, one_of
from ..system.files import open_file, read_toml

CSV, PARQUET = (".csv", ".csv.gz"), (".parquet",)
Missing = Literal["refuse", "drop", "middle"]
_ABSENT = frozenset({"", "?", "na", "n/a", "nan", "null", "none"})  # how a missing value is written, in small letters
_DELIMITERS = ",;\t"
_LARGEST_SCHEMA = 2**20  # bytes
_SHOWN = 40  # characters of a value in an error message


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers with its public range; without one, the numbers are used as they are.

    Args:
        low: The smallest value; smaller ones are clipped to it.
        high: The largest value.

    Raises:
        UsageError: The range is empty or not finite.

    Example:
        >>> NumberColumn(20, 90).width
        1
    """

    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise UsageError("a range needs both low and high")
        if self.low is None or self.high is None:
            return
        finite(low=self.low, high=self.high)
        if not self.low < self.high:
            raise UsageError(f"a range needs low < high, got low = {self.low}, high = {self.high}")

    @property
    def width(self) -> int:
        """The number of inputs that the column becomes."""
        return 1


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories, all of which are listed in advance.

    Args:
        categories: The values, at least two, each once.

    Raises:
        UsageError: There are fewer than two categories, or one is listed twice.

    Example:
        >>> CategoryColumn(("never", "former", "current")).width
        2
    """

    categories: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.categories) < 2 or len(set(self.categories)) < len(self.categories):
            raise UsageError(f"categories must be at least two different values, got {list(self.categories)}")

    @property
    def width(self) -> int:
        """The number of inputs that the column becomes: one for each category except the first."""
        return len(self.categories) - 1


InputColumn = NumberColumn | CategoryColumn


@dataclass(frozen=True)
class TableSchema:
    """The public description of a table.

    Args:
        target: The column of the target.
        classes: The values of each class, in the order of the class indices; a class may have several values.
        inputs: The input columns by name, in the order of the model's inputs.
        missing: What happens to a record with a missing value: "refuse" the file, "drop" the record, or use the
            "middle" of the range. A record without a target is never used with "middle"; it is dropped.
        centre: The column with the owner of each record, such as a hospital.

    Raises:
        UsageError: There are fewer than two classes, no inputs, or a column or a value is named twice.

    Example:
        >>> schema = TableSchema("disease", (("no",), ("yes",)), {"age": NumberColumn(20, 90)})
        >>> schema.width, len(schema.classes)
        (1, 2)
    """

    target: str
    classes: tuple[tuple[str, ...], ...]
    inputs: Mapping[str, InputColumn]
    missing: Missing = "refuse"
    centre: str | None = None

    def __post_init__(self) -> None:
        one_of(get_args(Missing), missing=self.missing)
        values = [value for group in self.classes for value in group]
        if len(self.classes) < 2 or not all(self.classes) or len(set(values)) < len(values):
            raise UsageError(f"classes must be at least two different values of {self.target!r}, got {values}")
        if not self.inputs:
            raise UsageError("a table needs at least one input column; list them under [inputs]")
        for name in (self.target, self.centre):
            if name in self.inputs:
                raise UsageError(f"column {name!r} cannot be an input as well as the target or the centre")
        if self.centre == self.target:
            raise UsageError(f"column {self.target!r} cannot be the target and the centre")

    @property
    def width(self) -> int:
        """The number of the model's inputs."""
        return sum(column.width for column in self.inputs.values())

    @property
    def columns(self) -> list[str]:
        """All columns that are read."""
        return [self.target, *([self.centre] if self.centre is not None else []), *self.inputs]


def load_schema(path: str | Path) -> TableSchema:
    """Read the description of a table from a TOML file.

    Args:
        path: The file.

    Returns:
        The description.

    Raises:
        UsageError: The file is missing or says something else; the message names the entry.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "table.toml")
        ...     _ = file.write_text('target = "ill"\\nclasses = [0, 1]\\n[inputs]\\nage = {low = 20, high = 90}\\n')
        ...     load_schema(file).inputs
        {'age': NumberColumn(low=20.0, high=90.0)}
    """
    path = Path(path).expanduser()
    try:
        given = read_toml(path, _LARGEST_SCHEMA)
    except FileNotFoundError:
        raise UsageError(f"there is no table schema {path}; write one with target, classes and [inputs]") from None
    known = ("target", "classes", "missing", "centre", "inputs")
    for name in given:
        if name not in known:
            raise UsageError(f"{path}: there is no entry {name!r}{nearest(name, known)}; use {', '.join(known)}")
    for name, kind, what in (("target", str, "a name"), ("classes", list, "a list"), ("inputs", dict, "a table")):
        if not isinstance(given.get(name), kind):
            raise UsageError(f"{path}: {name} must be {what}, got {given.get(name)!r}")
    for name in ("missing", "centre"):
        if not isinstance(given.get(name, ""), str):
            raise UsageError(f"{path}: {name} must be a word, got {given[name]!r}")
    try:
        return TableSchema(
            target=given["target"],
            classes=tuple(tuple(map(_word, one if isinstance(one, list) else [one])) for one in given["classes"]),
            inputs={name: _column(name, facts) for name, facts in given["inputs"].items()},
            missing=given.get("missing", "refuse"),
            centre=given.get("centre"),
        )
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def _column(name: str, facts: Any) -> InputColumn:
    entries = set(facts) if isinstance(facts, dict) else set()
    try:
        if entries == {"low", "high"} and all(type(facts[end]) in (int, float) for end in entries):
            return NumberColumn(float(facts["low"]), float(facts["high"]))
        if entries == {"categories"} and isinstance(facts["categories"], list):
            return CategoryColumn(tuple(map(_word, facts["categories"])))
    except UsageError as error:
        raise UsageError(f"input {name!r}: {error}") from None
    raise UsageError(
        f"input {name!r} needs {{low = …, high = …}}, a public range, or {{categories = […]}}, got {facts!r}"
    )


def _word(value: Any) -> str:
    """A value of a category as text, as it is written in a CSV file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).strip()


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _were(number: int) -> str:
    return "was" if number == 1 else "were"


@dataclass(frozen=True)
class TableCounts:
    """What happened while a table was read. It depends on the records without noise, and is for their owner alone.

    Args:
        records: The records that are used.
        dropped: The records that were left out because of a missing value.
        filled: By column, the missing values that became the middle of the range.
        clipped: By column, the numbers outside the public range, which were clipped to it.

    Example:
        >>> TableCounts(10, clipped={"age": 2}).lines()
        ['10 records are used', 'age: 2 values outside the public range were clipped to it']
    """

    records: int
    dropped: int = 0
    filled: Mapping[str, int] = field(default_factory=dict)
    clipped: Mapping[str, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the counts as sentences."""
        found = [f"{_counted(self.records, 'record')} {'is' if self.records == 1 else 'are'} used"]
        if self.dropped:
            found.append(f"{_counted(self.dropped, 'record')} with a missing value {_were(self.dropped)} left out")
        for name, n in self.filled.items():
            found.append(f"{name}: {_counted(n, 'missing value')} became the middle of the range")
        for name, n in self.clipped.items():
            found.append(f"{name}: {_counted(n, 'value')} outside the public range {_were(n)} clipped to it")
        return found


@dataclass(frozen=True)
class TableRecords:
    """The records of a table, ready for a model.

    Args:
        inputs: The inputs ``[records, width]``, float32.
        targets: The class indices ``[records]``, int64.
        centres: The owner of each record as a word, if the schema names a column for it.
        counts: What was dropped, filled and clipped.

    Example:
        >>> table = TableRecords(torch.zeros(2, 1), torch.tensor([0, 1]), None, TableCounts(2))
        >>> len(table.dataset)
        2
    """

    inputs: Tensor
    targets: Tensor
    centres: npt.NDArray[np.str_] | None
    counts: TableCounts

    @property
    def dataset(self) -> TensorDataset:
        """Pairs of inputs and target."""
        return TensorDataset(self.inputs, self.targets)


def is_table(name: str) -> bool:
    """Whether a name is that of a file with a table."""
    return name.lower().endswith((*CSV, *PARQUET))


def read_table(path: str | Path, schema: TableSchema | str | Path) -> TableRecords:
    """Read the records of a CSV or Parquet file as its public description says.

    Args:
        path: The file. CSV is UTF-8 with a header, divided by commas, semicolons or tabs, and may be compressed
            (.csv.gz). Parquet needs pyarrow. Columns that the schema does not name are ignored.
        schema: The description of the columns, or the TOML file with it.

    Returns:
        The records and the counts of what was dropped, filled and clipped.

    Raises:
        UsageError: The file cannot be read, lacks a column, or holds a value that the schema does not allow. The
            message names the file, the line, the column and the value; it is for the owner of the records.

    Example:
        >>> import tempfile
        >>> schema = TableSchema("disease", (("no",), ("yes",)), {"age": NumberColumn(20, 80)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "patients.csv")
        ...     _ = file.write_text("age,disease\\n50,no\\n80,yes\\n")
        ...     table = read_table(file, schema)
        >>> table.inputs.tolist(), table.targets.tolist()
        ([[0.0], [1.0]], [0, 1])
    """
    known = _known(schema)
    return _records(_cells(Path(path).expanduser(), known.columns), known)


def read_inputs(path: str | Path, schema: TableSchema | str | Path) -> Tensor:
    """Read the inputs of records whose target is not known yet, as a model takes them to predict it.

    The columns of the target and of the centre may be missing and are ignored.

    Args:
        path: The file, as in `read_table`.
        schema: The description of the columns with which the model was trained, or the TOML file with it.

    Returns:
        The inputs ``[records, width]``, float32: one row for each record, in the order of the file.

    Raises:
        UsageError: As in `read_table`; also if a value is missing, unless the schema has ``missing = "middle"``.

    Example:
        >>> import tempfile
        >>> schema = TableSchema("disease", (("no",), ("yes",)), {"age": NumberColumn(20, 80)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "new.csv")
        ...     _ = file.write_text("age\\n50\\n80\\n")
        ...     read_inputs(file, schema).tolist()
        [[0.0], [1.0]]
    """
    known = _known(schema)
    cells = _cells(Path(path).expanduser(), [*known.inputs])
    absent = _gaps(cells, known, known.inputs)
    if known.missing != "middle":
        for name, gaps in absent.items():
            if gaps.any():
                raise cells.refuse(int(gaps.argmax()), name, "is a missing value; fill it in or remove the record")
    return _inputs(cells, known, np.arange(len(cells.numbers)), absent)[0]


def _known(schema: TableSchema | str | Path) -> TableSchema:
    return schema if isinstance(schema, TableSchema) else load_schema(schema)


def read_numbers(path: str | Path, target: str) -> tuple[TableRecords, TableSchema]:
    """Read a file without a schema: all columns but the target are numbers, which are used as they are.

    The values of the target, in sorted order, are the classes. Nothing is scaled, because a range that is measured on
    the records would be a statistic that no noise covers.

    Args:
        path: The file, as in `read_table`.
        target: The column of the target.

    Returns:
        The records, and the schema that describes them.

    Raises:
        UsageError: As in `read_table`.
    """
    cells = _cells(Path(path).expanduser(), None)
    cells.require([target])
    words = [cell for cell in cells.columns[target] if not _absent(cell)]
    found = sorted({_word(cell) for cell in words}, key=_sorting)
    if len(found) < 2:
        raise UsageError(f"{cells.path}: the target {target!r} must have at least two classes, it has {found}")
    inputs: dict[str, InputColumn] = {name: NumberColumn() for name in cells.columns if name != target}
    schema = TableSchema(target, tuple((value,) for value in found), inputs)
    return _records(cells, schema), schema


def _sorting(value: str) -> tuple[bool, float, str]:
    """Numbers in their order, then words."""
    try:
        return False, float(value), value
    except ValueError:
        return True, 0.0, value


@dataclass(frozen=True)
class _Cells:
    """The columns of a file as they are written; a row is found at its number, as in "line 7" or "row 7"."""

    path: Path
    columns: Mapping[str, Sequence[Any]]
    place: str
    numbers: Sequence[int]

    def require(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.columns:
                held = ", ".join(map(repr, self.columns))
                raise UsageError(
                    f"{self.path} has no column {name!r}{nearest(name, self.columns)}; its columns are {held}"
                )

    def refuse(self, row: int, name: str, why: str) -> UsageError:
        value = _shown(self.columns[name][row])
        return UsageError(f"{self.path}, {self.place} {self.numbers[row]}, column {name!r}: {value} {why}")


def _cells(path: Path, wanted: list[str] | None) -> _Cells:
    if not is_table(path.name):
        raise UsageError(f"{path} is not a table: its name must end in {', '.join((*CSV, *PARQUET))}")
    try:
        found = _parquet(path, wanted) if path.name.lower().endswith(PARQUET) else _csv(path)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}; give the path of a CSV or Parquet file") from None
    found.require(wanted or ())
    if not found.numbers:
        raise UsageError(f"{path} has no records; a table has a header and one record in each line")
    return found


def _csv(path: Path) -> _Cells:
    with open_file(path) as file:
        raw: Any = gzip.GzipFile(fileobj=file) if path.name.lower().endswith(".gz") else file
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
        lines = 0
        try:
            first = text.readline()
            if not first.strip():
                raise UsageError(f"{path} is empty; a table has a header and one record in each line")
            delimiter = max(_DELIMITERS, key=first.count)
            header = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
            for name in header:
                if header.count(name) > 1:
                    raise UsageError(f"{path}, line 1: column {name!r} occurs {header.count(name)} times; rename one")
            rows, numbers = list[list[str]](), list[int]()
            for lines, row in _rows(text, delimiter):
                if len(row) != len(header):
                    raise UsageError(
                        f"{path}, line {lines}: {len(row)} fields, the header has {len(header)}; a field that contains "
                        f"{delimiter!r} must be quoted"
                    )
                rows.append(row)
                numbers.append(lines)
        except UnicodeDecodeError as error:
            raise UsageError(
                f"{path} is not UTF-8 (byte 0x{error.object[error.start]:02x} after line {lines + 1 if lines else 1}); "
                "save it with the encoding UTF-8"
            ) from None
        except csv.Error as error:
            raise UsageError(f"{path}, after line {lines or 1}: {error}; save it as plain CSV") from None
        except (EOFError, OSError, zlib.error) as error:
            raise UsageError(f"{path} cannot be unpacked: {error}; get it again") from None
    columns = dict(zip(header, zip(*rows, strict=True), strict=True)) if rows else dict.fromkeys(header, ())
    return _Cells(path, columns, "line", numbers)


def _rows(text: io.TextIOWrapper, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the line in which each record ends, and its fields; empty lines are left out."""
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    for row in reader:
        if row:
            yield reader.line_num + 1, row


def _parquet(path: Path, wanted: list[str] | None) -> _Cells:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(f"reading {path} needs pyarrow: pip install pyarrow, or save the table as CSV") from None
    with open_file(path) as file:
        try:
            held = pyarrow.parquet.ParquetFile(file)
            names = held.schema_arrow.names
            table = held.read(columns=names if wanted is None else [name for name in names if name in wanted])
            columns = {name: table.column(name).to_pylist() for name in table.column_names}
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())}") from None
    if wanted is not None and len(columns) < len(wanted):
        columns = {name: [] for name in names}  # for the message about the missing column
    return _Cells(path, columns, "row", range(1, table.num_rows + 1))


def _gaps(cells: _Cells, schema: TableSchema, names: Iterable[str]) -> dict[str, npt.NDArray[np.bool_]]:
    """By column, whether each value is missing. A value that the schema lists, such as "none", is not."""
    found = {}
    for name in names:
        listed = _listed(schema, name)
        found[name] = np.array([_absent(cell, listed) for cell in cells.columns[name]])
    return found


def _listed(schema: TableSchema, name: str) -> frozenset[str]:
    """The values that the schema lists for a column."""
    if name == schema.target:
        return frozenset(value for group in schema.classes for value in group)
    column = schema.inputs.get(name)
    return frozenset(column.categories) if isinstance(column, CategoryColumn) else frozenset()


def _records(cells: _Cells, schema: TableSchema) -> TableRecords:
    absent = _gaps(cells, schema, schema.columns)
    dropped = absent[schema.target].copy() if schema.missing == "middle" else np.zeros(len(cells.numbers), bool)
    for name, gaps in absent.items():
        if schema.missing == "refuse" and gaps.any():
            cure = "fill it in, remove the record, or agree on missing = 'drop' or 'middle' in the schema"
            raise cells.refuse(int(gaps.argmax()), name, f"is a missing value; {cure}")
        if schema.missing == "drop":
            dropped |= gaps
        elif name == schema.centre and gaps.any():
            raise cells.refuse(int(gaps.argmax()), name, "does not say whose record it is; fill it in")
    used = np.flatnonzero(~dropped)
    if not len(used):
        raise UsageError(f"{cells.path}: all {len(dropped)} records have a missing value, so that none is left")
    inputs, filled, clipped = _inputs(cells, schema, used, absent)
    nowhere = np.zeros(len(used), bool)
    targets = _indices(cells, schema.target, used, nowhere, schema.classes)
    owners = None
    if schema.centre is not None:
        owners = np.array([_word(cells.columns[schema.centre][row]) for row in used.tolist()])
    counts = TableCounts(len(used), int(dropped.sum()), filled, clipped)
    return TableRecords(inputs, torch.from_numpy(targets), owners, counts)


def _inputs(
    cells: _Cells,
    schema: TableSchema,
    used: npt.NDArray[np.int64],
    absent: Mapping[str, npt.NDArray[np.bool_]],
) -> tuple[Tensor, dict[str, int], dict[str, int]]:
    """The inputs of the records in `used`, and by column how many values were filled in and clipped."""
    clipped, filled, parts = dict[str, int](), dict[str, int](), list[npt.NDArray[np.float32]]()
    for name, column in schema.inputs.items():
        gaps = absent[name][used]
        if gaps.any():
            filled[name] = int(gaps.sum())
        if isinstance(column, NumberColumn):
            values, outside = _scaled(_numbers(cells, name, used, gaps), column, gaps)
            if outside:
                clipped[name] = outside
            parts.append(np.where(gaps, 0, values)[:, None].astype(np.float32))
        else:
            groups = [(value,) for value in column.categories]
            held = _indices(cells, name, used, gaps, groups)
            shown = np.where(held[:, None] == np.arange(1, len(groups)), 1, -1)
            parts.append(np.where(gaps[:, None], 0, shown).astype(np.float32))
    return torch.from_numpy(np.concatenate(parts, axis=1)), filled, clipped


def _numbers(
    cells: _Cells, name: str, used: npt.NDArray[np.int64], gaps: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    column = cells.columns[name]
    texts = ["0" if gap else column[row] for row, gap in zip(used, gaps, strict=True)]
    try:
        values = np.array(texts, dtype=np.float64)
    except (ValueError, TypeError):
        row = next(row for row, text in zip(used, texts, strict=True) if not _is_number(text))
        comma = " (write it with a decimal point)" if _is_number(str(column[row]).replace(",", ".")) else ""
        raise cells.refuse(
            int(row), name, f"is not a number{comma}; correct it, or list the column's categories in the schema"
        ) from None
    bad = ~np.isfinite(values)
    if bad.any():
        raise cells.refuse(int(used[bad.argmax()]), name, "is not finite; correct it or leave the value empty")
    return values


def _scaled(
    values: npt.NDArray[np.float64], column: NumberColumn, gaps: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.float64], int]:
    """The scaled values, and how many were clipped; those in `gaps` are missing, and are not counted."""
    if column.low is None or column.high is None:
        return values, 0
    outside = int((((values < column.low) | (values > column.high)) & ~gaps).sum())
    half = (column.high - column.low) / 2
    return (np.clip(values, column.low, column.high) - (column.low + half)) / half, outside


def _indices(
    cells: _Cells,
    name: str,
    used: npt.NDArray[np.int64],
    gaps: npt.NDArray[np.bool_],
    groups: Sequence[Sequence[str]],
) -> npt.NDArray[np.int64]:
    """The number of the group to which each value belongs; −1 where it is missing."""
    known = {value: index for index, group in enumerate(groups) for value in group}
    column, found = cells.columns[name], np.full(len(used), -1, dtype=np.int64)
    for place, (row, gap) in enumerate(zip(used, gaps, strict=True)):
        if gap:
            continue
        word = _word(column[row])
        index = known.get(word)
        if index is None and _is_number(word):
            index = known.get(_word(float(word)))  # "1.0", as some programs write 1
        if index is None:
            values = ", ".join(map(repr, known))
            raise cells.refuse(int(row), name, f"is not one of {values}; correct it, or add it to the schema")
        found[place] = index
    return found


def _absent(cell: Any, listed: frozenset[str] = frozenset()) -> bool:
    if isinstance(cell, str):
        return cell.strip().lower() in _ABSENT and cell.strip() not in listed
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except (ValueError, TypeError):
        return False
    return True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def note_counts(path: str | Path, counts: TableCounts) -> None:
    """Log what was dropped, filled and clipped, for the owner of the records."""
    for line in counts.lines()[1:]:
        logging.getLogger("normec").warning("%s: %s", path, line)
