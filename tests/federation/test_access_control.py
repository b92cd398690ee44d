"""Who may command a SuperLink or a SuperNode: its owner on its own machine, and nobody else who reaches its port."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
import threading
from collections.abc import Collection, Coroutine, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

import pytest
import uvicorn
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS

from normec.errors import UsageError
from normec.federation.flower import access_control, http_connections, limits, programs
from normec.federation.protocol.wire import LARGEST

from ..support.waiting import LIMIT

STARTING = "/v1/control/start-run"
PULLING = "/v1/fleet/pull-messages"
NODE = 7
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux names the owners of connections")


def finished(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, run in a thread of its own: a browser of other tests may have a loop in this one."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class Asked:
    """One request to a port with access control: the status that it gets, and what was heard of its body.

    `parts`: the pieces of its body; `read`: how many of them anybody asked for; `heard`: the body that the app got.
    """

    def __init__(
        self,
        path: str,
        *headers: tuple[bytes, bytes],
        parts: Iterable[bytes] = (b"",),
        registered: bool = True,
        fleet: bool = True,
        client: str = "127.0.0.1",
        hosts: Collection[str] = (),
    ) -> None:
        self._parts, self.read, self.heard, self._said = iter(parts), 0, b"", list[Any]()
        at = {"client": (client, 40000), "server": (client, 9092)}
        scope = {"type": "http", "path": path, "headers": list(headers), **at}

        async def known(_: Any) -> int | None:
            return NODE if registered else None

        port = (
            access_control.OwnerAndParties(self._behind, known, hosts)
            if fleet
            else access_control.OwnerOnly(self._behind, hosts)
        )
        with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
            own, _ = listening.accept()
            with own:
                self.transport = SimpleNamespace(is_closing=lambda: False, get_extra_info=lambda _: own)
                finished(port(scope, self._receive, self._send))
        self.status = int(self._said[0]["status"])

    async def _behind(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG002
        more = True
        while more:
            message = await receive()
            self.heard, more = self.heard + message["body"], message["more_body"]
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def _receive(self) -> Any:
        part = next(self._parts, None)
        self.read += 1
        return {"type": "http.request", "body": part or b"", "more_body": part is not None}

    async def _send(self, message: Any) -> None:
        self._said.append(message)


def asked(path: str, *headers: tuple[bytes, bytes], **named: Any) -> int:
    return Asked(path, *headers, **named).status


@linux
@pytest.mark.parametrize(
    "path",
    [
        *(STARTING, "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "/"),
        *(access_control.SERVER + "receive", access_control.SERVER + "send", "/v1/normec/", "/v1/normec/party"),
    ],
)
def test_strangers_reach_the_fleets_interface_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (None, os.getuid() + 1):  # elsewhere, and another user of this machine
        monkeypatch.setattr(access_control, "connection_owner", lambda *_, user=user: user)
        assert asked(path) == 403
        assert asked(PULLING) == 200
        assert asked(access_control.PARTY + "receive") == 200
        assert asked("/health") == 200


@linux
@pytest.mark.parametrize("path", ["/v1/runtime/acquire-task", "/v1/runtime/push-task-output", PULLING, "/docs"])
def test_strangers_reach_nothing_of_a_supernode(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_control, "connection_owner", lambda *_: os.getuid() + 1)
    assert asked(path, fleet=False) == 403
    monkeypatch.setattr(access_control, "connection_owner", lambda *_: os.getuid())
    assert asked(path, fleet=False) == 200


@linux
def test_the_owner_and_root_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (0, os.getuid()):
        monkeypatch.setattr(access_control, "connection_owner", lambda *_, user=user: user)
        assert asked(STARTING) == 200


@linux
def test_root_in_a_container_that_passes_on_what_comes_from_outside_is_not_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It holds the other end and calls the container's address, as Podman's port forwarder does."""
    monkeypatch.setattr(access_control, "connection_owner", lambda *_: 0)
    assert asked(STARTING, client="10.0.2.100") == 403
    assert asked(STARTING, client="::ffff:10.0.2.100") == 403
    assert asked(STARTING, client="::ffff:127.0.0.1") == 200
    assert asked(STARTING, client="203.0.113.7", hosts={"203.0.113.7"}) == 200  # told to listen nowhere else


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--host", "a", "--x"], "a"),
        (["--host=a"], "a"),
        (["--host=a", "--host", "b"], "b"),
        (["--host"], ""),
        ([], ""),
    ],
)
def test_an_option_counts_by_its_last_mention(arguments: list[str], value: str) -> None:
    assert programs._value(arguments, "--host") == value


