"""The owner of a TCP connection: the user whose process holds the other end of it, according to Linux.

The kernel answers a question about one connection over netlink (sock_diag(7)), in microseconds whatever the number of
connections. Where netlink is not available, as in some sandboxes, the tables /proc/net/tcp and /proc/net/tcp6 are read
instead, which list the connections of all processes.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
import sys
from pathlib import Path

Address = tuple[str, int]
IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
USER_MAP, OVERFLOW_USER = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
LOOKS = 3  # readings of the tables, which may skip a line while connections open and close
_SECONDS = 5.0  # for the kernel's answer, which comes at once
_ESTABLISHED = 1
_ALL_USERS = 2**32 - 1  # numbers of users
_NOBODY = 65534
# From linux/netlink.h, linux/sock_diag.h and linux/inet_diag.h. The ports and addresses are in the order of the
# network, everything else in that of the machine.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_HEADER = struct.Struct("=IHHII")  # length, kind, flags, number of the question, port of the asking socket
_QUESTION = struct.Struct("=BBBxI")  # family, protocol, extensions, states; the identity of the connection follows
_IDENTITY = struct.Struct("=2s2s16s16sI8s")  # local port, remote port, local and remote address, interface, cookie
_ANSWER = struct.Struct("=BBBB48s5I")  # family, state, timer, retransmissions, identity, three numbers, user, inode
_IPV4, _IPV6 = 4, 16  # bytes of an address
_ANY_COOKIE = b"\xff" * 8


class _NoAnswer(Exception):  # noqa: N818  (netlink is not available here)
    """The kernel does not answer questions about connections."""


def connection_owner(client: Address, server: Address) -> int | None:
    """The user whose process holds the end `client` of a connection to `server`.

    Returns:
        The number of the user; None if the connection is closed, its other end is on another machine, or the user has
        no number here.
    """
    try:
        found = _asked(client, server)
    except (_NoAnswer, OSError):
        found = None
        for _ in range(LOOKS):
            found = _listed_owner(client, server) if found is None else found
    return None if found == _unmapped_user() else found


def still_open(descriptor: int) -> bool:
    """Whether a TCP socket of this process is connected at both ends.

    Ask it about the own end of a connection after `connection_owner`: otherwise a caller could send a request and close
    the connection, and a process of another user could then connect from the same port and pass for the caller.
    """
    with socket.socket(fileno=os.dup(descriptor)) as own:
        return own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def available() -> bool:
    """Whether this process can find out the owners of connections."""
    try:
        _asked(("127.0.0.1", 1), ("127.0.0.1", 1))
        return True
    except (_NoAnswer, OSError):
        return os.access(TABLES[0], os.R_OK)


def plain_address(host: str) -> IPAddress:
    """An address without its scope; an IPv4-mapped IPv6 address becomes an IPv4 address."""
    found = ipaddress.ip_address(host.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found


def _unmapped_user() -> int | None:
    """The number that the kernel gives all users who have none in this user namespace; None if every user has one.

    It is usually 65534, which is also the number of the user "nobody", as whom programs in containers often run.
    """
    try:
        spans = [line.split() for line in USER_MAP.read_text(encoding="ascii").splitlines()]
        if sum(int(count) for _, _, count in spans) >= _ALL_USERS:
            return None
        return int(OVERFLOW_USER.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return _NOBODY


def _asked(client: Address, server: Address) -> int | None:
    """Ask the kernel over netlink. Raises `_NoAnswer` or `OSError` if it cannot be asked."""
    wanted = _plain(client), _plain(server)
    family = socket.AF_INET if len(wanted[0][0]) == _IPV4 else socket.AF_INET6
    question = _QUESTION.pack(family, socket.IPPROTO_TCP, 0, 1 << _ESTABLISHED)
    question += _IDENTITY.pack(
        *(port.to_bytes(2, "big") for _, port in wanted), *(host.ljust(16, b"\0") for host, _ in wanted), 0, _ANY_COOKIE
    )
    with socket.socket(getattr(socket, "AF_NETLINK", -1), socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(_SECONDS)
        asked.send(_HEADER.pack(_HEADER.size + len(question), _SOCK_DIAG_BY_FAMILY, _REQUEST, 1, 0) + question)
        answer = asked.recv(2**13)
    _, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _ERROR:
        (number,) = struct.unpack_from("=i", answer, _HEADER.size)
        if number == -errno.ENOENT:  # there is no such connection
            return None
        raise _NoAnswer
    if kind != _SOCK_DIAG_BY_FAMILY or len(answer) < _HEADER.size + _ANSWER.size:
        raise _NoAnswer
    family, state, _, _, identity, *_, user, inode = _ANSWER.unpack_from(answer, _HEADER.size)
    local, remote, *hosts, _, _ = _IDENTITY.unpack(identity)
    size = _IPV4 if family == socket.AF_INET else _IPV6
    found = [
        _plain((str(ipaddress.ip_address(host[:size])), int.from_bytes(port, "big")))
        for host, port in zip(hosts, (local, remote), strict=True)
    ]
    # Without such a connection, the kernel may name a socket that listens at the client's port. A socket that its
    # process has closed has no inode, and its user is 0, the number of root.
    return int(user) if state == _ESTABLISHED and inode and tuple(found) == wanted else None


def _listed_owner(client: Address, server: Address) -> int | None:
    """Look for the connection in the kernel's tables."""
    wanted = _plain(client), _plain(server)
    for table in TABLES:
        try:
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            local, remote, state, *rest = line.split()[1:]
            # A socket that its process has closed has no inode, and its user is 0, the number of root.
            if int(state, 16) == _ESTABLISHED and rest[5] != "0" and (_listed(local), _listed(remote)) == wanted:
                return int(rest[3])
    return None


def _listed(text: str) -> tuple[bytes, int]:
    """Parse an address of the kernel's table: words of four bytes in the byte order of the machine."""
    host, port = text.split(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    return _plain((str(ipaddress.ip_address(raw)), int(port, 16)))


def _plain(address: Address) -> tuple[bytes, int]:
    return plain_address(address[0]).packed, address[1]
