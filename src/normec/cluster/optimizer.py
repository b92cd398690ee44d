"""A method as a `torch.optim.Optimizer`: each rank hosts clients, sends bounded messages, keeps their memories.

    for inputs, targets in loader:                  this rank's own data
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()  no DDP: the gradient stays here
        optimizer.step()                            one all-reduce of d numbers

It replaces SGD under DDP. Every rank holds the same x, begun from rank 0's; what differs is its clients' memories, so
every rank saves its own `state_dict`. The steps are `Method`'s, as in the round loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from .. import methods
from ..errors import Diverged, UsageError, at_least, non_negative
from ..measure import ROUNDING
from ..methods import Method
from ..operators import norms
from ..privacy.statement import Privacy
from ..streams import Key, Stream
from ..world import Alone, World, agree
from .flat import Flat
from .joining import meeting
from .private import Noise
from .ranks import Ranks

FORMAT = 1
_BROKEN = 2**61  # in a sum of whole numbers, which has no NaN: far above any sum of messages and noise


class ClientOptimizer(Optimizer):
    """One generic optimizer over a `Method`; `cluster.NormEC` and its like are its short names."""

    def __init__(
        self,
        params: Iterable[Any],
        method: Method,
        lr: float,
        *,
        clients: int = 1,
        privacy: Privacy | None = None,
        rounds: int | None = None,
        ledger: str | Path | None = None,
        seed: int = 0,
    ) -> None:
        """`clients`: how many this rank hosts, the same on every rank; see `add_client`.

        With `privacy` every message leaves this rank with noise, calibrated for `rounds` steps, and paid for in the
        file `ledger` on rank 0. Collective: all ranks make their optimizer at the same point.
        """
        non_negative(lr=lr)
        at_least(1, clients=clients)
        at_least(0, seed=seed)
        methods.refuse_unused_overrides(method)
        self._ready = False
        super().__init__(params, {"lr": lr})
        self.method, self._seed = method, seed
        self._flat = Flat(self.param_groups)
        device = self._flat.like.device
        self.world: World = Ranks(device, meeting()) if dist.is_available() and dist.is_initialized() else Alone()
        self._agree(clients, privacy, rounds)
        self.n = clients * self.world.size
        self._clients = torch.arange(clients) + clients * self.world.rank
        d = self._flat.dimension
        self._memory = self._flat.like.new_zeros(clients, d) if method.feedback else self._flat.like.new_zeros(1, d)
        self._estimate = self._flat.like.new_zeros(d)
        self._grads = self._flat.like.new_zeros(clients, d)
        self._taken = 0
        self.round = 0
        self._noise = Noise(privacy, method, self.n, d, rounds, seed, self.world, ledger) if privacy else None
        with torch.no_grad():  # all begin where rank 0 does, as under DDP
            x = self._flat.values()
            self._flat.set(self.world.sum(x if self.world.rank == 0 else torch.zeros_like(x)))
        self._show_state()
        self._ready = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_ready", False):
            raise UsageError("parameters are fixed once the optimizer is made: its memories have their size")
        odd = sorted(param_group.keys() - {"params", "lr"})
        if odd:
            raise UsageError(f"a parameter group takes lr alone, got {', '.join(odd)}; the method is one for all")
        if "lr" in param_group:
            non_negative(lr=param_group["lr"])
        super().add_param_group(param_group)

    @torch.no_grad()
    def add_client(self) -> None:
        """Take the present gradients as those of this rank's next client; only where it hosts several."""
        if self._taken == len(self._clients):
            raise UsageError(f"this rank hosts {len(self._clients)} clients, and all have their gradients; call step")
        gradient = self._flat.gradient()
        if gradient is None:
            gradient = torch.full_like(self._estimate, torch.nan)
        self._grads[self._taken] = gradient
        self._taken += 1

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """A round: every client a message, the server's step on every rank alike. Collective."""
        if closure is not None:
            raise UsageError("closures are not taken: a round has one gradient; call backward, then step()")
        if self._taken == 0 and len(self._clients) == 1:
            self.add_client()
        fault = self._message_of_all()
        if self._noise is not None:
            self._noise.pay(self.round)
        if fault is not None:
            part, kept = self._nothing(), self._memory
        else:
            part, kept = self._outgoing()
        wait = self.world.sum_later(part)
        memory = self.method.remember(self._memory, kept) if fault is None else self._memory  # while the sum is made
        total = wait()
        self._stop_if_broken(total, fault)
        if self._noise is not None:
            total = self._noise.received(total, self._estimate)
        if self.method.feedback:
            self._memory.copy_(memory)
        direction, estimate = self.method.server_step(total / self.n, self._estimate)
        self._estimate.copy_(estimate)
        self._flat.move(direction, self.param_groups)
        self.round += 1

    def _message_of_all(self) -> str | None:
        """The messages of this rank's clients; or what is wrong with one of them, and whose it is."""
        taken, self._taken = self._taken, 0
        if taken < len(self._clients):
            return f"{len(self._clients) - taken} of its {len(self._clients)} clients have no gradient"
        key = Key(Stream(self._seed, "operator"), self.round, self._clients)
        self._messages = self.method.message(self._grads, self._memory, key)
        lengths, bound = norms(self._messages)[:, 0], self.method.operator.bound
        finite = torch.isfinite(self._grads.sum(1)) & torch.isfinite(lengths)
        if not bool(finite.all()):
            return f"the gradient of client {int(self._clients[int((~finite).nonzero()[0])])} is missing or not finite"
        longest = float(lengths.max())
        if longest > bound * (1 + ROUNDING):
            whose = int(self._clients[int(lengths.argmax())])
            return f"the message of client {whose} has norm {longest:.6g}, past its operator's bound {bound:g}"
        return None

    def _outgoing(self) -> tuple[Tensor, Tensor]:
        """What leaves this rank, noise included, and what the memories take."""
        if self._noise is None:
            return self._messages.sum(0), self._messages
        return self._noise.outgoing(self._messages, self._clients)

    def _nothing(self) -> Tensor:
        """What a rank sends instead of something broken: all others see that there is no sum."""
        if self._noise is not None and self._noise.on_grid:
            return torch.full_like(self._estimate, _BROKEN, dtype=torch.int64)
        return torch.full_like(self._estimate, torch.nan)

    def _stop_if_broken(self, total: Tensor, fault: str | None) -> None:
        if total.is_floating_point():
            broken = not bool(torch.isfinite(total.sum()))
        else:
            broken = bool((total.abs() >= _BROKEN // 2).any())
        if broken:
            said = [f"rank {rank}: {what}" for rank, what in enumerate(self.world.gather(fault)) if what is not None]
            raise Diverged(self.round, [], "; ".join(said) or "the sum of messages", "(no step was made)")

    def _agree(self, clients: int, privacy: Privacy | None, rounds: int | None) -> None:
        """All ranks with one method, one model's sizes, one seed: else the sums mean nothing."""
        own = {
            "method": methods.identity_of(self.method),
            "parameters": [list(p.shape) for p in self._flat.parameters],
            "dtype": str(self._flat.like.dtype),
            "clients": clients,
            "privacy": privacy.to_dict() if privacy else None,
            "rounds": rounds,
            "seed": self._seed,
        }
        agree(self.world, own)

    def _show_state(self) -> None:
        """The state as torch's tools expect it: views of the flat vectors, parameter by parameter."""
        parts = zip(self._flat.split(self._memory), self._flat.split(self._estimate), strict=True)
        for p, (memory, estimate) in zip(self._flat.parameters, parts, strict=True):
            self.state[p] = {"memory": memory, "estimate": estimate} if self.method.feedback else {"estimate": estimate}

    def _facts(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "method": methods.identity_of(self.method),
            "rank": self.world.rank,
            "ranks": self.world.size,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state, its clients' memories included: save one file a rank."""
        ledger = self._noise.head if self._noise is not None else None
        return {**super().state_dict(), "normec": {**self._facts(), "round": self.round, "ledger": ledger}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state of the same rank of as many ranks. Collective."""
        held = state_dict.get("normec", {})
        unlike = [name for name, value in self._facts().items() if held.get(name) != value]
        mine = f"{unlike[0]} is {held.get(unlike[0])} in the state, {self._facts()[unlike[0]]} here" if unlike else None
        for rank, why in enumerate(self.world.gather(mine)):
            if why is not None:
                raise UsageError(f"rank {rank} cannot go on from this state: {why}")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "normec"})
        for name, home in (("memory", self._memory), ("estimate", self._estimate)):
            for p, view in zip(self._flat.parameters, self._flat.split(home), strict=True):
                if name in self.state[p]:
                    view.copy_(self.state[p][name])
        self._show_state()
        self.round, self._taken = held["round"], 0
        if self._noise is not None:
            self._noise.expect(held["ledger"])
