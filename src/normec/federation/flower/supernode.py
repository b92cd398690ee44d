"""The process of a party: a SuperNode that runs the party's own code, whatever app the server sends.

Flower's own SuperNode fetches the app of every run from the server and runs it, so code chosen by the server would have
access to the party's data, policy and ledger. This SuperNode uses Flower's own connection (TLS, signed with the party's
key) and the `channel` of the SuperLink, and passes requests to the ClientApp that the party installed. It never fetches
the app of a run. It also keeps its process, so it does not start Python or load data in every round.

What the server sends is measured before it is read (`download`). The limits follow from the largest model that the
party's policy allows (`limits_of`).
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError, WireError
from ...system.code_files import import_from_source
from ..protocol.policy import Policy
from ..protocol.wire import most_octets
from .channel_clients import PartyChannel
from .download import limit_responses
from .limits import PLAIN_BYTES, MessageLimits
from .scaffold import app_table

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.clientapp import ClientApp
    from flwr.supernode.fleet_http_client import FleetHttpClient


VECTORS = 3  # in a request: x, the numbers that the method broadcasts, and the party's row if the party lost it
_PAUSE = 0.5  # seconds after an exchange that failed, or a call without a request that was not held
_SHOWN = 300  # characters of an error that are printed
_LOG = logging.getLogger("normec.party")


class NotAdmitted(UsageError):  # noqa: N818  (a decision of the server)
    """The server does not admit the party."""


class Unreachable(ConnectionError):  # noqa: N818  (a state of the network)
    """The server could not be reached."""


def run_supernode(
    app: ClientApp,
    superlink: str,
    root_certificates: Path,
    key: Path,
    node_config: Mapping[str, Any],
    allowed: MessageLimits,
    patience: float = 150.0,
    reach: float = math.inf,
) -> None:
    """Answer the server's requests until SIGINT or SIGTERM, and wait for a server that is not running.

    Args:
        app: The ClientApp that the party installed.
        superlink: The address of the server, HOST:PORT.
        root_certificates: The certificate of the authority that signed that of the server.
        key: The party's private key.
        node_config: What the app receives as the configuration of its node (`PartyFile.node_config`).
        allowed: The limits of a request (`limits_of`).
        patience: Seconds after which the party gives up if the server does not admit it.
        reach: Seconds after which the party gives up if the server cannot be reached at the start.

    Raises:
        NotAdmitted: The server does not admit the party.
        Unreachable: The server could not be reached.
        UsageError: A key or a certificate cannot be read.
    """
    from flwr.supercore.run import RunNotRunningException
    from flwr.supernode import fleet_http_connection

    private = read_private_key(key)
    trusted = _read(root_certificates, "the authority's certificate")
    client, signals = limited_client(allowed), Signals()
    watched = watched_client(client, signals)
    setattr(fleet_http_connection, "FleetHttpClient", watched)  # noqa: B010  (the client of Flower's connection)
    connect = fleet_http_connection.http_request_response
    with (
        signals,
        _admitted(client, superlink, trusted, private, key.with_name(key.name + ".node"), patience, reach) as fleet,
        connect(superlink, False, trusted, (private, private.public_key())) as connection,
    ):
        node = connection[0]
        channel = PartyChannel(fleet, node, allowed)
        _LOG.info("node %s waits for requests from %s", node, superlink)
        reply: Message | None = None
        while True:
            began, answer, reply = time.monotonic(), reply, None
            try:
                message = channel.receive(answer)
                if message is not None:
                    reply = _answered(app, message, node, dict(node_config), signals)
                elif answer is None and time.monotonic() < began + _PAUSE:
                    time.sleep(_PAUSE)
            except RunNotRunningException:
                time.sleep(_PAUSE)
            except Exception as error:  # a message that the server or the network cut off
                _LOG.warning("an exchange failed: %s", _shown(error))
                time.sleep(_PAUSE)


def limits_of(policy: Policy) -> MessageLimits:
    """The limits of a request to a party with this policy."""
    if "secure-sum" in policy.trusts:
        return MessageLimits.of_bytes(most_octets(policy.largest_model), VECTORS)
    return MessageLimits.of(policy.largest_model, VECTORS)


def limited_client(allowed: MessageLimits) -> type[FleetHttpClient]:
    """Return Flower's client of a SuperLink with limits on the responses that it reads."""
    from flwr.supernode.fleet_http_client import FleetHttpClient

    class Limited(FleetHttpClient):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            limit_responses(self, allowed.responses, PLAIN_BYTES)

    return Limited


def signing_client(client: type[FleetHttpClient], superlink: str, trusted: bytes, private: Any) -> FleetHttpClient:
    """Return a client of a SuperLink that signs its requests with a party's private key.

    `trusted` is the certificate of the authority that signed that of the SuperLink.
    """
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    signed = NodeAuthHttpInterceptor(private, private.public_key())
    interceptors: Any = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), signed]
    return client.from_server_address(superlink, False, trusted, interceptors=interceptors)


