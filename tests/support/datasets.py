"""Data sets as users write them."""

from __future__ import annotations

from torch.utils.data import TensorDataset


class Fetched(TensorDataset):
    """A class of the user's own, whose items are fetched one by one and may be others the next time."""
