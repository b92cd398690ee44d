"""A party's process: a SuperNode that runs the party's own code, whatever app the server sends.

Flower's own SuperNode fetches the app of every run from the server and runs it, so that code of the server's choice
would hold the party's data, policy and ledger. This one speaks the same protocol by Flower's own connection (TLS,
signed by the party's key) and hands requests to the ClientApp that the party installed. The app that comes with a run
is not even fetched. It also keeps its process, and so starts no Python and loads no data in every round.
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp


PULLING = 120.0  # seconds for the parts of a request to arrive


def run_supernode(
    app: ClientApp,
    superlink: str,
    root_certificates: Path,
    key: Path,
    node_config: Mapping[str, Any],
    poll_seconds: float = 0.5,
    patience: float = 150.0,
) -> None:
    """Answer the server's requests until SIGINT or SIGTERM; a server that is away is waited for.

    `patience`: how many seconds to go on trying where the server does not let the party in.
    """
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode.fleet_http_connection import http_request_response

    private = _private_key(key)
    trusted = _read(root_certificates, "the authority's certificate")
    with (
        _Signals() as signals,
        _admitted(superlink, trusted, private, key.with_name(key.name + ".node"), patience),
        http_request_response(superlink, False, trusted, (private, private.public_key())) as connection,
    ):
        print(f"node {connection[0]} waits for requests from {superlink}", flush=True)
        while True:
            try:
                if not _exchange(app, connection, dict(node_config), signals):
                    time.sleep(poll_seconds)
            except RunNotRunningException:
                time.sleep(poll_seconds)
            except Exception as error:  # a message that the server, or a network, broke in the middle
                print(f"an exchange failed: {type(error).__name__}: {error}", flush=True)
                time.sleep(poll_seconds)


def _exchange(app: ClientApp, connection: Any, node_config: dict[str, Any], signals: _Signals) -> bool:
    """Answer one request; False where there is none."""
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.common.constant import ErrorCode
    from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree

    node, receive, send, _, _, pull_object, push_object, confirm = connection
    received = receive()
    if received is None:
        return False
    tree, run = received[1], received[0].metadata.run_id
    message = pull_and_inflate_object_from_tree(
        tree,
        partial(pull_object, run),
        partial(confirm, run),
        return_type=Message,
        max_time=PULLING,
        initial_backoff=0.05,  # the server announces a message before its parts: wait less than Flower does
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # an object's name is not part of it
    with signals.later():
        try:
            reply = app(message, Context(run, node, node_config, RecordDict(), run_config={}))
        except Exception as error:  # whatever the party's code does, the process goes on
            print(f"request {tree.object_id[:12]} failed: {type(error).__name__}: {error}", flush=True)
            # What went wrong is the party's business.
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the party failed"), reply_to=message)
    _push(reply, send, push_object)
    return True


@contextmanager
def _admitted(superlink: str, trusted: bytes, private: Any, number: Path, patience: float) -> Iterator[None]:
    """Make sure that the server will let the party in.

    A party that was killed counts as present for another minute, and Flower lets nobody in twice. So the number that
    the party had is kept beside its key, and signed off first.
    """
    import httpx
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    signed = NodeAuthHttpInterceptor(private, private.public_key())
    interceptors: Any = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed]
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    until = time.monotonic() + patience
    with FleetHttpClient.from_server_address(superlink, False, trusted, interceptors=interceptors) as client:
        while True:
            try:
                if number.exists():
                    with suppress(httpx.HTTPStatusError, ValueError):
                        client.DeactivateNode(DeactivateNodeRequest(node_id=int(number.read_text())))
                found = client.ActivateNode(request).node_id
                client.DeactivateNode(DeactivateNodeRequest(node_id=found))
                with suppress(OSError):  # a folder of keys may well be read-only; the next start then takes a minute
                    number.write_text(f"{found}\n")
                break
            except httpx.TransportError as error:
                print(f"waiting for the server at {superlink}: {error}", flush=True)
            except httpx.HTTPStatusError:
                if time.monotonic() > until:
                    raise UsageError(
                        f"the server at {superlink} does not let this party in: its key is not registered there, "
                        "or another process uses it"
                    ) from None
            time.sleep(1)
    yield


def load_client(app: Path) -> ClientApp:
    """The ClientApp of a Flower app in a folder, as its pyproject.toml names it."""
    try:
        table = tomllib.loads((app / "pyproject.toml").read_text(encoding="utf-8"))
        module, _, name = table["tool"]["flwr"]["app"]["components"]["clientapp"].partition(":")
    except (OSError, KeyError, TypeError, AttributeError, tomllib.TOMLDecodeError):
        raise UsageError(f"{app} holds no Flower app; write one with: normec federation init {app}") from None
    sys.path.insert(0, str(app.resolve()))
    found: ClientApp = getattr(importlib.import_module(module), name)
    return found


def _push(reply: Any, send: Any, push_object: Any) -> None:
    """Announce the reply, then send its parts that the server does not have yet.

    Flower would report how many seconds the computation took, which may depend on the data: it is told 0.
    """
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        no_object_id_recompute,
    )

    with no_object_id_recompute():
        reply.metadata.__dict__["_message_id"] = reply.object_id
        missing, session = send(reply, get_object_tree(reply), 0.0)
        for name, part in get_all_nested_objects(reply).items():
            if name in missing:
                push_object(reply.metadata.run_id, session, name, part.deflate())


class _Signals:
    """SIGINT and SIGTERM end the process: at once while it waits, after the answer while it computes one.

    Flower raises SIGINT too, where the server no longer knows the party's key.
    """

    def __init__(self) -> None:
        self._busy, self._asked = False, False

    def __enter__(self) -> _Signals:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def later(self) -> Iterator[None]:
        self._busy = True
        yield
        self._busy = False
        if self._asked:
            raise SystemExit(0)

    def _note(self, *_: object) -> None:
        self._asked = True
        if not self._busy:
            raise SystemExit(0)


def _private_key(path: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        found = load_ssh_private_key(_read(path, "the party's key"), None)
    except ValueError as error:
        raise UsageError(f"{path} is no private key in OpenSSH's format: {error}") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} must be an elliptic curve key; make one with: ssh-keygen -t ecdsa -b 384 -f {path}")
    return found


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from None
