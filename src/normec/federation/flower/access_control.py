"""A SuperLink that only its owner commands.

Flower's SuperLink answers at one address for all of its interfaces. Parties use the fleet's, and sign with keys that
were registered. The others start runs, register parties and act as a run's server, and ask for no proof of anything:
whoever reaches the port may start an app, which runs as the SuperLink's owner and sees all that the server sees.

`Gate` stands before them. The fleet's interface stays open to all; every other request is answered only if it comes
from a process of the same user (or of root) on the same machine. On Linux the kernel says who holds the other end of a
connection, in /proc/net/tcp. Elsewhere the loopback interface has to do, which all users of a machine share.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...system.files import PRIVATE_FILE

OPEN = "/v1/fleet/"  # signed by registered keys: Flower's --enable-supernode-auth
HEALTH = "/health"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
REFUSAL = b"only the SuperLink's owner commands it, from a process of the same user on the same machine\n"
LOOKS = 3  # at the kernel's table, which may skip a line while connections come and go
_ESTABLISHED = "01"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Address = tuple[str, int]


class OwnerOnly:
    """An ASGI application before another one, which hears only what it may."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and admitted(scope)):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            kind = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": kind})
            await send({"type": "http.response.body", "body": REFUSAL})
        else:  # the SuperLink has no other interfaces
            await send({"type": "websocket.close", "code": 1008})


def admitted(scope: Scope) -> bool:
    """Whether a request may pass: to the fleet's interface, or from a process of the owner's."""
    if scope["path"].startswith(OPEN) or scope["path"] == HEALTH:
        return True
    # By such a header the web server would take the sender's word for where a request comes from.
    if any(name.lower() == b"x-forwarded-for" for name, _ in scope["headers"]):
        return False
    client, server = scope.get("client"), scope.get("server")
    if not client or not server or server[1] is None:
        return False
    if sys.platform != "linux":
        return ipaddress.ip_address(client[0]).is_loopback
    found = None
    for _ in range(LOOKS):
        found = holder(client, server) if found is None else found
    return found in (0, os.getuid())


def holder(client: Address, server: Address) -> int | None:
    """The user whose process holds a connection's other end; None where it is not on this machine, or has let go."""
    wanted = _plain(*client), _plain(*server)
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            local, remote, state, *rest = line.split()[1:]
            # A socket that its process has closed belongs to nobody, for which the kernel writes 0: root's number.
            if state == _ESTABLISHED and rest[5] != "0" and (_listed(local), _listed(remote)) == wanted:
                return int(rest[3])
    return None


def _plain(host: str, port: int) -> tuple[bytes, int]:
    """An address as bytes; one of IPv4 in IPv6's clothes without them."""
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).packed, port


def _listed(text: str) -> tuple[bytes, int]:
    """An address as the kernel lists it: words of four bytes in the machine's own order."""
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return _plain(str(ipaddress.ip_address(raw)), int(port, 16))


def run_superlink(arguments: list[str]) -> None:
    """Run Flower's SuperLink with the options of `flower-superlink`, behind a `Gate`."""
    if sys.platform == "linux" and not os.access(TABLES[0], os.R_OK):
        raise UsageError(f"cannot read {TABLES[0]}, which says whose connections are whose; allow this process to")
    if "--enable-supernode-auth" not in arguments:
        raise UsageError("--enable-supernode-auth is missing: without it any stranger is a party")
    from flwr.common.constant import FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API
    from flwr.superlink import main
    from flwr.superlink.cli.flower_superlink import flower_superlink

    _keep_to_oneself(arguments)
    for name in (FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API):
        os.environ.pop(name, None)  # further ports, without a gate
    made = main.create_app

    def restricted(*given: Any, **named: Any) -> Any:
        return OwnerOnly(made(*given, **named))

    setattr(main, "create_app", restricted)  # noqa: B010  (what Flower's command serves)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def _keep_to_oneself(arguments: list[str]) -> None:
    """Make a new database for its owner alone: it holds messages, under central trust without noise."""
    values = [value for name, value in itertools.pairwise(arguments) if name == "--database"]
    values += [value.removeprefix("--database=") for value in arguments if value.startswith("--database=")]
    for value in values:
        path = value.removeprefix("sqlite:///")
        if not path.startswith(":") and "://" not in path:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))
