"""A federation of real processes for tests: five parties over TLS, which can be stopped, killed and started again."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

import normec
import normec.data
from normec.algorithms.method import MEMORY, Steps, Tables
from normec.experiments import methods
from normec.federation.flower.scaffold import write_app
from normec.federation.flower.settings import app_config, located, read
from normec.federation.local.federation import Federation, LocalOptions
from normec.federation.protocol import party_state
from normec.federation.protocol.account import read_releases
from normec.federation.protocol.party_state import PartyState
from normec.federation.protocol.reconciliation import after_absence
from normec.storage.history import History

from ..support.waiting import wait_for
from .forked_processes import ForkedProcesses

PARTS = Path(__file__).with_name("parts")
OWN_METHOD = Path(__file__).parents[1] / "federation" / "methods" / "my_method.py"
PARTIES = 5
WITHOUT_NOISE = {"private": False, "epsilon": "", "delta": "", "unit": "", "relation": "", "trust": "", "noise": ""}


def write_test_app(folder: Path, task: str) -> None:
    """Write the app of `init`, with another task and a client that can be stopped."""
    write_app(folder)
    for name, source in (("task", task), ("client", "stoppable"), ("sorted_digits", "sorted_digits")):
        shutil.copy(PARTS / f"{source}.py", folder / "learning" / f"{name}.py")
    shutil.copy(OWN_METHOD, folder)


def keep_digits(path: Path) -> None:
    """Save the digits as plain arrays: loading scikit-learn in every process would take longer than all the rest."""
    found = normec.data.load("digits")
    assert found.test is not None
    arrays = zip(
        ("inputs", "targets", "test_inputs", "test_targets"), (*found.train.tensors, *found.test.tensors), strict=True
    )
    np.savez(path, **{name: tensor.numpy() for name, tensor in arrays})


class NetworkFederation:
    """A SuperLink and five parties, which wait for runs while the context is open. `task`: "logistic" or "cnn"."""

    def __init__(self, folder: Path, task: str, database: bool = False) -> None:
        self.folder, self.task, self._database = folder, task, database
        write_test_app(folder / "app", task)
        keep_digits(folder / "digits.npz")
        os.environ["NORMEC_TEST_FOLDER"] = str(folder)  # for every process that is started from here
        self.federation = Federation(LocalOptions(folder / "app", folder / "home", PARTIES, {}))
        home, settings = self.federation.home, self.federation._environment()
        self.federation.processes = ForkedProcesses(home / "logs", settings, served=True)

    def __enter__(self) -> NetworkFederation:
        self.federation.__enter__()
        try:
            self.federation.start_superlink(lambda: None, database=self._database)
            self.federation.register()
            for i in range(PARTIES):
                self.policy(i)
                self.start(i)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.federation.__exit__()
        os.environ.pop("NORMEC_TEST_FOLDER", None)

    def policy(self, i: int, epsilon: float = 1e6, **rules: object) -> None:
        """Write a party's policy, which allows all that `rules` do not restrict."""
        allowed = {
            "epsilon": epsilon,
            "least_sigma": 1e-6,
            "methods": ["normec", "clip21", "dpsgd", "ef21", "gd", "my_method.py:Clip21SGDM"],
            "trusts": ["local", "central"],
            "allow_without_noise": True,
            **rules,
        }
        folder = self.federation.folder(i)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(OWN_METHOD, folder)
        (folder / "policy.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in allowed.items()))

    def start(self, i: int) -> None:
        self.federation.start_party(i)

    def kill(self, i: int) -> None:
        self.federation.processes.kill(self.federation.name(i))

    def kill_server(self) -> bool:
        """Kill the server of the run and wait for its end; False if none runs."""
        server = self.federation.processes.find("flwr-serverapp")
        if server is None:
            return False
        os.kill(server.pid, signal.SIGKILL)
        wait_for(lambda: server.ended, "the end of the server")
        server.close()
        return True

    def stop_at(self, i: int, phase: str, round: int) -> None:
        """Let a party stop in a phase of a round (`parts/stoppable.py`)."""
        (self.folder / f"stopped-{i}.json").unlink(missing_ok=True)  # of an earlier test
        (self.folder / f"stop-{i}.json").write_text(json.dumps({"phase": phase, "round": round}))

    def stopped(self, i: int) -> bool:
        return (self.folder / f"stopped-{i}.json").exists()

    def out(self, name: str) -> Path:
        return self.folder / name

    def begin(self, name: str, **config: Any) -> int:
        self.config = {"name": name, "out": str(self.out(name)), **config}
        return self.federation.start_run(**self.config)

    def end(self, run: int) -> str:
        """Wait for a run's end, and return what Flower says of it: nothing if all went well."""
        with self.federation.control() as control:
            done = lambda: control.outcome(run) is not None  # noqa: E731
            wait_for(done, f"the end of {self.config['name']}", self._alive, every=1.0)
            return control.outcome(run) or ""

    def _alive(self) -> None:
        self.federation.check(["superlink"])

    def play(self, name: str, **config: Any) -> None:
        assert self.end(self.begin(name, **config)) == ""

    def rows(self, name: str) -> list[dict[str, Any]]:
        history = History(self.out(name) / "metrics.jsonl")
        history.reread()
        return history.rows

    def summary(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out(name) / "summary.json").read_text())
        return found

    def facts(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out(name) / "checkpoint" / "latest.json").read_text())
        return found

    def server(self, name: str) -> dict[str, Tensor]:
        return load_file(self.out(name) / "checkpoint" / self.facts(name)["file"])

    def problem(self, silent: int = 0) -> normec.Problem:
        """The data of all parties as one problem, with `silent` more clients, whose data do not matter."""
        task = importlib.import_module(f"tests.federation_network.parts.{self.task}")
        clients = [task.data(i, PARTIES) for i in range(PARTIES)]
        return normec.Problem(task.model(), task.loss, clients + clients[:1] * silent, task.test())

    def method(self, config: dict[str, Any], dimension: int) -> normec.Method:
        app = self.folder / "app"
        run = read({**app_config(app), **config}).run
        return methods.build(run.model_copy(update={"method": located(run.method, app)}), dimension)

    def check(self, name: str) -> None:
        """Check what holds after every run: ĝ = mean g_i, memories agree, accounts count enough, rounds have rows."""
        kept, facts = self.server(name), self.facts(name)
        method = self.method(self.config, len(kept["x"]))
        if self.config.get("trust") != "central":  # there the server's own noise is in ĝ, and in nobody's memory
            torch.testing.assert_close(kept["client.memory"].mean(0), kept["server.estimate"], rtol=1e-4, atol=1e-6)
        assert [row["round"] for row in self.rows(name)] == list(range(len(self.rows(name))))
        assert facts["messages"] == sum(record["accepted"] for record in facts["seats"].values())
        for i in range(PARTIES):
            party, record = facts["identity"]["parties"][i], facts["seats"][facts["identity"]["parties"][i]]
            own = party_state.load(party_state.path_of(self.federation.folder(i), f"{name}~{facts['number']}", party))
            assert own is not None, f"party {i} has no state of {name}"
            if own.client is not None:
                state = self._at_the_end(method, own, record, facts["round"], kept["x"])
                torch.testing.assert_close(state[MEMORY][0], kept["client.memory"][i], rtol=1e-4, atol=1e-6)
            if self.summary(name)["privacy"] is not None:
                assert read_releases(self.federation.folder(i)).count(name) >= len(self.left(i, name))

    @staticmethod
    def _at_the_end(method: normec.Method, own: PartyState, record: dict[str, Any], end: int, x: Tensor) -> Tables:
        """A party's state after the last round, by the method's own functions."""
        steps = Steps(method, torch.zeros_like(x))
        if own.accepted == record["accepted"]:
            return after_absence(steps, own, end, x)
        assert own.pending is not None  # the server has taken it, the party has not heard of it yet
        assert own.pending.digest == record["digest"]
        draft = steps.absent(own.pending.draft, record["since"] - 1 - own.since)
        return steps.absent(steps.commit(draft, own.pending.taken[None]), end - record["since"])

    def left(self, i: int, name: str) -> set[str]:
        """Digests of all messages of a run that a party ever began to send."""
        path = self.folder / f"left-{i}.txt"
        lines = path.read_text().split("\n") if path.exists() else []
        return {line.split()[1] for line in lines if line.startswith(f"{name}~")}
