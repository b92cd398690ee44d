"""Run a whole federation on this machine: a SuperLink and one process for each party, connected by TLS.

No process outlives the run.

    OUT/            the folder of the run
    OUT/federation/ tls/ keys/ flwr/ (Flower's home) logs/ DATA/ (an app, if none was given) parties/party-I/
                    inputs.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w

from ...algorithms import registry
from ...algorithms.catalogue import is_own
from ...data.table import read_table
from ...errors import Interrupted, UsageError
from ...experiments import build, methods, runs
from ...report import page
from ...report.run_view import STATEMENTS, is_run
from ...settings.config import RunConfig, in_groups
from ...settings.validation import load
from ...storage.history import History
from ...system.files import private_folder, read_if_present, read_toml, write_atomic
from ...training import saved_run
from ...training.callbacks import Callback
from ...training.saved_run import Result
from ...training.summary import record_end
from ..flower.scaffold import needs_tables, schema_of, write_app
from ..flower.settings import Settings, app_config, located, read
from ..protocol.policy import load_policy
from ..protocol.spending import spending
from ..secure_sum.keys import Identity
from ..secure_sum.roster import Member, Roster
from . import certificates, heart_disease, inputs, superlink
from .follower import Follower
from .processes import Processes, free_port

STARTING = 300.0  # seconds until the SuperLink must answer, and until Flower must have started the server's app
OUTCOME_SECONDS = 1.0  # for the SuperLink to answer; the server reports the outcome before its process ends
ATTEMPTS = 3
DEFAULT_PARTIES = 5
_DIMENSION = 2**20  # of a model; the class of a method does not depend on it
SUMMARY = "summary.json"
# Settings that are chosen for one method and fit no other.
OF_A_METHOD = (*(name for name in in_groups("method", "local") if name != "method"), "lr")
EXAMPLE_SECONDS = {"round_seconds": 60.0, "wait_seconds": 600.0}  # all parties are on this machine
SCRIPTS = Path(sys.executable).parent
CONNECTED = ("waits for requests", "SuperNode ID")  # logged by a party's process, ours or Flower's, once it is online


@dataclass(frozen=True)
class LocalOptions:
    """The options of `normec federation local`.

    Args:
        app: The folder of the app; None for the example `data`.
        out: The folder of the run.
        parties: The number of parties; None for that of the example.
        config: Settings of the run in addition to those of the app.
        policy: One policy for all parties; None for one that accepts the run.
        flower_nodes: Whether to use Flower's own SuperNodes instead of ours.
        data: The example: "heart-disease" or "digits".
        tables: The table of each party, for an app with a schema.
    """

    app: Path | None
    out: Path
    parties: int | None
    config: Mapping[str, Any]
    policy: Path | None = None
    flower_nodes: bool = False
    data: Literal["heart-disease", "digits"] = "digits"
    tables: Sequence[Path] = ()

    @property
    def example(self) -> bool:
        """Whether this is the example of the four hospitals."""
        return self.app is None and self.data == heart_disease.NAME

    @property
    def count(self) -> int:
        """The number of parties."""
        usual = len(self.tables) or (len(heart_disease.HOSPITALS) if self.example else DEFAULT_PARTIES)
        return self.parties if self.parties is not None else usual


class PartyStatus(NamedTuple):
    """A party as it is displayed: its name, whether it is online, and its spending (`protocol.spending`), if any."""

    name: str
    presence: str
    spending: dict[str, Any] | None


class Federation:
    """A context with a federation on this machine. Parties can be started, killed and started again.

    Args:
        options: The app, the folder, the parties and the settings.

    Raises:
        UsageError: An option or a setting has a mistake; nothing is started then.
    """

    def __init__(self, options: LocalOptions) -> None:
        self.out, self.home = options.out.resolve(), options.out.resolve() / "federation"
        self._options = options
        if options.example and options.count != len(heart_disease.HOSPITALS):
            raise UsageError(
                f"{options.data} has {len(heart_disease.HOSPITALS)} hospitals, got --parties {options.count}; "
                "leave out --parties"
            )
        self.app = options.app.resolve() if options.app is not None else self.home / options.data
        if options.app is None and not self.app.exists():
            write_app(self.app, task=heart_disease.TASK if options.example else None)
        _check_tables(self.app, options)
        usual = {**heart_disease.settings(options.config), **EXAMPLE_SECONDS} if options.example else {}
        own, given = app_config(self.app), {**usual, **options.config}
        self.config = {**_emptied_method_settings(own, given), **given, "out": str(self.out), "parties": options.count}
        self.settings = read({**own, **self.config})
        build.statement(
            self.settings.run, self.settings.run.record_clip
        )  # reports a mistake before anything is started
        if self.settings.summed and options.flower_nodes:
            raise UsageError(
                "Flower's SuperNodes start a process for every request, which forgets the secrets of a secure sum; "
                "leave out --flower-nodes"
            )
        self.method = located(self.settings.run.method, self.app)
        if is_own(self.method):  # so that a mistake in it is reported before anything is started
            methods.build(self.settings.run.model_copy(update={"method": self.method}), 1)
        self._tls = certificates.make_server(self.home / "tls")
        _call_directly("127.0.0.1")
        self.processes = Processes(self.home / "logs", self._environment())
        self.address = ""
        self.nodes: list[int] = []

    def __enter__(self) -> Federation:
        self.processes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.__exit__()

    def control(self) -> superlink.Control:
        return superlink.Control(self.address, self._tls.authority)

    def start_superlink(
        self, check_wanted: Callable[[], None], port: int | None = None, database: bool = False
    ) -> None:
        """Start a SuperLink on a free port, or on `port`, and wait until it answers; `check_wanted` may raise."""
        for attempt in range(ATTEMPTS):  # another process may have taken the port
            try:
                self._start_superlink(check_wanted, free_port() if port is None else port, database)
                break
            except ChildProcessError:
                if attempt == ATTEMPTS - 1:
                    raise

    def _start_superlink(self, check_wanted: Callable[[], None], port: int, database: bool) -> None:
        tls, kept = self._tls, self.home / "superlink.db" if database else None
        nodes = self._options.flower_nodes
        command = superlink.command(tls.certificate, tls.key, tls.authority, port, kept, nodes)
        self.processes.start("superlink", command)
        self.address = f"127.0.0.1:{port}"
        until = time.monotonic() + STARTING
        with self.control() as control:
            while not control.ready():
                check_wanted()
                self.check(["superlink"])
                if time.monotonic() > until:
                    raise TimeoutError(f"the SuperLink did not answer within {STARTING:g} s")
                time.sleep(0.2)

    def register(self) -> None:
        """Create the keys of all parties and register them in the order of their numbers."""
        with self.control() as control:
            keys = [certificates.make_key(self.key(i)) for i in range(self._options.count)]
            self.nodes = [control.register(key) for key in keys]

    def write_roster(self) -> None:
        """Create the parties' keys of secure sums, and their roster, which real parties exchange among themselves."""
        members = []
        for i in range(self._options.count):
            path = self.folder(i) / "identity.pem"
            private_folder(path.parent)
            if not path.exists():
                Identity.generate().save(path)
            members.append(Member(self.title(i), Identity.load(path).public))
        roster = Roster(tuple(members))
        for i in range(self._options.count):
            roster.save(self.folder(i) / "roster.toml")

    def start_party(self, i: int, environment: Mapping[str, str] | None = None) -> None:
        folder, policy = self.folder(i), self._policy(i)
        if self._options.policy is None and not policy.exists():
            private_folder(folder)
            write_atomic(policy, tomli_w.dumps(permissive_policy(self.settings, self.method)))
        named: dict[str, Any] = {
            "partition-id": i,
            "num-partitions": self._options.count,
            "folder": str(folder),
            "policy": str(policy),
        }
        if self._options.tables:
            named["data"] = str(self._options.tables[i].resolve())
        trusted = ["--superlink", self.address, "--root-certificates", str(self._tls.authority)]
        if self._options.flower_nodes:
            written = " ".join(
                f"{key}={value!r}" if type(value) is int else f'{key}="{value}"' for key, value in named.items()
            )
            command = [sys.executable, "-m", "normec", "federation", "supernode", *trusted]
            command += ["--auth-supernode-private-key", str(self.key(i))]
            command += ["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", written]
        else:
            command = [sys.executable, "-m", "normec", "federation", "party", *trusted, "--key", str(self.key(i))]
            command += ["--app", str(self.app), "--folder", str(folder), "--policy", str(policy)]
            command += ["--partition", str(i), "--partitions", str(self._options.count)]
            command += ["--data", named["data"]] if "data" in named else []
        self.processes.start(self.name(i), command, environment)

    def start_run(self, **config: Any) -> int:
        """Start a run, with settings in addition to the options. Returns Flower's run id."""
        with self.control() as control:
            return control.start(self.app, {**self.config, **config})

    def check(self, names: Sequence[str] | None = None) -> None:
        """Raise if one of the processes has ended."""
        for name in names if names is not None else ["superlink", *map(self.name, range(self._options.count))]:
            if self.processes.ended(name) is not None:
                raise ChildProcessError(self.processes.describe_exit(name))

    def name(self, i: int) -> str:
        return f"party-{i}"

    def title(self, i: int) -> str:
        """The name of a party in displays and in the roster."""
        return heart_disease.HOSPITALS[i] if self._options.example else self.name(i)

    def statuses(self) -> list[PartyStatus]:
        """The state of each party, and what it has spent."""
        return [self._status(i) for i in range(self._options.count)]

    def _status(self, i: int) -> PartyStatus:
        try:
            spent = spending(self.folder(i), load_policy(self._policy(i)))
        except UsageError:  # nothing was begun yet, or a line is just being written
            spent = None
        if self.processes.started(self.name(i)) and self.processes.ended(self.name(i)) is None:
            presence = "online" if self.processes.has_logged(self.name(i), CONNECTED) else "starting"
            return PartyStatus(self.title(i), presence, spent)
        return PartyStatus(self.title(i), "offline", spent)

    def _policy(self, i: int) -> Path:
        return self._options.policy or self.folder(i) / "policy.toml"

    def folder(self, i: int) -> Path:
        return self.home / "parties" / self.name(i)

    def key(self, i: int) -> Path:
        return self.home / "keys" / self.name(i)

    def _environment(self) -> dict[str, str]:
        cores = max(1, (os.cpu_count() or 1) // (self._options.count + 1))
        return {
            **superlink.QUIET,
            "FLWR_HOME": str(self.home / "flwr"),
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores)),
        }


