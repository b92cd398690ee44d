"""What a batch consists of: inputs and targets, in tensors or in dicts and tuples of tensors.

One record is one item of a client's data set. A batch has the records along the first dimension of each of its tensors,
which is checked, because everything that counts records, or protects one of them, relies on it.

| an item of a data set | inputs | targets | the model is called with |
| --- | --- | --- | --- |
| (input, target) | input | target | model(input) |
| (a, b, …, target) | (a, b, …) | target | model(a, b, …) |
| ({"a": …, "b": …}, target) | the dict | target | model(a=…, b=…) |
| {"a": …, "b": …, "labels": …} | the dict without its target | the target | model(a=…, b=…) |
| anything, with a loss that takes the batch | the whole item | none | as that loss calls it |
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import Dataset, TensorDataset, default_collate

from ..errors import UsageError

TARGETS = ("labels", "label", "targets", "target")  # the keys of a dict that are taken for its target
Collate = Callable[[list[Any]], Any]
Tree = Any  # a tensor, or a dict, tuple or list of trees
NO_TARGETS: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class BatchForm:
    """How items become a batch, and which part of a batch is the target.

    Args:
        target: The key of the target in a dict; None for one of `TARGETS`.
        collate: Makes a batch of a list of items; None for PyTorch's default.
        whole: Whether the loss takes the whole batch.
    """

    target: str | None = None
    collate: Collate | None = None
    whole: bool = False

    def collated(self, items: list[Any], client: int) -> tuple[Tree, Tree]:
        """Return (inputs, targets) of some items of a client."""
        if self.collate is not None:
            return self.split(self.collate(items), len(items), client)
        try:
            batch = default_collate([_in_tensors(item) for item in items])
        except (RuntimeError, TypeError, ValueError, KeyError) as error:
            why = str(error).splitlines()[0]
            raise UsageError(
                f"the records of client {client} do not fit into one batch: {why}; give them one shape and type, or a "
                "collate function"
            ) from None
        return self.split(batch, len(items), client)

    def split(self, batch: Any, count: int, client: int) -> tuple[Tree, Tree]:
        """Return (inputs, targets) of a batch of `count` records."""
        if not isinstance(batch, Tensor | Mapping | list | tuple):
            raise UsageError(
                f"a batch of client {client} must hold tensors, got {type(batch).__name__}; let the collate function "
                "return a tensor, or a dict, list or tuple of tensors"
            )
        if isinstance(batch, Mapping):
            batch = dict(batch)  # a batch of a tokenizer, for example, is no dict
        _check_leaves(batch, count, client)
        batch = tree_map(plain, batch)
        if self.whole:
            return batch, NO_TARGETS
        if isinstance(batch, Mapping):
            key = self._key(batch, client)
            return {name: part for name, part in batch.items() if name != key}, batch[key]
        if not isinstance(batch, list | tuple) or len(batch) < 2:
            raise UsageError(
                f"the items of client {client} must be pairs of an input and a target, or dicts; for a loss that takes "
                "the whole batch, give batch_loss"
            )
        return batch[0] if len(batch) == 2 else tuple(batch[:-1]), batch[-1]

    def target_in(self, batch: Any) -> str | None:
        """Return the key of the target in a batch; None if it is no dict or has no such key."""
        found = (self.target,) if self.target is not None else TARGETS
        return next((name for name in found if name in batch), None) if isinstance(batch, Mapping) else None

    def _key(self, batch: Mapping[str, Any], client: int) -> str:
        found = [self.target] if self.target is not None else [name for name in TARGETS if name in batch]
        if len(found) != 1 or found[0] not in batch or len(batch) < 2:
            missing = (
                f", not the target {self.target!r}" if self.target is not None and self.target not in batch else ""
            )
            raise UsageError(
                f"the records of client {client} have {', '.join(map(repr, batch))}{missing}; name the target among "
                "them with target=…"
            )
        return found[0]


def plain(tensor: Tensor) -> Tensor:
    """Return a tensor of records as a plain `torch.Tensor`, whatever subclass it is of.

    Operations on it would call functions of the subclass, with the records of several clients where an engine computes
    them together.

    Raises:
        UsageError: The subclass has a `__torch_dispatch__`, so that its data cannot be read without it.
    """
    if type(tensor) is Tensor:
        return tensor
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise UsageError(f"the records are of the class {type(tensor).__name__}; give them as plain tensors")
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def length(dataset: Dataset[Any]) -> int:
    """Return the number of records of a map-style data set."""
    return len(dataset)  # type: ignore[arg-type]  # map-style data sets have a length, which torch's type does not declare


def is_pair(dataset: Dataset[Any]) -> TypeGuard[TensorDataset]:
    """Whether a data set is one tensor of inputs and one of targets."""
    return type(dataset) is TensorDataset and len(dataset.tensors) == 2


def size_of(tree: Tree) -> int:
    """Return the number of records in a batch."""
    return len(tree_flatten(tree)[0][0])


def part_of(tree: Tree, rows: Any) -> Tree:
    """Return some records of a batch: a slice, or the numbers of the rows."""
    return tree_map(lambda leaf: leaf[rows], tree)


def alone(tree: Tree) -> Tree:
    """Return one record as a batch of one."""
    return tree_map(lambda leaf: leaf[None], tree)


def moved(tree: Tree, device: torch.device) -> Tree:
    return tree_map(lambda leaf: leaf.to(device), tree)


def leaves_of(tree: Tree) -> list[Tensor]:
    found: list[Tensor] = tree_flatten(tree)[0]
    return found


def joined(parts: Sequence[Tree]) -> Tree:
    """Join the outputs or targets of several batches; a value that is not a tensor of rows is that of the first."""
    form = tree_flatten(parts[0])[1]
    columns = zip(*(tree_flatten(part)[0] for part in parts), strict=True)
    return form.unflatten(
        [torch.cat(column) if isinstance(column[0], Tensor) and column[0].ndim else column[0] for column in columns]
    )


def scores_of(outputs: Any) -> Tensor | None:
    """Return the scores among a model's outputs: a tensor, or the entry or attribute "logits"; None without them."""
    if isinstance(outputs, Mapping):
        outputs = outputs.get("logits")
    elif not isinstance(outputs, Tensor):
        outputs = getattr(outputs, "logits", None)
    return outputs if isinstance(outputs, Tensor) else None


