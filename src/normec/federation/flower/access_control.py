"""Access control for the ports of Flower's SuperLink and SuperNode: only their owner may control them.

A SuperLink serves all of its interfaces at one address. Parties use the fleet interface and sign with registered keys.
The other interfaces start runs, register parties and act as the server of a run, and require no authentication: anybody
who reaches the port can start an app, which runs as the SuperLink's owner and sees all that the server sees. A
SuperNode also opens a port, for the processes that run its apps. Anybody who reaches it can answer for the party, and
can replace the party's folder and policy, and so run code as the SuperNode's owner.

`OwnerOnly` restricts both. It answers a request only if it comes from a process of the same user (or of root) on the
same machine, over the loopback interface. On Linux, the kernel names the user at the other end of a connection
(`system.connections`); the web server's own end of it must then still be open. Other systems only check the loopback
interface, which all users of a machine share. The user alone is not enough: in a container without root privileges, a
process of the container's own root may forward requests from outside, and they come from the container's address.

`OwnerAndParties` also admits parties to the fleet interface and to their side of `channel`. Flower reads a whole
request before it checks who sent it, and believes a party about the sender of a message. Here the signature is checked
first, the bytes, the time and the number of a party's requests are limited (`limits`), and a party can only push
answers of its own. A response is sent part by part: the web server would keep one that the party does not read, and the
request would be over and no longer count.
"""

from __future__ import annotations

import asyncio
import os
import sys
from base64 import b64decode
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import Any

from ...system.connections import connection_owner, plain_address, still_open
from .limits import BODY_BYTES, BODY_SECONDS, LIST_BYTES, REQUESTS_AT_ONCE, SENT_BYTES, SENT_SECONDS

FLEET = "/v1/fleet/"  # signed by registered keys: Flower's --enable-supernode-auth
PUSH = FLEET + "push-messages"
PARTY, SERVER = "/v1/normec/party/", "/v1/normec/server/"  # the two interfaces of `channel`, and their calls:
RECEIVE, SEND, ABOUT = "receive", "send", "about"
NODE = "normec.node"  # the key of an ASGI scope at which the number of the party that signed a request is kept
HEALTH = "/health"

# Proxies, which forward the requests of others, add the first three headers; with x-forwarded-for, the web server would
# also believe the sender about where the request comes from. Browsers, which run scripts of any page, add the last one.
FORWARDED = (b"x-forwarded-for", b"forwarded", b"via", b"origin")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class OwnerOnly:
    """ASGI middleware that passes on only the requests of the owner.

    Args:
        app: Flower's program.
        hosts: Addresses at which the program listens; the owner's requests may also come from them.
    """

    def __init__(self, app: App, hosts: Collection[str] = ()) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # Flower has no other interfaces
            await send({"type": "websocket.close", "code": 1008})
        elif scope["path"] == HEALTH or from_owner(scope, receive, self._hosts):
            await self._app(scope, receive, send)
        else:
            await _refuse(
                send, 403, "only the owner may control this port, from a process of the same user on the same machine"
            )


