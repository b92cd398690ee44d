"""Test sets by client: accuracy over all records, and its mean over the clients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from normec import Logging, NormEC, Problem, UsageError, train


def constant_model() -> nn.Module:
    """Always answers class 1."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.0, 1.0]))
    return model


def labelled(*targets: int) -> TensorDataset:
    return TensorDataset(torch.ones(len(targets), 2), torch.tensor(targets))


CLIENTS = [labelled(0, 1), labelled(1, 1, 0)]


def test_both_means_are_measured() -> None:
    sets = [labelled(1, 1, 1, 0), labelled(0)]
    problem = Problem(constant_model(), nn.functional.cross_entropy, CLIENTS, sets, validation=sets[::-1])
    found = problem.evaluate(problem.x0, {})
    assert found["accuracy"] == found["validation_accuracy"] == 3 / 5
    assert found["accuracy_mean_over_clients"] == found["validation_accuracy_mean_over_clients"] == (3 / 4 + 0) / 2
    right, wrong = torch.tensor([0.0, 1.0]).log_softmax(0).neg()[[1, 0]].tolist()
    assert found["test_loss"] == pytest.approx((3 * right + 2 * wrong) / 5)
    assert found["validation_loss"] == pytest.approx(found["test_loss"])


def test_one_set_has_one_accuracy() -> None:
    problem = Problem(constant_model(), nn.functional.cross_entropy, CLIENTS, labelled(1, 0))
    assert problem.evaluate(problem.x0, {}).keys() == {"test_loss", "accuracy"}


def test_the_history_has_both() -> None:
    sets = [labelled(1, 1, 1, 0), labelled(0)]
    problem = Problem(constant_model(), nn.functional.cross_entropy, CLIENTS, sets)
    run = train(problem, NormEC(alpha=0.1, beta=0.1), lr=0.0, rounds=2, logging=Logging(every=1, evaluate_every=1))
    assert run.history["accuracy_mean_over_clients"] == [3 / 8] * 3
    assert run.history["accuracy"] == [3 / 5] * 3


def test_a_list_of_dicts_is_one_set() -> None:
    """As many of them as clients, or more; by its name it is the same set."""
    for labels in ([1, 0], [1, 1, 1, 0]):
        items = [{"input": torch.zeros(2), "labels": torch.tensor(label)} for label in labels]
        model = constant_model()
        problem = Problem(model, nn.functional.cross_entropy, [items, items], items, validation=items)
        found = problem.evaluate(problem.x0, {})
        assert found["accuracy"] == found["validation_accuracy"] == sum(labels) / len(labels)
        assert "accuracy_mean_over_clients" not in found
        named = Problem(model, nn.functional.cross_entropy, [items, items], {"held": items})
        assert named.evaluate(named.x0, {})["accuracy"] == found["accuracy"]


def test_as_many_sets_as_clients() -> None:
    with pytest.raises(UsageError, match="one for each of 2 clients, got 3"):
        Problem(constant_model(), nn.functional.cross_entropy, CLIENTS, [labelled(1)] * 3)


def test_records_of_a_client_in_any_set_are_noticed() -> None:
    problem = Problem(constant_model(), nn.functional.cross_entropy, CLIENTS, [labelled(1), CLIENTS[0]])
    assert problem.shown == ["test"]


def test_the_most_frequent_class_of_the_test_set_is_known() -> None:
    inputs, targets = torch.randn(8, 3), torch.tensor([0, 2, 2, 1, -100, 2, 0, -100])
    model, clients = torch.nn.Linear(3, 3), [TensorDataset(inputs, torch.zeros(8, dtype=torch.int64))]
    loss = torch.nn.functional.cross_entropy
    assert Problem(model, loss, clients).majority is None
    assert Problem(model, loss, clients, test=TensorDataset(inputs, targets)).majority == 3 / 6
    sets = [TensorDataset(inputs[:4], targets[:4]), TensorDataset(inputs[4:], targets[4:])]
    assert Problem(model, loss, [*clients, *clients], test=sets).majority == 3 / 6