def watched_client(client: type[FleetHttpClient], signals: Signals) -> type[FleetHttpClient]:
    """Return a client that ends the process by `signals` once the server no longer knows the party's key.

    Flower itself would send SIGINT, as if the owner wanted the party to stop, and print a traceback of the thread that
    sends heartbeats.
    """
    import httpx

    class Watched(client):  # type: ignore[misc, valid-type]
        def SendNodeHeartbeat(self, request: Any) -> Any:  # noqa: N802  (Flower's name)
            try:
                return super().SendNodeHeartbeat(request)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != httpx.codes.UNAUTHORIZED:
                    raise
                signals.disown()
                raise httpx.TransportError("the server does not know this party") from None  # Flower waits and retries

    return Watched


def _answered(app: ClientApp, message: Message, node: int, node_config: dict[str, Any], signals: Signals) -> Message:
    """The answer to a request."""
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.common.constant import ErrorCode

    run, name = message.metadata.run_id, message.metadata.message_id
    with signals.later():
        try:
            return app(message, Context(run, node, node_config, RecordDict(), run_config={}))
        except Exception as error:  # the process continues after any error of the party's code
            _LOG.error("request %s failed: %s", name[:12], _shown(error))
            # The server does not learn what went wrong.
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, "the party failed"), reply_to=message)


@contextmanager
def _admitted(
    client: type[FleetHttpClient],
    superlink: str,
    trusted: bytes,
    private: Any,
    number: Path,
    patience: float,
    reach: float,
) -> Iterator[FleetHttpClient]:
    """Make sure that the server will admit the party, and return a client that signs with the party's key.

    A party that was killed counts as online for another minute, and Flower admits no party twice. Therefore the node
    number of the party is kept in a file next to its key, and that node is deactivated first.
    """
    import httpx
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    request = ActivateNodeRequest(
        public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL
    )
    began = time.monotonic()
    until = began + patience
    with signing_client(client, superlink, trusted, private) as fleet:
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
                _LOG.warning("waiting for the server at %s: %s", superlink, _shown(error))
                if time.monotonic() > began + reach:
                    raise Unreachable(
                        f"the server at {superlink} could not be reached for {reach:g} s ({_shown(error)}); "
                        "`normec federation doctor` looks for the cause"
                    ) from None
            except (httpx.HTTPStatusError, WireError):
                if time.monotonic() > until:
                    raise NotAdmitted(
                        f"the server at {superlink} does not admit this party: its key is not registered there, "
                        "or another process uses it; register the key, or stop that process"
                    ) from None
            time.sleep(1)
        yield fleet


def load_client(app: Path) -> ClientApp:
    """The ClientApp of a Flower app in a folder, as its pyproject.toml names it."""
    module, name = _client_module(app)
    found: ClientApp = getattr(module, name)
    return found


def load_task(app: Path) -> Any:
    """The learning task of an app: the module `task` that its client imports."""
    module, _ = _client_module(app)
    if not hasattr(module, "task"):
        raise UsageError(f"{module.__name__} in {app} must import its task, as in `from . import task`")
    return module.task


def _client_module(app: Path) -> tuple[Any, str]:
    """The module of an app's ClientApp, and the name of the ClientApp in it."""
    try:
        module, _, name = app_table(app)["components"]["clientapp"].partition(":")
    except (KeyError, TypeError, AttributeError):
        raise UsageError(
            f"{app / 'pyproject.toml'} names no clientapp; add it to [tool.flwr.app.components], as in "
            'clientapp = "learning.client:app"'
        ) from None
    import_from_source(app)
    return importlib.import_module(module), name


class Signals:
    """End the process on SIGINT and SIGTERM: at once while it waits, and after the answer while it computes one.

    Raises:
        NotAdmitted: `disown` was called: the server no longer knows the party's key.
    """

    def __init__(self) -> None:
        self._busy, self._asked, self._disowned = False, False, False

    def disown(self) -> None:
        """End the process because the server no longer knows the party's key; any thread may call this."""
        self._disowned = True
        os.kill(os.getpid(), signal.SIGINT)

    def __enter__(self) -> Signals:
        numbers = (signal.SIGINT, signal.SIGTERM)
        self._before = {number: signal.signal(number, self._note) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._disowned:
            raise NotAdmitted(
                "the server no longer knows this party's key: it was unregistered, or the SuperLink was started "
                "without its database; ask the server's owner (a key that was unregistered cannot be used again)"
            ) from None

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


def _shown(error: Exception) -> str:
    """Return an error as one printable line; errors may repeat what a server sent."""
    text = f"{type(error).__name__}: {error}"
    return "".join(letter if letter.isprintable() else " " for letter in text[:_SHOWN])


def read_private_key(path: Path) -> Any:
    """Read the private key of a party. Raises `UsageError` if it is not an elliptic curve key in OpenSSH format."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    content = _read(path, "the party's key")
    if content.startswith((b"ecdsa-", b"ssh-")):
        raise UsageError(f"{path} is a public key; name the private key, which is usually the file without .pub")
    try:
        found = load_ssh_private_key(content, None)
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