def run(
    options: LocalOptions,
    callbacks: Sequence[Callback],
    wanted: Callable[[], bool],
    show: Callable[[list[PartyStatus]], None] = lambda _: None,
) -> Result:
    """Run a federation in `options.out`, or continue it there. At the end, the run's page has what each party spent.

    Args:
        options: The app, the folder, the parties and the settings.
        callbacks: Receive the rows of the run's history.
        wanted: The run is interrupted when this returns False.
        show: Is called about once a second with the state of all parties.

    Returns:
        The result of the run.

    Raises:
        UsageError: An option or a setting has a mistake, or the folder holds another federation.
        Interrupted: The run is no longer wanted.
        ChildProcessError: The SuperLink, a party or the server ended early; the message names its log.
        ConnectionError: The SuperLink did not register a party or did not start the run.
        TimeoutError: The SuperLink or the server's app did not start in time.
    """

    def check_wanted() -> None:
        if not wanted():
            raise Interrupted

    federation = Federation(options)
    config = federation.settings.run
    inputs.claim(federation.home, federation.app, federation.settings, options.tables)
    if (options.out / "config.toml").exists():
        model = load(options.out / "config.toml").model  # known to the app alone
        known = runs.existing(options.out, config.model_copy(update={"model": model}), federation.method)
        if known is not None and known.summary["status"] == "finished":
            _refuse_more_rounds(options.out, known, methods.rounds(config))
            return known
    before = read_if_present(options.out / SUMMARY)
    try:
        with federation:
            federation.start_superlink(check_wanted)
            federation.register()
            if federation.settings.summed:
                federation.write_roster()
            for i in range(options.count):
                federation.start_party(i)
            flower_run = federation.start_run()
            follower = Follower(options.out, methods.rounds(config) or 0, callbacks)

            def watch() -> None:
                check_wanted()
                federation.check()
                follower.look()
                show(federation.statuses())

            outcome = _outcome(federation, flower_run, watch)
            follower.look()
            show(federation.statuses())
            if outcome:
                raise ChildProcessError(f"the server {outcome}; see {federation.processes.log('superlink')}")
    except (Interrupted, ChildProcessError, TimeoutError) as error:
        if read_if_present(options.out / SUMMARY) == before:
            _note_interruption(options.out)
        elif isinstance(error, Interrupted):  # the server had already finished and written its summary
            return saved_run.read(options.out)
        raise
    _write_statements(options.out, federation)
    return saved_run.read(options.out)


