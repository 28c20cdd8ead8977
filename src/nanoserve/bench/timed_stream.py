"""What a streamed completion said, and when: pure functions of received bytes and their times.

A server may put several events into one write, or one event into several; an event has come when
the last byte of its line has. Tokens are counted by the server's usage, never by events: one event
may bring several tokens, or none.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import accumulate
from typing import Any, NamedTuple

DATA_LINE = re.compile(rb"data: ?(.*?)\r?\n")
HEAD_END = b"\r\n\r\n"
DONE = b"[DONE]"


class Piece(NamedTuple):
    """Bytes as one read gave them, and when."""

    at_s: float
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One answer. `problem` says in our words what was wrong with it, "" for nothing.

    `token_s` has a time for each token that the usage counted. They are `is_exact` if every event
    said how far the usage was, or brought one token each; else only the first and the last are, and
    those between are put evenly.
    """

    status: int = 0
    problem: str = ""
    token_s: tuple[float, ...] = ()
    num_prompt_tokens: int | None = None
    is_exact: bool = False


class Segment(NamedTuple):
    """A stretch of the body, and where in the raw bytes it lies."""

    body_start: int
    raw_start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """The body of a response, whole or as far as it came, and where its parts were."""

    status: int
    content: bytes
    segments: tuple[Segment, ...]
    is_whole: bool

    def raw_end(self, end: int) -> int:
        """Where in the raw bytes the first `end` bytes of the body end."""
        starts = [segment.body_start for segment in self.segments]
        segment = self.segments[bisect_right(starts, end - 1) - 1]
        return segment.raw_start + end - segment.body_start


def read_body(raw: bytes) -> Body | None:
    """None for what is no HTTP/1 response."""
    head, separator, _ = raw.partition(HEAD_END)
    lines = head.split(b"\r\n")
    match = re.match(rb"HTTP/1\.\d (\d{3})", lines[0])
    if not separator or match is None:
        return None
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(b":") for line in lines[1:])
    }
    start = len(head) + len(HEAD_END)
    status = int(match[1])
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        return read_chunked(raw, start, status)
    length = headers.get(b"content-length", b"")
    is_whole = not length.isdigit() or len(raw) - start >= int(length)
    segments = (Segment(0, start),)
    return Body(status=status, content=raw[start:], segments=segments, is_whole=is_whole)


def read_chunked(raw: bytes, start: int, status: int) -> Body:
    """A body in chunks; one that breaks off, or is no such thing, is not whole."""
    parts: list[bytes] = []
    segments: list[Segment] = []
    length, at, is_whole = 0, start, False
    while (end := raw.find(b"\r\n", at)) >= 0:
        digits = raw[at:end].partition(b";")[0].strip()
        if not re.fullmatch(rb"[0-9a-fA-F]+", digits):
            break
        if (size := int(digits, 16)) == 0:
            is_whole = True
            break
        data = raw[end + 2 : end + 2 + size]
        segments.append(Segment(length, end + 2))
        parts.append(data)
        length += len(data)
        at = end + 2 + size + 2
    return Body(status=status, content=b"".join(parts), segments=tuple(segments), is_whole=is_whole)


def read_timed(pieces: Sequence[Piece]) -> TimedAnswer:
    """What the received pieces are, taken together."""
    raw = b"".join(piece.data for piece in pieces)
    body = read_body(raw)
    if body is None:
        return TimedAnswer(problem="no HTTP response" if raw else "no answer")
    if body.status != HTTPStatus.OK:
        return TimedAnswer(status=body.status, problem=f"status {body.status}")
    try:
        return read_events(timed_events(body, pieces))
    except (ValueError, KeyError, TypeError, AttributeError):
        return TimedAnswer(status=body.status, problem="no stream of completion events")


def timed_events(body: Body, pieces: Sequence[Piece]) -> list[tuple[float, bytes]]:
    """(seconds, data) of each event, in order."""
    ends = list(accumulate(len(piece.data) for piece in pieces))
    return [
        (pieces[bisect_left(ends, body.raw_end(match.end()))].at_s, match[1])
        for match in DATA_LINE.finditer(body.content)
    ]


def read_events(events: Sequence[tuple[float, bytes]]) -> TimedAnswer:
    """A streamed completion with one choice. Raises what JSON of another shape raises."""
    is_done = bool(events) and events[-1][1] == DONE
    chunks = [(at_s, json.loads(data)) for at_s, data in events if data != DONE]
    if any("error" in chunk for _, chunk in chunks):
        return TimedAnswer(status=200, problem="an error in the stream")
    if not is_done:
        return TimedAnswer(status=200, problem="the stream broke off")
    usages = [chunk["usage"] for _, chunk in chunks if chunk.get("usage")]
    if not usages:
        return TimedAnswer(status=200, problem="no usage")
    token_s, is_exact = token_times(chunks, usages[-1]["completion_tokens"])
    if not token_s:
        return TimedAnswer(status=200, problem="no token")
    return TimedAnswer(
        status=200,
        token_s=token_s,
        num_prompt_tokens=usages[-1].get("prompt_tokens"),
        is_exact=is_exact,
    )


def token_times(
    chunks: Sequence[tuple[float, dict[str, Any]]], num_tokens: int
) -> tuple[tuple[float, ...], bool]:
    """When each of the tokens came, and whether that is known of all of them."""
    counted = list(times_by_usage(chunks))
    if len(counted) == num_tokens:
        return tuple(counted), True
    told = [at_s for at_s, chunk in chunks if brings_text(chunk)]
    if len(told) == num_tokens:
        return tuple(told), True
    if not told or num_tokens < 1:
        return (), False
    first_s, last_s = told[0], told[-1]
    step_s = (last_s - first_s) / max(1, num_tokens - 1)
    between = [first_s + number * step_s for number in range(num_tokens - 1)]
    return (*between, last_s), False


def times_by_usage(chunks: Sequence[tuple[float, dict[str, Any]]]) -> Iterator[float]:
    """A time for each token, where events with a choice say how many there are so far."""
    known = 0
    for at_s, chunk in chunks:
        usage = chunk.get("usage")
        if usage and chunk.get("choices"):
            yield from [at_s] * (usage["completion_tokens"] - known)
            known = max(known, usage["completion_tokens"])


def brings_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("text") for choice in chunk.get("choices") or ())
