"""The record numbers of a round, on the device, drawn for many rounds ahead, so that no round waits.

A GPU draws them itself: for a thousand clients the host would take longer than the GPU does for the rest of the round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..problems.client_data import ResidentRecords
from ..problems.problem import Problem
from ..sampling.batches import Batches, BatchSource
from ..sampling.random_streams import Stream
from ..system.devices import upload

_AHEAD = {"cpu": 2**18, "cuda": 2**19}  # the most record numbers that are drawn at once if all clients take part
_OWNED = 2**24  # the most record numbers, with what pads them, that a GPU keeps to look them up


class BatchFeed:
    """The record numbers ``[c, B]`` of clients in a round, and the augmentation's uniform numbers ``[c, B, draws]``."""

    def __init__(self, problem: Problem, records: ResidentRecords, batches: Batches | None, seed: int) -> None:
        self._problem, self._records, self._batches = problem, records, batches
        self._device = records.inputs.device
        self._sizes = records.sizes
        self._owned = torch.nn.utils.rnn.pad_sequence([rows.cpu() for rows in records.rows], batch_first=True)
        there = self._device.type == "cuda" and batches is not None and self._owned.numel() <= _OWNED
        self._owned_there = self._owned.to(self._device) if there else None
        self._most_ahead = _AHEAD["cuda" if there else "cpu"]
        self._stream = Stream(seed, "augment")
        # (first client, how many) → (first round, tables)
        self._ahead: dict[tuple[int, int], tuple[int, Tensor, Tensor | None]] = {}

    def groups(self, clients: Tensor, block: int, *, full: bool) -> Iterator[Tensor]:
        """Yield groups of clients with batches of equal length and at most `block` records, as few as possible."""
        lengths = self.lengths(clients, full=full)
        for length in lengths.unique().tolist():
            same = clients[lengths == length]
            blocks = math.ceil(len(same) / max(1, block // length))
            yield from same.split(math.ceil(len(same) / blocks))

    def lengths(self, clients: Tensor, *, full: bool) -> Tensor:
        """Return the number of records in each client's batch; `full` batches hold all records."""
        if self._batches is None or full:
            return self._sizes[clients]
        return self._sizes[clients].clamp(max=self._batches.batch_size)

    def tables(
        self, clients: Tensor, round: int | Tensor, *, everyone: bool, full: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the tables of clients whose batches are equally long, in one round or in a round for each client.

        `everyone`: the same group is asked for in every round, so that tables are drawn ahead.
        """
        if isinstance(round, Tensor) or not everyone or full:
            numbers, uniforms = self._drawn(clients, [round], full)
            return numbers[0], uniforms[0] if uniforms is not None else None
        group = (int(clients[0]), len(clients))
        begun, numbers, uniforms = self._ahead.get(group, (round, torch.empty(0), None))
        if not begun <= round < begun + len(numbers):
            count = min(self._most(clients), 2 * len(numbers) or 8)  # growing, so that a short run draws little in vain
            begun = round
            numbers, uniforms = self._drawn(clients, list(range(round, round + count)), full)
            self._ahead[group] = (begun, numbers, uniforms)
        return numbers[round - begun], uniforms[round - begun] if uniforms is not None else None

    def padded(self, clients: Tensor, batches: BatchSource, round: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return record numbers ``[c, longest]``, the batches' lengths, and uniform numbers as in `tables`.

        What lies beyond a length is the client's first record.
        """
        rows, lengths = batches.padded(clients, round)
        numbers = upload(self._owned[clients[:, None], rows], self._device)
        uniforms = self._uniforms(clients, [round], rows.shape[1])
        return numbers, lengths, uniforms[0] if uniforms is not None else None

    def _most(self, clients: Tensor) -> int:
        """Return how many rounds to draw ahead; record numbers and the orders of their passes limit it."""
        length = int(self.lengths(clients[:1], full=False)[0])
        most = min(256, self._most_ahead // (length * self._problem.clients))
        if self._batches is not None:  # a pass draws a number for each record of the largest client
            orders = 4 * self._most_ahead // (len(clients) * self._owned.shape[1])
            most = min(most, int(self._batches.steps[clients].min()) * orders)
        return max(1, most)

    def _drawn(self, clients: Tensor, rounds: Sequence[int | Tensor], full: bool) -> tuple[Tensor, Tensor | None]:
        length = int(self.lengths(clients[:1], full=full)[0])
        if self._batches is None or full:
            numbers = self._owned[clients, :length].expand(len(rounds), -1, -1)
        elif len(rounds) == 1:  # `table` keeps the order of the pass for the next round
            numbers = self._owned[clients[:, None], self._batches.table(clients, rounds[0])[None, :, :length]]
        elif self._owned_there is None:
            tables = self._batches.tables(clients, torch.tensor(rounds))
            numbers = self._owned[clients[:, None], tables[..., :length]]
        else:
            tables = self._batches.tables(clients, torch.tensor(rounds), self._device)
            numbers = self._owned_there[upload(clients, self._device)[:, None], tables[..., :length]]
            return numbers, self._uniforms(clients, rounds, length)
        return upload(numbers, self._device), self._uniforms(clients, rounds, length)

    def _uniforms(self, clients: Tensor, rounds: Sequence[int | Tensor], length: int) -> Tensor | None:
        augment = self._problem.augment
        if augment is None:
            return None
        whose = upload(clients.repeat(len(rounds)), self._device)
        first = rounds[0]
        when = first if isinstance(first, Tensor) else torch.tensor(rounds).repeat_interleave(len(clients))
        drawn = self._stream.uniform(whose, upload(when, self._device), length * augment.draws)
        return drawn.view(len(rounds), len(clients), length, augment.draws)
