"""A fast engine is used once it has reproduced the reference on the problem at hand; otherwise the loop runs.

The results of a run name its engine, and no noise covers that. Therefore a private run compares the two engines on
synthetic records of the same shapes, and an engine that fails later, on the clients' records, stops the run, unless it
needs more memory than there is, which depends on sizes alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..algorithms.operators import norms
from ..errors import UsageError
from ..problems.client_data import ResidentRecords, synthetic
from ..problems.objective import Buffers
from ..problems.problem import Problem
from .engine import Block, Engine, copies_of
from .precision import Precision
from .restored import state_of
from .shared.slots import NoRule

_COMPARED = 3  # clients whose gradients are compared
_CLOSE = 1e-6  # relative, in float64; in float32 a rounding error may move a ReLU over its kink
_ROUGHER, _ROUGH = 3.0, 0.02  # allowed error: a multiple of the loop's error, plus a constant, because roundings differ
_NUDGES = 8
_KEPT_BITS = {"tf32": 10, "bf16": 7}  # of the factors of a product
_SYNTHETIC = 256  # records that replace the clients' records in a private run
_NO_MEMORY = "the device has too little memory for it"

log = logging.getLogger("normec")

# Results of comparisons in this process, so that other runs of the same problem need not compare again.
_verdicts: WeakKeyDictionary[Problem, dict[Hashable, str | None]] = WeakKeyDictionary()


class FastEngine(Engine, Protocol):
    """An engine that can be compared with the reference."""

    @property
    def variant(self) -> str:
        """The engine, with everything else that the bits of its sums depend on."""
        ...

    def shrink(self) -> bool: ...


class ReferenceEngine(Engine, Protocol):
    """The plain loop, or local steps by it."""

    precision: Precision
    divisors: Tensor  # the number of records that each client's gradient is divided by

    @property
    def variant(self) -> str: ...

    def of(self, problem: Problem, precision: Precision = "tf32") -> ReferenceEngine: ...


class VerifiedEngine:
    """The fast engine if it reproduces the loop's gradients; another if it does not, fails, or runs out of memory."""

    def __init__(
        self,
        problem: Problem,
        make: Callable[[Problem, Precision], FastEngine],
        reference: ReferenceEngine,
        kind: Hashable,
        private: bool = False,
        otherwise: Callable[[], VerifiedEngine | ReferenceEngine] | None = None,
        most_records: int | None = None,
        usually_drawn: int | None = None,
    ) -> None:
        """`make` creates the fast engine, and once more for the problem in float64, where the two are compared.

        `kind` is the engine with all its settings; it is compared once per problem. With `private`, the choice of the
        engine must not depend on the clients' data. `otherwise` returns the engine that runs if this one does not; by
        default the reference. In a private run the two are compared on at most `most_records` records of a client, in
        passes over as many clients as are `usually_drawn` (None: all; 0: unknown).
        """
        self._problem, self._make, self._reference, self._kind = problem, make, reference, kind
        self._private, self._most_records, self._usually_drawn = private, most_records, usually_drawn
        self._fast = make(problem, reference.precision)
        self._checked = self._compared = self._proven = False
        self._otherwise = otherwise if otherwise is not None else lambda: reference
        self._engine: FastEngine | ReferenceEngine | VerifiedEngine = self._fast
        self._unreported: str | None = None  # why the loop runs instead, until it has computed something

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def variant(self) -> str:
        return self._engine.variant

    @property
    def threads(self) -> int:
        return self._engine.threads

    @property
    def copies(self) -> Sequence[nn.Module]:
        return copies_of(self._engine)

    def blocks(
        self,
        x: Tensor,
        buffers: Buffers,
        round: int,
        clients: Tensor | None = None,
        *,
        full: bool = False,
        **local: Any,
    ) -> Iterator[Block]:
        """Yield gradients as every engine does; `local` holds arguments for engines of local steps."""
        if not self._checked:
            self._checked = True
            known = _verdicts.setdefault(self._problem, {})
            with state_of(self._problem).restored():  # the loop must find nothing that vmap has left
                reason = known[self._kind] if self._kind in known else self._difference(x, buffers, round, clients)
            if self._compared:
                known[self._kind] = reason
            if reason is not None:
                self._fall_back(reason)
        if self._engine is not self._fast:
            for block in self._engine.blocks(x, buffers, round, clients, full=full, **local):
                self._report()
                yield block
            return
        done: list[Tensor] = []
        while True:
            before = None if self._proven else {name: rows.clone() for name, rows in buffers.items()}
            left = _without(clients, done, len(self._reference.divisors))
            try:
                for block in self._engine.blocks(x, buffers, round, left, full=full, **local):
                    self._report()
                    yield block
                    done.append(block.clients)
                self._proven = True
                return
            except Exception as error:
                if self._engine is not self._fast or isinstance(error, UsageError):
                    raise
                if before is not None:  # undo what the failed pass did to the buffers of the remaining clients
                    again = _without(clients, done, len(self._reference.divisors))
                    for name, rows in buffers.items():
                        rows[again] = before[name][again]
                if not isinstance(error, torch.OutOfMemoryError):
                    if self._private:  # whether the loop runs instead must not depend on the data
                        raise UsageError(
                            f"engine {self._fast.name} failed on the clients' records: {_line(error)}; "
                            "give engine='loop'"
                        ) from error
                    self._fall_back(_line(error))
                elif not self._fast.shrink():
                    self._fall_back(_NO_MEMORY)

    def _fall_back(self, reason: str) -> None:
        self._engine = self._otherwise()
        if not isinstance(self._engine, VerifiedEngine):  # another fast engine is no loss
            self._unreported = reason

    def _report(self) -> None:
        """Log why the loop runs, once it does; where it fails as well, its own error says what is wrong."""
        if self._unreported is not None:
            log.warning("engine %s is not used; the loop runs instead: %s", self._fast.name, self._unreported)
            self._unreported = None

    def _difference(self, x: Tensor, buffers: Buffers, round: int, drawn: Tensor | None) -> str | None:
        """Return why the two do not agree on a few clients of this round, or None."""
        if self._private:  # not those of this round, which may be secret
            most = self._usually_drawn or 0
            drawn = torch.arange(most) if most >= _COMPARED else None
        drawn = drawn if drawn is not None and len(drawn) else None
        clients = _equal_lengths(self._reference.divisors, drawn)
        shown = _synthetic(self._problem, self._most_records) if self._private else self._problem
        fine = shown.to(x.device, torch.float64)
        x = x.double()
        buffers = {name: rows.double() if rows.is_floating_point() else rows for name, rows in buffers.items()}
        try:
            fast, loop = self._make(fine, "float32"), self._reference.of(fine)
            for point in (_near(x), x):
                mine = _fitting(fast, point, buffers, round, clients, clients)
                if self._private or state_of(self._problem):  # what stores what it saw may fail from the second time on
                    mine = _fitting(fast, point, buffers, round, clients, clients)
                theirs = _collected(loop, point, buffers, round, clients, clients)
                if all(bool(torch.isfinite(part).all()) for part in theirs):
                    reason = _unlike(mine, theirs) or self._inaccuracy(shown, x, buffers, round, clients, drawn, loop)
                    self._compared = True
                    return reason
        except UsageError:
            return None  # a mistake in the problem, which the run will report
        except torch.OutOfMemoryError:
            return _NO_MEMORY
        except Exception as error:  # the model cannot be batched, or cannot run in float64
            self._compared = isinstance(error, NoRule)
            return _line(error)
        return None  # a run that diverges at its start is not the engine's fault

    def _inaccuracy(
        self,
        shown: Problem,
        x: Tensor,
        buffers: Buffers,
        round: int,
        clients: Tensor,
        drawn: Tensor | None,
        fine: ReferenceEngine,
    ) -> str | None:
        """Return why the engine is too inaccurate in the precision in which it will run, or None.

        A GPU uses other kernels for float32 and half precisions than for float64. Their gradients may be as far from
        the gradients in float64 as those of the loop in the same precision, and a little farther; or as far as
        rounding x to that precision moves the gradients: if TF32 is allowed, the loop may get kernels that do not use
        it, and in half precision it depends on the order of a sum whether a ReLU is moved over its kink. The choice of
        kernels may depend on the number of clients, so the few clients are compared in a pass over all that are drawn.
        """
        if not x.is_cuda:
            return None
        at = x.to(self._problem.x0.dtype)
        exact = _collected(fine, x, buffers, round, clients, clients)[0]
        own = {
            name: rows.to(self._problem.x0.dtype) if rows.is_floating_point() else rows
            for name, rows in buffers.items()
        }
        fast, reference, precision = self._fast, self._reference, self._reference.precision
        if shown is not self._problem:
            fast, reference = self._make(shown, precision), reference.of(shown, precision)
        mine = _fitting(fast, at, own, round, clients, drawn)[0]
        theirs = [_collected(reference, at, own, round, clients, clients)[0]]
        if precision in _KEPT_BITS:
            points = nudged(x, _KEPT_BITS[precision])
            theirs += [_collected(fine, point, buffers, round, clients, clients)[0] for point in points]
        return too_rough(mine, theirs, exact)


