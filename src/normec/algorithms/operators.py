"""Operators Ψ, which clients apply before they send: bounded (normalise, clip) or sparse (Top-k, Rand-k).

An operator is a pure function on flat tensors ``[..., d]`` of any float dtype; leading dimensions are independent
vectors. It states three facts about itself:

``bound``
    sup ‖Ψ(v)‖ over all v, on which a privacy guarantee is based (``inf`` if there is none).
``scale(norm)``
    The factor s with Ψ(v) = s(‖v‖) v, if Ψ has this form. Messages, their sum and the new memories then take two
    passes over the gradients and no table of messages (see `training.fused_update`).
``contraction(norm, dim)``
    The largest ‖Ψ(v) − v‖ / ‖v‖ over vectors of that norm and dimension (the paper's Table 1), on which error feedback
    is based.

Every normalisation uses 0/0 = 0, so a zero vector causes neither an error nor NaN. A norm whose square leaves the
normal range of its dtype (below 3e-16 in float32) counts as zero, because a quotient of rounded values could exceed the
bound; a norm that overflows gives the zero vector. Both keep the bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from ..errors import UsageError, at_least, non_negative, positive
from ..sampling.random_streams import Key


class Operator(Protocol):
    """The interface of an operator Ψ. `key` holds the random numbers of a call; deterministic operators ignore it."""

    @property
    def bound(self) -> float: ...

    def __call__(self, v: Tensor, key: Key | None = None) -> Tensor: ...

    def scale(self, norm: Tensor) -> Tensor | None:
        """Return s with Ψ(v) = s v for every v of that norm; None if Ψ does more than scale."""
        ...

    @property
    def lipschitz(self) -> float:
        """The Lipschitz constant of Ψ if Ψ is the gradient of a convex function, else inf; for record-level privacy."""
        ...

    def contraction(self, norm: float, dim: int) -> float: ...

    def payload(self, dim: int, itemsize: int) -> int:
        """Return the size in bytes of a message of dimension `dim`."""
        ...


_BLOCK = 512  # coordinates whose squares are added up one after another
_LEAST_ALPHA = 1e-15  # above the smallest reliable norm of float32


def norms(v: Tensor) -> Tensor:
    """‖v‖ over the last dimension, kept as size 1; half precisions are summed in float32.

    On a CPU torch adds up squares one after another, and in float32 a long sum loses what is small beside it: by 2 % of
    ten million coordinates, and all that follow the first 2^26 equal ones. A norm that is too small makes a message too
    long. So the squares are added up in blocks, and the blocks in float64: the relative error stays below 1e-5. On a
    GPU torch divides a sum among many threads: of up to 2^30 coordinates, the largest measured error is 2e-6.
    """
    dtype = torch.float32 if v.dtype in (torch.float16, torch.bfloat16) else v.dtype
    whole = v.shape[-1] // _BLOCK * _BLOCK
    found: Tensor
    if v.device.type != "cpu" or dtype != torch.float32 or whole <= _BLOCK:
        found = torch.linalg.vector_norm(v, dim=-1, keepdim=True, dtype=dtype)
        return found
    blocks = torch.linalg.vector_norm(v[..., :whole].unflatten(-1, (-1, _BLOCK)), dim=-1, dtype=dtype)
    rest = torch.linalg.vector_norm(v[..., whole:], dim=-1, keepdim=True, dtype=dtype)
    together = torch.cat([blocks, rest], dim=-1)
    found = torch.linalg.vector_norm(together, dim=-1, keepdim=True, dtype=torch.float64)
    return found.to(dtype)


def normalise(v: Tensor, alpha: float = 0.0) -> Tensor:
    """Return v / (α + ‖v‖) with 0/0 = 0."""
    return _scaled(v, SmoothedNorm(alpha).scale)


def _scaled(v: Tensor, scale: Callable[[Tensor], Tensor]) -> Tensor:
    length = norms(v)
    return (v.to(length.dtype) * scale(length)).to(v.dtype)


@cache
def smallest_reliable_norm(dtype: torch.dtype) -> float:
    """Return the smallest norm whose square is in the normal range; smaller norms are not accurate."""
    limits = torch.finfo(dtype)
    return math.sqrt(limits.tiny / limits.eps)


class Scaling:
    """An operator that multiplies a vector by a function of its norm; `scale` alone defines it.

    Only operators that inherit this `__call__` take the fused path, which never calls it. An operator with its own
    `__call__` is called, whatever its `scale` says.
    """

    def __call__(self, v: Tensor, key: Key | None = None) -> Tensor:  # noqa: ARG002
        return _scaled(v, self.scale)

    def scale(self, norm: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} defines no scale")

    def payload(self, dim: int, itemsize: int) -> int:
        return dim * itemsize


def check_operator(operator: object) -> None:
    """Raise `UsageError` if an argument is no operator, such as the threshold of one."""
    if isinstance(operator, type) or not callable(operator) or not hasattr(operator, "bound"):
        given = f"the class {operator.__name__}" if isinstance(operator, type) else repr(operator)
        raise UsageError(f"the operator must be an object such as Clip(1.0) or SmoothedNorm(0.01), got {given}")


def defined_by_scale(operator: Operator) -> bool:
    """Whether `operator(v)` is `operator.scale(norm) * v` by definition, not only by the operator's claim."""
    return isinstance(operator, Scaling) and type(operator).__call__ is Scaling.__call__


