"""Training across processes: the ranks of a job for `normec.train`, and optimizers for your own training loop.

with normec.distributed.join() as communicator:              under torchrun, or `normec train --processes N`
    run = normec.train(problem, method, …, compute=normec.Compute(communicator=communicator))

optimizer = normec.distributed.NormEC(model.parameters(), lr=0.1, alpha=0.01, beta=0.1)
"""

from __future__ import annotations

from ..errors import RankLost
from .optimizer import ClientOptimizer
from .optimizers import DPSGD, EF21, GD, Clip21, NormEC
from .process_group import join

__all__ = ["DPSGD", "EF21", "GD", "ClientOptimizer", "Clip21", "NormEC", "RankLost", "join"]
