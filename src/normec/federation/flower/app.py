"""The server and the client of a federation as Flower apps, built from the user's model, loss and data.

    from normec.federation.flower.app import client_app, server_app
    app = server_app(task)      # `task`: a module or object with model(), loss(outputs, targets), data(i, n), test()

A party decides about its own privacy: its folder and its policy come from its own party file or command line
(`--node-config`), never from the run configuration of the server.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import Dataset

from ...data.table import read_table
from ...errors import Diverged, UsageError, WireError, at_least
from ...experiments import runs
from ...experiments.resolve import Measured, resolved
from ...system.files import to_toml, write_atomic
from ...system.processes import keep_freed_memory
from ...training.summary import record_end, summarise, write_summary, write_tables
from ..protocol.agreed_terms import AgreedTerms
from ..protocol.coordinator import Coordinator
from ..protocol.federated_run import disk_failure
from ..protocol.gradient_oracle import GradientOracle, ProblemOracle
from ..protocol.party import Party
from ..protocol.policy import Policy, load_policy
from ..protocol.sum_coordinator import SumCoordinator
from ..protocol.sum_party import SumParty
from ..protocol.terms import PlanTerms, RecordTerms
from ..protocol.wire import Refusal, Reply, SumReply, addressed, to_fields
from . import settings as settings_of_run
from .definition import definition_of
from .mailbox import Mailbox
from .presence import Timeouts
from .records import from_records, to_records
from .run_parties import SILENCE, gather
from .scaffold import keep_schema, schema_of
from .server_loop import run_rounds
from .settings import Settings, located
from .signed_terms import agreed_by_all
from .sum_loop import introductions, run_sums, sum_limits
from .task import Task, folder_of, party_problem, start_of, trained

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

LOCK_SECONDS = 120.0  # a server whose SuperLink was killed keeps the run's folder locked for a while


def client_app(task: Task) -> ClientApp:
    """The Flower app of a party.

    Args:
        task: The model, the loss and the party's data.

    Returns:
        An app whose process answers requests under the policy that its node configuration names.
    """
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
    """The Flower app of the server.

    Args:
        task: The model, and the test data of the server.

    Returns:
        An app that runs a federation with the settings of its run configuration (`settings`).
    """
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        logging.getLogger("flwr").addFilter(_one_line)
        keep_freed_memory()  # this process of Flower's runs nothing but the server
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
    method = located(config.method, folder_of(task))
    _wait_for(out)
    if (out / "config.toml").exists():
        known = runs.existing(out, config, method)
        if known is not None and known.summary["status"] == "finished":
            _say(f"the run in {out} is finished")
            return
    x0, evaluate, majority = start_of(task, model, test)
    parties = gather(grid, out, settings.parties, settings.start_seconds, _say)
    built, plan, given = definition_of(settings, method, len(x0), out, evaluate)
    timeouts = Timeouts(settings.round_seconds, settings.wait_seconds)
    config = resolved(config, Measured(dimension=len(x0), method=method))
    length = built.message_length(len(x0))
    with Mailbox(grid, settings.parties, length, sum_limits(length) if settings.summed else None) as mailbox:
        run: Coordinator | SumCoordinator
        if settings.summed:
            roster, nodes = introductions(mailbox, parties, out, settings.name, settings.start_seconds, _say)
            run = SumCoordinator(built, x0, nodes, plan, roster=roster, colluding=settings.colluding, **given)
        else:
            run = Coordinator(built, x0, parties.names, plan, **given)
        write_atomic(out / "config.toml", to_toml(config.record(settings_of_run.RECORDED)))
        keep_schema(folder_of(task), out)
        try:
            if isinstance(run, SumCoordinator):
                run_sums(run, mailbox, parties, timeouts, _say)
            else:
                run_rounds(run, mailbox, parties, timeouts, _say)
            result = run.finish()
            result.model, result.majority = trained(model, result.x), majority
            write_tables(out, result)
            write_summary(out, summarise(result, config.record(settings_of_run.RECORDED)))
            _say(run.stopped or f"finished; the run is in {out}")
        except Diverged as error:
            facts = {"status": "diverged", "round": error.round, "error": str(error)}
            record_end(config.record(settings_of_run.RECORDED), out, facts)
            raise
        finally:
            run.close()


def _say(line: str) -> None:
    logging.getLogger("flwr").info(line)  # Flower's log of the run: `flwr run --stream`, `flwr log`


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
                records: Dataset[Any] = read_table(self._table, schema_of(folder_of(self._task))).dataset
            else:
                records = self._task.data(*self._which)
            self._made = ProblemOracle(party_problem(self._task, records))
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
    """The arguments with which the app's data() is called."""
    partition, partitions = node_config.get("partition-id", 0), node_config.get("num-partitions", 1)
    at_least(0, **{"partition-id": partition})
    at_least(1, **{"num-partitions": partitions})
    return int(partition), int(partitions)


def _agreed(node_config: Mapping[str, Any], task: Task) -> Mapping[str, AgreedTerms] | None:
    """The terms that the party signed, by the names of the runs; None if its policy alone decides."""
    if "terms" not in node_config:
        return None
    app = node_config.get("app") or folder_of(task)
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