def _synthetic(problem: Problem, most: int | None) -> Problem:
    """Return a copy of the problem with records of the same shapes that reveal nothing about the clients' records.

    A client has as many of them as records of its own, and at most `most`.
    """
    made, held = problem.to(problem.x0.device), problem.records
    if not isinstance(held, ResidentRecords):
        raise TypeError("fast engines need records in tensors")
    draw = torch.Generator().manual_seed(0)
    inputs, targets = (synthetic(part, _SYNTHETIC, draw) for part in (held.inputs, held.targets))
    made.records = ResidentRecords(inputs, targets, [rows[:most] % _SYNTHETIC for rows in held.rows])
    made.sizes = made.records.sizes
    return made


def too_rough(mine: Tensor, theirs: Sequence[Tensor], exact: Tensor) -> str | None:
    """Return a reason if a row of `mine` is much farther from the exact gradients than all of `theirs`, else None."""
    scale = norms(exact).clamp_min(1e-30)
    off, *others = (norms(found.double() - exact) / scale for found in (mine, *theirs))
    usual = torch.stack(others).amax(0)
    if bool((off <= _ROUGHER * usual + _ROUGH).all()):
        return None
    most, least = 100 * float(off.max()), 100 * float(usual.max())
    return f"its gradients are off by {most:.0f} %, those of the loop in this precision by {least:.0f} %"


