"""The engine: requests in, deltas out, one step at a time; where decisions meet tensors.

A step is one sentence: the scheduler plans, the executor computes, the engine commits what was
sampled. Nothing here knows prefill from decode, one cache layout from another, or one executor from
another. Not thread-safe: whoever owns an engine calls it from one thread.
"""

from __future__ import annotations

import math
import operator
import secrets
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from nanoserve.config import EngineConfig
from nanoserve.engine.audit import CacheAudit
from nanoserve.engine.batch import LogitRow, StepBatch, StepResult, build_batch
from nanoserve.engine.build import EngineParts, build_parts, check_donor, make_shadow
from nanoserve.engine.metrics import EngineLog, commit_failed
from nanoserve.engine.sampling import check_token_ids
from nanoserve.engine.sequence import ActiveSequence, RequestGroup, read_tokens
from nanoserve.request import (
    FinishReason,
    Request,
    RequestDelta,
    SamplingParams,
    check_range,
)
from nanoserve.scheduling.plan import NO_PLAN, ScheduledRequest, StepPlan


class StepError(RuntimeError):
    """The executor failed in a step; `request_ids` were in it and are gone. Its cause is chained.

    `deltas` are what `step` would have returned: requests whose deadline had passed.
    """

    def __init__(self, request_ids: list[str], deltas: list[RequestDelta]) -> None:
        super().__init__(f"a step failed; dropped with it: {', '.join(request_ids)}")
        self.request_ids = request_ids
        self.deltas = deltas


class Outcome(NamedTuple):
    """What a step gave: a token or None for each row of the plan, who ended, what callers hear."""

    tokens: list[int | None]
    finished: dict[Request, FinishReason]
    deltas: list[RequestDelta]


