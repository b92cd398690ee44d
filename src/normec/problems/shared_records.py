"""Whether data sets have records in common, as far as this can be seen from where they are in memory.

A record that occurs twice counts twice, and results on a test set that contains records of the clients are a function
of these records without noise. Subsets, concatenations and data sets around one other data set of the same length are
resolved record by record. Of other classes only the memory is known that their attributes lead to: if it overlaps with
that of the clients, `perhaps_shared` says so, and a private run notes that results on such a set may not be covered.

What cannot be seen: copies of records, files that two data sets read, and data in closures, slots, properties, class
attributes and global variables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from .batch_form import is_pair, length

_DEEPEST, _MOST = 5, 10_000  # attributes of attributes that are followed, and values looked at, for each data set


class _Part(NamedTuple):
    """Some records of a data set: all of them if `numbers` is None."""

    dataset: Dataset[Any]
    numbers: Tensor | None


def origins(datasets: Sequence[Dataset[Any]]) -> Tensor:
    """Return a number for every record, in any order; the same item of a data set always has the same number.

    Tensors are identified by their memory. A copy of a record is a different record.
    """
    groups: dict[int, tuple[Dataset[Any], list[Tensor]]] = {}
    for dataset in datasets:
        for inner, numbers in _parts(dataset, None, 0):
            own = torch.arange(length(inner)) if numbers is None else numbers
            groups.setdefault(id(inner), (inner, []))[1].append(own)
    return torch.cat([_origin_numbers(dataset, torch.cat(numbers)) for dataset, numbers in groups.values()])


def perhaps_shared(sets: Sequence[Dataset[Any]], clients: Sequence[Dataset[Any]]) -> bool:
    """Whether the sets and the clients use the same memory in different objects, one of which is of an unknown class.

    The records of one object are told apart by their numbers, and those of pairs of tensors by their addresses
    (`origins`).
    """
    ours, theirs = (
        {id(part.dataset): part.dataset for one in given for part in _parts(one, None, 0)} for given in (sets, clients)
    )
    if all(is_pair(dataset) for dataset in (*ours.values(), *theirs.values())):
        return False
    seen = [{span for dataset in side.values() for span in _memory(dataset)} for side in (ours, theirs)]
    alone = [
        {span for number, dataset in one.items() if number not in other for span in _memory(dataset)}
        for one, other in ((ours, theirs), (theirs, ours))
    ]
    return _overlap(alone[0], seen[1]) or _overlap(alone[1], seen[0])


def _parts(dataset: Dataset[Any], numbers: Tensor | None, depth: int) -> Iterator[_Part]:
    """Resolve a data set to the records of the data sets behind it."""
    if depth > _DEEPEST:
        yield _Part(dataset, numbers)
    elif type(dataset) is Subset:
        own = torch.as_tensor(dataset.indices)
        yield from _parts(dataset.dataset, own if numbers is None else own[numbers], depth + 1)
    elif type(dataset) is ConcatDataset:
        start = 0
        for joined in dataset.datasets:
            size = length(joined)
            if numbers is None:
                yield from _parts(joined, None, depth + 1)
            else:
                places = numbers % length(dataset)  # an index may count from the end
                yield from _parts(joined, places[(places >= start) & (places < start + size)] - start, depth + 1)
            start += size
    elif (inner := _wrapped(dataset)) is not None:
        yield from _parts(inner, numbers, depth + 1)
    else:
        yield _Part(dataset, numbers)


def _wrapped(dataset: Dataset[Any]) -> Dataset[Any] | None:
    """The only data set among the attributes of another one, if both have the same length."""
    if type(dataset) is TensorDataset:
        return None
    inner = [value for value in _attributes(dataset).values() if isinstance(value, Dataset)]
    try:
        return inner[0] if len(inner) == 1 and length(inner[0]) == length(dataset) else None
    except TypeError:  # it has no length
        return None


def _origin_numbers(dataset: Dataset[Any], numbers: Tensor) -> Tensor:
    numbers = numbers % length(dataset)  # an index may count from the end
    first, second = torch.full_like(numbers, id(dataset)), numbers
    if is_pair(dataset) and all(tensor.stride()[:1] > (0,) for tensor in dataset.tensors):
        first, second = (_addresses(tensor, numbers) for tensor in dataset.tensors)
    return first * 0x1E3779B97F4A7C15 + second  # products wrap around; two records share a number only by chance


def _addresses(tensor: Tensor, rows: Tensor) -> Tensor:
    return tensor.data_ptr() + rows * tensor.stride(0) * tensor.element_size()


def _attributes(value: Any) -> dict[str, Any]:
    return getattr(value, "__dict__", {})


def _memory(dataset: Dataset[Any]) -> Iterator[tuple[int, int]]:
    """The pieces of memory, as (start, end), that the attributes of a data set lead to."""
    waiting: list[tuple[Any, int]] = [(dataset, 0)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST:
        value, depth = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.layout is torch.strided and value.numel():
                spread = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
                yield value.data_ptr(), value.data_ptr() + (spread + 1) * value.element_size()
        elif isinstance(value, np.ndarray):
            if value.size:
                reach = [(n - 1) * stride for n, stride in zip(value.shape, value.strides, strict=True)]
                start = value.ctypes.data + sum(step for step in reach if step < 0)
                yield start, value.ctypes.data + sum(step for step in reach if step > 0) + value.itemsize
        elif isinstance(value, list | tuple | dict):
            if isinstance(value, list | dict) and value:
                yield id(value), id(value) + 1  # the same list of paths or of records
            content = value.values() if isinstance(value, dict) else value
            waiting += [(one, depth + 1) for one in content] if depth < _DEEPEST else []
        elif isinstance(value, Dataset):
            yield id(value), id(value) + 1
            waiting += [(one, depth + 1) for one in _attributes(value).values()] if depth < _DEEPEST else []


def _overlap(ours: set[tuple[int, int]], theirs: set[tuple[int, int]]) -> bool:
    """Whether a piece of memory of one side has an address in common with a piece of the other."""
    merged = sorted([(*span, 0) for span in ours] + [(*span, 1) for span in theirs])
    reached = [-1, -1]  # the ends of the pieces of each side so far
    for start, end, side in merged:
        if start < reached[1 - side]:
            return True
        reached[side] = max(reached[side], end)
    return False
