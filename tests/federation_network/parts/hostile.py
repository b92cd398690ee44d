"""Registered nodes that answer every request with something else than a message, each in its own way.

`python -m tests.federation_network.parts.hostile SUPERLINK AUTHORITY KEY…`
"""

import pickle
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from normec.federation.flower.channel_clients import PartyChannel
from normec.federation.flower.download import PartsMissing
from normec.federation.flower.limits import MessageLimits
from normec.federation.flower.records import to_records
from normec.federation.flower.run_parties import name_of
from normec.federation.flower.supernode import VECTORS, limited_client, read_private_key
from normec.federation.protocol.wire import Refusal, Reply, chained, to_fields

Fields = dict[str, Any]


def honest(request: Fields, message: np.ndarray | None = None) -> Fields:
    """A reply as a party would write it, of a size that the bound allows."""
    step = request["record.accepted"] + 1
    if message is None:
        message = np.zeros(650, np.float32)
    digest = chained(request["record.digest"], step, message)
    return to_fields(Reply(request["run"], request["node"], request["round"], step, digest, message))


def with_message(request: Fields, message: Any) -> RecordDict:
    return to_records({**honest(request), "message": message})


def raw(request: Fields, **description: Any) -> RecordDict:
    """A reply whose array is described by hand."""
    records = to_records(honest(request))
    given = {"dtype": "float32", "shape": (650,), "stype": "numpy.ndarray", "data": b""} | description
    records["arrays"] = ArrayRecord({"message": Array(**given)})
    return records


def _without(request: Fields, name: str) -> RecordDict:
    return to_records({key: value for key, value in honest(request).items() if key != name})


KINDS: dict[str, Callable[[Fields], Any]] = {
    "nothing": lambda _: RecordDict({}),
    "other names": lambda _: RecordDict({"a": ConfigRecord({"x": 1}), "b": ArrayRecord({})}),
    "other records": lambda _: RecordDict({"fields": MetricRecord({"round": 1}), "arrays": ArrayRecord({})}),
    "a field too few": lambda r: _without(r, "digest"),
    "a field too many": lambda r: to_records({**honest(r), "more": 1}),
    "a word for a number": lambda r: to_records({**honest(r), "round": "1"}),
    "a very long word": lambda r: to_records({**honest(r), "node": "x" * 100_000}),
    "bytes": lambda r: RecordDict({"fields": ConfigRecord({**_scalars(r), "run": b"x"}), "arrays": ArrayRecord({})}),
    "not a number": lambda r: with_message(r, np.full(650, np.nan, np.float32)),
    "infinite": lambda r: with_message(r, np.full(650, np.inf, np.float32)),
    "too short": lambda r: to_records(honest(r, np.zeros(10, np.float32))),
    "too precise": lambda r: to_records(honest(r, np.zeros(650, np.float64))),
    "whole numbers": lambda r: with_message(r, np.zeros(650, np.int32)),
    "a matrix": lambda r: with_message(r, np.zeros((65, 10), np.float32)),
    "a pickle": lambda r: raw(r, data=pickle.dumps(print), stype="pickle"),
    "noise for a header": lambda r: raw(r, data=b"\x93NUMPY\x01\x00" + b"(" * 2700),
    "a trillion numbers": lambda r: raw(r, shape=(10**12,), data=b"\x93NUMPY"),
    "too large": lambda r: to_records(honest(r, np.full(650, 1e6, np.float32))),
    "another step": lambda r: to_records({**honest(r), "step": 7}),
    "an error": lambda _: Error(2, "x" * 1000),
    "an error of Flower's own": lambda _: Error(3, "gone"),
    "a huge loss": lambda r: to_records({**honest(r), "loss": 1.7e308}),
    "a round to come": lambda r: to_records({**honest(r), "round": 2**40}),
    "a large array": lambda r: with_message(r, np.random.default_rng(0).normal(size=8_000_000)),
    "three hundred arrays": lambda r: to_records({**honest(r), **{f"v{i}": np.ones(1) * i for i in range(300)}}),
    "many fields": lambda r: to_records({**honest(r), **{f"f{i}": i for i in range(50_000)}}),
    "handshake after handshake": lambda r: to_records(
        to_fields(Refusal(r["run"], r["node"], r["round"], "state", secrets.token_hex(16)))
    ),
}


def _scalars(request: Fields) -> Fields:
    return {key: value for key, value in honest(request).items() if key != "message"}


def attack(superlink: str, authority: bytes, key: Path, kind: str) -> None:
    private = read_private_key(key)
    keys = private, private.public_key()
    node = name_of(public_key_to_bytes(keys[1]))
    # Nothing of it is ever accepted, so the server's record stays as it is at the start.
    record = {"node": node, "round": 0, "record.accepted": 0, "record.digest": ""}
    allowed = MessageLimits.of(650, VECTORS)
    signed = [NodeAuthHttpInterceptor(*keys)]
    with (
        http_request_response(superlink, False, authority, keys) as connection,
        limited_client(allowed).from_server_address(superlink, False, authority, signed) as client,
    ):
        channel, held = PartyChannel(client, connection[0], allowed), []
        while True:
            try:
                while (request := channel.receive(held.pop() if held else None)) is None:
                    time.sleep(1)
                record["run"] = request.content["fields"]["run"]
                held.append(Message(KINDS[kind](record), reply_to=request))  # it travels with the next call
            except (RunNotRunningException, PartsMissing, httpx.HTTPError):
                time.sleep(1)  # the server may refuse a message while it is being sent


if __name__ == "__main__":
    link, trusted, *keys = sys.argv[1:]
    read = Path(trusted).read_bytes()
    for path, way in zip(keys, KINDS, strict=True):
        threading.Thread(target=attack, args=(link, read, Path(path), way), daemon=True).start()
    threading.Event().wait()
