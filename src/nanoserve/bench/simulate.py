"""The engine's schedule without the engine: a scheduler, a clock that is computed, and no model.

The scheduler is the same object that the engine drives, so a simulated run has the same steps, the
same rows computed and the same order of ends as the real one; only the seconds are predicted. The
experiments hold every real run to its simulation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from nanoserve.bench.arrivals import Schedule as ArrivalSchedule
from nanoserve.bench.metrics import RequestTimes
from nanoserve.bench.stepcosts import StepWork
from nanoserve.bench.traces import Length
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduling.plan import StepPlan
from nanoserve.scheduling.scheduler import Scheduler

ANY_TOKEN = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Who held which slot: `request` from `first_step` to `last_step`, freed after `freed_step`.

    A slot is held as long as its blocks are. Between the last two steps nothing of the request was
    left to compute: under static batching it waited for its batch.
    """

    request: int
    slot: int
    first_step: int
    last_step: int
    freed_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What a scheduler did with a workload, step by step. Steps count from 0."""

    works: tuple[StepWork, ...]
    spans: tuple[Span, ...]
    first_token_steps: tuple[int, ...]  # per request
    computed_rows: int
    asked_rows: int

    @property
    def num_steps(self) -> int:
        return len(self.works)

    @property
    def computed_over_asked(self) -> float:
        return self.computed_rows / self.asked_rows

    def ends_s(self, costs: Callable[[StepWork], float]) -> list[float]:
        """When each step ends, in predicted seconds from the start."""
        return list(accumulate(costs(work) for work in self.works))


class SlotBook:
    """Gives each request that holds blocks the lowest free slot, and notes when it lets go."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._held: dict[Request, tuple[int, int]] = {}  # slot, first step
        self._last: dict[Request, int] = {}

    def planned(self, plan: StepPlan, step: int) -> None:
        for row in plan.scheduled:
            if row.request not in self._held:
                taken = {slot for slot, _ in self._held.values()}
                slot = next(s for s in range(len(taken) + 1) if s not in taken)
                self._held[row.request] = (slot, step)
            if row.writes:
                self._last[row.request] = step

    def committed(self, scheduler: Scheduler, step: int) -> None:
        holders = set(scheduler.pool.owners())
        for request in [r for r in self._held if r not in holders]:
            slot, first = self._held.pop(request)
            self.spans.append(
                Span(
                    request=int(request.request_id),
                    slot=slot,
                    first_step=first,
                    last_step=self._last[request],
                    freed_step=step,
                )
            )


def simulate(
    scheduler: Scheduler,
    lengths: Sequence[Length],
    *,
    joins_after: Mapping[int, int] | None = None,
) -> Schedule:
    """Run `lengths` through a fresh `scheduler`; request i arrives after `joins_after[i]` steps.

    0 for those that are not named: a burst. Every request runs to its full output. Raises
    ValueError for a request that the scheduler refuses.
    """
    waits = joins_after or {}
    coming = sorted(range(len(lengths)), key=lambda i: waits.get(i, 0))
    book = SlotBook()
    works: list[StepWork] = []
    first_tokens = [-1] * len(lengths)
    while coming or scheduler.has_unfinished:
        step = len(works)
        while coming and (waits.get(coming[0], 0) <= step or not scheduler.has_unfinished):
            number = coming.pop(0)
            scheduler.add(fake_request(number, lengths[number]))
        plan = scheduler.schedule(0.0)
        works.append(StepWork.of(plan))
        book.planned(plan, step)
        for number in commit_fake(scheduler, plan):
            if first_tokens[number] < 0:
                first_tokens[number] = step
        book.committed(scheduler, step)
    return Schedule(
        works=tuple(works),
        spans=tuple(book.spans),
        first_token_steps=tuple(first_tokens),
        computed_rows=scheduler.counters.computed_rows,
        asked_rows=scheduler.counters.asked_rows,
    )


def simulate_arrivals(
    scheduler: Scheduler, schedule: ArrivalSchedule, costs: Callable[[StepWork], float]
) -> list[RequestTimes]:
    """When each request would be served, in predicted seconds since the schedule began.

    The clock jumps from the end of one step to that of the next, or to the next arrival where there
    is nothing to do. Who comes in the middle of a step is seen at its end, as in an engine.
    """
    coming = deque(enumerate(schedule.arrivals))
    first_s: dict[int, float] = {}
    token_s: list[list[float]] = [[] for _ in schedule.arrivals]
    now = 0.0
    while coming or scheduler.has_unfinished:
        while coming and coming[0][1].at_s <= now:
            number, arrival = coming.popleft()
            scheduler.add(fake_request(number, arrival.length, arrival.at_s))
        plan = scheduler.schedule(now)
        if not plan.scheduled:
            wakes = [scheduler.held_until(), coming[0][1].at_s if coming else None]
            now = min(at_s for at_s in wakes if at_s is not None)
            continue
        for row in plan.scheduled:
            first_s.setdefault(int(row.request.request_id), now)
        now += costs(StepWork.of(plan))
        for number in commit_fake(scheduler, plan):
            token_s[number].append(now)
    return [
        RequestTimes(
            arrival_s=arrival.at_s, first_scheduled_s=first_s[number], token_s=tuple(times)
        )
        for number, (arrival, times) in enumerate(zip(schedule.arrivals, token_s, strict=True))
    ]


def fake_request(number: int, length: Length, arrival_s: float = 0.0) -> Request:
    """A request of these lengths; which tokens it holds does not matter without prefix caching."""
    return Request(
        request_id=str(number),
        prompt_token_ids=(ANY_TOKEN,) * length.prompt,
        params=SamplingParams(max_tokens=length.output, ignore_eos=True),
        max_tokens=length.output,
        arrival_s=arrival_s,
    )


def commit_fake(scheduler: Scheduler, plan: StepPlan) -> list[int]:
    """Every row that samples draws a token; who has all of its output is finished. Who drew."""
    tokens: list[int | None] = []
    finished: dict[Request, FinishReason] = {}
    for row in plan.scheduled:
        tokens.append(ANY_TOKEN if row.samples else None)
        if row.samples and len(row.request.output_token_ids) + 1 == row.request.max_tokens:
            finished[row.request] = FinishReason.LENGTH
    scheduler.commit(plan, tokens, finished)
    return [int(row.request.request_id) for row in plan.scheduled if row.samples]
