"""The records that a client uses in a round, as a function of the seed, the client and the round."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import at_least, fraction
from ..system.devices import upload
from .random_streams import Stream, coins_below


class BatchSource(Protocol):
    """The interface of batches: which records each client uses in a round."""

    @property
    def expected(self) -> Tensor:
        """The number by which each client's gradient is divided, known beforehand; floats, one per client."""
        ...

    def draw(self, clients: Tensor, round: int | Tensor) -> list[Tensor]:
        """Return the record numbers of each client's batch in a round: one round for all clients, or one for each."""
        ...

    def padded(self, clients: Tensor, round: int | Tensor) -> tuple[Tensor, Tensor]:
        """Return the batches as one table ``[c, longest]`` and their lengths; entries beyond a length are arbitrary."""
        ...

    def of(self, sizes: Tensor) -> BatchSource:
        """Return batches by the same rule and seed, for clients with other numbers of records."""
        ...


class PoissonBatches:
    """Poisson batches: in every round each record is drawn with probability `rate`, independently.

    They amplify record-level privacy. A client divides by rate · size and not by the number of records that were drawn,
    which would reveal a private count.
    """

    def __init__(self, sizes: Tensor, rate: float, seed: int) -> None:
        fraction(batch_rate=rate)
        self._sizes, self._rate, self._seed = sizes, rate, seed
        self._stream = Stream(seed, "batches")

    @property
    def expected(self) -> Tensor:
        return self._rate * self._sizes.double()

    def draw(self, clients: Tensor, round: int | Tensor) -> list[Tensor]:
        longest = int(self._sizes.max())
        coins = self._stream.bits(clients, round, longest) >> 10 < coins_below(self._rate)
        own = torch.arange(longest) < self._sizes[clients, None]
        return [row.nonzero()[:, 0] for row in coins & own]

    def padded(self, clients: Tensor, round: int | Tensor) -> tuple[Tensor, Tensor]:
        rows = self.draw(clients, round)
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])

    def of(self, sizes: Tensor) -> PoissonBatches:
        return PoissonBatches(sizes, self._rate, self._seed)


class Batches:
    """Mini-batches without replacement.

    Each client goes through its records in an order that is drawn for each pass, `batch_size` at a time. A remainder
    that is shorter than a batch is skipped in this pass. A client with fewer records than a batch uses all of them in
    every round.
    """

    def __init__(self, sizes: Tensor, batch_size: int, seed: int) -> None:
        at_least(1, batch_size=batch_size)
        self.sizes, self.batch_size, self._seed = sizes, batch_size, seed
        self.steps = (sizes // batch_size).clamp(min=1)  # rounds per pass, for each client
        self._stream, self._longest = Stream(seed, "batches"), int(sizes.max())
        self._alike = int(sizes.min()) == self._longest
        # The last pass that was drawn of each client, and its order.
        self._pass = np.full(len(sizes), -1)
        self._order = np.empty((0, self._longest), np.int64)

    @property
    def expected(self) -> Tensor:
        return self.sizes.clamp(max=self.batch_size).double()

    def draw(self, clients: Tensor, round: int | Tensor) -> list[Tensor]:
        table, lengths = self.padded(clients, round)
        return [row[:length] for row, length in zip(table, lengths.tolist(), strict=True)]

    def padded(self, clients: Tensor, round: int | Tensor) -> tuple[Tensor, Tensor]:
        return self.table(clients, round), self.sizes[clients].clamp(max=self.batch_size)

    def table(self, clients: Tensor, round: int | Tensor) -> Tensor:
        """Return the batches as one table ``[c, B]``; if a client has n < B records, only its first n entries count."""
        own = clients.numpy()  # on small tables NumPy takes less time than torch
        passes, step = np.divmod(np.asarray(round), self.steps.numpy()[own])
        stale = self._pass[own] != passes
        if stale.all():
            self._shuffle(own, passes)
        elif stale.any():
            self._shuffle(own[stale], passes[stale])
        first = own * self._longest + step * self.batch_size
        return torch.from_numpy(self._order.reshape(-1).take(first[:, None] + np.arange(self._width)))

    def of(self, sizes: Tensor) -> Batches:
        return Batches(sizes, self.batch_size, self._seed)

    def tables(self, clients: Tensor, rounds: Tensor, device: torch.device | None = None) -> Tensor:
        """Return `table` for several consecutive rounds, ``[rounds, c, B]``; all orders are drawn at once.

        With a `device` they are drawn there in tensors, and nothing waits for it; without one on the host, by NumPy.
        """
        steps = self.steps[clients]
        passes = rounds[:, None] // steps
        first, count = passes[0], int((passes[-1] - passes[0]).max()) + 1
        whose = clients.repeat(count)
        when = (first + torch.arange(count)[:, None]).flatten()
        which, begin, rows = passes - first, rounds[:, None] % steps * self.batch_size, torch.arange(len(clients))
        if device is None:
            orders = torch.from_numpy(self._orders(whose, when))
        else:
            which, begin, rows, whose, when = (upload(part, device) for part in (which, begin, rows, whose, when))
            orders = self.orders_in_tensors(whose, when)
        columns = begin[..., None] + torch.arange(self._width, device=orders.device)
        return orders.view(count, len(clients), -1)[which[..., None], rows[:, None], columns]

    @property
    def _width(self) -> int:
        return min(self.batch_size, self._longest)

    def _shuffle(self, clients: NDArray[np.int64], passes: NDArray[np.int64]) -> None:
        if not len(self._order):
            self._order = np.zeros((len(self.sizes), self._longest), np.int64)
        self._order[clients] = self._orders(torch.from_numpy(clients), torch.from_numpy(passes))
        self._pass[clients] = passes

    def _orders(self, clients: Tensor, passes: Tensor) -> NDArray[np.int64]:
        """Return, row by row, a client's records in the order of a pass."""
        keys = self._stream.bits(clients, passes, self._longest).numpy()
        positions = np.arange(self._longest)
        if not self._alike:  # records that a smaller client does not have come last
            keys[positions >= self.sizes[clients, None].numpy()] = np.iinfo(np.int64).max
        # With its position in its lowest bits, a number says where it came from, and sorting takes less time than
        # finding the order of a sort.
        last = (1 << (self._longest - 1).bit_length()) - 1
        keys &= ~last
        keys |= positions
        keys.sort(axis=1)
        keys &= last
        return keys

    def orders_in_tensors(self, clients: Tensor, passes: Tensor) -> Tensor:
        """Return the same orders as `_orders`, on any device."""
        keys = self._stream.bits_in_tensors(clients, passes, self._longest)
        positions = torch.arange(self._longest, device=clients.device)
        if not self._alike:
            sizes = upload(self.sizes, clients.device)
            keys = keys.masked_fill(positions >= sizes[clients, None], torch.iinfo(torch.int64).max)
        last = (1 << (self._longest - 1).bit_length()) - 1
        return (keys & ~last | positions).sort(dim=1).values & last


def rounds_of(epochs: int, sizes: Tensor, batch_size: int | None) -> int:
    """Return the rounds in `epochs` passes of the average client over its records (a full gradient is one pass)."""
    at_least(1, epochs=epochs, batch_size=1 if batch_size is None else batch_size)
    if batch_size is None:
        return epochs
    return epochs * max(1, int(sizes.sum()) // (len(sizes) * batch_size))
