"""Ports of Flower's that only their owner commands.

A SuperLink answers at one address for all of its interfaces. Parties use the fleet's, and sign with keys that were
registered. The others start runs, register parties and act as a run's server, and ask for no proof of anything:
whoever reaches the port may start an app, which runs as the SuperLink's owner and sees all that the server sees. A
SuperNode has a port as well, for the processes that run its apps. Whoever reaches it may answer in the party's name,
and may exchange the party's folder and policy for others, hence run code as its owner.

`Gate` stands before both. A request is answered only if it comes from a process of the same user (or of root) on the
same machine, by the loopback interface. On Linux the kernel says who holds the other end of a connection, in
/proc/net/tcp. Elsewhere the loopback interface has to do, which all users of a machine share. The user alone would not
do: to a container that runs without root's rights, a process of the container's own root may pass on whatever comes
from outside, from the container's address.

`FleetGate` also lets parties in, to the fleet's interface. Flower reads a whole request before it looks at who sent it,
and takes whatever a party says of a message's sender. Here the signature comes first, a request is cut off at
`LARGEST_BODY`, and a party pushes answers of its own and nothing else. Flower takes one answer to a request, so what a
party can store is limited by the list of an answer's objects (`LARGEST_LIST`).
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import sys
from base64 import b64decode
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...system.files import PRIVATE_FILE

FLEET = "/v1/fleet/"  # signed by registered keys: Flower's --enable-supernode-auth
PUSH = FLEET + "push-messages"
HEALTH = "/health"
LARGEST_BODY = 8 * 2**20  # bytes of a party's request; Flower sends arrays in pieces of 5 MiB
LARGEST_LIST = 2**16  # bytes of a list of the objects that an answer has: about a thousand of them
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
LOOKS = 3  # at the kernel's table, which may skip a line while connections come and go
_ESTABLISHED = "01"

# A proxy, which may speak for anybody, adds the first ones (by x-forwarded-for the web server would also take the
# sender's word for where a request comes from); a browser adds the last one, and runs the scripts of anybody's pages.
SECOND_HAND = (b"x-forwarded-for", b"forwarded", b"via", b"origin")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Address = tuple[str, int]


class Gate:
    """An ASGI application before another one, which hears only its owner.

    Args:
        app: Flower's program.
        hosts: Addresses that it listens at, from which its owner's requests may come too.
    """

    def __init__(self, app: App, hosts: Collection[str] = ()) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # Flower has no other interfaces
            await send({"type": "websocket.close", "code": 1008})
        elif scope["path"] == HEALTH or owned(scope, self._hosts):
            await self._app(scope, receive, send)
        else:
            await _refuse(send, 403, "only the owner commands this port, by a process of the same user and machine")


class FleetGate(Gate):
    """A gate that lets parties in: to the fleet's interface, by keys that are `registered`, with requests of a size.

    Args:
        app: Flower's SuperLink.
        registered: Whether the headers of a request are signed by the key of a registered party.
        hosts: As in `Gate`.
    """

    def __init__(self, app: App, registered: Callable[[Scope], Awaitable[bool]], hosts: Collection[str] = ()) -> None:
        super().__init__(app, hosts)
        self._registered = registered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(FLEET):
            await super().__call__(scope, receive, send)
        elif not await self._registered(scope):
            await _refuse(send, 401, "no registered party has signed this request")
        elif (body := await _body(receive, most := LARGEST_LIST if scope["path"] == PUSH else LARGEST_BODY)) is None:
            await _refuse(send, 413, f"a party's request has at most {most} bytes here")
        elif scope["path"] == PUSH and not answers(body):
            await _refuse(send, 403, "a party pushes answers of its own and nothing else")
        else:
            await self._app(scope, _repeated(body, receive), send)


def owned(scope: Scope, hosts: Collection[str]) -> bool:
    """Whether a request comes from a process of the owner's, by the loopback interface or from one of `hosts`."""
    if any(name.lower() in SECOND_HAND for name, _ in scope["headers"]):
        return False
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return False
    loopback = ipaddress.ip_address(_plain(*client)[0]).is_loopback
    if sys.platform != "linux" or not (loopback or client[0] in hosts):
        return loopback
    found = None
    for _ in range(LOOKS):
        found = holder(client, server) if found is None else found
    return found in (0, os.getuid())


