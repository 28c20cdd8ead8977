"""Which requests advance in the next step, by how much, and in which blocks.

There is no prefill phase and no decode phase: a step advances each request by some of its
uncomputed tokens, and a request whose last token is reached draws the next. `schedule` books the
blocks and returns a plan, `commit` takes the step's tokens; clocks are passed in, nothing is
executed here. Invariants, held by `check_integrity`: the first `num_computed_tokens` positions of a
running request lie in its block table; a waiting one has no blocks; requests are admitted in order
of (priority, arrival), so that none waits while a later one of its priority starts (but for choices
that wait for their sibling's prompt); and since no request is accepted that the whole cache could
not hold, the first of that order always advances.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from nanoserve.config import SchedulerConfig
from nanoserve.request import FinishReason, Request, RequestStatus
from nanoserve.scheduling.blocks import BlockPool
from nanoserve.scheduling.limits import check_limits, slide_window
from nanoserve.scheduling.plan import NO_PLAN, ScheduledRequest, StepPlan
from nanoserve.scheduling.policies import ContinuousBatching, StaticBatching, release
from nanoserve.scheduling.queue import Rank, RankedQueue


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Totals since the scheduler was made.

    `asked_rows` counts the rows that were sampled, `computed_rows` also those that static batching
    computed for requests already finished. Their ratio is the policy's waste: for one static batch
    whose prompts fit one step it is the longest output over the mean one. `prefix_query_tokens` are
    the tokens looked up at admissions, `prefix_hit_tokens` those found: both stay 0 where
    nothing is ever looked up (no prefix caching, or a cache that keeps nothing).
    """

    num_preemptions: int = 0
    num_slides: int = 0
    num_forks: int = 0
    num_expired: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    computed_rows: int = 0
    asked_rows: int = 0


class Spared(NamedTuple):
    """What a request that joins need not compute, because others did."""

    num_tokens: int = 0
    blocks: Sequence[int] = ()  # full ones, to share
    copied_block: int | None = None  # the donor's, where the fork will write
    is_fork: bool = False


@dataclass(slots=True)
class Draft:
    """A plan while it is being made; `budget` is the token rows still to give away."""

    budget: int
    scheduled: dict[Request, ScheduledRequest] = field(default_factory=dict)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)

    def put(self, row: ScheduledRequest) -> None:
        self.scheduled[row.request] = row
        self.budget -= row.num_tokens

    def take_back(self, request: Request) -> None:
        row = self.scheduled.pop(request, None)
        if row is not None:
            self.budget += row.num_tokens


def planned_row(
    request: Request, num_tokens: int, block_table: tuple[int, ...], *, samples: bool
) -> ScheduledRequest:
    """`request` goes on where it stands."""
    return ScheduledRequest(
        request=request,
        start=request.num_computed_tokens,
        num_tokens=num_tokens,
        block_table=block_table,
        samples=samples,
    )


