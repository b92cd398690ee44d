"""Access control for a SuperLink: only its owner may control it.

Flower's SuperLink serves all of its interfaces at one address. Parties use the fleet interface and sign with registered
keys. The other interfaces start runs, register parties and act as the server of a run, and require no authentication:
anybody who reaches the port can start an app, which runs as the SuperLink's owner and sees all that the server sees.

`OwnerOnly` restricts these interfaces. The fleet interface stays open to all; any other request is answered only if it
comes from a process of the same user (or of root) on the same machine. On Linux, /proc/net/tcp names the user at the
other end of a connection. Other systems only check that the connection comes over the loopback interface, which all
users of a machine share.
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
REFUSAL = b"only the SuperLink's owner may control it, from a process of the same user on the same machine\n"
LOOKS = 3  # readings of the kernel's table, which may skip a line while connections open and close
_ESTABLISHED = "01"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Address = tuple[str, int]


class OwnerOnly:
    """ASGI middleware that passes on only the requests that are `admitted`."""

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
    """Whether a request goes to the fleet interface or comes from a process of the owner."""
    if scope["path"].startswith(OPEN) or scope["path"] == HEALTH:
        return True
    # With this header, the web server would believe the sender about where the request comes from.
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
    """The user whose process holds the other end of a connection; None if it is closed or on another machine."""
    wanted = _plain(*client), _plain(*server)
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            local, remote, state, *rest = line.split()[1:]
            # A socket that its process has closed has no owner; the kernel writes 0 for it, the number of root.
            if state == _ESTABLISHED and rest[5] != "0" and (_listed(local), _listed(remote)) == wanted:
                return int(rest[3])
    return None


def _plain(host: str, port: int) -> tuple[bytes, int]:
    """An address as bytes; an IPv4-mapped IPv6 address becomes an IPv4 address."""
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).packed, port


def _listed(text: str) -> tuple[bytes, int]:
    """Parse an address of the kernel's table: words of four bytes in the byte order of the machine."""
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return _plain(str(ipaddress.ip_address(raw)), int(port, 16))


def run_superlink(arguments: list[str]) -> None:
    """Run Flower's SuperLink with the options of `flower-superlink`, behind `OwnerOnly`."""
    if sys.platform == "linux" and not os.access(TABLES[0], os.R_OK):
        raise UsageError(
            f"cannot read {TABLES[0]}, which names the owners of connections; allow this process to read it"
        )
    if "--enable-supernode-auth" not in arguments:
        raise UsageError("--enable-supernode-auth is missing; without it, anybody could act as a party")
    from flwr.common.constant import FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API
    from flwr.superlink import main
    from flwr.superlink.cli.flower_superlink import flower_superlink

    _protect_database(arguments)
    for name in (FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API):
        os.environ.pop(name, None)  # further ports, without access control
    made = main.create_app

    def restricted(*given: Any, **named: Any) -> Any:
        return OwnerOnly(made(*given, **named))

    setattr(main, "create_app", restricted)  # noqa: B010  (the app that Flower's command serves)
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def _protect_database(arguments: list[str]) -> None:
    """Create a new database readable by its owner only; it holds messages, under central trust without noise."""
    values = [value for name, value in itertools.pairwise(arguments) if name == "--database"]
    values += [value.removeprefix("--database=") for value in arguments if value.startswith("--database=")]
    for value in values:
        path = value.removeprefix("sqlite:///")
        if not path.startswith(":") and "://" not in path:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))
