"""The constants of a trainable problem, computed from its model and its records.

Linear models have constants in closed form, which are safe upper bounds. With A_i the client's m_i records as rows (and
a column of ones where the model has a bias), and λΣx²/(1+x²) of smoothness 2λ as penalty:

    logistic  L_i = λ_max(A_iᵀA_i)/(4 m_i) + 2λ        the slope of the sigmoid is at most 1/4
    softmax   L_i = λ_max(A_iᵀA_i)/(2 m_i) + 2λ        ‖diag(p) − ppᵀ‖ is at most 1/2
    L         the same of (1/n) Σ A_iᵀA_i/m_i          at most mean L_i, at most L_max

Everything else is estimated: the largest |eigenvalue| of the Hessian at x⁰, by power iteration. That is a value at
one point, approached from below, and not a bound; `estimated` says so, and a bound computed from it is no guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import UsageError
from ..gradients.choice import choose_engine
from ..gradients.linear import fits
from ..gradients.loop import state_of_objective
from ..models import Logistic, NonconvexPenalty, binary_loss
from ..problems.client_data import ResidentRecords
from ..problems.objective import Objective
from ..problems.problem import Problem
from .argument_checks import Array
from .constants import Constants

WIDEST = 4000  # features up to which L is an eigenvalue of one matrix; beyond, the mean of the L_i
MOST_ESTIMATED = 1000  # clients whose Hessians are estimated one by one
STEEPEST = 3 * np.sqrt(3) / 8  # the largest slope of x²/(1+x²)


def constants_of(problem: Objective, *, lower: float | None = None, iterations: int = 30) -> Constants:
    """The constants of `problem`: in closed form for logistic and softmax regression, and otherwise estimated.

    Args:
        problem: The problem.
        lower: A number that f never falls below. The default, 0, is for cross-entropy and squared errors; any other
            loss needs a number.
        iterations: The number of power iterations of an estimate.

    Returns:
        The constants.

    Raises:
        UsageError: `lower` is missing, or above f(x⁰), or an estimate is asked for with more than 1000 clients.

    Example:
        >>> problem = Problem.from_functions([lambda x: (x**2).sum()], torch.ones(3, dtype=torch.float64))
        >>> constants = constants_of(problem, lower=0.0)
        >>> round(constants.L, 6), constants.F0, constants.estimated
        (2.0, 3.0, True)
    """
    problem = problem.to(problem.x0.device, torch.float64)
    # A later private run must find nothing that was seen here.
    with state_of_objective(problem).restored():
        return _constants(problem, lower, iterations)


def _constants(problem: Objective, lower: float | None, iterations: int) -> Constants:
    loss0, grad0, grad_max = _start(problem)
    if lower is None:
        if not isinstance(problem, Problem) or problem.loss not in (F.cross_entropy, binary_loss, F.mse_loss):
            raise UsageError("lower must be given: a number that f never falls below (0 for a loss that is never < 0)")
        lower = 0.0
    if lower > loss0:
        raise UsageError(f"lower must be at most f(x0) = {loss0:.6g}, got {lower}")
    weight = penalty_weight(problem)
    bound = np.inf
    if (
        isinstance(problem, Problem)
        and fits(problem)
        and isinstance(problem.records, ResidentRecords)
        and weight is not None
    ):
        each, whole, slopes = _linear(problem)
        each, whole, estimated = each + 2 * weight, whole + 2 * weight, False
        bound = slopes + weight * STEEPEST * float(np.sqrt(len(problem.x0)))
    else:
        each, whole, estimated = _estimated(problem, iterations)
    return Constants(
        each, whole, loss0 - lower, grad0, grad_max, len(problem.x0), problem.clients, bound, estimated
    )  # fmt: skip


def penalty_weight(problem: Objective) -> float | None:
    """λ of the penalty λΣx²/(1+x²), 0 without one; None for another penalty."""
    penalty: Callable[[Tensor], Tensor] | None = getattr(problem, "penalty", None)
    if penalty is None:
        return 0.0
    return penalty.weight if isinstance(penalty, NonconvexPenalty) else None


def _start(problem: Objective) -> tuple[float, float, float]:
    """f(x⁰), ‖∇f(x⁰)‖ and max‖∇f_i(x⁰)‖."""
    engine = choose_engine("auto", problem, None, 0)
    total, loss, largest = torch.zeros_like(problem.x0), 0.0, 0.0
    for block in engine.blocks(problem.x0, problem.initial_buffers(), 0):
        total += block.grads.sum(0)
        loss += float(block.losses.sum())
        largest = max(largest, float(block.grads.norm(dim=1).max()))
    return loss / problem.clients, float(total.norm()) / problem.clients, largest


def _linear(problem: Problem) -> tuple[Array, float, float]:
    """L_i and L without the penalty, and the bound on gradients without it."""
    binary = isinstance(problem.model, Logistic)
    curve = 0.25 if binary else 0.5
    each, slopes, mean = [], [], None
    for client in range(problem.clients):
        inputs, _ = problem.records.batch(client, None)
        if problem.transform is not None:
            inputs = problem.transform(inputs)
        rows = inputs.flatten(1).double()
        if not binary:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        slopes.append(float(rows.norm(dim=1).mean()) * (1 if binary else np.sqrt(2)))
        wide = rows.shape[1] > WIDEST
        gram = (rows @ rows.T if wide or len(rows) < rows.shape[1] else rows.T @ rows) / len(rows)
        each.append(curve * float(torch.linalg.eigvalsh(gram)[-1]))
        if not wide:
            whole = gram if gram.shape[0] == rows.shape[1] and len(rows) >= rows.shape[1] else rows.T @ rows / len(rows)
            mean = whole / problem.clients if mean is None else mean + whole / problem.clients
    safe = 1 + 1e-9  # an eigenvalue is computed to about 1e-15
    smooth = np.asarray(each) * safe
    together = curve * float(torch.linalg.eigvalsh(mean)[-1]) * safe if mean is not None else float(smooth.mean())
    return smooth, min(together, float(smooth.mean())), float(max(slopes))


def _estimated(problem: Objective, iterations: int) -> tuple[Array, float, bool]:
    if problem.clients > MOST_ESTIMATED:
        raise UsageError(
            f"L_i is estimated from the Hessian of each client, for at most {MOST_ESTIMATED} clients, got "
            f"{problem.clients}; use fewer clients, or a linear model, whose constants are computed"
        )
    clients = range(problem.clients)
    each = np.asarray([_curvature(problem, [client], iterations) for client in clients])
    return each, min(_curvature(problem, list(clients), iterations), float(each.mean())), True


def _curvature(problem: Objective, clients: list[int], iterations: int) -> float:
    """The largest |eigenvalue| of the mean Hessian of `clients` at x⁰, by power iteration."""
    draw = torch.Generator().manual_seed(0)
    direction = torch.randn(len(problem.x0), generator=draw, dtype=torch.float64).to(problem.x0)
    direction /= direction.norm()
    found = 0.0
    for _ in range(iterations):
        product = torch.zeros_like(direction)
        for client in clients:
            point = problem.x0.detach().clone().requires_grad_()
            buffers: dict[str, Any] = {name: rows[client] for name, rows in problem.initial_buffers().items()}
            loss = problem.client_loss(point, client, None, buffers, None)
            if not loss.requires_grad:
                continue
            (slope,) = torch.autograd.grad(loss, point, create_graph=True)
            if slope.requires_grad:
                product += torch.autograd.grad(slope @ direction, point)[0] / len(clients)
        length = float(product.norm())
        if length <= 1e-300:
            return max(found, 1e-12)
        if abs(length - found) < 1e-6 * length:
            return length
        found, direction = length, product / length
    return found
