"""A ticket: one HTTP request's place in the engine, and what the engine adds to it.

The event loop alone uses it. Deltas that came since the reader last looked are taken together, so
that a slow reader costs memory for its text but never a turn of the loop for each token.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from nanoserve.request import RequestDelta, RequestOutput
from nanoserve.server.engine_thread import Failure


class Item(NamedTuple):
    """What a step added to one choice of a prompt; `born_s` is on the engine's clock."""

    prompt_index: int
    delta: RequestDelta
    born_s: float


class RequestFailedError(Exception):
    """The engine lost or refused the request."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class ClientGoneError(Exception):
    """Nobody reads the answer any more."""


class Ticket:
    """One HTTP request's place: what the engine adds to it, until it ends or is given back.

    `wants_deltas` False keeps the last delta of each prompt only, which holds all. `outputs` are
    by prompt, complete once `is_finished`.
    """

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.request_ids: tuple[str, ...] = ()
        self.num_prompt_tokens: tuple[int, ...] = ()
        self.outputs: list[RequestOutput | None] = []
        self.unfinished: set[str] = set()
        self.wants_deltas = True
        self.last_token_s: dict[tuple[int, int], float] = {}  # by prompt and choice
        self.is_out = True
        self._items: list[Item] = []
        self._error: Exception | None = None
        self._nudged = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Has every prompt its output?"""
        return bool(self.request_ids) and not self.unfinished and self._error is None

    @property
    def has_items(self) -> bool:
        """Is there anything to take at once?"""
        return bool(self._items)

    def put(self, index: int, delta: RequestDelta, born_s: float) -> None:
        """Hand over what a step added."""
        if delta.output is not None:
            self.outputs[index] = delta.output
            self.unfinished.discard(delta.request_id)
        if self.wants_deltas or self.is_finished:
            self._items.append(Item(index, delta, born_s))
            self._wake()

    def end(self, error: Exception) -> None:
        """Let `take` raise `error`, once what came before it was taken; the first one counts."""
        if self._error is None:
            self._error = error
            self._wake()

    def nudge(self) -> None:
        """Let `take` return even if there is nothing to take."""
        self._nudged = True
        self._wake()

    async def take(self) -> list[Item]:
        """All that has come, at least one item; none only after a nudge. One reader at a time.

        Raises RequestFailedError and ClientGoneError.
        """
        if not (self._items or self._error or self._nudged):
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._nudged = False
        if self._error is not None and (
            not self._items or isinstance(self._error, ClientGoneError)
        ):
            raise self._error
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
