"""A whole federation on this machine: a SuperLink, a process a party, a run; over TLS, and nothing left behind.

OUT/            the run's folder, as any other run's
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

from ...errors import Interrupted, UsageError
from ...experiments import build, methods, runs
from ...settings.config import is_own, load
from ...storage.history import History
from ...system.files import private_folder, read_if_present, read_toml, write_atomic
from ...training.callbacks import Callback
from ..flower.scaffold import write_app
from ..flower.settings import Settings, located, read
from . import certificates, superlink
from .processes import Processes, free_port
from .watching import Follower

STARTING = 300.0  # seconds for a SuperLink to answer, and for Flower to start the server's app
LAST_WORD = 3.0  # seconds for the SuperLink to say how a run ended whose server has ended
ATTEMPTS = 3
SUMMARY = "summary.json"
SCRIPTS = Path(sys.executable).parent


@dataclass(frozen=True)
class Asked:
    """What `normec federation local` was asked for. `flower_nodes`: Flower's own SuperNodes in place of our parties."""

    app: Path | None
    out: Path
    parties: int
    config: Mapping[str, Any]
    policy: Path | None = None
    flower_nodes: bool = False


class Federation:
    """A federation on this machine while entered. Parties can be started, killed and started again."""

    def __init__(self, asked: Asked) -> None:
        self.out, self.home = asked.out.resolve(), asked.out.resolve() / "federation"
        self._asked = asked
        self.app = asked.app.resolve() if asked.app is not None else self.home / "digits"
        if asked.app is None and not self.app.exists():
            write_app(self.app)
        self.config = {**asked.config, "out": str(self.out), "parties": asked.parties}
        self.settings = read({**app_config(self.app), **self.config})
        self.method = located(self.settings.run.method, self.app)
        if is_own(self.method):  # a mistake in it shows now, before anything is started
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

    def start_superlink(self, patient: Callable[[], None], port: int | None = None, database: bool = False) -> None:
        """Start a SuperLink on a free port, or on `port`, and wait until it answers. `patient` may end the waiting."""
        for attempt in range(ATTEMPTS):  # somebody else may have taken the port meanwhile
            try:
                self._start_superlink(patient, free_port() if port is None else port, database)
                break
            except ChildProcessError:
                if attempt == ATTEMPTS - 1:
                    raise

    def _start_superlink(self, patient: Callable[[], None], port: int, database: bool) -> None:
        tls, kept = self._tls, self.home / "superlink.db" if database else None
        command = superlink.command(tls.certificate, tls.key, tls.authority, port, kept)
        self.processes.start("superlink", command)
        self.address = f"127.0.0.1:{port}"
        until = time.monotonic() + STARTING
        with self.control() as control:
            while not control.ready():
                patient()
                self.check(["superlink"])
                if time.monotonic() > until:
                    raise TimeoutError(f"the SuperLink did not answer within {STARTING:g} s")
                time.sleep(0.2)

    def register(self) -> None:
        """Every party gets a key and is let in, in the order of its number."""
        with self.control() as control:
            keys = [certificates.make_key(self.key(i)) for i in range(self._asked.parties)]
            self.nodes = [control.register(key) for key in keys]

    def start_party(self, i: int, environment: Mapping[str, str] | None = None) -> None:
        folder, policy = self.folder(i), self._asked.policy
        if policy is None:
            policy = folder / "policy.toml"
            if not policy.exists():
                private_folder(folder)
                write_atomic(policy, tomli_w.dumps(agreeing(self.settings, self.method)))
        named = {"partition-id": i, "num-partitions": self._asked.parties, "folder": str(folder), "policy": str(policy)}
        trusted = ["--superlink", self.address, "--root-certificates", str(self._tls.authority)]
        if self._asked.flower_nodes:
            written = " ".join(
                f"{key}={value!r}" if type(value) is int else f'{key}="{value}"' for key, value in named.items()
            )
            command = [sys.executable, "-m", "normec", "federation", "supernode", *trusted]
            command += ["--auth-supernode-private-key", str(self.key(i))]
            command += ["--host", "127.0.0.1", "--port", str(free_port()), "--node-config", written]
        else:
            command = [sys.executable, "-m", "normec", "federation", "party", *trusted, "--key", str(self.key(i))]
            command += ["--app", str(self.app), "--folder", str(folder), "--policy", str(policy)]
            command += ["--partition", str(i), "--partitions", str(self._asked.parties)]
        self.processes.start(self.name(i), command, environment)

    def start_run(self, **config: Any) -> int:
        """Start a run, with settings on top of what was asked for; returns Flower's number of it."""
        with self.control() as control:
            return control.start(self.app, {**self.config, **config})

    def check(self, names: Sequence[str] | None = None) -> None:
        """Raise if one of the processes has ended."""
        for name in names if names is not None else ["superlink", *map(self.name, range(self._asked.parties))]:
            if self.processes.ended(name) is not None:
                raise ChildProcessError(self.processes.epitaph(name))

    def name(self, i: int) -> str:
        return f"party-{i}"

    def folder(self, i: int) -> Path:
        return self.home / "parties" / self.name(i)

    def key(self, i: int) -> Path:
        return self.home / "keys" / self.name(i)

    def _environment(self) -> dict[str, str]:
        cores = max(1, (os.cpu_count() or 1) // (self._asked.parties + 1))
        return {
            **superlink.QUIET,
            "FLWR_HOME": str(self.home / "flwr"),
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ.get('PATH', '')}",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(cores)),
        }