class Scheduler:
    """Plans steps over one block pool. `config`'s two automatic limits come resolved beside it.

    `block_size` is `max_model_len` for contiguous layouts, 1 for slots, and None (with `num_blocks`
    0) for `recompute`, where a request keeps nothing between steps and is never chunked.
    `max_num_batched_tokens` bounds the token rows of a step. `track_freed` is for audits, see
    `BlockPool.take_freed`. Raises ValueError for limits that contradict one another.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int | None,
        max_model_len: int,
        max_num_batched_tokens: int,
        track_freed: bool = False,
    ) -> None:
        keeps_nothing = block_size is None
        check_limits(config, max_model_len, max_num_batched_tokens, keeps_nothing=keeps_nothing)
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.slide_window = slide_window(config, max_model_len)
        self.batching_timeout = config.batching_timeout
        self.counters = SchedulerCounters()
        self.pool = BlockPool(
            num_blocks,
            block_size,
            config.enable_prefix_caching and not keeps_nothing,
            track_freed=track_freed,
        )
        self._keeps_nothing = keeps_nothing
        policy = StaticBatching if config.batching == "static" else ContinuousBatching
        self._policy: ContinuousBatching | StaticBatching = policy(self.pool)
        self._waiting = RankedQueue()
        self._running: list[Request] = []  # by rank: the last one is preempted first
        self._ranks: dict[Request, Rank] = {}  # of everything unfinished
        self._choices: dict[str, dict[int, Request]] = {}  # likewise, by id and choice
        self._deadlines = RankedQueue()
        self._arrivals = itertools.count()
        self._uncommitted = NO_PLAN

    @property
    def has_unfinished(self) -> bool:
        """Is there anything left to schedule?"""
        return bool(self._ranks)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks: not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Admitted requests that are not finished."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Queue a fresh request (one choice; siblings share id and prompt and are added in order).

        Raises ValueError, and changes nothing, if it can never be run or its id is taken.
        """
        assert request.status is RequestStatus.WAITING, f"not a fresh request: {request}"
        assert request.num_computed_tokens == 0, f"not a fresh request: {request}"
        self._check_fits(request)
        siblings = self._choices.get(request.request_id, {})
        if request.choice in siblings:
            raise ValueError(
                f"request {request.request_id!r} is already running with choice {request.choice}: "
                "give every request its own request_id"
            )
        sibling = next(iter(siblings.values()), request)
        if sibling.prompt_token_ids != request.prompt_token_ids:
            raise ValueError(
                f"request {request.request_id!r} is already running with another prompt: the "
                "choices of one request_id share their prompt"
            )
        self._enter(request, (request.priority, next(self._arrivals)))

    def _enter(self, request: Request, rank: Rank) -> None:
        self._ranks[request] = rank
        self._choices.setdefault(request.request_id, {})[request.choice] = request
        self._waiting.push(rank, request)
        if request.deadline_s is not None:
            self._deadlines.push((request.deadline_s, rank[1]), request)

    def abort(self, request_id: str, choice: int | None = None) -> list[Request]:
        """Finish all choices of `request_id` (or the one asked for) with ABORT; free their blocks.

        Works in any state, between `schedule` and `commit` too. Returns the requests it ended: none
        if they are unknown or finished already.
        """
        choices = list(self._choices.get(request_id, {}).values())
        ended = [request for request in choices if choice is None or request.choice == choice]
        for request in ended:
            self._drop(request, FinishReason.ABORT)
        return ended

    def held_until(self) -> float | None:
        """Until when nothing is scheduled, on the requests' clock; None: something is at once.

        Only a static batch that is not full and has a `batching_timeout` is held back: until its
        oldest request has waited that long, or a deadline passes before.
        """
        num_waiting = len(self._waiting)
        if self.batching_timeout is None or self._running:
            return None
        if not 0 < num_waiting < self.max_num_seqs:
            return None
        start = min(request.arrival_s for request in self._waiting) + self.batching_timeout
        deadline = self._deadlines.first()
        return start if deadline is None else min(start, deadline[0][0])

    def schedule(self, now: float) -> StepPlan:
        """The next step; `now` is in seconds, on the clock of the requests' deadlines.

        Something is scheduled whenever anything is unfinished, unless it is `held_until` later.
        RuntimeError if the plan before it was not committed; one whose requests were all aborted
        (its step failed) need not be.
        """
        if any(row.request.status is RequestStatus.RUNNING for row in self._uncommitted.scheduled):
            raise RuntimeError("schedule() was called before commit() took the plan before it")
        expired = self._expire(now)
        draft = Draft(self.max_num_batched_tokens)
        self._advance_running(draft)
        self._repeat_finished(draft)
        # Joining in a step that preempts would hand blocks to a later request, or to the preempted
        # one itself, just after they were short; and it could fork from a donor that lost them.
        held_until = self.held_until()
        if not draft.preempted and (held_until is None or held_until <= now):
            self._admit(draft)
        plan = StepPlan(
            scheduled=tuple(draft.scheduled.values()),
            block_copies=tuple(draft.block_copies),
            preempted=tuple(draft.preempted),
            expired=tuple(expired),
        )
        self._uncommitted = plan
        return plan

    def commit(
        self,
        plan: StepPlan,
        tokens: Sequence[int | None],
        finished: Mapping[Request, FinishReason],
    ) -> None:
        """Take the result of `plan`: advance, append, finish, free.

        `tokens` is aligned with `plan.scheduled`; None where none was drawn or none is to be kept.
        `finished` says who ends here, and must hold everyone whose `max_tokens` is reached.
        Requests aborted since `schedule` are passed over. A step that failed is committed with
        ERROR for all its requests: nothing that those computed is ever shared again.
        """
        if plan is not self._uncommitted:
            raise RuntimeError("commit() takes the plan of the last schedule(), once")
        if len(tokens) != len(plan.scheduled):
            raise ValueError(f"{len(plan.scheduled)} rows were scheduled, got {len(tokens)} tokens")
        self._uncommitted = NO_PLAN
        for row, token in zip(plan.scheduled, tokens, strict=True):
            if not row.writes:
                self.counters.computed_rows += 1
            elif row.request.status is RequestStatus.RUNNING:
                self._commit_row(row, token, finished.get(row.request))
        for request in finished:
            assert request.status is RequestStatus.FINISHED, f"{request} was not in the plan"
        self._policy.settle(len(self._running))

    def start_over(self) -> None:
        """After `schedule` or `commit` was broken off at any point: what waits is all there is.

        Everything else is finished with ERROR, and the cache holds nothing. Only who waits is taken
        from what there was; whatever else follows from that, and half of it may be wrong by now.
        """
        ranks, self._ranks, self._choices = self._ranks, {}, {}
        self._waiting, self._deadlines, self._running = RankedQueue(), RankedQueue(), []
        self._uncommitted = NO_PLAN
        self._policy.lingering.clear()
        self.pool.reset()
        for request, rank in ranks.items():
            request.num_computed_tokens = 0
            if request.status is RequestStatus.WAITING:
                self._enter(request, rank)
            else:
                request.status = RequestStatus.FINISHED
                request.finish_reason = FinishReason.ERROR

    def take_freed(self) -> list[int]:
        """Blocks whose content became garbage; asked between `schedule` and the step, by audits."""
        return self.pool.take_freed()

    def check_integrity(self) -> None:
        """Check every invariant of the queues, the requests and the pool. Raises RuntimeError."""
        self.pool.check_integrity()
        problems = [
            *self._queue_problems(),
            *self._request_problems(),
            *self._holding_problems(),
        ]
        if problems:
            raise RuntimeError("the scheduler is inconsistent: " + "; ".join(problems))

    def _check_fits(self, request: Request) -> None:
        num_prompt, limit = request.num_window_tokens, self.max_model_len
        if num_prompt == 0:
            raise ValueError("the prompt is empty: at least one token is needed")
        if num_prompt > limit:
            raise ValueError(
                f"the prompt has {num_prompt} tokens, the context holds {limit} (--max-model-len)"
            )
        if self.slide_window is None and num_prompt + request.max_tokens > limit:
            raise ValueError(
                f"{num_prompt} prompt tokens and max_tokens {request.max_tokens} exceed the "
                f"context of {limit}: lower max_tokens, raise --max-model-len, or let the window "
                "slide (--context-overflow slide)"
            )
        num_positions = self._max_context(request)
        num_blocks = self.pool.num_blocks_for(num_positions)
        if num_blocks > self.pool.num_blocks:
            raise ValueError(
                f"the request may need {num_blocks} cache blocks ({num_positions} tokens in blocks "
                f"of {self.pool.block_size}), the cache has {self.pool.num_blocks}: lower "
                "max_tokens or raise --kv-cache-memory-bytes"
            )

    def _max_context(self, request: Request) -> int:
        """The most positions a fresh request ever keeps: its very last token needs no K and V."""
        num_tokens = request.num_window_tokens + max(request.max_tokens, 1) - 1
        return min(num_tokens, self.max_model_len)

    def _expire(self, now: float) -> list[Request]:
        expired: list[Request] = []
        while (entry := self._deadlines.first()) is not None and entry[0][0] <= now:
            expired.append(entry[1])
            self._drop(entry[1], FinishReason.TIMEOUT)
        self.counters.num_expired += len(expired)
        return expired

    def _advance_running(self, draft: Draft) -> None:
        """Rows of one token first, so that no chunk delays a decode; then chunks, in rank order."""
        single: list[tuple[Request, int]] = []
        longer: list[tuple[Request, int]] = []
        for request in self._running:
            num_uncomputed = request.num_uncomputed_tokens
            (single if num_uncomputed == 1 else longer).append((request, num_uncomputed))
        for request, num_uncomputed in itertools.chain(single, longer):
            # Someone before it may have needed its blocks.
            if request.status is RequestStatus.RUNNING:
                self._advance(request, num_uncomputed, draft)

    def _advance(self, request: Request, num_uncomputed: int, draft: Draft) -> None:
        num_tokens = self._num_affordable(num_uncomputed, draft.budget)
        if num_tokens == 0:
            return
        table = self._book(request, request.num_computed_tokens + num_tokens, draft)
        if table is not None:
            draft.put(planned_row(request, num_tokens, table, samples=num_tokens == num_uncomputed))

    def _num_affordable(self, num_uncomputed: int, budget: int) -> int:
        if num_uncomputed <= budget:
            return num_uncomputed
        return 0 if self._keeps_nothing else budget

    def _book(self, request: Request, num_tokens: int, draft: Draft) -> tuple[int, ...] | None:
        """The table of a running request, grown; preempts the newest until there are blocks.

        None if that was `request` itself.
        """
        while (table := self.pool.book(request, num_tokens)) is None:
            victim = self._running.pop()
            self._preempt(victim, draft)
            if victim is request:
                return None
        return table

    def _preempt(self, request: Request, draft: Draft) -> None:
        """Back to waiting, to be recomputed. Its rank is what it was: it is before its class."""
        draft.take_back(request)
        draft.preempted.append(request)
        release(self.pool, request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._waiting.push(self._ranks[request], request)

    def _repeat_finished(self, draft: Draft) -> None:
        """The rows of finished requests whose batch still runs, as far as the budget goes."""
        for request, num_context in self._policy.lingering.items():
            start = 0 if self._keeps_nothing else num_context - 1
            if num_context - start <= draft.budget:
                draft.put(
                    ScheduledRequest(
                        request=request,
                        start=start,
                        num_tokens=num_context - start,
                        block_table=self.pool.table(request),
                        samples=False,
                        writes=False,
                    )
                )

    def _admit(self, draft: Draft) -> None:
        """Let waiting requests join, strictly in order: the first that cannot holds up the rest.

        But for choices that wait for their sibling's prompt: those behind them need not.
        """
        if not self._waiting or not self._policy.opens(len(self._running), draft.budget):
            return
        waiting_for_siblings: list[Request] = []
        while len(self._running) < self.max_num_seqs:
            head = self._waiting.first()
            if head is None:
                break
            if self._awaits_sibling(head[1]):
                waiting_for_siblings.append(self._waiting.pop())
            elif not self._join(head[1], draft):
                break
        for request in waiting_for_siblings:
            self._waiting.push(self._ranks[request], request)

    def _awaits_sibling(self, request: Request) -> bool:
        """Whether a running sibling is computing the prompt that `request` will fork from."""
        if self._keeps_nothing or not self._policy.forks_prompts:
            return False
        holder = self._prompt_holder(request) if self._may_be_spared(request) else None
        return holder is not None and holder.num_computed_tokens < len(request.prompt_token_ids)

    def _join(self, request: Request, draft: Draft) -> bool:
        """Make `request` run, all blocks of its window booked; False if it must wait."""
        spared = self._find_spared(request)
        num_window = request.num_window_tokens
        num_uncomputed = num_window - spared.num_tokens
        num_tokens = self._num_affordable(num_uncomputed, draft.budget)
        num_worst_blocks = self.pool.num_blocks_for(self._max_context(request))
        if not self._policy.accepts(num_worst_blocks, num_tokens):
            return False
        table = self.pool.share(request, spared.blocks, num_window)
        if table is None:
            return False
        self._start(request, spared)
        if spared.copied_block is not None:
            draft.block_copies.append((spared.copied_block, table[len(spared.blocks)]))
        if num_tokens:
            draft.put(planned_row(request, num_tokens, table, samples=num_tokens == num_uncomputed))
        return True

    def _start(self, request: Request, spared: Spared) -> None:
        self._waiting.pop()
        insort(self._running, request, key=self._ranks.__getitem__)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = spared.num_tokens
        if request.num_preemptions == 0:
            request.num_cached_tokens = spared.num_tokens
        if spared.is_fork:
            self.counters.num_forks += 1
        elif self.pool.enable_prefix_caching and self._may_be_spared(request):
            self.counters.prefix_query_tokens += request.num_window_tokens
            self.counters.prefix_hit_tokens += spared.num_tokens

    def _may_be_spared(self, request: Request) -> bool:
        """Log-probabilities of the prompt need every row of it; the first choice reports them."""
        return request.params.prompt_logprobs is None or request.choice > 0

    def _find_spared(self, request: Request) -> Spared:
        """The most that others computed already.

        At least one token is left to compute: the row of the last one gives the logits.
        """
        if self._keeps_nothing or not self._may_be_spared(request):
            return Spared()
        holder = self._prompt_holder(request) if self._policy.forks_prompts else None
        if holder is None:
            return self._look_up(request)
        num_prompt = len(request.prompt_token_ids)
        blocks, copied_block = self.pool.split(holder, num_prompt - 1)
        fork = Spared(num_prompt - 1, blocks, copied_block, is_fork=True)
        if not request.output_token_ids:
            return fork
        # Preempted before: blocks of its own output may still be cached.
        return max(fork, self._look_up(request), key=lambda spared: spared.num_tokens)

    def _prompt_holder(self, request: Request) -> Request | None:
        """A running sibling whose window begins with the prompt; one that computed it, if any."""
        holder = None
        if request.window_start == 0:
            for sibling in self._choices[request.request_id].values():
                if sibling.status is RequestStatus.RUNNING and sibling.window_start == 0:
                    holder = sibling
                    if holder.num_computed_tokens >= len(request.prompt_token_ids):
                        break
        return holder

    def _look_up(self, request: Request) -> Spared:
        blocks, num_tokens = self.pool.match(
            request.window_tokens(0, request.num_window_tokens - 1)
        )
        return Spared(num_tokens, blocks)

    def _commit_row(
        self, row: ScheduledRequest, token: int | None, reason: FinishReason | None
    ) -> None:
        request = row.request
        num_context = row.start + row.num_tokens
        request.num_computed_tokens = num_context
        if reason is FinishReason.ERROR:
            self.pool.forget(request)
        else:
            self._register(request, row.start, num_context)
        self.counters.computed_rows += row.samples
        self.counters.asked_rows += row.samples
        if token is not None:
            assert row.samples, f"a token for a row that does not reach the end: {request}"
            request.output_token_ids.append(token)
        if reason is not None:
            self._leave(request)
            self._close(request, reason)
            self._policy.retire(request, num_context)
        elif row.samples:
            assert token is not None, f"neither a token nor a reason to finish: {request}"
            self._continue(request)

    def _register(self, request: Request, start: int, stop: int) -> None:
        """Offer the blocks that became full between these window positions."""
        size = self.pool.block_size
        if size is None or not self.pool.enable_prefix_caching:
            return
        first, last = start // size, stop // size
        if first < last:
            self.pool.register(request, first, request.window_tokens(first * size, last * size))

    def _continue(self, request: Request) -> None:
        """It drew a token and goes on: if its window is full, slide it."""
        assert len(request.output_token_ids) < request.max_tokens, f"max_tokens reached: {request}"
        if self._keeps_nothing:
            request.num_computed_tokens = 0
        if self.slide_window is not None and request.num_window_tokens >= self.max_model_len:
            release(self.pool, request)
            request.window_start = request.num_tokens - self.slide_window
            request.num_slides += 1
            self.counters.num_slides += 1

    def _drop(self, request: Request, reason: FinishReason) -> None:
        """End a request that is waiting or running, at once and whatever the policy."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self._waiting.discard(request)
        self._close(request, reason)
        release(self.pool, request)
        self._policy.settle(len(self._running))

    def _leave(self, request: Request) -> None:
        rank = self._ranks.__getitem__
        del self._running[bisect_left(self._running, rank(request), key=rank)]

    def _close(self, request: Request, reason: FinishReason) -> None:
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._ranks[request]
        self._deadlines.discard(request)
        siblings = self._choices[request.request_id]
        del siblings[request.choice]
        if not siblings:
            del self._choices[request.request_id]

    def _queue_problems(self) -> Iterator[str]:
        running, waiting = set(self._running), set(self._waiting)
        ranks = [self._ranks[request] for request in self._running]
        if ranks != sorted(ranks):
            yield f"running requests are out of order: {ranks}"
        if running & waiting or running | waiting != set(self._ranks):
            yield "waiting, running and ranked requests do not agree"
        choices = {r for siblings in self._choices.values() for r in siblings.values()}
        if choices != set(self._ranks):
            yield "the requests known by id are not the unfinished ones"
        if set(self._deadlines) != {r for r in self._ranks if r.deadline_s is not None}:
            yield "the deadlines are not those of the unfinished requests"
        if len(running) + len(self._policy.lingering) > self.max_num_seqs:
            yield f"{len(running)} requests run, {len(self._policy.lingering)} linger"
        if self._policy.lingering and not running:
            yield "finished requests linger, but their batch has drained"

    def _request_problems(self) -> Iterator[str]:
        for request in self._waiting:
            if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
                yield f"waiting, but not so inside: {request}"
        for request in self._running:
            if request.status is not RequestStatus.RUNNING or request.num_uncomputed_tokens < 1:
                yield f"running, but nothing to compute: {request}"
            if request.num_window_tokens > self.max_model_len:
                yield f"a window of more than {self.max_model_len} tokens: {request}"
        for request, num_context in self._policy.lingering.items():
            if request.status is not RequestStatus.FINISHED or num_context < 1:
                yield f"lingering with {num_context} computed, but not finished: {request}"

    def _holding_problems(self) -> Iterator[str]:
        holders = {*self._running, *self._policy.lingering}
        for owner in self.pool.owners():
            if owner not in holders:
                yield f"blocks are held by one that does not run: {owner!r}"
        for request in holders:
            num_blocks = self.pool.num_blocks_for(request.num_computed_tokens)
            if len(self.pool.table(request)) < num_blocks:
                yield f"{num_blocks} blocks were computed, but not all are held: {request}"
