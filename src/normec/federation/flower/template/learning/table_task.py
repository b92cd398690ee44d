"""The model of a federation in which every party has a table, described by table.toml in the folder of this app.

A party names its own table in its party.toml; it needs no code. The scaling of the inputs uses the public ranges of
table.toml and nothing else.
"""

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from normec.data import load_schema, read_table
from normec.errors import UsageError

SCHEMA = load_schema(Path(__file__).parents[1] / "table.toml")


def model() -> nn.Module:
    """Logistic regression: one output for each class. Training starts at zero."""
    linear = nn.Linear(SCHEMA.width, len(SCHEMA.classes))
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(outputs, targets)


def data(partition: int, partitions: int) -> Dataset[Any]:  # noqa: ARG001
    """A party reads its own table instead."""
    raise UsageError("this party has no data; name its table in party.toml, as in data = 'patients.csv'")


def test() -> Dataset[Any] | None:
    """The public table with which the server evaluates the model, if its environment names one: NORMEC_TEST_TABLE."""
    path = os.environ.get("NORMEC_TEST_TABLE")
    return read_table(path, SCHEMA).dataset if path else None
