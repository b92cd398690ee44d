"""The process of a party: a SuperNode that runs the party's own code, whatever app the server sends.

Flower's own SuperNode fetches the app of every run from the server and runs it, so code chosen by the server would have
access to the party's data, policy and ledger. This SuperNode uses the same protocol and Flower's own connection (TLS,
signed with the party's key), but passes requests to the ClientApp that the party installed. It never fetches the app of
a run. It also keeps its process, so it does not start Python or load data in every round.

What the server sends is measured before it is read (`download`): a request has at most two vectors, x and a row, of the
largest model that the party's policy allows.
"""

from __future__ import annotations

import importlib
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ..protocol.wire import WireError
from .download import Allowance, PartsMissing, limit_responses, pull_message

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.clientapp import ClientApp
    from flwr.supernode.fleet_http_client import FleetHttpClient


VECTORS = 3  # in a request: x, the numbers that the method broadcasts, and the party's row if the party lost it
_RESPONSE = 2**16  # bytes of a SuperLink's response that brings no message
_RETRY_SECONDS = 0.05  # the server announces a message before its parts; poll sooner than Flower does
_SHOWN = 300  # characters of an error that are printed


def run_supernode(
    app: ClientApp,
    superlink: str,
    root_certificates: Path,
    key: Path,
    node_config: Mapping[str, Any],
    largest: int,
    poll_seconds: float = 0.5,
    patience: float = 150.0,
) -> None:
    """Answer the server's requests until SIGINT or SIGTERM, and wait for a server that is not running.

    `largest` is the largest number of parameters of a model. `patience` is the time in seconds after which the party
    gives up if the server does not admit it.
    """
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import fleet_http_connection

    private = _private_key(key)
    trusted = _read(root_certificates, "the authority's certificate")
    allowed = Allowance.of(largest, VECTORS)
    client = limited_client(allowed)
    setattr(fleet_http_connection, "FleetHttpClient", client)  # noqa: B010  (the client of Flower's connection)
    connect = fleet_http_connection.http_request_response
    with (
        _Signals() as signals,
        _admitted(client, superlink, trusted, private, key.with_name(key.name + ".node"), patience),
        connect(superlink, False, trusted, (private, private.public_key())) as connection,
    ):
        print(f"node {connection[0]} waits for requests from {superlink}", flush=True)
        while True:
            try:
                if not _exchange(app, connection, dict(node_config), signals, allowed):
                    time.sleep(poll_seconds)
            except RunNotRunningException:
                time.sleep(poll_seconds)
            except Exception as error:  # a message that the server or the network cut off
                print(f"an exchange failed: {_shown(error)}", flush=True)
                time.sleep(poll_seconds)


def limited_client(allowed: Allowance) -> type[FleetHttpClient]:
    """Return Flower's client of a SuperLink with limits on the responses that it reads."""
    from flwr.supernode.fleet_http_client import FleetHttpClient

    class Limited(FleetHttpClient):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            limit_responses(self, allowed.responses, _RESPONSE)

    return Limited


def receive_request(connection: Any, allowed: Allowance) -> Message | None:
    """Return the next request; None if there is none. Raises `WireError` if it exceeds a limit."""
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

    _, receive, _, _, _, pull_object, _, confirm = connection
    announced = receive()
    if announced is None:
        return None
    tree, run = announced[1], announced[0].metadata.run_id

    def pull(name: str) -> bytes | None:
        try:
            found: bytes = pull_object(run, name)
            return found
        except ObjectUnavailableError:
            return None
        except ObjectPullError:
            raise PartsMissing("a part of the message is missing") from None

    try:
        message = pull_message(tree.object_id, tree, allowed, pull, _sleep, _RETRY_SECONDS)
    finally:
        confirm(run, tree.object_id)
    message.metadata.__dict__["_message_id"] = tree.object_id  # the name of an object is not part of the object
    return message


def _exchange(
    app: ClientApp, connection: Any, node_config: dict[str, Any], signals: _Signals, allowed: Allowance
) -> bool:
    """Answer one request; False if there is none."""
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.common.constant import ErrorCode

    node, _, send, _, _, _, push_object, _ = connection
    message = receive_request(connection, allowed)
    if message is None:
        return False
    run, name = message.metadata.run_id, message.metadata.message_id
    with signals.later():
        try:
            reply = app(message, Context(run, node, node_config, RecordDict(), run_config={}))
        except Exception as error:  # the process continues after any error of the party's code
            print(f"request {name[:12]} failed: {_shown(error)}", flush=True)
            # The server does not learn what went wrong.
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the party failed"), reply_to=message)
    _push(reply, send, push_object)
    return True


@contextmanager
def _admitted(
    client: type[FleetHttpClient], superlink: str, trusted: bytes, private: Any, number: Path, patience: float
) -> Iterator[None]:
    """Make sure that the server will admit the party.

    A party that was killed counts as online for another minute, and Flower admits no party twice. Therefore the node
    number of the party is kept in a file next to its key, and that node is deactivated first.
    """
    import httpx
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    signed = NodeAuthHttpInterceptor(private, private.public_key())
    interceptors: Any = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed]
    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    until = time.monotonic() + patience
    with client.from_server_address(superlink, False, trusted, interceptors=interceptors) as fleet:
        while True:
            try:
                if number.exists():
                    with suppress(httpx.HTTPStatusError, ValueError):
                        fleet.DeactivateNode(DeactivateNodeRequest(node_id=int(number.read_text())))
                found = fleet.ActivateNode(request).node_id
                fleet.DeactivateNode(DeactivateNodeRequest(node_id=found))
                with suppress(OSError):  # a folder of keys may be read-only; the next start then takes a minute
                    number.write_text(f"{found}\n")
                break
            except httpx.TransportError as error:
                print(f"waiting for the server at {superlink}: {error}", flush=True)
            except (httpx.HTTPStatusError, WireError):
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


def _sleep(seconds: float) -> bool:
    """Wait, and never give up."""
    time.sleep(seconds)
    return False


def _shown(error: Exception) -> str:
    """Return an error as one printable line; errors may repeat what a server sent."""
    text = f"{type(error).__name__}: {error}"
    return "".join(letter if letter.isprintable() else " " for letter in text[:_SHOWN])


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