class OwnerAndParties(OwnerOnly):
    """ASGI middleware that passes on the requests of the owner, and those of registered parties to their interfaces.

    Args:
        app: Flower's SuperLink.
        registered: Returns the number of the registered party whose key signed the headers of a request, or None.
        hosts: As in `OwnerOnly`.
        body_seconds: The time in which the body of a request must arrive.
    """

    def __init__(
        self,
        app: App,
        registered: Callable[[Scope], Awaitable[int | None]],
        hosts: Collection[str] = (),
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        super().__init__(app, hosts)
        self._registered, self._body_seconds = registered, body_seconds
        self._open: Counter[int] = Counter()  # requests under way, by the number of their party

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.startswith((FLEET, PARTY)):
            await super().__call__(scope, receive, send)
        elif (node := await self._registered(scope)) is None:
            await _refuse(send, 401, "this request is not signed by a registered party")
        elif self._open[node] >= REQUESTS_AT_ONCE:
            await _refuse(send, 429, f"a party may have at most {REQUESTS_AT_ONCE} requests at a time")
        else:
            self._open[node] += 1
            try:
                await self._of_party(node, path, scope, receive, send)
            finally:
                self._open[node] -= 1

    async def _of_party(self, node: int, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        most = LIST_BYTES if path == PUSH else BODY_BYTES
        try:
            async with asyncio.timeout(self._body_seconds):
                body = await _body(receive, most)
        except TimeoutError:
            await _refuse(send, 408, f"the body of a party's request must arrive within {self._body_seconds:g} s")
            return
        if body is None:
            await _refuse(send, 413, f"a party's request may have at most {most} bytes here")
        elif path == PUSH and not own_answers(body, node):
            await _refuse(send, 403, "a party may only push answers of its own")
        else:
            parts = _PartByPart(send)
            try:
                await self._app({**scope, NODE: node}, _replayed(body, receive), parts)
            except Exception:
                if not parts.unread:
                    raise  # otherwise the web server closes the connection


def from_owner(scope: Scope, receive: Receive, hosts: Collection[str]) -> bool:
    """Whether a request comes from a process of the owner, over the loopback interface or from one of `hosts`."""
    if any(name.lower() in FORWARDED for name, _ in scope["headers"]):
        return False
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return False
    loopback = plain_address(client[0]).is_loopback
    if sys.platform != "linux" or not (loopback or client[0] in hosts):
        return loopback
    return connection_owner(client, server) in (0, os.getuid()) and _connected(receive)


def _connected(receive: Receive) -> bool:
    """Whether the connection of a request is still open, as far as the web server's own end of it shows.

    The web server passes its functions for one request as methods of an object that has the connection.
    """
    transport = getattr(getattr(receive, "__self__", None), "transport", None)
    if transport is None or transport.is_closing():
        return False
    own = transport.get_extra_info("socket")
    return own is not None and still_open(own.fileno())


async def signing_party(app: Any, scope: Scope) -> int | None:
    """The number of the party whose registered key signed the headers of a request, by Flower's own rules."""
    from fastapi import HTTPException, Request
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.dependencies.linkstate import get_linkstate
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.concurrency import run_in_threadpool

    def found() -> int | None:
        request = Request({**scope, "app": app, "state": {}})
        try:
            key = b64decode(request.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
            request.state.protobuf_request = ActivateNodeRequest(public_key=key)  # a request that names no node
            authenticate_node(request)
        except (HTTPException, ValueError):
            return None
        node: int | None = get_linkstate(request).get_node_id_by_public_key(key)
        return node

    return await run_in_threadpool(found)


def own_answers(body: bytes, node: int) -> bool:
    """Whether all messages that a node pushes are answers to requests, in its own name.

    Flower stores a message that answers no request as a request of the server, to any node that the message names.
    """
    from flwr.proto.fleet_pb2 import PushMessagesRequest
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    try:
        pushed = PushMessagesRequest.FromString(body)
    except DecodeError:
        return False
    known = [message.metadata for message in pushed.messages_list]
    return pushed.node.node_id == node and all(one.reply_to_message_id and one.src_node_id == node for one in known)


async def _body(receive: Receive, most: int) -> bytes | None:
    """Read the body of a request; None if it breaks off or has more than `most` bytes, and reading stops there."""
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


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a function that passes a body that was already read to the app, and then what is received."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return left.pop() if left else await receive()

    return again


class _PartByPart:
    """Sends a response in parts, each after the party has read those before it. Ends with `TimeoutError` if not."""

    def __init__(self, send: Send) -> None:
        self._send, self.unread = send, False

    async def __call__(self, message: Any) -> None:
        body, parts = message.get("body", b""), [message]
        if len(body) > SENT_BYTES:
            cuts = range(0, len(body), SENT_BYTES)
            parts = [{**message, "body": body[cut : cut + SENT_BYTES], "more_body": True} for cut in cuts]
            parts[-1]["more_body"] = message.get("more_body", False)
        for part in parts:
            try:
                async with asyncio.timeout(SENT_SECONDS):
                    await self._send(part)  # waits while the web server still has much to send
            except TimeoutError:
                self.unread = True
                raise


async def _refuse(send: Send, status: int, why: str) -> None:
    kind = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status, "headers": kind})
    await send({"type": "http.response.body", "body": f"{why}\n".encode()})
