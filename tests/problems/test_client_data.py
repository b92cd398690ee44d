"""The clients' records: resident or fetched, whichever way they come, the same items; bad ones refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from normec import UsageError
from normec.problems.client_data import FetchedRecords, ResidentRecords, gather
from normec.problems.shared_records import origins


def table(rows: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(rows, 3, generator=generator), torch.arange(rows) + 100 * seed)


class Plain(Dataset[Any]):
    """Pairs of a tensor and a Python number, as a user's own data set may give them."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = self.inner[index]
        return x, int(y)

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]


def items(dataset: Dataset[Any], records: list[int]) -> tuple[Tensor, Tensor]:
    pairs = [dataset[i] for i in records]
    return torch.stack([x for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs])


base = table(20)
CLIENTS: dict[str, list[Dataset[Any]]] = {
    "tables": [table(4, 1), table(7, 2)],
    "subsets": [Subset(base, [3, 1, 19]), Subset(base, range(5, 9))],
    "numpy indices": [Subset(base, np.array([3, 1, 19])), Subset(base, [np.int64(4)])],  # type: ignore[arg-type]
    "subset of subset": [Subset(Subset(base, [9, 8, 7, 6, 5]), [4, 0, 2]), Subset(Subset(base, range(10)), [-1, 3])],
    "subsets of two tables": [Subset(base, [3, 1, 19]), Subset(table(6, 3), [5, 0])],
    "shared records": [Subset(base, [1, 2]), Subset(base, [2, 2, 1])],
    "own class": [Plain(table(4, 1)), Plain(table(7, 2))],
    "mixed": [table(4, 1), Plain(table(7, 2)), Subset(base, [3, 1])],
    "subset of own class": [Subset(Plain(base), [3, 1, 19])],
}


@pytest.mark.parametrize("clients", CLIENTS.values(), ids=CLIENTS.keys())
def test_batches_are_the_data_sets_items(clients: list[Dataset[Any]]) -> None:
    records = gather(clients)
    assert records.sizes.tolist() == [len(dataset) for dataset in clients]  # type: ignore[arg-type]
    for client, dataset in enumerate(clients):
        size = int(records.sizes[client])
        for asked in (None, torch.tensor([size - 1, 0])):
            x, y = records.batch(client, asked)
            expected_x, expected_y = items(dataset, list(range(size)) if asked is None else asked.tolist())
            assert torch.equal(x, expected_x)
            assert torch.equal(y, expected_y)


def test_subsets_of_one_table_share_its_memory() -> None:
    records = gather(CLIENTS["subset of subset"])
    assert isinstance(records, ResidentRecords)
    assert records.inputs.data_ptr() == base.tensors[0].data_ptr()


def test_items_of_a_users_data_set_are_fetched_anew() -> None:
    inner = table(4)
    records = gather([Plain(inner)])
    assert isinstance(records, FetchedRecords)
    inner.tensors[0][2] = 7.0
    assert records.batch(0, torch.tensor([2]))[0].tolist() == [[7.0, 7.0, 7.0]]


class Doubled(TensorDataset):
    """A table whose items are changed on the way out: a transform in a subclass."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = super().__getitem__(index)
        return 2 * x, y


class DoubledSubset(Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        return 2 * x, y

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


@pytest.mark.parametrize("dataset", [Doubled(*base.tensors), DoubledSubset(base, range(20))], ids=["table", "subset"])
def test_a_subclass_s_transform_is_applied(dataset: Dataset[Any]) -> None:
    x, _ = gather([dataset]).batch(0, None)
    assert torch.equal(x, 2 * base.tensors[0])


def broken(field: str, row: int, value: float) -> TensorDataset:
    x, y = torch.ones(6, 2, 2), torch.ones(6)
    (x[:, 1, 0] if field == "inputs" else y)[row] = value
    return TensorDataset(x, y)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["inputs", "targets"])
def test_a_value_that_is_not_finite_is_refused_with_client_and_record(field: str, value: float) -> None:
    whole = TensorDataset(torch.ones(6, 2, 2), torch.ones(6))
    with pytest.raises(UsageError, match=f"^the {field} of client 1, record 4, are not finite") as error:
        gather([whole, broken(field, 4, value)])
    assert "\n" not in str(error.value)
    shared = broken(field, 4, value)
    with pytest.raises(UsageError, match="client 2, record 1,"):
        gather([Subset(shared, [0, 1]), Subset(shared, [2]), Subset(shared, [3, 4])])


def test_a_bad_record_that_belongs_to_nobody_does_not_matter() -> None:
    shared = broken("inputs", 4, math.nan)
    assert gather([Subset(shared, [0, 1]), Subset(shared, [5])]).sizes.tolist() == [2, 1]


def test_what_cannot_be_trained_on_is_refused_in_words() -> None:
    with pytest.raises(UsageError, match="at least one client, got none"):
        gather([])
    with pytest.raises(UsageError, match="client 1 has no records"):
        gather([base, Subset(base, [])])


def test_clients_of_different_shapes_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match="client 1"):
        gather([base, TensorDataset(torch.ones(4, 5), torch.ones(4, dtype=torch.int64))])


def test_items_that_are_no_pairs_are_refused_in_words() -> None:
    with pytest.raises(UsageError, match="client 0"):
        gather([TensorDataset(torch.ones(4, 5))]).batch(0, None)


def test_the_digest_sees_values_and_who_has_them() -> None:
    digest = gather(CLIENTS["subsets"]).digest()
    assert gather(CLIENTS["subsets"]).digest() == digest
    other = TensorDataset(base.tensors[0].clone(), base.tensors[1])
    other.tensors[0][0, 0] += 1
    assert gather([Subset(other, [3, 1, 19]), Subset(other, range(5, 9))]).digest() != digest
    assert gather([Subset(base, range(5, 9)), Subset(base, [3, 1, 19])]).digest() != digest


@pytest.mark.parametrize("whole", [base, None], ids=["one table", "tables"])
def test_the_digest_sees_where_a_client_ends(whole: TensorDataset | None) -> None:
    def cut(at: int) -> list[Dataset[Any]]:
        if whole is not None:
            return [Subset(whole, range(at)), Subset(whole, range(at, 20))]
        x, y = base.tensors
        return [TensorDataset(x[:at], y[:at]), TensorDataset(x[at:], y[at:])]

    assert gather(cut(5)).digest() != gather(cut(12)).digest()


def test_a_record_is_known_by_where_it_lies() -> None:
    """However it is reached: by a subset, a subset of one, a view of its tensors, a class around it, or its end."""
    inputs, targets = base.tensors
    third = Subset(base, [3])
    view = TensorDataset(inputs[3:4], targets[3:4])
    for same in (Subset(Subset(base, [9, 3]), [1]), Subset(base, [-17]), view, Subset(Plain(base), [3])):
        assert torch.equal(origins([same]), origins([third]))
    for other in (Subset(base, [4]), TensorDataset(inputs[3:4].clone(), targets[3:4])):
        assert not torch.equal(origins([other]), origins([third]))
    found = {name: origins(clients) for name, clients in CLIENTS.items()}
    repeated = [name for name, numbers in found.items() if len(numbers.unique()) < len(numbers)]
    assert repeated == ["subset of subset", "shared records"]  # the tenth record, by two ways
