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
    """The constants of a problem. `grad_bound` is B ≥ ‖∇f_i(x)‖ for all x and i, infinite if there is none."""

    L_i: Array
    L: float
    F0: float
    grad0: float  # ‖∇f(x⁰)‖
    grad_max: float  # max_i ‖∇f_i(x⁰)‖, the initial error of a memory that starts at zero
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
    """Exact constants of f_i(x) = ½(x − c_i)ᵀH_i(x − c_i): H [n, d, d] symmetric, c [n, d], Σ H_i positive."""
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