def nudged(x: Tensor, bits: int) -> Iterator[Tensor]:
    """Yield points that differ from x by up to 2^-bits of every number, as if the numbers kept that many bits."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(_NUDGES):
        yield x * (1 + 2**-bits * (2 * torch.rand(len(x), dtype=x.dtype, generator=draw).to(x.device) - 1))


def _equal_lengths(lengths: Tensor, drawn: Tensor | None) -> Tensor:
    """Return a few clients with batches of the most common length; only such batches pass through a model together."""
    chosen = drawn.cpu() if drawn is not None else torch.arange(len(lengths))
    found, counts = lengths[chosen].unique(return_counts=True)
    same: Tensor = chosen[lengths[chosen] == found[counts.argmax()]][:_COMPARED]
    return same.sort().values


def _near(x: Tensor) -> Tensor:
    """Return a point near x.

    At x itself two errors would be hidden: a parameter that bypasses the engine has the right value there, and a
    parameter that is multiplied by an initial zero has the right gradient.
    """
    noise = torch.randn(len(x), dtype=x.dtype, generator=torch.Generator().manual_seed(0)).to(x.device)
    return x + (1e-3 + 0.1 * x.square().mean().sqrt()) * noise


def _unlike(mine: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> str | None:
    for name, one, other in zip(("gradients", "losses", "buffers"), mine, theirs, strict=True):
        if not bool((one - other).norm() <= _CLOSE * other.norm() + 1e-12):
            return f"its {name} differ from the reference on this model"
    return None


def _fitting(
    engine: FastEngine, x: Tensor, buffers: Buffers, round: int, clients: Tensor, among: Tensor | None
) -> tuple[Tensor, ...]:
    """Return `_collected`, with blocks as small as the memory requires."""
    while True:
        try:
            return _collected(engine, x, buffers, round, clients, among)
        except torch.OutOfMemoryError:
            if not engine.shrink():
                raise


def _collected(
    engine: Engine, x: Tensor, buffers: Buffers, round: int, clients: Tensor, among: Tensor | None
) -> tuple[Tensor, ...]:
    """Return gradients, losses and buffers of a few clients, from a pass over the clients `among` (None: all)."""
    scratch = {name: rows.clone() for name, rows in buffers.items()}
    grads, losses = x.new_zeros(len(clients), len(x)), x.new_zeros(len(clients))
    left = len(clients)
    for block in engine.blocks(x, scratch, round, among):
        own = torch.isin(block.clients, clients).nonzero()[:, 0]
        at, rows = (part.to(x.device) for part in (torch.searchsorted(clients, block.clients[own]), own))
        grads[at], losses[at] = block.grads[rows], block.losses[rows]
        left -= len(own)
        if not left:
            break
    held = [rows[clients.to(x.device)].flatten().to(x.dtype) for rows in scratch.values()]
    return grads, losses, torch.cat(held) if held else x.new_zeros(1)


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _without(clients: Tensor | None, done: list[Tensor], n: int) -> Tensor | None:
    if not done:
        return clients
    everyone = torch.arange(n) if clients is None else clients
    return everyone[~torch.isin(everyone, torch.cat(done))]