class Engine:
    """Continuous-batching generation over one model and one cache.

    `donor` shares its loaded weights, so that arms of a comparison hold them once; ValueError if
    `config` asks for another model than the donor's. `clock` gives seconds; deadlines and metrics
    use nothing else. `poison_freed` is for tests: blocks that the scheduler lets go are filled with
    NaN before anyone reuses them.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        donor: Engine | None = None,
        clock: Callable[[], float] = time.perf_counter,
        poison_freed: bool = False,
    ) -> None:
        if donor is not None:
            check_donor(config, donor.config)
        self.parts: EngineParts = build_parts(
            config, donor.parts if donor else None, track_freed=poison_freed
        )
        self.config: EngineConfig = self.parts.config
        self.model_config = self.parts.model_config
        self.tokenizer = self.parts.tokenizer
        self.executor = self.parts.executor
        self.scheduler = self.parts.scheduler
        self.spec = self.executor.spec
        self.clock = clock
        self.log = EngineLog()
        self.audit: CacheAudit | None = None
        if config.kv_audit > 0:
            self.audit = CacheAudit(config.kv_audit, self.executor, make_shadow(self.parts))
        self.poison_freed = poison_freed
        self._groups: dict[str, RequestGroup] = {}
        self._is_stepping = False
        self._is_settled = True  # scheduler, log and groups agree, as they do between steps
        self._plan = NO_PLAN  # of the step that is running
        self._late_aborts: list[str] = []

    @property
    def has_unfinished(self) -> bool:
        return bool(self._groups)

    @property
    def idle_s(self) -> float:
        """Seconds for which a step would do nothing: 0, unless a static batch waits for company."""
        held_until = self.scheduler.held_until()
        return 0.0 if held_until is None else max(0.0, held_until - self.clock())

    def is_active(self, request_id: str) -> bool:
        """Is it queued or running? False once it ended, was aborted or was lost with a step."""
        return request_id in self._groups

    def describe(self) -> dict[str, str]:
        """What really runs; every record of a measurement carries this."""
        return {
            "model": self.parts.checkpoint.name,
            "weights": "random" if self.parts.checkpoint.kind == "dummy" else "trained",
            "dtype": self.spec.dtype,
            "kv_layout": self.spec.layout,
            "kv_cache_dtype": self.spec.cache_dtype,
            "device": self.spec.device,
        } | self.executor.describe()

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt: str | None = None,
        arrival_s: float | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> None:
        """Queue a request. Lower `priority` runs first; after `timeout_s` it ends as TIMEOUT.

        Raises ValueError, and queues nothing, for a prompt that is empty, holds an id outside the
        vocabulary or does not fit the context; for parameters that this model cannot honour; for an
        id that is empty or in use; for a `priority` that is no int, an arrival that is not finite
        or a timeout that is not positive and finite; and for a request that the cache could never
        hold. Token ids may be of any integral type (numpy's too): they are kept as ints.
        """
        params = params or SamplingParams()
        self._check_id(request_id)
        check_order(priority, arrival_s, timeout_s)
        token_ids = tuple(map(as_token_id, prompt_token_ids))  # one, for however many choices
        self._check_prompt(token_ids, params.max_tokens)
        check_token_ids(params, self.model_config.vocab_size)
        arrival_s = self.clock() if arrival_s is None else arrival_s
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        max_tokens = self._resolve_max_tokens(len(token_ids), params.max_tokens)
        requests = [
            Request(
                request_id=request_id,
                choice=choice,
                prompt_token_ids=token_ids,
                params=params,
                max_tokens=max_tokens,
                seed=seed,
                arrival_s=arrival_s,
                priority=priority,
                deadline_s=None if timeout_s is None else arrival_s + timeout_s,
            )
            for choice in range(params.num_choices)
        ]
        for request in requests:  # alike in size: the first is refused, or none
            self.scheduler.add(request)
        accounts = [self.log.arrived(request) for request in requests]
        if self.audit is not None:
            for account in accounts:
                account.audit = self.audit.tally(account.request)
        self._groups[request_id] = RequestGroup(
            accounts,
            prompt,
            self.tokenizer,
            self.parts.eos_token_ids,
        )

    def _check_id(self, request_id: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")
        if request_id in self._groups:
            raise ValueError(f"request id {request_id!r} is in use")

    def _check_prompt(self, token_ids: Sequence[int], max_tokens: int | None) -> None:
        """Only a prompt that nothing is to follow (`max_tokens` 0) may fill the context."""
        limit, vocab_size = self.spec.max_model_len, self.model_config.vocab_size
        if not token_ids:
            raise ValueError("the prompt is empty: at least one token is needed")
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})"
                )
        longest = limit if max_tokens == 0 else limit - 1
        if len(token_ids) > longest:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens and the context holds {limit} "
                f"(--max-model-len): a prompt may have at most {longest}"
            )

    def _resolve_max_tokens(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """The cap after the context's end: clamped, or refused under `strict_context`."""
        scheduling = self.config.scheduler
        room = self.spec.max_model_len - num_prompt_tokens
        if max_tokens is None:
            return room
        if max_tokens <= room or scheduling.context_overflow == "slide":
            return max_tokens
        if scheduling.strict_context:
            raise ValueError(
                f"prompt ({num_prompt_tokens}) + max_tokens ({max_tokens}) is "
                f"{num_prompt_tokens + max_tokens} tokens, the context holds "
                f"{self.spec.max_model_len} (--strict-context refuses what would be cut)"
            )
        return room

    def abort(self, request_id: str) -> bool:
        """Drop a request in whatever state it is; its blocks are free at once. False: not known.

        Called from inside a step (a finalizer may run anywhere), it takes effect when that ends.
        """
        if self._is_stepping and request_id in self._groups:
            self._late_aborts.append(request_id)
            return True
        group = self._groups.pop(request_id, None)
        if group is None:
            return False
        for request in self.scheduler.abort(request_id):
            self.log.aborted(request)
        return True

    def step(self) -> list[RequestDelta]:
        """Plan, execute, commit: every scheduled request advances once.

        Raises StepError if the step could not be computed: its requests are dropped, the others
        go on with the next. So does an interrupt (Ctrl-C), which is passed on as it came; where it
        struck outside the executor, all that had begun is dropped, and what only waited goes on.
        """
        self._is_stepping, self._is_settled = True, False
        try:
            return self._step()
        except BaseException:
            if not self._is_settled:
                self._start_over()
            raise
        finally:
            self._is_stepping, self._is_settled, self._plan = False, True, NO_PLAN
            while self._late_aborts:
                self.abort(self._late_aborts.pop())

    def _step(self) -> list[RequestDelta]:
        now = self.clock()
        self._plan = plan = self.scheduler.schedule(now)
        self.log.planned(plan, now)
        deltas = self._expire(plan) if plan.expired else []
        if plan.scheduled:
            outcome = self._compute(plan, deltas)
            self.scheduler.commit(plan, outcome.tokens, outcome.finished)
            deltas += self._release(outcome.deltas)
        return deltas

    def _compute(self, plan: StepPlan, deltas: list[RequestDelta]) -> Outcome:
        """Execute the plan and read what it gave; whatever stops that, the plan does not linger."""
        try:
            if self.poison_freed:
                self._poison(self.scheduler.take_freed())
            result = self._execute(plan)
            now = self.clock()
            self.log.executed(now)
            return self._read(plan, result, now)
        except BaseException as error:
            failed = self._fail(plan)
            if isinstance(error, Exception):
                raise StepError(failed, deltas) from error
            raise

    def _execute(self, plan: StepPlan) -> StepResult:
        batch = self._build_batch(plan)
        if self.audit is None:
            return self.executor.execute(batch)
        return self.audit.execute(plan, batch, lambda request: self.log.active[request].audit)

    def _poison(self, blocks: list[int]) -> None:
        self.executor.poison(blocks)
        if self.audit is not None:
            self.audit.shadow.poison(blocks)

    def _fail(self, plan: StepPlan) -> list[str]:
        """Drop the requests of a step that could not be computed; their ids."""
        self.log.executed(self.clock(), failed=True)
        ended = commit_failed(self.scheduler, plan)
        for request in ended:
            self.log.ended(request, FinishReason.ERROR)
        failed = sorted({request.request_id for request in ended})
        self._late_aborts += failed
        self._is_settled = True
        return failed

    def _start_over(self) -> None:
        """After an interrupt anywhere in a step: drop every request but those that only waited.

        A request whose delta may be lost with the step is dropped too, however far it came.
        """
        self.scheduler.start_over()
        self.log.interrupted()
        touched = {row.request.request_id for row in self._plan.scheduled}
        touched |= {request.request_id for request in self._plan.expired}
        for request_id, group in list(self._groups.items()):
            if request_id in touched or not group.only_waits:
                self._late_aborts.append(request_id)

    def _build_batch(self, plan: StepPlan) -> StepBatch:
        return build_batch(
            plan,
            self._logit_rows,
            block_size=self.spec.block_size,
            scratch_block=self.spec.num_blocks,
        )

    def _sequence(self, request: Request) -> ActiveSequence:
        return self._groups[request.request_id].sequences[request.choice]

    def _logit_rows(self, item: ScheduledRequest) -> list[LogitRow]:
        return self._sequence(item.request).logit_rows(item) if item.writes else []

    def _read(self, plan: StepPlan, result: StepResult, now: float) -> Outcome:
        """Take the rows of a step into their sequences."""
        outcome = Outcome([], {}, [])
        rows = read_tokens(result)
        for item in plan.scheduled:
            outcome.tokens.append(None)
            if not item.writes:
                continue
            sequence = self._sequence(item.request)
            if sequence.scores_prompt:
                sequence.read_prompt_rows(item, rows)
            if item.samples:
                delta = sequence.read(next(rows), now)
                outcome.tokens[-1] = delta.token_ids[0] if delta.token_ids else None
                if delta.finish_reason is not None:
                    outcome.finished[item.request] = delta.finish_reason
                outcome.deltas.append(delta)
        return outcome

    def _expire(self, plan: StepPlan) -> list[RequestDelta]:
        return self._release(
            [self._sequence(request).end(FinishReason.TIMEOUT) for request in plan.expired]
        )

    def _release(self, deltas: list[RequestDelta]) -> list[RequestDelta]:
        """What callers may see; requests whose last choice ended are forgotten here."""
        released: list[RequestDelta] = []
        for delta in deltas:
            group = self._groups[delta.request_id]
            released += group.release(delta)
            if delta.finish_reason is not None:
                self.log.ended(group.sequences[delta.index].request, delta.finish_reason)
            if group.is_finished:
                del self._groups[delta.request_id]
        return released


def as_token_id(value: object) -> int:
    """`value` as an int. Raises ValueError unless it is integral and no bool."""
    if isinstance(value, bool):
        raise ValueError(f"a prompt token id must be an integer, got {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"a prompt token id must be an integer, got {value!r}") from None


def check_order(priority: int, arrival_s: float | None, timeout_s: float | None) -> None:
    """Raise ValueError for what the scheduler's queues could not sort by, or a time already up."""
    check_range("priority", priority, -math.inf, math.inf, integer=True)
    check_range("arrival_s", arrival_s, -math.inf, math.inf, optional=True)
    check_range("timeout_s", timeout_s, 0.0, math.inf, optional=True)
    if timeout_s == 0:
        raise ValueError(f"timeout_s must be more than 0, got {timeout_s}")
