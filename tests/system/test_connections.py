"""Who holds the other end of a connection: netlink and the kernel's tables say the same, and nothing about others."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from normec.system import connections

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux names the owners of connections")
NOBODY = 65534


@pytest.fixture(params=["netlink", "tables"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the two ways; the other one must not be needed."""
    if request.param == "tables":
        monkeypatch.setattr(connections, "_asked", _not_allowed)
    else:
        try:
            connections._asked(("127.0.0.1", 1), ("127.0.0.1", 1))
        except (connections._NoAnswer, OSError):
            pytest.skip("netlink is not available here")
        monkeypatch.setattr(connections, "TABLES", ())
    return str(request.param)


def _not_allowed(*_: object) -> None:
    raise PermissionError("netlink is not allowed")


@pytest.mark.usefixtures("way")
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
            assert connections.connection_owner(*ends) == os.getuid()
            assert connections.connection_owner((host, 1), ends[1]) is None
            assert connections.connection_owner(ends[1], (host, 1)) is None  # a socket listens at this port
            assert connections.connection_owner(("203.0.113.7", ends[0][1]), ends[1]) is None
            assert connections.connection_owner(ends[0], ("2001:db8::7", ends[1][1])) is None
            client.close()
            assert connections.connection_owner(*ends) is None  # the kernel keeps it for a while, as root's


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("called", ["127.0.0.1", "::ffff:127.0.0.1"])
def test_an_owner_who_calls_by_ipv4_is_known_to_a_server_of_both_kinds(called: str) -> None:
    try:
        listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    except (OSError, ValueError):
        pytest.skip("there is no IPv6 here")
    with listening, socket.create_connection((called, listening.getsockname()[1])) as client:
        served, address = listening.accept()
        with served:
            assert address[0] == "::ffff:127.0.0.1"
            assert client.getsockname()[1] == address[1]
            assert connections.connection_owner(address[:2], served.getsockname()[:2]) == os.getuid()


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_connection_of_another_user_is_not_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        os.seteuid(NOBODY)  # a socket belongs to the user who created it
        try:
            caller = socket.socket()
        finally:
            os.seteuid(0)
        with caller:
            caller.connect(listening.getsockname())
            served, address = listening.accept()
            with served:
                assert connections.connection_owner(address, served.getsockname()) == NOBODY


@pytest.mark.parametrize(("mapped", "known"), [("0 0 4294967295\n", True), ("0 1000 1\n1 100000 65536\n", False)])
def test_users_without_a_number_in_a_container_are_not_taken_for_nobody(
    mapped: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user namespace the kernel gives all of them the number of one user, as whom the program itself may run."""
    (tmp_path / "uid_map").write_text(mapped)
    (tmp_path / "overflowuid").write_text(f"{os.getuid()}\n")
    monkeypatch.setattr(connections, "USER_MAP", tmp_path / "uid_map")
    monkeypatch.setattr(connections, "OVERFLOW_USER", tmp_path / "overflowuid")
    with (
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_connection(listening.getsockname()) as client,
    ):
        found = connections.connection_owner(client.getsockname(), listening.getsockname())
    assert found == (os.getuid() if known else None)


def test_a_line_that_the_kernel_skipped_once_is_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([None, 7])
    monkeypatch.setattr(connections, "_asked", _not_allowed)
    monkeypatch.setattr(connections, "_listed_owner", lambda *_: next(seen))
    assert connections.connection_owner(("127.0.0.1", 1), ("127.0.0.1", 2)) == 7


def test_without_netlink_and_tables_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert connections.available()
    monkeypatch.setattr(connections, "_asked", _not_allowed)
    monkeypatch.setattr(connections, "TABLES", (tmp_path / "absent",))
    assert not connections.available()
    assert connections.connection_owner(("127.0.0.1", 1), ("127.0.0.1", 2)) is None
