"""The process of a party: a SuperNode that runs the party's own code, whatever app the server sends.

Flower's own SuperNode fetches the app of every run from the server and runs it, so code chosen by the server would have
access to the party's data, policy and ledger. This SuperNode uses the same protocol and Flower's own connection (TLS,
signed with the party's key), but passes requests to the ClientApp that the party installed. It never fetches the app of
a run. It also keeps its process, so it does not start Python or load data in every round.
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
    """Answer the server's requests until SIGINT or SIGTERM, and wait for a server that is not running.

    `patience` is the time in seconds after which the party gives up if the server does not admit it.
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
            except Exception as error:  # a message that the server or the network cut off
                print(f"an exchange failed: {type(error).__name__}: {error}", flush=True)
                time.sleep(poll_seconds)


def _exchange(app: ClientApp, connection: Any, node_config: dict[str, Any], signals: _Signals) -> bool:
    """Answer one request; False if there is none."""
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
        initial_backoff=0.05,  # the server announces a message before its parts; poll sooner than Flower does
    )
    message.metadata.__dict__["_message_id"] = tree.object_id  # the name of an object is not part of the object
    with signals.later():
        try:
            reply = app(message, Context(run, node, node_config, RecordDict(), run_config={}))
        except Exception as error:  # the process continues after any error of the party's code
            print(f"request {tree.object_id[:12]} failed: {type(error).__name__}: {error}", flush=True)
            # The server does not learn what went wrong.
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the party failed"), reply_to=message)
    _push(reply, send, push_object)
    return True


@contextmanager
def _admitted(superlink: str, trusted: bytes, private: Any, number: Path, patience: float) -> Iterator[None]:
    """Make sure that the server will admit the party.

    A party that was killed counts as online for another minute, and Flower admits no party twice. Therefore the node
    number of the party is kept in a file next to its key, and that node is deactivated first.
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
                with suppress(OSError):  # a folder of keys may be read-only; the next start then takes a minute
                    number.write_text(f"{found}\n")
                break
            except httpx.TransportError as error:
                print(f"waiting for the server at {superlink}: {error}", flush=True)
            except httpx.HTTPStatusError:
                if time.monotonic() > until:
                    raise UsageError(
                        f"the server at {superlink} does not admit this party: its key is not registered there, "
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
        raise UsageError(f"{app} contains no Flower app; create one with: normec federation init {app}") from None
    sys.path.insert(0, str(app.resolve()))
    found: ClientApp = getattr(importlib.import_module(module), name)
    return found


def _push(reply: Any, send: Any, push_object: Any) -> None:
    """Announce the reply, then send those of its parts that the server does not have.

    Flower reports how many seconds the computation took, which may depend on the data, so this reports 0.
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
    """End the process on SIGINT and SIGTERM: at once while it waits, and after the answer while it computes one.

    Flower also raises SIGINT when the server no longer knows the party's key.
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
        raise UsageError(f"{path} is not a private key in OpenSSH format: {error}") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise UsageError(f"{path} must be an elliptic curve key; create one with: ssh-keygen -t ecdsa -b 384 -f {path}")
    return found


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from None