def answers(body: bytes) -> bool:
    """Whether what a node pushes are answers to requests, in its own name.

    Flower stores a message that answers nothing as a request of the server's, for whatever node it names.
    """
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    known = [message.metadata for message in pushed.messages_list]
    return all(one.reply_to_message_id and one.src_node_id == pushed.node.node_id for one in known)


async def _body(receive: Receive, most: int) -> bytes | None:
    """A request's body; None where it breaks off, or has more than `most` bytes, of which no more are then read."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            return None
        if not message.get("more_body", False):
            return b"".join(parts)


def _repeated(body: bytes, receive: Receive) -> Receive:
    """What an application hears of a request whose body was read before."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


async def _refuse(send: Send, status: int, why: str) -> None:
    kind = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": kind})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})


def holder(client: Address, server: Address) -> int | None:
    """The user whose process holds a connection's other end; None where it is not on this machine, or has let go."""
    wanted = _plain(*client), _plain(*server)
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            local, remote, state, *rest = line.split()[1:]
            # A socket that its process has closed belongs to nobody, for which the kernel writes 0: root's number.
            if state == _ESTABLISHED and rest[5] != "0" and (_listed(local), _listed(remote)) == wanted:
                return int(rest[3])
    return None


def _plain(host: str, port: int) -> tuple[bytes, int]:
    """An address as bytes; one of IPv4 in IPv6's clothes without them."""
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).packed, port


def _listed(text: str) -> tuple[bytes, int]:
    """An address as the kernel lists it: words of four bytes in the machine's own order."""
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return _plain(str(ipaddress.ip_address(raw)), int(port, 16))


def serve_superlink(arguments: list[str]) -> None:
    """Run Flower's SuperLink with the options of `flower-superlink`, behind a `FleetGate`."""
    _check_system()
    if "--enable-supernode-auth" not in arguments:
        raise UsageError("--enable-supernode-auth is missing: without it any stranger is a party")
    from flwr.common.constant import FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API
    from flwr.superlink import main
    from flwr.superlink.cli.flower_superlink import flower_superlink

    _keep_to_oneself(arguments)
    for name in (FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API):
        os.environ.pop(name, None)  # further ports, without a gate
    made = main.create_app

    def gated(*given: Any, **named: Any) -> Any:
        app = made(*given, **named)
        return FleetGate(app, partial(_signed, app), _listening(arguments))

    setattr(main, "create_app", gated)  # noqa: B010  (what Flower's command serves)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def serve_supernode(arguments: list[str]) -> None:
    """Run Flower's SuperNode with the options of `flower-supernode`, its port behind a `Gate`."""
    _check_system()
    from flwr.supernode import main
    from flwr.supernode.cli.flower_supernode import flower_supernode

    made = main.create_app

    def gated(*given: Any, **named: Any) -> Any:
        return Gate(made(*given, **named), _listening(arguments))

    setattr(main, "create_app", gated)  # noqa: B010  (what Flower's command serves)
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _check_system() -> None:
    if sys.platform == "linux" and not os.access(TABLES[0], os.R_OK):
        raise UsageError(f"cannot read {TABLES[0]}, which says whose connections are whose; allow this process to")


async def _signed(app: Any, scope: Scope) -> bool:
    """Whether the headers of a request to a SuperLink are signed by a registered key, by Flower's own rules."""
    from fastapi import HTTPException, Request
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.dependencies.linkstate import get_linkstate
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.concurrency import run_in_threadpool

    def found() -> bool:
        request = Request({**scope, "app": app, "state": {}})
        try:
            key = b64decode(request.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
            request.state.protobuf_request = ActivateNodeRequest(public_key=key)  # which names no node
            authenticate_node(request)
        except (HTTPException, ValueError):
            return False
        return get_linkstate(request).get_node_id_by_public_key(key) is not None

    return await run_in_threadpool(found)


def _keep_to_oneself(arguments: list[str]) -> None:
    """Make a new database for its owner alone: it holds messages, under central trust without noise."""
    path = _value(arguments, "--database").removeprefix("sqlite:///")
    if path and not path.startswith(":") and "://" not in path:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))


def _value(arguments: list[str], option: str) -> str:
    """What an option is set to, by its last mention; nothing where it is not there."""
    found = ""
    for word, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if word == option:
            found = after
        elif word.startswith(f"{option}="):
            found = word.removeprefix(f"{option}=")
    return found


def _listening(arguments: list[str]) -> set[str]:
    """The addresses of the host that a program of Flower's is told to listen at."""
    host = _value(arguments, "--host")
    with suppress(OSError):  # Flower says what is wrong with it
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)} if host else set()
    return set()
