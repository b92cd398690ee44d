"""Limits of the web server's connections: on the size and the time of a request's head, and on unread responses.

Uvicorn reads the head of a request, that is its address and its headers, before access control can refuse the request.
It keeps a head of any length in memory, waits for the rest of it for ever, and queues all requests that arrive while
one is answered. It also waits for ever for somebody who does not read the responses. So anybody who reaches the port
could fill the memory and occupy all connections. Here such connections are closed (`limits`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .limits import HEAD_BYTES, HEAD_LINES, HEAD_SECONDS, QUEUED_REQUESTS, SENT_SECONDS


class LimitedConnection(HttpToolsProtocol):
    """A connection that is closed if the head of its next request is too long or late, or a response is not read."""

    head_seconds, sent_seconds = HEAD_SECONDS, SENT_SECONDS
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None  # runs while so much waits to be sent that Uvicorn sends no more
    _head = 0  # bytes that arrived since the last complete head or part of a body; those of trailers count as well

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in Uvicorn
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._head += len(data)
        super().data_received(data)
        if self._head > HEAD_BYTES:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.sent_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        super().resume_writing()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= HEAD_LINES:
            raise ValueError("too many headers")  # the parser stops, and the connection is closed
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= QUEUED_REQUESTS:
            raise ValueError("too many requests in a queue")
        self._head = 0
        self._expect_nothing()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # the last request whose head has arrived is answered
            self._expect_request()

    def _expect_request(self) -> None:
        self._expect_nothing()
        self._timer = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _expect_nothing(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def limit_connections() -> None:
    """Use limited connections in all web servers that this process starts, and no web sockets, as in Flower."""
    protocols: dict[Any, Any] = HTTP_PROTOCOLS
    protocols["auto"] = f"{__name__}:{LimitedConnection.__name__}"
    WS_PROTOCOLS["auto"] = None
