"""The same problem twice: in NumPy, for the reference, and as normec's own."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from normec import Problem
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


PROBLEMS = {"quadratics": quadratics, "logistic": logistic}
