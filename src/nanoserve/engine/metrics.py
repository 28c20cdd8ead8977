"""The engine's log: what happened to each request, step by step, in bounded memory.

A `RequestAccount` holds one choice's times and advances; a `StepRecord` one step. Both are kept for
the most recent past only. As long as nothing was dropped, the log is a complete recording: `replay`
feeds it to a fresh scheduler, without a model, and must get the same plans.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from nanoserve.engine.audit import AuditTally
from nanoserve.request import FinishReason, Request, RequestStatus
from nanoserve.scheduling.plan import StepPlan
from nanoserve.scheduling.scheduler import Scheduler

MAX_STEPS = 65_536
MAX_FINISHED = 1_024


@dataclass(slots=True, kw_only=True, eq=False)
class RequestAccount:
    """One choice: when it came, when it was served, and each advance (step, start, tokens)."""

    number: int  # in order of arrival, over all choices
    request: Request
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finish_reason: FinishReason | None = None
    audit: AuditTally | None = None  # of requests that --kv-audit watches
    steps: array[int] = field(default_factory=lambda: array("Q"))
    starts: array[int] = field(default_factory=lambda: array("I"))
    sizes: array[int] = field(default_factory=lambda: array("I"))


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """One step. `digest` identifies the plan: which request advanced from where by how much.

    Only its end is written later, once it is known.
    """

    number: int
    started_s: float
    ended_s: float
    num_seqs: int
    num_tokens: int
    num_preempted: int
    digest: int
    failed: bool = False


Advance = tuple[int, int, int]
"""(the account's number, where it stood, tokens)."""

Event = tuple[int, Literal["add", "abort"], int]
"""(number of the step it preceded, what happened, the account's number)."""


class EngineLog:
    """Bounded record of one engine's life."""

    def __init__(self, *, max_steps: int = MAX_STEPS, max_finished: int = MAX_FINISHED) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=max_steps)
        self.finished: deque[RequestAccount] = deque(maxlen=max_finished)
        self.events: deque[Event] = deque(maxlen=4 * max_finished)
        self.active: dict[Request, RequestAccount] = {}
        self.num_steps = 0
        self.num_arrivals = 0
        self.num_finished = 0
        self.num_events = 0
        self.is_torn = False  # a step was interrupted, and cannot be replayed

    @property
    def is_whole(self) -> bool:
        """True while nothing has been dropped or interrupted, which is what a replay needs."""
        return (
            not self.is_torn
            and self.num_steps == len(self.steps)
            and self.num_finished == len(self.finished)
            and self.num_events == len(self.events)
        )

    def arrived(self, request: Request) -> RequestAccount:
        account = RequestAccount(number=self.num_arrivals, request=request)
        self.num_arrivals += 1
        self.active[request] = account
        self._happened("add", account)
        return account

    def aborted(self, request: Request) -> None:
        self._happened("abort", self.active[request])
        self.ended(request, FinishReason.ABORT)

    def ended(self, request: Request, reason: FinishReason) -> None:
        account = self.active.pop(request)
        account.finish_reason = reason
        self.finished.append(account)
        self.num_finished += 1

    def _happened(self, kind: Literal["add", "abort"], account: RequestAccount) -> None:
        self.events.append((self.num_steps, kind, account.number))
        self.num_events += 1

    def planned(self, plan: StepPlan, now: float) -> None:
        """A step begins; a plan in which nothing happens is no step."""
        if not (plan.scheduled or plan.expired or plan.preempted):
            return
        advances: list[Advance] = []
        for item in plan.scheduled:
            if item.writes:
                account = self.active[item.request]
                if account.first_scheduled_s is None:
                    account.first_scheduled_s = now
                account.steps.append(self.num_steps)
                account.starts.append(item.start)
                account.sizes.append(item.num_tokens)
                advances.append((account.number, item.start, item.num_tokens))
        self.steps.append(
            StepRecord(
                number=self.num_steps,
                started_s=now,
                ended_s=now,
                num_seqs=len(plan.scheduled),
                num_tokens=plan.num_tokens,
                num_preempted=len(plan.preempted),
                digest=hash(tuple(advances)),
            )
        )
        self.num_steps += 1

    def executed(self, now: float, *, failed: bool = False) -> None:
        """The step begun last has been computed (or its executor raised)."""
        step = self.steps[-1]
        step.ended_s, step.failed = now, failed

    def interrupted(self) -> None:
        """A step was broken off, its requests are finished: nothing of it will be heard again."""
        self.is_torn = True
        for request in [r for r in self.active if r.status is RequestStatus.FINISHED]:
            self.ended(request, request.finish_reason or FinishReason.ERROR)


