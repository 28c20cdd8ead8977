"""A priority queue of requests that they can leave from anywhere.

Who waits, and whose deadline comes next, are both asked at every step and must not cost a scan: the
smallest rank is found at once, and an abort in the middle of a long queue is paid for later.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from nanoserve.request import Request

Rank = tuple[float, int]
"""What a queue sorts by: a priority or a deadline, then the order of arrival."""


class RankedQueue:
    """Requests by rank, smallest first.

    Leaving from the middle costs nothing: the heap's entry is passed over later, or swept once such
    entries outnumber the others. So whoever was discarded must not be pushed again.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, Request]] = []  # ranks differ: requests are never compared
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members)

    def push(self, rank: Rank, request: Request) -> None:
        self._members.add(request)
        heapq.heappush(self._heap, (rank, request))

    def first(self) -> tuple[Rank, Request] | None:
        """The smallest, left in its place; None if there is none."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> Request:
        """Remove and return what `first` shows."""
        assert self.first() is not None, "pop from an empty queue"
        request = heapq.heappop(self._heap)[1]
        self._members.remove(request)
        return request

    def discard(self, request: Request) -> None:
        self._members.discard(request)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
