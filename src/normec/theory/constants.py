"""The constants of a problem in the theorems: smoothness L_i, L, L_max, F0 = f(x⁰) − f_inf, and the first gradients.

`problem_constants.constants_of` computes them for a trainable problem.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .argument_checks import Array


@dataclass(frozen=True)
class Constants:
    """The numbers of a problem that the theorems use.

    Args:
        L_i: The smoothness of each f_i, ``[n]``.
        L: The smoothness of f.
        F0: f(x⁰) − f_inf.
        grad0: ‖∇f(x⁰)‖.
        grad_max: max_i ‖∇f_i(x⁰)‖, the error at the start of a memory that starts at zero.
        dim: The dimension of x.
        clients: The number of clients n.
        grad_bound: B ≥ ‖∇f_i(x)‖ for all x and i; infinite if there is none.
        estimated: Whether L and L_i are estimates instead of upper bounds.

    Example:
        >>> import numpy as np
        >>> constants = Constants(np.array([1.0, 3.0]), L=2.0, F0=1.0, grad0=1.5, grad_max=2.0, dim=4, clients=2)
        >>> constants.L_max, round(constants.L_tilde, 3)
        (3.0, 2.236)
    """

    L_i: Array
    L: float
    F0: float
    grad0: float
    grad_max: float
    dim: int
    clients: int
    grad_bound: float = np.inf
    estimated: bool = False

    @property
    def L_max(self) -> float:  # noqa: N802
        return float(self.L_i.max())

    @property
    def L_tilde(self) -> float:  # noqa: N802
        """√(mean L_i²), which EF21 uses."""
        return float(np.sqrt(np.mean(self.L_i**2)))


def quadratic_constants(H: npt.ArrayLike, c: npt.ArrayLike, x0: npt.ArrayLike) -> Constants:
    """The constants of f_i(x) = ½(x − c_i)ᵀH_i(x − c_i); all of them are exact.

    Args:
        H: The matrices H_i, ``[n, d, d]``, symmetric, with a positive definite mean.
        c: The centres c_i, ``[n, d]``.
        x0: The start x⁰, ``[d]``.

    Returns:
        The constants.

    Raises:
        UsageError: The shapes do not fit, or f has no minimum.

    Example:
        >>> constants = quadratic_constants([[[2.0]], [[4.0]]], [[0.0], [0.0]], [1.0])
        >>> constants.L, constants.L_max, constants.F0
        (3.0, 4.0, 1.5)
    """
    matrices, centres = np.asarray(H, dtype=np.float64), np.asarray(c, dtype=np.float64)
    x = np.asarray(x0, dtype=np.float64)
    if matrices.ndim != 3 or centres.shape != matrices.shape[:2] or x.shape != centres.shape[1:]:
        raise UsageError(f"H must be [n, d, d], c [n, d], x0 [d], got {matrices.shape}, {centres.shape}, {x.shape}")
    each = np.abs(np.linalg.eigvalsh(matrices)).max(-1)
    mean = matrices.mean(0)
    spectrum = np.linalg.eigvalsh(mean)
    if spectrum[0] <= 0:
        raise UsageError(f"mean H must be positive definite for f to have a minimum, got eigenvalue {spectrum[0]:.6g}")
    pulled = np.einsum("nij,nj->ni", matrices, centres)
    best = np.linalg.solve(mean, pulled.mean(0))
    grads = np.einsum("nij,nj->ni", matrices, x - centres)
    gap = 0.5 * (x - best) @ mean @ (x - best)
    norms = np.linalg.norm(grads, axis=1)
    first = float(np.linalg.norm(grads.mean(0)))
    return Constants(each, float(np.abs(spectrum).max()), float(gap), first, float(norms.max()), len(x), len(centres))
