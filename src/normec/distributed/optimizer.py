"""A method as a `torch.optim.Optimizer`: each rank has clients, sends their bounded messages and keeps their memories.

    for inputs, targets in loader:                  this rank's own data
        optimizer.zero_grad()
        loss_of(model(inputs), targets).backward()  without DDP: the gradient stays on this rank
        optimizer.step()                            one all-reduce of d numbers

It replaces SGD under DDP. Every rank has the same x, which starts from that of rank 0. The clients' memories differ, so
every rank saves its own `state_dict`. The steps are those of `Method`, as in the training loop.

In a private run a rank learns about another rank's data only through sums with noise that were paid for. Therefore a
client whose gradient is missing or not finite sends zero plus noise, like every other client, and only its own rank
warns about it.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ..algorithms.method import Method, Steps, Tables, rows_like
from ..algorithms.operators import norms
from ..algorithms.registry import identity_of, works_by_rows
from ..algorithms.server_optimizer import OptimizerFactory, ServerOptimizer, server_optimizer_of
from ..errors import Diverged, UsageError, at_least, non_negative
from ..privacy.mechanism import Spent
from ..privacy.statement import Privacy
from ..sampling.random_streams import Generators, Key, Stream, derive_seed
from ..training.client_weights import checked_weights
from ..training.communicator import Communicator, SingleProcess, check_agreement
from ..training.independence import active_mode
from ..training.metrics import ROUNDING
from ..training.model_step import OptimizerStep
from .flat_parameters import FlatParameters, Held
from .optimizer_noise import OptimizerNoise
from .process_group import launched, rank_status
from .torch_communicator import TorchCommunicator

FORMAT = 4
POSITION = 8  # numbers next to the sum that encode a rank's position; exact in float32 for up to 70,000 ranks


class ClientOptimizer(Optimizer):
    """Any `Method` as an optimizer of this rank's clients; `normec.distributed.NormEC` and the others are short forms.

    Making one is collective: all ranks make theirs at the same point.

    Args:
        params: Parameters or parameter groups, as every torch optimizer takes them. Frozen ones are left alone.
        method: What clients send, and what the server does with the sum.
        lr: The step size; a parameter group may have its own.
        clients: How many clients this rank hosts, the same number on every rank; see `client`.
        weights: The public weights w_i of all clients of all ranks, in the order of the ranks, positive and with the
            sum 1 (default: equal).
        privacy: Every message then leaves this rank with noise, and every release is paid for.
        rounds: How many steps the noise is calibrated for; only with privacy.
        ledger: The file on rank 0 that remembers every release; only with privacy. Seeded noise, which simulates, can
            do without: the account is then part of `state_dict`.
        witness: A file on rank 0, in another folder than the ledger, that also counts its lines. A ledger that was
            restored to an older state is then refused.
        seed: The seed of random operators (default: 0) and of seeded noise. Without one, seeded noise comes from a
            fresh secret. With one, a training of the same start and settings has the same noise: give one to repeat a
            simulation, not to compare trainings on other data.
        server_optimizer: How the server moves the parameters along the direction, as in `normec.train`. All parameter
            groups then need the same lr. An optimizer sees all parameters as one flat vector.

    Raises:
        UsageError: The ranks do not agree, the method corrects local steps, or no rule covers what `privacy` asks for.

    Example:
        >>> from normec import GD
        >>> parameter = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = ClientOptimizer([parameter], GD(), lr=0.5)
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> parameter.data, optimizer.round
        (tensor([-0.5000, -0.5000]), 1)
    """

    def __init__(
        self,
        params: Iterable[Any],
        method: Method,
        lr: float,
        *,
        clients: int = 1,
        weights: Sequence[float] | Tensor | None = None,
        privacy: Privacy | None = None,
        rounds: int | None = None,
        ledger: str | Path | None = None,
        witness: str | Path | None = None,
        seed: int | None = None,
        server_optimizer: str | ServerOptimizer | OptimizerFactory | None = None,
    ) -> None:
        if not isinstance(method, Method):
            raise UsageError(f"method must be a normec.Method, such as normec.NormEC(), got {method!r}")
        if privacy is not None and not isinstance(privacy, Privacy):
            raise UsageError(f"privacy must be a normec.Privacy, such as normec.Privacy(epsilon=8), got {privacy!r}")
        non_negative(lr=lr)
        at_least(1, clients=clients)
        at_least(0, seed=seed or 0)
        self._ready = False
        super().__init__(params, {"lr": lr})
        self._method, self._seed = method, seed or 0
        self._declared = server_optimizer_of(server_optimizer)
        self._flat = FlatParameters(self.param_groups)
        device = self._flat.like.device
        if launched() and not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                "this process is one of several ranks, which have no process group yet; make the optimizer inside of "
                "normec.distributed.join(), or after init_process_group()"
            )
        self.communicator: Communicator = (
            TorchCommunicator(device, rank_status())
            if dist.is_available() and dist.is_initialized()
            else SingleProcess()
        )
        self.n = clients * self.communicator.size
        relative = checked_weights(weights, self.n) if weights is not None else None
        self._relative = relative.tolist() if relative is not None and relative.unique().numel() > 1 else []
        self._agree(clients, privacy, rounds, ledger is not None, seed)
        # The name of this optimizer on all ranks, which tells it from others of the same job.
        self._name = self.communicator.on_rank_zero(lambda: secrets.token_hex(8))
        self._clients = torch.arange(clients) + clients * self.communicator.rank
        self._weights = self._flat.like.new_tensor(self._relative)[self._clients] if self._relative else None
        d = self._flat.dimension
        # A user's own functions may mix the clients that they see together, for some values only.
        one_by_one = privacy is not None and not works_by_rows(method)
        self._steps = Steps(method, self._flat.values(), one_by_one)
        if self._steps.corrects:
            raise UsageError(
                f"{method.name} corrects every local step of a client, and an optimizer sees one gradient per round; "
                "use normec.train with local=LocalSteps(…)"
            )
        self._states = {
            name: rows_like(start, clients).clone() for name, start in self._steps.initial_client_state.items()
        }
        self._server = {name: start.clone() for name, start in self._steps.initial_server_state.items()}
        self._grads = self._flat.like.new_zeros(clients, d)
        self._missing = torch.ones(clients, dtype=torch.bool)
        self._taken: set[int] = set()  # the clients that had their turn in this round
        self._broken_off = False  # whether a call has ended while it was taking or clearing gradients
        self._turned_away = False  # whether a call was refused because another one was running
        self._before_turn: tuple[list[Held], Generators] | None = None  # in a private run, during a turn
        self._turn = threading.Lock()
        self.round = 0
        self._steps_made = 0  # also those of rounds that were repeated
        self._drop_gradients()  # those from before may be of all clients
        with torch.no_grad():  # all ranks start from the values of rank 0, as with DDP
            self._flat.set(self._of_rank_0(self._flat.values()))
            for p in self._flat.frozen:
                p.copy_(self._of_rank_0(p.detach().clone()))
        self._noise = self._noise_of(privacy, rounds, seed, ledger, witness) if privacy else None
        mechanism = self._noise.mechanism if self._noise is not None else None
        try:
            self._optimizer = (
                OptimizerStep(self._declared, method, self._flat.values(), self.n, mechanism)
                if self._declared
                else None
            )
        except UsageError:
            self.close()  # the ledger, for another optimizer
            raise
        self._optimizer_tables = self._optimizer.initial_tables() if self._optimizer is not None else {}
        self._show_state()
        self._draws = torch.initial_seed()  # which does not tell how many numbers were drawn
        self._ready = True

    @property
    def method(self) -> Method:
        """The method; it cannot be changed, because the noise was calibrated for it."""
        return self._method

    def _noise_of(
        self,
        privacy: Privacy,
        rounds: int | None,
        seed: int | None,
        ledger: str | Path | None,
        witness: str | Path | None,
    ) -> OptimizerNoise:
        moved = f" {self._declared.spec()}" if self._declared is not None else ""
        start = self.communicator.on_rank_zero(lambda: f"{self._flat.checksum()} {self._step_sizes()}{moved}")
        return OptimizerNoise(
            privacy,
            self.method,
            self.n,
            self._flat.dimension,
            rounds,
            seed,
            self.communicator,
            ledger,
            start,
            self._name,
            witness,
            tuple(self._relative),
        )

    def _of_rank_0(self, values: Tensor) -> Tensor:
        return self.communicator.sum(values if self.communicator.rank == 0 else torch.zeros_like(values))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if getattr(self, "_ready", False):
            raise UsageError(
                "parameters cannot be added after the optimizer was created, because its memories have a fixed size"
            )
        odd = sorted(param_group.keys() - {"params", "lr"})
        if odd:
            raise UsageError(
                f"a parameter group takes only lr, got {', '.join(odd)}; the method is the same for all groups"
            )
        if "lr" in param_group:
            non_negative(lr=param_group["lr"])
        super().add_param_group(param_group)

    @contextmanager
    def client(self, number: int) -> Iterator[None]:
        """Give one of several clients of this rank its turn: the gradients that the block computes are its own.

        The block begins without gradients and leaves none, so that a client's data enter one message only. In a private
        run of several clients per rank it has global random numbers of torch, NumPy and Python of its own, because the
        data of a client decide how many it draws: they follow from torch's seed, as it was when the optimizer was made,
        from the round and from the client, and after the block the generators go on as they were before. Local steps of
        the block are undone there, too, because the next client begins at the same parameters. A client whose block
        raises an error has had no turn, and may come again; one that comes again replaces its own gradients. One that
        has nothing to send needs a turn as well, with an empty block.

        Args:
            number: Which of this rank's clients it is, from 0. It has the same number in every round, because its
                memory does.

        Raises:
            UsageError: There is no client of this number, another call is running, or a hook makes this one during
                `backward`. After the last two, with privacy, the next call drops all gradients, and the round has to
                begin again.

        Example:
            >>> from normec import GD
            >>> parameter = torch.nn.Parameter(torch.zeros(2))
            >>> optimizer = ClientOptimizer([parameter], GD(), lr=1.0, clients=2)
            >>> for number in range(2):
            ...     with optimizer.client(number):
            ...         (number * parameter).sum().backward()
            >>> optimizer.step()
            >>> parameter.data
            tensor([-0.5000, -0.5000])
        """
        with self._alone():
            self._refuse_leftovers()
            if not isinstance(number, int) or number not in range(len(self._clients)):
                raise UsageError(f"the clients of this rank are numbered 0 to {len(self._clients) - 1}, got {number!r}")
            with self._changing_gradients():
                self._taken.discard(number)
                self._missing[number] = True
                self._flat.clear_gradients()
            try:
                with self._set_apart(number):
                    yield
                    with self._changing_gradients(), torch.no_grad():
                        self._take_gradient(number)
            except BaseException:
                with self._changing_gradients():
                    self._set_back()  # again, if Ctrl-C came meanwhile
                    self._flat.clear_gradients()  # of a backward pass that has failed halfway
                raise
            with self._changing_gradients():
                self._flat.clear_gradients()
                self._taken.add(number)

    @contextmanager
    def _set_apart(self, number: int) -> Iterator[None]:
        """Give a client of a private run random numbers of its own, and undo its local steps at the end of its turn.

        Leaving a client out would otherwise change the batches, the masks of dropout and the parameters of all clients
        after it.
        """
        if self._noise is None or len(self._clients) == 1:
            yield
            return
        generators = Generators()
        mine = self._before_turn = self._flat.held(), generators
        try:
            generators.seed(derive_seed(self._draws, "client", self.round, int(self._clients[number])))
            yield
        finally:
            if self._before_turn is mine:  # else this one was broken off, and is closed during a later turn
                with self._changing_gradients():
                    self._set_back()

    @torch.no_grad()
    def _set_back(self) -> None:
        """Set parameters and generators back to what they were before the turn, if that is still to be done.

        When the interpreter exits, it closes turns that are still open. Tensors must not be touched any more by then.
        """
        if self._before_turn is not None and not sys.is_finalizing():
            held, generators = self._before_turn
            self._flat.set_back(held)
            generators.restore()
            self._before_turn = None

    def _take_gradient(self, number: int) -> None:
        gradient = self._flat.gradient()
        if gradient is not None:
            self._grads[number] = gradient
        self._missing[number] = gradient is None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Refuse a call while another one is running, in another thread or in a signal's handler."""
        ours = False
        try:
            ours = self._turn.acquire(blocking=False)
            if not ours:
                self._turned_away = True
                raise UsageError("another call of this optimizer is running; make its calls one after the other")
            yield
        finally:
            if ours:
                self._turn.release()

    @contextmanager
    def _changing_gradients(self) -> Iterator[None]:
        """Remember if a call raises an error in here, or Ctrl-C ends it; see `_refuse_leftovers`."""
        before, self._broken_off = self._broken_off, True
        yield
        self._broken_off = before

    # A compiler may compute exactly rounded noise in another way.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Run one round: each client sends one message, and every rank makes the same server step. Collective.

        Raises:
            UsageError: The ranks are not at the same round of the same optimizer with the same step sizes; parameters
                were frozen, or added to or removed from a group; with privacy: one of this rank's clients had no
                turn.
            Diverged: Without privacy: a gradient is missing or not finite, or a message is above its bound.
            BudgetSpent: With privacy: the budget does not allow another release.
        """
        with self._alone():
            faults = self._make_round(closure)
        for fault in faults:  # last, because a warning filter may turn it into an error
            warnings.warn(f"{fault} in round {self.round - 1}; it sent zero, with noise", stacklevel=2)

    def _make_round(self, closure: Callable[[], Any] | None) -> list[str]:
        """Run one round; returns what was wrong with messages that were replaced by zero."""
        self._refuse_leftovers()
        self._refuse_skipped_clients()
        if closure is not None:
            raise UsageError(
                "closures are not supported, because a round has one gradient; call backward(), then step()"
            )
        self._flat.refuse_changes(self.param_groups)
        self._flat.refuse_averaging()
        self._steps.refuse_changes()
        if self._noise is not None:
            self._flat.refuse_shared_statistics()
            if mode := active_mode():
                raise UsageError(f"{mode} is active and would see several clients together; call step() without it")
        if not self._taken and len(self._clients) == 1:
            self._take_gradient(0)
        messages, draft, faults = self._messages()
        if self._noise is None:
            weighted = messages if self._weights is None else messages * self._weights[:, None]
            sent, kept = weighted.sum(0), messages
            if faults:
                sent = torch.full_like(sent, torch.nan)  # so that all ranks notice that there is no sum
        else:
            self._noise.pay(self.round)
            sent, kept = self._noise.outgoing(messages, self._clients, self._weights)
        wait = self.communicator.sum_async(torch.cat([sent, self._position().to(sent.dtype)]))
        states = self._steps.commit(draft, kept)  # while the sum is computed
        total = wait()
        self._refuse_other_positions(total[-POSITION:])
        total = total[:-POSITION]
        if total.is_floating_point() and not bool(torch.isfinite(total.sum())):
            self._stop(faults if self._noise is None else [])
        if self._noise is not None:
            total = self._noise.received(total, self._flat.like.new_zeros(0))
        direction, server = self._steps.server_step(total / self.n, self._server)
        for held, new in ((self._states, states), (self._server, server)):
            for name, value in new.items():
                held[name].copy_(value)
        self._move(direction)
        self.round += 1
        self._steps_made += 1
        return faults

    def _move(self, direction: Tensor) -> None:
        """Move the parameters, by the plain step of each group or by the server's optimizer."""
        if self._optimizer is None:
            self._flat.move(direction, self.param_groups)
            return
        x, tables = self._flat.values(), self._optimizer_tables
        of_messages = sum(weight**2 for weight in self._relative) if self._relative else self.n
        self._optimizer_tables = self._optimizer.step(x, direction, tables, self._step_sizes()[0], of_messages)
        self._flat.set(x)

    def _messages(self) -> tuple[Tensor, Tables, list[str]]:
        """Return the messages of this rank's clients, the drafts of their states, and the faults.

        A client without a valid message sends zero, and its state stays unchanged.
        """
        missing = self._missing.tolist()
        self._drop_gradients()
        self._steps.begin(self._seed, self.round)
        key = Key(Stream(self._seed, "operator"), self.round, self._clients)
        own = {name: rows.clone() for name, rows in self._states.items()}
        messages, draft = self._steps.message(self._grads.clone(), own, key, self._steps.broadcast(self._server))
        lengths = norms(messages)[:, 0]
        bound = self.method.bound if self._noise is None else self._noise.bound
        finite = torch.isfinite(self._grads.sum(1)) & torch.isfinite(lengths)
        rows = zip(self._clients.tolist(), missing, finite.tolist(), lengths.tolist(), strict=True)
        faults = {index: why for index, row in enumerate(rows) if (why := _fault(*row, bound)) is not None}
        if faults:
            messages[list(faults)] = 0.0
            draft = {name: rows.clone() for name, rows in draft.items()}
            for name, drafted in draft.items():
                drafted[list(faults)] = self._states[name][list(faults)]
        return messages, draft, list(faults.values())

    def _refuse_leftovers(self) -> None:
        """Refuse a private call after one that was refused, or broken off while it took or cleared gradients.

        One client's gradients may then be in two places, or the next client's may have been added to them. They are
        incomplete in a hook of a backward pass, and what follows would be taken for the next client's.
        """
        if self._noise is None or len(self._clients) == 1:
            return
        if torch._C._current_graph_task_id() >= 0:
            self._broken_off = True
            raise UsageError(
                "a hook called the optimizer during backward(), while a client's gradients are incomplete; call it "
                "after backward()"
            )
        if self._broken_off or self._turned_away or self._before_turn is not None:
            with self._changing_gradients():
                self._turned_away = False  # first, as a call in another thread may be refused from here on
                self._set_back()
                self._drop_gradients()
            self._broken_off = False
            raise UsageError(
                "an earlier call was broken off or refused, so the gradients of all clients were dropped; begin round "
                f"{self.round} again with all of this rank's {len(self._clients)} clients"
            )

    def _refuse_skipped_clients(self) -> None:
        """Refuse a private step for which a client was skipped, whose gradients another one's may contain."""
        skipped = set(range(len(self._clients))) - self._taken
        if self._noise is not None and len(self._clients) > 1 and skipped:
            self._drop_gradients()
            raise UsageError(
                f"client({min(skipped)}) had no turn in round {self.round}, so the gradients of all clients were "
                f"dropped; begin the round again with all of this rank's {len(self._clients)} clients, and give one "
                "that sends nothing an empty turn"
            )

    def _drop_gradients(self) -> None:
        """Drop the gradients that were taken, and those that no client took: the next ones are another client's."""
        with self._changing_gradients():
            self._taken.clear()
            self._missing.fill_(True)
            if len(self._clients) > 1:
                self._flat.clear_gradients()

    def _stop(self, faults: list[str]) -> None:
        """Raise the same error on every rank; all ranks have noticed that there is no sum."""
        said = [
            f"rank {rank}: {'; '.join(what)}" for rank, what in enumerate(self.communicator.all_gather(faults)) if what
        ]
        raise Diverged(self.round, [], "; ".join(said) or "the sum of messages", "(no step was made)")

    def _position(self) -> Tensor:
        """Return digits of a checksum of the optimizer, the round and the step sizes, and their squares."""
        digest = zlib.crc32(json.dumps([self._name, self.round, self._step_sizes()]).encode())
        digits = torch.tensor([digest >> 4 * digit & 15 for digit in range(POSITION // 2)], device=self._grads.device)
        return torch.cat([digits, digits.square()])

    def _refuse_other_positions(self, sums: Tensor) -> None:
        """Raise the same error on every rank if the digits differ: then Σ (digit − own digit)² is above zero."""
        own, squares = self._position().to(torch.float64).chunk(2)
        sums, sums_of_squares = sums.to(torch.float64).chunk(2)
        if bool((sums_of_squares - 2 * own * sums + self.communicator.size * squares).any()):
            facts = {"round": self.round, "lr": self._step_sizes(), "optimizer": self._name}
            cure = "every rank must call step() equally often and with the same lr"
            check_agreement(self.communicator, facts, f"{cure}, and that of several optimizers in the same order")

    def _step_sizes(self) -> list[float]:
        sizes = [float(group["lr"]) for group in self.param_groups]
        for lr in sizes:
            non_negative(lr=lr)
        if self._declared is not None and len(set(sizes)) > 1:
            raise UsageError(f"server_optimizer takes one lr for all parameter groups, got {sizes}")
        return sizes

    def _agree(self, clients: int, privacy: Privacy | None, rounds: int | None, ledger: bool, seed: int | None) -> None:
        """Check that all ranks have the same method, model sizes and seed; otherwise their sums are meaningless."""
        own = {
            "method": identity_of(self.method),
            "parameters": self._flat.shapes,
            "dtype": str(self._flat.like.dtype),
            "lr": self._step_sizes(),
            "server_optimizer": self._declared.spec() if self._declared is not None else None,
            "clients": clients,
            "weights": self._relative,
            "privacy": privacy.to_dict() if privacy else None,
            "rounds": rounds,
            "ledger": ledger,
            "seed": seed,
        }
        check_agreement(self.communicator, own)

    def _vectors(self) -> dict[str, Tensor]:
        """Return the states that are as long as x, by name; `state` shows them parameter by parameter."""
        server = {f"server.{name}" if name in self._states else name: value for name, value in self._server.items()}
        held = {**self._states, **server}
        return {name: value for name, value in held.items() if self._is_vector(value)}

    def _rest(self) -> dict[str, dict[str, Tensor]]:
        """Return all other states."""
        tables = {"client": self._states, "server": self._server}
        return {
            where: {name: value for name, value in held.items() if not self._is_vector(value)}
            for where, held in tables.items()
        }

    def _is_vector(self, value: Tensor) -> bool:
        wide = value.ndim > 0 and value.shape[-1] == self._flat.dimension and value.ndim <= 2
        return wide and value.dtype == self._flat.like.dtype

    def _show_state(self) -> None:
        """Fill `state` as torch's tools expect it: with views of the flat vectors, parameter by parameter."""
        for p in self._flat.parameters:
            self.state[p] = {}
        for name, value in self._vectors().items():
            for p, view in zip(self._flat.parameters, self._flat.split(value), strict=True):
                self.state[p][name] = view

    def _facts(self) -> dict[str, Any]:
        method = identity_of(self.method)
        facts = {"format": FORMAT, "method": method, "rank": self.communicator.rank, "ranks": self.communicator.size}
        facts |= {"clients": len(self._clients), "parameters": self._flat.shapes}
        facts |= {"server_optimizer": self._declared.spec() if self._declared is not None else None}
        return {**facts, "weights": self._relative, "private": self._noise is not None}

    def spent(self) -> Spent:
        """Return what was paid for so far: the exact ε and the facts that it depends on.

        Every rank must call it, as rank 0 has the ledger and sends the answer to the others.
        """
        if self._noise is None:
            raise UsageError("this optimizer has no privacy, so nothing was spent; pass privacy=")
        return self._noise.spent()

    def close(self) -> None:
        """Close the ledger, so that another optimizer can open it; no step is possible afterwards."""
        if self._noise is not None:
            self._noise.close()

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state with its clients' memories; save one file per rank."""
        privacy = self._noise.state() if self._noise is not None else {}
        own = {**self._facts(), "round": self.round, "privacy": privacy, "states": self._rest()}
        own["optimizer"] = dict(self._optimizer_tables)
        own["save"] = [self._name, self._steps_made]
        return {**super().state_dict(), "normec": own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state of the same rank, with the same numbers of ranks and clients. Collective.

        What was spent stays spent: an older state restores the round and the memories, not the budget. Load the model's
        state as well.
        """
        with self._alone():
            self._load(state_dict)
            if self._before_turn is not None:  # the caller loads the parameters, too
                self._before_turn[1].restore()
                self._before_turn = None

    def _load(self, state_dict: dict[str, Any]) -> None:
        held = state_dict.get("normec", {})
        for rank, why in enumerate(self.communicator.all_gather(self._unlike(held))):
            if why is not None:
                raise UsageError(f"rank {rank} cannot continue from this state: {why}")
        facts = {"round of the state": held["round"], "save of the state": held.get("save")}
        check_agreement(self.communicator, facts, "load states that were saved together")
        if self._noise is not None:
            self._noise.load(held["privacy"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "normec"})
        for name, vector in self._vectors().items():
            for p, view in zip(self._flat.parameters, self._flat.split(vector), strict=True):
                view.copy_(self.state[p][name])
        for where, rest in self._rest().items():
            for name, value in rest.items():
                value.copy_(held["states"][where][name])
        self._show_state()
        self._optimizer_tables = {
            name: value.to(self._flat.like.device if value.ndim else value.device, copy=True)
            for name, value in held.get("optimizer", {}).items()
        }
        self.round = held["round"]
        self._drop_gradients()

    def _unlike(self, held: dict[str, Any]) -> str | None:
        """Return why this optimizer cannot continue from a state with the facts `held`, or None."""
        held = {"weights": [], **held}  # states of equal weights do not name them
        for name, value in self._facts().items():
            if held.get(name) != value:
                return f"{name} is {held.get(name)} in the state, {value} here"
        return self._noise.difference(held["privacy"]) if self._noise is not None else None

    def __getstate__(self) -> NoReturn:
        raise UsageError("a distributed optimizer cannot be copied or pickled; save its state_dict()")


def _fault(client: int, missing: bool, finite: bool, length: float, bound: float) -> str | None:
    """Return what is wrong with a client's message, or None."""
    if missing:
        return f"client {client} has no gradient"
    if not finite:
        return f"the gradient of client {client} is not finite"
    if length > bound * (1 + ROUNDING):
        return f"the message of client {client} has norm {length:.6g}, above the bound {bound:g}"
    return None
