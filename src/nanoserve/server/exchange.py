"""One generating request, from its body to its last byte.

Until the first delta (or `KEEP_ALIVE_S` of waiting) nothing is sent, so that whatever goes wrong
keeps its HTTP status; afterwards an error is an event of the stream. Deltas that wait together go
out in one piece. However it ends (answered, failed, client gone, task cancelled), the ticket is
given back, and with it all that the engine does for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, Self

from fastapi import Response

from nanoserve.server import refusals
from nanoserve.server.bridge import NotServingError, QueueFullError
from nanoserve.server.engine_thread import Job
from nanoserve.server.errors import ApiError, dump
from nanoserve.server.front import (
    SEND_KEY,
    Receive,
    Scope,
    Send,
    read_body,
    send_bytes,
    send_error,
    send_start,
)
from nanoserve.server.logs import describe
from nanoserve.server.protocol import (
    Call,
    Prepared,
    prepare,
    read_chat,
    read_completion,
    read_json,
)
from nanoserve.server.responses import Writer, error_event
from nanoserve.server.service import SHORT_BODY_BYTES, Service
from nanoserve.server.tickets import ClientGoneError, RequestFailedError, Ticket
from nanoserve.server.visits import visit_of

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
STALLED_S = 60.0
"""A client that takes nothing for so long gives its place to the next one."""
PIECE_BYTES = 65_536
"""What is taken at once by a slow client, which is no stalled one."""
SHORT_ANSWER_TOKENS = 512
"""The same, for writing an answer; more of them, with log-probabilities, would hold up streams."""

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
JSON_HEADERS = {"content-type": "application/json"}

Kind = Literal["completion", "chat"]
ID_PREFIXES: dict[Kind, str] = {"completion": "cmpl-", "chat": "chatcmpl-"}


class Exchange(Response):
    """The response of a completion or chat endpoint; it reads the request itself."""

    def __init__(self, service: Service, kind: Kind) -> None:
        super().__init__()
        self._service = service
        self._kind: Kind = kind
        self._reply_id = ID_PREFIXES[kind] + uuid.uuid4().hex
        self._ticket: Ticket | None = None
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        visit.reply_id, visit.outcome = self._reply_id, "refused"
        try:
            await self._run(scope, receive, send)
            visit.outcome = "done"
        except ClientGoneError:
            visit.outcome = "disconnected"
            self._service.metrics.num_disconnects += 1
        except ApiError as error:
            visit.outcome = error.code or "refused"
            await self._send_error(send, error)
        except Exception:
            visit.outcome = "internal_error"
            logger.exception(describe("unforeseen", id=visit.request_id, reply=self._reply_id))
            await self._send_error(send, refusals.unforeseen())
        finally:
            if self._ticket is not None:
                self._service.bridge.leave(self._ticket)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await read_body(scope, receive)
        ticket = self._ticket = self._admit()
        call, prepared = await self._service.off_loop(
            lambda: self._understand(raw), is_short=len(raw) <= SHORT_BODY_BYTES
        )
        writer = Writer(
            call,
            prepared,
            reply_id=self._reply_id,
            created=int(time.time()),
            model=call.model,
            fingerprint=self._service.fingerprint,
            tokenizer=self._service.tokenizer,
        )
        self._submit(ticket, call, prepared)
        self._note(scope, ticket, call)
        async with watching(receive, ticket):
            try:
                if call.stream:
                    await self._stream(ticket, writer, send, scope[SEND_KEY])
                else:
                    await self._answer(ticket, writer, send)
            except RequestFailedError as error:
                visit = visit_of(scope)
                name = f"{visit.request_id} ({self._reply_id})"
                raise refusals.failed(error.failure, name) from error

    def _admit(self) -> Ticket:
        try:
            return self._service.bridge.admit()
        except QueueFullError as error:
            raise refusals.queue_full(error.num_in_flight, error.retry_after_s) from error
        except NotServingError as error:
            raise refusals.not_serving(str(error)) from error

    def _understand(self, raw: bytes) -> tuple[Call, list[Prepared]]:
        read = {"completion": read_completion, "chat": read_chat}[self._kind]
        call = read(read_json(raw), self._service.served)
        return call, prepare(call, self._service.tokenizer, self._service.served)

    def _submit(self, ticket: Ticket, call: Call, prepared: list[Prepared]) -> None:
        ticket.wants_deltas = call.stream
        jobs = [
            Job(
                request_id=f"{self._reply_id}-{index}",
                token_ids=prompt.token_ids,
                prompt=prompt.prompt,
                params=call.params,
                priority=call.priority,
                arrival_s=ticket.arrival_s,
                timeout_s=self._service.config.request_timeout,
            )
            for index, prompt in enumerate(prepared)
        ]
        self._service.bridge.submit(ticket, jobs)

    def _note(self, scope: Scope, ticket: Ticket, call: Call) -> None:
        visit = visit_of(scope)
        visit.engine_ids = ticket.request_ids
        visit.num_prompt_tokens = sum(ticket.num_prompt_tokens)
        visit.is_stream = call.stream
        self._service.visits.add(visit)

    async def _answer(self, ticket: Ticket, writer: Writer, send: Send) -> None:
        """One JSON object, when all is there."""
        while not ticket.is_finished:
            await ticket.take()
        outputs = [output for output in ticket.outputs if output is not None]
        num_tokens = sum(
            len(output.prompt_token_ids) + sum(len(choice.token_ids) for choice in output.outputs)
            for output in outputs
        )
        body = await self._service.off_loop(
            lambda: dump(writer.whole(outputs)).encode(),
            is_short=num_tokens <= SHORT_ANSWER_TOKENS,
        )
        await send_bytes(send, 200, JSON_HEADERS, body)

    async def _stream(self, ticket: Ticket, writer: Writer, send: Send, send_body: Send) -> None:
        """Server-sent events, each as soon as it is there.

        The start passes all layers by `send`, what follows goes by `send_body` to the server.
        """
        try:
            async with asyncio.timeout(None) as limit:
                with Alarm(ticket, limit) as alarm:
                    await self._send_events(ticket, writer, send, Outlet(send_body, alarm))
        except TimeoutError:
            raise ClientGoneError from None

    async def _send_events(
        self, ticket: Ticket, writer: Writer, send: Send, outlet: Outlet
    ) -> None:
        is_last = False
        while not is_last:
            items = await ticket.take()
            events = b"".join([writer.events(index, delta) for index, delta, _ in items])
            is_last = ticket.is_finished and not ticket.has_items
            if is_last:
                events += writer.end()
            elif not items:
                events = KEEP_ALIVE
            if events:
                if not self._has_started:
                    self._has_started = True
                    await send_start(send, 200, STREAM_HEADERS)
                await outlet.write(events, more_body=not is_last)
                self._service.metrics.delivered(items, self._service.engine.clock())

    async def _send_error(self, send: Send, error: ApiError) -> None:
        """With its own status as long as there is none yet, else as the stream's last event."""
        if self._has_started:
            await send({"type": "http.response.body", "body": error_event(error)})
        else:
            await send_error(send, error)


