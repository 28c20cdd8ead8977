"""A run as a trace that Perfetto and chrome://tracing open: steps, slots, and who waited.

A pure function of an engine's log, in the Trace Event Format (JSON object form): one process an
engine; on its first track the steps, below one track a slot, where each request is a bar of prefill
and decode; what waits is an asynchronous bar, since many do at once; running and waiting are
counters. The log is bounded, so a long run's trace holds its most recent part. Times are
microseconds since the first thing that happened.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.engine.engine import Engine
from nanoserve.engine.metrics import EngineLog, RequestAccount

TraceEvent = dict[str, Any]
STEPS_TRACK, FIRST_SLOT_TRACK = 0, 1


@dataclass(slots=True)
class Recorder:
    """Engines whose logs are to be written at the end; they are held by their logs alone."""

    logs: list[tuple[str, EngineLog]] = field(default_factory=list)

    def watch(self, engine: Engine) -> None:
        scheduler = engine.config.scheduler
        name = f"{engine.spec.layout}, {scheduler.batching}, {scheduler.max_num_seqs} slots"
        self.logs.append((name, engine.log))

    def write(self, path: Path) -> int:
        """Write the trace; the number of its events."""
        return write_trace(path, self.logs)


def write_trace(path: Path, logs: Sequence[tuple[str, EngineLog]]) -> int:
    """One process for each named log. Raises ValueError if the file cannot be written."""
    events = trace_events(logs)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--trace cannot be written to {path} ({error.strerror}): choose another file"
        ) from error
    return len(events)


def check_trace_path(path: Path) -> None:
    """Raise ValueError now, before minutes of work, if `write_trace` could not write there."""
    write_trace(path, [])


def trace_events(logs: Sequence[tuple[str, EngineLog]]) -> list[TraceEvent]:
    """All events of all logs, on one clock."""
    starts = [start for _, log in logs if (start := first_moment(log)) is not None]
    origin_s = min(starts, default=0.0)
    return [
        event
        for number, (name, log) in enumerate(logs, start=1)
        for event in engine_events(number, name, log, origin_s)
    ]


def accounts(log: EngineLog) -> list[RequestAccount]:
    """Everyone the log still knows, in order of arrival."""
    return sorted((*log.finished, *log.active.values()), key=lambda account: account.number)


def first_moment(log: EngineLog) -> float | None:
    """When the first request came or the first step began, as far as the log reaches."""
    moments = [account.request.arrival_s for account in accounts(log)]
    moments += [step.started_s for step in log.steps]
    return min(moments, default=None)


def engine_events(pid: int, name: str, log: EngineLog, origin_s: float) -> Iterator[TraceEvent]:
    """One engine's names, steps, requests and counters."""
    writer = Writer(pid, origin_s)
    yield writer.named("process_name", STEPS_TRACK, name)
    yield writer.named("thread_name", STEPS_TRACK, "steps")
    for step in log.steps:
        args = {
            "number": step.number,
            "sequences": step.num_seqs,
            "tokens": step.num_tokens,
            "preempted": step.num_preempted,
            "failed": step.failed,
        }
        yield writer.bar("step", STEPS_TRACK, step.started_s, step.ended_s, args)
    served = [a for a in accounts(log) if a.first_scheduled_s is not None]
    tracks = slot_tracks([held(account) for account in served])
    for track in sorted(set(tracks)):
        yield writer.named("thread_name", track, f"slot {track - FIRST_SLOT_TRACK + 1}")
    for account, track in zip(served, tracks, strict=True):
        yield from request_bars(writer, account, track)
    for account in accounts(log):
        yield from queue_bars(writer, account)
    yield from counters(writer, accounts(log))


def held(account: RequestAccount) -> tuple[float, float]:
    """From when to when a request was served, in seconds; an end that is not known is its last
    token, or the step in which it was first seen."""
    start = account.first_scheduled_s
    assert start is not None
    ends = [account.last_token_s, account.first_token_s, start]
    return start, max(end for end in ends if end is not None)


def slot_tracks(spans: Sequence[tuple[float, float]]) -> list[int]:
    """A track for each span, the lowest on which nobody is."""
    tracks = [0] * len(spans)
    free_from: list[float] = []
    for place in sorted(range(len(spans)), key=lambda index: spans[index]):
        start, end = spans[place]
        free = [slot for slot, until in enumerate(free_from) if until <= start]
        slot = free[0] if free else len(free_from)
        free_from[slot : slot + 1] = [end]
        tracks[place] = FIRST_SLOT_TRACK + slot
    return tracks


def title(account: RequestAccount) -> str:
    request = account.request
    choice = f", choice {request.choice}" if request.choice else ""
    return f"request {request.request_id}{choice}"


def request_bars(writer: Writer, account: RequestAccount, track: int) -> Iterator[TraceEvent]:
    """Prefill up to the first token, decode up to the last."""
    start, end = held(account)
    request = account.request
    args = {
        "request": title(account),
        "prompt_tokens": len(request.prompt_token_ids),
        "output_tokens": len(request.output_token_ids),
        "preemptions": request.num_preemptions,
        "finish_reason": None if account.finish_reason is None else str(account.finish_reason),
    }
    first = end if account.first_token_s is None else account.first_token_s
    yield writer.bar(f"prefill {request.request_id}", track, start, first, args)
    if end > first:
        yield writer.bar(f"decode {request.request_id}", track, first, end, args)


def queue_bars(writer: Writer, account: RequestAccount) -> Iterator[TraceEvent]:
    """From the arrival to the first step, where that is known."""
    start = account.first_scheduled_s
    if start is not None:
        arrival_s = min(account.request.arrival_s, start)
        for phase, at_s in (("b", arrival_s), ("e", start)):
            yield writer.event(
                phase, f"queue: {title(account)}", STEPS_TRACK, at_s, cat="queue", id=account.number
            )


def counters(writer: Writer, known: Sequence[RequestAccount]) -> Iterator[TraceEvent]:
    """How many wait and run, whenever that changes."""
    changes: list[tuple[float, int, int]] = []
    for account in known:
        changes.append((account.request.arrival_s, 1, 0))
        if account.first_scheduled_s is not None:
            start, end = held(account)
            changes += [(start, -1, 1), (end, 0, -1)]
    waiting = running = 0
    for at_s, more_waiting, more_running in sorted(changes):
        waiting, running = waiting + more_waiting, running + more_running
        args = {"waiting": waiting, "running": running}
        yield writer.event("C", "requests", STEPS_TRACK, at_s, args=args)


class Writer:
    """Makes events of one process."""

    def __init__(self, pid: int, origin_s: float) -> None:
        self._pid, self._origin_s = pid, origin_s

    def _us(self, at_s: float) -> float:
        return round(max(0.0, at_s - self._origin_s) * 1e6, 3)

    def event(self, phase: str, name: str, tid: int, at_s: float, **more: Any) -> TraceEvent:
        """Any kind; `at_s` is on the engine's clock."""
        return {
            "ph": phase,
            "name": name,
            "ts": self._us(at_s),
            "pid": self._pid,
            "tid": tid,
            **more,
        }

    def bar(
        self, name: str, tid: int, start_s: float, end_s: float, args: dict[str, Any]
    ) -> TraceEvent:
        """A complete event: it has a length."""
        length = max(0.0, self._us(end_s) - self._us(start_s))
        return self.event("X", name, tid, start_s, dur=round(length, 3), args=args)

    def named(self, what: str, tid: int, name: str) -> TraceEvent:
        """What a process or a track is called."""
        return self.event("M", what, tid, self._origin_s, args={"name": name})
