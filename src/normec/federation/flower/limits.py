"""The limits on what the SuperLink, the parties and the server of a run accept from one another.

Nobody may exhaust the memory, the disk or the connections of another by what they send:

| who is protected | from whom | by which limits |
| --- | --- | --- |
| the SuperLink's memory | anybody who reaches its port | `HEAD_BYTES`, `HEAD_LINES` and `QUEUED_REQUESTS` |
| the SuperLink's connections | anybody who sends slowly, or does not read | `HEAD_SECONDS` and `SENT_SECONDS` |
| the SuperLink's memory | a party | `BODY_BYTES`, `LIST_BYTES` and `CALL_PARTS` of a request, `REQUESTS_AT_ONCE` |
| the SuperLink's connections | a party that sends slowly | `BODY_SECONDS` |
| the SuperLink's memory | a party that does not read responses | `SENT_BYTES` and `SENT_SECONDS` |
| the SuperLink's disk | a party | `LIST_BYTES`: one answer to a request is accepted, with one list of objects |
| the SuperLink's memory | a response with many messages | `RESPONSE_BYTES` |
| a party, the server | a message | `MessageLimits`: its bytes, its objects and the responses that bring it |
| a party | any other response | `PLAIN_BYTES` |
| a party, the server | a message whose parts never arrive | `PART_SECONDS` |

`ANSWER_BYTES` and `REQUESTS_BYTES` decide only how a message travels: further objects of an answer are sent in further
calls, and those of requests one by one, in Flower's way.
"""

from __future__ import annotations

from dataclasses import dataclass

# Requests to the port of a SuperLink or SuperNode, before it is known who sends them (`http_connections`)
HEAD_BYTES = 2**16  # of the address and the headers of a request
HEAD_LINES = 2**7  # headers of a request; those of Flower's clients have about a dozen
HEAD_SECONDS = 30.0  # time in which they must arrive
QUEUED_REQUESTS = 4  # that arrive over a connection while one before them is answered; clients of Flower send none

# Requests of a party to the SuperLink (`access_control`, `channel`)
BODY_BYTES = 8 * 2**20  # of one request; Flower sends arrays in chunks of 5 MiB
BODY_SECONDS = 120.0  # time in which the body of a request must arrive: 8 MiB at half a megabit per second
LIST_BYTES = 2**16  # of the list of an answer's objects: about a thousand of them
CALL_PARTS = 2**10  # parts of a call of the channel
REQUESTS_AT_ONCE = 32  # of one party; Flower's SuperNode sends a few objects in parallel
SENT_BYTES = 2**18  # of a response that are sent before the party has read what came before them
SENT_SECONDS = 120.0  # time in which so many bytes must be read

# Objects that travel together with their messages (`channel`, `channel_clients`)
RESPONSE_BYTES = 2**26  # of the objects in one response of the SuperLink
ANSWER_BYTES = BODY_BYTES - 2 * LIST_BYTES  # of the objects that a party sends in one call
REQUESTS_BYTES = 2**26  # of the objects that the server sends with its requests

# Messages and responses that a party or the server reads (`download`)
PLAIN_BYTES = 2**16  # of an object without numbers, of a message without its numbers, of a response without a message
PART_SECONDS = 120.0  # the time for the next part of a message to arrive at the SuperLink
_CHUNK_BYTES = 2**20  # the least bytes of an array chunk; those of Flower are five times as large
_NAME_BYTES = 2**8  # of an object's name in a list


def table_bytes(objects: int) -> int:
    """Return the most bytes of a table that names `objects` objects."""
    return PLAIN_BYTES + _NAME_BYTES * objects


@dataclass(frozen=True)
class MessageLimits:
    """The limits of one message: `size` bytes in `objects` objects."""

    size: int
    objects: int

    @staticmethod
    def of(numbers: int, vectors: int = 1) -> MessageLimits:
        """The limits for `vectors` float64 vectors of length `numbers` and a few fields."""
        return MessageLimits.of_bytes(8 * numbers * vectors + PLAIN_BYTES, vectors)

    @staticmethod
    def of_bytes(size: int, arrays: int = 1) -> MessageLimits:
        """The limits for `size` bytes in a few arrays and fields."""
        return MessageLimits(size, 4 + 4 * arrays + size // _CHUNK_BYTES)

    @property
    def object_bytes(self) -> int:
        """The most bytes of a message's objects."""
        return self.size + PLAIN_BYTES

    @property
    def responses(self) -> dict[str, int]:
        """The limits in bytes on responses that bring a list of objects, an object, or a message with its objects."""
        listed = table_bytes(self.objects)
        return {
            "pull-messages": listed,
            "pull-object": self.object_bytes,
            "receive": listed + self.object_bytes,
        }
