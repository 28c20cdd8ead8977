"""One connection of `nanoserve serve`: uvicorn's, with a limit on what comes before a body.

uvicorn's fast reader keeps headers of any size, piece by piece, and waits for their end for ever.
Here a request's head has a size and a time, and what is no HTTP is refused as everything else is:
in OpenAI's shape, with an id. A plain uvicorn brings its own connections: only `nanoserve serve`
imports this module.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from nanoserve.server import refusals
from nanoserve.server.errors import ApiError, dump
from nanoserve.server.logs import request_id_of

HEAD_S = 60.0
"""From the connection, or a request's first byte, to the end of its headers."""


class Connection(HttpToolsProtocol):
    """The names of its methods are those that uvicorn and its parser call."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._num_pending_bytes = 0  # of headers or trailers whose end has not come
        self._timer = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_pending_bytes += len(data)
        super().data_received(data)
        too_large = self._num_pending_bytes > refusals.MAX_HEAD_BYTES
        if too_large and not self.transport.is_closing():
            self._refuse(refusals.head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._timer.cancel()
        self._timer = self.loop.call_later(HEAD_S, self.transport.close)

    def on_headers_complete(self) -> None:
        self._num_pending_bytes = 0
        self._timer.cancel()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_pending_bytes = 0
        super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(refusals.no_http())

    def _refuse(self, error: ApiError) -> None:
        """Hang up, as what may follow cannot be read; first answer, unless an answer began."""
        if is_unanswered(self.cycle):
            self.transport.write(whole_response(error))
        self.transport.close()


def is_unanswered(cycle: RequestResponseCycle | None) -> bool:
    """Whether the connection is free for an answer: to nothing yet, or to a request without one."""
    return cycle is None or cycle.response_complete or not cycle.response_started


def whole_response(error: ApiError) -> bytes:
    """An error as it goes over the wire, where no app was asked."""
    body = dump(error.body())
    return (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        f"x-request-id: {request_id_of(None)}\r\nconnection: close\r\n\r\n{body}"
    ).encode("ascii")
