"""A client app that a test can stop at points of a round, and that lists what it sends.

A file FOLDER/stop-I.json names a phase and a round. When party I reaches them, it renames the file to stopped-I.json
and waits to be killed. FOLDER/left-I.txt gets the digest of every message before it is sent.
"""

import json
import os
import threading
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from normec.federation.flower.app import client_app
from normec.federation.flower.channel_clients import PartyChannel
from normec.federation.protocol import party_state
from normec.federation.protocol.account import PartyAccount
from normec.federation.protocol.gradient_oracle import ProblemOracle

from . import task

FOLDER = Path(os.environ.get("NORMEC_TEST_FOLDER", "."))
now = {"party": -1, "round": -1}
inner, app = client_app(task), ClientApp()


def reached(phase: str) -> None:
    path = FOLDER / f"stop-{now['party']}.json"
    if not path.exists() or json.loads(path.read_text()) != {"phase": phase, "round": now["round"]}:
        return
    path.rename(FOLDER / f"stopped-{now['party']}.json")
    threading.Event().wait()


@app.train()
def train(message: Message, context: Context) -> Message:
    now["party"], now["round"] = int(context.node_config["partition-id"]), int(message.content["fields"]["round"])
    reached("received")
    reply = inner(message, context)
    if "digest" in reply.content["fields"]:
        with (FOLDER / f"left-{now['party']}.txt").open("a") as file:
            fields = reply.content["fields"]
            file.write(f"{fields['run']} {fields['digest']}\n")
    return reply


def _after(owner: object, name: str, phase: str, matters=lambda *_: True) -> None:
    original = getattr(owner, name)

    def replaced(*given, **named):
        result = original(*given, **named)
        if matters(*given):
            reached(phase)
        return result

    setattr(owner, name, replaced)


_after(ProblemOracle, "gradient", "computed")
_after(PartyAccount, "pay", "paid")
_after(party_state, "save", "written", lambda _, state: state.pending is not None)
_after(PartyChannel, "receive", "sent", lambda _, answer=None: answer is not None)
