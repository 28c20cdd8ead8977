"""One record for each HTTP request, and the most recent of those that generated.

A `Visit` travels in the ASGI scope from the outermost layer to the innermost and back; it becomes
the line in the log and, for completions, what `/debug/requests/{id}` tells. Memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

MAX_VISITS = 1024
SCOPE_KEY = "nanoserve.visit"


@dataclass(slots=True, kw_only=True, eq=False)
class Visit:
    """Times are seconds on the server's clock; `outcome` says how a generating request ended."""

    request_id: str
    method: str
    path: str
    received_s: float
    status: int | None = None
    first_byte_s: float | None = None
    ended_s: float | None = None
    reply_id: str | None = None
    engine_ids: tuple[str, ...] = ()
    num_prompt_tokens: int | None = None
    is_stream: bool | None = None
    outcome: str | None = None


class Visits:
    """The most recent generating requests, by either of their ids."""

    def __init__(self, limit: int = MAX_VISITS) -> None:
        self._limit = limit
        self._by_reply: OrderedDict[str, Visit] = OrderedDict()
        self._by_request: dict[str, Visit] = {}

    def add(self, visit: Visit) -> None:
        """`visit.reply_id` is set. Of two with one request id the later one is found by it."""
        assert visit.reply_id is not None
        self._by_reply[visit.reply_id] = visit
        self._by_request[visit.request_id] = visit
        while len(self._by_reply) > self._limit:
            _, oldest = self._by_reply.popitem(last=False)
            if self._by_request.get(oldest.request_id) is oldest:
                del self._by_request[oldest.request_id]

    def find(self, name: str) -> Visit | None:
        """By the answer's id, the request's, or that of one of its prompts in the engine."""
        found = self._by_reply.get(name) or self._by_request.get(name)
        return found or self._by_reply.get(name.rpartition("-")[0])


def visit_of(scope: MutableMapping[str, Any]) -> Visit:
    """The record that the outermost layer put into the scope."""
    visit = scope[SCOPE_KEY]
    assert isinstance(visit, Visit)
    return visit
