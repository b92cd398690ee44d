"""The channel of a real SuperLink: messages arrive whole and once, held calls end with news, and limits hold."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

flwr = pytest.importorskip("flwr.app")
httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")

from cryptography.hazmat.primitives.asymmetric import ec  # noqa: E402
from flwr.proto.fleet_pb2 import (  # noqa: E402
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
    UnregisterNodeFleetRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest  # noqa: E402
from flwr.proto.message_pb2 import (  # noqa: E402
    ConfirmMessageReceivedRequest,
    Metadata,
    ObjectTree,
    PullObjectRequest,
    PushObjectRequest,
)
from flwr.proto.message_pb2 import Message as ProtoMessage  # noqa: E402
from flwr.proto.node_pb2 import Node  # noqa: E402
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType  # noqa: E402
from flwr.supercore.object_store.object_store_factory import ObjectStoreFactory  # noqa: E402
from flwr.supercore.primitives.asymmetric import public_key_to_bytes  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402
from flwr.superlink import main  # noqa: E402
from flwr.superlink.grid.http_grid import HttpGrid  # noqa: E402
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor  # noqa: E402

from normec.errors import WireError  # noqa: E402
from normec.federation.flower import access_control, channel, download  # noqa: E402
from normec.federation.flower.byte_lists import ByteList  # noqa: E402
from normec.federation.flower.channel import Channel  # noqa: E402
from normec.federation.flower.channel_clients import (  # noqa: E402
    PartyChannel,
    ServerChannel,
    _all_taken_apart,
    _call,
    _taken_apart,
)
from normec.federation.flower.download import PartsMissing  # noqa: E402
from normec.federation.flower.limits import MessageLimits  # noqa: E402
from normec.federation.flower.records import SharedArrays, from_records, to_records  # noqa: E402
from normec.federation.flower.supernode import limited_client  # noqa: E402

from ..support.waiting import LIMIT, wait_for  # noqa: E402

NUMBERS = 1000
ALLOWED = MessageLimits.of(NUMBERS)


class SuperLink:
    """Flower's SuperLink with the channel, at a port of this machine, and a run with one server."""

    def __init__(self, open_now: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[str] = Counter()
        app = main.create_app()
        self.channel, self.state = Channel(app), app.state.linkstate_factory.state()
        port = self.port = access_control.OwnerAndParties(self.channel, partial(access_control.signing_party, app))

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.calls[scope.get("path", "")] += 1
            await port(scope, receive, send)

        config = uvicorn.Config(counted, "127.0.0.1", 0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        thread = threading.Thread(target=self.server.run)
        thread.start()
        open_now.callback(thread.join)
        open_now.callback(self._stop)
        wait_for(lambda: self.server.started, "the SuperLink")
        self.address = f"127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"
        self._open_now = open_now
        run = self.state.create_run("", "", "", {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP)
        task = self.state.get_run_info(run_ids=[run])[0].primary_task_id
        self.token = self.state.claim_task(task)
        self.state.activate_task(task)
        for name, value in (("_run_id", run), ("_node_id", 1), ("_task_id", task)):
            monkeypatch.setattr(TaskIdentity, name, value)
        self.run = run

    def _stop(self) -> None:
        self.channel.close()
        self.server.should_exit = True

    def party(self, numbers: int = NUMBERS) -> tuple[int, PartyChannel, Any]:
        key = ec.generate_private_key(ec.SECP384R1())
        node = self.state.create_node("", "", public_key_to_bytes(key.public_key()), 0)
        self.state.activate_node(node, 60.0)
        allowed = MessageLimits.of(numbers)
        interceptors = [NodeAuthHttpInterceptor(key, key.public_key())]
        client = limited_client(allowed).from_server_address(self.address, True, None, interceptors)
        self._open_now.callback(client.close)
        return node, PartyChannel(client, node, allowed), client

    def grid(self, token: str | None = None) -> HttpGrid:
        grid = HttpGrid(self.address, True, token=token or self.token)
        grid.set_run(self.state.get_run_info(run_ids=[self.run])[0])
        self._open_now.callback(grid._runtime_client.close)
        return grid

    def serve(self, numbers: int = NUMBERS) -> ServerChannel:
        return ServerChannel(self.grid(), MessageLimits.of(numbers), 3, threading.Event())


@pytest.fixture
def superlink(monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    # Flower compares the names of its own routes, which takes longer than the rest of a start.
    monkeypatch.setattr(main, "validate_unique_route_operation_ids", lambda _: None)
    with ExitStack() as open_now:
        yield SuperLink(open_now, monkeypatch)


def request(node: int, vector: Any, **fields: Any) -> Any:
    return flwr.Message(to_records({"x": vector, **fields}), node, "train", ttl=600.0)


def answer(to: Any, vector: Any) -> Any:
    return flwr.Message(to_records({"message": vector}), reply_to=to)


def deliver(party: PartyChannel, message: Any) -> None:
    """Send an answer without waiting for the next request."""
    _call(party._client, access_control.PARTY + "send", party._last_part(message))


def announce(client: Any, node: int, message: Any, tree: Any, contents: dict[str, bytes]) -> None:
    """Announce an answer with a list of objects, and send the message without its other objects."""
    name = message.metadata.message_id
    pushed = PushMessagesRequest(node=Node(node_id=node), messages_list=[message], message_object_trees=[tree])
    first = PushObjectRequest(node=Node(node_id=node), object_id=name, object_content=contents[name])
    _call(client, access_control.PARTY + "send", [pushed.SerializeToString(), first.SerializeToString()])


def vector(seed: int, numbers: int = NUMBERS) -> Any:
    return np.random.default_rng(seed).normal(size=numbers)


def arrived(server: ServerChannel, names: list[str]) -> dict[str, Any]:
    """The answers to all these requests, by the name of the request."""
    found: dict[str, Any] = {}
    while len(found) < len(names):
        found |= {arrival.request: arrival for arrival in server.receive(set(names) - set(found))}
    return found


def test_an_exchange_takes_one_call_of_a_party_and_brings_every_number(superlink: SuperLink) -> None:
    server, parties, rounds = superlink.serve(), [superlink.party() for _ in range(2)], 3

    def answering(channel: PartyChannel) -> list[Any]:
        seen: list[Any] = []
        reply = None
        while len(seen) < rounds:
            found = channel.receive(reply)
            assert found is not None
            seen.append(from_records(found.content))
            reply = answer(found, vector(int(seen[-1]["index"])))
        deliver(channel, reply)
        return seen

    with ThreadPoolExecutor(2) as threads:
        answered = [threads.submit(answering, party) for _, party, _ in parties]
        for k in range(rounds):
            sent = server.send([request(node, vector(9 + k), index=i) for i, (node, _, _) in enumerate(parties)])
            found = arrived(server, sent)
            for i, (node, _, _) in enumerate(parties):
                arrival = found[sent[i]]
                assert arrival.sender == node
                assert np.array_equal(from_records(server.open(arrival).content)["message"], vector(i))
        for i, one in enumerate(answered):
            for k, fields in enumerate(one.result()):
                assert fields["index"] == i
                assert np.array_equal(fields["x"], vector(9 + k))
    calls = superlink.calls
    assert (calls[access_control.PARTY + "receive"], calls[access_control.PARTY + "send"]) == (2 * rounds, 2)
    assert calls[access_control.SERVER + "send"] == rounds
    assert not any(path.startswith(("/v1/fleet", "/v1/runtime")) for path in calls)


def test_what_requests_have_in_common_is_sent_to_the_superlink_once(superlink: SuperLink) -> None:
    numbers = 400_000  # 3 MB
    server, parties = superlink.serve(numbers), [superlink.party(numbers) for _ in range(3)]
    shared, arrays = vector(0, numbers), SharedArrays()
    requests = [
        flwr.Message(to_records({"x": shared, "own": vector(1 + i)}, arrays), node, "train", ttl=600.0)
        for i, (node, _, _) in enumerate(parties)
    ]
    chunks = [content for _, _, own in _all_taken_apart(requests) for content in own.values() if len(content) > numbers]
    assert len(chunks) == 1
    server.send(requests)
    for i, (_, party, _) in enumerate(parties):  # nothing of it is deleted before the last party has it
        found = party.receive()
        assert found is not None
        fields = from_records(found.content)
        assert np.array_equal(fields["x"], shared)
        assert np.array_equal(fields["own"], vector(1 + i))
        deliver(party, answer(found, vector(1)))


def test_the_server_receives_answers_together(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for the other answers, but not for ever."""
    monkeypatch.setattr(channel, "LINGER", channel.HOLD)  # as long as a call is held
    server, parties = superlink.serve(), [superlink.party() for _ in range(3)]
    sent = server.send([request(node, vector(0)) for node, _, _ in parties])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.receive, sent)
        for _, party, _ in parties:
            deliver(party, answer(party.receive(), vector(1)))
        assert {arrival.request for arrival in waiting.result()} == set(sent)
    monkeypatch.setattr(channel, "LINGER", 0.05)
    sent = server.send([request(node, vector(0)) for node, _, _ in parties])
    (_, first, _), (_, second, _), _ = parties
    deliver(first, answer(first.receive(), vector(1)))
    deliver(second, answer(second.receive(), vector(1)))
    assert {arrival.request for arrival in server.receive(sent)} == {sent[0], sent[1]}


def test_calls_are_held_until_there_is_something_to_return(superlink: SuperLink) -> None:
    server, (node, party, _) = superlink.serve(), superlink.party()
    with ThreadPoolExecutor(2) as threads:
        held = threads.submit(party.receive)
        wait_for(lambda: len(superlink.channel._waiting) == 1, "the party's call")
        (sent,) = server.send([request(node, vector(0))])
        found = held.result()
        waiting = threads.submit(server.receive, [sent])
        wait_for(lambda: len(superlink.channel._waiting) == 1, "the server's call")
        deliver(party, answer(found, vector(1)))
        (arrival,) = waiting.result()
    assert arrival.request == sent
    assert superlink.calls[access_control.PARTY + "receive"] == superlink.calls[access_control.SERVER + "receive"] == 1


def test_a_call_without_news_ends_with_nothing(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "HOLD", 0.05)
    server, (node, party, _) = superlink.serve(), superlink.party()
    assert party.receive() is None
    assert server.receive(server.send([request(node, vector(0))])) == []


def test_a_stopping_superlink_ends_the_calls_that_it_holds(superlink: SuperLink) -> None:
    _, party, _ = superlink.party()
    with ThreadPoolExecutor(1) as thread:
        held = thread.submit(party.receive)
        wait_for(lambda: len(superlink.channel._waiting) == 1, "the party's call")
        superlink.channel.close()
        assert held.result() is None


def test_a_request_that_got_lost_on_its_way_is_sent_again(superlink: SuperLink) -> None:
    server, (node, party, client) = superlink.serve(), superlink.party()
    server.send([request(node, vector(0))])
    first = _call(client, access_control.PARTY + "receive", [b"100000", party._process, b""])  # and it got lost
    assert first
    found = party.receive()
    assert found is not None
    assert np.array_equal(from_records(found.content)["x"], vector(0))
    (sent,) = server.send([request(node, vector(1))])
    found = party.receive()  # this call says that the first request has arrived
    assert found is not None
    assert np.array_equal(from_records(found.content)["x"], vector(1))
    assert found.metadata.message_id == sent
    deliver(party, answer(found, vector(2)))
    assert [arrival.request for arrival in server.receive([sent])] == [sent]


def test_a_party_that_was_started_again_does_not_get_the_requests_of_its_last_process(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "HOLD", 0.05)
    server, (node, party, client) = superlink.serve(), superlink.party()
    server.send([request(node, vector(0))])
    assert party.receive() is not None
    assert PartyChannel(client, node, ALLOWED).receive() is None


def test_a_connection_that_breaks_while_a_call_is_held_loses_no_request(superlink: SuperLink) -> None:
    server, (node, party, client) = superlink.serve(), superlink.party()
    with unread_call(superlink, client, [b"100000", party._process, b""]):
        wait_for(lambda: len(superlink.channel._waiting) == 1, "the party's call")
    server.send([request(node, vector(0))])
    assert party.receive() is not None


@pytest.mark.slow
def test_an_answer_that_does_not_fit_into_one_call_arrives_whole(superlink: SuperLink) -> None:
    numbers = 3_000_000  # an answer of 24 MB
    server, (node, party, client) = superlink.serve(numbers), superlink.party(numbers)
    (sent,) = server.send([request(node, vector(0))])
    found = party.receive()
    assert found is not None
    last = party._last_part(answer(found, vector(1, numbers)))  # all other parts were sent
    assert superlink.calls[access_control.PARTY + "send"] > 1
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.receive, [sent])
        wait_for(lambda: len(superlink.channel._waiting) == 1, "the server's call")
        assert not waiting.done()
        _call(client, access_control.PARTY + "send", last)
        (arrival,) = waiting.result()
    assert np.array_equal(from_records(server.open(arrival).content)["message"], vector(1, numbers))
    assert not any(path.startswith(("/v1/fleet", "/v1/runtime")) for path in superlink.calls)


def test_a_request_that_does_not_fit_into_one_call_travels_in_flowers_way(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "RESPONSE_BYTES", NUMBERS)
    server, (node, party, _) = superlink.serve(), superlink.party()
    server.send([request(node, vector(0))])
    found = party.receive()
    assert found is not None
    assert np.array_equal(from_records(found.content)["x"], vector(0))
    assert superlink.calls["/v1/fleet/pull-object"] > 0


def test_an_answer_that_stays_incomplete_reaches_the_server_in_the_end(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PART_SECONDS", 0.5)
    monkeypatch.setattr(channel, "LOOK", 0.1)
    server, (node, party, client) = superlink.serve(), superlink.party()
    (sent,) = server.send([request(node, vector(0))])
    announced, first, *_ = party._last_part(answer(party.receive(), vector(1)))
    _call(client, access_control.PARTY + "send", [announced, first])
    (arrival,) = server.receive([sent])
    assert (arrival.request, arrival.contents) == (sent, {})


def test_the_server_gets_no_object_under_the_name_of_another(superlink: SuperLink) -> None:
    """The server does not hash what it receives: the SuperLink did before it stored it."""
    server, (node, party, client) = superlink.serve(), superlink.party()
    (sent,) = server.send([request(node, vector(0))])
    message, tree, contents = _taken_apart(answer(party.receive(), vector(1)))
    other = next(content for content in contents.values() if content.startswith(b"ArrayChunk"))
    false = {
        name: other[:-1] + bytes([other[-1] ^ 1]) if content is other else content for name, content in contents.items()
    }
    pushed = PushMessagesRequest(node=Node(node_id=node), messages_list=[message], message_object_trees=[tree])
    parts = [
        PushObjectRequest(node=Node(node_id=node), run_id=superlink.run, object_id=name, object_content=content)
        for name, content in false.items()
    ]
    _call(
        client,
        access_control.PARTY + "send",
        [pushed.SerializeToString(), *(part.SerializeToString() for part in parts)],
    )
    server._closed.set()  # nobody waits for the object that was refused
    (arrival,) = server.receive([sent])
    assert arrival.contents == {}
    with pytest.raises(PartsMissing):
        server.open(arrival)


def test_a_call_that_brings_half_an_answer_and_asks_for_the_next_request_is_refused(superlink: SuperLink) -> None:
    server, (node, party, client) = superlink.serve(), superlink.party()
    server.send([request(node, vector(0))])
    announced, *parts = party._last_part(answer(party.receive(), vector(1)))
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        _call(client, access_control.PARTY + "receive", [b"100000", party._process, b"", announced, parts[0]])


def test_a_message_that_is_too_large_is_refused_unread(superlink: SuperLink) -> None:
    server, (node, party, _) = superlink.serve(), superlink.party()
    large = vector(0, 50 * NUMBERS)
    (sent,) = server.send([request(node, large)])
    with pytest.raises(WireError):
        party.receive()
    (sent,) = server.send([request(node, vector(0))])
    found = party.receive()  # the refused request does not come again
    assert found is not None
    deliver(party, answer(found, large))
    (arrival,) = server.receive([sent])
    assert arrival.contents == {}
    with pytest.raises(WireError):
        server.open(arrival)


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (b"\x0a\x00" * ALLOWED.objects * 2, ValueError),  # a list of empty strings
        (ByteList([b"\x12\x00" * 2**15 * 3]).SerializeToString(), WireError),  # an announcement of empty messages
    ],
    ids=["strings", "messages"],
)
def test_a_response_of_many_small_parts_is_not_read(
    superlink: SuperLink, response: bytes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part takes far more memory than bytes in the response, which may have as many as a model."""
    _, party, client = superlink.party(2**15)
    found = httpx.Response(200, content=response)
    monkeypatch.setattr(client, "_send", lambda _: found)
    monkeypatch.setattr(found, "raise_for_status", lambda: found)
    with pytest.raises(error, match=r"at most|more than"):
        party.receive()


def test_a_party_answers_nothing_in_the_name_of_others(superlink: SuperLink) -> None:
    server, (node, party, _), (_, _, client) = superlink.serve(), superlink.party(), superlink.party()
    (sent,) = server.send([request(node, vector(0))])
    found = party.receive()
    message, tree, _ = _taken_apart(answer(found, vector(1)))
    pushed = PushMessagesRequest(node=Node(node_id=node), messages_list=[message], message_object_trees=[tree])
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        _call(client, access_control.PARTY + "send", [pushed.SerializeToString()])
    assert superlink.state.num_message_res() == 0
    deliver(party, answer(found, vector(1)))
    assert [arrival.sender for arrival in server.receive([sent])] == [node]


def signed(client: Any, parts: list[bytes]) -> Any:
    """The HTTP request of a party's call for its next message: signed, and not sent."""
    kept: list[Any] = []
    send = client._client.send
    client._client.send = kept.append
    try:
        with pytest.raises(AttributeError):  # there is no response
            _call(client, access_control.PARTY + "receive", parts)
    finally:
        client._client.send = send
    return kept[0]


def signed_headers(client: Any) -> dict[str, str]:
    """The headers of a request that a party has signed, which cover its time alone."""
    headers = signed(client, [b"1", b"p" * 16, b""]).headers
    return {name: value for name, value in headers.items() if name not in ("content-length", "host")}


def unread_call(superlink: SuperLink, client: Any, parts: list[bytes]) -> socket.socket:
    """Send a party's call for its next message, and read nothing of the response."""
    made = signed(client, parts)
    lines = [f"POST {made.url.path} HTTP/1.1", *(f"{name}: {value}" for name, value in made.headers.items()), "", ""]
    opened = socket.socket()
    opened.settimeout(LIMIT)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
    host, port = superlink.address.split(":")
    opened.connect((host, int(port)))
    opened.sendall("\r\n".join(lines).encode() + made.content)
    return opened


@pytest.mark.quick_cases(20)
@pytest.mark.parametrize("host", ["", "x/v1/runtime/{}?", "x/v1/control/unregister-node?"])
def test_a_party_calls_nothing_of_flower_in_the_name_of_others(superlink: SuperLink, host: str) -> None:
    """A host with a path in it must not make Flower check another address than the one that it answers."""
    (node, _, _), (_, _, client) = superlink.party(), superlink.party()
    other = Node(node_id=node)
    calls = {
        "pull-messages": PullMessagesRequest(node=other),
        "push-messages": PushMessagesRequest(node=other),
        "deactivate-node": DeactivateNodeRequest(node_id=node),
        "unregister-node": UnregisterNodeFleetRequest(node_id=node),
        "send-node-heartbeat": SendNodeHeartbeatRequest(node=other, heartbeat_interval=1),
        "pull-object": PullObjectRequest(node=other, run_id=superlink.run, object_id="0" * 64),
        "push-object": PushObjectRequest(node=other, run_id=superlink.run, object_id="0" * 64, object_content=b"x"),
        "confirm-message-received": ConfirmMessageReceivedRequest(node=other, run_id=superlink.run),
    }
    headers = {**signed_headers(client), "content-type": "application/protobuf"}
    for call, message in calls.items():
        named = headers | ({"host": host.format(call)} if host else {})
        url = f"http://{superlink.address}{access_control.FLEET}{call}"
        response = httpx.post(url, headers=named, content=message.SerializeToString(), trust_env=False)
        assert response.status_code in (401, 403), (call, response.text)
    assert superlink.state.get_node_info(node_ids=[node])[0].status == "online"


def test_a_party_does_not_make_the_server_receive_half_of_anothers_answer(superlink: SuperLink) -> None:
    server, (node, party, client), (other, _, hostile) = superlink.serve(), superlink.party(), superlink.party()
    (sent,) = server.send([request(node, vector(0))])
    found = party.receive()
    announced, *parts = party._last_part(answer(found, vector(1)))
    _call(client, access_control.PARTY + "send", [announced, parts[0]])
    message, tree, contents = _taken_apart(answer(found, vector(2)))
    message.metadata.src_node_id = other
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(server.receive, [sent])
        wait_for(lambda: len(superlink.channel._waiting) == 1, "the server's call")
        announce(hostile, other, message, tree, contents)
        _call(client, access_control.PARTY + "send", [announced, *parts])
        (arrival,) = waiting.result()
    assert arrival.sender == node
    assert len(arrival.contents) == len(parts)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"\xff" * 20],
        [b"x", b"y", b"z", b"more"],
        [b""] * 5000,
        [PushMessagesRequest().SerializeToString()],
        [PushMessagesRequest(messages_list=[ProtoMessage(metadata=Metadata(run_id=1))] * 2).SerializeToString()],
        [bytes(2**17)],
        [b"100000", b"", b"", bytes(2**17)],  # a list of objects that is too long
        [b"100000", bytes(2**10), b""],  # a long name of a process, which is kept
    ],
)
@pytest.mark.parametrize("call", ["receive", "send"])
def test_a_malformed_call_is_refused(superlink: SuperLink, call: str, parts: list[bytes]) -> None:
    _, _, client = superlink.party()
    with pytest.raises(httpx.HTTPStatusError, match=r"4\d\d"):
        _call(client, access_control.PARTY + call, parts)


def test_a_list_that_repeats_itself_harms_only_its_sender(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few kilobytes that Flower would write out as a list of a hundred thousand objects."""
    monkeypatch.setattr(channel, "PART_SECONDS", 0.2)
    monkeypatch.setattr(channel, "LOOK", 0.1)
    server, (node, party, client), (other, honest, _) = superlink.serve(), superlink.party(), superlink.party()
    sent = server.send([request(node, vector(0)), request(other, vector(0))])
    found = party.receive()
    message, _, contents = _taken_apart(answer(found, vector(1)))
    leaf, inner = ObjectTree(object_id="a" * 64), "b" * 64
    whole = ObjectTree(object_id=inner, children=[leaf] * 300)
    root = ObjectTree(
        object_id=message.metadata.message_id, children=[whole, *[ObjectTree(object_id=inner) for _ in range(300)]]
    )
    announce(client, node, message, root, contents)
    found = honest.receive()
    deliver(honest, answer(found, vector(2)))
    arrivals = arrived(server, sent)
    assert np.array_equal(from_records(server.open(arrivals[sent[1]]).content)["message"], vector(2))
    server._closed.set()
    with pytest.raises((WireError, PartsMissing)):
        server.open(arrivals[sent[0]])


def test_a_list_whose_objects_are_parts_of_one_another_is_not_written_out(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight kilobytes that Flower would write out as a list of 2⁶⁰ objects."""
    monkeypatch.setattr(channel, "PART_SECONDS", 0.2)
    monkeypatch.setattr(channel, "LOOK", 0.1)
    server, (node, party, client) = superlink.serve(), superlink.party()
    sent = server.send([request(node, vector(0))])
    message, _, contents = _taken_apart(answer(party.receive(), vector(1)))
    name, whole = "0" * 64, ObjectTree(object_id="0" * 64)
    for level in range(1, 61):
        whole = ObjectTree(object_id=f"{level:064x}", children=[whole, ObjectTree(object_id=name)])
        name = whole.object_id
    root = ObjectTree(object_id=message.metadata.message_id, children=[whole])
    announce(client, node, message, root, contents)
    listed = superlink.state.object_store.get_object_tree(message.metadata.message_id)
    assert listed.ByteSize() < 2**13
    server._closed.set()
    with pytest.raises((WireError, PartsMissing)):
        server.open(arrived(server, sent)[sent[0]])


def test_an_answer_has_one_list_of_objects(superlink: SuperLink) -> None:
    """Flower registers the objects of any number of lists, and keeps their contents until the run ends."""
    server, (node, party, client) = superlink.serve(), superlink.party()
    sent = server.send([request(node, vector(0))])
    whole = answer(party.receive(), vector(1))
    message, tree, contents = _taken_apart(whole)
    announce(client, node, message, tree, contents)
    known = len(superlink.state.object_store)
    for number in range(3):
        other = ObjectTree(object_id=tree.object_id, children=[ObjectTree(object_id=f"{number:064x}")])
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            announce(client, node, message, other, contents)
        pushed = PushMessagesRequest(node=Node(node_id=node), messages_list=[message], message_object_trees=[other])
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            client.PushMessages(pushed)
    assert len(superlink.state.object_store) == known
    deliver(party, whole)
    found = server.open(arrived(server, sent)[sent[0]])
    assert np.array_equal(from_records(found.content)["message"], vector(1))


@pytest.mark.parametrize("name", ["z" * 64, "", "a" * 63])
def test_a_list_with_a_name_of_no_object_leaves_nothing_behind(superlink: SuperLink, name: str) -> None:
    """Flower registers the objects before it, and then fails, so that such a list would not count as the first."""
    server, (node, party, client) = superlink.serve(), superlink.party()
    server.send([request(node, vector(0))])
    message, tree, contents = _taken_apart(answer(party.receive(), vector(1)))
    known = len(superlink.state.object_store)
    for number in range(3):
        names = [f"{number:032x}{one:032x}" for one in range(100)]
        other = ObjectTree(object_id=tree.object_id, children=[ObjectTree(object_id=one) for one in [*names, name]])
        with pytest.raises(httpx.HTTPStatusError, match="400"):
            announce(client, node, message, other, contents)
    assert len(superlink.state.object_store) == known
    assert not superlink.state._object_push_sessions


def test_answers_that_nobody_asked_for_leave_nothing_behind(superlink: SuperLink) -> None:
    """Flower begins a session for each of them, and would keep it until the run ends."""
    server, (node, party, client) = superlink.serve(), superlink.party()
    sent = server.send([request(node, vector(0))])
    whole = answer(party.receive(), vector(1))
    message, tree, contents = _taken_apart(whole)
    wanted = message.metadata.reply_to_message_id
    for number in range(3):
        message.metadata.reply_to_message_id = f"{number:064x}"
        announce(client, node, message, tree, contents)
    message.metadata.reply_to_message_id = wanted
    for _ in range(3):
        deliver(party, whole)
    found = server.open(arrived(server, sent)[sent[0]])
    assert np.array_equal(from_records(found.content)["message"], vector(1))
    for _ in range(3):  # it was received
        deliver(party, whole)
    assert not superlink.state._object_push_sessions
    assert not superlink.channel._lists
    assert not superlink.channel._incomplete


def test_an_object_that_is_no_message_is_not_announced_as_one(superlink: SuperLink) -> None:
    server, (node, party, client) = superlink.serve(), superlink.party()
    server.send([request(node, vector(0))])
    message, tree, contents = _taken_apart(answer(party.receive(), vector(1)))
    (chunk,) = [name for name, content in contents.items() if content.startswith(b"ArrayChunk")]
    message.metadata.message_id = chunk
    with pytest.raises(httpx.HTTPStatusError, match="400"):
        announce(client, node, message, ObjectTree(object_id=chunk, children=tree.children), contents)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("database", [FLWR_IN_MEMORY_DB_NAME, "superlink.db"])
def test_lists_of_one_sender_do_not_contradict_those_of_another(
    superlink: SuperLink, tmp_path: Path, database: str
) -> None:
    store = ObjectStoreFactory(str(tmp_path / database) if database.endswith(".db") else database).store()
    _, tree, contents = _taken_apart(request(7, vector(0)))
    parts = [ObjectTree(object_id=name, children=[ObjectTree(object_id="a" * 64)]) for name in contents]
    hostile = ObjectTree(object_id="b" * 64, children=[part for part in parts if part.object_id != tree.object_id])
    store.preregister(superlink.run, channel._flat(hostile))
    assert set(store.preregister(superlink.run, channel._flat(tree))) == set(contents)
    store.delete("b" * 64)
    assert {part.object_id for part in store.get_object_tree(tree.object_id).children} | {tree.object_id} == set(
        contents
    )


def test_nobody_adds_parts_to_the_messages_of_others(superlink: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's store keeps what was said first about the parts of an object: here of the next x, of which all know."""
    monkeypatch.setattr(channel, "PART_SECONDS", 0.2)
    monkeypatch.setattr(download, "PART_SECONDS", 0.2)
    server, (node, party, client), (other, honest, _) = superlink.serve(), superlink.party(), superlink.party()
    server.send([request(node, vector(1))])
    message, tree, contents = _taken_apart(answer(party.receive(), vector(2)))
    nowhere = ObjectTree(object_id="a" * 64)
    expected = [_taken_apart(request(other, vector(0)))[2], _taken_apart(flwr.Message(to_records({}), 7, "train"))[2]]
    for name in {name: None for one in expected for name in one}:
        tree.children.append(ObjectTree(object_id=name, children=[nowhere]))
    announce(client, node, message, tree, contents)
    sent = server.send([request(other, vector(0))])
    found = honest.receive()
    assert np.array_equal(from_records(found.content)["x"], vector(0))
    deliver(honest, flwr.Message(to_records({}), reply_to=found))
    assert from_records(server.open(arrived(server, sent)[sent[0]]).content) == {}


@pytest.mark.slow
def test_responses_that_a_party_does_not_read_count_as_its_requests(
    superlink: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The web server keeps them in memory: 24 MB each here, on any number of connections."""
    monkeypatch.setattr(access_control, "REQUESTS_AT_ONCE", 2)
    numbers = 3_000_000
    server, (node, party, client) = superlink.serve(numbers), superlink.party(numbers)
    server.send([request(node, vector(0, numbers))])
    asked = [b"100000000", party._process, b""]
    held = [unread_call(superlink, client, asked) for _ in range(2)]
    for opened in held:
        assert opened.recv(12) == b"HTTP/1.1 200"
    with pytest.raises(httpx.HTTPStatusError, match="429"):
        _call(client, access_control.PARTY + "receive", asked)
    for opened in held:
        opened.close()
    wait_for(lambda: not superlink.port._open[node], "the end of the calls")
    monkeypatch.setattr(access_control, "SENT_SECONDS", 0.2)
    with unread_call(superlink, client, asked) as opened:
        assert opened.recv(12) == b"HTTP/1.1 200"
        wait_for(lambda: not superlink.port._open[node], "the end of a call whose response is not read")
    monkeypatch.setattr(access_control, "SENT_SECONDS", 120.0)
    found = party.receive()
    assert found is not None
    assert np.array_equal(from_records(found.content)["x"], vector(0, numbers))


def test_nobody_acts_as_the_server_without_its_token(superlink: SuperLink) -> None:
    node, _, _ = superlink.party()
    stranger = ServerChannel(superlink.grid("another token"), ALLOWED, 3, threading.Event())
    stranger._grid._runtime_client._retry_invoker = None
    for attempt in (lambda: stranger.send([request(node, vector(0))]), lambda: stranger.receive(["a" * 64])):
        with pytest.raises(httpx.HTTPStatusError, match="401"):
            attempt()
    assert superlink.state.num_message_ins() == 0


def test_a_request_that_flower_no_longer_knows_does_not_hide_the_others(superlink: SuperLink) -> None:
    server, (node, party, _), (other, _, _) = superlink.serve(), superlink.party(), superlink.party()
    kept, gone = server.send([request(node, vector(0)), request(other, vector(0))])
    superlink.state.delete_messages({gone})
    deliver(party, answer(party.receive(), vector(1)))
    senders = {arrival.request: arrival.sender for arrival in server.receive([kept, gone])}
    assert senders == {kept: node, gone: None}  # None: the SuperLink says that there is no answer
