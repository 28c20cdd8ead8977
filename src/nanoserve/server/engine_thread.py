"""The thread that owns the engine: commands in, one report a step out.

Nobody else touches the engine once the thread runs. Commands are plain calls, made between steps,
so an abort takes effect within one step and a look at the engine's insides is never torn. Whatever
goes wrong in a step ends the requests that were in it and no others, and never the thread; if the
scheduler's books do not balance afterwards, `fault` says so for good.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nanoserve.engine.engine import Engine, StepError
from nanoserve.request import RequestDelta, SamplingParams
from nanoserve.scheduling.scheduler import SchedulerCounters

logger = logging.getLogger(__name__)

WARM_UP_ID = "warm-up"
WARM_UP_TOKENS = 16
JOIN_TIMEOUT_S = 10.0
"""How long a step may still take when the server ends; the thread is a daemon."""

Command = Callable[[], None]


class FailureKind(enum.Enum):
    """Why a request ends without its answer."""

    REFUSED = "refused"  # the engine cannot take it: the caller's mistake
    STEP = "step"  # the step it was in could not be computed
    BROKEN = "broken"  # its row of logits was not finite
    TIMEOUT = "timeout"  # its deadline passed
    SHUTDOWN = "shutdown"  # the server ends
    FAULT = "fault"  # something unforeseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """These requests are gone. `message` is for callers: no cause, no path."""

    kind: FailureKind
    request_ids: tuple[str, ...]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request for the engine; times on the engine's clock."""

    request_id: str
    token_ids: tuple[int, ...]
    prompt: str | None
    params: SamplingParams
    priority: int
    arrival_s: float
    timeout_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the engine has to do, and its totals since it was warm."""

    num_running: int = 0
    num_waiting: int = 0
    cache_usage: float = 0.0  # share of the blocks that are held, 0 to 1
    num_failed_steps: int = 0
    cpu_s: float = 0.0  # processor time of the engine's thread, since it began
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one turn of the thread brought. `now_s`: when its tokens were there, by the engine."""

    deltas: Sequence[RequestDelta]
    failures: Sequence[Failure]
    load: Load
    now_s: float


