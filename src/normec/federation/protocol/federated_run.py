"""The part of the server that all federated runs share: terms, state, ledger, history and checkpoints.

`Coordinator` runs rounds in which the server receives a message from each party, and `SumCoordinator` rounds in which
it receives one secure sum. In both, a round counts once its checkpoint is on the disk.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...algorithms.method import Method, Steps, Tables
from ...algorithms.registry import identity_of
from ...errors import Diverged, UsageError
from ...privacy.mechanism import Mechanism, Spent
from ...privacy.statement import Privacy
from ...problems.objective import checksum
from ...storage.history import UNNOISED, Row
from ...storage.run_folder import FEDERATION, RunStorage
from ...training.model_step import ModelStep
from ...training.run import Plan, Run, State
from .journal import JOURNAL, Journal
from .method_checks import check_client_functions, check_server_functions
from .server_mechanism import mechanism_of, record_terms
from .server_metrics import observed
from .server_state import OPTIMIZER, ServerState
from .terms import LocalTerms, MethodTerms, PlanTerms, PrivacyTerms
from .wire import NAME, Reply

Evaluate = Callable[[Tensor], Mapping[str, float]]
Self = TypeVar("Self", bound="FederatedRun")
Given = ParamSpec("Given")
Found = TypeVar("Found")


def disk_failure(error: OSError, folder: Path | None) -> str:
    """The error line for a failed write: the file, the reason and the cure."""
    return (
        f"cannot write to {error.filename or folder}: {error.strerror or error}; the run is unchanged; "
        "free space or allow writing there, and start the server again"
    )


def writes(method: Callable[Concatenate[Self, Given], Found]) -> Callable[Concatenate[Self, Given], Found]:
    """Wrap a method that writes to the run's folder: after a failed write, every further call raises the same error."""

    @functools.wraps(method)
    def guarded(self: Self, /, *given: Given.args, **named: Given.kwargs) -> Found:
        if self._broken is not None:
            raise UsageError(self._broken)
        try:
            return method(self, *given, **named)
        except OSError as error:
            self._broken = self.stopped = disk_failure(error, self.storage.out)
            raise UsageError(self._broken) from None

    return guarded


