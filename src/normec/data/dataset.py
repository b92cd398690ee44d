"""A data set in memory, checked once, and `load`, which reads one by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from ..errors import UsageError, at_least, one_of
from .augment import Augment, Transform
from .cifar import read_arrays
from .embedded import read_embedded
from .entries import ENTRIES, FILE_PREFIX, Entry
from .folders import locate, missing
from .heart_disease import read_heart_disease
from .idx import read_pair
from .libsvm import Table, class_indices, read_libsvm
from .partition import fifth, stratified
from .table import CSV, PARQUET, is_table, load_schema, note_counts, read_numbers, read_table


@dataclass(frozen=True)
class Dataset:
    """A data set in memory: inputs, class indices, and what to do with a batch before the model sees it.

    Tabular inputs are float32 and ready to use. Images stay uint8, which takes a quarter of the memory and of the
    transfer, and `transform` turns them into floats on the device, batch by batch.

    Args:
        name: The name of the data set.
        train: The training records: inputs and targets. Targets are int64, in 0 … classes − 1.
        test: The test records, if there are any.
        classes: The number of classes.
        shape: The shape of an input.
        transform: Applied to every batch.
        augment: Applied to training batches, before `transform`.
        groups: The natural owner of each training record, for the splits by column and by centre.
        test_groups: The natural owner of each test record.
        fitted: Whether inputs were scaled by statistics of the training records, which no noise covers in a private
            run.
        counted: Whether the classes, or the number of features, are those that occur in the records, which no noise
            covers either.

    Raises:
        UsageError: Shapes, types or targets do not fit together.

    Example:
        >>> data = Dataset("mine", TensorDataset(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])), None, 2, (2,))
        >>> len(data.train), data.classes
        (4, 2)
    """

    name: str
    train: TensorDataset
    test: TensorDataset | None
    classes: int
    shape: tuple[int, ...]
    transform: Transform | None = None
    augment: Augment | None = None
    groups: Tensor | None = field(default=None, repr=False)
    test_groups: Tensor | None = field(default=None, repr=False)
    fitted: bool = False
    counted: bool = False

    def __post_init__(self) -> None:
        at_least(1, classes=self.classes)
        for part, data in (("train", self.train), ("test", self.test)):
            if data is not None:
                self._check(part, data)
                data.name = self.name  # type: ignore[attr-defined]  # by which a problem with these records knows it
        for name, owners, held in (("groups", self.groups, self.train), ("test_groups", self.test_groups, self.test)):
            records = 0 if held is None else len(held)
            if owners is not None and owners.shape != (records,):
                raise UsageError(
                    f"{name} of {self.name} must have one value per record, {records}, got shape {tuple(owners.shape)}"
                )

    def _check(self, part: str, data: TensorDataset) -> None:
        if len(data.tensors) != 2:
            raise UsageError(f"{part} of {self.name} must hold inputs and targets, got {len(data.tensors)} tensors")
        inputs, targets = data.tensors
        if not len(targets):
            raise UsageError(f"{part} of {self.name} has no records")
        if tuple(inputs.shape[1:]) != self.shape:
            raise UsageError(
                f"{part} inputs of {self.name} must have shape {self.shape} per record, got {tuple(inputs.shape[1:])}"
            )
        if targets.dtype != torch.int64 or targets.ndim != 1:
            raise UsageError(
                f"{part} targets of {self.name} must be int64 class indices, one per record, "
                f"got {targets.dtype} of shape {tuple(targets.shape)}"
            )
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= self.classes:
            raise UsageError(f"{part} targets of {self.name} must lie in 0 … {self.classes - 1}, got {low} … {high}")


def load(
    name: str | Path,
    data_dir: str | Path | None = None,
    scaling: Literal["public", "centre"] | None = None,
    *,
    target: str | None = None,
    schema: str | Path | None = None,
) -> Dataset:
    """Load a known data set (see `listing`), a CSV or Parquet file, or a file in LIBSVM's format as ``libsvm:PATH``.

    Nothing is downloaded here; see `get`. Sets published without a test part get a fixed one: 20 % of every class, and
    of a file of your own 20 % of all records, whatever they contain. For libsvm:PATH a file PATH.t beside it is the
    test part, as LIBSVM names them, and a qid column becomes `groups`. A table is read as its `schema` says; without
    one, all columns but the target are numbers, which are used as they are, and the classes are the values of the
    target that occur. One record may then add a class, and with it outputs to the model, which no noise covers: write a
    schema for protected records.

    Args:
        name: The name of the data set, the path of a file that ends in .csv, .csv.gz or .parquet, or ``libsvm:PATH``.
        data_dir: The folder to look in (default: the environment variable NORMEC_DATA), before the cache.
        scaling: How the inputs of heart-disease are scaled: "public", by fixed public numbers (default), or "centre",
            by statistics of each hospital's training patients, which no noise covers in a private run. Other data sets
            have one scaling.
        target: The target column of a CSV or Parquet file; with a schema, the schema names it.
        schema: A TOML file with the public description of a table's columns (`normec.data.load_schema`).

    Returns:
        The data set.

    Raises:
        UsageError: The name is unknown, a file is missing or damaged, or the data set has no choice of scalings.

    Example:
        >>> digits = load("digits")  # part of scikit-learn
        >>> digits.classes, digits.shape, len(digits.train)
        (10, (64,), 1438)
    """
    name = str(name)
    check_name(name)
    if name not in ENTRIES and scaling is not None:
        raise UsageError(f"scaling is a choice of heart-disease, and {name} is a file of your own; leave it out")
    if is_table(name) and not name.startswith(FILE_PREFIX):
        return _table_file(name, target, schema)
    if target is not None or schema is not None:
        raise UsageError(f"target and schema are for files that end in {', '.join((*CSV, *PARQUET))}, got {name!r}")
    if name.startswith(FILE_PREFIX):
        return _libsvm_file(name, Path(name.removeprefix(FILE_PREFIX)).expanduser())
    entry = ENTRIES[name]
    if entry.family == "heart-disease":
        return _heart_disease(entry, scaling or "public")
    if scaling is not None:
        raise UsageError(f"scaling is a choice of heart-disease, and {name} has one scaling; leave it out")
    if entry.family == "embedded":
        train, test = read_embedded(name)
        return Dataset(name, _pair(*train), _pair(*test), entry.classes, entry.shape, fitted=name != "digits")
    files = locate(entry, data_dir)
    if files is None:
        raise UsageError(missing(entry, data_dir))
    if entry.family == "libsvm":
        return _libsvm_entry(entry, list(files.values()))
    if entry.family == "cifar10":
        train_part = read_arrays(files["train_x.npy"], files["train_y.npy"])
        test_part = read_arrays(files["test_x.npy"], files["test_y.npy"])
    else:
        train_part = read_pair(files["train-images-idx3-ubyte"], files["train-labels-idx1-ubyte"], entry.classes)
        test_part = read_pair(files["t10k-images-idx3-ubyte"], files["t10k-labels-idx1-ubyte"], entry.classes)
    parts = _pair(*train_part), _pair(*test_part)
    return Dataset(name, *parts, entry.classes, entry.shape, entry.transform, entry.augment)


def check_name(name: str) -> None:
    """Raise `UsageError` if `load` knows no data set or kind of file by this name; no file is read."""
    if not is_table(name) and not name.startswith(FILE_PREFIX):
        one_of([*ENTRIES, f"{FILE_PREFIX}PATH", *(f"PATH{end}" for end in (*CSV, *PARQUET))], dataset=name)


def _heart_disease(entry: Entry, scaling: Literal["public", "centre"]) -> Dataset:
    one_of(("public", "centre"), scaling=scaling)
    inputs, targets, owners, test = read_heart_disease(scaling)
    return Dataset(
        entry.name,
        _pair(inputs[~test], targets[~test]),
        _pair(inputs[test], targets[test]),
        entry.classes,
        entry.shape,
        groups=torch.from_numpy(owners[~test]),
        test_groups=torch.from_numpy(owners[test]),
        fitted=scaling == "centre",
    )


def _table_file(name: str, target: str | None, schema: str | Path | None) -> Dataset:
    if schema is not None:
        known = load_schema(schema)
        if target not in (None, known.target):
            raise UsageError(f"the target is {known.target!r} in {schema}, got target = {target!r}; leave it out")
        table = read_table(name, known)
    elif target is not None:
        table, known = read_numbers(name, target)
    elif not Path(name).expanduser().exists():
        raise UsageError(f"there is no file {name}; give the path of a CSV or Parquet file")
    else:
        raise UsageError(f"{name} needs a target column; give target, or a schema that names it")
    note_counts(name, table.counts)
    kept, held = fifth(len(table.targets))
    owners = None if table.centres is None else torch.from_numpy(np.unique(table.centres, return_inverse=True)[1])
    return Dataset(
        name,
        TensorDataset(table.inputs[kept], table.targets[kept]),
        TensorDataset(table.inputs[held], table.targets[held]) if len(held) else None,
        len(known.classes),
        (known.width,),
        groups=None if owners is None else owners[kept],
        test_groups=None if owners is None or not len(held) else owners[held],
        counted=schema is None,
    )


def _libsvm_entry(entry: Entry, paths: list[Path]) -> Dataset:
    tables = read_libsvm(paths, features=entry.shape[0])
    for table, rows in zip(tables, (entry.rows, entry.test_rows), strict=False):
        # Text that is truncated at the end of a line looks like a smaller data set; only the count shows it.
        if len(table.labels) != rows:
            raise UsageError(
                f"{table.path} has {len(table.labels)} records, the published file has {rows}; remove it and run "
                f"`normec data get {entry.name}`, or read it as it is with libsvm:{table.path}"
            )
    return _tabular(entry.name, tables)


def _libsvm_file(name: str, path: Path) -> Dataset:
    packing = path.suffix if path.suffix in (".gz", ".bz2") else ""
    test = path.parent / f"{path.name.removesuffix(packing)}.t{packing}"
    return _tabular(name, read_libsvm([path, test] if test.is_file() else [path]), own=True)


def _tabular(name: str, tables: list[Table], own: bool = False) -> Dataset:
    targets, classes = class_indices(tables)
    features, groups = tables[0].features, tables[0].groups
    shape = (features.shape[1],)
    test: TensorDataset | None
    if len(tables) == 2:
        train, test = _pair(features, targets[0]), _pair(tables[1].features, targets[1])
    else:
        kept, held = fifth(len(targets[0])) if own else stratified(targets[0])
        train = _pair(features[kept], targets[0][kept])
        test = _pair(features[held], targets[0][held]) if len(held) else None
        groups = None if groups is None else groups[kept]
    owners = None if groups is None else torch.from_numpy(groups)
    return Dataset(name, train, test, classes, shape, groups=owners, counted=own)


def _pair(inputs: npt.NDArray[np.float32] | npt.NDArray[np.uint8], targets: npt.NDArray[np.int64]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))
