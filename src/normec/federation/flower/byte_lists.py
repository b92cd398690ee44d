"""The bodies of the channel's calls: lists of byte strings, in the bytes of Flower's protobuf message BytesList.

Protobuf copies every string when a list is built, again when it becomes bytes, and twice more when it is read. The
strings are objects of a model's size, and a round has many of them, so here a list is written by joining its strings
once, and read by pointing into the body.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

Piece = bytes | memoryview
Part = Piece | tuple[Piece, ...]  # a string, or the pieces of one

_STRING = 1 << 3 | 2  # the tag of a string in the field 1 of a protobuf message
_LARGE = 2**14  # bytes of a piece that is cheaper to pass on by itself than to copy
_LONGEST = 5  # bytes of a length: at most 2^35 - 1


class ByteList:
    """A list of byte strings with the two functions of a protobuf message that Flower's HTTP client calls.

    Args:
        parts: The strings.
        most: The largest number of strings that are read; None for no limit.
    """

    def __init__(self, parts: Sequence[Part] = (), most: int | None = None) -> None:
        self.parts, self._most = list(parts), most

    def SerializeToString(self, **_: bool) -> bytes:  # noqa: N802  (protobuf's name)
        return b"".join(written(self.parts))

    def ParseFromString(self, body: bytes) -> None:  # noqa: N802
        self.parts = list(read(body, self._most))


def written(parts: Sequence[Part]) -> list[Piece]:
    """The bytes of a list in pieces, to be sent one after the other; a large piece of a part is one of them."""
    found, few = list[Piece](), list[Piece]()
    for part in parts:
        pieces = part if isinstance(part, tuple) else (part,)
        few.append(field(1, sum(map(len, pieces))))
        for piece in pieces:
            if len(piece) < _LARGE:
                few.append(piece)
                continue
            found += [b"".join(few), piece]
            few = []
    return [*found, b"".join(few)] if few else found


def read(body: bytes, most: int | None = None) -> Iterator[memoryview]:
    """The strings of a list. Raises `ValueError` if the body is anything else, or has more than `most` strings.

    An empty string has two bytes in the body and takes a hundred times as many here, so whoever reads the body of a
    stranger must limit their number.
    """
    view, at, count = memoryview(body), 0, 0
    while at < len(view):
        if count == most:
            raise ValueError(f"a list has at most {most} parts here")
        count += 1
        size, start = _length(view, at + 1)
        if view[at] != _STRING or start + size > len(view):
            raise ValueError("it is not a list of byte strings")
        at = start + size
        yield view[start:at]


def field(number: int, size: int) -> bytes:
    """The tag and the length that come before a string of `size` bytes in a protobuf message."""
    found = bytearray([number << 3 | 2])
    while size >= 0x80:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)


def _length(view: memoryview, at: int) -> tuple[int, int]:
    """The number at an offset of a protobuf message, and the offset after it."""
    size = 0
    for place, byte in enumerate(view[at : at + _LONGEST]):
        size |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return size, at + place + 1
    raise ValueError("it is not a list of byte strings")