class EngineThread:
    """Runs `engine` from `start` to `close`; `tell` is called in the thread after every turn.

    `is_ready` turns true once the executor has warmed up and a real request has run. `fault` is
    None, or why no request will be served any more.
    """

    def __init__(self, engine: Engine, tell: Callable[[Report], None]) -> None:
        self.engine = engine
        self.is_ready = False
        self.fault: str | None = None
        self._tell = tell
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._active: set[str] = set()
        self._failures: list[Failure] = []
        self._num_failed_steps = 0
        self._cold = SchedulerCounters()  # what the warm-up itself counted
        self._thread = threading.Thread(target=self._run, name="nanoserve-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, command: Command) -> None:
        """Have `command` called in the thread, before its next step. From any thread.

        What comes too late for the thread is dropped: see `is_closing`.
        """
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue all of them or, where the engine refuses one, none: a failure names them all."""
        self.post(lambda: self._add(jobs))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop those that are still there."""
        self.post(lambda: self._abort(request_ids))

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """End the thread after the step it is in, and close the executor. Blocks until then."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(JOIN_TIMEOUT_S)

    def problems(self) -> list[str]:
        """What does not add up, in words; to be called in the thread."""
        found = []
        try:
            self.engine.scheduler.check_integrity()
        except RuntimeError as error:
            found.append(str(error))
        lost = [name for name in sorted(self._active) if not self.engine.is_active(name)]
        if lost:
            found.append(f"waited for, but unknown to the engine: {', '.join(lost)}")
        if self.engine.has_unfinished and not self._active:
            found.append("the engine works on a request that nobody waits for")
        return found

    def _run(self) -> None:
        self._guard(self._warm_up)
        self._report([])
        while (commands := self._take_commands()) is not None:
            for command in commands:
                self._guard(command)
            if not self._is_closing:
                self._guard(self._turn)
        self.engine.executor.close()

    def _take_commands(self) -> list[Command] | None:
        """Wait for something to do. None: there is nothing more to do."""
        with self._wake:
            while not (self._commands or self._is_closing) and (pause_s := self._pause_s()) != 0:
                self._wake.wait(pause_s)
            if self._is_closing and not self._commands:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def _pause_s(self) -> float | None:
        """How long there will be nothing to do, unless somebody calls; None: for ever."""
        return min(self.engine.idle_s, threading.TIMEOUT_MAX) if self._can_step else None

    @property
    def _can_step(self) -> bool:
        return self.engine.has_unfinished and self.fault is None

    def _guard(self, action: Command) -> None:
        """Whatever `action` raises, the thread lives on."""
        try:
            action()
        except Exception as error:
            logger.exception("unforeseen, in the engine's thread")
            self._recover(error)

    def _warm_up(self) -> None:
        """The executor's own, then a real request, so that the first caller pays for neither."""
        self.engine.executor.warm_up()
        limit = self.engine.spec.max_model_len
        num_prompt = max(1, min(WARM_UP_TOKENS, limit // 2))
        params = SamplingParams(max_tokens=min(3, limit - num_prompt), ignore_eos=True, seed=0)
        # As old as a static batch must be: nobody comes to fill it.
        arrival_s = self.engine.clock() - (self.engine.scheduler.batching_timeout or 0.0)
        self.engine.add(WARM_UP_ID, [0] * num_prompt, params, arrival_s=arrival_s)
        while self.engine.has_unfinished:
            self.engine.step()
        self._cold = replace(self.engine.scheduler.counters)
        self.is_ready = True

    def _turn(self) -> None:
        deltas = self._step() if self._can_step else []
        self._active.difference_update(d.request_id for d in deltas if d.output is not None)
        self._report(deltas)

    def _step(self) -> list[RequestDelta]:
        try:
            return self.engine.step()
        except StepError as error:
            logger.exception("a step failed; the engine goes on")
            self._num_failed_steps += 1
            self._fail(FailureKind.STEP, error.request_ids, "the step it was in failed")
            return error.deltas

    def _report(self, deltas: Sequence[RequestDelta]) -> None:
        failures, self._failures = self._failures, []
        now_s = self.engine.log.steps[-1].ended_s if deltas else self.engine.clock()
        self._tell(Report(deltas=deltas, failures=failures, load=self._load(), now_s=now_s))

    def _load(self) -> Load:
        scheduler, cold = self.engine.scheduler, self._cold
        pool, counters = scheduler.pool, scheduler.counters
        return Load(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            cache_usage=1 - pool.num_available / pool.num_blocks if pool.num_blocks else 0.0,
            num_failed_steps=self._num_failed_steps,
            cpu_s=time.thread_time(),
            counters=replace(
                counters,
                num_preemptions=counters.num_preemptions - cold.num_preemptions,
                prefix_query_tokens=counters.prefix_query_tokens - cold.prefix_query_tokens,
                prefix_hit_tokens=counters.prefix_hit_tokens - cold.prefix_hit_tokens,
            ),
        )

    def _add(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            try:
                self.engine.add(
                    job.request_id,
                    job.token_ids,
                    job.params,
                    prompt=job.prompt,
                    arrival_s=job.arrival_s,
                    priority=job.priority,
                    timeout_s=job.timeout_s,
                )
            except ValueError as error:
                self._abort([j.request_id for j in jobs])
                self._fail(FailureKind.REFUSED, [j.request_id for j in jobs], str(error))
                return
            self._active.add(job.request_id)

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._active:
                self._active.discard(request_id)
                self.engine.abort(request_id)

    def _fail(self, kind: FailureKind, request_ids: Sequence[str], message: str) -> None:
        self._active.difference_update(request_ids)
        self._failures.append(Failure(kind=kind, request_ids=tuple(request_ids), message=message))

    def _recover(self, error: Exception) -> None:
        """Everything in flight ends; the engine goes on, unless its books do not balance."""
        lost = sorted(self._active)
        for request_id in (*lost, WARM_UP_ID):
            try:
                self.engine.abort(request_id)
            except Exception:
                logger.exception("could not drop request %s", request_id)
        self._fail(FailureKind.FAULT, lost, "something unforeseen happened to the engine")
        problems = self.problems()
        if not self.is_ready:
            problems.append(f"the warm-up failed: {type(error).__name__}")
        if problems:
            logger.critical("no request can be served any more: %s", "; ".join(problems))
            self.fault = "; ".join(problems)