def _check_leaves(batch: Any, count: int, client: int) -> None:
    """Refuse values that are not tensors with one row per record."""
    named = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if not isinstance(batch, Tensor) else ()
    for name, part in named or (("", batch),):
        for leaf in tree_flatten(part)[0]:
            where = f"the entry {name!r} of " if named else ""
            if not isinstance(leaf, Tensor):
                raise UsageError(
                    f"{where}the records of client {client} holds {type(leaf).__name__}, not numbers; leave it out or "
                    "turn it into tensors"
                )
            if not leaf.ndim or len(leaf) != count:
                raise UsageError(
                    f"{where}a batch of {count} records of client {client} has shape {list(leaf.shape)}; the records "
                    "must lie along the first dimension"
                )


def own_item(item: Any) -> Any:
    """Return a copy of an item of a data set, which may use the same memory for the next one."""
    return tree_map(_own_leaf, item)


def _own_leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    try:
        return copy.deepcopy(leaf)
    except Exception:  # for example, an open file
        return leaf


def _in_tensors(item: Any) -> Any:
    """Return an item with its lists of numbers as tensors, as `datasets.Dataset` gives them."""
    if isinstance(item, Mapping):
        return {name: _field(value) for name, value in item.items()}
    return tuple(_field(value) for value in item) if isinstance(item, list | tuple) else item


def _field(value: Any) -> Any:
    if isinstance(value, Mapping | tuple):
        return _in_tensors(value)
    if (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and not any(isinstance(one, Tensor | str | bytes) for one in value)
    ):
        return torch.as_tensor(value)
    return value
