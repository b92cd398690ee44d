"""Flower's two programs behind access control: the SuperLink of a server, and the SuperNode of a party.

They take the options of Flower's own commands, less those with which others could act as a party.
"""

from __future__ import annotations

import ipaddress
import itertools
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from typing import Any

from ...errors import UsageError
from ...system.connections import TABLES, available
from ...system.files import PRIVATE_FILE
from .access_control import OwnerAndParties, OwnerOnly, signing_party
from .channel import Channel

INSECURE = "--insecure-for-tests"  # instead of Flower's --insecure
FLOWER_NODES = "--flower-nodes"  # parties may be Flower's own SuperNodes


def run_superlink(arguments: list[str]) -> None:
    """Run Flower's SuperLink with the options of `flower-superlink` and a `Channel`, behind `OwnerAndParties`.

    With the option `--flower-nodes`, parties may be Flower's own SuperNodes (see `Channel`).
    """
    _check_system()
    flower_nodes = FLOWER_NODES in arguments
    arguments = _checked([word for word in arguments if word != FLOWER_NODES])
    from flwr.common.constant import FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API
    from flwr.superlink import main
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from uvicorn import Server

    from .http_connections import limit_connections

    limit_connections()
    _protect_database(arguments)
    for name in (FLWR_INTERNAL_GRPC_CONTROL_API, FLWR_INTERNAL_GRPC_FLEET_API):
        os.environ.pop(name, None)  # further ports, without access control
    made, stop, channels = main.create_app, Server.shutdown, list[Channel]()

    def restricted(*given: Any, **named: Any) -> Any:
        app = made(*given, **named)
        channels.append(Channel(app, flower_nodes))
        return OwnerAndParties(channels[-1], partial(signing_party, app), _listening(arguments))

    async def shutdown(server: Server, sockets: list[socket.socket] | None = None) -> None:
        for channel in channels:
            channel.close()  # the web server waits for the calls that are held
        await stop(server, sockets)

    setattr(main, "create_app", restricted)  # noqa: B010  (the app that Flower's command serves)
    setattr(Server, "shutdown", shutdown)  # noqa: B010
    sys.argv = ["flower-superlink", *arguments]
    flower_superlink()


def _checked(arguments: list[str]) -> list[str]:
    """The options for Flower; refuses those with which others could act as a party."""
    if "--enable-supernode-auth" not in arguments:
        raise UsageError("--enable-supernode-auth is missing; without it, anybody could act as a party")
    if any(_names(word, "--insecure") for word in arguments):
        raise UsageError(
            "--insecure is refused: a party's signature covers only the time of a request, so without TLS anybody on "
            "the way can send other answers in its name; give --ssl-certfile, or --insecure-for-tests on the loopback "
            "interface"
        )
    if INSECURE not in arguments:
        return arguments
    hosts = _listening(arguments)
    if not hosts or not all(ipaddress.ip_address(host).is_loopback for host in hosts):
        raise UsageError(f"{INSECURE} needs an address of the loopback interface, such as --host 127.0.0.1")
    return ["--insecure" if word == INSECURE else word for word in arguments]


def run_flower_supernode(arguments: list[str]) -> None:
    """Run Flower's SuperNode with the options of `flower-supernode`, its port behind `OwnerOnly`."""
    _check_system()
    from flwr.supernode import main
    from flwr.supernode.cli.flower_supernode import flower_supernode

    from .http_connections import limit_connections

    limit_connections()
    made = main.create_app

    def restricted(*given: Any, **named: Any) -> Any:
        return OwnerOnly(made(*given, **named), _listening(arguments))

    setattr(main, "create_app", restricted)  # noqa: B010  (the app that Flower's command serves)
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _check_system() -> None:
    if sys.platform == "linux" and not available():
        raise UsageError(
            f"cannot ask the kernel for the owners of connections, neither by netlink nor in {TABLES[0]}; allow this "
            "process to read that file"
        )


def _protect_database(arguments: list[str]) -> None:
    """Create a new database readable by its owner only; it holds messages, under central trust without noise."""
    path = _value(arguments, "--database").removeprefix("sqlite:///")
    if path and not path.startswith(":") and "://" not in path:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE_FILE))


def _value(arguments: list[str], option: str) -> str:
    """Return the value of an option, which is the last one given; empty if the option is absent."""
    found = ""
    for word, after in itertools.zip_longest(arguments, arguments[1:], fillvalue=""):
        if _names(word, option):
            found = word.partition("=")[2] if "=" in word else after
    return found


def _names(word: str, option: str) -> bool:
    """Whether a word is this option, alone or with its value; Flower's command also takes the beginning of a name."""
    name = word.partition("=")[0]
    return len(name) > len("--") and name.startswith("--") and option.startswith(name)


def _listening(arguments: list[str]) -> set[str]:
    """Return the addresses of the host at which Flower's program listens."""
    host = _value(arguments, "--host")
    with suppress(OSError):  # Flower reports what is wrong with it
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)} if host else set()
    return set()