class FederatedRun:
    """The server's side of a federated run, without the rounds themselves.

    Args:
        method: The method.
        x0: The initial model.
        parties: Names in the order of their client numbers.
        plan: The plan of the run.
        run: The name of the run.
        privacy: The privacy statement; None for a run without noise.
        folder: The folder of the run; None keeps everything in memory.
        minimum: A round can close once so many parties have answered.
        evaluate: Returns the metrics that the server measures at x.
        records: Public numbers, one for each party or one for all, by which parties divide their sums of clipped
            records.
    """

    follows_memories = True  # whether the server keeps a row for each party's memory

    def __init__(
        self,
        method: Method,
        x0: Tensor,
        parties: Sequence[str],
        plan: Plan,
        *,
        run: str,
        privacy: Privacy | None = None,
        folder: str | Path | None = None,
        minimum: int = 1,
        evaluate: Evaluate | None = None,
        records: Sequence[float] | None = None,
    ) -> None:
        check_names(run, parties)
        if not 1 <= minimum <= len(parties):
            raise UsageError(f"minimum must lie between 1 and the {len(parties)} parties, got {minimum}")
        if plan.weights is not None and len(plan.weights) != len(parties):
            raise UsageError(
                f"weights must be one number for each of the {len(parties)} parties, got {len(plan.weights)}"
            )
        if plan.initial_memory != "zero":
            raise UsageError(
                f"in a federation memories start at zero, got initial_memory = {plan.initial_memory!r}; leave it out"
            )
        self.method, self.plan, self.name, self.parties = method, plan, run, list(parties)
        self.minimum, self._evaluate = minimum, evaluate
        x0 = x0.detach().cpu().clone()
        self._steps = Steps(method, x0)
        check_client_functions(self._steps, x0)
        check_server_functions(self._steps, x0)
        if self._steps.corrects and (plan.local is None or plan.local.scale != "gradient"):
            raise UsageError(f"{method.name} corrects local steps; give local_steps, with local_scale = 'gradient'")
        privacy = privacy.with_noise("secure").for_rounds(plan.rounds) if privacy is not None else None
        clipped = record_terms(privacy, plan, records, len(parties))
        self.mechanism: Mechanism | None = mechanism_of(method, plan, privacy, len(parties), len(x0), clipped)
        self._sigmas = [self.mechanism.sigma_at(k) for k in range(plan.rounds)] if self.mechanism is not None else [0.0]
        terms = PrivacyTerms.of(privacy, self._sigmas[0], method)
        self._scheduled = self.mechanism is not None and self.mechanism.release.schedule is not None
        if self._scheduled:
            terms = dataclasses.replace(terms, least_sigma=min(self._sigmas))
        heaviest = float(plan.weights.max()) if plan.weights is not None else None
        local = LocalTerms.of(plan.local) if plan.local else None
        self._plans = [PlanTerms(plan.seed, plan.batch_size or 0, plan.rounds, local, heaviest, own) for own in clipped]
        self._terms = (MethodTerms.of(method), terms)
        self._dimension = len(x0)
        self._prepare()
        self._model_step = ModelStep(method, plan, x0, len(parties), self.mechanism)
        identity = {
            "method": identity_of(method),
            "dtype": str(x0.dtype),
            "privacy": privacy.to_dict() if privacy is not None else None,
            **plan.identity(),
            **({"diagnostics": plan.diagnostics} if privacy is not None else {}),
            "run": run,
            "parties": self.parties,
            "start": checksum(x0),
            **({"records": [own.divisor for own in clipped if own is not None]} if clipped[0] is not None else {}),
        }
        self.storage = RunStorage(Path(folder) if folder is not None else None, identity)
        self.storage.open()
        self.journal = Journal(self.storage.out / JOURNAL if self.storage.out is not None else None)
        self.stopped: str | None = None
        self._broken: str | None = None
        self.timings = {"total": 0.0}
        self._since = time.monotonic()
        try:
            self._begin(x0)
        except BaseException:
            self.close()
            raise

    @writes
    def _begin(self, x0: Tensor) -> None:
        """Create the state or load it from the folder; it is on the disk before any party is asked."""
        steps, parties, saved, rows = self._steps, self.parties, self.storage.load(), self.follows_memories
        if saved:
            self.state = ServerState.restored(steps, *saved, rows=rows)
        else:
            self.state = ServerState.fresh(steps, x0, parties, rows=rows)
            self._model_step.begin(self.state.run)
        self._attach()
        if saved:
            self.timings |= saved[1]["timings"]
            self.journal.note("resumed", round=self.round)
        if self.mechanism is not None and self.storage.out is not None:
            self.mechanism.open(self.storage.out / "ledger.jsonl", saved[1].get("ledger") if saved else None)
        if not saved:
            self._save()
        self._open_round()

    def _prepare(self) -> None:
        """Check what only this kind of run requires, before anything is written."""
        raise NotImplementedError

    def _attach(self) -> None:
        """Create what the rounds need beside the state, which exists now."""
        raise NotImplementedError

    def _open_round(self) -> None:
        """Begin the round of the state."""
        raise NotImplementedError

    @property
    def run(self) -> str:
        """The identifier that parties know: the name of the run and its random number."""
        return f"{self.name}~{self.state.number}"

    @property
    def round(self) -> int:
        return self.state.run.round

    @property
    def message_length(self) -> int:
        """How many numbers a message has."""
        return self._steps.message_length

    @property
    def finished(self) -> bool:
        return self.round >= self.plan.rounds or self.stopped is not None

    @writes
    def note_suspension(self, node: str, seconds: float, why: str) -> None:
        """Note in the journal that a party is suspended, and why."""
        self.journal.note("suspended", round=self.round, party=node, seconds=round(seconds, 1), why=why)

    @writes
    def stop(self, reason: str) -> None:
        """End the run before its last round."""
        self.stopped = reason
        self.journal.note("stopped", round=self.round, reason=reason)

    def _moved(self, total: Tensor, numbers: list[int]) -> tuple[State, Tables]:
        """The model and the server's state after the step with the sum of the messages of these parties."""
        state = self.state.run
        direction, server = self._steps.server_step(total / len(self.parties), state.server)
        moved = dataclasses.replace(
            state, x=state.x.clone(), optimizer={name: value.clone() for name, value in state.optimizer.items()}
        )
        self._model_step.move(moved, direction, torch.tensor(numbers, dtype=torch.int64))
        if not bool(torch.isfinite(moved.x).all()):
            raise Diverged(self.round, [], "x")
        return moved, {name: value.to(state.server[name].dtype) for name, value in server.items()}

    def _epsilon(self, mechanism: Mechanism) -> float:
        """An upper bound of the ε of all releases so far, which is cheap to compute."""
        return mechanism.epsilon()

    def _spent(self) -> Spent | None:
        """The spending of the run, by its ledger."""
        return self.mechanism.spent() if self.mechanism is not None else None

    @writes
    def finish(self) -> Run:
        """Record the last row and return the result, in the form that every run has."""
        history = self.storage.history
        if self.round == self.plan.rounds and not (history.rows and history.rows[-1]["round"] == self.round):
            self._record(self._observed(()))
        self._save()
        stopped = self.stopped if self.stopped or self.round == self.plan.rounds else "interrupted"
        return Run(
            method=self.method,
            state=self.state.run,
            model=None,
            history=history,
            timings=self.timings,
            engine=FEDERATION,
            rounds=self.plan.rounds,
            n=len(self.parties),
            privacy=self._spent(),
            stopped=stopped,
        )

    def close(self) -> None:
        self.storage.close()
        if self.mechanism is not None:
            self.mechanism.close()

    def _observed(self, taken: Collection[Reply], parties: int = 0, *, noisy: bool = True) -> Row:
        """The row of this round, before its step; `parties` took part in it."""
        relative = self.plan.weights.tolist() if self.plan.weights is not None else [1.0] * len(self.parties)
        weights = dict(zip(self.parties, relative, strict=True))
        row = observed(self.method, self.state.run, taken, weights, noisy=noisy)
        if parties:
            row["parties"] = parties
        evaluates = self.plan.evaluates(self.round) or self.round == self.plan.rounds
        if self._evaluate is not None and evaluates:
            row |= self._evaluate(self.state.run.result)
        if self.plan.diagnostics:
            return row
        return {name: value for name, value in row.items() if name not in UNNOISED}

    def _record(self, row: Row) -> None:
        if self.mechanism is not None:
            row["epsilon"] = self._epsilon(self.mechanism)
        broken = [key for key, value in row.items() if not math.isfinite(value)]
        if broken:
            raise Diverged(row["round"], [], broken[0])
        self.storage.history.append(row)
        self.storage.history.write()

    def _save(self) -> None:
        now = time.monotonic()
        self.timings["total"] += now - self._since
        self._since = now
        state, facts = self.state.run, {**self.state.facts(), "timings": self.timings}
        if self.mechanism is not None:
            facts["ledger"] = self.mechanism.head
        tensors = {"x": state.x, **{f"server.{name}": value for name, value in state.server.items()}}
        tensors |= {f"client.{name}": rows for name, rows in state.clients.items()}
        tensors |= {f"{OPTIMIZER}{name}": value for name, value in state.optimizer.items()}
        if self.storage.out is not None:
            self._write(tensors, facts)

    def _write(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        from safetensors import SafetensorError

        try:
            self.storage.save(self.round, tensors, facts)
        except SafetensorError as error:  # raised by safetensors when a write fails
            raise OSError(str(error)) from None


def check_names(run: str, parties: Sequence[str]) -> None:
    """Check names, which are used in paths and messages: letters, digits, dot, dash, underscore, no repetitions."""
    for name in (run, *parties):
        if not NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot name a run or party; use at most 64 letters, digits, '.', '-' and '_'")
    if not parties or len(set(parties)) != len(parties):
        raise UsageError(
            f"a federation needs at least one party, each with a name of its own; got {len(parties)} names"
        )