@pytest.mark.parametrize("name", [b"x-forwarded-for", b"Forwarded", b"via", b"origin"])
def test_what_a_proxy_or_a_browser_passes_on_is_not_the_owners(name: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """By x-forwarded-for the web server would even put the claimed address in place of the real one."""
    monkeypatch.setattr(access_control, "connection_owner", lambda *_: os.getuid())
    assert asked(STARTING, (name, b"127.0.0.1:40000")) == 403
    assert asked(PULLING, (name, b"10.0.0.1")) == 200


def test_a_partys_request_is_heard_whole() -> None:
    found = Asked(PULLING, parts=[b"one ", b"two ", b"three"])
    assert (found.status, found.heard) == (200, b"one two three")


@pytest.mark.parametrize("path", [PULLING, access_control.PARTY + "receive", access_control.PARTY + "send"])
def test_a_request_that_no_party_signed_is_not_even_read(path: str) -> None:
    found = Asked(path, parts=[bytes(1000)] * 1000, registered=False)
    assert (found.status, found.read, found.heard) == (401, 0, b"")


@pytest.mark.parametrize("path", ["/v1/fleet/push-object", access_control.PARTY + "send"])
def test_a_partys_request_is_cut_off_at_its_largest_size(path: str) -> None:
    part = bytes(2**20)
    found = Asked(path, parts=(part for _ in range(10**9)))
    assert (found.status, found.heard) == (413, b"")
    assert found.read == limits.BODY_BYTES // len(part) + 1
    assert asked(path, parts=[part] * (limits.BODY_BYTES // len(part))) == 200


def test_an_answer_lists_a_limited_number_of_objects() -> None:
    assert asked(access_control.PUSH, parts=[bytes(2**10)] * 65) == 413


def test_the_answer_of_a_very_large_model_fits_the_list() -> None:
    """The largest array that travels, in double precision and in pieces of Flower's size."""
    pytest.importorskip("flwr")
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import ObjectTree

    pieces = [ObjectTree(object_id=f"{i:064x}") for i in range(LARGEST * 8 // (5 * 2**20) + 1)]
    tree = ObjectTree(object_id="0" * 64, children=pieces)
    for _ in range(5):  # an array, its record, the records, the message; and one more
        tree = ObjectTree(object_id="0" * 64, children=[tree])
    assert PushMessagesRequest(message_object_trees=[tree]).ByteSize() < limits.LIST_BYTES - 2**12


def pushed(node: int, **metadata: Any) -> bytes:
    pytest.importorskip("flwr")
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from flwr.proto.message_pb2 import Message, Metadata
    from flwr.proto.node_pb2 import Node

    told = Metadata(**{"src_node_id": 7, "dst_node_id": 1, "reply_to_message_id": "the request", **metadata})
    found: bytes = PushMessagesRequest(
        node=Node(node_id=node), messages_list=[Message(metadata=told)]
    ).SerializeToString()
    return found


def test_a_party_pushes_its_own_answers() -> None:
    body = pushed(NODE)
    assert Asked(access_control.PUSH, parts=[body]).heard == body


@pytest.mark.parametrize(
    "metadata",
    [
        {"src_node_id": 8},  # another party's answer
        {"src_node_id": 1, "dst_node_id": 8, "reply_to_message_id": ""},  # a request to it in the server's name
        {"reply_to_message_id": ""},
    ],
)
def test_a_party_pushes_nothing_in_the_name_of_others(metadata: dict[str, Any]) -> None:
    assert asked(access_control.PUSH, parts=[pushed(NODE, **metadata)]) == 403


def test_a_party_pushes_nothing_as_another_node() -> None:
    assert asked(access_control.PUSH, parts=[pushed(8, src_node_id=8)]) == 403


def test_what_is_no_push_at_all_does_not_pass() -> None:
    assert asked(access_control.PUSH, parts=[b"\xff" * 20]) == 403


@pytest.mark.parametrize(("signed_by", "stranger"), [("party", False), ("stranger", True), ("nobody", True)])
def test_flowers_own_rules_say_who_has_signed(signed_by: str, stranger: bool) -> None:
    """A real SuperLink, with one key registered."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("flwr")
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supercore.protobuf.client import ProtobufRequestContext
    from flwr.superlink.main import create_app
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in ("party", "stranger")}
    app = create_app()
    state = app.state.linkstate_factory.state()
    state.create_node("", "", public_key_to_bytes(keys["party"].public_key()), 0)
    port = access_control.OwnerAndParties(app, partial(access_control.signing_party, app))
    request = httpx.Request("POST", f"http://127.0.0.1{PULLING}", content=b"rubbish")
    if signed_by != "nobody":
        key = keys[signed_by]
        context = ProtobufRequestContext("", ActivateNodeRequest(), request)
        NodeAuthHttpInterceptor(key, key.public_key()).intercept(context, lambda _: httpx.Response(200))

    async def posted() -> Any:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(port)) as client:
            return await client.send(request)

    found = finished(posted())
    assert ("not signed by a registered party" in found.text) == stranger
    assert found.status_code == (401 if stranger else 415)  # the body is no protobuf, which Flower says


def test_a_superlink_that_lets_strangers_in_as_parties_is_not_started() -> None:
    with pytest.raises(UsageError, match="anybody could act as a party"):
        programs.run_superlink(["--ssl-certfile", "server.crt"])


@pytest.mark.parametrize("word", ["--insecure", "--insec", "--i"])
def test_a_superlink_without_tls_is_not_started(word: str) -> None:
    """Flower's signature covers the time of a request alone: on the way, the rest of it can be exchanged."""
    with pytest.raises(UsageError, match="without TLS anybody on the way"):
        programs.run_superlink(["--enable-supernode-auth", "--host", "127.0.0.1", word])


@pytest.mark.parametrize("host", [[], ["--host", "0.0.0.0"], ["--host=192.0.2.1"]])
def test_tests_without_tls_stay_on_the_loopback_interface(host: list[str]) -> None:
    with pytest.raises(UsageError, match="needs an address of the loopback interface"):
        programs.run_superlink(["--enable-supernode-auth", programs.INSECURE, *host])
    own = ["--enable-supernode-auth", programs.INSECURE, "--host", "127.0.0.1"]
    assert programs._checked(own) == ["--enable-supernode-auth", "--insecure", "--host", "127.0.0.1"]


@linux
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_request_of_a_closed_connection_does_not_pass_for_one_of_the_next_user_of_its_port(loop: Any) -> None:
    """The caller closes its connection while the server is busy, and a process of the owner gets the same port."""
    if loop == "uvloop":
        pytest.importorskip("uvloop")
    called, busy, go = list[str](), threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        called.append(scope["path"])
        if scope["path"] == "/busy":
            busy.set()
            go.wait(LIMIT)  # the whole event loop waits
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    def ask(caller: socket.socket, path: str) -> bytes:
        caller.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return caller.recv(2**12).split()[1]

    def opened(port: int = 0) -> socket.socket:
        made = socket.socket()
        made.settimeout(LIMIT)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.connect(listening.getsockname())
        return made

    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(access_control.OwnerOnly(app), log_level="error", lifespan="off", ws="none", loop=loop)
    server = uvicorn.Server(config)
    with listening, ThreadPoolExecutor(2) as threads:
        running = threads.submit(server.run, [listening])
        with opened() as other, opened() as hostile:
            assert ask(hostile, "/first") == b"200"
            waiting = threads.submit(ask, other, "/busy")
            assert busy.wait(LIMIT)
            port = hostile.getsockname()[1]
            hostile.sendall(b"GET /hostile HTTP/1.1\r\nhost: x\r\n\r\n")
            hostile.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            hostile.close()  # with a reset, after which the port is free
            with opened(port) as owner:
                go.set()
                assert waiting.result() == ask(owner, "/last") == b"200"
        server.should_exit = True
        running.result(LIMIT)
    assert called == ["/first", "/busy", "/last"]


class Served:
    """A real web server behind the access control, whose app holds a request until `go` is set."""

    def __init__(self, body_seconds: float) -> None:
        self.reached, self.go = threading.Semaphore(0), threading.Event()

        async def known(scope: Any) -> int | None:
            return int(dict(scope["headers"])[b"node"])

        port = access_control.OwnerAndParties(self._held, known, body_seconds=body_seconds)
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._server = uvicorn.Server(uvicorn.Config(port, log_level="error", lifespan="off", ws="none"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))

    async def _held(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG002
        self.reached.release()
        await asyncio.get_running_loop().run_in_executor(self._pool, self.go.wait, LIMIT)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(limits.REQUESTS_AT_ONCE + 1)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.go.set()
        self._server.should_exit = True
        self._thread.join(LIMIT)
        self._pool.shutdown()
        self._socket.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(self._socket.getsockname(), LIMIT)

    def request(self, node: int, announced: int = 2, body: bytes = b"ab") -> socket.socket:
        connection = self.connect()
        head = f"POST {PULLING} HTTP/1.1\r\nhost: here\r\nnode: {node}\r\ncontent-length: {announced}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection


def status(connection: socket.socket) -> int:
    with connection, connection.makefile("rb") as answer:
        return int(answer.readline().split()[1])


def test_a_body_that_never_ends_is_not_waited_for() -> None:
    with Served(body_seconds=0.2) as served:
        assert status(served.request(1, announced=100, body=b"a")) == 408
        served.go.set()
        assert status(served.request(1)) == 200


def test_a_party_has_a_limited_number_of_requests_at_a_time() -> None:
    with Served(body_seconds=LIMIT) as served:
        held = [served.request(1) for _ in range(limits.REQUESTS_AT_ONCE)]
        for _ in held:
            assert served.reached.acquire(timeout=LIMIT)
        assert status(served.request(1)) == 429
        other = served.request(2)
        assert served.reached.acquire(timeout=LIMIT)
        served.go.set()
        assert [status(connection) for connection in (*held, other)] == [200] * (len(held) + 1)
        assert status(served.request(1)) == 200


HEAD = b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: here\r\nnode: 1\r\n"
WHOLE = HEAD + b"content-length: 0\r\n\r\n"


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Web servers are started as the programs do it."""
    for known in (HTTP_PROTOCOLS, WS_PROTOCOLS):
        monkeypatch.setitem(known, "auto", known["auto"])
    http_connections.limit_connections()


def refused(connection: socket.socket, *parts: bytes) -> None:
    """Send these parts, and wait until the other end closes the connection, perhaps after a refusal."""
    with connection, suppress(ConnectionError):
        for part in parts:
            connection.sendall(part)
        while answer := connection.recv(2**10):
            assert b" 200 " not in answer


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize(
    "endless",
    [
        [b"POST /", *[b"a" * 2**14] * 8],
        [HEAD, *[b"a: b\r\n" * 2**12] * 8],
        [HEAD, b"a: ", *[b"b" * 2**14] * 8],
        [HEAD, b"transfer-encoding: chunked\r\n\r\n0\r\n", *[b"a: b\r\n" * 2**12] * 8],
    ],
    ids=["address", "headers", "value", "trailers"],
)
def test_a_head_that_never_ends_is_cut_off(endless: list[bytes]) -> None:
    """It arrives before anybody knows who sends it, and the web server keeps all of it."""
    with Served(body_seconds=LIMIT) as served:
        refused(served.connect(), *endless)
        served.go.set()
        assert status(served.request(1)) == 200


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("begun", [b"", HEAD], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_is_not_waited_for(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connections.LimitedConnection, "head_seconds", 0.2)
    with Served(body_seconds=LIMIT) as served:
        refused(served.connect(), begun)


@pytest.mark.usefixtures("limited")
def test_a_request_that_is_held_has_no_limit_for_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    limited, made, ended = http_connections.LimitedConnection, list[Any](), threading.Event()
    begun, lost = limited.connection_made, limited.connection_lost
    monkeypatch.setattr(limited, "head_seconds", LIMIT)
    monkeypatch.setattr(limited, "connection_made", lambda *given: (begun(*given), made.append(given[0])))
    monkeypatch.setattr(limited, "connection_lost", lambda *given: (lost(*given), ended.set()))
    with Served(body_seconds=LIMIT) as served, served.request(1) as held:
        assert served.reached.acquire(timeout=LIMIT)
        assert [connection._timer for connection in made] == [None]
        monkeypatch.setattr(limited, "head_seconds", 0.0)
        served.go.set()
        assert held.recv(12) == b"HTTP/1.1 200"
        assert ended.wait(LIMIT)  # no further request begins


@pytest.mark.usefixtures("limited")
def test_a_connection_queues_few_requests() -> None:
    with Served(body_seconds=LIMIT) as served, served.connect() as hostile:
        hostile.sendall(WHOLE)
        assert served.reached.acquire(timeout=LIMIT)
        hostile.sendall(WHOLE * 1000)
        with hostile.makefile("rb") as answer:
            assert int(answer.readline().split()[1]) == 400


@pytest.mark.usefixtures("limited")
def test_a_head_has_few_headers() -> None:
    """Each takes far more memory than its few bytes in the head."""
    with Served(body_seconds=LIMIT) as served:
        refused(served.connect(), HEAD, b"a: b\r\n" * 1000, b"\r\n")
        assert not served.reached.acquire(blocking=False)


class Talkative(Served):
    """Sends a response that no buffer of the system holds, also to strangers."""

    async def _held(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG002
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(64):
            await send({"type": "http.response.body", "body": bytes(2**20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.usefixtures("limited")
def test_a_stranger_that_reads_no_response_does_not_keep_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such connections would cost the stranger nothing, and a party would get none."""
    ended, limited = threading.Event(), http_connections.LimitedConnection
    before = limited.connection_lost
    monkeypatch.setattr(limited, "connection_lost", lambda *given: (before(*given), ended.set()))
    monkeypatch.setattr(limited, "sent_seconds", 0.2, raising=False)
    with Talkative(body_seconds=LIMIT) as served, served.connect() as hostile:
        hostile.sendall(f"GET {access_control.HEALTH} HTTP/1.1\r\nhost: here\r\n\r\n".encode())
        assert ended.wait(LIMIT)
