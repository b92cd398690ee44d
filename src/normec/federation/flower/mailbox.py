"""Send requests and receive answers over Flower's Grid.

A separate thread fetches each answer. A party that is killed while it sends, or sends something that Flower cannot
decode, delays or breaks only its own thread, and the result is a fault of that party. A node has at most a few threads:
newer requests end the wait for the answer to an old one, which the party sends again anyway.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..protocol.wire import Fields, Request, WireError, to_fields
from .download import Allowance, Answer, Downloads, PartsMissing
from .records import from_records, to_records

if TYPE_CHECKING:
    from flwr.serverapp import Grid


CROWD = 8  # pending answers from which on each is polled less often
AHEAD = 4  # newer requests to a node after which an old one is given up


@dataclass(frozen=True)
class Incoming:
    """What a node sent: the fields of a message, or its fault; `lost` means that no answer will come."""

    node: int
    round: int  # of the request it answers
    fields: Fields | None
    fault: str = ""
    lost: bool = False


class Mailbox:
    """`post` sends requests, and `next` returns answers in order of arrival. Arrays have at most `largest` numbers."""

    def __init__(self, grid: Grid, poll_seconds: float, largest: int) -> None:
        self._grid, self._poll, self._largest = grid, poll_seconds, largest
        self._incoming: queue.Queue[Incoming] = queue.Queue()
        self._closed = threading.Event()
        self._downloads = Downloads(grid, Allowance.of(largest), self._closed)
        self._newest: dict[int, int] = {}  # how many requests a node was sent
        self._watching, self._counting = 0, threading.Lock()
        self._sending = threading.BoundedSemaphore(CROWD)

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def post(self, requests: Mapping[int, Request], ttl: float) -> None:
        """Send each node its request, and look for answers during `ttl` seconds."""
        for node, request in requests.items():
            number = self._newest[node] = self._newest.get(node, 0) + 1
            threading.Thread(target=self._exchange, args=(node, request, number, ttl), daemon=True).start()

    def next(self, seconds: float) -> Incoming | None:
        """The next answer, or None if none comes in time."""
        try:
            return self._incoming.get(timeout=seconds)
        except queue.Empty:
            return None

    def _exchange(self, node: int, request: Request, number: int, ttl: float) -> None:
        """Send a request and wait for its answer, until newer requests replace it."""
        import httpx
        from flwr.app import Message
        from flwr.supercore.run import RunNotRunningException

        until, round = time.monotonic() + ttl, request.round
        with self._counting:
            self._watching += 1
        try:
            with self._sending:
                message = Message(to_records(to_fields(request)), node, "train", group_id=str(round), ttl=ttl)
                (identifier,) = self._grid.push_messages([message])
            if not identifier:
                self._incoming.put(Incoming(node, round, None, "Flower did not take the request", lost=True))
                return
            # The more answers are pending, the less often each is polled, because the SuperLink has one process.
            while not self._closed.wait(self._poll * max(1.0, self._watching / CROWD)) and time.monotonic() < until:
                with suppress(httpx.HTTPError):  # the SuperLink is overloaded; Flower has already tried again
                    answer = self._downloads.fetch(identifier)
                    if answer is not None:
                        self._incoming.put(self._opened(node, round, answer))
                        return
                if self._newest[node] >= number + AHEAD:
                    return
        except httpx.HTTPError:
            self._incoming.put(Incoming(node, round, None, "Flower did not take the request", lost=True))
        except RunNotRunningException:  # no party's fault; the roster raises an error
            self._incoming.put(Incoming(node, round, None, "the run was stopped", lost=True))
        except PartsMissing as missing:
            self._incoming.put(Incoming(node, round, None, str(missing), lost=True))
        except WireError as error:
            self._incoming.put(Incoming(node, round, None, str(error)))
        except Exception as error:  # Flower's own reader failed on what a node sent
            self._incoming.put(Incoming(node, round, None, f"Flower cannot read it ({type(error).__name__})"))
        finally:
            with self._counting:
                self._watching -= 1

    def _opened(self, node: int, round: int, answer: Answer) -> Incoming:
        message = answer.message
        if answer.node is None:  # from Flower, not from the node: it is gone, or the request expired
            return Incoming(node, round, None, "Flower has no answer", lost=True)
        if answer.node != node:
            return Incoming(node, round, None, "it does not come from the node that was asked")
        if message.has_error():
            return Incoming(node, round, None, f"the party's error {int(message.error.code)}")
        try:
            return Incoming(node, round, from_records(message.content, self._largest))
        except WireError as error:
            return Incoming(node, round, None, str(error))
