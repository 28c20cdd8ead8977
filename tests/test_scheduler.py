"""The scheduler: every rule by itself, then all of them at once against a store that remembers.

`World` plays the engine. Its store keeps, for every slot of every block, the exact tokens whose K
and V would lie there; its model draws the next token from what the store holds at the last
position. So a block that is shared, copied, evicted or reused wrongly is seen at once, and what a
request generates must equal the textbook loop whatever happened to it on the way.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoserve.config import SchedulerConfig
from nanoserve.request import FinishReason, Request, RequestStatus, SamplingParams
from nanoserve.scheduling.plan import ScheduledRequest, StepPlan
from nanoserve.scheduling.scheduler import Scheduler

Batching = Literal["continuous", "static"]
Failure = Literal["row", "commit", "raise"]

FAILURES: tuple[Failure, ...] = ("row", "commit", "raise")
VOCABULARY = 3
END = 0
ENDED_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR)
LAYOUTS: dict[str, int | None] = {
    "contiguous": 12,
    "slots": 1,
    "paged, 2": 2,
    "paged, 4": 4,
    "recompute": None,
}
"""Positions in a block, for a context of `Setup.max_model_len` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A small scheduler: one sequence of full length fits, a second one not always."""

    block_size: int | None = 2
    batching: Batching = "continuous"
    enable_prefix_caching: bool = True
    slide_window: int | None = None
    max_num_seqs: int = 4
    max_model_len: int = 12
    max_num_batched_tokens: int = 12
    num_tokens_stored: int = 20

    @property
    def num_blocks(self) -> int:
        if self.block_size is None:
            return 0
        return self.num_tokens_stored // self.block_size

    def scheduler(self) -> Scheduler:
        config = SchedulerConfig(
            batching=self.batching,
            max_num_seqs=self.max_num_seqs,
            enable_prefix_caching=self.enable_prefix_caching,
            context_overflow="error" if self.slide_window is None else "slide",
            slide_window=self.slide_window,
        )
        return Scheduler(
            config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            track_freed=True,
        )


def next_token(context: tuple[int, ...], choice: int, index: int) -> int:
    """The model: depends on every token of the context, the choice and the step."""
    return zlib.crc32(repr((context, choice, index)).encode()) % VOCABULARY


def textbook(request: Request, setup: Setup) -> list[int]:
    """What `request` must generate, by the obvious loop."""
    tokens, start = list(request.prompt_token_ids), 0
    output: list[int] = []
    while len(output) < request.max_tokens:
        token = next_token(tuple(tokens[start:]), request.choice, len(output))
        if token == END and not request.params.ignore_eos:
            break
        output.append(token)
        tokens.append(token)
        if setup.slide_window is not None and len(tokens) - start >= setup.max_model_len:
            start = len(tokens) - setup.slide_window
    return output


class World:
    """An engine without tensors around a scheduler, checking everything after each operation."""

    def __init__(self, setup: Setup | None = None, **changes: object) -> None:
        self.setup = replace(setup or Setup(), **changes)  # type: ignore[arg-type]
        self.scheduler = self.setup.scheduler()
        self.now = 0.0
        self.store: dict[tuple[int, int], tuple[int, ...]] = {}  # (block, offset): its prefix
        self.ranks: dict[Request, tuple[int, int]] = {}
        self.batch: list[Request] = []  # static: everyone who joined since nothing ran
        self.happened: Counter[str] = Counter()

    # What the engine does.

    def add(
        self,
        prompt: Iterable[int],
        max_tokens: int = 4,
        *,
        n: int = 1,
        priority: int = 0,
        timeout_s: float | None = None,
        ignore_eos: bool = True,
        prompt_logprobs: int | None = None,
    ) -> list[Request]:
        """Queue `n` choices; the last is asserted to be waiting behind all before it."""
        prompt = tuple(prompt)
        params = SamplingParams(ignore_eos=ignore_eos, n=n, prompt_logprobs=prompt_logprobs)
        room = max_tokens
        if self.setup.slide_window is None:
            room = min(max_tokens, self.setup.max_model_len - len(prompt))
        requests = [
            Request(
                request_id=f"request {len(self.ranks)}",
                choice=choice,
                prompt_token_ids=prompt,
                params=params,
                max_tokens=room,
                priority=priority,
                deadline_s=None if timeout_s is None else self.now + timeout_s,
            )
            for choice in range(n)
        ]
        for choice in requests:
            self.scheduler.add(choice)
            self.ranks[choice] = (priority, len(self.ranks))
        self.check()
        return requests

    def abort(self, request: Request, *, all_choices: bool = True) -> None:
        """Abort `request` (and its siblings); their blocks are free at once."""
        family = [r for r in self.unfinished() if r.request_id == request.request_id]
        expected = family if all_choices else [r for r in family if r is request]
        self.happened.update(f"aborted while {r.status.value}" for r in expected)
        ended = self.scheduler.abort(request.request_id, None if all_choices else request.choice)
        assert ended == expected
        for choice in ended:
            assert choice.finish_reason is FinishReason.ABORT
            assert choice not in self.scheduler.pool.owners()
        self.check()

    def step(
        self,
        *,
        abort_before: Request | None = None,
        abort_after: Request | None = None,
        failure: Failure | None = None,
    ) -> StepPlan:
        """Plan, execute, commit; aborting before or after the execution, or failing it."""
        running = {r: r.num_uncomputed_tokens for r in self.running()}
        waiting = self.waiting()
        plan = self.scheduler.schedule(self.now)
        if not any(r.status is RequestStatus.RUNNING for r in running):
            self.batch.clear()  # whoever runs now joined in this call
        self.check()
        self.check_plan(plan, running, waiting)
        self.check_order(plan, running, waiting)
        self.note(plan, running)
        for block in self.scheduler.take_freed():
            self.poison(block)
        if abort_before is not None:
            self.abort(abort_before)
        self.execute(plan)
        if abort_after is not None:
            self.abort(abort_after)
        self.commit(plan, failure if plan.scheduled else None)
        self.check()
        return plan

    def execute(self, plan: StepPlan) -> None:
        """Copies, then appends, then everyone's context is read and must be its own."""
        for source, destination in plan.block_copies:
            assert source != destination
            self.poison(destination)
            for offset in range(self.block_size):
                if (source, offset) in self.store:
                    self.store[destination, offset] = self.store[source, offset]
        for row in plan.scheduled:
            window = self.window(row.request)
            if row.writes and row.block_table:
                for position in range(row.start, row.start + row.num_tokens):
                    self.store[self.slot(row.block_table, position)] = window[: position + 1]
        stops = {row.request: row.start + row.num_tokens for row in plan.scheduled}
        for request in {*self.running(), *self.batch}:
            # A row that an abort drained has no table any more, and no reader.
            table = self.scheduler.pool.table(request)
            if request.finish_reason is FinishReason.ERROR:  # its content is garbage, as said
                continue
            stop = stops.get(request, request.num_computed_tokens)
            window = self.window(request)
            for position in range(stop if table else 0):
                held = self.store.get(self.slot(table, position))
                assert held == window[: position + 1], f"{request} reads {held} at {position}"

    def commit(self, plan: StepPlan, failure: Failure | None) -> None:
        if failure is not None:
            self.happened[f"failed: {failure}"] += 1
        if failure == "raise":  # the executor raised: the engine drops the step's requests
            self.break_rows(plan.scheduled, plan)
            for row in plan.scheduled:
                self.scheduler.abort(row.request.request_id)
            return
        tokens: list[int | None] = []
        finished: dict[Request, FinishReason] = {}
        for row in plan.scheduled:
            token, reason = self.sample(row) if row.samples else (None, None)
            tokens.append(token)
            if reason is not None:
                finished[row.request] = reason
        if failure is not None:
            broken = [row for row in plan.scheduled if row.writes]
            broken = broken[:1] if failure == "row" else broken
            self.break_rows(broken, plan)
            finished |= {row.request: FinishReason.ERROR for row in broken}
        lost = {row.request for row in plan.scheduled if row.request.status is not self.RUNNING}
        self.scheduler.commit(plan, tokens, finished)
        for request, reason in finished.items():
            if request not in lost:
                self.check_finished(request, reason)

    RUNNING: ClassVar[RequestStatus] = RequestStatus.RUNNING

    def sample(self, row: ScheduledRequest) -> tuple[int | None, FinishReason | None]:
        """The token drawn from what lies in the store at the row's last position."""
        request, index = row.request, len(row.request.output_token_ids)
        if request.max_tokens == 0:
            return None, FinishReason.LENGTH
        context = self.window(request)
        if row.block_table and request.status is self.RUNNING:
            context = self.store[self.slot(row.block_table, row.start + row.num_tokens - 1)]
        token = next_token(context, request.choice, index)
        if token == END and not request.params.ignore_eos:
            return None, FinishReason.STOP
        return token, FinishReason.LENGTH if index + 1 == request.max_tokens else None

    def break_rows(self, rows: Iterable[ScheduledRequest], plan: StepPlan) -> None:
        """What these rows wrote, and everything that the step copied for them, is garbage."""
        for row in rows:
            if row.writes and row.block_table:
                for position in range(row.start, row.start + row.num_tokens):
                    self.store.pop(self.slot(row.block_table, position), None)
                for _, destination in plan.block_copies:
                    if destination in row.block_table:
                        self.poison(destination)

    def drain(self, limit: int = 2000) -> None:
        """Step until everything is finished, which must happen; then nothing may be left over."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished:
                break
            self.step()
        scheduler = self.scheduler
        assert not scheduler.has_unfinished, "no progress: a request never finishes"
        assert (scheduler.num_waiting, scheduler.num_running) == (0, 0)
        assert scheduler.pool.num_available == self.setup.num_blocks
        assert not list(scheduler.pool.owners())
        assert all(r.finish_reason is not None for r in self.ranks)
        assert self.step().scheduled == ()

    # What it sees.

    @property
    def block_size(self) -> int:
        return self.setup.block_size or 0

    def slot(self, table: tuple[int, ...], position: int) -> tuple[int, int]:
        return table[position // self.block_size], position % self.block_size

    def poison(self, block: int) -> None:
        for offset in range(self.block_size):
            self.store.pop((block, offset), None)

    def window(self, request: Request) -> tuple[int, ...]:
        return tuple([*request.prompt_token_ids, *request.output_token_ids][request.window_start :])

    def unfinished(self) -> list[Request]:
        return [r for r in self.ranks if r.status is not RequestStatus.FINISHED]

    def running(self) -> list[Request]:
        return [r for r in self.ranks if r.status is RequestStatus.RUNNING]

    def waiting(self) -> list[Request]:
        return [r for r in self.ranks if r.status is RequestStatus.WAITING]

    # What must hold.

    def check(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.has_unfinished == bool(self.unfinished())
        assert self.scheduler.num_running == len(self.running())
        assert self.scheduler.num_waiting == len(self.waiting())
        for request in self.running():
            if request not in self.batch:
                self.batch.append(request)
        if not self.running():
            self.batch.clear()

    def check_plan(
        self, plan: StepPlan, running: dict[Request, int], waiting: list[Request]
    ) -> None:
        """The plan by itself: within its limits, complete, and true to the requests."""
        assert plan.num_tokens <= self.setup.max_num_batched_tokens
        assert bool(plan.scheduled) == self.scheduler.has_unfinished
        rows = {row.request: row for row in plan.scheduled}
        assert len(rows) == len(plan.scheduled) <= self.setup.max_num_seqs
        assert not rows.keys() & {*plan.preempted, *plan.expired}
        for request in plan.expired:
            assert request.finish_reason is FinishReason.TIMEOUT
            assert request.deadline_s is not None
            assert request.deadline_s <= self.now
        for request in self.unfinished():
            assert request.deadline_s is None or request.deadline_s > self.now
        for request, row in rows.items():
            assert all(0 <= block < self.setup.num_blocks for block in row.block_table)
            assert len(row.block_table) * self.block_size >= (
                0 if self.setup.block_size is None else row.start + row.num_tokens
            )
            assert row.num_tokens >= 1
            if row.writes:
                self.check_row(row)
            else:
                assert self.setup.batching == "static"
                assert request.finish_reason in ENDED_BY_ITSELF
                assert not row.samples
        self.check_lingering(plan, rows.keys())
        joined = [r for r in waiting if r.status is RequestStatus.RUNNING]
        if self.setup.batching == "static" and joined:
            assert all(r.status is RequestStatus.FINISHED for r in running)

    def check_row(self, row: ScheduledRequest) -> None:
        request = row.request
        assert request.status is RequestStatus.RUNNING
        assert row.start == request.num_computed_tokens
        stop = row.start + row.num_tokens
        assert stop <= request.num_window_tokens <= self.setup.max_model_len
        assert row.samples == (stop == request.num_window_tokens)
        if self.setup.block_size is None:
            assert (row.start, stop, row.block_table) == (0, request.num_window_tokens, ())

    def check_lingering(self, plan: StepPlan, rows: Iterable[Request]) -> None:
        """A finished member of a static batch is computed as long as the batch and budget go."""
        if self.setup.batching == "continuous":
            return
        left_over = self.setup.max_num_batched_tokens - plan.num_tokens
        for request in self.batch:
            if request.finish_reason in ENDED_BY_ITSELF and self.running():
                cost = 1 if self.setup.block_size else request.num_window_tokens
                assert request in rows or left_over < cost

    def check_order(
        self, plan: StepPlan, running: dict[Request, int], waiting: list[Request]
    ) -> None:
        """Who goes first: decodes, then chunks; joining by rank; the newest loses its blocks."""
        scheduled = {row.request for row in plan.scheduled}
        stayed = [r for r in running if r.status is RequestStatus.RUNNING]
        joined = [r for r in waiting if r.status is RequestStatus.RUNNING]
        behind = [self.ranks[r] for r in self.waiting() if not self.awaits_sibling(r)]
        if any(running.get(r, 2) > 1 for r in scheduled if r in stayed or r in joined):
            assert all(r in scheduled for r in stayed if running[r] == 1)
        if plan.preempted:
            assert not joined
            lost = min(self.ranks[r] for r in plan.preempted)
            assert all(self.ranks[r] < lost for r in stayed)
            assert all(self.scheduler.pool.table(r) == () for r in plan.preempted)
        assert all(self.ranks[r] < min(behind, default=(9, 9)) for r in joined)
        if behind and not plan.preempted and self.setup.batching == "continuous":
            self.check_head_had_to_wait(plan)

    def awaits_sibling(self, request: Request) -> bool:
        """Whether a running sibling is still computing the prompt that `request` will fork from."""
        if self.setup.batching == "static" or self.setup.block_size is None or request.window_start:
            return False
        have_prompt = [
            r.num_computed_tokens >= len(r.prompt_token_ids)
            for r in self.running()
            if r.request_id == request.request_id and r.window_start == 0
        ]
        return bool(have_prompt) and not any(have_prompt)

    def check_head_had_to_wait(self, plan: StepPlan) -> None:
        ready = [request for request in self.waiting() if not self.awaits_sibling(request)]
        head = min(ready, key=self.ranks.__getitem__)
        left_over = self.setup.max_num_batched_tokens - plan.num_tokens
        pool = self.scheduler.pool
        assert (
            len(self.running()) == self.setup.max_num_seqs
            or left_over == 0
            or (self.setup.block_size is None and head.num_window_tokens > left_over)
            or pool.num_blocks_for(head.num_window_tokens) > pool.num_available
        ), f"{head} waits for no reason"

    def check_finished(self, request: Request, reason: FinishReason) -> None:
        assert request.status is RequestStatus.FINISHED
        assert request.finish_reason is reason
        if reason is not FinishReason.ERROR:
            assert request.output_token_ids == textbook(request, self.setup)
            self.happened["finished"] += 1
        assert request.num_cached_tokens < len(request.prompt_token_ids)
        if request.params.prompt_logprobs is not None and request.choice == 0:
            assert request.num_cached_tokens == 0

    def note(self, plan: StepPlan, running: dict[Request, int]) -> None:
        """Count what happened, so that a run in which nothing did is seen."""
        counters, rows = self.scheduler.counters, plan.scheduled
        decodes = [row for row in rows if running.get(row.request) == 1]
        seen = {
            "preempted": counters.num_preemptions,
            "forked": counters.num_forks,
            "slid": counters.num_slides,
            "hit": counters.prefix_hit_tokens,
            "evicted": self.scheduler.pool.num_evictions,
            "copied": bool(plan.block_copies),
            "chunked": any(row.writes and not row.samples for row in rows),
            "chunk beside decode": decodes and any(row.writes and not row.samples for row in rows),
            "lingered": any(not row.writes for row in rows),
            "expired while running": any(r in running for r in plan.expired),
            "expired while waiting": any(r not in running for r in plan.expired),
            "spared after preemption": any(
                row.request.num_preemptions and row.start and row.request not in running
                for row in rows
            ),
        }
        self.happened.update(word for word, value in seen.items() if value)


def tables(plan: StepPlan) -> dict[Request, tuple[int, ...]]:
    return {row.request: row.block_table for row in plan.scheduled}


def sizes(plan: StepPlan) -> dict[Request, int]:
    return {row.request: row.num_tokens for row in plan.scheduled}


# Steps: advance by q tokens.


def test_a_prompt_then_one_token_at_a_time() -> None:
    world = World()
    (request,) = world.add([1, 2, 1], max_tokens=3)
    first = world.step().scheduled
    assert [(r.start, r.num_tokens, r.samples, r.writes) for r in first] == [(0, 3, True, True)]
    second = world.step().scheduled
    assert [(r.start, r.num_tokens, r.samples) for r in second] == [(3, 1, True)]
    world.drain()
    assert request.finish_reason is FinishReason.LENGTH
    assert len(request.output_token_ids) == 3


def test_an_empty_scheduler_plans_nothing() -> None:
    scheduler = Setup().scheduler()
    assert scheduler.schedule(0.0) == scheduler.schedule(1.0) == StepPlan(scheduled=())
    scheduler.commit(scheduler.schedule(2.0), [], {})
    assert not scheduler.has_unfinished


def test_the_prompt_is_cut_to_the_budget_and_only_its_end_draws() -> None:
    world = World(max_num_batched_tokens=4)
    world.add([1] * 10, max_tokens=2)
    rows = [world.step().scheduled[0] for _ in range(4)]
    assert [(r.start, r.num_tokens, r.samples) for r in rows] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]


def test_decodes_go_before_a_chunk_which_gets_the_rest() -> None:
    world = World(max_num_batched_tokens=4, num_tokens_stored=40)
    (long,) = world.add([1] * 9, max_tokens=2)
    world.step()
    (short,) = world.add([2], max_tokens=6)
    assert sizes(world.step()) == {long: 4}  # the running chunk was there first
    assert sizes(world.step()) == {long: 1, short: 1}
    (other,) = world.add([2, 2, 1, 1, 2], max_tokens=2)
    plan = world.step()
    assert sizes(plan) == {long: 1, short: 1, other: 2}
    assert sizes(world.step()) == {short: 1, other: 3}


def test_a_chunk_of_an_older_request_does_not_delay_younger_decodes() -> None:
    world = World(max_num_batched_tokens=3, num_tokens_stored=40, slide_window=6)
    (old,) = world.add([1] * 10, max_tokens=20)
    while not old.output_token_ids:
        world.step()
    (young,) = world.add([2], max_tokens=30)
    while not old.num_slides:
        world.step()
    assert old.num_uncomputed_tokens == 6
    plan = world.step()
    assert [(row.request, row.num_tokens) for row in plan.scheduled] == [(young, 1), (old, 2)]


def test_recompute_starts_over_every_step_and_is_never_cut() -> None:
    world = World(block_size=None, max_num_batched_tokens=12)
    first, second = world.add([1] * 7)[0], world.add([2] * 6)[0]
    assert sizes(world.step()) == {first: 7}  # the second does not fit what is left
    assert first.num_computed_tokens == 0
    assert sizes(world.step()) == {first: 8}
    world.drain()
    assert len(second.output_token_ids) == 4


# Admission.


def test_arrivals_start_in_order_within_their_priority() -> None:
    world = World(max_num_seqs=2, num_tokens_stored=40)
    late = world.add([1], priority=5)[0]
    first = world.add([1], max_tokens=2, priority=1)[0]
    second = world.add([2], max_tokens=9, priority=1)[0]
    assert list(sizes(world.step())) == [first, second]
    urgent = world.add([1], priority=0)[0]
    while urgent.status is RequestStatus.WAITING:
        world.step()
    assert late.status is RequestStatus.WAITING


def test_the_head_of_the_queue_holds_up_those_who_would_fit() -> None:
    world = World(num_tokens_stored=14)
    (running,) = world.add([1] * 6)
    world.step()
    (large,) = world.add([2] * 9, max_tokens=2)
    (small,) = world.add([2], max_tokens=1)
    world.step()
    assert running.status is RequestStatus.RUNNING
    assert large.status is small.status is RequestStatus.WAITING
    world.drain()


def test_no_more_than_max_num_seqs_run() -> None:
    world = World(max_num_seqs=2, num_tokens_stored=60)
    for _ in range(3):
        world.add([1, 2])
    assert len(world.step().scheduled) == 2
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 1)


@pytest.mark.parametrize(
    "changes, prompt, max_tokens, words",
    [
        ({}, [], 1, "empty"),
        ({}, [1] * 13, 0, "13 tokens, the context holds 12"),
        ({}, [1] * 6, 7, "--context-overflow slide"),
        ({"num_tokens_stored": 8}, [1] * 6, 4, "5 cache blocks .* has 4.*--kv-cache-memory-bytes"),
        ({"num_tokens_stored": 8, "slide_window": 6}, [1] * 6, 400, "6 cache blocks .* has 4"),
    ],
)
def test_what_can_never_run_is_refused(
    changes: dict[str, int], prompt: list[int], max_tokens: int, words: str
) -> None:
    scheduler = replace(Setup(), **changes).scheduler()  # type: ignore[arg-type]
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(),
        max_tokens=max_tokens,
    )
    with pytest.raises(ValueError, match=words):
        scheduler.add(request)
    assert not scheduler.has_unfinished
    scheduler.check_integrity()


def test_the_largest_request_that_fits_is_taken_and_finishes() -> None:
    world = World(num_tokens_stored=8, max_num_seqs=1)
    (request,) = world.add([1] * 6, max_tokens=3)  # its last token needs no place
    world.drain()
    assert len(request.output_token_ids) == 3
    assert request.num_preemptions == 0


def test_an_id_that_is_taken_is_refused_until_it_is_finished() -> None:
    scheduler = Setup().scheduler()
    params = SamplingParams()

    def request(prompt: tuple[int, ...], choice: int = 0) -> Request:
        return Request(
            request_id="r", choice=choice, prompt_token_ids=prompt, params=params, max_tokens=2
        )

    scheduler.add(request((1,)))
    with pytest.raises(ValueError, match="choice 0"):
        scheduler.add(request((1,)))
    with pytest.raises(ValueError, match="another prompt"):
        scheduler.add(request((2,), choice=1))
    scheduler.abort("r")
    scheduler.add(request((2,)))
    scheduler.check_integrity()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"max_model_len": 0}, "--max-model-len must be at least 1, got 0"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens must be at least 1"),
        ({"max_num_batched_tokens": 11, "block_size": None}, "at least --max-model-len 12"),
        ({"slide_window": 12}, "--slide-window must be between 1 and 11"),
        ({"slide_window": 0}, "--slide-window must be at least 1, got 0"),
    ],
)
def test_limits_that_contradict_one_another_are_refused(
    changes: dict[str, int | None], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        replace(Setup(), **changes).scheduler()  # type: ignore[arg-type]


# The prefix cache.


def test_a_prefix_hit_leaves_at_least_one_token_to_compute() -> None:
    world = World(num_tokens_stored=40)
    world.add([1, 2, 1, 2], max_tokens=1)
    world.drain()
    (again,) = world.add([1, 2, 1, 2], max_tokens=1)
    (longer,) = world.add([1, 2, 1, 2, 2], max_tokens=1)
    plan = world.step()
    assert [(r.start, r.num_tokens) for r in plan.scheduled] == [(2, 2), (4, 1)]
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (2, 4)
    assert tables(plan)[again][:1] == tables(plan)[longer][:1]
    assert world.scheduler.counters.prefix_query_tokens == 4 + 4 + 5
    assert world.scheduler.counters.prefix_hit_tokens == 6


def test_blocks_of_the_output_are_found_too() -> None:
    world = World(num_tokens_stored=40)
    (first,) = world.add([1, 2], max_tokens=6)
    world.drain()
    (turn,) = world.add([1, 2, *first.output_token_ids, 1], max_tokens=1)
    world.step()
    assert turn.num_cached_tokens == 6  # of 7 computed: the last block was not full


def test_blocks_are_found_as_soon_as_they_are_full_and_their_owner_still_runs() -> None:
    world = World(num_tokens_stored=40)
    world.add([1, 2, 1, 2, 1], max_tokens=6)
    world.step()
    (other,) = world.add([1, 2, 1, 2, 2], max_tokens=1)
    world.step()
    assert other.num_cached_tokens == 4


def test_prompt_logprobs_need_every_row_but_leave_their_blocks_behind() -> None:
    world = World(num_tokens_stored=40)
    first = world.add([1, 2, 1, 2, 1], prompt_logprobs=0)[0]
    world.drain()
    scoring = world.add([1, 2, 1, 2, 1], prompt_logprobs=1)[0]
    plain = world.add([1, 2, 1, 2, 1])[0]
    plan = world.step()
    assert sizes(plan) == {scoring: 5, plain: 1}
    assert [r.num_cached_tokens for r in (first, scoring, plain)] == [0, 0, 4]
    assert world.scheduler.counters.prefix_query_tokens == 5


def test_without_prefix_caching_nothing_is_found() -> None:
    world = World(num_tokens_stored=40, enable_prefix_caching=False)
    for _ in range(2):
        (request,) = world.add([1, 2, 1, 2, 1], max_tokens=1)
        world.drain()
        assert request.num_cached_tokens == 0
    assert world.scheduler.counters.prefix_query_tokens == 0  # nor looked for
    assert world.scheduler.pool.num_cached == 0


def test_the_least_recently_used_prefix_makes_room() -> None:
    world = World(num_tokens_stored=12, max_num_seqs=1)
    old, new = [1, 1, 1, 1, 1], [2, 2, 2, 2, 2]
    for prompt in (old, new, [2, 1, 2, 1, 2, 1, 1]):
        world.add(prompt, max_tokens=1)
        world.drain()
    assert world.scheduler.pool.num_evictions > 0
    assert world.scheduler.pool.match(new)[1] > world.scheduler.pool.match(old)[1]


def test_what_a_failed_step_computed_is_never_shared() -> None:
    world = World(num_tokens_stored=60, max_num_batched_tokens=4)
    world.add([1, 2, 1, 2, 1, 2], max_tokens=2)
    world.step()
    assert world.scheduler.pool.num_cached == 2
    world.step(failure="commit")
    assert world.scheduler.pool.num_cached == 0
    assert world.scheduler.pool.num_available == world.setup.num_blocks
    (again,) = world.add([1, 2, 1, 2, 1, 2], max_tokens=2)
    world.drain()
    assert again.num_cached_tokens == 0


# Preemption.


def crowded() -> tuple[World, Request, Request]:
    """Two requests of which only one can grow to its end while the other runs."""
    world = World(num_tokens_stored=14, enable_prefix_caching=False)
    old, new = world.add([1, 1], max_tokens=8)[0], world.add([2, 2], max_tokens=8)[0]
    return world, old, new


def test_the_newest_gives_up_its_blocks_and_starts_over_at_the_front() -> None:
    world, old, new = crowded()
    (later,) = world.add([1] * 11, max_tokens=1)
    while not new.num_preemptions:
        plan = world.step()
        assert later.status is RequestStatus.WAITING
    assert plan.preempted == (new,)
    assert new.status is RequestStatus.WAITING
    assert new.num_computed_tokens == 0
    assert new not in tables(plan)
    kept = list(new.output_token_ids)
    assert kept
    while new.status is RequestStatus.WAITING:
        world.step()
        assert later.status is RequestStatus.WAITING
    assert old.status is RequestStatus.FINISHED
    world.drain()
    assert new.output_token_ids[: len(kept)] == kept
    assert old.num_preemptions == 0
    assert world.scheduler.counters.num_preemptions == new.num_preemptions == 1


def test_the_lowest_priority_is_preempted_before_the_latest_arrival() -> None:
    world = World(num_tokens_stored=14, enable_prefix_caching=False)
    low, high = world.add([1, 1], max_tokens=8, priority=1)[0], world.add([2, 2], max_tokens=8)[0]
    world.drain()
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)


def test_a_request_may_be_the_newest_itself() -> None:
    world = World(num_tokens_stored=8, block_size=4, enable_prefix_caching=False)
    old, new = world.add([1], max_tokens=4)[0], world.add([1, 1, 1], max_tokens=4)[0]
    world.step()
    world.step()
    plan = world.step()  # the new one needs a second block, and nobody is newer
    assert plan.preempted == (new,)
    assert list(sizes(plan)) == [old]
    world.drain()


def test_a_row_planned_before_its_request_is_preempted_leaves_the_plan() -> None:
    world = World(
        num_tokens_stored=14, enable_prefix_caching=False, slide_window=8, max_num_batched_tokens=2
    )
    old, new = world.add([1] * 10, max_tokens=20)[0], world.add([2], max_tokens=20)[0]
    while not new.num_preemptions:
        left = {r: r.num_uncomputed_tokens for r in (old, new)}
        plan = world.step()
    assert old.num_slides == 1
    assert left == {old: 2, new: 1}  # the decode was planned first, then the chunk took its blocks
    assert sizes(plan) == {old: 1}
    assert plan.preempted == (new,)
    world.drain()


def test_nobody_joins_in_a_step_that_preempts() -> None:
    world, old, new = crowded()
    while not new.num_preemptions:
        urgent = world.add([1], max_tokens=1, priority=-1)[0]  # fits where a block is free
        plan = world.step()
    assert list(sizes(plan)) == [old]
    assert world.scheduler.pool.num_available > 0
    assert urgent.status is RequestStatus.WAITING
    world.step()
    assert urgent.finish_reason is FinishReason.LENGTH


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    world = World(num_tokens_stored=14)
    old, new = world.add([1, 1], max_tokens=8)[0], world.add([2, 2], max_tokens=8)[0]
    world.drain()
    assert old.num_preemptions == 0
    assert new.num_preemptions > 0
    assert world.happened["spared after preemption"] > 0
    assert new.num_cached_tokens == 0  # that counts the first admission only


# Choices.


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    "num_prompt, num_shared, copies", [(1, 0, False), (4, 0, True), (5, 1, False), (7, 1, True)]
)
def test_choices_share_the_prompt_and_copy_the_block_they_write(
    num_prompt: int, num_shared: int, copies: bool, caching: bool
) -> None:
    world = World(block_size=4, num_tokens_stored=48, enable_prefix_caching=caching)
    first, *others = world.add([1] * num_prompt, max_tokens=3, n=3)
    assert sizes(world.step()) == {first: num_prompt}  # the others wait for it
    plan = world.step()
    assert sizes(plan) == dict.fromkeys([first, *others], 1)
    donor = tables(plan)[first]
    for other in others:
        table = tables(plan)[other]
        assert table[:num_shared] == donor[:num_shared]
        assert table[num_shared] not in donor
        pair = (donor[num_shared], table[num_shared])
        assert (pair in plan.block_copies) == copies
        assert other.num_cached_tokens == num_prompt - 1
        assert [row.start for row in plan.scheduled if row.request is other] == [num_prompt - 1]
    assert len(plan.block_copies) == 2 * copies
    assert world.scheduler.counters.num_forks == 2
    world.drain()


def test_choices_wait_while_the_first_computes_the_prompt_in_chunks() -> None:
    world = World(max_num_batched_tokens=4, num_tokens_stored=40)
    first, second = world.add([1] * 9, max_tokens=2, n=2)
    (later,) = world.add([2], max_tokens=1)
    assert sizes(world.step()) == {first: 4}
    assert sizes(world.step()) == {first: 4}
    assert sizes(world.step()) == {first: 1, later: 1}  # who stands behind the choice need not wait
    assert sizes(world.step()) == {first: 1, second: 1}


@pytest.mark.parametrize("caching, num_hit", [(True, 4), (False, 0)])
def test_a_choice_whose_siblings_are_gone_computes_or_finds_the_prompt(
    caching: bool, num_hit: int
) -> None:
    world = World(max_num_seqs=1, num_tokens_stored=40, enable_prefix_caching=caching)
    first, second = world.add([1] * 6, max_tokens=1, n=2)
    world.step()
    assert first.status is RequestStatus.FINISHED
    assert sizes(world.step()) == {second: 6 - num_hit}
    assert world.scheduler.counters.num_forks == 0


def test_a_sibling_whose_window_slid_is_no_donor() -> None:
    world = World(max_num_seqs=2, num_tokens_stored=48, slide_window=4, enable_prefix_caching=False)
    other = world.add([2] * 8, max_tokens=8)[0]
    first, second = world.add([1] * 9, max_tokens=20, n=2)
    while not first.num_slides:
        world.step()
        assert second.status is RequestStatus.WAITING or other.finish_reason
    if second.status is RequestStatus.WAITING:
        world.abort(other)
        world.step()
    assert second.num_cached_tokens == 0
    assert world.scheduler.counters.num_forks == 0
    world.drain()


def test_prompt_logprobs_concern_the_first_choice_only() -> None:
    world = World(num_tokens_stored=48)
    first, second = world.add([1] * 5, max_tokens=2, n=2, prompt_logprobs=0)
    world.step()
    world.step()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    world.drain()


def test_a_donor_aborted_between_plan_and_step_still_gives_its_blocks() -> None:
    world = World(block_size=4, num_tokens_stored=48)
    first, second = world.add([1] * 7, max_tokens=4, n=2)
    world.step()
    running = world.scheduler.pool.table(first)
    plan = world.scheduler.schedule(world.now)
    assert plan.block_copies[0][0] in running
    assert world.scheduler.abort(first.request_id, first.choice) == [first]
    world.execute(plan)
    world.commit(plan, None)
    world.check()
    world.drain()
    assert second.finish_reason is FinishReason.LENGTH


def test_forks_of_a_preempted_donor_keep_the_prompt() -> None:
    world = World(num_tokens_stored=18, enable_prefix_caching=False, max_num_seqs=3)
    choices = world.add([1] * 5, max_tokens=7, n=3)
    world.drain()
    assert world.scheduler.counters.num_forks > 2  # some of them once more, after preemption
    assert world.scheduler.counters.num_preemptions > 0
    assert all(c.finish_reason is FinishReason.LENGTH for c in choices)


def test_a_choice_whose_window_slid_takes_nothing_from_the_prompt() -> None:
    world = World(num_tokens_stored=12, enable_prefix_caching=False, slide_window=5)
    first = world.add([1, 1], max_tokens=40, priority=1)[0]
    while not first.num_slides:
        world.step()
    world.add([2], max_tokens=5)
    world.step()
    world.step()
    second = Request(
        request_id=first.request_id,
        choice=1,
        prompt_token_ids=first.prompt_token_ids,
        params=first.params,
        max_tokens=20,
    )
    world.scheduler.add(second)
    world.ranks[second] = (0, 2)
    while not first.num_preemptions or first.status is RequestStatus.WAITING:
        world.step()
    assert second.num_computed_tokens >= 2  # it holds the prompt, which `first` has left behind
    assert (second.num_slides, second.status) == (0, RequestStatus.RUNNING)
    assert world.scheduler.counters.num_forks == 0
    world.drain()


def test_a_preempted_choice_takes_its_own_blocks_if_they_cover_more_than_the_prompt() -> None:
    world = World(num_tokens_stored=12)
    first, second = world.add([1, 1], max_tokens=10, n=2)
    while not second.num_preemptions:
        world.step()
    while second.status is RequestStatus.WAITING:
        plan = world.step()
    assert first.status is RequestStatus.RUNNING
    assert [row.start for row in plan.scheduled if row.request is second] == [4]
    world.drain()


# Leaving.


def test_abort_takes_all_choices_whatever_their_state() -> None:
    world = World(max_num_seqs=2, num_tokens_stored=48)
    choices = world.add([1, 2, 1], n=3)
    world.step()
    world.step()
    assert [c.status.value for c in choices] == ["running", "running", "waiting"]
    world.abort(choices[0])
    assert world.scheduler.pool.num_available == world.setup.num_blocks
    assert world.scheduler.abort(choices[0].request_id) == []
    assert world.scheduler.abort("unknown") == []


def test_one_choice_can_be_aborted_alone() -> None:
    world = World(num_tokens_stored=48)
    first, second, third = world.add([1, 2, 1], n=3)
    world.step()
    world.step()
    world.abort(second, all_choices=False)
    world.drain()
    assert [c.finish_reason for c in (first, second, third)] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]


def test_an_abort_between_plan_and_commit_is_passed_over() -> None:
    world = World(num_tokens_stored=48)
    kept, before, after = (world.add([token, 1])[0] for token in range(3))
    world.step()
    world.step(abort_before=before, abort_after=after)
    assert len(kept.output_token_ids) == 2
    assert len(before.output_token_ids) == len(after.output_token_ids) == 1
    world.drain()


def test_many_aborts_of_waiting_requests_leave_no_trace() -> None:
    world = World(max_num_seqs=1, num_tokens_stored=24)
    head = world.add([1], max_tokens=9, timeout_s=99.0)[0]
    world.step()
    crowd = [world.add([2], timeout_s=9.0)[0] for _ in range(100)]
    for request in crowd[:-1]:
        world.scheduler.abort(request.request_id)
    world.check()
    assert len(world.scheduler._waiting._heap) < 40
    assert len(world.scheduler._deadlines._heap) < 40
    world.drain()
    assert head.finish_reason is crowd[-1].finish_reason is FinishReason.LENGTH


def test_deadlines_end_whoever_is_late_in_any_state() -> None:
    world = World(max_num_seqs=1, num_tokens_stored=24)
    running = world.add([1], max_tokens=9, timeout_s=2.0)[0]
    waiting = world.add([1], timeout_s=1.0)[0]
    patient = world.add([1])[0]
    world.step()
    world.now = 1.0
    assert world.step().expired == (waiting,)
    world.now = 2.0
    plan = world.step()
    assert plan.expired == (running,)
    assert list(sizes(plan)) == [patient]  # its place was free in the same step
    assert len(running.output_token_ids) == 2
    assert world.scheduler.counters.num_expired == 2


def test_max_tokens_zero_computes_the_prompt_and_ends() -> None:
    world = World()
    (request,) = world.add([1] * 12, max_tokens=0, prompt_logprobs=0)
    world.step()
    assert request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == []


# Sliding.


@pytest.mark.parametrize("block_size", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_a_full_window_slides_to_its_last_tokens(block_size: int | None) -> None:
    world = World(block_size=block_size, slide_window=5, num_tokens_stored=24)
    (request,) = world.add([1, 2, 1, 1, 2, 2, 1, 2, 1, 2], max_tokens=20)
    world.step()
    world.step()
    assert request.num_slides == 1
    assert (request.window_start, request.num_window_tokens) == (7, 5)
    assert request.num_computed_tokens == 0
    assert request.status is RequestStatus.RUNNING
    row = world.step().scheduled[0]
    assert (row.start, row.num_tokens) == (0, 5)
    world.drain()
    assert request.num_slides > 2


def test_a_prompt_of_full_length_is_computed_before_it_slides() -> None:
    world = World(slide_window=6, max_num_batched_tokens=5, num_tokens_stored=12, max_num_seqs=1)
    (request,) = world.add([1, 2] * 6, max_tokens=2)
    for _ in range(2):
        world.step()
        assert request.num_slides == 0
    world.step()
    assert (request.num_slides, request.num_window_tokens) == (1, 6)
    world.drain()


def test_the_window_slides_to_half_by_default() -> None:
    config = SchedulerConfig(context_overflow="slide")
    scheduler = Scheduler(
        config, num_blocks=8, block_size=2, max_model_len=9, max_num_batched_tokens=9
    )
    assert scheduler.slide_window == 4
    assert Setup().scheduler().slide_window is None


# Static batching.


@pytest.mark.parametrize("block_size", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_a_static_batch_keeps_finished_rows_until_it_drains(block_size: int | None) -> None:
    world = World(
        batching="static", block_size=block_size, num_tokens_stored=60, max_num_batched_tokens=60
    )
    lengths = [2, 5, 3]
    batch = [world.add([1, 2], max_tokens=n)[0] for n in lengths]
    world.step()
    late = world.add([2])[0]
    for _ in range(4):
        plan = world.step()
        assert set(sizes(plan)) == set(batch)
        assert late.status is RequestStatus.WAITING
    rows = {row.request: row for row in plan.scheduled}
    assert [rows[r].writes for r in batch] == [False, True, False]
    if block_size is None:
        assert [(rows[r].start, rows[r].num_tokens) for r in batch] == [(0, 3), (0, 6), (0, 4)]
    else:
        assert [(rows[r].start, rows[r].num_tokens) for r in batch] == [(2, 1), (5, 1), (3, 1)]
    counters = world.scheduler.counters
    assert counters.asked_rows == sum(lengths)
    assert counters.computed_rows == max(lengths) * len(lengths)
    assert list(sizes(world.step())) == [late]
    world.drain()


def test_equal_lengths_waste_nothing_and_continuous_never_does() -> None:
    static, continuous = World(batching="static", num_tokens_stored=48), World(num_tokens_stored=48)
    for world, lengths in ((static, [3, 3, 3]), (continuous, [1, 5, 3])):
        for length in lengths:
            world.add([1], max_tokens=length)
        world.drain()
        counters = world.scheduler.counters
        assert counters.computed_rows == counters.asked_rows == sum(lengths)


def test_finished_requests_are_reported_at_once_though_their_rows_stay() -> None:
    world = World(batching="static", num_tokens_stored=48)
    short, long = world.add([1], max_tokens=1)[0], world.add([1], max_tokens=4)[0]
    world.step()
    assert short.finish_reason is FinishReason.LENGTH
    assert world.scheduler.num_running == 1
    assert world.scheduler.pool.table(short)
    assert world.scheduler.abort(short.request_id) == []
    world.abort(long)  # the last of the batch: now both are gone
    assert not list(world.scheduler.pool.owners())


def test_a_static_batch_reserves_the_worst_case_of_its_members() -> None:
    world = World(batching="static", num_tokens_stored=14)
    first, second = world.add([1, 1], max_tokens=6)[0], world.add([1, 1], max_tokens=8)[0]
    world.step()
    assert (first.status, second.status) == (RequestStatus.RUNNING, RequestStatus.WAITING)
    world.drain()
    assert world.scheduler.counters.num_preemptions == 0


def test_a_static_batch_may_start_beyond_the_budget_of_its_first_step() -> None:
    world = World(batching="static", num_tokens_stored=48, max_num_batched_tokens=4)
    first, second = world.add([1] * 6)[0], world.add([2] * 6)[0]
    assert sizes(world.step()) == {first: 4}
    assert second.status is RequestStatus.RUNNING
    assert sizes(world.step()) == {first: 2, second: 2}
    world.drain()


def test_choices_in_a_static_batch_compute_their_own_prompt() -> None:
    world = World(batching="static", num_tokens_stored=48)
    choices = world.add([1, 2, 1], n=3)
    assert sizes(world.step()) == dict.fromkeys(choices, 3)
    world.drain()
    assert world.scheduler.counters.num_forks == 0


# The contract of the two calls.


def test_a_plan_is_committed_once_and_before_the_next() -> None:
    world = World()
    world.add([1])
    plan = world.scheduler.schedule(0.0)
    with pytest.raises(RuntimeError, match="before commit"):
        world.scheduler.schedule(0.0)
    with pytest.raises(ValueError, match="1 rows were scheduled, got 0 tokens"):
        world.scheduler.commit(plan, [], {})
    world.scheduler.commit(plan, [1], {})
    with pytest.raises(RuntimeError, match="once"):
        world.scheduler.commit(plan, [1], {})


def test_a_plan_whose_requests_were_all_aborted_needs_no_commit() -> None:
    world = World(num_tokens_stored=48)
    lost = world.add([1, 2])[0]
    plan = world.scheduler.schedule(0.0)
    world.abort(lost)
    kept = world.add([1, 2])[0]
    world.drain()
    assert kept.finish_reason is FinishReason.LENGTH
    with pytest.raises(RuntimeError, match="last schedule"):
        world.scheduler.commit(plan, [1], {})


@pytest.mark.parametrize(
    "prompt, token, words",
    [([1] * 14, 1, "does not reach the end"), ([1], None, "neither a token"), ([1], 1, "max_tok")],
)
def test_a_commit_that_contradicts_the_plan_is_an_error(
    prompt: list[int], token: int | None, words: str
) -> None:
    world = World(max_model_len=20, num_tokens_stored=40)
    world.add(prompt, max_tokens=1)
    with pytest.raises(AssertionError, match=words):
        world.scheduler.commit(world.scheduler.schedule(0.0), [token], {})


def test_only_planned_requests_can_be_finished() -> None:
    world = World(max_num_seqs=1)
    world.add([1])
    waiting = world.add([1])[0]
    with pytest.raises(AssertionError, match="was not in the plan"):
        world.scheduler.commit(world.scheduler.schedule(0.0), [1], {waiting: FinishReason.STOP})


def test_equal_histories_give_equal_plans() -> None:
    logs = []
    for _ in range(2):
        world, log = World(num_tokens_stored=14), []
        for token in (1, 2, 1):
            world.add([token, 1, 1], max_tokens=6, n=2)
        while world.scheduler.has_unfinished:
            plan = world.step()
            log.append([(*world.ranks[r.request], r.start, r.block_table) for r in plan.scheduled])
        logs.append(log)
    assert logs[0] == logs[1]


def lose_a_running_request(world: World) -> None:
    world.scheduler._running.pop()


def lose_a_waiting_request(world: World) -> None:
    world.scheduler._waiting.pop()


def lose_an_id(world: World) -> None:
    world.scheduler._choices.popitem()


def lose_a_deadline(world: World) -> None:
    world.scheduler._deadlines.pop()


def lose_blocks(world: World) -> None:
    world.scheduler.pool.free(world.running()[0])


def hold_blocks_while_waiting(world: World) -> None:
    world.scheduler.pool.book(world.waiting()[0], 1)


def compute_too_much(world: World) -> None:
    world.running()[0].num_computed_tokens = 3


def change_order(world: World) -> None:
    world.scheduler._running.reverse()


def compute_while_waiting(world: World) -> None:
    world.waiting()[0].num_computed_tokens = 1


def run_too_many(world: World) -> None:
    world.scheduler.max_num_seqs = 1


def outgrow_the_context(world: World) -> None:
    world.scheduler.max_model_len = 2


def linger_unfinished(world: World) -> None:
    world.scheduler._policy.lingering[world.running()[0]] = 1


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_running_request,
        lose_a_waiting_request,
        lose_an_id,
        lose_a_deadline,
        lose_blocks,
        hold_blocks_while_waiting,
        compute_too_much,
        change_order,
        compute_while_waiting,
        run_too_many,
        outgrow_the_context,
        linger_unfinished,
    ],
)
def test_integrity_notices(damage: Callable[[World], None]) -> None:
    world = World(max_num_seqs=2, num_tokens_stored=40)
    for _ in range(3):
        world.add([1, 2], timeout_s=9.0)
    world.step()
    damage(world)
    with pytest.raises(RuntimeError, match="inconsistent"):
        world.scheduler.check_integrity()


# All of it at once.


PROMPT = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 2)
"""Prompts begin alike, so that they have something to share."""


def drive(world: World, chance: random.Random, num_operations: int) -> None:
    """Whatever callers may do, in any order; then everything must come to its end."""
    for _ in range(num_operations):
        operation = chance.choices(["add", "step", "abort", "wait"], [30, 55, 5, 10])[0]
        unfinished = world.unfinished()
        one = chance.choice(unfinished) if unfinished else None
        if operation == "add" and len(unfinished) < 12:
            world.add(
                [*PROMPT[: chance.randint(0, len(PROMPT))], chance.randrange(VOCABULARY)],
                chance.choice([0, 1, 3, 8, 20]),
                n=chance.choice([1, 1, 1, 2, 3]),
                priority=chance.choice([0, 0, 0, 1]),
                timeout_s=chance.choice([None, 1.0, 4.0]),
                ignore_eos=chance.random() < 0.7,
                prompt_logprobs=chance.choice([None, None, None, 0]),
            )
        elif operation == "step":
            event = chance.random()
            world.step(
                abort_before=one if event < 0.02 else None,
                abort_after=one if event > 0.98 else None,
                failure=chance.choice(FAILURES) if 0.35 < event < 0.5 else None,
            )
        elif operation == "abort" and one is not None:
            world.abort(one, all_choices=chance.random() < 0.5)
        else:
            world.now += 1.0
    world.drain()


def expected_to_happen(setup: Setup) -> set[str]:
    """What a long enough run of `drive` must have seen, or it proves nothing."""
    words = {"finished", "aborted while waiting", "aborted while running"}
    words |= {"expired while waiting", "expired while running"}
    words |= {f"failed: {failure}" for failure in FAILURES}
    keeps, is_continuous = setup.block_size is not None, setup.batching == "continuous"
    has_small_blocks = keeps and setup.block_size != setup.max_model_len
    if setup.slide_window is not None:
        words.add("slid")
    if keeps:
        words |= {"chunked", "chunk beside decode"}
    if not is_continuous:
        words.add("lingered")
    if is_continuous and keeps:
        words.add("forked")
    if is_continuous and keeps and setup.block_size != 1:
        words.add("copied")
    if is_continuous and has_small_blocks:
        words.add("preempted")
    if setup.enable_prefix_caching and has_small_blocks:
        words |= {"hit", "evicted"}
        if is_continuous:
            words.add("spared after preemption")
    return words


@pytest.mark.parametrize("slide_window", [None, 5], ids=["error", "slide"])
@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_every_request_gets_its_own_tokens_whatever_happens(
    layout: str, batching: Batching, caching: bool, slide_window: int | None
) -> None:
    happened: Counter[str] = Counter()
    for budget, num_tokens_stored in [(12, 12), (5, 16), (7, 20), (3, 24), (30, 36)]:
        setup = Setup(
            block_size=LAYOUTS[layout],
            batching=batching,
            enable_prefix_caching=caching,
            slide_window=slide_window,
            max_num_batched_tokens=max(budget, 12) if LAYOUTS[layout] is None else budget,
            num_tokens_stored=36 if layout == "contiguous" else num_tokens_stored,
        )
        world = World(setup)
        drive(world, random.Random(budget), num_operations=100)
        happened += world.happened
    assert expected_to_happen(setup) <= happened.keys()


class SchedulerMachine(RuleBasedStateMachine):
    """The same, driven by hypothesis, which shortens what it finds."""

    block_size: ClassVar[int | None] = 2
    batching: ClassVar[Batching] = "continuous"
    happened: ClassVar[Counter[str]] = Counter()

    @initialize(
        caching=st.booleans(),
        slide_window=st.sampled_from([None, 5, 11]),
        budget=st.integers(1, 16),
        num_tokens_stored=st.integers(12, 30),
        max_num_seqs=st.integers(1, 5),
    )
    def begin(
        self,
        caching: bool,
        slide_window: int | None,
        budget: int,
        num_tokens_stored: int,
        max_num_seqs: int,
    ) -> None:
        self.world = World(
            block_size=self.block_size,
            batching=self.batching,
            enable_prefix_caching=caching,
            slide_window=slide_window,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, 12) if self.block_size is None else budget,
            num_tokens_stored=num_tokens_stored,
        )

    @rule(
        num_shared=st.integers(0, len(PROMPT)),
        last=st.integers(0, VOCABULARY - 1),
        max_tokens=st.sampled_from([0, 1, 3, 8, 20]),
        n=st.integers(1, 3),
        priority=st.integers(0, 1),
        timeout_s=st.sampled_from([None, 1.0, 3.0]),
        ignore_eos=st.booleans(),
        prompt_logprobs=st.sampled_from([None, 0]),
    )
    def add(self, num_shared: int, last: int, max_tokens: int, **how: object) -> None:
        self.world.add([*PROMPT[:num_shared], last], max_tokens, **how)  # type: ignore[arg-type]

    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.world.step()

    @precondition(lambda self: self.world.unfinished())
    @rule(data=st.data(), before=st.booleans())
    def step_with_abort(self, data: st.DataObject, before: bool) -> None:
        request = data.draw(st.sampled_from(self.world.unfinished()))
        self.world.step(
            abort_before=request if before else None, abort_after=None if before else request
        )

    @rule(failure=st.sampled_from(FAILURES))
    def step_that_fails(self, failure: Failure) -> None:
        self.world.step(failure=failure)

    @precondition(lambda self: self.world.unfinished())
    @rule(data=st.data(), all_choices=st.booleans())
    def abort(self, data: st.DataObject, all_choices: bool) -> None:
        request = data.draw(st.sampled_from(self.world.unfinished()))
        self.world.abort(request, all_choices=all_choices)

    @rule()
    def wait(self) -> None:
        self.world.now += 1.0

    @invariant()
    def is_consistent(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.drain()
        self.happened.update(self.world.happened)


@pytest.mark.parametrize("batching", ["continuous", "static"])
@pytest.mark.parametrize("block_size", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_no_sequence_of_calls_breaks_an_invariant(
    block_size: int | None, batching: Batching
) -> None:
    class Machine(SchedulerMachine):
        pass

    Machine.block_size, Machine.batching, Machine.happened = block_size, batching, Counter()
    profile = settings()
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=max(profile.max_examples // 6, 1), stateful_step_count=30),
    )
    common = {"finished", "failed: row", "aborted while running", "expired while waiting"}
    assert common <= Machine.happened.keys()
