"""The clients' records: tensors on the device if the data sets allow it, otherwise fetched items."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ..errors import UsageError
from ..sampling.random_streams import own_numbers
from .batch_form import BatchForm, Collate, Tree, is_pair, leaves_of, length, moved, own_item, plain
from .objective import checksum

Batch = tuple[Tree, Tree]
_MOST_STREAMED = 10**6  # records that are read from an iterable data set into memory


class Records(Protocol):
    """Inputs and targets of every client: tensors, or dicts and tuples of tensors (`batch_form`)."""

    @property
    def sizes(self) -> Tensor: ...

    def batch(self, client: int, records: Tensor | None) -> Batch:
        """Return the given records of a client, or all of them."""
        ...

    def to(self, device: torch.device) -> Records: ...

    def digest(self) -> str:
        """Return a checksum of the contents, as far as they are available."""
        ...


class ResidentRecords:
    """All records in one pair of tensors on the device; a client is a list of row numbers.

    Clients that are `Subset`s of one `TensorDataset` share its memory.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, rows: Sequence[Tensor]) -> None:
        self.inputs, self.targets, self.rows = inputs, targets, list(rows)

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([len(rows) for rows in self.rows])

    def batch(self, client: int, records: Tensor | None) -> Batch:
        rows = self.rows[client]
        if records is not None:
            rows = rows[records.to(rows.device)]
        return self.inputs[rows], self.targets[rows]

    def to(self, device: torch.device) -> ResidentRecords:
        rows = [rows.to(device) for rows in self.rows]
        return ResidentRecords(self.inputs.to(device), self.targets.to(device), rows)

    def digest(self) -> str:
        return checksum(self.inputs, self.targets, torch.cat(self.rows), self.sizes)


class FetchedRecords:
    """Map-style data sets whose items are fetched and collated when they are drawn, so that their transforms run.

    A `TensorDataset`, of any number of tensors, is indexed instead.

    A transform that draws from torch's global generator is reproducible: the generator is seeded from the run's seed,
    the client and the round.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], device: torch.device, form: BatchForm | None = None) -> None:
        self.datasets, self.device, self.form = datasets, device, form or BatchForm()

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([length(dataset) for dataset in self.datasets])

    def batch(self, client: int, records: Tensor | None) -> Batch:
        dataset = self.datasets[client]
        found = _tensors(dataset) if self.form.collate is None else None
        if found is not None:
            base, rows = found
            rows = rows if records is None else rows[records.to(rows.device)]
            inputs, targets = self.form.split(tuple(tensor[rows] for tensor in base.tensors), len(rows), client)
        else:
            numbers = range(length(dataset)) if records is None else records.tolist()
            inputs, targets = self.form.collated([own_item(dataset[i]) for i in numbers], client)
        return moved(inputs, self.device), moved(targets, self.device)

    def to(self, device: torch.device) -> FetchedRecords:
        return FetchedRecords(self.datasets, device, self.form)

    def digest(self) -> str:
        """Return the clients' sizes and a checksum of their first records, so that reordered clients are noticed."""
        held = hashlib.blake2b(digest_size=8)
        for client in range(len(self.datasets)):
            with own_numbers(0):  # a transform may draw
                held.update(checksum(*leaves_of(self.batch(client, torch.zeros(1, dtype=torch.int64)))).encode())
        return f"fetched:{','.join(map(str, self.sizes.tolist()))}:{held.hexdigest()}"


def map_style(dataset: Any, name: str) -> tuple[Dataset[Any], Collate | None]:
    """Return records as a map-style data set, with the collate function of a DataLoader if it has one.

    The items of an iterable data set are read into memory. Of a DataLoader, its data set and its collate function are
    used; the batches are drawn by the run. `name` says in messages whose records they are, such as "client 3".
    """
    collate = None
    if isinstance(dataset, tuple) and dataset and all(isinstance(one, Tensor) and one.ndim for one in dataset):
        raise UsageError(f"{name} is a tuple of tensors; give TensorDataset(inputs, targets)")
    if isinstance(dataset, tuple) and dataset and all(isinstance(one, np.ndarray) and one.ndim for one in dataset):
        raise UsageError(
            f"{name} is a tuple of arrays; give TensorDataset(torch.as_tensor(inputs), torch.as_tensor(targets))"
        )
    if isinstance(dataset, DataLoader):
        if dataset.batch_size is None and dataset.batch_sampler is None:
            raise UsageError(
                f"the DataLoader of {name} has batch_size=None, so nobody knows what one record is; give the data set "
                "of single records"
            )
        collate = None if dataset.collate_fn is default_collate else dataset.collate_fn
        dataset = dataset.dataset
    streamed = isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    )
    if not streamed:
        return dataset, collate
    if not isinstance(dataset, Iterable):
        raise UsageError(
            f"{name} needs a data set with __len__ and __getitem__, or one that can be iterated over, got "
            f"{type(dataset).__name__}"
        )
    items = [own_item(item) for item in itertools.islice(dataset, _MOST_STREAMED + 1)]
    if len(items) > _MOST_STREAMED:
        raise UsageError(
            f"the iterable data set of {name} has more than {_MOST_STREAMED:,} records or does not end; give "
            "a map-style data set"
        )
    return items, collate  # type: ignore[return-value]  # a list has a length and items