def _refuse_more_rounds(out: Path, known: Result, rounds: int | None) -> None:
    """Refuse to show a finished run as the result of more rounds than it has."""
    if rounds is not None and rounds > known.summary["rounds"]:
        raise UsageError(
            f"{out} holds a finished run of {known.summary['rounds']} rounds, got rounds = {rounds}, and a federation "
            "is not continued; choose another folder with --out"
        )


def _check_tables(app: Path, options: LocalOptions) -> None:
    """Read the parties' tables once, so that a mistake in them is reported before anything is started."""
    if not options.tables:
        if needs_tables(app):
            raise UsageError(
                f"the parties of {app.name} read tables; name one for each of them, as in --table north.csv --table "
                "south.csv"
            )
        return
    if len(options.tables) != options.count:
        raise UsageError(f"--table must be given once for each of {options.count} parties, got {len(options.tables)}")
    schema, known = schema_of(app), dict[str, Path]()
    for table in options.tables:
        read_table(table, schema)
        content = inputs.digest(table)
        if content in known:
            raise UsageError(
                f"--table {table} has the same content as --table {known[content]}: two parties would send messages "
                "about every record, and each counts its own alone; give each party a table of its own"
            )
        known[content] = table


def _write_statements(out: Path, federation: Federation) -> None:
    """Add what each party has spent to the run's folder and to its page."""
    held = [{"name": one.name, **one.spending} for one in federation.statuses() if one.spending is not None]
    write_atomic(out / STATEMENTS, json.dumps({"parties": held}, indent=1) + "\n", private=True)
    if is_run(out):
        page.write_run(out)


