"""Tables in CSV and Parquet files: values against hand-computed ones, and one-line errors for damaged files."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from normec.data import NumberColumn, TableSchema, load, load_schema, read_inputs, read_table
from normec.data.heart_disease import FOLDER, INPUTS, read_heart_disease
from normec.errors import UsageError

SCHEMA = """
target = "ill"
classes = ["no", ["mild", "bad"]]
missing = "{missing}"
centre = "clinic"
[inputs]
age = {{low = 20, high = 80}}
smoker = {{categories = ["never", "former", "current"]}}
"""
ROWS = ["age,smoker,clinic,ill,name", "50,never,A,no,x", "80,former,B,mild,y", "110,current,A,bad,z", "20,never,B,no,w"]


def schema(folder: Path, missing: str = "refuse") -> TableSchema:
    path = folder / "table.toml"
    path.write_text(SCHEMA.format(missing=missing))
    return load_schema(path)


def file(folder: Path, rows: list[str], name: str = "patients.csv") -> Path:
    path = folder / name
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def test_values_are_scaled_by_public_constants(tmp_path: Path) -> None:
    table = read_table(file(tmp_path, ROWS), schema(tmp_path))
    assert table.inputs.tolist() == [[0, -1, -1], [1, 1, -1], [1, -1, 1], [-1, -1, -1]]
    assert table.targets.tolist() == [0, 1, 1, 0]
    assert table.centres is not None
    assert table.centres.tolist() == ["A", "B", "A", "B"]
    assert (table.counts.records, dict(table.counts.clipped), table.counts.dropped) == (4, {"age": 1}, 0)


def test_the_schema_may_be_given_by_its_file(tmp_path: Path) -> None:
    known = schema(tmp_path)
    found = read_table(file(tmp_path, ROWS), tmp_path / "table.toml")
    assert torch.equal(found.inputs, read_table(file(tmp_path, ROWS), known).inputs)


def test_new_records_are_scaled_like_those_of_training(tmp_path: Path) -> None:
    """Neither the target nor the centre is needed, and a target that is written there is not read."""
    known = schema(tmp_path)
    trained = read_table(file(tmp_path, ROWS), known).inputs
    kept = [",".join(row.split(",")[:2]) for row in ROWS]
    assert torch.equal(read_inputs(file(tmp_path, kept, "new.csv"), known), trained)
    unknown = [ROWS[0], *(row.replace("bad", "?").replace("no", "?") for row in ROWS[1:])]
    assert torch.equal(read_inputs(file(tmp_path, unknown, "open.csv"), known), trained)


def test_new_records_keep_their_rows(tmp_path: Path) -> None:
    """A record with a gap is never left out, because its prediction would belong to another."""
    rows = [ROWS[0], ROWS[1], "," + ROWS[2].split(",", 1)[1]]
    for missing in ("refuse", "drop"):
        with pytest.raises(UsageError, match=r"line 3, column 'age'.*fill it in or remove the record"):
            read_inputs(file(tmp_path, rows), schema(tmp_path, missing))
    assert read_inputs(file(tmp_path, rows), schema(tmp_path, "middle"))[1, 0] == 0


def test_a_record_does_not_change_the_inputs_of_another(tmp_path: Path) -> None:
    """The scaling is public: with one record more, far away, all others keep their bits."""
    known = schema(tmp_path, "drop")
    alone = read_table(file(tmp_path, ROWS), known).inputs
    more = read_table(file(tmp_path, [*ROWS, "1e9,current,A,bad,q", ",never,A,no,r"]), known).inputs
    assert torch.equal(more[:4], alone)
    assert len(more) == 5


@pytest.mark.parametrize("form", ["semicolon", "tab", "bom", "gzip", "quoted", "spaces", "blank lines"])
def test_forms_of_csv(tmp_path: Path, form: str) -> None:
    text = "\n".join(ROWS) + "\n"
    name = "patients.csv.gz" if form == "gzip" else "patients.csv"
    text = {
        "semicolon": text.replace(",", ";"),
        "tab": text.replace(",", "\t"),
        "bom": "\ufeff" + text,
        "quoted": text.replace("never", '"never"').replace(",x\n", ',"a, b\nc"\n'),
        "spaces": text.replace(",", " , "),
        "blank lines": text.replace("\n", "\n\n"),
    }.get(form, text)
    raw = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(raw) if form == "gzip" else raw)
    expected = read_table(file(tmp_path, ROWS, "plain.csv"), schema(tmp_path)).inputs
    assert torch.equal(read_table(tmp_path / name, schema(tmp_path)).inputs, expected)


def test_parquet_equals_csv(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {
        "age": [50.0, 80.0, 110.0, None],
        "smoker": ["never", "former", "current", "never"],
        "clinic": [1, 2, 1, 2],
        "ill": ["no", "mild", "bad", "no"],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "patients.parquet")
    known = schema(tmp_path, "middle")
    table = read_table(tmp_path / "patients.parquet", known)
    same = read_table(file(tmp_path, [*ROWS[:4], ",never,B,no,w"]), known)
    assert torch.equal(table.inputs, same.inputs)
    assert table.centres is not None
    assert table.centres.tolist() == ["1", "2", "1", "2"]
    assert dict(table.counts.filled) == {"age": 1}
    parquet.write_table(pyarrow.table({"age": [1.0], "ill": ["no"]}), tmp_path / "few.parquet")
    with pytest.raises(UsageError, match=r"few\.parquet has no column 'clinic'; its columns are 'age', 'ill'"):
        read_table(tmp_path / "few.parquet", known)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        read_table(tmp_path / "broken.parquet", known)


@pytest.mark.parametrize("missing", ["refuse", "drop", "middle"])
def test_a_value_that_the_schema_lists_is_not_missing(tmp_path: Path, missing: str) -> None:
    text = SCHEMA.format(missing=missing).replace('"never"', '"none"').replace('"no"', '"NA"')
    (tmp_path / "table.toml").write_text(text)
    rows = [row.replace("never", "none").replace(",no,", ",NA,") for row in ROWS]
    found = read_table(file(tmp_path, rows), tmp_path / "table.toml")
    plain = read_table(file(tmp_path, ROWS), schema(tmp_path, missing))
    assert torch.equal(found.inputs, plain.inputs)
    assert torch.equal(found.targets, plain.targets)
    assert found.counts == plain.counts


@pytest.mark.parametrize(
    ("missing", "rows", "records"), [("drop", 2, [[0, -1, -1], [1, 1, -1]]), ("middle", 4, [[0, -1, -1], [1, 1, -1]])]
)
def test_missing_values(tmp_path: Path, missing: str, rows: int, records: list[list[float]]) -> None:
    table = read_table(file(tmp_path, [*ROWS[:3], "NA,never,A,no,x", "50,?,A,no,x"]), schema(tmp_path, missing))
    assert table.inputs[:2].tolist() == records
    assert len(table.targets) == rows
    if missing == "middle":
        assert table.inputs[2:].tolist() == [[0, -1, -1], [0, 0, 0]]
        assert dict(table.counts.filled) == {"age": 1, "smoker": 1}
        assert not table.counts.clipped  # a missing value is not outside the range
    else:
        assert table.counts.dropped == 2


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "is empty; a table has a header"),
        ([ROWS[0]], "has no records"),
        (["age,smoker,clinic", "1,never,A"], "has no column 'ill'"),
        (["Age,smoker,clinic,ill", "1,never,A,no"], r"no column 'age', did you mean 'Age'\?"),
        (["age,age,ill", "1,2,no"], "line 1: column 'age' occurs 2 times"),
        ([*ROWS, "1,never"], "line 6: 2 fields, the header has 5"),
        ([*ROWS, "old,never,A,no,x"], "line 6, column 'age': 'old' is not a number; correct it"),
        (
            [row.replace(",", ";") for row in ROWS] + ["20,5;never;A;no;x"],
            r"line 6, column 'age': '20,5' is not a number \(write it with a decimal point\)",
        ),
        ([*ROWS, "inf,never,A,no,x"], "line 6, column 'age': 'inf' is not finite"),
        ([*ROWS, "30,often,A,no,x"], "line 6, column 'smoker': 'often' is not one of 'never', 'former', 'current'"),
        ([*ROWS, "30,never,A,maybe,x"], "line 6, column 'ill': 'maybe' is not one of 'no', 'mild', 'bad'"),
        ([*ROWS, ",never,A,no,x"], "line 6, column 'age': '' is a missing value; fill it in"),
        ([*ROWS, '30,"never,A,no,x'], "unexpected end of data"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, rows: list[str], message: str) -> None:
    path = tmp_path / "patients.csv"
    path.write_text("".join(f"{row}\n" for row in rows))
    with pytest.raises(UsageError, match=message) as caught:
        read_table(path, schema(tmp_path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_tables(tmp_path: Path) -> None:
    known = schema(tmp_path)
    with pytest.raises(UsageError, match="there is no file"):
        read_table(tmp_path / "none.csv", known)
    with pytest.raises(UsageError, match=re.escape("must end in .csv, .csv.gz, .parquet")):
        read_table(tmp_path / "patients.xlsx", known)
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UsageError, match="not a regular file"):
        read_table(tmp_path / "folder.csv", known)
    (tmp_path / "latin.csv").write_bytes("\n".join(ROWS).encode() + "\n30,never,Z\u00fcrich,no,x\n".encode("latin-1"))
    with pytest.raises(UsageError, match=r"latin\.csv is not UTF-8 \(byte 0xfc"):
        read_table(tmp_path / "latin.csv", known)
    (tmp_path / "cut.csv.gz").write_bytes(gzip.compress("\n".join(ROWS).encode())[:-12])
    with pytest.raises(UsageError, match="cannot be unpacked"):
        read_table(tmp_path / "cut.csv.gz", known)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("low = 20, high = 80", "low = 80, high = 20"), "input 'age': a range needs low < high"),
        (("low = 20, high = 80", "low = 20"), "input 'age' needs"),
        (('"never", "former", "current"', '"never"'), "input 'smoker': categories must be at least two"),
        (('"no", ', ""), "classes must be at least two"),
        (('centre = "clinic"', 'centre = "age"'), "column 'age' cannot be an input as well"),
        (('missing = "refuse"', 'missing = "mean"'), "unknown missing 'mean'"),
        (('target = "ill"', 'goal = "ill"'), "no entry 'goal'"),
        (("[inputs]", "[columns]"), "no entry 'columns'"),
    ],
)
def test_mistakes_in_a_schema(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "table.toml"
    path.write_text(SCHEMA.format(missing="refuse").replace(*change))
    with pytest.raises(UsageError, match=message) as caught:
        load_schema(path)
    assert str(path) in str(caught.value)


def test_a_table_is_a_data_set(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    rows = [f"{draw.integers(20, 80)},never,{'AB'[i % 2]},{'no' if i % 5 else 'bad'},x" for i in range(100)]
    path = file(tmp_path, [ROWS[0], *rows])
    schema(tmp_path)
    found = load(str(path), schema=tmp_path / "table.toml")
    assert found.test is not None
    assert found.groups is not None
    assert (found.shape, found.classes, len(found.train), len(found.test)) == ((3,), 2, 80, 20)
    assert sorted(found.groups.unique().tolist()) == [0, 1]
    assert not found.fitted
    assert len(load(path, schema=tmp_path / "table.toml").train) == 80
    with pytest.raises(UsageError, match="needs a target column"):
        load(str(path))
    with pytest.raises(UsageError, match=r"there is no file .*missing\.csv"):
        load(str(tmp_path / "missing.csv"))
    with pytest.raises(UsageError, match=r"the target is 'ill' in .*, got target = 'age'"):
        load(str(path), schema=tmp_path / "table.toml", target="age")
    with pytest.raises(UsageError, match="target and schema are for files"):
        load("digits", target="age")
    with pytest.raises(UsageError, match="scaling is a choice of heart-disease"):
        load(str(path), scaling="public", target="ill")


def test_without_a_schema_numbers_are_used_as_they_are(tmp_path: Path) -> None:
    path = file(tmp_path, ["a,b,y", *(f"{i},{1000 * i},{10 - i % 3}" for i in range(30))])
    found = load(str(path), target="y")
    assert found.test is not None
    inputs = torch.cat([found.train.tensors[0], found.test.tensors[0]])
    assert sorted(inputs[:, 1].tolist()) == [1000.0 * i for i in range(30)]
    assert found.classes == 3
    expected = 2 - found.train.tensors[0][:, 0] % 3  # the classes are 8, 9 and 10, in the order of numbers
    assert found.train.tensors[1].tolist() == expected.tolist()
    with pytest.raises(UsageError, match="list the column's categories in the schema"):
        load(str(file(tmp_path, ["a,y", "red,0", "blue,1"], "words.csv")), target="y")


def test_heart_disease_as_files_gives_the_published_inputs(tmp_path: Path) -> None:
    """The same patients by the reader of heart-disease, for columns whose public scaling is a range of this schema."""
    path = tmp_path / "table.toml"
    path.write_text(
        'target = "num"\nclasses = ["0", ["1", "2", "3", "4"]]\nmissing = "drop"\n[inputs]\n'
        "age = {low = -100, high = 200}\nsex = {low = 0, high = 1}\ntrestbps = {low = -70, high = 330}\n"
        "chol = {low = -800, high = 1200}\nfbs = {low = 0, high = 1}\nthalach = {low = -100, high = 400}\n"
        "exang = {low = 0, high = 1}\noldpeak = {low = -9, high = 11}\n"
        'cp = {categories = ["1", "2", "3", "4"]}\nrestecg = {categories = ["0", "1", "2"]}\n'
    )
    known = load_schema(path)
    tables = [read_table(FOLDER / f"{name}.csv", known) for name in ("cleveland", "hungarian", "switzerland", "va")]
    inputs, targets, _, _ = read_heart_disease()
    assert torch.cat([table.targets for table in tables]).tolist() == targets.tolist()
    ours = torch.cat([table.inputs for table in tables])
    ratio = torch.tensor([10, 1, 20, 50, 1, 25, 1, 1]) / torch.tensor([150, 1, 200, 1000, 1, 250, 1, 10])
    expected = torch.from_numpy(inputs) * torch.cat([ratio, torch.ones(len(INPUTS) - 8)])
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_number_column_without_a_range_is_not_clipped() -> None:
    assert NumberColumn().width == 1
    with pytest.raises(UsageError, match="needs both low and high"):
        NumberColumn(low=1)
