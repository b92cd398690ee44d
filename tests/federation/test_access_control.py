"""Who may command a SuperLink: its owner on its own machine, and nobody else who reaches its port."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import pytest

from normec.errors import UsageError
from normec.federation.flower import access_control

STARTING = "/v1/control/start-run"
linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's table of connections is Linux's")


def asked(path: str, client: tuple[str, int] = ("127.0.0.1", 40000), *headers: tuple[bytes, bytes]) -> int:
    """The status that a request gets: 200 where it is admitted."""
    said: list[dict[str, Any]] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        said.append(message)

    scope = {"type": "http", "path": path, "headers": list(headers), "client": client, "server": ("127.0.0.1", 9092)}
    asyncio.run(access_control.OwnerOnly(behind)(scope, receive, send))
    return int(said[0]["status"])


@linux
@pytest.mark.parametrize(
    "path", [STARTING, "/v1/control/register-node", "/v1/runtime/acquire-task", "/docs", "/v1/fleet", "/"]
)
def test_strangers_reach_the_fleets_interface_alone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (None, os.getuid() + 1):  # elsewhere, and another user of this machine
        monkeypatch.setattr(access_control, "holder", lambda *_, user=user: user)
        assert asked(path) == 403
        assert asked("/v1/fleet/pull-messages") == 200
        assert asked("/health") == 200


@linux
def test_the_owner_and_root_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for user in (0, os.getuid()):
        monkeypatch.setattr(access_control, "holder", lambda *_, user=user: user)
        assert asked(STARTING) == 200


@linux
def test_a_line_that_the_kernel_skipped_once_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([None, os.getuid()])
    monkeypatch.setattr(access_control, "holder", lambda *_: next(seen))
    assert asked(STARTING) == 200


def test_nobodys_word_for_where_a_request_comes_from_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The web server would put the address in the header in place of the real one."""
    monkeypatch.setattr(access_control, "holder", lambda *_: os.getuid())
    assert asked(STARTING, ("127.0.0.1", 40000), (b"x-forwarded-for", b"127.0.0.1:40000")) == 403
    assert asked("/v1/fleet/pull-messages", ("127.0.0.1", 40000), (b"x-forwarded-for", b"10.0.0.1")) == 200


@linux
@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_the_kernel_says_who_holds_the_other_end(family: socket.AddressFamily, host: str) -> None:
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"there is no {host} here")
    with listening, socket.create_connection(listening.getsockname()[:2]) as client:
        served, _ = listening.accept()
        with served:
            ends = client.getsockname()[:2], served.getsockname()[:2]
            assert access_control.holder(*ends) == os.getuid()
            assert access_control.holder((host, 1), ends[1]) is None
            assert access_control.holder(("203.0.113.7", ends[0][1]), ends[1]) is None
            client.close()
            assert access_control.holder(*ends) is None  # the kernel lists it on, as root's


@linux
def test_an_owner_who_calls_by_ipv4_is_known_to_a_server_of_both_kinds() -> None:
    try:
        listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        pytest.skip("there is no IPv6 here")
    with listening, socket.create_connection(("127.0.0.1", listening.getsockname()[1])) as client:
        served, address = listening.accept()
        with served:
            assert address[0] == "::ffff:127.0.0.1"
            assert client.getsockname()[1] == address[1]
            assert access_control.holder(address[:2], served.getsockname()[:2]) == os.getuid()


def test_a_superlink_that_lets_strangers_in_as_parties_is_not_started() -> None:
    with pytest.raises(UsageError, match="anybody could act as a party"):
        access_control.run_superlink(["--insecure"])
