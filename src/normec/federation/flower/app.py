"""The server and the client of a federation as Flower apps, built from the user's model, loss and data.

    from normec.federation.flower.app import client_app, server_app
    app = server_app(task)      # `task`: a module or object with model(), loss(outputs, targets), data(i, n), test()

A party decides about its own privacy: its folder and its policy come from its own command line (`--node-config`), never
from the run configuration of the server.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ...algorithms.averaging import averaging_of
from ...algorithms.lr_schedule import scheduled
from ...algorithms.method import Method
from ...algorithms.server_optimizer import server_optimizer_of
from ...data.table import read_table
from ...errors import Diverged, UsageError, at_least
from ...experiments import build, methods, runs, server
from ...experiments.resolve import Measured, resolved
from ...problems.problem import Problem
from ...sampling.participation import Everyone
from ...settings.config import RunConfig
from ...settings.validation import to_toml
from ...system.files import write_atomic
from ...training.client_weights import checked_weights
from ...training.run import Plan, default_evaluate_every
from ...training.summary import record_end, summarise, write_summary
from ..protocol.agreed_terms import AgreedTerms
from ..protocol.coordinator import Coordinator
from ..protocol.federated_run import disk_failure
from ..protocol.gradient_oracle import GradientOracle, ProblemOracle
from ..protocol.party import Party
from ..protocol.policy import Policy, load_policy
from ..protocol.sum_coordinator import SumCoordinator
from ..protocol.sum_party import SumParty
from ..protocol.terms import PlanTerms, RecordTerms
from ..protocol.wire import Refusal, Reply, SumReply, WireError, addressed, to_fields
from . import settings as settings_of_run
from .mailbox import Mailbox
from .presence import Timeouts
from .records import from_records, to_records
from .roster import SILENCE, gather
from .scaffold import schema_of
from .server_loop import run_rounds
from .settings import Settings, located
from .signed_terms import agreed_by_all
from .sum_loop import introductions, run_sums, sum_limits

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

LOCK_SECONDS = 120.0  # a server whose SuperLink was killed keeps the run's folder locked for a while


class Task(Protocol):
    """The code of the user. It may also define `transform`, `augment` and `penalty`, as in `normec.Problem`.

    `test` returns the test data of the server: None, one set, or one set for each party.
    """

    def model(self) -> nn.Module: ...
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor: ...
    def data(self, partition: int, partitions: int) -> Dataset[Any]: ...
    def test(self) -> Dataset[Any] | list[Dataset[Any]] | None: ...


def client_app(task: Task) -> ClientApp:
    """The Flower app of a party."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app, parties = ClientApp(), _Parties(task)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            answer = parties.answer(context.node_config, message)
        except Exception as error:  # otherwise Flower would send its text to the server
            logging.getLogger("normec").error("a request could not be answered: %s", error)
            answer = Refusal("unknown", "unknown", 0, "failed")
        return Message(to_records(to_fields(answer)), reply_to=message)

    return app


class _Parties:
    """The parties of this process: one, unless tests run several. Secure sums keep their secrets here."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._oracles: dict[tuple[int, int, str | None], _LazyOracle] = {}
        self._sums: dict[str, SumParty] = {}

    def answer(self, node_config: Mapping[str, Any], message: Message) -> Reply | Refusal | SumReply:
        """The answer to a request. The party's policy is read again for every request."""
        which = (*_partition(node_config), _table(node_config))
        oracle = self._oracles.setdefault(which, _LazyOracle(self._task, *which))
        folder, policy = _folder_and_policy(node_config)
        agreed = _agreed(node_config, self._task)
        party = Party(folder, policy, oracle, agreed=agreed)
        try:
            fields = from_records(message.content, policy.largest_model)
        except WireError as error:
            party.journal.note("refused", reason="malformed", exact=str(error))
            return Refusal("unknown", "unknown", 0, "malformed")
        if fields.get("kind") != "sum-request":
            return party.answer(fields)
        if folder not in self._sums:
            try:
                if agreed is not None:
                    raise UsageError(
                        "the terms that this party signed are those of single messages; parties sign the terms of a "
                        "secure sum when it begins: start the party without terms to take part in one"
                    )
                self._sums[folder] = SumParty(folder, policy, oracle)
            except UsageError as error:  # no key, or no roster
                run, node, round = addressed(fields)
                party.journal.note("refused", run=run, node=node, reason="terms", exact=str(error))
                logging.getLogger("normec").warning("refused (terms): %s", error)
                return Refusal(run, node, round, "terms")
        self._sums[folder].policy = policy
        return self._sums[folder].answer(fields)


def server_app(task: Task) -> ServerApp:
    """The Flower app of the server."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("flwr").addFilter(_one_line)
        settings = settings_of_run.read(context.run_config)
        try:
            run_server(grid, settings, task)
        except OSError as error:
            raise UsageError(disk_failure(error, Path(settings.out))) from None

    return app


def _one_line(record: logging.LogRecord) -> bool:
    """Log errors that the user can fix as one line; Flower would log them with a traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, UsageError | Diverged):
        record.msg, record.args, record.exc_info = f"error: {error}", (), None
    return True


