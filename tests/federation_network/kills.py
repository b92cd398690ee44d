"""Secure sums whose processes are killed again and again: `python -m tests.federation_network.kills KILLS SEED FOLDER`.

A kill takes a party, two parties, or the server of the run, at any moment of an exchange; who was killed is started
again from its folder. At the end every sum was opened once and applied once, and no ledger counts less than was sent.
"""

from __future__ import annotations

import base64
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from normec.federation.protocol.account import read_releases
from normec.federation.secure_sum.roster import Roster
from normec.federation.secure_sum.wire import Certificate
from normec.privacy.hash_chain import read_chain

from ..support.waiting import wait_for
from .network import PARTIES, NetworkFederation

NAME = "kills"
RUN: dict[str, Any] = {"rounds": 100_000, "sigma": 1.0, "epsilon": "", "trust": "secure-sum", "lr": 0.01, "seed": 1}
RUN |= {"min_parties": 4, "colluding": 1, "round_seconds": 10.0, "evaluate_every": 1000}


def kill_again_and_again(network: NetworkFederation, kills: int, seed: int) -> Counter[str]:
    """Kill `kills` times, wait for sums after each kill, and stop the run; returns who was killed how often."""
    chance, victims = random.Random(seed), Counter[str]()
    run = network.begin(NAME, **RUN)
    _progress(network, 2)
    while victims.total() < kills:
        time.sleep(chance.uniform(0, chance.choice((0.05, 0.5, 2.0))))  # where the kill falls is left to chance
        begun = time.monotonic()
        if chance.random() < 0.4:
            victims["server"] += 1
            network.kill_server()
            run = network.begin(NAME, **RUN)
        else:
            chosen = chance.sample(range(PARTIES), chance.choice((1, 1, 2)))
            victims["party"] += len(chosen)
            for i in chosen:
                network.kill(i)
            for i in chosen:
                network.start(i)
        _progress(network, 2)
        print(f"kill {victims.total()}: {time.monotonic() - begun:.1f} s", flush=True)
    with network.federation.control() as control:
        control.stop(run)
    for i in range(PARTIES):
        network.kill(i)
    return victims


def _progress(network: NetworkFederation, sums: int) -> None:
    """Wait for so many more sums."""
    rows = len(network.rows(NAME)) if (network.out(NAME) / "metrics.jsonl").exists() else 0
    there = lambda: (network.out(NAME) / "metrics.jsonl").exists()  # noqa: E731
    wait_for(lambda: there() and len(network.rows(NAME)) >= rows + sums, f"{sums} more sums")


def check(network: NetworkFederation) -> dict[str, int]:
    """Check what must hold whatever was killed; returns numbers to print."""
    rows = [row["round"] for row in network.rows(NAME)]
    assert rows == list(range(len(rows))), "a row of history was lost or written twice"
    kept = network.out(NAME) / "secure-sum"
    certified = [
        msgspec.msgpack.decode(base64.b64decode(line["certificate"]), type=Certificate).statement
        for line in read_chain(kept / "secure-sum.jsonl").lines
        if line["event"] == "certified"
    ]
    attempts = [statement.attempt for statement in certified]
    assert len(set(attempts)) == len(attempts), "two sums of one attempt were certified"
    assert [statement.count for statement in certified] == list(range(len(certified)))
    paid = sum(line["kind"] == "release" for line in read_chain(network.out(NAME) / "ledger.jsonl").lines)
    assert paid >= len(certified) >= len(rows), "the ledger of the run counts less than was opened"
    roster, vectors = Roster.load(kept / "roster.toml"), 0
    for i in range(PARTIES):
        folder = network.federation.folder(i)
        number = [member.name for member in roster.members].index(network.federation.title(i))
        (chain,) = (folder / "sums").glob(f"{NAME}~*/secure-sum.jsonl")
        made = [line["attempt"] for line in read_chain(chain).lines if line["event"] == "input"]
        assert len(set(made)) == len(made), f"party {i} entered an attempt twice"
        entered = {statement.attempt for statement in certified if number in statement.survivors}
        assert entered <= set(made), f"party {i} is in a sum that its folder does not know"
        assert len(entered) <= read_releases(folder).count(NAME) <= len(made), f"the ledger of party {i} is wrong"
        vectors += len(made)
    return {"sums": len(rows), "certified": len(certified), "attempts": max(attempts) + 1, "vectors": vectors}


def main(kills: int, seed: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with NetworkFederation(folder, "logistic") as network:
        network.federation.write_roster()
        for i in range(PARTIES):
            network.policy(i, trusts=["secure-sum"])
        victims = kill_again_and_again(network, kills, seed)
        print(f"killed: {dict(victims)}; {check(network)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