def claim_covers(thing: object, claim: str, *functions: str) -> bool:
    """Whether `claim`, an attribute of a method or an operator, was stated by a class that has these functions.

    False if a subclass, or the object itself, redefines one of the functions and inherits the claim.
    """
    classes = type(thing).__mro__

    def depth(name: str) -> int:
        return next((depth for depth, kind in enumerate(classes) if name in vars(kind)), len(classes))

    own = getattr(thing, "__dict__", {})  # an object with slots has none
    return all(name not in own and depth(claim) <= depth(name) for name in functions)


def proven_lipschitz(operator: Operator) -> float:
    """Return the operator's `lipschitz`, or inf if the constant was stated for another map than this one."""
    return operator.lipschitz if claim_covers(operator, "lipschitz", "__call__", "scale") else math.inf


@dataclass(frozen=True)
class SmoothedNorm(Scaling):
    """Smoothed normalisation, Norm_α(v) = v / (α + ‖v‖), eq. (5) of the paper.

    Lemma 1: ‖Norm_α(v)‖ ≤ 1 and, exactly, ‖v − β Norm_α(v)‖² = (1 − β/(α+‖v‖))² ‖v‖².

    Args:
        alpha: The smoothing; 0 is plain normalisation.

    Raises:
        UsageError: `alpha` is negative or not finite.

    Example:
        >>> import torch
        >>> SmoothedNorm(5.0)(torch.tensor([3.0, 4.0]))
        tensor([0.3000, 0.4000])
    """

    alpha: float

    def __post_init__(self) -> None:
        non_negative(alpha=self.alpha)

    @property
    def bound(self) -> float:
        return 1.0

    def scale(self, norm: Tensor) -> Tensor:
        length = self.alpha + norm if self.alpha else norm
        least = smallest_reliable_norm(length.dtype)
        if self.alpha >= least:
            return length.reciprocal()
        return torch.threshold(length, least, math.inf).reciprocal()  # NaN stays visible

    @property
    def lipschitz(self) -> float:
        """1/α: Norm_α is the gradient of ‖v‖ − α ln(1 + ‖v‖/α).

        Below 1e-15 no constant is stated, because norms that are too small for float32 count as zero (`scale`), and
        the message jumps there.
        """
        return 1 / self.alpha if self.alpha >= _LEAST_ALPHA else math.inf

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        return abs(1 - 1 / (self.alpha + norm)) if self.alpha + norm > 0 else 1.0


@dataclass(frozen=True)
class Clip(Scaling):
    """Clipping, Clip_τ(v) = min(1, τ/‖v‖) v, eq. (4). ‖Clip_τ(v)‖ ≤ τ; ‖Clip_τ(v) − v‖ = max(0, ‖v‖ − τ).

    Args:
        tau: The threshold.

    Raises:
        UsageError: `tau` is not positive and finite.

    Example:
        >>> import torch
        >>> Clip(1.0)(torch.tensor([3.0, 4.0]))
        tensor([0.6000, 0.8000])
    """

    tau: float

    def __post_init__(self) -> None:
        positive(tau=self.tau)

    @property
    def bound(self) -> float:
        return self.tau

    def scale(self, norm: Tensor) -> Tensor:
        factor = (self.tau / norm).clamp(max=1.0)  # τ/0 = inf, clamped to 1
        if self.tau < (least := smallest_reliable_norm(norm.dtype)):  # then only 0 is certainly within τ
            factor = factor.masked_fill(norm < least, 0.0)
        return factor

    @property
    def lipschitz(self) -> float:
        """1: clipping is the projection onto a ball."""
        return 1.0

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        return max(0.0, 1 - self.tau / norm) if norm > 0 else 0.0


