"""python -m benchmarks.speed.federation: seconds per round of a federation over loopback, and the CPU use of waiting.

Every federation is a SuperLink, one process per party and the server's process, with TLS, registered keys, secure
noise, and local trust or a secure sum. The model is a linear layer on a few synthetic records, so a round consists of
what a federation adds: requests, checks, accounts, noise and checkpoints.

The CPU use is that of all processes together, in percent of one core: `idle`, while the parties wait for a run, and
`waiting`, while a run waits for the answer of one party, which is stopped for that time. `cpu` is the CPU time of a
round in seconds, of the SuperLink with the server, and of one party; unlike the time of a round, it does not depend on
what else runs on the machine.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from normec.cli import options as o
from normec.federation.flower.scaffold import write_app
from normec.federation.local.federation import Federation, LocalOptions

FEATURES = 64
SKIPPED = 3  # rounds at the start, in which parties load their data and shake hands
SPARE = 10_000  # rounds that are never reached, so that there is an open one to the end
PAUSE = 10.0  # seconds over which the CPU use is measured
LIMIT = 600.0  # seconds without a new round after which a measurement fails
TASK = '''"""A linear layer on synthetic records."""

import torch
from torch import nn
from torch.utils.data import TensorDataset


def model():
    torch.manual_seed(0)
    return nn.Linear({features}, {outputs})


def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def data(partition, partitions):
    random = torch.Generator().manual_seed(partition)
    return TensorDataset(torch.randn(20, {features}, generator=random), torch.arange(20) % {outputs})


def test():
    return None
'''

app = typer.Typer(name="python -m benchmarks.speed.federation", rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    parties: Annotated[str, typer.Option(metavar="N[,N…]", help="Numbers of parties.")] = "1,3,5,10",
    dimensions: Annotated[str, typer.Option(metavar="D[,D…]", help="Numbers of parameters.")] = "650,1000000",
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of each federation.")] = 30,
    trust: Annotated[
        Literal["local", "secure-sum"],
        typer.Option(help="What the server sees; a secure sum has three exchanges a round."),
    ] = "local",
    cpu: Annotated[bool, typer.Option(help="Also measure the CPU use of waiting processes.")] = True,
    as_json: o.Json = False,
) -> int:
    """Measure the rounds of federations on this machine."""
    found = []
    for dimension in map(int, dimensions.split(",")):
        for n in map(int, parties.split(",")):
            found.append(measured(n, dimension, rounds, trust, cpu))
            if not as_json:
                print(_line(found[-1]), flush=True)
    if as_json:
        print(json.dumps(found))
    return 0


def measured(parties: int, dimension: int, rounds: int, trust: str, cpu: bool) -> dict[str, Any]:
    """Run one federation in a temporary folder, and return its measurements."""
    outputs = max(1, round(dimension / (FEATURES + 1)))
    folder = Path(tempfile.mkdtemp(prefix="federation-"))
    try:
        write_app(folder / "app")
        task = TASK.format(features=FEATURES, outputs=outputs)
        (folder / "app" / "learning" / "task.py").write_text(task, encoding="utf-8")
        config = {"rounds": SKIPPED + rounds + SPARE, "lr": 0.1, "trust": trust}
        out: dict[str, Any] = {
            "parties": parties,
            "dimension": outputs * (FEATURES + 1),
            "rounds": rounds,
            "trust": trust,
        }
        with Federation(LocalOptions(folder / "app", folder / "run", parties, config)) as federation:
            federation.start_superlink(lambda: None)
            federation.register()
            if federation.settings.summed:
                federation.write_roster()
            for i in range(parties):
                federation.start_party(i)
            if cpu:
                _wait_until_idle(federation)
                out["idle"] = _cpu_use(federation)
            federation.start_run()
            times = [_time_of_row(federation, k) for k in range(SKIPPED)]
            before = _cpu_seconds(federation)
            times += [_time_of_row(federation, SKIPPED + k) for k in range(rounds)]
            used = {name: (after - before[name]) / rounds for name, after in _cpu_seconds(federation).items()}
            out["cpu"] = {"server": used["server"], "party": used["parties"] / parties}
            out |= _summary([b - a for a, b in zip(times[SKIPPED - 1 :], times[SKIPPED:], strict=False)])
            if cpu:
                out["waiting"] = _cpu_use_while_waiting(federation)
        return out
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)}


def _line(found: dict[str, Any]) -> str:
    text = f"{found['parties']:3d} parties, d = {found['dimension']:7d}: {found['median']:.3f} s a round"
    text += f" ({found['least']:.3f} to {found['most']:.3f}), {found['cpu']['server']:.3f} s of CPU at the server"
    text += f" and {found['cpu']['party']:.3f} s at a party"
    if "idle" in found:
        text += f"; CPU {found['idle']:.1f} % idle, {found['waiting']:.1f} % while a round waits"
    return text


def _time_of_row(federation: Federation, k: int) -> float:
    """The time at which the server wrote row `k` of the history, which it does when it closes the round."""
    path, until = federation.out / "metrics.jsonl", time.monotonic() + LIMIT
    while not path.exists() or path.read_bytes().count(b"\n") <= k:
        federation.check()
        if time.monotonic() > until:
            raise TimeoutError(f"round {k} did not end within {LIMIT:g} s; see {federation.processes.log('superlink')}")
        time.sleep(0.005)
    return time.monotonic()


def _wait_until_idle(federation: Federation) -> None:
    """Wait until all parties wait for requests."""
    waiting = [federation.processes.log(federation.name(i)) for i in range(len(federation.nodes))]
    while not all(path.exists() and "waits for requests" in path.read_text() for path in waiting):
        federation.check()
        time.sleep(0.1)
    time.sleep(1.0)


def _cpu_use_while_waiting(federation: Federation) -> float:
    """The CPU use while a round waits for the first party."""
    party = next(pid for pid in federation.processes.marked() if str(federation.key(0)) in _command(pid))
    os.kill(party, signal.SIGSTOP)
    try:
        time.sleep(2.0)  # the other parties answer
        return _cpu_use(federation)
    finally:
        os.kill(party, signal.SIGCONT)


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _cpu_use(federation: Federation) -> float:
    """The CPU use of all processes of a federation during `PAUSE` seconds, in percent of one core."""
    before, began = sum(_cpu_seconds(federation).values()), time.monotonic()
    time.sleep(PAUSE)
    return 100 * (sum(_cpu_seconds(federation).values()) - before) / (time.monotonic() - began)


def _cpu_seconds(federation: Federation) -> dict[str, float]:
    """The CPU time that the processes of a federation have used so far."""
    total = {"server": 0.0, "parties": 0.0}
    for pid in federation.processes.marked():
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        who = "parties" if "party" in _command(pid) else "server"
        total[who] += (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return total


if __name__ == "__main__":
    sys.exit(app(standalone_mode=False))
