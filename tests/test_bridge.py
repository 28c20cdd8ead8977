"""The bridge and the engine's thread, without HTTP: who gets what, and what is left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asgi import PATIENCE_S, on_loop
from helpers import break_rows_of, fail_once, greedy, prompt_of, run, tiny_engine, tokens_of

from nanoserve.engine.engine import Engine
from nanoserve.request import FinishReason, RequestOutput, SamplingParams
from nanoserve.server.bridge import Bridge, NotServingError, QueueFullError, ServiceRate
from nanoserve.server.engine_thread import Failure, FailureKind, Job
from nanoserve.server.metrics import ServerMetrics
from nanoserve.server.tickets import ClientGoneError, Item, RequestFailedError, Ticket

ENDLESS = greedy(200)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@asynccontextmanager
async def running(
    engine: Engine, *, max_in_flight: int = 64, warm: bool = True
) -> AsyncIterator[Bridge]:
    bridge = Bridge(engine, max_in_flight=max_in_flight, metrics=ServerMetrics("tiny"))
    bridge.start()
    try:
        if warm:
            await until(lambda: bridge.is_ready)
        yield bridge
    finally:
        await bridge.close()


def jobs_of(
    bridge: Bridge,
    ticket: Ticket,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    timeout_s: float | None = None,
) -> list[Job]:
    return [
        Job(
            request_id=f"{id(ticket)}-{index}",
            token_ids=tuple(prompt),
            prompt=None,
            params=params,
            priority=0,
            arrival_s=ticket.arrival_s,
            timeout_s=timeout_s,
        )
        for index, prompt in enumerate(prompts)
    ]


def enter(
    bridge: Bridge, prompts: Sequence[Sequence[int]], params: SamplingParams, **more: Any
) -> Ticket:
    """Admitted and submitted."""
    ticket = bridge.admit()
    bridge.submit(ticket, jobs_of(bridge, ticket, prompts, params, **more))
    return ticket


async def read(ticket: Ticket) -> list[Item]:
    """Everything, to the end."""
    items: list[Item] = []
    while not ticket.is_finished or ticket.has_items:
        items += await ticket.take()
    return items


async def failure_of(ticket: Ticket) -> Failure:
    with pytest.raises(RequestFailedError) as caught:
        await read(ticket)
    return caught.value.failure


def whole(ticket: Ticket) -> list[RequestOutput]:
    assert None not in ticket.outputs
    return [output for output in ticket.outputs if output is not None]


async def assert_nothing_left(bridge: Bridge) -> None:
    """In the loop and in the engine."""
    assert bridge.num_in_flight == 0
    assert not bridge._places
    assert not bridge._tickets
    assert await bridge.ask(bridge.thread.problems) == []
    assert not bridge.engine.has_unfinished
    pool = bridge.engine.scheduler.pool
    assert pool.num_available == pool.num_blocks
    await until(lambda: bridge.load.num_running + bridge.load.num_waiting == 0)
    assert bridge.load.cache_usage == 0


@on_loop
@pytest.mark.parametrize("seconds", [3600.0, 1e300])
async def test_a_static_batch_that_waits_holds_up_no_start_no_abort_and_no_end(
    seconds: float,
) -> None:
    """1e300: longer than the system can wait, which must not end the thread."""
    engine = tiny_engine(batching="static", batching_timeout=seconds, max_num_seqs=2)
    async with running(engine) as bridge:
        gone = enter(bridge, [prompt_of(5)], ENDLESS)
        await until(lambda: bridge.load.num_waiting == 1)
        bridge.leave(gone)
        await until(lambda: bridge.load.num_waiting == 0)
        tickets = [enter(bridge, [prompt_of(n)], greedy(4)) for n in (3, 6)]
        for ticket in tickets:
            await read(ticket)
        for ticket in tickets:
            bridge.leave(ticket)
        await assert_nothing_left(bridge)
        held = enter(bridge, [prompt_of(5)], ENDLESS)
        await until(lambda: bridge.load.num_waiting == 1)
        bridge.leave(held)


@on_loop
async def test_each_gets_its_own_tokens() -> None:
    prompts, params = [prompt_of(n, n) for n in (3, 17, 40)], greedy(12)
    expected = run(tiny_engine(), prompts, params)
    async with running(tiny_engine()) as bridge:
        alone = [enter(bridge, [prompt], params) for prompt in prompts]
        together = enter(bridge, prompts, params)
        for ticket, output in zip(alone, expected, strict=True):
            items = await read(ticket)
            assert [i for item in items for i in item.delta.token_ids] == tokens_of(output)
        items = await read(together)
        for index, output in enumerate(expected):
            got = [i for item in items if item.prompt_index == index for i in item.delta.token_ids]
            assert got == tokens_of(output) == tokens_of(whole(together)[index])
        for ticket in (*alone, together):
            bridge.leave(ticket)
        await assert_nothing_left(bridge)
        assert bridge.metrics.num_generated_tokens == 2 * 3 * 12
        assert bridge.metrics.num_prompt_tokens == 2 * 60
        assert bridge.metrics.ends["length"] == 6


@on_loop
async def test_the_loop_is_woken_once_a_step() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    async with running(engine) as bridge:
        steps, reports = engine.log.num_steps, []
        hear = bridge._hear
        bridge._hear = lambda report: (reports.append(report), hear(report))[1]  # type: ignore[method-assign]
        ticket = enter(bridge, [prompt_of(5, n) for n in range(4)], greedy(6, n=2))
        await read(ticket)
        bridge.leave(ticket)
        assert len(reports) == engine.log.num_steps - steps
        assert max(len(report.deltas) for report in reports) == 8


@on_loop
async def test_a_plain_answer_is_not_woken_for_each_token() -> None:
    async with running(tiny_engine()) as bridge:
        ticket = bridge.admit()
        ticket.wants_deltas = False
        bridge.submit(ticket, jobs_of(bridge, ticket, [[1, 2], [3]], greedy(20)))
        items = await ticket.take()
        assert ticket.is_finished
        assert len(items) == 1
        assert [len(tokens_of(output)) for output in whole(ticket)] == [20, 20]
        bridge.leave(ticket)


@on_loop
async def test_the_prompts_of_one_request_are_taken_all_or_none() -> None:
    async with running(tiny_engine()) as bridge:
        ticket = enter(bridge, [[1, 2], [3, 99_999], [4]], ENDLESS)
        failure = await failure_of(ticket)
        assert failure.kind is FailureKind.REFUSED
        assert "99999" in failure.message
        bridge.leave(ticket)
        await assert_nothing_left(bridge)
        assert bridge.metrics.ends["abort"] == bridge.metrics.ends["error"] == 0


@on_loop
async def test_whoever_leaves_is_dropped_within_one_step() -> None:
    engine = tiny_engine(max_num_seqs=2)
    async with running(engine) as bridge:
        tickets = [enter(bridge, [prompt_of(9, n)], ENDLESS) for n in range(3)]
        for ticket in tickets[:2]:
            await ticket.take()
        await until(lambda: bridge.load.num_waiting == 1)
        before = engine.log.num_steps
        for ticket in reversed(tickets):
            bridge.leave(ticket)
            bridge.leave(ticket)  # a second time changes nothing
        await assert_nothing_left(bridge)
        assert engine.log.num_steps - before <= 2
        assert bridge.metrics.ends["abort"] == 3


@on_loop
async def test_many_come_and_go() -> None:
    engine = tiny_engine(max_num_seqs=4, kv_cache_memory_bytes=400_000)
    async with running(engine, max_in_flight=200) as bridge:
        for round_ in range(20):
            tickets = [
                enter(bridge, [prompt_of(5 + n, round_)], greedy(30, n=1 + n % 3)) for n in range(8)
            ]
            await asyncio.sleep(0.001 * (round_ % 4))
            for ticket in tickets:
                bridge.leave(ticket)
        last = enter(bridge, [[1, 2, 3]], greedy(5))
        await read(last)
        assert tokens_of(whole(last)[0]) == tokens_of(run(tiny_engine(), [[1, 2, 3]], greedy(5))[0])
        bridge.leave(last)
        await assert_nothing_left(bridge)


@on_loop
async def test_no_more_than_the_limit_are_let_in() -> None:
    async with running(tiny_engine(max_num_seqs=2), max_in_flight=3) as bridge:
        tickets = [enter(bridge, [[n]], ENDLESS) for n in range(3)]
        with pytest.raises(QueueFullError) as caught:
            bridge.admit()
        assert caught.value.num_in_flight == 3
        assert caught.value.retry_after_s == 1.0
        assert bridge.metrics.num_refused == 1
        bridge.leave(tickets.pop())
        tickets.append(bridge.admit())
        for ticket in tickets:
            bridge.leave(ticket)
        await assert_nothing_left(bridge)


def test_the_service_rate_is_measured_over_the_recent_past() -> None:
    rate = ServiceRate(window_s=10.0)
    rate.began(0.0)
    assert rate.per_second(0.0) is None
    rate.finished(1.0)
    assert rate.per_second(2.0) is None
    for at in (2.0, 3.0, 4.0, 5.0):
        rate.finished(at)
    assert rate.per_second(6.0) == pytest.approx(1.0)
    assert rate.per_second(13.5) == pytest.approx(2 / 9.5)  # 4.0 and 5.0
    assert rate.per_second(30.0) is None


def test_a_quiet_spell_does_not_lower_the_service_rate() -> None:
    rate = ServiceRate()
    for start in (0.0, 100.0, 200.0):
        rate.began(start)
        rate.began(start + 0.5)  # a second one, while the first is served
        rate.finished(start + 1.0)
        rate.finished(start + 2.0)
        rate.rested(start + 2.0)
    assert rate.per_second(250.0) == pytest.approx(6 / 5)  # six from the first end on, in 5 s


@on_loop
async def test_retry_after_follows_the_rate_and_has_a_limit() -> None:
    now = [0.0]
    async with running(tiny_engine(clock=lambda: now[0]), max_in_flight=4) as bridge:
        tickets = [bridge.admit() for _ in range(4)]
        for at in range(8):
            bridge.rate.finished(now[0] + at)
        now[0] = 8.0
        assert bridge.retry_after_s() == pytest.approx(4.0)
        bridge.rate = ServiceRate(window_s=1e6)
        bridge.rate.began(0.0)
        bridge.rate.finished(0.0)
        bridge.rate.finished(1.0)
        now[0] = 900.0
        assert bridge.retry_after_s() == 120.0
        for ticket in tickets:
            bridge.leave(ticket)


@on_loop
async def test_a_failed_step_fails_its_requests_and_no_others() -> None:
    engine = tiny_engine()
    async with running(engine) as bridge:
        lost = enter(bridge, [prompt_of(4)], ENDLESS)
        await lost.take()
        await bridge.ask(lambda: fail_once(engine))
        failure = await failure_of(lost)
        assert failure.kind is FailureKind.STEP
        assert failure.request_ids == lost.request_ids
        assert "hiccup" not in failure.message
        bridge.leave(lost)
        later = enter(bridge, [prompt_of(4)], greedy(3))
        await read(later)
        bridge.leave(later)
        await assert_nothing_left(bridge)
        assert bridge.load.num_failed_steps == 1
        assert bridge.metrics.ends["error"] == 1
        assert bridge.metrics.ends["length"] == 1


@on_loop
async def test_a_broken_row_fails_its_request_alone() -> None:
    engine = tiny_engine()
    async with running(engine) as bridge:
        other = enter(bridge, [prompt_of(6, 1)], greedy(30))
        broken = enter(bridge, [prompt_of(6, 2)], ENDLESS)
        await broken.take()
        await bridge.ask(lambda: break_rows_of(engine, broken.request_ids[0]))
        assert (await failure_of(broken)).kind is FailureKind.BROKEN
        bridge.leave(broken)
        await read(other)
        assert whole(other)[0].outputs[0].finish_reason is FinishReason.LENGTH
        bridge.leave(other)
        await assert_nothing_left(bridge)
        assert bridge.metrics.num_broken == 1


@on_loop
async def test_a_deadline_ends_the_request() -> None:
    async with running(tiny_engine()) as bridge:
        ticket = enter(bridge, [prompt_of(4)], ENDLESS, timeout_s=1e-9)
        assert (await failure_of(ticket)).kind is FailureKind.TIMEOUT
        bridge.leave(ticket)
        await assert_nothing_left(bridge)
        assert bridge.metrics.ends["timeout"] == 1


@on_loop
async def test_what_nobody_foresaw_ends_what_is_in_flight_and_not_the_thread() -> None:
    engine = tiny_engine()
    async with running(engine) as bridge:
        tickets = [enter(bridge, [prompt_of(4, n)], ENDLESS) for n in range(2)]
        for ticket in tickets:
            await ticket.take()

        def explode() -> None:
            raise ZeroDivisionError

        bridge.thread.post(explode)
        for ticket in tickets:
            assert (await failure_of(ticket)).kind is FailureKind.FAULT
            bridge.leave(ticket)
        assert bridge.is_ready
        later = enter(bridge, [prompt_of(4)], greedy(3))
        await read(later)
        bridge.leave(later)
        await assert_nothing_left(bridge)


@on_loop
async def test_books_that_do_not_balance_end_the_service() -> None:
    engine = tiny_engine()
    async with running(engine) as bridge:
        ticket = enter(bridge, [prompt_of(4)], ENDLESS)
        await ticket.take()

        def corrupt() -> None:
            engine.scheduler.pool._free.append(0)
            raise ZeroDivisionError

        bridge.thread.post(corrupt)
        assert (await failure_of(ticket)).kind is FailureKind.FAULT
        bridge.leave(ticket)
        await until(lambda: bridge.thread.fault is not None)
        assert not bridge.is_ready
        assert "failed" in bridge.why_not_ready
        with pytest.raises(NotServingError, match="failed"):
            bridge.admit()


@on_loop
async def test_nobody_is_served_by_an_engine_that_cannot_warm_up() -> None:
    engine = tiny_engine()

    def fail() -> None:
        raise RuntimeError("no such kernel")

    engine.executor.warm_up = fail  # type: ignore[method-assign]
    async with running(engine, warm=False) as bridge:
        await until(lambda: bridge.thread.fault is not None)
        assert not bridge.is_ready
        with pytest.raises(NotServingError):
            bridge.admit()


@on_loop
async def test_warming_up_takes_a_real_request_and_counts_nothing() -> None:
    engine = tiny_engine()
    let_go, warm_up = threading.Event(), engine.executor.warm_up
    engine.executor.warm_up = lambda: (let_go.wait(PATIENCE_S), warm_up())[1]  # type: ignore[method-assign]
    async with running(engine, warm=False) as bridge:
        early = enter(bridge, [[1, 2]], greedy(2))  # waits for the warm-up and is then served
        await asyncio.sleep(0.02)
        assert not bridge.is_ready
        assert "warming up" in bridge.why_not_ready
        let_go.set()
        await read(early)
        bridge.leave(early)
        assert bridge.is_ready
        assert engine.log.finished[0].request.request_id == "warm-up"
        assert len(engine.log.finished[0].request.output_token_ids) == 3
        assert bridge.metrics.num_generated_tokens == 2
        assert bridge.load.counters.prefix_query_tokens <= 2
        await assert_nothing_left(bridge)


@pytest.mark.parametrize("max_model_len", [1, 2, 3])
@on_loop
async def test_the_smallest_contexts_warm_up_too(max_model_len: int) -> None:
    async with running(tiny_engine(max_model_len=max_model_len)) as bridge:
        assert bridge.is_ready
        await assert_nothing_left(bridge)


@on_loop
async def test_draining_lets_those_inside_finish_and_nobody_in() -> None:
    async with running(tiny_engine()) as bridge:
        ticket = enter(bridge, [[1, 2]], greedy(5))
        bridge.drain()
        with pytest.raises(NotServingError, match="shutting down"):
            bridge.admit()
        waiting = asyncio.ensure_future(bridge.wait_idle(PATIENCE_S))
        await read(ticket)
        assert not waiting.done()
        bridge.leave(ticket)
        assert await waiting
        assert await bridge.wait_idle(0.0)


@on_loop
async def test_who_does_not_finish_in_time_is_ended() -> None:
    async with running(tiny_engine()) as bridge:
        ticket = enter(bridge, [[1, 2]], ENDLESS)
        bridge.drain()
        assert not await bridge.wait_idle(0.01)
        bridge.end_all("enough")
        failure = await failure_of(ticket)
        assert (failure.kind, failure.message) == (FailureKind.SHUTDOWN, "enough")
        bridge.leave(ticket)
        assert await bridge.wait_idle(PATIENCE_S)


@on_loop
async def test_questions_are_asked_in_the_engines_thread() -> None:
    async with running(tiny_engine()) as bridge:
        assert await bridge.ask(lambda: threading.current_thread().name) == "nanoserve-engine"
        with pytest.raises(ZeroDivisionError):
            await bridge.ask(lambda: 1 // 0)
        assert bridge.is_ready


@on_loop
async def test_closing_ends_the_thread_and_the_executor() -> None:
    engine, closed = tiny_engine(), []
    close = engine.executor.close
    engine.executor.close = lambda: (closed.append(1), close())[1]  # type: ignore[func-returns-value, method-assign]
    async with running(engine) as bridge:
        ticket = enter(bridge, [[1, 2]], ENDLESS)
        await ticket.take()
        thread = bridge.thread._thread
    assert not thread.is_alive()
    assert closed == [1]
    assert (await failure_of(ticket)).kind is FailureKind.SHUTDOWN
    with pytest.raises(NotServingError):
        bridge.admit()


@on_loop
async def test_nobody_is_let_in_before_the_start() -> None:
    bridge = Bridge(tiny_engine(), max_in_flight=1, metrics=ServerMetrics("tiny"))
    with pytest.raises(NotServingError, match="not running"):
        bridge.admit()
    await bridge.close()


@on_loop
async def test_a_ticket_gives_what_came_before_its_error() -> None:
    failure = Failure(kind=FailureKind.STEP, request_ids=("a",), message="gone")
    async with running(tiny_engine()) as bridge:
        ticket = enter(bridge, [[1, 2]], greedy(3))
        await until(lambda: ticket.is_finished)
        ticket.end(RequestFailedError(failure))
        ticket.end(ClientGoneError())  # the first one counts
        assert not ticket.is_finished
        assert len(await ticket.take()) == 3
        with pytest.raises(RequestFailedError, match="gone"):
            await ticket.take()
        bridge.leave(ticket)


@on_loop
async def test_a_client_that_left_takes_nothing_more() -> None:
    async with running(tiny_engine()) as bridge:
        ticket = enter(bridge, [[1, 2]], greedy(3))
        await until(lambda: ticket.has_items)
        ticket.end(ClientGoneError())
        with pytest.raises(ClientGoneError):
            await ticket.take()
        bridge.leave(ticket)


@on_loop
async def test_a_nudge_returns_with_nothing() -> None:
    ticket = Ticket(0.0)
    waiting = asyncio.ensure_future(ticket.take())
    await asyncio.sleep(0)
    ticket.nudge()
    assert await waiting == []
    ticket.nudge()
    assert await ticket.take() == []


@on_loop
async def test_first_token_and_gaps_are_observed_on_the_engines_clock() -> None:
    now = [0.0]

    def tick() -> float:
        now[0] += 0.001
        return now[0]

    async with running(tiny_engine(clock=tick)) as bridge:
        ticket = enter(bridge, [[1, 2, 3]], greedy(5, n=2))
        await read(ticket)
        bridge.leave(ticket)
        metrics = bridge.metrics
        assert sum(metrics.first_token_s._counts) == 2
        assert sum(metrics.inter_token_s._counts) == 2 * 4
        assert sum(metrics.request_s._counts) == sum(metrics.queue_s._counts) == 1
        assert 0 < metrics.queue_s._sum < metrics.request_s._sum
        parts_s = metrics.queue_s._sum + metrics.prefill_s._sum + metrics.decode_s._sum
        assert parts_s == pytest.approx(metrics.request_s._sum, abs=0.003)  # to a tick or two
