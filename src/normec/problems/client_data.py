"""The clients' records: tensors on the device if the data sets allow it, otherwise fetched items."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from ..errors import UsageError
from ..sampling.random_streams import seed_generators

Batch = tuple[Tensor, Tensor]


class Records(Protocol):
    """Pairs (input, target) of every client."""

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

    A transform that draws from torch's global generator is reproducible: the generator is seeded from the run's seed,
    the client and the round.
    """

    def __init__(self, datasets: Sequence[Dataset[Any]], device: torch.device) -> None:
        self.datasets, self.device = datasets, device

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([length(dataset) for dataset in self.datasets])

    def batch(self, client: int, records: Tensor | None) -> Batch:
        dataset = self.datasets[client]
        numbers = range(length(dataset)) if records is None else records.tolist()
        items = default_collate([dataset[i] for i in numbers])
        if not isinstance(items, list | tuple) or len(items) != 2 or not all(isinstance(x, Tensor) for x in items):
            raise UsageError(f"the items of client {client} must be pairs of an input and a target")
        return items[0].to(self.device), items[1].to(self.device)

    def to(self, device: torch.device) -> FetchedRecords:
        return FetchedRecords(self.datasets, device)

    def digest(self) -> str:
        """Return the clients' sizes and a checksum of their first records, so that reordered clients are noticed."""
        held = hashlib.blake2b(digest_size=8)
        with _seeded():
            for client in range(len(self.datasets)):
                seed_generators(0, self.device)  # a transform may draw
                held.update(checksum(*self.batch(client, torch.zeros(1, dtype=torch.int64))).encode())
        return f"fetched:{','.join(map(str, self.sizes.tolist()))}:{held.hexdigest()}"


def gather(datasets: Sequence[Dataset[Any]]) -> Records:
    """Return the records of `datasets`, one per client; raises `UsageError` for data that cannot be trained on."""
    if not datasets:
        raise UsageError("a problem needs at least one client, got none")
    for client, dataset in enumerate(datasets):
        if isinstance(dataset, IterableDataset):
            raise UsageError(f"client {client} has an IterableDataset; a map-style data set is needed")
        if length(dataset) == 0:
            raise UsageError(f"client {client} has no records")
    resident = [_tensors(dataset) for dataset in datasets]
    if any(found is None for found in resident):
        return FetchedRecords(datasets, torch.device("cpu"))
    found = [item for item in resident if item is not None]
    first = found[0][0]
    if all(base is first for base, _ in found):
        inputs, targets = first.tensors
        return _checked(ResidentRecords(inputs, targets, [rows for _, rows in found]))
    for client, (base, _) in enumerate(found):
        shapes = [list(tensor.shape[1:]) for tensor in base.tensors]
        if shapes != [list(tensor.shape[1:]) for tensor in first.tensors]:
            raise UsageError(f"the records of client {client} have shapes {shapes}, other than those of client 0")
    inputs = torch.cat([base.tensors[0][rows] for base, rows in found])
    targets = torch.cat([base.tensors[1][rows] for base, rows in found])
    cuts = torch.tensor([len(rows) for _, rows in found]).tolist()
    return _checked(ResidentRecords(inputs, targets, torch.arange(len(inputs)).split(cuts)))


def checksum(*tensors: Tensor) -> str:
    """Return a short digest of the tensors' bytes."""
    seen = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        seen.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return seen.hexdigest()


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


def length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]  # map-style data sets have a length, which torch's type does not declare


@contextmanager
def _seeded() -> Iterator[None]:
    """Set Python's and NumPy's generators to a fixed seed; afterwards restore them and torch's."""
    plain, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            random.seed(0)
            np.random.seed(0)
            yield
    finally:
        random.setstate(plain)
        np.random.set_state(numpy)


def _tensors(dataset: Dataset[Any]) -> tuple[TensorDataset, Tensor] | None:
    """Return the (inputs, targets) pair behind a data set and its rows in it, or None."""
    # Exact types only, because a subclass may change its items; then they must be fetched one by one.
    if type(dataset) is Subset:
        inner, own = dataset.dataset, torch.as_tensor(dataset.indices)
        if type(inner) is Subset:
            found = _tensors(inner)
            return None if found is None else (found[0], found[1][own])
        return (inner, own) if is_pair(inner) else None
    return (dataset, torch.arange(len(dataset))) if is_pair(dataset) else None


def is_pair(dataset: Dataset[Any]) -> TypeGuard[TensorDataset]:
    return type(dataset) is TensorDataset and len(dataset.tensors) == 2


def _checked(records: ResidentRecords) -> ResidentRecords:
    for name, tensor in (("inputs", records.inputs), ("targets", records.targets)):
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
            continue
        bad = (~torch.isfinite(tensor)).flatten(1 if tensor.ndim > 1 else 0)
        rows = bad.any(-1).nonzero()[:, 0] if tensor.ndim > 1 else bad.nonzero()[:, 0]
        for client, own in enumerate(records.rows):
            hit = torch.isin(own, rows).nonzero()[:, 0]
            if len(hit):
                raise UsageError(f"the {name} of client {client}, record {int(hit[0])}, are not finite (NaN or inf)")
    return records
