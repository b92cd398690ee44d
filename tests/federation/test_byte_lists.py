"""Lists of byte strings have the bytes of protobuf's BytesList, and nothing else is read as one."""

from __future__ import annotations

import pytest

BytesList = pytest.importorskip("flwr.proto.recorddict_pb2").BytesList

from normec.federation.flower.byte_lists import ByteList, read, written  # noqa: E402

LISTS = [
    [],
    [b""],
    [b"one", b"", b"three"],
    [bytes(size) for size in (127, 128, 2**14 - 1, 2**14, 2**21, 5)],
    [b"x" * 2**14, b"y" * 2**15],
]


@pytest.mark.parametrize("parts", LISTS, ids=len)
def test_a_list_has_the_bytes_that_protobuf_writes(parts: list[bytes]) -> None:
    body = BytesList(vals=parts).SerializeToString()
    assert b"".join(written(parts)) == ByteList(parts).SerializeToString(deterministic=True) == body
    assert [bytes(part) for part in read(body)] == parts
    found = ByteList()
    found.ParseFromString(body)
    assert [bytes(part) for part in found.parts] == parts


def test_a_string_may_be_given_in_pieces() -> None:
    large = b"x" * 2**15
    pieces = written([(b"head", large), b"next"])
    assert b"".join(pieces) == BytesList(vals=[b"head" + large, b"next"]).SerializeToString()
    assert any(piece is large for piece in pieces)  # it is passed on, not copied


@pytest.mark.parametrize(
    "body",
    [
        b"\x0a",  # no length
        b"\x0a\x05four",  # the string is shorter than its length says
        b"\x0a\x80",  # half a length
        b"\x0a" + b"\x80" * 9 + b"\x01",  # a length that no body has
        b"\x08\x01",  # a number
        b"\x12\x01x",  # another field
        b"\x0a\x01x\x0a",
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a list"):
        list(read(body))


def test_the_number_of_strings_is_limited_while_they_are_read() -> None:
    """An empty string has two bytes in a body, and a hundred times as many once it is read."""
    body = b"\x0a\x00" * 5
    assert len(list(read(body, 5))) == 5
    strings = read(body, 4)
    assert [len(next(strings)) for _ in range(4)] == [0] * 4
    with pytest.raises(ValueError, match="at most 4"):
        next(strings)
