"""Runs with a record that occurs twice, or that is part of a test set, are refused or noted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from normec import DPSGD, Identity, Logging, NormEC, Privacy, Problem, Run, UsageError, train

RECORD = Privacy(epsilon=1.0, unit="record", record_clip=1.0, trust="central")
CLIENT = Privacy(epsilon=1.0, trust="secure-sum")


class Lazy(Dataset[Any]):
    def __init__(self, inner: TensorDataset) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, record: int) -> Any:
        return self.inner[record]


def table() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(40, 4, generator=draw), torch.randint(0, 2, (40,), generator=draw))


def trained(clients: list[Dataset[Any]], privacy: Privacy, **options: Any) -> Run:
    problem = Problem(nn.Linear(4, 2), F.cross_entropy, clients, **options.pop("sets", {}))
    method = DPSGD(Identity()) if privacy.unit == "record" else NormEC(0.1, 0.1)
    return train(problem, method, lr=0.1, rounds=2, privacy=privacy, **options)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", [lambda held: held, Lazy], ids=["tensors", "lazy"])
@pytest.mark.parametrize(
    "dealt", [([0] * 9 + list(range(1, 20)), range(20, 40)), (range(21), range(20, 40))], ids=["in one", "in two"]
)
def test_a_record_that_counts_more_than_once_is_refused(dealt: Any, kind: Any) -> None:
    """Nine times the same record, to make up for a rare class, moves a client's sum nine times as far."""
    held = kind(table())
    clients: list[Dataset[Any]] = [Subset(held, own) for own in dealt]
    with pytest.raises(UsageError, match="a record occurs more than once"):
        trained(clients, RECORD)
    assert trained(clients, CLIENT).finished  # which protects all of a client's records at once
    assert trained([Subset(held, range(20)), Subset(held, range(20, 40))], RECORD).finished


@pytest.mark.parametrize("name", ["test", "validation"])
def test_results_on_the_clients_own_records_are_not_reported(name: str) -> None:
    held = table()
    clients: list[Dataset[Any]] = [Subset(held, range(10)), Subset(held, range(10, 30))]
    for sets in (held, Subset(held, [3]), TensorDataset(*(part[:5] for part in held.tensors))):
        with pytest.raises(UsageError, match=f"the {name} set contains records of the clients"):
            trained(clients, CLIENT, sets={name: sets})
    assert trained(clients, CLIENT, sets={name: Subset(held, range(30, 40))}).finished
    run = trained(clients, CLIENT, sets={name: held}, logging=Logging(diagnostics=True))
    assert run.privacy is not None
    assert any(f"the {name} set contains records of the clients" in note for note in run.privacy.notes)


class Columns(Dataset[Any]):
    """Keeps its records in attributes of its own, here some rows of arrays."""

    def __init__(self, columns: dict[str, Any], rows: list[int]) -> None:
        self.columns, self.rows = columns, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, record: int) -> Any:
        return tuple(torch.as_tensor(part[self.rows[record]]) for part in self.columns.values())


class Around(Lazy):
    """A class of the user's own around another data set."""


@pytest.mark.parametrize(
    "around",
    [
        Around,
        lambda held: Around(Lazy(held)),
        lambda held: ConcatDataset([held, other()]),
        lambda held: Around(ConcatDataset([other(), Around(held)])),
        lambda held: Subset(ConcatDataset([other(), held]), range(-5, 0)),
    ],
)
def test_a_class_around_the_clients_records_hides_nothing(around: Any) -> None:
    held = table()
    own, rest = Subset(held, range(20)), Subset(held, range(20, 30))
    for clients in ([own, rest], [Around(own), rest]):
        with pytest.raises(UsageError, match="the test set contains records of the clients"):
            trained(clients, CLIENT, sets={"test": around(own)})
    run = trained([own, rest], CLIENT, sets={"test": around(Subset(held, range(30, 40)))})
    assert run.privacy is not None
    assert not any("the test set" in note for note in run.privacy.notes)


def other() -> TensorDataset:
    return TensorDataset(*(part.clone() for part in table().tensors))


def test_memory_that_a_class_of_the_users_own_shares_with_the_clients_is_noted() -> None:
    inputs, targets = (part.numpy() for part in table().tensors)
    columns = {"inputs": inputs, "targets": targets}
    clients: list[Dataset[Any]] = [Columns(columns, list(range(10))), Columns(columns, list(range(10, 30)))]

    def notes(test: Dataset[Any]) -> str:
        run = trained(clients, CLIENT, sets={"test": test})
        assert run.privacy is not None
        return " ".join(run.privacy.notes)

    said = "the test set uses the same memory as the clients' data"
    assert said in notes(Columns(columns, list(range(30, 40))))  # nobody can tell which of the rows it uses
    assert said in notes(TensorDataset(*(torch.from_numpy(part)[5:9] for part in (inputs, targets))))
    assert said not in notes(other())
    assert said not in notes(Columns({name: part.copy() for name, part in columns.items()}, list(range(10))))
