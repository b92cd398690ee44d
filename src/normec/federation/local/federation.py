"""A whole federation on this machine: a SuperLink, one process per party, and a run, over TLS; all processes end.

OUT/            the folder of the run
OUT/federation/ tls/ keys/ flwr/ (Flower's home) logs/ digits/ (an app, if none was given) parties/party-I/
"""

from __future__ import annotations

import os
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from ...algorithms import registry
from ...errors import Interrupted, UsageError
from ...experiments import build, methods, runs
from ...settings.config import RunConfig, is_own, load
from ...storage.history import History
from ...system.files import private_folder, read_if_present, read_toml, write_atomic
from ...training.callbacks import Callback
from ..flower.scaffold import write_app
from ..flower.settings import Settings, located, read
from ..secure_sum.keys import Identity
from ..secure_sum.roster import Member, Roster
from . import certificates, superlink
from .follower import Follower
from .processes import Processes, free_port

STARTING = 300.0  # seconds until the SuperLink must answer, and until Flower must have started the server's app
OUTCOME_SECONDS = 3.0  # seconds for the SuperLink to report the outcome after the server's process has ended
ATTEMPTS = 3
_DIMENSION = 2**20  # of a model; the class of a method does not depend on it
SUMMARY = "summary.json"
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class LocalOptions:
    """The options of `normec federation local`. `flower_nodes` uses Flower's own SuperNodes instead of ours."""

    app: Path | None
    out: Path
    parties: int
    config: Mapping[str, Any]
    policy: Path | None = None
    flower_nodes: bool = False


class Federation:
    """A context with a federation on this machine. Parties can be started, killed and started again."""

    def __init__(self, options: LocalOptions) -> None:
        self.out, self.home = options.out.resolve(), options.out.resolve() / "federation"
        self._options = options
        self.app = options.app.resolve() if options.app is not None else self.home / "digits"
        if options.app is None and not self.app.exists():
            write_app(self.app)
        self.config = {**options.config, "out": str(self.out), "parties": options.parties}
        self.settings = read({**app_config(self.app), **self.config})
        if self.settings.summed and options.flower_nodes:
            raise UsageError(
                "Flower's SuperNodes start a process for every request, which forgets the secrets of a secure sum; "
                "leave out --flower-nodes"
            )
        self.method = located(self.settings.run.method, self.app)
        if is_own(self.method):  # so that a mistake in it shows before anything is started
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
        command = superlink.command(tls.certificate, tls.key, tls.authority, port, kept)
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
            keys = [certificates.make_key(self.key(i)) for i in range(self._options.parties)]
            self.nodes = [control.register(key) for key in keys]

    def write_roster(self) -> None:
        """Create the parties' keys of secure sums, and their roster, which real parties exchange among themselves."""
        members = []
        for i in range(self._options.parties):
            path = self.folder(i) / "identity.pem"
            private_folder(path.parent)
            if not path.exists():
                Identity.generate().save(path)
            members.append(Member(self.name(i), Identity.load(path).public))
        roster = Roster(tuple(members))
        for i in range(self._options.parties):
            roster.save(self.folder(i) / "roster.toml")

    def start_party(self, i: int, environment: Mapping[str, str] | None = None) -> None:
        folder, policy = self.folder(i), self._options.policy
        if policy is None:
            policy = folder / "policy.toml"
            if not policy.exists():
                private_folder(folder)
                write_atomic(policy, tomli_w.dumps(agreeing(self.settings, self.method)))
        named = {
            "partition-id": i,
            "num-partitions": self._options.parties,
            "folder": str(folder),
            "policy": str(policy),
        }
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
            command += ["--partition", str(i), "--partitions", str(self._options.parties)]
        self.processes.start(self.name(i), command, environment)

    def start_run(self, **config: Any) -> int:
        """Start a run, with settings in addition to the options. Returns Flower's run id."""
        with self.control() as control:
            return control.start(self.app, {**self.config, **config})

    def check(self, names: Sequence[str] | None = None) -> None:
        """Raise if one of the processes has ended."""
        for name in names if names is not None else ["superlink", *map(self.name, range(self._options.parties))]:
            if self.processes.ended(name) is not None:
                raise ChildProcessError(self.processes.describe_exit(name))

    def name(self, i: int) -> str:
        return f"party-{i}"

    def folder(self, i: int) -> Path:
        return self.home / "parties" / self.name(i)

    def key(self, i: int) -> Path:
        return self.home / "keys" / self.name(i)

    def _environment(self) -> dict[str, str]:
        cores = max(1, (os.cpu_count() or 1) // (self._options.parties + 1))
        return {
            **superlink.QUIET,
            "FLWR_HOME": str(self.home / "flwr"),
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores)),
        }


def run(options: LocalOptions, callbacks: Sequence[Callback], wanted: Callable[[], bool]) -> runs.Result:
    """Run a federation in `options.out`, or continue it there. It stops when it is no longer `wanted`."""

    def check_wanted() -> None:
        if not wanted():
            raise Interrupted

    federation = Federation(options)
    config = federation.settings.run
    if (options.out / "config.toml").exists():
        model = load(options.out / "config.toml").model  # known to the app alone
        known = runs.existing(options.out, config.model_copy(update={"model": model}), federation.method)
        if known is not None and known.summary["status"] == "finished":
            return known
    before = read_if_present(options.out / SUMMARY)
    try:
        with federation:
            federation.start_superlink(check_wanted)
            federation.register()
            if federation.settings.summed:
                federation.write_roster()
            for i in range(options.parties):
                federation.start_party(i)
            flower_run = federation.start_run()
            follower = Follower(options.out, methods.rounds(config) or 0, callbacks)

            def watch() -> None:
                check_wanted()
                federation.check()
                follower.look()

            outcome = _outcome(federation, flower_run, watch)
            follower.look()
            if outcome:
                raise ChildProcessError(f"the server {outcome}; see {federation.processes.log('superlink')}")
    except (Interrupted, ChildProcessError, TimeoutError) as error:
        if read_if_present(options.out / SUMMARY) == before:
            _note_interruption(options.out)
        elif isinstance(error, Interrupted):  # the server had already finished and written its summary
            return runs.read(options.out)
        raise
    return runs.read(options.out)


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


def app_config(app: Path) -> dict[str, Any]:
    """The settings in an app's pyproject.toml."""
    path = app / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        raise UsageError(f"{app} contains no Flower app; create one with: normec federation init {app}") from None
    found: dict[str, Any] = table.get("config", {})
    return found


def agreeing(settings: Settings, method: str | None = None) -> dict[str, Any]:
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
    runs.record_end(
        read_toml(out / "config.toml"), out, {"status": "interrupted", "stopped": "interrupted", "round": last}
    )
