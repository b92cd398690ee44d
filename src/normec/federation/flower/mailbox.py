"""Send requests and receive answers over a SuperLink's channel.

A thread waits for the answers to the requests that were sent together. An answer whose parts are still on their way has
a thread of its own: a party that is killed while it sends, or sends something that Flower cannot decode, delays or
breaks only that thread, and the result is a fault of the party. A thread ends with the last answer. Newer requests to a
node end the wait for the answer to an old one, which the party sends again anyway.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import WireError
from ..protocol.wire import Fields, Request, SumRequest, to_fields
from .channel_clients import Arrival, ServerChannel
from .download import PartsMissing
from .limits import MessageLimits
from .records import SharedArrays, from_records, to_records

if TYPE_CHECKING:
    from flwr.serverapp import Grid


AHEAD = 4  # newer requests to a node after which an old one is given up
_PAUSE = 1.0  # seconds after a call that failed


@dataclass(frozen=True)
class Incoming:
    """What a node sent: the fields of a message, or its fault; `lost` means that no answer will come."""

    node: int
    round: int  # of the request it answers; in a secure sum, the number of the exchange
    fields: Fields | None
    fault: str = ""
    lost: bool = False


@dataclass(frozen=True)
class _Pending:
    node: int
    round: int
    number: int  # of the requests to this node


class Mailbox:
    """`post` sends requests, and `next` returns answers in order of arrival.

    Args:
        grid: Flower's Grid.
        parties: The number of parties.
        largest: The most numbers in an array.
        allowed: The limits of an answer (default: one array and a few fields).
    """

    def __init__(self, grid: Grid, parties: int, largest: int, allowed: MessageLimits | None = None) -> None:
        self._largest = largest
        self._incoming: queue.Queue[Incoming] = queue.Queue()
        self._closed = threading.Event()
        self._channel = ServerChannel(grid, allowed or MessageLimits.of(largest), parties, self._closed)
        self._newest: dict[int, int] = {}  # how many requests a node was sent

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()

    def post(self, requests: Mapping[int, Request | SumRequest], ttl: float) -> None:
        """Send each node its request, and look for answers during `ttl` seconds."""
        if not requests:
            return
        for node in requests:
            self._newest[node] = self._newest.get(node, 0) + 1
        threading.Thread(target=self._exchange, args=(dict(requests), dict(self._newest), ttl), daemon=True).start()

    def next(self, seconds: float) -> Incoming | None:
        """The next answer, or None if none comes in time."""
        try:
            return self._incoming.get(timeout=seconds) if seconds > 0 else self._incoming.get_nowait()
        except queue.Empty:
            return None

    def wait(self, seconds: float) -> None:
        """Wait, unless the mailbox is closed; answers are kept."""
        self._closed.wait(seconds)

    def _exchange(self, requests: dict[int, Request | SumRequest], numbers: dict[int, int], ttl: float) -> None:
        """Send requests and wait for their answers, until newer requests replace them."""
        import httpx
        from flwr.supercore.run import RunNotRunningException

        until, pending = time.monotonic() + ttl, dict[str, _Pending]()
        waiting = [_Pending(node, request.round, numbers[node]) for node, request in requests.items()]
        try:
            pending = self._sent(requests, waiting, ttl)
            waiting.clear()
            while pending and not self._closed.is_set() and time.monotonic() < until:
                try:
                    arrivals = self._channel.receive(pending)
                except httpx.HTTPError:  # the SuperLink is overloaded; Flower has already tried again
                    self._closed.wait(_PAUSE)
                    continue
                for arrival in arrivals:
                    if (one := pending.pop(arrival.request, None)) is not None:
                        self._take(one, arrival)
                pending = {name: one for name, one in pending.items() if self._newest[one.node] < one.number + AHEAD}
        except httpx.HTTPError:
            self._lose(waiting, "Flower did not take the request")
        except RunNotRunningException:  # no party's fault; `RunParties.online` raises an error
            self._lose([*waiting, *pending.values()], "the run was stopped")
        except Exception as error:  # no party's fault either
            self._lose([*waiting, *pending.values()], f"the exchange failed ({type(error).__name__})")

    def _sent(
        self, requests: dict[int, Request | SumRequest], waiting: list[_Pending], ttl: float
    ) -> dict[str, _Pending]:
        """Send requests. Returns those that wait for an answer, by name."""
        from flwr.app import Message

        shared = SharedArrays()
        messages = [
            Message(to_records(to_fields(request), shared), node, "train", group_id=str(request.round), ttl=ttl)
            for node, request in requests.items()
        ]
        named = list(zip(self._channel.send(messages), waiting, strict=True))
        self._lose([one for name, one in named if not name], "Flower did not take the request")
        return {name: one for name, one in named if name}

    def _lose(self, waiting: list[_Pending], why: str) -> None:
        for one in waiting:
            self._incoming.put(Incoming(one.node, one.round, None, why, lost=True))

    def _take(self, one: _Pending, arrival: Arrival) -> None:
        """Read an answer, in a thread of its own if its objects did not come with it."""
        if arrival.contents:
            self._open(one, arrival)
        else:
            threading.Thread(target=self._open, args=(one, arrival), daemon=True).start()

    def _open(self, one: _Pending, arrival: Arrival) -> None:
        self._incoming.put(self._opened(one, arrival))

    def _opened(self, one: _Pending, arrival: Arrival) -> Incoming:
        import httpx
        from flwr.supercore.run import RunNotRunningException

        node, round = one.node, one.round
        try:
            message = self._channel.open(arrival)
            if arrival.sender is None:  # from Flower, not from the node: it is gone, or the request expired
                return Incoming(node, round, None, "Flower has no answer", lost=True)
            if arrival.sender != node:
                return Incoming(node, round, None, "it does not come from the node that was asked")
            if message.has_error():
                return Incoming(node, round, None, f"the party's error {int(message.error.code)}")
            return Incoming(node, round, from_records(message.content, self._largest))
        except (PartsMissing, httpx.HTTPError) as missing:
            return Incoming(node, round, None, str(missing), lost=True)
        except RunNotRunningException:
            return Incoming(node, round, None, "the run was stopped", lost=True)
        except WireError as error:
            return Incoming(node, round, None, str(error))
        except Exception as error:  # Flower's own reader failed on what a node sent
            return Incoming(node, round, None, f"Flower cannot read it ({type(error).__name__})")