@dataclass(frozen=True)
class _Sparse:
    k: int

    def __post_init__(self) -> None:
        at_least(1, k=self.k)
        object.__setattr__(self, "k", int(self.k))  # NumPy's numbers become Python's, for files

    @property
    def bound(self) -> float:
        return math.inf

    def scale(self, norm: Tensor) -> None:  # noqa: ARG002
        return None

    @property
    def lipschitz(self) -> float:
        return math.inf

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        """√(1 − k/d): the contractive compressor of Table 1 with η = 1 − √(1 − k/d)."""
        self._fits(dim)
        return math.sqrt(1 - self.k / dim)

    def payload(self, dim: int, itemsize: int) -> int:
        self._fits(dim)
        return self.k * (itemsize + 4)  # a value and a 32-bit index for each coordinate kept

    def _keep(self, v: Tensor, score: Tensor) -> Tensor:
        kept = score.topk(self.k, dim=-1).indices
        return torch.zeros_like(v).scatter(-1, kept, v.gather(-1, kept))

    def _fits(self, dim: int) -> None:
        if self.k > dim:
            raise UsageError(f"k must be at most the dimension {dim}, got {self.k}")


@dataclass(frozen=True)
class TopK(_Sparse):
    """Keeps the k coordinates of largest magnitude: ‖Top_k(v) − v‖² ≤ (1 − k/d) ‖v‖².

    Ties are broken as the device's top-k does, so a CPU and a GPU may keep different coordinates of equal magnitude.

    Args:
        k: How many coordinates are kept.

    Raises:
        UsageError: `k` is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> TopK(1)(torch.tensor([1.0, -3.0, 2.0]))
        tensor([ 0., -3.,  0.])
    """

    def __call__(self, v: Tensor, key: Key | None = None) -> Tensor:  # noqa: ARG002
        self._fits(v.shape[-1])
        return self._keep(v, v.abs())


@dataclass(frozen=True)
class RandK(_Sparse):
    """Keeps k coordinates drawn uniformly, unscaled: E‖Rand_k(v) − v‖² = (1 − k/d) ‖v‖².

    The unbiased form multiplies by d/k; scaled back by k/d it is this contractive form. The contraction holds in
    expectation over `key` (torch's global generator if no key is given).

    Args:
        k: How many coordinates are kept.

    Raises:
        UsageError: `k` is not a whole number of at least 1.

    Example:
        >>> import torch
        >>> int(RandK(2)(torch.ones(5)).sum())
        2
    """

    def __call__(self, v: Tensor, key: Key | None = None) -> Tensor:
        self._fits(v.shape[-1])
        return self._keep(v, torch.rand_like(v, dtype=torch.float64) if key is None else key.uniform(v))


@dataclass(frozen=True)
class Identity(Scaling):
    """Sends v itself: unbounded, exact.

    Example:
        >>> import torch
        >>> Identity()(torch.tensor([3.0, 4.0]))
        tensor([3., 4.])
    """

    @property
    def bound(self) -> float:
        return math.inf

    def scale(self, norm: Tensor) -> Tensor:
        return torch.ones_like(norm)

    @property
    def lipschitz(self) -> float:
        return 1.0

    def contraction(self, norm: float, dim: int) -> float:  # noqa: ARG002
        return 0.0


OPERATORS: dict[str, type] = {kind.__name__: kind for kind in (SmoothedNorm, Clip, TopK, RandK, Identity)}


def supports_cuda_graphs(operator: Operator) -> bool:
    """Whether a CUDA graph may replace the operator; a graph repeats kernels, not the Python code of a subclass."""
    return type(operator) in (SmoothedNorm, Clip, Identity)
