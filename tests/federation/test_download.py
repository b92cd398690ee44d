"""Messages are measured before they are read: bytes, objects, tables, and pieces that an array repeats."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

flwr = pytest.importorskip("flwr.app")
httpx = pytest.importorskip("httpx")

from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from normec.errors import WireError  # noqa: E402
from normec.federation.flower.download import _inflated, limit_responses, pull_message  # noqa: E402
from normec.federation.flower.limits import MessageLimits  # noqa: E402
from normec.federation.flower.records import from_records, to_records  # noqa: E402
from normec.federation.flower.supernode import VECTORS  # noqa: E402

from ..support.waiting import LIMIT  # noqa: E402

NUMBERS = 650
ALLOWED = MessageLimits.of(NUMBERS)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower makes messages only in the name of a task."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


def message(records: Any) -> Any:
    return flwr.Message(records, dst_node_id=7, message_type="train")


def read(sent: Any) -> Any:
    """What the server does with an answer that has arrived, object by object."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(sent).items()}
    return _inflated(sent.object_id, contents, ALLOWED.size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_message_of_the_models_size_is_read(dtype: type) -> None:
    vector = np.linspace(-1, 1, NUMBERS).astype(dtype)
    found = from_records(read(message(to_records({"round": 3, "message": vector}))).content, NUMBERS)
    assert found["round"] == 3
    assert np.array_equal(found["message"], vector)


def test_a_large_models_message_comes_in_pieces_and_is_read() -> None:
    numbers = 3_000_000  # three pieces of Flower's, of which two are alike
    vector = np.zeros(numbers, np.float32)
    sent, allowed = message(to_records({"message": vector})), MessageLimits.of(numbers)
    contents = {name: part.deflate() for name, part in get_all_nested_objects(sent).items()}
    found = pull_message(sent.object_id, allowed, contents.__getitem__, lambda _: True, 0.0)
    assert np.array_equal(from_records(found.content, numbers)["message"], vector)


def test_two_thousand_arrays_are_refused_by_their_names_alone() -> None:
    sent = message(to_records({f"v{i}": np.full(1, i, np.float32) for i in range(2000)}))
    parts, fetched = get_all_nested_objects(sent), list[str]()

    def pull(name: str) -> bytes:
        fetched.append(name)
        return bytes(parts[name].deflate())

    with pytest.raises(WireError, match="objects"):
        pull_message(sent.object_id, MessageLimits(2**20, ALLOWED.objects), pull, lambda _: True, 0.0)
    assert not any(isinstance(parts[name], flwr.Array) for name in fetched)


@pytest.mark.slow
def test_a_table_with_fifty_thousand_numbers_is_refused_before_it_is_read() -> None:
    fields = flwr.ConfigRecord({"f": list(range(50_000))})
    with pytest.raises(WireError, match="table"):
        read(message(flwr.RecordDict({"fields": fields, "arrays": flwr.ArrayRecord({})})))


def test_a_piece_that_is_repeated_is_counted_each_time_before_it_is_unpacked() -> None:
    """Sixty kilobytes that would unpack to twenty-six megabytes."""
    sent = message(to_records({"message": np.zeros(NUMBERS, np.float32)}))
    parts = get_all_nested_objects(sent)
    contents = {name: part.deflate() for name, part in parts.items()}
    (array,) = [name for name, part in parts.items() if isinstance(part, flwr.Array)]
    head, _, body = contents[array].partition(b"\0")
    described = json.loads(body)
    described["arraychunk_ids"] = [0] * 10_000
    body = json.dumps(described).encode()
    contents[array] = b" ".join([*head.split(b" ")[:-1], str(len(body)).encode()]) + b"\0" + body
    assert get_object_id(contents[array])
    with pytest.raises(WireError, match="unpack"):
        _inflated(sent.object_id, contents, ALLOWED.size)


def test_an_array_of_something_else_than_its_own_chunks_is_refused() -> None:
    sent = message(to_records({"message": np.zeros(NUMBERS, np.float32)}))
    parts = get_all_nested_objects(sent)
    contents = {name: part.deflate() for name, part in parts.items()}
    (array,) = [name for name, part in parts.items() if isinstance(part, flwr.Array)]
    (chunk,) = [name for name, content in contents.items() if content.startswith(b"ArrayChunk")]
    (table,) = [name for name, part in parts.items() if isinstance(part, flwr.ConfigRecord)]
    other = {**contents, array: contents[array].replace(chunk.encode(), table.encode(), 1)}
    with pytest.raises(WireError, match="chunks"):
        _inflated(sent.object_id, other, ALLOWED.size)
    unused = {**contents, array: contents[array].replace(b"[0]", b"[]")}
    with pytest.raises(WireError, match="use"):
        _inflated(sent.object_id, unused, ALLOWED.size)


@pytest.fixture
def web() -> Iterator[str]:
    """A server that answers every call with as many bytes as its query names, without saying how many beforehand.

    /packed answers with a megabyte of zeros in a kilobyte, /elsewhere sends the caller to another path.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            called.append(self.path)
            if self.path.startswith("/elsewhere"):
                self.send_response(307)
                self.send_header("location", "/v1/fleet/push-object?1000")
                self.end_headers()
                return
            self.send_response(200)
            if self.path.startswith("/packed"):
                self.send_header("content-encoding", "gzip")
                self.end_headers()
                self.wfile.write(gzip.compress(bytes(2**20)))
                return
            self.end_headers()
            try:
                for _ in range(int(self.path.partition("?")[2]) // 1000):
                    self.wfile.write(bytes(1000))
                    served.append(1000)
            except OSError:
                cut.set()

        def log_message(self, *_: Any) -> None: ...

    served.clear()
    called.clear()
    cut.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


served: list[int] = []
called: list[str] = []
cut = threading.Event()


def measured(most: dict[str, int], others: int | None = None) -> Any:
    """An HTTP client as Flower's clients hold one, which follows wherever it is sent."""
    holder = SimpleNamespace(_client=httpx.Client(follow_redirects=True, trust_env=False))
    limit_responses(holder, most, others)
    return holder._client


def test_an_answer_is_cut_off_at_its_limit_and_the_rest_is_not_fetched(web: str) -> None:
    with measured({"pull-object": 100_000}) as client:
        assert len(client.post(f"{web}/v1/runtime/pull-object?100000").content) == 100_000
        assert len(client.post(f"{web}/v1/runtime/get-nodes?200000").content) == 200_000
        with pytest.raises(WireError, match="larger than 100000 bytes"):
            client.post(f"{web}/v1/runtime/pull-object?1000000000")
        assert cut.wait(LIMIT)  # the connection was closed, and the server noticed
    assert sum(served) < 100_000_000


def test_answers_to_other_calls_have_a_limit_too_where_one_is_given(web: str) -> None:
    with measured({"pull-object": 100_000}, 1000) as client:
        assert len(client.post(f"{web}/v1/fleet/pull-object?100000").content) == 100_000
        with pytest.raises(WireError, match="larger than 1000 bytes"):
            client.post(f"{web}/v1/fleet/send-node-heartbeat?100000")


def test_a_packed_answer_is_not_unpacked(web: str) -> None:
    with measured({"pull-object": 2**21}) as client, pytest.raises(WireError, match="compressed"):
        client.post(f"{web}/packed/pull-object")


def test_nobody_is_sent_elsewhere(web: str) -> None:
    with measured({}, 1000) as client:
        assert client.post(f"{web}/elsewhere").status_code == 307
    assert called == ["/elsewhere"]


def test_a_party_is_sent_three_vectors_and_no_more() -> None:
    numbers = 20_000
    allowed = MessageLimits.of(numbers, VECTORS)
    vectors = {
        name: np.random.default_rng(i).normal(size=numbers) for i, name in enumerate(("x", "row", "public", "more"))
    }
    three, four = (message(to_records(dict(list(vectors.items())[:count]))) for count in (3, 4))
    larger = message(to_records({"x": np.zeros(3 * numbers + 2**14)}))

    def asked(sent: Any) -> Any:
        contents = {name: part.deflate() for name, part in get_all_nested_objects(sent).items()}
        return pull_message(sent.object_id, allowed, contents.get, lambda _: True, 0.0)

    found = from_records(asked(three).content, numbers)
    assert all(np.array_equal(found[name], vectors[name]) for name in ("x", "row", "public"))
    for sent in (four, larger):
        with pytest.raises(WireError):
            asked(sent)
