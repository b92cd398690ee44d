"""The model and the data. Put your own here; nothing else in this app needs to change.

The example uses scikit-learn's handwritten digits, sorted by digit and split into as many parts as there are parties,
so that parties see different digits.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import normec.data


def model() -> nn.Module:
    """The model. Training starts at the parameters of the server's model; parties only need the same architecture."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(outputs, targets)


def data(partition: int, partitions: int) -> Dataset[Any]:
    """This party's records, pairs of (input, target). A real party reads its own files and ignores the arguments."""
    train = normec.data.load("digits").train
    order = train.tensors[1].sort(stable=True).indices
    return Subset(train, order.tensor_split(partitions)[partition].tolist())


def test() -> Dataset[Any] | None:
    """The data with which the server evaluates the model, or None. Use public data, never that of a party."""
    return normec.data.load("digits").test