def run(asked: Asked, callbacks: Sequence[Callback], wanted: Callable[[], bool]) -> runs.Result:
    """The run in `asked.out`, from the start or from where it stopped; stops when it is no longer `wanted`."""

    def patient() -> None:
        if not wanted():
            raise Interrupted

    federation = Federation(asked)
    config = federation.settings.run
    if (asked.out / "config.toml").exists():
        model = load(asked.out / "config.toml").model  # known to the app alone
        known = runs.held(asked.out, config.model_copy(update={"model": model}), federation.method)
        if known is not None and known.summary["status"] == "finished":
            return known
    before = read_if_present(asked.out / SUMMARY)
    try:
        with federation:
            federation.start_superlink(patient)
            federation.register()
            for i in range(asked.parties):
                federation.start_party(i)
            flower_run = federation.start_run()
            follower = Follower(asked.out, methods.rounds(config) or 0, callbacks)

            def watch() -> None:
                patient()
                federation.check()
                follower.look()

            outcome = _outcome(federation, flower_run, watch)
            follower.look()
            if outcome:
                raise ChildProcessError(f"the server {outcome}; see {federation.processes.log('superlink')}")
    except (Interrupted, ChildProcessError, TimeoutError) as error:
        if read_if_present(asked.out / SUMMARY) == before:
            _leave_word(asked.out)
        elif isinstance(error, Interrupted):  # it came when the server had finished and written its summary
            return runs.read(asked.out)
        raise
    return runs.read(asked.out)


def _outcome(federation: Federation, flower_run: int, watch: Callable[[], None]) -> str:
    """What Flower says of the run's end ("": it completed). Raises if the server's process dies without a word."""
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
                return _last_word(control, flower_run, server.pid)
        return outcome


def _last_word(control: superlink.Control, flower_run: int, pid: int) -> str:
    """How a run ended whose server has ended: a server says it before it leaves, unless it was killed."""
    until = time.monotonic() + LAST_WORD
    while (outcome := control.outcome(flower_run)) is None:
        if time.monotonic() > until:
            raise ChildProcessError(
                f"the server's process {pid} was killed or crashed before the end of the run; "
                "the same command goes on where it stopped"
            )
        time.sleep(0.2)
    return outcome


def _call_directly(host: str) -> None:
    """Keep calls to this machine away from a proxy that the environment names; what is started inherits it."""
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
        raise UsageError(f"{app} holds no Flower app; write one with: normec federation init {app}") from None
    found: dict[str, Any] = table.get("config", {})
    return found


def agreeing(settings: Settings, method: str | None = None) -> dict[str, Any]:
    """A policy under which a party takes part in just this run: for trying out, where all parties are one's own.

    Args:
        settings: The run's settings.
        method: The run's method, if it is a class in a file: with the file's path (`settings.located`).
    """
    config = settings.run
    policy: dict[str, Any] = {
        "delta": config.delta,
        "unit": config.unit,
        "relation": config.relation,
        "least_sigma": 1e-6,
        "methods": [_as_parties_know(method or config.method, config.server_norm)],
        "trusts": [config.trust] if config.private else ["local", "central"],
        "simulation": config.private and config.noise == "seeded",
        "allow_without_noise": not config.private,
        "report_loss": not config.private,
    }
    if config.private:  # twice the run's: a message that a kill left paid for and unsent counts all the same
        policy["epsilon"] = 2 * (config.epsilon or build.DEFAULT_EPSILON) if config.sigma is None else 1e6
    return policy


def _as_parties_know(method: str, server_norm: bool | str | None) -> str:
    """The name by which parties know a method of the settings (`algorithms.registry`)."""
    if is_own(method):
        return method
    if method == "normec" and isinstance(server_norm, str):
        return "normec-by-tensor"
    return method.removesuffix("-norm").removesuffix("-clip")


def _leave_word(out: Path) -> None:
    """The server was stopped before it could say how the run ended; its folder says so, and how far it came."""
    if not (out / "config.toml").exists():
        return
    history = History(out / "metrics.jsonl")
    history.reread()
    last = history.rows[-1]["round"] if len(history) else 0
    runs.note(read_toml(out / "config.toml"), out, {"status": "interrupted", "stopped": "interrupted", "round": last})
