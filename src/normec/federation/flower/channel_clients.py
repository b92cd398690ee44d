"""The two clients of a SuperLink's `channel`: a party, and the server of a run.

Both measure a message before they read it (`download`). An object that did not come with its message is fetched in
Flower's way.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ...errors import WireError
from .access_control import ABOUT, PARTY, RECEIVE, SEND, SERVER
from .byte_lists import ByteList, Part, field
from .download import PartsMissing, limit_responses, pull_message
from .limits import ANSWER_BYTES, LIST_BYTES, REQUESTS_BYTES, MessageLimits, table_bytes

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.supernode.fleet_http_client import FleetHttpClient

_RETRY_SECONDS = 0.05  # between two attempts to fetch an object, which may arrive after the message


def about_server(client: FleetHttpClient) -> bytes:
    """The server's time and versions, as JSON, for a party whose key is registered there."""
    return _call(client, PARTY + ABOUT, [], 1)[0]


class PartyChannel:
    """Receives requests and sends answers.

    Args:
        client: Flower's client, which signs with the party's key and limits responses.
        node: The number of the party's node.
        allowed: The limits of a request.
    """

    def __init__(self, client: FleetHttpClient, node: int, allowed: MessageLimits) -> None:
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.retry import make_simple_http_retry_invoker

        self._client, self._node, self._allowed = client, Node(node_id=node), allowed
        self._process, self._received = secrets.token_bytes(16), b""
        self._attempt: Callable[..., Any] = make_simple_http_retry_invoker().invoke

    def receive(self, answer: Message | None = None) -> Message | None:
        """Send the answer to the last request, if there is one, and return the next request.

        Returns:
            The next request; None if there is none yet.

        Raises:
            WireError: The request exceeds a limit.
            PartsMissing: The server did not take a part of the answer.
        """
        from flwr.proto.fleet_pb2 import PullMessagesResponse
        from flwr.proto.message_pb2 import PullObjectRequest
        from flwr.supercore.inflatable.inflatable_object import get_object_id

        room = str(self._allowed.object_bytes).encode()
        said: list[Part] = [room, self._process, self._received]
        if answer is not None:
            said += self._last_part(answer)
        found = self._attempt(_call, self._client, PARTY + RECEIVE, said, 1 + self._allowed.objects)
        if not found:
            return None
        if len(found[0]) > (most := table_bytes(self._allowed.objects)):
            raise WireError(f"the announcement of the message has {len(found[0])} bytes, more than {most}")
        announced = PullMessagesResponse.FromString(found[0])
        described, name = announced.messages_list[0].metadata, announced.message_object_trees[0].object_id
        self._received = described.message_id.encode()
        held = {get_object_id(content): content for content in found[1:]}

        def pull(part: str) -> bytes | None:
            wanted = PullObjectRequest(node=self._node, run_id=described.run_id, object_id=part)
            return held[part] if part in held else _available(self._attempt(self._client.PullObject, wanted))

        message = pull_message(name, self._allowed, pull, _sleep, _RETRY_SECONDS)
        message.metadata.__dict__["_message_id"] = name  # the name of an object is not part of the object
        return message

    def _last_part(self, answer: Message) -> list[Part]:
        """Send all of an answer but what fits into one more call, and return the parts of that call.

        Flower reports how many seconds the computation took, which may depend on the data, so this reports 0.
        """
        from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse

        message, tree, contents = _taken_apart(answer)
        announced = PushMessagesRequest(
            node=self._node, messages_list=[message], message_object_trees=[tree], clientapp_runtime_list=[0.0]
        ).SerializeToString()
        left = {
            name: _pushed(self._node, message.metadata.run_id, name, content)
            for name, content in {tree.object_id: b"", **contents}.items()  # the message itself comes first
        }
        while len(parts := _fitting(left, ANSWER_BYTES)) < len(left):
            found = self._attempt(_call, self._client, PARTY + SEND, [announced, *parts], 1)
            missing = set(PushMessagesResponse.FromString(found[0]).objects_to_push)
            if not parts or missing >= left.keys():
                raise PartsMissing("the server did not take a part of the answer")
            left = {name: part for name, part in left.items() if name in missing}
        return [announced, *parts]


@dataclass(frozen=True)
class Arrival:
    """An answer that has arrived, perhaps without its objects; `request` names the request that it answers."""

    request: str
    name: str
    sender: int | None  # according to the SuperLink, not to the message; None is the SuperLink itself
    contents: dict[str, bytes]  # by name; the SuperLink stores nothing under a name that is not its hash


