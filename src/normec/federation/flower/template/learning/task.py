"""What is learned, and from what. Put your own model and data here; nothing else of this app needs to change.

As it stands: scikit-learn's handwritten digits, sorted by digit and cut into as many parts as there are parties, so
that no two parties see the same digits.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import normec.data


def model() -> nn.Module:
    """The model. The server's is where training starts; a party's gives the same parameters another place."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return nn.functional.cross_entropy(outputs, targets)


def data(partition: int, partitions: int) -> Dataset[Any]:
    """This party's records, pairs of (input, target). A real party reads its own files here, whatever its number."""
    train = normec.data.load("digits").train
    order = train.tensors[1].sort(stable=True).indices
    return Subset(train, order.tensor_split(partitions)[partition].tolist())


def test() -> Dataset[Any] | None:
    """What the server measures the model with, or None. Public data, or the server's own: never a party's."""
    return normec.data.load("digits").test
