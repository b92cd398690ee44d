"""The channel of a SuperLink, which carries a whole request or answer in one HTTP request, without polling.

Flower sends a message object by object: it is announced, its six objects are pushed one by one, announced to the
receiver, pulled one by one and confirmed. Both sides poll. With Flower's web framework around each of these requests, a
round of a few parties takes seconds.

The channel is a second interface to the same SuperLink, at the same port. It has three calls for parties and two for
the server of a run:

| call | brings | returns |
| --- | --- | --- |
| `PARTY`receive | the name of the last request received, and the answer to it | the next request, once there is one |
| `PARTY`send | an answer with some of its objects | Flower's response, which names the objects that are missing |
| `PARTY`about | nothing | the server's time and versions, as JSON |
| `SERVER`send | requests to parties with their objects | Flower's response |
| `SERVER`receive | the names of pending requests | answers with their objects, once there is one |

Each is a list (`byte_lists`) of Flower's own protobuf messages, which Flower's own handlers process, so that the same
rules hold as on Flower's interfaces. A call to receive is held until there is something to return, at most `HOLD`
seconds; the server's also until all answers are there, at most `LINGER` seconds after the first, because every call
costs as much as many answers. The objects of an answer that is too large for one call come before it in further calls,
and the server receives the answer when it is whole. The objects of requests that are too large for one call travel in
Flower's way.

A request is kept until the party that received it says so in its next call, and is sent again otherwise: a connection
that breaks while a call is held would otherwise lose the request, and the round would wait until its time limit. Access
control (`access_control`) has checked who calls, and how large the call is, before the channel sees it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ...errors import WireError
from .access_control import (
    ABOUT,
    FLEET,
    NODE,
    PARTY,
    PUSH,
    RECEIVE,
    SEND,
    SERVER,
    App,
    Receive,
    Scope,
    Send,
    own_answers,
)
from .byte_lists import Part, read, written
from .download import parts_of
from .limits import CALL_PARTS, LIST_BYTES, PART_SECONDS, RESPONSE_BYTES
from .versions import versions

if TYPE_CHECKING:
    from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesResponse

HOLD = 20.0  # seconds; Flower's clients give up after 30
LINGER = 0.1  # seconds
LOOK = 5.0  # seconds between two looks for messages that came in another way, and for those that expired
LONGEST_NAME = 64  # bytes of the name of a party's process, which is kept with the request that it received
PUSH_OBJECT = FLEET + "push-object"  # Flower's own call after which an answer may be complete

_NAME = re.compile("[0-9a-f]{64}")  # of an object

Found = TypeVar("Found")
Topic = tuple[str, int]  # PARTY and the number of a party, or SERVER and that of a run


class Channel:
    """ASGI middleware around Flower's SuperLink that answers the calls of the channel.

    With `flower_nodes`, parties may be Flower's own SuperNodes, which announce an answer before they send its objects.
    A party can then announce an object of others as its message, with parts that never arrive: with a database Flower
    refuses everything else that contains the object, and Flower's own nodes wait for the parts.
    """

    def __init__(self, app: Any, flower_nodes: bool = False) -> None:
        self._app: App = app
        self._flower_nodes = flower_nodes
        self._state: Callable[[], Any] = app.state.linkstate_factory.state
        self._waiting: set[_Waiting] = set()
        self._unconfirmed: dict[int, tuple[bytes, PullMessagesResponse]] = {}
        self._requests_lock = threading.Lock()
        # By the name of the request and the number of the party that answers it; changed by the event loop alone.
        self._incomplete: dict[tuple[str, int], _Incomplete] = {}
        self._lists: dict[tuple[str, int], bytes] = {}  # by the same, a hash of the list of the answer's objects
        self._storing = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path == PUSH or path.startswith((PARTY, SERVER))):
            await self._app(scope, receive, send)
            if path == PUSH_OBJECT:
                self._wake(waiting.topic for waiting in self._waiting)
            return
        from flwr.supercore.error import http_error_translator
        from starlette.requests import Request

        request = Request(scope, receive)
        response = await http_error_translator(request, self._respond)
        await response(scope, receive, send)

    def close(self) -> None:
        """End all calls that are held, so that the SuperLink can stop."""
        for waiting in self._waiting:
            waiting.end()

    async def _respond(self, request: Any) -> Any:
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from starlette.responses import Response

        calls: dict[str, Callable[[Any, list[memoryview]], Awaitable[Sequence[Part]]]] = {
            PARTY + RECEIVE: self._party_receives,
            PARTY + SEND: self._party_sends,
            PARTY + ABOUT: _about,
            SERVER + RECEIVE: self._server_receives,
            SERVER + SEND: self._server_sends,
        }
        path = request.scope["path"]  # not that of `request.url`, in which the header Host takes part
        call = calls.get(path)
        announced = path == PUSH and self._flower_nodes
        if request.method != "POST" or (call is None and not announced):
            return Response(status_code=404)
        try:
            if call is None:
                stored = await self._stored(request.scope[NODE], [memoryview(await _body(request))], announced)
                return Response(stored.SerializeToString(), media_type="application/x-protobuf")
            given = read(await _body(request), CALL_PARTS if path.startswith(PARTY) else None)
            found = await call(request, list(given))
        except (DecodeError, ValueError, IndexError) as error:
            return Response(f"{type(error).__name__}\n", 400)
        return _ListResponse(found)

    async def _party_receives(self, request: Any, given: list[memoryview]) -> Sequence[Part]:
        node, (room, process, confirmed), answer = request.scope[NODE], map(bytes, given[:3]), given[3:]
        if len(process) > LONGEST_NAME:
            raise ValueError(f"the name of a process has at most {LONGEST_NAME} bytes")
        if answer and (await self._stored(node, answer)).objects_to_push:
            raise ValueError("an answer must be whole, and its first objects are missing")

        def look() -> list[Part] | None:
            with self._requests_lock:
                return self._next_request(node, process, confirmed.decode("ascii"), min(int(room), RESPONSE_BYTES))

        for older in self._waiting:  # of a connection that broke
            if older.topic == (PARTY, node):
                older.end()
        return await self._held((PARTY, node), request, look) or []

    async def _party_sends(self, request: Any, given: list[memoryview]) -> Sequence[Part]:
        return [(await self._stored(request.scope[NODE], given)).SerializeToString()]

    async def _stored(self, node: int, given: list[memoryview], announced: bool = False) -> PushMessagesResponse:
        """Store an answer and those of its objects that came with it.

        Flower takes an answer any number of times, each time with another list of objects, and keeps all of them. Here
        the first list counts. Unless the answer is only `announced`, the message itself must come with it, so that
        nobody takes the name of another object for that of a message.
        """
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.superlink.servicer.fleet import fleet_handlers
        from starlette.concurrency import run_in_threadpool

        if len(given[0]) > LIST_BYTES or not own_answers(bytes(given[0]), node):
            raise ValueError("a party may only push answers of its own, with a limited number of objects")
        pushed = PushMessagesRequest.FromString(given[0])
        (message,), (tree,) = pushed.messages_list, pushed.message_object_trees
        flat = _flat(tree)
        pushed.message_object_trees[0].CopyFrom(flat)
        listed = hashlib.sha256(flat.SerializeToString(deterministic=True)).digest()
        about = message.metadata
        key = about.reply_to_message_id, node

        def store() -> PushMessagesResponse:
            state, parts = self._state(), list(map(_Pushed.read, given[1:]))
            whole = any(_is_message(part.object_content, about.message_id) for part in parts)
            with self._storing:
                if key not in self._lists and not (announced or (whole and tree.object_id == about.message_id)):
                    raise ValueError("an answer must come with the object of its message")
                if self._lists.get(key, listed) != listed:
                    raise ValueError("an answer has one list of objects")
                answer = fleet_handlers.push_messages(pushed, state)
                if answer.objects_to_push:  # Flower knows the request, so that nobody fills this table
                    self._lists[key] = listed
            for part in parts:
                part.run_id, part.session_id = about.run_id, answer.session_id
                if part.object_id in answer.objects_to_push:
                    fleet_handlers.push_object(part, state)
                    answer.objects_to_push.remove(part.object_id)
            if not answer.objects_to_push:  # Flower keeps the session of an answer that it refused or had already
                state._cleanup_push_session(answer.session_id, cleanup_messages=False)
            return answer

        missing: tuple[str, ...] = ()
        self._incomplete[key] = _Incomplete(None, time.monotonic() + PART_SECONDS)
        try:
            answer = await run_in_threadpool(store)
            missing = tuple(answer.objects_to_push)
        finally:
            self._incomplete.pop(key, None)
            if missing:
                now = time.monotonic()
                self._incomplete = {name: one for name, one in self._incomplete.items() if now < one.until}
                self._incomplete[key] = _Incomplete(missing, now + PART_SECONDS)
        if not missing:
            self._wake([(SERVER, about.run_id)])
        return answer

    async def _server_sends(self, request: Any, given: list[memoryview]) -> Sequence[Part]:
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest
        from flwr.superlink.servicer.runtime import runtime_handlers
        from starlette.concurrency import run_in_threadpool

        pushed = PushAppMessagesRequest.FromString(given[0])
        for tree in pushed.message_object_trees:
            tree.CopyFrom(_flat(tree))

        def store() -> bytes:
            state, task = self._state(), self._task(request)
            with self._requests_lock:  # no party sees a request before its objects
                answer = runtime_handlers.push_messages(pushed, state, task)
                missing = set(answer.objects_to_push)
                for part in map(_Pushed.read, given[1:]):
                    part.session_id = answer.session_id
                    if part.object_id in missing:
                        runtime_handlers.push_object(part, state, task)
                        missing.discard(part.object_id)
            del answer.objects_to_push[:]
            answer.objects_to_push.extend(sorted(missing))
            stored: bytes = answer.SerializeToString()
            return stored

        answer = await run_in_threadpool(store)
        self._wake((PARTY, message.metadata.dst_node_id) for message in pushed.messages_list)
        return [answer]

    async def _server_receives(self, request: Any, given: list[memoryview]) -> Sequence[Part]:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
        from flwr.superlink.servicer.runtime import runtime_handlers
        from starlette.concurrency import run_in_threadpool

        wanted, room = PullAppMessagesRequest.FromString(given[0]), int(given[1])
        task = await run_in_threadpool(self._task, request)
        whole, packed = PullAppMessagesResponse(), list[dict[str, bytes]]()
        left, until, linger = RESPONSE_BYTES, math.inf, min(LINGER, HOLD)

        def look() -> bool | None:
            nonlocal left, until
            state, known = self._state(), len(packed)
            names = set(wanted.message_ids).difference(one.metadata.reply_to_message_id for one in whole.messages_list)
            asked = PullAppMessagesRequest(message_ids=sorted(names - self._held_back(state, names)))
            found = (
                runtime_handlers.pull_messages(asked, state, task) if asked.message_ids else PullAppMessagesResponse()
            )
            for message, tree in zip(found.messages_list, found.message_object_trees, strict=True):
                with self._storing:  # Flower no longer knows the request, and takes no answer to it
                    self._lists.pop((message.metadata.reply_to_message_id, message.metadata.src_node_id), None)
                tree.ClearField("children")  # the objects themselves say which parts they have
                contents = _contents(state, task.run_id, message.metadata.message_id, min(room, left))
                left -= sum(map(len, contents.values()))
                packed.append(contents)
                if contents:
                    state.object_store.delete(message.metadata.message_id)
            whole.MergeFrom(found)
            if packed and not known:
                until = time.monotonic() + linger
            return len(packed) >= len(wanted.message_ids) or time.monotonic() >= until or None

        await self._held((SERVER, task.run_id), request, look, lambda: until)
        parts = [part for one in packed for part in (",".join(one).encode(), *one.values())]
        return [whole.SerializeToString(), *parts] if packed else []

    def _held_back(self, state: Any, requests: set[str]) -> set[str]:
        """The requests whose answers have begun to arrive and are not whole yet."""
        found = set()
        for (name, _), one in list(self._incomplete.items()):
            if name not in requests or time.monotonic() >= one.until:
                continue
            if one.missing is None or not all(map(state.object_store.get, one.missing)):
                found.add(name)
        return found

    def _next_request(self, node: int, process: bytes, confirmed: str, room: int) -> list[Part] | None:
        """The next request to a party with its objects; None if there is none."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.proto.node_pb2 import Node
        from flwr.superlink.servicer.fleet import fleet_handlers

        state = self._state()
        receiver, kept = self._unconfirmed.pop(node, (process, None))
        if kept is not None:
            name = kept.messages_list[0].metadata.message_id
            if confirmed == name:
                state.object_store.delete(name)
            if confirmed == name or receiver != process or name not in state.object_store:
                kept = None
        if kept is None:
            kept = fleet_handlers.pull_messages(PullMessagesRequest(node=Node(node_id=node)), state, state.object_store)
        if not kept.messages_list:
            return None
        self._unconfirmed[node] = process, kept
        kept.message_object_trees[0].ClearField("children")  # as above
        described = kept.messages_list[0].metadata
        return [kept.SerializeToString(), *_contents(state, described.run_id, described.message_id, room).values()]

    def _task(self, request: Any) -> Any:
        """The task of Flower, that is the server of a run, in whose name a call is made."""
        from flwr.supercore.constant import TASK_TOKEN_HEADER
        from flwr.supercore.dependencies.task import authenticate_task

        return authenticate_task(request, request.headers.get(TASK_TOKEN_HEADER), self._state())

    def _wake(self, topics: Iterable[Topic]) -> None:
        woken = set(topics)
        for waiting in self._waiting:
            if waiting.topic in woken:
                waiting.event.set()

    async def _held(
        self,
        topic: Topic,
        request: Any,
        look: Callable[[], Found | None],
        again: Callable[[], float] = lambda: math.inf,
    ) -> Found | None:
        """What `look` finds, as soon as it finds something; None after `HOLD` seconds.

        `again` is the time at which to look again although nothing has happened.
        """
        from starlette.concurrency import run_in_threadpool

        loop, waiting = asyncio.get_running_loop(), _Waiting(topic)
        until, gone = loop.time() + HOLD, asyncio.ensure_future(_gone(request.receive))
        self._waiting.add(waiting)
        try:
            while True:
                waiting.event.clear()
                found = await run_in_threadpool(look)
                if found is not None or waiting.ended or gone.done() or loop.time() >= until:
                    return found
                news = asyncio.ensure_future(waiting.event.wait())
                seconds = max(0.0, min(LOOK, until - loop.time(), again() - time.monotonic()))
                await asyncio.wait({news, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if waiting.ended or gone.done():
                    return None
        finally:
            gone.cancel()
            self._waiting.discard(waiting)


async def _about(_request: Any, _given: list[memoryview]) -> Sequence[Part]:
    return [json.dumps({"time": time.time(), "versions": versions()}).encode()]


@dataclass(frozen=True)
class _Incomplete:
    """An answer that is not whole, and the time until which the server does not receive it.

    `missing` are the names of the objects that have not arrived; None while the answer is being stored.
    """

    missing: tuple[str, ...] | None
    until: float


class _Waiting:
    """A call that is held; `event` is set when there may be something to return."""

    def __init__(self, topic: Topic) -> None:
        self.topic, self.event, self.ended = topic, asyncio.Event(), False

    def end(self) -> None:
        self.ended = True
        self.event.set()


async def _gone(receive: Receive) -> None:
    """Wait until the caller has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Any) -> bytes:
    """The body of a request, which is not copied if it comes in one part."""
    parts = [part async for part in request.stream() if part]
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _ListResponse:
    """A response with a list of byte strings, which are sent one after the other and never joined."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._pieces = written(parts)

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        size = str(sum(map(len, self._pieces))).encode()
        headers = [(b"content-type", b"application/x-protobuf"), (b"content-length", size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in self._pieces[:-1]:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": self._pieces[-1] if self._pieces else b""})


@dataclass
class _Pushed:
    """What Flower's handlers read of a request to store an object; protobuf copies the content each time it is read."""

    node: Any
    run_id: int
    object_id: str
    object_content: bytes
    session_id: str = ""

    @staticmethod
    def read(part: memoryview) -> Any:  # a stand-in for PushObjectRequest
        from flwr.proto.message_pb2 import PushObjectRequest

        found = PushObjectRequest.FromString(part)
        return _Pushed(found.node, found.run_id, found.object_id, found.object_content)


def _contents(state: Any, run: int, name: str, room: int) -> dict[str, bytes]:
    """The objects of a message by name; none of them if one is missing or they lack room.

    The SuperLink compared each of them with its name, which is a hash of it, before it stored the object.
    """
    contents: dict[str, bytes] = {}
    waiting = {name: None}
    while waiting:
        part, _ = waiting.popitem()
        content = state.get_object(run, part)
        room -= len(content or b"")
        if not content or room < 0:
            return {}
        contents[part] = content
        try:
            waiting.update((child, None) for child in parts_of(content) if child not in contents)
        except WireError:
            return {}
    return contents


def _flat(tree: Any) -> Any:
    """The list of a message's objects, all of them as parts of the message itself.

    Flower's store believes whoever announces an object first about its parts, and writes them out under everything that
    it is a part of. With flat lists nobody says anything about the parts of an object that others may send as well.

    Raises `ValueError` for a name that no object can have, at which the store would stop half-way.
    """
    from flwr.proto.message_pb2 import ObjectTree

    names, rest = set[str](), list(tree.children)
    while rest:
        branch = rest.pop()
        names.add(branch.object_id)
        rest += branch.children
    if not all(map(_NAME.fullmatch, (*names, tree.object_id))):
        raise ValueError("an object is named by a SHA-256 hash")
    parts = [ObjectTree(object_id=name) for name in sorted(names - {tree.object_id})]
    return ObjectTree(object_id=tree.object_id, children=parts)


def _is_message(content: bytes, name: str) -> bool:
    """Whether an object is a message, and has this name. Only what says that it is a message is hashed."""
    return content.startswith(b"Message ") and hashlib.sha256(content).hexdigest() == name