def run_server(grid: Grid, settings: Settings, task: Task) -> None:
    """Run a federation over `grid`, from the start or from the checkpoint in its folder."""
    retries: Any = getattr(grid, "_retry_invoker", None)  # Flower would try to reach a SuperLink for ever
    if retries is not None:
        retries.max_time = SILENCE
    model, test = task.model(), task.test()
    out, config = Path(settings.out), settings.run.model_copy(update={"model": type(model).__name__})
    method = located(config.method, _folder_of(task))
    _wait_for(out)
    if (out / "config.toml").exists():
        known = runs.existing(out, config, method)
        if known is not None and known.summary["status"] == "finished":
            _say(f"the run in {out} is finished")
            return
    x0, evaluate = _start(task, model, test)
    roster = gather(grid, out, settings.parties, settings.start_seconds, _say)
    built, plan, given = _definition(settings, method, len(x0), out, evaluate)
    timeouts = Timeouts(settings.round_seconds, settings.wait_seconds)
    config = resolved(config, Measured(dimension=len(x0), method=method))
    length = built.message_length(len(x0))
    with Mailbox(grid, settings.parties, length, sum_limits(length) if settings.summed else None) as mailbox:
        run: Coordinator | SumCoordinator
        if settings.summed:
            sums, nodes = introductions(mailbox, roster, out, settings.name, settings.start_seconds, _say)
            run = SumCoordinator(built, x0, nodes, plan, roster=sums, colluding=settings.colluding, **given)
        else:
            run = Coordinator(built, x0, roster.names, plan, **given)
        write_atomic(out / "config.toml", to_toml(config.record(settings_of_run.RECORDED)))
        try:
            if isinstance(run, SumCoordinator):
                run_sums(run, mailbox, roster, timeouts, _say)
            else:
                run_rounds(run, mailbox, roster, timeouts, _say)
            write_summary(out, summarise(run.finish(), config.record(settings_of_run.RECORDED)))
            _say(run.stopped or f"finished; the run is in {out}")
        except Diverged as error:
            facts = {"status": "diverged", "round": error.round, "error": str(error)}
            record_end(config.record(settings_of_run.RECORDED), out, facts)
            raise
        finally:
            run.close()


def coordinator_of(
    settings: Settings,
    method: str,
    x0: Tensor,
    parties: list[str],
    folder: Path | None = None,
    evaluate: Callable[[Tensor], Mapping[str, float]] | None = None,
) -> Coordinator:
    """The server's side of a run without a network; without a folder, nothing is written.

    `method` is the name of the method, with the path of its file if it has one.
    """
    built, plan, given = _definition(settings, method, len(x0), folder, evaluate)
    return Coordinator(built, x0, parties, plan, **given)


def _definition(
    settings: Settings,
    method: str,
    dimension: int,
    folder: Path | None,
    evaluate: Callable[[Tensor], Mapping[str, float]] | None,
) -> tuple[Method, Plan, dict[str, Any]]:
    """What both kinds of coordinators are made of: the method, the plan, and further arguments."""
    config = settings.run
    given = {
        "run": settings.name,
        # Records are clipped if the terms say so, because parties must agree on the number that divides their sum.
        "privacy": build.statement(config, config.record_clip),
        "folder": folder,
        "minimum": settings.least,
        "evaluate": evaluate,
        "records": settings.records_of_parties,
    }
    built = methods.build(config.model_copy(update={"method": method}), dimension)
    return built, _plan(config, settings.records_of_parties), given


def first_model(task: Task) -> Tensor:
    """The parameters of the app's model, as one vector."""
    return _start(task, task.model(), None)[0]


def _folder_of(task: Task) -> Path:
    """The folder of the app to which a task belongs: the nearest one with a pyproject.toml."""
    file = getattr(task, "__file__", None)
    for folder in Path(file).resolve().parents if file else ():
        if (folder / "pyproject.toml").exists():
            return folder
    return Path.cwd()


def _say(line: str) -> None:
    logging.getLogger("flwr").info(line)  # Flower's log of the run: `flwr run --stream`, `flwr log`


def _plan(config: RunConfig, records: list[float] | None) -> Plan:
    rounds, lr = methods.rounds(config), methods.step_size(config)
    if rounds is None or isinstance(lr, str):
        raise UsageError("a federation needs rounds and lr as numbers")
    at_least(1, rounds=rounds)
    schedule = server.schedule(config)
    weights = build.weights(config.weights)
    if weights == "records":
        if records is None or len(records) == 1:
            raise UsageError(
                "the server does not know how many records the parties hold; give these numbers as records, if they "
                "are public, or the weights as numbers"
            )
        weights = [number / sum(records) for number in records]
    return Plan(
        lr=lr if schedule is None else scheduled(schedule, lr, rounds, 0),
        rounds=rounds,
        batch_size=config.batch_size,
        batch_rate=config.batch_rate,
        warmup=0,
        seed=config.public_seed,
        participation=Everyone(),
        initial_memory="zero",
        log_every=1,
        evaluate_every=config.evaluate_every if config.evaluate_every is not None else default_evaluate_every(rounds),
        full_gradient=False,
        diagnostics=config.diagnostics or not config.private,
        local=methods.local_steps(config),
        server_optimizer=server_optimizer_of(server.optimizer(config)),
        averaging=averaging_of(server.average(config), rounds, 0),
        weights=None if isinstance(weights, str) else checked_weights(weights, config.clients or 1),
    )