class Alarm:
    """Nudges a ticket's reader whenever it was silent for `KEEP_ALIVE_S`.

    Where what it has sent was not taken for `STALLED_S`, `limit` is up. One timer runs for the
    whole stream: a token costs a look at the clock, not a timer of its own.
    """

    def __init__(self, ticket: Ticket, limit: asyncio.Timeout) -> None:
        self._ticket = ticket
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self.is_sending = False

    def __enter__(self) -> Self:
        self.reset()
        self._set(KEEP_ALIVE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def reset(self) -> None:
        """Something was sent."""
        self._sent_s = self._loop.time()
        self.is_sending = False

    def _set(self, delay_s: float) -> None:
        self._timer = self._loop.call_later(delay_s, self._ring)

    def _ring(self) -> None:
        silent_s = self._loop.time() - self._sent_s
        if self.is_sending and silent_s >= STALLED_S:
            self._limit.reschedule(self._loop.time())
            return
        if silent_s >= KEEP_ALIVE_S:
            self._ticket.nudge()
            silent_s = 0.0
        self._set(KEEP_ALIVE_S - silent_s)


class Outlet:
    """Where a stream's events go, in pieces that each show whether anybody takes them."""

    def __init__(self, send_body: Send, alarm: Alarm) -> None:
        self._send_body = send_body
        self._alarm = alarm

    async def write(self, events: bytes, *, more_body: bool) -> None:
        """Returns when the server has taken all of it."""
        for start in range(0, len(events), PIECE_BYTES):
            stop = start + PIECE_BYTES
            more = more_body or stop < len(events)
            self._alarm.is_sending = True
            await self._send_body(
                {"type": "http.response.body", "body": events[start:stop], "more_body": more}
            )
            self._alarm.reset()


@asynccontextmanager
async def watching(receive: Receive, ticket: Ticket) -> AsyncIterator[None]:
    """Inside, a client that goes away ends the ticket."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.end(ClientGoneError())

    watcher = asyncio.ensure_future(watch())
    try:
        yield
    finally:
        watcher.cancel()
