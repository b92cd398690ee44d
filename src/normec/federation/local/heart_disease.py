"""The example of `normec federation local`: four hospitals, and secure sums that protect each of their patients.

The module is the task of an app (`federation.flower.task.Task`). Each party of the example is one hospital of the data
set heart-disease, and the server measures the accuracy on the test patients of each of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from ... import data as data_sets
from ...errors import UsageError
from ...models import Softmax
from ...settings.config import FEDERATED
from ...settings.data_defaults import usual_settings

NAME = "heart-disease"
HOSPITALS = ("Cleveland", "Budapest", "Zurich-Basel", "Long-Beach")  # in the order of `data.heart_disease.CENTRES`
TASK = '''"""The model, and the patients of the four hospitals."""

from normec.federation.local.heart_disease import data, loss, model, test

__all__ = ["data", "loss", "model", "test"]
'''
_PATIENT_LEVEL = {"epsilon": 1.0, "delta": 1e-4, "unit": "record", "trust": "secure-sum"}


def settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the example, for those that are not given: patient-level ε = 1, by a secure sum.

    Args:
        given: The settings that are given, by name.
    """
    private = given.get("private", True)
    known = {**({} if not private else _PATIENT_LEVEL), **{name: value for name, value in given.items() if value != ""}}
    usual = usual_settings({"data": NAME, "private": private, **known})
    found = {**_PATIENT_LEVEL, **usual} if private else usual
    if private and known["unit"] == "record":
        found = {"record_clip": "auto", **found}
    if "sigma" in known:
        found["epsilon"] = ""
    sizes = ",".join(str(int(number)) for number in torch.bincount(_owners(data_sets.load(NAME).groups)))
    names = (*FEDERATED, "records")
    return {name: value for name, value in {**found, "records": sizes}.items() if name in names and name not in given}


def model() -> nn.Module:
    """Logistic regression, as a softmax over two classes."""
    torch.manual_seed(0)
    return Softmax(data_sets.load(NAME).shape[0], 2)


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(outputs, targets)


def data(partition: int, partitions: int) -> Dataset[Any]:
    """The training patients of one hospital."""
    if partitions != len(HOSPITALS) or not partition < partitions:
        raise UsageError(f"{NAME} has {len(HOSPITALS)} hospitals, got number {partition} of {partitions}")
    found = data_sets.load(NAME)
    return Subset(found.train, (_owners(found.groups) == partition).nonzero().flatten().tolist())


def test() -> list[Dataset[Any]]:
    """The test patients of each hospital."""
    found = data_sets.load(NAME)
    owners, patients = _owners(found.test_groups), found.test
    if patients is None:
        raise UsageError(f"{NAME} has no test patients; install normec again")
    return [Subset(patients, (owners == i).nonzero().flatten().tolist()) for i in range(len(HOSPITALS))]


def _owners(of: Tensor | None) -> Tensor:
    """The number of each patient's hospital."""
    if of is None:
        raise UsageError(f"{NAME} does not say whose patients these are; install normec again")
    return of
