"""The same problem twice: in NumPy, for the reference, and as normec's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from normec import Problem
from normec.problems.functions import FunctionProblem
from normec.problems.objective import Objective

from .reference import Logistic, Quadratics


@cache
def quadratics(seed: int) -> tuple[Quadratics, Objective]:
    """Five clients that disagree, d = 8."""
    generator = np.random.default_rng(seed)
    n, d = 5, 8
    roots = generator.normal(size=(n, d, d)) / np.sqrt(d)
    f = Quadratics(roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(d), generator.normal(size=(n, d)) * 3)
    A, b = torch.tensor(f.A), torch.tensor(f.b)
    functions = [lambda x, i=i: x @ A[i] @ x / 2 - b[i] @ x for i in range(n)]
    return f, Problem.from_functions(functions, torch.tensor(generator.normal(size=d)))


@cache
def logistic(seed: int) -> tuple[Logistic, Objective]:
    """Four clients of different sizes and label shares, d = 6, λ = 0.1."""
    generator = np.random.default_rng(seed)
    sizes, d = [5, 12, 30, 17], 6
    a = [generator.normal(size=(m, d)) + 0.3 * i for i, m in enumerate(sizes)]
    y = [np.where(generator.random(m) < 0.2 + 0.2 * i, 1.0, -1.0) for i, m in enumerate(sizes)]
    model = nn.Linear(d, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor(generator.normal(size=(1, d))))
    problem = Problem(
        model,
        lambda outputs, targets: nn.functional.softplus(-targets * outputs[:, 0]).mean(),
        [TensorDataset(torch.tensor(rows), torch.tensor(labels)) for rows, labels in zip(a, y, strict=True)],
        penalty=lambda x: 0.1 * (x**2 / (1 + x**2)).sum(),
    )
    return Logistic(a, y, 0.1), problem


def shifted(alike: bool = False) -> tuple[Logistic, FunctionProblem]:
    """Five clients with six records each, whose inputs lie apart unless they are `alike`; d = 7, λ = 0.01, x⁰ = 0."""
    draw = np.random.default_rng(4)
    n, records, d = 5, 6, 7
    a = [draw.normal(size=(records, d)) + i for i in range(n)]
    y = [np.sign(draw.normal(size=records)) for _ in range(n)]
    f = Logistic([a[0]] * n if alike else a, [y[0]] * n if alike else y, 0.01)

    def loss(i: int) -> Callable[[Tensor], Tensor]:
        inputs, signs = torch.from_numpy(f.a[i]), torch.from_numpy(f.y[i])
        return lambda x: nn.functional.softplus(-signs * (inputs @ x)).mean() + f.lam * (x**2 / (1 + x**2)).sum()

    return f, Problem.from_functions([loss(i) for i in range(n)], torch.zeros(d, dtype=torch.float64))


PROBLEMS = {"quadratics": quadratics, "logistic": logistic}