def plan_digest(plan: StepPlan, numbers: Mapping[Request, int]) -> int:
    """`StepRecord.digest`, the same for equal plans in any process: only integers are hashed."""
    rows = [item for item in plan.scheduled if item.writes]
    return hash(tuple((numbers[item.request], item.start, item.num_tokens) for item in rows))


def replay(log: EngineLog, scheduler: Scheduler) -> int:
    """Run the recorded arrivals, aborts and tokens through a fresh `scheduler`; steps replayed.

    Raises ValueError if the log has dropped something or holds a step that was interrupted, or
    where a plan differs from the recorded.
    """
    if not log.is_whole:
        lacks = "holds an interrupted step" if log.is_torn else "has dropped its oldest entries"
        raise ValueError(f"the log {lacks} and cannot be replayed")
    accounts = {a.number: a for a in (*log.finished, *log.active.values())}
    twins: dict[int, Request] = {}
    numbers: dict[Request, int] = {}
    events = deque(log.events)

    def catch_up(step_number: int) -> None:
        while events and events[0][0] <= step_number:
            _, kind, number = events.popleft()
            if kind == "add":
                twins[number] = fresh_twin(accounts[number].request)
                numbers[twins[number]] = number
                scheduler.add(twins[number])
            else:
                scheduler.abort(twins[number].request_id, twins[number].choice)

    for step in log.steps:
        catch_up(step.number)
        plan = scheduler.schedule(step.started_s)
        if plan_digest(plan, numbers) != step.digest:
            raise ValueError(f"step {step.number}: the replayed plan differs from the recorded one")
        if step.failed:
            commit_failed(scheduler, plan)
        else:
            commit_recorded(scheduler, plan, (accounts[numbers[i.request]] for i in plan.scheduled))
    catch_up(log.num_steps)
    return len(log.steps)


def fresh_twin(request: Request) -> Request:
    """The request as it was when it arrived."""
    return replace(
        request,
        status=RequestStatus.WAITING,
        finish_reason=None,
        output_token_ids=[],
        num_computed_tokens=0,
        window_start=0,
        num_cached_tokens=0,
        num_preemptions=0,
        num_slides=0,
    )


def commit_failed(scheduler: Scheduler, plan: StepPlan) -> list[Request]:
    """Commit a step that could not be computed; the requests that ended with it."""
    ended = [item.request for item in plan.scheduled if item.writes]
    scheduler.commit(plan, [None] * len(plan.scheduled), dict.fromkeys(ended, FinishReason.ERROR))
    return ended


def commit_recorded(
    scheduler: Scheduler, plan: StepPlan, accounts: Iterable[RequestAccount]
) -> None:
    """Commit `plan` with the tokens and the ends that were recorded."""
    tokens: list[int | None] = []
    finished: dict[Request, FinishReason] = {}
    for item, account in zip(plan.scheduled, accounts, strict=True):
        tokens.append(None)
        if not (item.samples and item.writes):
            continue
        recorded = account.request.output_token_ids
        position = len(item.request.output_token_ids)
        if position < len(recorded):
            tokens[-1] = recorded[position]
        reason = account.finish_reason
        if reason is FinishReason.ERROR:
            ends_here = tokens[-1] is None  # its row was not finite, so it drew nothing
        else:
            ends_here = position + 1 >= len(recorded)
        if ends_here and reason not in (None, FinishReason.ABORT, FinishReason.TIMEOUT):
            finished[item.request] = reason
    scheduler.commit(plan, tokens, finished)
