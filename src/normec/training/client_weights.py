"""The clients' weights: f(x) = Σ w_i f_i(x) with public w_i > 0 and Σ w_i = 1.

A round uses the relative weights n·w_i, whose mean is one. The server divides Σ (n·w_i) m_i by n, so that equal weights
are the plain mean, and a client that does not take part counts as zero. With error feedback ĝ = Σ w_i g_i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..errors import UsageError, one_of
from ..problems.objective import Objective

if TYPE_CHECKING:
    from ..privacy.statement import Privacy

Weights = Literal["equal", "records"] | Sequence[float] | Tensor
KINDS = ("equal", "records")
SUM_TOLERANCE = 1e-6  # by which the sum of given weights may miss 1: they are then scaled


def relative_weights(
    given: Weights, problem: Objective, privacy: Privacy | None = None, public_sizes: bool = False
) -> Tensor | None:
    """Return the numbers n·w_i by which a run multiplies its clients' messages; None if all are equal.

    Args:
        given: "equal", "records" (w_i is client i's share of all records), or the numbers w_i.
        problem: The clients.
        privacy: The privacy statement; None for a run without noise.
        public_sizes: Whether the caller declares the numbers of records public.

    Returns:
        A float64 vector with one number per client, whose mean is 1, or None.

    Raises:
        UsageError: The weights are not n positive numbers with the sum 1, the clients have no records to count, or the
            weights would show how many records a protected client holds.

    Example:
        >>> import torch
        >>> from normec import Problem
        >>> problem = Problem.from_functions([torch.sum, torch.sum], torch.zeros(1))
        >>> relative_weights([0.75, 0.25], problem)
        tensor([1.5000, 0.5000], dtype=torch.float64)
        >>> relative_weights("equal", problem) is None
        True
    """
    if isinstance(given, str):
        one_of(KINDS, weights=given)
        if given == "equal":
            return None
        if privacy is not None:
            privacy.refuse_private_sizes(public_sizes, "weights")
        if problem.sizes is None:
            raise UsageError("weights='records' needs records to count; plain functions have none: give the numbers")
        weights = _by_records(problem.sizes)
    else:
        weights = checked_weights(given, problem.clients)
    if privacy is not None and problem.sizes is not None and _shows_sizes(weights, problem.sizes):
        privacy.refuse_private_sizes(public_sizes, "weights")
    return None if bool((weights == weights[0]).all()) else weights


def checked_weights(given: Sequence[float] | Tensor, clients: int) -> Tensor:
    """Return given weights w_i as n·w_i; raises `UsageError` unless they are n positive numbers with the sum 1."""
    try:
        weights = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(f"weights must be 'equal', 'records' or {clients} numbers, got {given!r}") from None
    if weights.shape != (clients,):
        raise UsageError(f"weights must be one number for each of the {clients} clients, got {list(weights.shape)}")
    if not bool((torch.isfinite(weights) & (weights > 0)).all()):
        raise UsageError(
            f"weights must be positive and finite, got {weights.min():g} to {weights.max():g}; leave out a client that "
            "should not count"
        )
    total = math.fsum(weights.tolist())  # the same on every machine
    if abs(total - 1) > SUM_TOLERANCE:
        raise UsageError(f"weights must have the sum 1, got {total:.6g}; divide them by their sum")
    return weights * (clients / total)


def _by_records(sizes: Tensor) -> Tensor:
    counts = sizes.to("cpu", torch.float64)
    return counts * len(counts) / counts.sum()


def _shows_sizes(weights: Tensor, sizes: Tensor) -> bool:
    """Whether the weights are the clients' shares of the records, however they were given."""
    shares = _by_records(sizes)
    return bool((shares != shares[0]).any()) and torch.allclose(weights, shares, rtol=1e-6, atol=0.0)
