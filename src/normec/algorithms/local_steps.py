"""Local work: a client makes several steps on its own data, and what they amount to takes the gradient's place.

In a round client i starts at the server's model, y⁰ = x, and makes K steps with fresh state:

    sgd    v ← momentum · v + g_j;   y^{j+1} = y^j − lr · v         where g_j = ∇f_i(y^j; ξ_j) + prox · (y^j − x)
    adam   y^{j+1} = y^j − lr · m̂/(√v̂ + 1e-8)                      Kingma and Ba 2015, decay rates 0.9 and 0.999

Its update is (x − y^K)/(K · lr) with scale="gradient": for sgd the mean of the g_j along its path, so that one step is
the gradient. Fed-α-NormEC (arXiv 2512.21521) is NormEC with this update and η = K · lr. With scale="difference" the
update is x − y^K, as federated averaging has it (McMahan et al. 2017; clipped: McMahan et al. 2018); `prox` > 0 is
FedProx (Li et al. 2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..errors import UsageError, at_least, below_one, non_negative, one_of, positive

LocalOptimizer = Literal["sgd", "adam"]
UpdateScale = Literal["gradient", "difference"]
_DECAY, _SQUARE_DECAY, _EPS = 0.9, 0.999, 1e-8  # of Adam, as in torch.optim


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """The local steps of a client in one round. Give `steps`, or `epochs`.

    Args:
        lr: The step size of a local step.
        steps: The number of local steps K.
        epochs: The number of passes over a client's own records, instead of `steps`. A pass has as many steps as the
            client has whole batches, and at least one.
        batch_size: Records per local step (default: the `batch_size` of the run, or all records).
        optimizer: The local optimizer, "sgd" or "adam". Its state is fresh in every round.
        momentum: The momentum of "sgd", as in `torch.optim.SGD`.
        prox: The weight of the proximal term, which pulls a client back towards x (FedProx).
        scale: "gradient" makes the update (x − y^K)/(K · lr), which is comparable with a gradient; "difference" makes
            it x − y^K, for a server with lr = 1.

    Raises:
        UsageError: A value is out of range, or not exactly one of `steps` and `epochs` is given.

    Example:
        >>> import torch
        >>> from normec import GD, Problem, train
        >>> problem = Problem.from_functions([lambda x: (x**2).sum() / 2], torch.ones(2))
        >>> local = LocalSteps(steps=2, lr=0.5, scale="difference")
        >>> train(problem, GD(), lr=1.0, rounds=1, local=local).x  # two steps of gradient descent with step size 0.5
        tensor([0.2500, 0.2500])
    """

    lr: float
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    optimizer: LocalOptimizer = "sgd"
    momentum: float = 0.0
    prox: float = 0.0
    scale: UpdateScale = "gradient"

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UsageError(
                f"give local steps or epochs, one of them, got steps={self.steps} and epochs={self.epochs}"
            )
        given = {"local_steps": self.steps, "local_epochs": self.epochs, "batch_size": self.batch_size}
        at_least(1, **{name: value for name, value in given.items() if value is not None})
        positive(local_lr=self.lr)
        non_negative(prox=self.prox)
        one_of(get_args(LocalOptimizer), local_optimizer=self.optimizer)
        one_of(get_args(UpdateScale), local_scale=self.scale)
        below_one(local_momentum=self.momentum)
        if self.momentum and self.optimizer != "sgd":
            raise UsageError(f"local_momentum is for sgd; {self.optimizer} has its own")

    def counts(self, clients: int, passes: Tensor | None) -> Tensor:
        """The number of steps K_i of every client, ``[n]``; `passes`: how many batches a pass has (None: one)."""
        if self.steps is not None:
            return torch.full((clients,), self.steps)
        return (self.epochs or 0) * (torch.ones(clients, dtype=torch.int64) if passes is None else passes)

    def state(self, like: Tensor) -> dict[str, Tensor]:
        """The state of the local optimizer before the first step, for clients with points like ``[c, d]``."""
        names = ("mean", "square") if self.optimizer == "adam" else ("velocity",) if self.momentum else ()
        return {name: torch.zeros_like(like) for name in names}

    def step(self, moved: Tensor, grads: Tensor, state: dict[str, Tensor], number: int | Tensor) -> None:
        """Step `number` (from 1) of some clients, in place: `moved` is y − x, ``[c, d]``, `grads` are taken at y."""
        slope = grads.add(moved, alpha=self.prox) if self.prox else grads
        if self.optimizer == "adam":
            mean, square = state["mean"], state["square"]
            mean.lerp_(slope, 1 - _DECAY)
            square.mul_(_SQUARE_DECAY).addcmul_(slope, slope, value=1 - _SQUARE_DECAY)
            size = (square / (1 - _SQUARE_DECAY**number)).sqrt_().add_(_EPS)
            moved.addcdiv_(mean / (1 - _DECAY**number), size, value=-self.lr)
            return
        if self.momentum:
            slope = state["velocity"].mul_(self.momentum).add_(slope)
        moved.sub_(slope, alpha=self.lr)

    def update(self, moved: Tensor, counts: Tensor) -> Tensor:
        """The clients' updates, made in place of `moved` = y^K − x; `counts`: their numbers of steps, ``[c]``."""
        if self.scale == "difference":
            return moved.neg_()
        if self.steps is not None:
            return moved.div_(-self.steps * self.lr)
        return moved.div_(-self.lr * counts.to(moved)[:, None])

    def settings(self) -> dict[str, Any]:
        """The settings under the names of configuration files; `batch_size` is the run's."""
        return {
            "local_steps": self.steps,
            "local_epochs": self.epochs,
            "local_lr": self.lr,
            "local_optimizer": self.optimizer,
            "local_momentum": self.momentum,
            "prox": self.prox,
            "local_scale": self.scale,
        }