class ServerChannel:
    """Sends requests and receives answers through Flower's Grid.

    Args:
        grid: Flower's Grid.
        allowed: The limits of an answer.
        parties: The largest number of requests that are pending at a time.
        closed: Ends the wait for objects that do not arrive.
    """

    def __init__(self, grid: Any, allowed: MessageLimits, parties: int, closed: threading.Event) -> None:
        self._grid, self._allowed, self._closed = grid, allowed, closed
        limits = {**allowed.responses, RECEIVE: parties * (2 * LIST_BYTES + allowed.object_bytes)}
        limit_responses(grid._runtime_client, limits)

    def send(self, requests: Sequence[Message]) -> list[str]:
        """Send requests. Returns their names, and an empty string for a request that Flower did not take."""
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.proto.runtime_pb2 import PushAppMessagesRequest, PushAppMessagesResponse

        client, run = self._grid._runtime_client, self._grid.run.run_id
        apart = _all_taken_apart(requests)
        pushed = PushAppMessagesRequest(
            messages_list=[message for message, _, _ in apart], message_object_trees=[tree for _, tree, _ in apart]
        )
        contents = {name: content for _, _, own in apart for name, content in own.items()}
        parts = {name: _pushed(self._grid.node, run, name, content) for name, content in contents.items()}
        found = _call(client, SERVER + SEND, [pushed.SerializeToString(), *_fitting(parts, REQUESTS_BYTES)])
        response = PushAppMessagesResponse.FromString(found[0])
        for name in response.objects_to_push:
            rest = PushObjectRequest(node=self._grid.node, run_id=run, object_id=name, object_content=contents[name])
            rest.session_id = response.session_id
            client.PushObject(rest)
        return list(response.message_ids)

    def receive(self, pending: Collection[str]) -> list[Arrival]:
        """The answers to some of the pending requests; none if none arrives for a while."""
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

        wanted = PullAppMessagesRequest(message_ids=sorted(pending)).SerializeToString()
        found = _call(self._grid._runtime_client, SERVER + RECEIVE, [wanted, str(self._allowed.object_bytes).encode()])
        if not found:
            return []
        arrivals, parts = [], iter(found[1:])
        for message in PullAppMessagesResponse.FromString(found[0]).messages_list:
            described = message.metadata
            sender = None if described.src_node_id == SUPERLINK_NODE_ID else int(described.src_node_id)
            contents = {name: next(parts) for name in next(parts).decode("ascii").split(",") if name}
            arrivals.append(Arrival(described.reply_to_message_id, described.message_id, sender, contents))
        return arrivals

    def open(self, arrival: Arrival) -> Message:
        """Read an answer, and first fetch its objects if they did not come with it.

        Raises:
            WireError: The answer exceeds a limit.
            PartsMissing: A part of the answer did not arrive.
        """
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest

        client, node, run = self._grid._runtime_client, self._grid.node, self._grid.run.run_id
        held = arrival.contents

        def pull(name: str) -> bytes | None:
            if name in held:
                return held[name]
            return _available(client.PullObject(PullObjectRequest(node=node, run_id=run, object_id=name)))

        try:
            return pull_message(arrival.name, self._allowed, pull, self._closed.wait, _RETRY_SECONDS)
        finally:
            if not arrival.contents:
                client.ConfirmMessageReceived(
                    ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=arrival.name)
                )


def _call(client: Any, path: str, parts: Sequence[Part], most: int | None = None) -> list[bytes]:
    """Make a call of the channel through one of Flower's clients, with its authentication.

    Raises `ValueError` if the response has more than `most` parts; a server need not limit what its own SuperLink says.
    """
    response = partial(ByteList, most=most)
    found = client._unary_unary(path=path, rpc_method=path, request=ByteList(parts), response_type=response)
    return list(map(bytes, found.parts))


def _pushed(node: Any, run: int, name: str, content: bytes) -> Part:
    """The bytes of Flower's request to store an object, in pieces, so that the object is not copied."""
    from flwr.proto.message_pb2 import PushObjectRequest

    request = PushObjectRequest(node=node, run_id=run, object_id=name).SerializeToString()
    return request + field(PushObjectRequest.OBJECT_CONTENT_FIELD_NUMBER, len(content)), content


def _taken_apart(message: Message) -> tuple[Any, Any, dict[str, bytes]]:
    """A message without its content, the list of its objects, and the objects by name."""
    return _all_taken_apart([message])[0]


def _all_taken_apart(messages: Sequence[Message]) -> list[tuple[Any, Any, dict[str, bytes]]]:
    """Messages that are sent together: each without its content, the list of its objects, and the objects by name.

    An object that several of them have in common is hashed once, and is among the objects of the first one only.
    """
    from flwr.app.message import remove_content_from_message
    from flwr.common.serde import message_to_proto
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )

    found, known = [], set[str]()
    with no_object_id_recompute():
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            bare = remove_content_from_message(message) if message.has_content() else message
            parts = get_all_nested_objects(message)
            contents = {name: part.deflate() for name, part in parts.items() if name not in known}
            known |= parts.keys()
            found.append((message_to_proto(bare), get_object_tree(message), contents))
    return found


def _fitting(parts: Mapping[str, Part], room: int) -> list[Part]:
    """The objects that fit into `room` bytes together, taken in their order."""
    found = []
    for part in parts.values():
        if (size := sum(map(len, part)) if isinstance(part, tuple) else len(part)) <= room:
            room -= size
            found.append(part)
    return found


def _available(found: Any) -> bytes | None:
    """The object in Flower's response; None if it has not arrived yet."""
    if not found.object_found:
        raise PartsMissing("a part of the message is missing")
    return bytes(found.object_content) if found.object_available else None


def _sleep(seconds: float) -> bool:
    """Wait, and never give up."""
    time.sleep(seconds)
    return False
