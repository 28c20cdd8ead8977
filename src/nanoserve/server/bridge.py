"""Between the event loop and the engine's thread: who may enter, and whose deltas are whose.

One `Ticket` stands for one HTTP request, whatever number of prompts and choices it has. All of this
runs on the event loop; the engine's thread (`engine_thread`) hears commands and answers by one
report a step, which is handed out here. Invariants: at most `max_in_flight` tickets are out, and a
ticket that was given back leaves nothing behind, in the loop at once and in the engine within one
step.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from nanoserve.engine.engine import Engine
from nanoserve.request import FinishReason, RequestDelta
from nanoserve.server.engine_thread import EngineThread, Failure, FailureKind, Job, Load, Report
from nanoserve.server.metrics import ServerMetrics
from nanoserve.server.tickets import RequestFailedError, Ticket

T = TypeVar("T")

MAX_RETRY_AFTER_S = 120.0
"""Clients that are told to wait for longer give up at once."""
UNKNOWN_RETRY_AFTER_S = 1.0
"""Where nothing has finished yet, so that no rate was measured."""
ENDS_THAT_FAIL = {
    FinishReason.ERROR: FailureKind.BROKEN,
    FinishReason.TIMEOUT: FailureKind.TIMEOUT,
}
ENDS_THAT_FAIL_SAY = {
    FailureKind.BROKEN: "the model's logits for it are not finite",
    FailureKind.TIMEOUT: "its time was up before it was finished",
}
RATE_WINDOW_S = 30.0
RATE_SAMPLES = 256


class QueueFullError(Exception):
    """No more requests are let in; after `retry_after_s` those before it should be through."""

    def __init__(self, num_in_flight: int, retry_after_s: float) -> None:
        super().__init__(f"{num_in_flight} requests are in flight")
        self.num_in_flight = num_in_flight
        self.retry_after_s = retry_after_s


class NotServingError(Exception):
    """The server ends, or its engine is at fault, as the message says."""


class ServiceRate:
    """How many requests finish in a second of work, by the most recent past.

    Only time in which somebody was served counts: after a quiet spell the rate is what the engine
    can do, not how seldom it was asked.
    """

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._finished_s: deque[float] = deque(maxlen=RATE_SAMPLES)  # on the clock of work
        self._worked_s = 0.0
        self._busy_since_s: float | None = None

    def began(self, now_s: float) -> None:
        """Somebody is served; no effect where that was so already."""
        if self._busy_since_s is None:
            self._busy_since_s = now_s

    def finished(self, now_s: float) -> None:
        self._finished_s.append(self._work_s(now_s))

    def rested(self, now_s: float) -> None:
        """Nobody is served any more."""
        self._worked_s = self._work_s(now_s)
        self._busy_since_s = None

    def per_second(self, now_s: float) -> float | None:
        """None where too few finished to tell."""
        work_s = self._work_s(now_s)
        recent = [at for at in self._finished_s if work_s - at <= self._window_s]
        if len(recent) < 2:
            return None
        return len(recent) / max(work_s - recent[0], 1e-3)

    def _work_s(self, now_s: float) -> float:
        """Seconds in which somebody was served, up to now."""
        busy_s = 0.0 if self._busy_since_s is None else now_s - self._busy_since_s
        return self._worked_s + busy_s


class Bridge:
    """Lets HTTP requests in, and hands each what the engine's thread reports.

    `max_in_flight` counts HTTP requests. Made anywhere; everything but the constructor is for the
    event loop that called `start`.
    """

    def __init__(self, engine: Engine, *, max_in_flight: int, metrics: ServerMetrics) -> None:
        self.engine = engine
        self.max_in_flight = max_in_flight
        self.metrics = metrics
        self.is_draining = False
        self.num_in_flight = 0
        self.rate = ServiceRate()
        self.thread = EngineThread(engine, self._tell)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._places: dict[str, tuple[Ticket, int]] = {}
        self._tickets: set[Ticket] = set()
        self._idle = asyncio.Event()

    @property
    def is_ready(self) -> bool:
        return self.thread.is_ready and self.thread.fault is None and not self.is_draining

    @property
    def why_not_ready(self) -> str:
        """For whoever asks about the server's health."""
        if self.is_draining:
            return "the server is shutting down"
        if self.thread.fault is not None:
            return "the engine has failed and takes no more requests"
        return "the engine is warming up"

    @property
    def load(self) -> Load:
        """As of the engine's last turn."""
        return self.metrics.load

    def start(self) -> None:
        """Begin: the engine warms up in its thread."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    async def close(self) -> None:
        """End everything in flight, and the thread after the step it is in."""
        self.drain()
        self.end_all("the server is shutting down")
        await asyncio.to_thread(self.thread.close)

    def admit(self) -> Ticket:
        """A place, to be given back by `leave`. Raises NotServingError and QueueFullError."""
        if self._loop is None:
            raise NotServingError("the server is not running")
        if self.is_draining or self.thread.fault is not None:
            raise NotServingError(self.why_not_ready)
        if self.num_in_flight >= self.max_in_flight:
            self.metrics.num_refused += 1
            raise QueueFullError(self.num_in_flight, self.retry_after_s())
        self.num_in_flight += 1
        ticket = Ticket(self.engine.clock())
        self.rate.began(ticket.arrival_s)
        self._tickets.add(ticket)
        return ticket

    def submit(self, ticket: Ticket, jobs: Sequence[Job]) -> None:
        """Send the prompts of a request to the engine, which takes all or none."""
        assert ticket.is_out, "it was given back"
        ticket.request_ids = tuple(job.request_id for job in jobs)
        ticket.num_prompt_tokens = tuple(len(job.token_ids) for job in jobs)
        ticket.unfinished = set(ticket.request_ids)
        ticket.outputs = [None] * len(jobs)
        self._places |= {job.request_id: (ticket, i) for i, job in enumerate(jobs)}
        self.thread.add(jobs)

    def leave(self, ticket: Ticket) -> None:
        """Give the place back; what the engine still does for it is dropped within one step."""
        if not ticket.is_out:
            return
        ticket.is_out = False
        self.num_in_flight -= 1
        self._tickets.discard(ticket)
        for request_id in ticket.request_ids:
            del self._places[request_id]
        if ticket.unfinished:
            self.metrics.ended(FinishReason.ABORT, len(ticket.unfinished))
            self.thread.abort(tuple(ticket.unfinished))
        elif ticket.is_finished:
            self.rate.finished(self.engine.clock())
        if self.num_in_flight == 0:
            self.rate.rested(self.engine.clock())
            self._idle.set()

    def retry_after_s(self) -> float:
        """When those who are in should be through, at the rate at which requests finish."""
        rate = self.rate.per_second(self.engine.clock())
        wait_s = UNKNOWN_RETRY_AFTER_S if rate is None else self.num_in_flight / rate
        return min(MAX_RETRY_AFTER_S, wait_s)

    async def ask(self, question: Callable[[], T]) -> T:
        """What `question` returns, called in the engine's thread between two steps.

        Raises NotServingError where there is no such thread, not yet or no more.
        """
        if self._loop is None or self.thread.is_closing:
            raise NotServingError("the server is not running")
        loop, answer = self._loop, self._loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)

        def call() -> None:
            value: T | None = None
            raised: Exception | None = None
            try:
                value = question()
            except Exception as error:  # noqa: BLE001 - it is raised where it was asked
                raised = error
            loop.call_soon_threadsafe(settle, value, raised)

        self.thread.post(call)
        result: T = await answer
        return result

    def drain(self) -> None:
        """Let nobody in any more."""
        self.is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until every ticket was given back; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.num_in_flight:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self, message: str) -> None:
        """Fail everything in flight because the server ends."""
        for ticket in self._tickets:
            failure = Failure(
                kind=FailureKind.SHUTDOWN, request_ids=ticket.request_ids, message=message
            )
            ticket.end(RequestFailedError(failure))

    def _tell(self, report: Report) -> None:
        """Called in the engine's thread: one wake-up of the loop a step."""
        assert self._loop is not None, "the thread was started by start"
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hear, report)

    def _hear(self, report: Report) -> None:
        self.metrics.load = report.load
        for failure in report.failures:
            for request_id in failure.request_ids:
                self._lose(request_id, failure)
        for delta in report.deltas:
            place = self._places.get(delta.request_id)
            if place is not None:  # it may have been given back during the step
                ticket, index = place
                self.metrics.observe(ticket, index, delta, report.now_s)
                self._hand_out(ticket, index, delta, report.now_s)

    def _hand_out(self, ticket: Ticket, index: int, delta: RequestDelta, born_s: float) -> None:
        reason = delta.finish_reason
        kind = None if reason is None else ENDS_THAT_FAIL.get(reason)
        if kind is None:
            ticket.put(index, delta, born_s)
            return
        self.metrics.num_broken += kind is FailureKind.BROKEN
        if delta.output is not None:
            ticket.unfinished.discard(delta.request_id)
        ids, message = (delta.request_id,), ENDS_THAT_FAIL_SAY[kind]
        ticket.end(RequestFailedError(Failure(kind=kind, request_ids=ids, message=message)))

    def _lose(self, request_id: str, failure: Failure) -> None:
        """The engine has dropped it."""
        place = self._places.get(request_id)
        if place is not None:
            ticket, _ = place
            if failure.kind is not FailureKind.REFUSED:
                self.metrics.ended(FinishReason.ERROR)
            ticket.unfinished.discard(request_id)
            ticket.end(RequestFailedError(failure))
