"""The two ways to batch: who may join a step, and what becomes of a finished request's row.

The scheduler asks, in one place each, and does the rest alike. Invariant: a row that lingers after
its request is finished keeps its blocks until `settle` lets all of its batch go together.
"""

from __future__ import annotations

from nanoserve.request import Request
from nanoserve.scheduling.blocks import BlockPool


def release(pool: BlockPool, request: Request) -> None:
    """Free the blocks of `request`: nothing of its window is computed any longer."""
    pool.free(request)
    request.num_computed_tokens = 0


class ContinuousBatching:
    """A request joins as soon as there is room and leaves when it is finished."""

    forks_prompts = True

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.lingering: dict[Request, int] = {}  # stays empty

    def opens(self, num_running: int, budget: int) -> bool:
        """May anything join in this step, where `budget` token rows are left?"""
        return budget > 0

    def accepts(self, num_blocks: int, num_tokens: int) -> bool:
        """May a request join that will need at most `num_blocks`, `num_tokens` of it in this step?

        Said of the next in order only, and taken at its word.
        """
        return num_tokens > 0

    def retire(self, request: Request, num_context: int) -> None:
        """`request` has finished; its last step computed `num_context` positions of its window."""
        release(self._pool, request)

    def settle(self, num_running: int) -> None:
        """Called after requests have left; `num_running` unfinished ones remain."""


class StaticBatching:
    """A batch joins when nothing runs, and its blocks are freed when the last of it is finished.

    Until then a finished request keeps its row. Every member's worst case is reserved when it
    joins, so that no member is ever preempted; shared blocks count in full, since a window that
    slides gives them up. The batch is made up in one call: choices cannot wait for a sibling's
    prompt, each computes its own.
    """

    forks_prompts = False

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._num_reserved = 0
        self.lingering: dict[Request, int] = {}  # finished, and the positions it last computed

    def opens(self, num_running: int, budget: int) -> bool:
        if num_running:
            return False
        self._num_reserved = 0
        return True

    def accepts(self, num_blocks: int, num_tokens: int) -> bool:
        if self._num_reserved + num_blocks > self._pool.num_blocks:
            return False
        self._num_reserved += num_blocks
        return True

    def retire(self, request: Request, num_context: int) -> None:
        self.lingering[request] = num_context

    def settle(self, num_running: int) -> None:
        if num_running == 0:
            for request in self.lingering:
                release(self._pool, request)
            self.lingering.clear()
