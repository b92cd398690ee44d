"""Download a message from a SuperLink, within limits on bytes, objects and time; servers and parties both use it.

Flower's own reader fetches and decodes whatever is announced. An array may have any size, and may repeat one stored
chunk any number of times; a table may have a million fields; a response may be compressed, or redirect the client to
another address. Here a message is measured before it is read: responses of the SuperLink are cut off at a size,
compressed responses are refused and redirects are not followed (`limit_responses`), the objects that an object names
are counted before they are fetched, and the sizes of an array's chunks are added up before they are joined. The
numbers are in `limits`.

Which objects belong to a message is read in the objects themselves: each names its parts, and the name of an object is
a hash of its content. The SuperLink also has lists of objects, but it believes whoever announces an object first about
its parts, so one party could add parts that never arrive to the messages of others.

A message that exceeds one of these limits, or whose parts do not arrive, is deleted at the SuperLink.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import httpx

from ...errors import WireError
from .limits import PART_SECONDS, MessageLimits, table_bytes

if TYPE_CHECKING:
    from flwr.app import Array, Message


class PartsMissing(Exception):  # noqa: N818  (a state of the network, not an error)
    """A message was announced but its parts did not arrive; its sender may have been killed."""


def limit_responses(client: Any, most: Mapping[str, int], others: int | None = None) -> None:
    """Limit the size of the responses that a client of Flower reads, and let it follow no redirects.

    Args:
        client: Any of Flower's HTTP clients.
        most: The largest response in bytes, by the last part of the path that is called.
        others: The largest response to any other call; None for no limit.
    """
    held = client._client  # the HTTP client inside Flower's own client; only there can a response be cut off
    held.follow_redirects = False
    held._transport = _Measured(held._transport, most, others)
    held._mounts = {at: _Measured(inner, most, others) if inner else None for at, inner in held._mounts.items()}


def pull_message(
    name: str,
    allowed: MessageLimits,
    pull: Callable[[str], bytes | None],
    wait: Callable[[float], bool],
    every: float,
) -> Message:
    """Fetch the objects of a message one after the other, and return the message.

    Args:
        name: The SuperLink's name for the message.
        allowed: The limits of the message.
        pull: Fetches one object; returns None if it is not there yet, because a message is announced before its parts.
        wait: Waits for a number of seconds, and returns True to give up.
        every: The seconds between two attempts to fetch an object.

    Raises:
        WireError: The message exceeds a limit, or is not a message.
        PartsMissing: A part of the message did not arrive.
    """
    contents: dict[str, bytes] = {}
    left, waiting = allowed.object_bytes, {name: None}
    while waiting:
        part, _ = waiting.popitem()
        until = time.monotonic() + PART_SECONDS
        while (content := pull(part)) is None:
            if time.monotonic() > until or wait(every):
                raise PartsMissing(f"the next part of the message did not arrive within {PART_SECONDS:g} s")
        contents[part] = content
        left -= len(content)
        if left < 0:
            raise WireError(f"it has more than the {allowed.size} bytes that a message may have")
        waiting.update((child, None) for child in parts_of(content) if child not in contents)
        if len(contents) + len(waiting) > allowed.objects:
            raise WireError(f"it has more than the {allowed.objects} objects that a message may have")
    return _inflated(name, contents, allowed.size)


class _Measured(httpx.BaseTransport):
    """A transport that cuts off responses at a size; `others` is the limit for calls that are not in `most`."""

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
            raise WireError("it is compressed, although no compression was accepted")
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
                raise WireError(f"it is larger than {self._most} bytes, the most that is allowed")
            yield chunk

    def close(self) -> None:
        self._inner.close()


def parts_of(content: bytes) -> list[str]:
    """The names of the objects that an object consists of. Raises `WireError` if it is not an object of Flower's."""
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of

    try:
        return head_of(content)[1]
    except ValueError:
        raise WireError("a part of it is not an object of Flower's") from None


def _inflated(name: str, contents: dict[str, bytes], most: int) -> Message:
    """Build Flower's message from its objects, after checking their sizes."""
    from flwr.app import Array, Message
    from flwr.supercore.inflatable.inflatable_object import get_object_body
    from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    kinds = {key: head_of(content)[:2] for key, content in contents.items()}
    left, arrays = most, dict[str, Any]()
    for key, (kind, children) in kinds.items():
        if kind != "ArrayChunk" and len(contents[key]) > (largest := table_bytes(len(contents))):
            raise WireError(f"a table in it has {len(contents[key])} bytes, more than {largest}")
        if kind != "Array":
            continue
        if any(kinds[child] != ("ArrayChunk", []) for child in children):
            raise WireError("an array in it consists of something else than chunks")
        described = json.loads(get_object_body(contents[key], Array))
        used = [children[piece] for piece in described["arraychunk_ids"]]  # it may repeat a chunk
        if set(used) != set(children):
            raise WireError("an array in it names a chunk that it does not use")
        pieces = [contents[chunk] for chunk in used]
        left -= sum(map(len, pieces))
        if left < 0:
            raise WireError(f"its arrays unpack to more than the {most} bytes that a message may have")
        arrays[key] = _joined(described, pieces)
    found = inflate_object_from_contents(name, contents, objects=arrays)
    if not isinstance(found, Message):
        raise WireError("it is not a message")
    return found


def _joined(described: dict[str, Any], pieces: list[bytes]) -> Array:
    """Flower's array, whose chunks are copied once; Flower's own reader copies them three times."""
    from flwr.app import Array
    from flwr.supercore.constant import HEAD_BODY_DIVIDER as DIVIDER

    data = b"".join(memoryview(piece)[piece.find(DIVIDER) + len(DIVIDER) :] for piece in pieces)
    return Array(described["dtype"], tuple(described["shape"]), described["stype"], data)
