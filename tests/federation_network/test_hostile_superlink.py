"""A party's process against a SuperLink that sends whatever it likes: it takes none of it, and goes on."""

from __future__ import annotations

import gzip
import json
import signal
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message, RecordDict
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.proto.recorddict_pb2 import BytesList
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from normec.federation.flower.records import to_records
from normec.federation.flower.scaffold import write_app
from normec.federation.local.certificates import make_key, make_server

from ..support.waiting import LIMIT, wait_for

pytestmark = pytest.mark.slow

LARGEST = 1000  # parameters that the party's policy allows
ENDLESS = 2 * 2**30  # bytes of an answer that somebody would have to read whole to learn that it ends
ESCAPE = "\x1b[2J"


class Hostile(ThreadingHTTPServer):
    """`attacks`: what the next requests for a message get; then there is none. `served`: the largest answer's bytes."""

    daemon_threads = True

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.attacks: list[Callable[[_Handler], None]] = [
            endless_list,
            packed,
            elsewhere,
            endless_part,
            repeated,
            repeated_whole,
            too_many_parts,
            rubbish,
            names,
        ]
        self.parts: dict[str, bytes] = {}
        self.served = 0
        self.called: list[str] = []
        self.over = threading.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hostile

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("content-length", 0)))
        call = self.path.rpartition("/")[2]
        self.server.called.append(self.path)
        if call == "activate-node":
            self.answer(ActivateNodeResponse(node_id=7).SerializeToString())
        elif call == "send-node-heartbeat":
            self.answer(SendNodeHeartbeatResponse(success=True).SerializeToString())
        elif call == "pull-object":
            self.pull_object()
        elif call == "receive" and self.server.attacks:
            self.server.attacks.pop(0)(self)
        else:
            if call == "receive":
                self.server.over.set()
            self.answer(b"")

    def pull_object(self) -> None:
        name = next((name for name in self.server.parts if name.encode() in self.body), "")
        if name and self.server.parts[name]:
            content = self.server.parts[name]
            found = PullObjectResponse(object_found=True, object_available=True, object_content=content)
            self.answer(found.SerializeToString())
        else:
            self.endless()

    def announce(self, message: Message, tree: ObjectTree | None = None, contents: Sequence[bytes] = ()) -> None:
        from flwr.common.serde import message_to_proto

        tree = tree or get_object_tree(message)
        found = PullMessagesResponse(messages_list=[message_to_proto(message)], message_object_trees=[tree])
        self.answer(BytesList(vals=[found.SerializeToString(), *contents]).SerializeToString())

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)

    def endless(self) -> None:
        self.send_response(200)
        self.end_headers()
        sent = 0
        try:
            while sent < ENDLESS:
                sent += self.wfile.write(bytes(2**16))
        except OSError:
            pass
        self.server.served = max(self.server.served, sent)

    def log_message(self, *_: Any) -> None: ...


def request(numbers: int) -> Message:
    return Message(to_records({"x": np.ones(numbers)}), dst_node_id=7, message_type="train")


def endless_list(handler: _Handler) -> None:
    handler.endless()


def packed(handler: _Handler) -> None:
    handler.answer(gzip.compress(bytes(2**28)), content_encoding="gzip")


def elsewhere(handler: _Handler) -> None:
    handler.answer(b"", 307, location=f"https://{handler.server.address}/v1/elsewhere/shutdown")


def endless_part(handler: _Handler) -> None:
    handler.announce(request(LARGEST))


def repeated(handler: _Handler) -> None:
    sent, contents = _repeated()
    handler.server.parts = contents
    handler.announce(sent)


def repeated_whole(handler: _Handler) -> None:
    """As `repeated`, with all parts in one response."""
    sent, contents = _repeated()
    handler.announce(sent, None, list(contents.values()))


def too_many_parts(handler: _Handler) -> None:
    handler.announce(request(LARGEST), None, [b"part"] * 1000)


def rubbish(handler: _Handler) -> None:
    handler.answer(b"\xff" * 100)


def _repeated() -> tuple[Message, dict[str, bytes]]:
    """A message whose array repeats a piece of eight kilobytes twenty thousand times."""
    sent = request(LARGEST)
    parts = get_all_nested_objects(sent)
    contents = {name: part.deflate() for name, part in parts.items()}
    (array,) = [name for name, part in parts.items() if isinstance(part, Array)]
    head, _, body = contents[array].partition(b"\0")
    body = json.dumps({**json.loads(body), "arraychunk_ids": [0] * 20_000}).encode()
    contents[array] = b" ".join([*head.split(b" ")[:-1], str(len(body)).encode()]) + b"\0" + body
    return sent, contents


def names(handler: _Handler) -> None:
    """An object whose name would clear a terminal; the answer to it is no object."""
    handler.server.parts = {ESCAPE: b"rubbish"}
    handler.announce(Message(RecordDict(), dst_node_id=7, message_type="train"), ObjectTree(object_id=ESCAPE))


@contextmanager
def hostile(folder: Path) -> Iterator[Hostile]:
    tls = make_server(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    server = Hostile(context)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_party_takes_nothing_that_is_too_large_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):  # Flower makes messages only in the name of a task
        monkeypatch.setattr(TaskIdentity, name, 1)
    write_app(tmp_path / "app")
    make_key(tmp_path / "key")
    (tmp_path / "policy.toml").write_text(f"epsilon = 1.0\nlargest_model = {LARGEST}\n")
    with hostile(tmp_path / "tls") as server:
        attacks = len(server.attacks)
        command = [sys.executable, "-m", "normec", "federation", "party", "--superlink", server.address]
        command += ["--root-certificates", str(tmp_path / "tls" / "ca.crt"), "--key", str(tmp_path / "key")]
        command += ["--app", str(tmp_path / "app"), "--folder", str(tmp_path / "party")]
        command += ["--policy", str(tmp_path / "policy.toml")]
        party = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            wait_for(lambda: server.over.is_set() or party.poll() is not None, "the party to outlive all attacks")
            assert party.poll() is None
            largest = next(
                int(line.split()[1]) * 1024
                for line in Path(f"/proc/{party.pid}/status").read_text().splitlines()
                if line.startswith("VmHWM:")
            )
        finally:
            party.send_signal(signal.SIGTERM)
            said, _ = party.communicate(timeout=LIMIT)
    assert party.returncode == 0, said
    assert said.count("an exchange failed") == attacks, said
    assert ESCAPE not in said
    assert not any("elsewhere" in path for path in server.called)
    assert 0 < server.served < 2**26  # what the connection holds, no more
    assert largest < 2**30 + 2**29  # Python with torch takes half a gigabyte