def _start(
    task: Task, model: nn.Module, test: Dataset[Any] | list[Dataset[Any]] | None
) -> tuple[Tensor, Callable[[Tensor], Mapping[str, float]] | None]:
    """The initial x, and the evaluation of a model on the server's own test data, if it has any."""
    trainable = [p.detach().flatten() for p in model.parameters() if p.requires_grad]
    if not trainable:
        raise UsageError("the model has no trainable parameters")
    if test is None:
        return torch.cat(trainable), None
    problem = _problem(task, test, model)
    buffers = problem.initial_buffers()
    return problem.x0, lambda x: problem.evaluate(x, buffers)


def _problem(task: Task, records: Dataset[Any] | list[Dataset[Any]], model: nn.Module | None = None) -> Problem:
    """A problem with one client. With `model`, the records are test data, in one set or in one for each party."""
    extra: dict[str, Any] = {name: getattr(task, name, None) for name in ("penalty", "augment", "transform")}
    test = records if model is not None else None
    clients = records if isinstance(records, list) else [records]
    return Problem(task.model() if model is None else model, task.loss, clients, test, **extra)


class _LazyOracle(GradientOracle):
    """The gradients of a party's data and model, which are loaded at the first request and kept."""

    def __init__(self, task: Task, partition: int, partitions: int, table: str | None = None) -> None:
        self._task, self._which, self._table = task, (partition, partitions), table
        self._made: ProblemOracle | None = None

    def check(self, x: Tensor) -> None:
        self._loaded().check(x)

    def check_records(self) -> None:
        self._loaded().check_records()

    def gradient(self, x: Tensor, index: int, round: int, plan: PlanTerms) -> tuple[Tensor, float]:
        return self._loaded().gradient(x, index, round, plan)

    def corrected_update(
        self, x: Tensor, index: int, round: int, plan: PlanTerms, correction: Tensor
    ) -> tuple[Tensor, float]:
        return self._loaded().corrected_update(x, index, round, plan, correction)

    def clipped_gradient(
        self, x: Tensor, index: int, round: int, plan: PlanTerms, terms: RecordTerms, *, secret_coins: bool
    ) -> tuple[Tensor, float]:
        return self._loaded().clipped_gradient(x, index, round, plan, terms, secret_coins=secret_coins)

    def _loaded(self) -> ProblemOracle:
        if self._made is None:
            if self._table is not None:
                records: Dataset[Any] = read_table(self._table, schema_of(_folder_of(self._task))).dataset
            else:
                records = self._task.data(*self._which)
            self._made = ProblemOracle(_problem(self._task, records))
        return self._made


def _folder_and_policy(node_config: Mapping[str, Any]) -> tuple[str, Policy]:
    """The party's folder and its policy, from the node's own configuration."""
    for name in ("folder", "policy"):
        if not isinstance(node_config.get(name), str):
            raise UsageError(
                f"a party needs {name} in its own --node-config, e.g. "
                '\'partition-id=0 num-partitions=5 folder="/srv/party" policy="/srv/party/policy.toml"\''
            )
    return node_config["folder"], load_policy(node_config["policy"])


def _partition(node_config: Mapping[str, Any]) -> tuple[int, int]:
    """The arguments of the app's data(), which decides what they mean."""
    partition, partitions = node_config.get("partition-id", 0), node_config.get("num-partitions", 1)
    at_least(0, **{"partition-id": partition})
    at_least(1, **{"num-partitions": partitions})
    return int(partition), int(partitions)


def _agreed(node_config: Mapping[str, Any], task: Task) -> Mapping[str, AgreedTerms] | None:
    """The terms that the party signed, by the names of the runs; None if its policy alone decides."""
    if "terms" not in node_config:
        return None
    app = node_config.get("app") or _folder_of(task)
    return _read_terms(str(node_config["terms"]), str(node_config.get("key", "")), str(app))


@functools.cache  # once for a process: a party is started again to use other terms
def _read_terms(terms: str, key: str, app: str) -> Mapping[str, AgreedTerms]:
    return agreed_by_all(Path(terms), Path(key), Path(app))


def _table(node_config: Mapping[str, Any]) -> str | None:
    """The party's table, which takes the place of the app's data()."""
    found = node_config.get("data")
    return None if found is None else str(found)


def _wait_for(out: Path) -> None:
    """Wait until the folder is not locked: a server that lost its SuperLink takes a while to notice."""
    until, said = time.monotonic() + LOCK_SECONDS, False
    while (out / ".lock").exists():
        with (out / ".lock").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > until:
                    return  # opening the folder will fail with an error
                if not said:
                    _say(f"another server uses {out}; waiting up to {LOCK_SECONDS:g} s for it to stop")
                    said = True
        time.sleep(0.5)
