"""One message fetched from a SuperLink within limits: bytes, objects and time. Servers and parties both read by it.

Flower's own reader fetches and decodes whatever is announced. An array may be of any size, and one stored piece may be
repeated in it any number of times; a table may have a million fields; an answer may be compressed, or send the client
to another address. Here a message is measured before it is read: a SuperLink's answers are cut off at a size, taken as
they are and from nowhere else (`measure`), the objects of a message are counted before the first is fetched, and an
array's pieces are added up before they are put together.

A message that breaks one of these limits is deleted at the SuperLink, and so is one whose parts do not come. Where the
SuperLink's list of a message's objects is itself cut off, nothing is known by which to delete it: the message stays
there until Flower's own time limit for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from ..protocol.wire import WireError

if TYPE_CHECKING:
    from flwr.app import Message

PART_SECONDS = 120.0  # for the next part of a message to arrive at the SuperLink
_RETRY_SECONDS = 0.25
_PLAIN = 2**16  # bytes of an object without numbers, and of a message beside its numbers
_PIECE = 2**20  # bytes of a piece of an array, at the least; Flower's own are five times as large
_NAME = 2**8  # bytes that the name of an object takes in a list


class PartsMissing(Exception):  # noqa: N818  (a state of the network, not a mistake)
    """A message was announced and its parts did not come: its sender may have died while it sent them."""


@dataclass(frozen=True)
class Allowance:
    """What one message may be: `size` bytes in `objects` objects."""

    size: int
    objects: int

    @staticmethod
    def of(numbers: int, vectors: int = 1) -> Allowance:
        """For `vectors` vectors of float64, each of so many numbers, and a few fields."""
        size = 8 * numbers * vectors + _PLAIN
        return Allowance(size, 4 + 4 * vectors + size // _PIECE)

    @property
    def answers(self) -> dict[str, int]:
        """Bytes of a SuperLink's answers to the calls that bring messages: a list of objects, and an object."""
        return {"pull-messages": _PLAIN + _NAME * self.objects, "pull-object": self.size + _PLAIN}


def measure(client: Any, most: Mapping[str, int], others: int | None = None) -> None:
    """Cut off what a client of Flower's takes in answer to its calls, which goes to no other address.

    Args:
        client: Any of Flower's HTTP clients.
        most: Bytes of an answer, by the last part of the call's path.
        others: Bytes of an answer to any other call; None for no limit.
    """
    held = client._client  # nothing else decides who reads how much
    held.follow_redirects = False
    held._transport = _Measured(held._transport, most, others)
    held._mounts = {at: _Measured(inner, most, others) if inner else None for at, inner in held._mounts.items()}


def pulled(
    name: str,
    tree: Any,
    allowed: Allowance,
    pull: Callable[[str], bytes | None],
    wait: Callable[[float], bool],
    every: float,
) -> Message:
    """The message called `name` whose objects a tree lists, within what is `allowed`.

    Args:
        name: What the SuperLink calls the message.
        tree: Its objects, as the SuperLink announced them.
        allowed: What it may be.
        pull: Fetches one object; None while it is not there, for a message is announced before its parts are sent.
        wait: Waits for so many seconds, and returns whether to give up.
        every: How many seconds to wait before an object is asked for again.

    Raises:
        WireError: The message breaks a limit, or is none.
        PartsMissing: A part of it did not come.
    """
    contents: dict[str, bytes] = {}
    left = allowed.size + _PLAIN
    for part in _names(tree, allowed.objects):
        until = time.monotonic() + PART_SECONDS
        while (content := pull(part)) is None:
            if time.monotonic() > until or wait(every):
                raise PartsMissing(f"the next part of the message did not come within {PART_SECONDS:g} s")
        contents[part] = content
        left -= len(content)
        if left < 0:
            raise WireError(f"it has more than the {allowed.size} bytes that a message may have")
    return _inflated(name, contents, allowed.size)


@dataclass(frozen=True)
class Answer:
    """`node`: who sent it, by the SuperLink's word, not by the message's own; None for the SuperLink itself."""

    node: int | None
    message: Message