def _outcome(federation: Federation, flower_run: int, watch: Callable[[], None]) -> str:
    """The outcome of a run according to Flower, "" if it completed. Raises if the server's process is killed."""
    processes, server = federation.processes, None
    until = time.monotonic() + STARTING
    with federation.control() as control:
        while (outcome := control.outcome(flower_run)) is None:
            watch()
            if server is None:
                server = processes.find("flwr-serverapp")
                if server is None and sys.platform == "linux" and time.monotonic() > until:
                    raise TimeoutError(f"Flower did not start the server's app within {STARTING:g} s")
            processes.wait(1.0, server)
            if server is not None and server.ended:
                return _outcome_after_exit(control, flower_run, server.pid)
        return outcome


def _outcome_after_exit(control: superlink.Control, flower_run: int, pid: int) -> str:
    """The outcome of a run whose server has ended: a server reports it before it ends, unless it was killed."""
    until = time.monotonic() + OUTCOME_SECONDS
    while (outcome := control.outcome(flower_run)) is None:
        if time.monotonic() > until:
            raise ChildProcessError(
                f"the server's process {pid} was killed or crashed before the end of the run; "
                "the same command continues the run"
            )
        time.sleep(0.2)
    return outcome


def _call_directly(host: str) -> None:
    """Exempt `host` from a proxy in the environment, also for the processes that are started."""
    for name in ("NO_PROXY", "no_proxy"):
        known = [part for part in os.environ.get(name, "").split(",") if part]
        if host not in known:
            os.environ[name] = ",".join([*known, host])


def _emptied_method_settings(app: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """The app's settings that belong to its method, made empty, if another method is given."""
    if given.get("method", "") in ("", app.get("method")):
        return {}
    return {name: "" for name in OF_A_METHOD if app.get(name, "") != ""}


def permissive_policy(settings: Settings, method: str | None = None) -> dict[str, Any]:
    """A policy that allows this run, for trials in which all parties belong to one user.

    Args:
        settings: The settings of the run.
        method: The method of the run with the path of its file (`settings.located`), if it is a class in a file.
    """
    config = settings.run
    policy: dict[str, Any] = {
        "delta": config.delta,
        "unit": config.unit,
        "relation": config.relation,
        "least_sigma": 1e-6,
        "methods": [_as_parties_know(config, method)],
        "trusts": [config.trust] if config.private else ["local", "secure-sum", "central"],
        "least_colluding": settings.colluding,
        "simulation": config.private and config.noise == "seeded",
        "allow_without_noise": not config.private,
        "report_loss": not config.private,
    }
    if config.private:  # twice the run's, because a kill may leave messages that are paid for and not sent
        policy["epsilon"] = 2 * (config.epsilon or build.DEFAULT_EPSILON) if config.sigma is None else 1e6
    return policy


def _as_parties_know(config: RunConfig, method: str | None) -> str:
    """The name of a run's method for parties (`algorithms.registry`)."""
    if is_own(config.method):
        return method or config.method
    return registry.name_of(methods.build(config, _DIMENSION))


def _note_interruption(out: Path) -> None:
    """Note in the run's folder that the server was stopped before it wrote a summary, and in which round."""
    if not (out / "config.toml").exists():
        return
    history = History(out / "metrics.jsonl")
    history.reread()
    last = history.rows[-1]["round"] if len(history) else 0
    record_end(read_toml(out / "config.toml"), out, {"status": "interrupted", "stopped": "interrupted", "round": last})
