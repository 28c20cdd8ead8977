"""What one step will compute: the scheduler's answer, before any tensor exists.

Blocks named here are already booked. A plan is frozen and is used up by exactly one
`Scheduler.commit`.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """`request` advances by `num_tokens` from `start` (its `num_computed_tokens` now).

    `samples` says whether the step reaches the request's last token, so that a new one is drawn.
    `writes` is False only for a finished row that the static policy keeps computing: it repeats its
    last computed token and its K and V go to the scratch block.
    """

    request: Request
    start: int
    num_tokens: int
    block_table: tuple[int, ...]
    samples: bool
    writes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. `block_copies` (source, destination) happen before anything is appended.

    `preempted` lost their blocks in this call, `expired` ended because their deadline passed; the
    engine reports the latter, neither is in `scheduled`.
    """

    scheduled: tuple[ScheduledRequest, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Request, ...] = ()
    expired: tuple[Request, ...] = ()

    @property
    def num_tokens(self) -> int:
        """T: token rows the step computes."""
        return sum(s.num_tokens for s in self.scheduled)


NO_PLAN = StepPlan(scheduled=())
"""Nothing to compute, and nothing to commit."""