def gather(datasets: Sequence[Dataset[Any]], form: BatchForm | None = None, kind: str = "client") -> Records:
    """Return the records of map-style data sets, one per client.

    Args:
        datasets: The data sets (see `map_style`).
        form: What a batch consists of (default: pairs of tensors).
        kind: What messages call a data set, followed by its number.

    Raises:
        UsageError: The data cannot be trained on.
    """
    if not datasets:
        raise UsageError("a problem needs at least one client, got none")
    for client, dataset in enumerate(datasets):
        if length(dataset) == 0:
            raise UsageError(f"{kind} {client} has no records; leave it out")
    pairs = form is None or (not form.whole and form.collate is None)
    resident = [_tensors(dataset) if pairs and _holds_pairs(dataset) else None for dataset in datasets]
    if any(found is None for found in resident):
        return FetchedRecords(datasets, torch.device("cpu"), form)
    found = [item for item in resident if item is not None]
    first = found[0][0]
    if all(base is first for base, _ in found):
        inputs, targets = map(plain, first.tensors)
        return _checked(ResidentRecords(inputs, targets, [rows for _, rows in found]), kind)
    expected = [list(tensor.shape[1:]) for tensor in first.tensors]
    for client, (base, _) in enumerate(found):
        shapes = [list(tensor.shape[1:]) for tensor in base.tensors]
        if shapes != expected:
            raise UsageError(
                f"the records of {kind} {client} have shapes {shapes}, and those of {kind} 0 have shapes {expected}; "
                "give all records one shape"
            )
    inputs = torch.cat([plain(base.tensors[0])[rows] for base, rows in found])
    targets = torch.cat([plain(base.tensors[1])[rows] for base, rows in found])
    sizes = [len(rows) for _, rows in found]
    return _checked(ResidentRecords(inputs, targets, torch.arange(len(inputs)).split(sizes)), kind)


def synthetic(tensor: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Return made-up inputs or targets of the shape of these, which say nothing about them.

    Floats are normal and bytes uniform. Other integers are zero, a valid index of every table of classes or tokens.
    """
    shape = (count, *tensor.shape[1:])
    if tensor.is_floating_point():
        return torch.randn(shape, generator=draw).to(tensor)
    if tensor.dtype == torch.uint8 and tensor.ndim > 1:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=draw).to(tensor.device)
    return tensor.new_zeros(shape)


def _tensors(dataset: Dataset[Any]) -> tuple[TensorDataset, Tensor] | None:
    """Return the `TensorDataset` behind a data set and its rows in it, or None."""
    # Exact types only, because a subclass may change its items; then they must be fetched one by one.
    if type(dataset) is Subset:
        inner, own = dataset.dataset, torch.as_tensor(dataset.indices)
        if type(inner) is Subset:
            found = _tensors(inner)
            return None if found is None else (found[0], found[1][own])
        return (inner, own) if type(inner) is TensorDataset else None
    return (dataset, torch.arange(len(dataset))) if type(dataset) is TensorDataset else None


def _holds_pairs(dataset: Dataset[Any]) -> bool:
    """Whether the tensors behind a data set are one of inputs and one of targets."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return is_pair(dataset)


def _checked(records: ResidentRecords, kind: str) -> ResidentRecords:
    """Return the records; raises `UsageError` if a number in them is not finite."""
    for name, tensor in (("inputs", records.inputs), ("targets", records.targets)):
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            continue
        bad = (~torch.isfinite(tensor)).flatten(1 if tensor.ndim > 1 else 0)
        rows = bad.any(-1).nonzero()[:, 0] if tensor.ndim > 1 else bad.nonzero()[:, 0]
        for client, own in enumerate(records.rows):
            hit = torch.isin(own, rows).nonzero()[:, 0]
            if len(hit):
                raise UsageError(
                    f"the {name} of {kind} {client}, record {int(hit[0])}, are not finite (NaN or inf); correct the "
                    "record or leave it out"
                )
    return records


def with_items(given: Sequence[Any], collate: Collate | None, kind: str) -> tuple[list[Dataset[Any]], Collate | None]:
    """Return data sets that have a length and items, and the collate function, which a DataLoader may bring."""
    found = [map_style(dataset, f"{kind} {number}") for number, dataset in enumerate(given)]
    loaders = [number for number, dataset in enumerate(given) if isinstance(dataset, DataLoader)]
    if loaders:
        others = f" and {len(loaders) - 1} more" if len(loaders) > 1 else ""
        logging.getLogger("normec").warning(
            "%s %d%s: of a DataLoader the data set is used, and the batches follow batch_size of the run",
            *(kind, loaders[0], others),
        )
    brought = [function for _, function in found if function is not None]
    if collate is None and brought:
        collate = brought[0]
    return [dataset for dataset, _ in found], collate


def name_of(sets: Sequence[Any]) -> str | None:
    """Return the name that a data set of `normec.data` gave to its records; None if no set has one."""
    for dataset in sets:
        while isinstance(dataset, Subset):
            dataset = dataset.dataset
        name = vars(dataset).get("name") if type(dataset) is TensorDataset else None
        if name is not None:
            return str(name)
    return None


def evaluation_sets(given: Any, clients: int) -> list[Any]:
    """Return the sets for evaluation: none, one, or one for each client. A list of dicts is one set of items."""
    if given is None:
        return []
    items = isinstance(given, list) and len(given) > 0 and all(isinstance(one, Mapping) for one in given)
    if items or not isinstance(given, list | tuple):
        return [given]
    if isinstance(given, tuple) and given and all(isinstance(one, Tensor | np.ndarray) for one in given):
        raise UsageError(
            "test and validation need data sets, got a tuple of tensors; give TensorDataset(inputs, targets)"
        )
    if len(given) != clients:
        raise UsageError(
            f"test and validation need one data set, or one for each of {clients} clients, got {len(given)}; "
            "if its entries are records, give torch.utils.data.Subset(records, range(len(records)))"
        )
    return list(given)