class Downloads:
    """Answers fetched over a Grid of Flower's, each within `allowed`."""

    def __init__(self, grid: Any, allowed: Allowance, closed: threading.Event) -> None:
        self._grid, self._allowed, self._closed = grid, allowed, closed
        measure(grid._runtime_client, allowed.answers)

    def fetch(self, identifier: str) -> Answer | None:
        """The answer to a request; None while there is none. Raises `WireError` for one that breaks a limit."""
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        client, node, run = self._grid._runtime_client, self._grid.node, self._grid.run.run_id
        found = client.PullMessages(PullAppMessagesRequest(message_ids=[identifier]))
        if not found.messages_list:
            return None
        described, tree = found.messages_list[0].metadata, found.message_object_trees[0]
        name = described.message_id
        try:
            message = pulled(name, tree, self._allowed, self._pull, self._closed.wait, _RETRY_SECONDS)
            sender = None if described.src_node_id == SUPERLINK_NODE_ID else int(described.src_node_id)
            return Answer(sender, message)
        finally:
            client.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=name))

    def _pull(self, name: str) -> bytes | None:
        from flwr.proto.message_pb2 import PullObjectRequest

        node, run = self._grid.node, self._grid.run.run_id
        found = self._grid._runtime_client.PullObject(PullObjectRequest(node=node, run_id=run, object_id=name))
        if not found.object_found:
            raise PartsMissing("a part of the message is gone")
        return bytes(found.object_content) if found.object_available else None


class _Measured(httpx.BaseTransport):
    """A transport whose answers are cut off at a size; `others`: of calls that `most` does not name."""

    def __init__(self, inner: httpx.BaseTransport, most: Mapping[str, int], others: int | None = None) -> None:
        self._inner, self._most, self._others = inner, most, others

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        most = self._most.get(request.url.path.rpartition("/")[2], self._others)
        if most is None:
            return self._inner.handle_request(request)
        request.headers["accept-encoding"] = "identity"
        found = self._inner.handle_request(request)
        if found.headers.get("content-encoding", "identity") != "identity":
            found.close()
            raise WireError("it is compressed, which nobody asked for")
        stream = _CutOff(found.stream, most)
        return httpx.Response(found.status_code, headers=found.headers, stream=stream, extensions=found.extensions)

    def close(self) -> None:
        self._inner.close()


class _CutOff(httpx.SyncByteStream):
    def __init__(self, inner: Any, most: int) -> None:
        self._inner, self._most = inner, most

    def __iter__(self) -> Iterator[bytes]:
        left = self._most
        for chunk in self._inner:
            left -= len(chunk)
            if left < 0:
                raise WireError(f"it is larger than the {self._most} bytes that it may have")
            yield chunk

    def close(self) -> None:
        self._inner.close()


def _names(tree: Any, most: int) -> list[str]:
    """The names of all objects in a tree, each once, children first."""
    names: dict[str, None] = {}
    rest = [tree]
    while rest:
        branch = rest.pop()
        names[branch.object_id] = None
        if len(names) > most or len(rest) > most:
            raise WireError(f"it has more than the {most} objects that a message may have")
        rest += branch.children
    return list(reversed(names))


def _inflated(name: str, contents: dict[str, bytes], most: int) -> Message:
    """Flower's message of its objects, once they are known to be of allowed sizes."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    kinds = {key: head_of(content)[:2] for key, content in contents.items()}
    left = most
    for key, (kind, children) in kinds.items():
        if kind != "ArrayChunk" and len(contents[key]) > _PLAIN + _NAME * len(contents):
            raise WireError("a table in it is larger than a message's may be")
        if kind == "Array":
            left -= _unpacked(contents[key], [len(contents[child]) for child in children])
        if left < 0:
            raise WireError(f"its arrays unpack to more than the {most} bytes that a message may have")
    found = inflate_object_from_contents(name, contents)
    if not isinstance(found, Message):
        raise WireError("it is no message")
    return found


def _unpacked(content: bytes, sizes: list[int]) -> int:
    """Bytes of an array once its pieces, which it may repeat, are put together."""
    from flwr.app import Array
    from flwr.supercore.inflatable.inflatable_object import get_object_body

    pieces = json.loads(get_object_body(content, Array))["arraychunk_ids"]
    return sum(sizes[piece] for piece in pieces)
