"""Softmax and logistic regression in closed form: all clients at once, without autograd.

With P the predicted probabilities and Y the targets, record j contributes (P_j − Y_j) x_jᵀ, so the gradients of a
block of clients are one product over padded records [c, B, features]. A record's gradient has norm
‖P_j − Y_j‖ ‖(x_j, 1)‖, so clipping every record costs nothing extra.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.nn import functional as F

from ..algorithms.operators import smallest_reliable_norm
from ..data.augment import Transform, treats_records_alone
from ..errors import UsageError
from ..models import Logistic, NonconvexPenalty, Softmax, binary_loss
from ..problems.client_data import ResidentRecords
from ..problems.objective import Buffers
from ..problems.problem import Problem
from ..sampling.batches import Batches, BatchSource
from ..system.devices import upload
from .engine import Block, BlockEngine
from .loop import RECORD_BLOCKS
from .own_vmap_rules import RefuseOwnVmapRules
from .record_clip import RecordClip
from .restored import UserState, forgetful

_BLOCK_FLOATS = 2**24
_AHEAD = 2**18  # the most record numbers that are drawn ahead for a block of clients


def fits(problem: Problem) -> bool:
    """Whether the closed form is the gradient of this problem."""
    losses = {Softmax: F.cross_entropy, Logistic: binary_loss}
    return losses.get(type(problem.model)) is problem.loss and problem.augment is None


class _Batch(NamedTuple):
    """Padded records of a block, ``[c, B, …]``; the weight of padding is 0. `squares` are ‖x_j‖², if they are kept."""

    inputs: Tensor
    targets: Tensor
    weights: Tensor
    squares: Tensor | None = None


class LinearEngine(BlockEngine):
    """Computes the closed form in blocks of clients."""

    name = "linear"
    recordable = False

    def __init__(
        self,
        problem: Problem,
        records: ResidentRecords,
        batches: BatchSource | None,
        clip: RecordClip | None,
        *,
        private: bool = False,
    ) -> None:
        """In a `private` run, and with a clip, code of the user's own starts every client as it was before."""
        self._problem, self._records, self._batches, self._clip = problem, records, batches, clip
        alone = private or clip is not None
        self._forgetful = forgetful(problem) if alone else problem
        self._state = UserState(problem.transform, problem.penalty) if alone else UserState()
        self._sizes = records.sizes
        self._divisors = self._sizes.double() if batches is None else batches.expected
        self._binary = isinstance(problem.model, Logistic)
        features = records.inputs[0].numel()
        widest = int(self._sizes.max()) * features if batches is None else int(self._divisors.max() * 2 + 8) * features
        self._block = max(1, _BLOCK_FLOATS // max(widest, len(problem.x0)))
        self._owned = torch.nn.utils.rnn.pad_sequence(list(records.rows), batch_first=True)
        self._owned_on_host = self._owned.cpu().numpy()
        # The binary loss is one of floating-point targets, as which they are kept.
        self._targets = records.targets.to(problem.x0.dtype) if self._binary else records.targets
        # The keys of both are the first clients of blocks.
        self._whole: dict[int, _Batch] = {}  # all records of the block
        # The first of the rounds that are drawn ahead, and the record numbers [rounds, c, B].
        self._ahead: dict[int, tuple[int, Tensor]] = {}
        # Batches of a fixed size, and which clients have enough records for one; these records have equal weights.
        self._fixed = batches if isinstance(batches, Batches) and clip is None else None
        size = self._fixed.batch_size if self._fixed is not None else 1
        self._fill, self._equal = self._sizes >= size, problem.x0.new_tensor(1 / size)
        self._all_fill = bool(self._fill.all())
        self._everyone: tuple[Tensor, ...] = ()  # all clients, in blocks
        self.same_records = batches is None

    def shrink(self) -> bool:
        self._whole.clear()
        self._ahead.clear()
        self._everyone = ()
        return super().shrink()

    @property
    def threads(self) -> int:
        work = 2 * len(self._problem.x0) * float(self._divisors.sum())
        # Below some milliseconds, a second thread costs more than it gains.
        return 1 if work < 1e9 else torch.get_num_threads()

    def blocks(
        self,
        x: Tensor,
        buffers: Buffers,  # noqa: ARG002
        round: int,
        clients: Tensor | None = None,
        *,
        full: bool = False,
    ) -> Iterator[Block]:
        if clients is None:
            self._everyone = self._everyone or torch.arange(self._problem.clients).split(self._block)
            chunks = self._everyone
        else:
            chunks = clients.split(self._block) if len(clients) else ()
        value, slope = self._forgetful.penalised(x)
        for chunk in chunks:
            padded = self._drawn(chunk, round, everyone=clients is None, full=full)
            losses, grads = self._gradients(x, padded)
            if slope is not None:
                losses, grads = losses + value, grads.add_(slope)
            yield Block.of(chunk, grads, losses)

    def groups(self, clients: Tensor) -> Sequence[Tensor]:
        """Return the clients in groups that are computed together."""
        return tuple(clients.split(self._block))

    def batch(self, clients: Tensor, step: int | Tensor, *, everyone: bool) -> Sequence[Tensor]:
        """Return the padded records of the clients of one group in a step."""
        return self._drawn(clients, step, everyone=everyone)[:3]

    def gradients_at(
        self,
        points: Tensor,
        buffers: Buffers,  # noqa: ARG002
        rows: Tensor | slice,  # noqa: ARG002
        batch: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return losses ``[c]`` and gradients at the clients' points ``[c, d]``."""
        losses, grads = self._gradients(points, _Batch(*batch))
        penalty = self._problem.penalty
        if penalty is None:
            return losses, grads
        if type(penalty) is NonconvexPenalty:
            penalties, slopes = penalty.with_gradient(points)
        else:
            with self._state.restored(), RefuseOwnVmapRules(UsageError):
                slopes, penalties = vmap(grad_and_value(penalty))(points)
        return losses + penalties, grads.add_(slopes)

    def _drawn(self, clients: Tensor, round: int | Tensor, *, everyone: bool, full: bool = False) -> _Batch:
        """Return the padded records of a block in a round; `everyone`: the same block is asked for in every round."""
        batches = self._batches
        if batches is not None and not full:
            if self._fixed is not None and (self._all_fill or bool(self._fill[clients].all())):
                if everyone and isinstance(round, int):
                    return self._full_batches(self._ahead_of(clients, self._fixed, round))
                return self._full_batches(self._numbers(clients, self._fixed.table(clients, round)))
            return self._padded(clients, batches.padded(clients, round), self._divisors[clients])
        if not everyone:
            return self._padded(clients, None, self._sizes[clients].double())
        first = int(clients[0])
        if first not in self._whole:
            found = self._padded(clients, None, self._sizes[clients].double())
            self._whole[first] = found if self._clip is None else found._replace(squares=found.inputs.square().sum(-1))
        return self._whole[first]

    def _numbers(self, clients: Tensor, tables: Tensor) -> Tensor:
        """Return the numbers of the clients' records that ``[…, c, B]`` tables of their own numbers name."""
        if tables.is_cuda:
            return self._owned[upload(clients, tables.device)[:, None], tables]
        width = self._owned_on_host.shape[1]
        found = self._owned_on_host.reshape(-1).take(clients.numpy()[:, None] * width + tables.numpy())
        return upload(torch.from_numpy(found), self._owned.device)

    def _ahead_of(self, clients: Tensor, batches: Batches, round: int) -> Tensor:
        """Return the record numbers of batches that are drawn for many rounds at once, which takes less time."""
        first = int(clients[0])
        begun, numbers = self._ahead.get(first, (0, torch.empty(0)))
        if not begun <= round < begun + len(numbers):
            most = max(1, _AHEAD // (len(clients) * int(self._sizes.max())))
            rounds = torch.arange(round, round + min(most, 2 * len(numbers) or 8))
            tables = batches.tables(clients, rounds, self._owned.device if self._owned.is_cuda else None)
            begun, numbers = round, self._numbers(clients, tables)
            self._ahead[first] = (begun, numbers)
        return numbers[round - begun]

    def _full_batches(self, numbers: Tensor) -> _Batch:
        """Return what `_padded` would for batches of equal length, which need no padding."""
        inputs, targets = self._gathered(numbers)
        if self._problem.transform is not None:
            inputs = self._transformed(inputs, torch.full((len(numbers),), numbers.shape[1]))
        return _Batch(inputs.flatten(2).to(self._problem.x0.dtype), targets, self._equal.expand(numbers.shape))

    def _padded(self, clients: Tensor, rows: tuple[Tensor, Tensor] | None, divisors: Tensor) -> _Batch:
        owned = self._owned[clients.to(self._owned.device)]
        if rows is None:
            lengths = self._sizes[clients]
            numbers = owned[:, : int(lengths.max())]
        else:
            table, lengths = rows
            numbers = owned.gather(1, upload(table, owned.device))
        if self._clip is not None:  # one record more or less rarely changes the shape, and with it how sums are rounded
            numbers = F.pad(numbers, (0, -numbers.shape[1] % RECORD_BLOCKS[-1]))
        present = torch.arange(numbers.shape[1], device=owned.device) < upload(lengths, owned.device)[:, None]
        inputs, targets = self._gathered(numbers)
        inputs = self._transformed(inputs, lengths).flatten(2).to(self._problem.x0.dtype)
        if int(lengths.min()) < numbers.shape[1]:  # the table is padded with records of another client
            inputs.masked_fill_(~present[..., None], 0)
        weights = present / divisors.to(inputs.device)[:, None]
        return _Batch(inputs, targets, weights.to(inputs.dtype))

    def _gathered(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the records `numbers` ``[c, B]``; indexing by a table would take longer."""
        inputs, targets, flat = self._records.inputs, self._targets, numbers.flatten()
        inputs = inputs.index_select(0, flat).view(*numbers.shape, *inputs.shape[1:])
        return inputs, targets.index_select(0, flat).view(*numbers.shape, *targets.shape[1:])

    def _transformed(self, inputs: Tensor, lengths: Tensor) -> Tensor:
        """Return records ``[c, B, ...]`` as the model expects them, zero beyond a client's length.

        A transform sees the records of one client; if records are clipped, it sees one record at a time.
        """
        transform = self._problem.transform
        if transform is None:
            return inputs
        if treats_records_alone(transform):
            return transform(inputs.flatten(0, 1)).view(*inputs.shape[:2], -1)
        one: Transform = transform
        if self._clip is not None:
            one = vmap(lambda item: transform(item[None])[0], randomness="different")
        held = self._problem.x0.new_zeros(*inputs.shape[:2], cast(nn.Linear, self._problem.model).in_features)
        with RefuseOwnVmapRules(UsageError) if self._clip is not None else nullcontext():
            for client, length in enumerate(lengths.tolist()):
                if length:
                    with self._state.restored():
                        held[client, :length] = one(inputs[client, :length]).flatten(1)
        return held

    def _gradients(self, x: Tensor, batch: _Batch) -> tuple[Tensor, Tensor]:
        """Return losses and gradients at x, which is ``[d]`` for all clients or ``[c, d]``."""
        inputs, targets, weights, squares = batch
        features = inputs.shape[-1]
        if self._binary:
            logits = inputs @ x if x.ndim == 1 else (inputs @ x[..., None])[..., 0]
            values = F.softplus(logits) - logits * targets
            slopes = (torch.sigmoid(logits) - targets)[..., None]
        else:
            classes = x.shape[-1] // (features + 1)
            matrix = x[..., : classes * features].unflatten(-1, (classes, features))
            # On some processors a product with a transposed view takes ten times as long as with its copy.
            logits = inputs @ matrix.mT.contiguous() + x[..., None, classes * features :]
            logs = F.log_softmax(logits, dim=-1)
            values = -logs.gather(-1, targets[..., None])[..., 0]
            slopes = logs.exp() - F.one_hot(targets, classes)
        shares = shares_of_bias = weights
        if self._clip is not None:
            inner = inputs.square().sum(-1) if squares is None else squares
            # Squares below the normal numbers count as the smallest reliable one, so the norm is never too small.
            outer = (slopes * slopes).sum(-1).clamp_min(smallest_reliable_norm(slopes.dtype) ** 2)
            if self._clip.by_layer and not self._binary:
                shares = weights * self._clip.factors((inner * outer).sqrt(), layers=2)
                shares_of_bias = weights * self._clip.factors(outer.sqrt(), layers=2)
            else:
                shares = weights * self._clip.factors(((inner + (0 if self._binary else 1)) * outer).sqrt())
                shares_of_bias = shares
        weighted = slopes * shares[..., None]
        grads = torch.bmm(weighted.mT, inputs).flatten(1)
        if not self._binary:
            if shares_of_bias is not shares:
                weighted = slopes * shares_of_bias[..., None]
            grads = torch.cat([grads, weighted.sum(1)], dim=1)
        return (values * weights).sum(1), grads
