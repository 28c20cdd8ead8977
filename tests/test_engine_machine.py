"""Anything may happen to an engine, in any order, and every text is still the oracle's.

Requests of all kinds arrive, are aborted, time out, break and are lost in failed steps, over every
layout, tight pools, small budgets, both policies, with and without windows that slide. After every
step the scheduler's invariants hold, and at the end nothing is left and the log replays. The test
fails unless, over all runs, each thing that an engine can do was done.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import oracle
import pytest
from helpers import (
    NUM_TOKEN_IDS,
    assert_nothing_left,
    assert_replays,
    break_rows_of,
    fail_once,
    pool_bytes,
    tiny_engine,
    tiny_model,
    watch,
)
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

from nanoserve.engine.engine import StepError
from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestOutput,
    SamplingParams,
)

WINDOW, KEPT = 32, 16
BEGINNINGS = ([5, 9, 200, 14, 77, 3, 3, 120, 61, 8, 300, 41], [7], [301, 302, 44, 45, 46, 47, 350])
CLOSE_CALL = 1e-4
"""A logit or probability margin that a last bit may turn; measured errors are some 1e-6."""


def assert_is_the_oracles(
    output: RequestOutput, choice: CompletionOutput, params: SamplingParams
) -> None:
    """Each token follows from those before it in its window. Whatever ended the text, all do."""
    model, context = tiny_model(), list(output.prompt_token_ids)
    draws = oracle.uniforms(output.seed, choice.index, len(choice.token_ids) + 1)
    rows = None
    for place, token in enumerate(choice.token_ids):
        if rows is None:  # at the beginning, and after a slide: all that follows, at once
            first, ahead = len(context), WINDOW - len(context)
            text = [*context, *choice.token_ids[place : place + ahead]]
            rows = oracle.logits(model.config, model.weights, text)[:, :NUM_TOKEN_IDS]
        row = rows[len(context) - 1]
        if params.temperature == 0:
            expected, margin = int(row.argmax()), oracle.smallest_margin(row[None])
        else:
            expected, margin = oracle.draw(row, float(draws[place]), params.temperature)
        assert token == expected or margin < CLOSE_CALL, (place, first, margin)
        context.append(token)
        if len(context) == WINDOW:
            context, rows = context[-KEPT:], None


class EngineMachine(RuleBasedStateMachine):
    """One engine, and what was asked of it."""

    batching: ClassVar[str] = "continuous"
    happened: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.asked: dict[str, SamplingParams] = {}
        self.broken: set[str] = set()
        self.num_requests = 0

    @initialize(
        layout=st.sampled_from(("paged", "paged", "slots", "contiguous", "recompute")),
        overflow=st.sampled_from(("error", "slide")),
        budget=st.sampled_from((1, 5, 11, 64)),
        num_blocks=st.sampled_from((8, 10, 14, 20)),
        caching=st.sampled_from((True, True, True, False)),
    )
    def build(
        self, layout: str, overflow: str, budget: int, num_blocks: int, caching: bool
    ) -> None:
        num_positions = 2 * WINDOW if layout == "contiguous" else num_blocks * 4
        self.engine = tiny_engine(
            kv_layout=layout,
            batching=self.batching,
            context_overflow=overflow,
            max_num_batched_tokens=64 if layout == "recompute" else budget,
            block_size=4,
            kv_cache_memory_bytes=pool_bytes(num_positions),
            enable_prefix_caching=caching,
            max_num_seqs=4,
            max_model_len=WINDOW,
            clock=lambda: self.now,
        )
        self.batches = watch(self.engine)
        self.happened.update((layout, self.batching))

    @rule(
        beginning=st.sampled_from(BEGINNINGS),
        ending=st.lists(st.integers(0, 382), max_size=5),
        params=st.builds(
            SamplingParams,
            max_tokens=st.sampled_from((0, 1, 4, 9, 25, 40)),
            temperature=st.sampled_from((0.0, 0.0, 0.7)),
            stop_token_ids=st.sampled_from(((), tuple(range(60)))),
            seed=st.integers(0, 9),
            n=st.sampled_from((1, 1, 2, 3)),
            prompt_logprobs=st.sampled_from((None, None, None, 1)),
        ),
        priority=st.sampled_from((0, 0, 1)),
        timeout_s=st.sampled_from((None, None, 6.0)),
        copies=st.integers(1, 3),
    )
    def add(
        self,
        beginning: list[int],
        ending: list[int],
        params: SamplingParams,
        priority: int,
        timeout_s: float | None,
        copies: int,
    ) -> None:
        for _ in range(copies):
            request_id = f"r{self.num_requests}"
            self.num_requests += 1
            self.asked[request_id] = params
            prompt = [*beginning, *ending]
            self.engine.add(request_id, prompt, params, priority=priority, timeout_s=timeout_s)

    @rule(count=st.sampled_from((1, 2, 5, 20)))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.now += 0.1
            for delta in self.step_or_lose():
                if delta.output is not None:
                    self.finish(delta.output)
            self.engine.scheduler.check_integrity()

    def step_or_lose(self) -> list[RequestDelta]:
        try:
            return self.engine.step()
        except StepError as error:
            self.happened.add("failed step")
            for request_id in error.request_ids:
                del self.asked[request_id]
            return error.deltas

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        group = self.engine._groups[request_id]
        self.happened.update(f"abort {s.request.status.value}" for s in group.sequences)
        assert self.engine.abort(request_id)
        assert not self.engine.abort(request_id)
        del self.asked[request_id]

    @rule(seconds=st.sampled_from((0.5, 3.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def fail(self) -> None:
        fail_once(self.engine)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        break_rows_of(self.engine, request_id)
        self.broken.add(request_id)

    def finish(self, output: RequestOutput) -> None:
        params = self.asked.pop(output.request_id)
        metrics = output.metrics
        self.happened.update(
            name
            for name, count in (
                ("preempted", metrics.num_preemptions),
                ("slid", metrics.num_slides),
                ("cached", metrics.num_cached_tokens),
                ("scored", output.prompt_logprobs is not None),
                ("choices", len(output.outputs) > 1),
            )
            if count
        )
        for choice in output.outputs:
            reason = choice.finish_reason
            assert reason is not None
            self.happened.add(str(reason))
            assert reason is not FinishReason.ERROR or output.request_id in self.broken
            if reason is FinishReason.LENGTH:
                room = WINDOW - len(output.prompt_token_ids)
                slides = self.engine.config.scheduler.context_overflow == "slide"
                assert params.max_tokens is not None
                most = params.max_tokens if slides else min(params.max_tokens, room)
                assert len(choice.token_ids) == most
            assert_is_the_oracles(output, choice, params)

    @invariant()
    def the_engine_remembers_what_was_asked(self) -> None:
        assert self.engine._groups.keys() == self.asked.keys()

    def note_steps(self) -> None:
        """What the batches and the counters show."""
        for batch in self.batches:
            sizes = np.diff(batch.query_starts)
            if ((sizes > 1) & (batch.context_lens > sizes)).any():
                self.happened.add("chunk over a filled cache")
            if sizes.min() == 1 < sizes.max():
                self.happened.add("prefill beside decodes")
            if len(batch.block_copies):
                self.happened.add("block copied")
        counters = self.engine.scheduler.counters
        if counters.num_forks:
            self.happened.add("forked")
        if counters.prefix_hit_tokens:
            self.happened.add("prefix hit")
        if counters.computed_rows > counters.asked_rows:
            self.happened.add("lingered")

    def teardown(self) -> None:
        assert_replays(self.engine)
        while self.engine.has_unfinished:
            self.step(1)
        self.note_steps()
        assert_nothing_left(self.engine)


class StaticMachine(EngineMachine):
    """A batch drains before the next starts."""

    batching = "static"


EVERYTHING = {
    *("recompute", "contiguous", "slots", "paged", "continuous", "static"),
    *("stop", "length", "timeout", "error", "failed step"),
    *("abort waiting", "abort running"),
    *("preempted", "slid", "cached", "scored", "choices", "forked", "prefix hit", "lingered"),
    *("chunk over a filled cache", "prefill beside decodes", "block copied"),
}


def check_machines(max_examples: int, num_rules: int) -> None:
    EngineMachine.happened.clear()
    for machine, share in ((EngineMachine, 4), (StaticMachine, 1)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                settings.get_profile("ci"),
                max_examples=max_examples * share // 5,
                stateful_step_count=num_rules,
            ),
        )
    assert EngineMachine.happened >= EVERYTHING


def test_whatever_happens_every_text_is_the_oracles() -> None:
    check_machines(max_examples=60, num_rules=40)


@pytest.mark.slow
def test_whatever_happens_at_length() -> None:
    check_machines(max_examples=90, num_rules=50)
