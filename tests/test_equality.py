"""Same tokens, whatever the way: the matrix of layouts, stored precisions and ways to run.

Every cell is held to the dense oracle, which shares no code with the engine: each token is what the
oracle's logits give for the text before it, so by induction the text is the oracle's own. A cell
fails unless its way of running really happened, and unless the oracle's text could have told a
mistake: half of its tokens distinct, and the closest call well above the measured logit error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import oracle
import pytest
from helpers import (
    account_of,
    assert_nothing_left,
    drain,
    greedy,
    outputs_of,
    pool_bytes,
    prompt_of,
    run,
    sizes_seen,
    tiny_engine,
    tiny_model,
    was_recomputed,
    watch,
)

from nanoserve.engine.engine import Engine
from nanoserve.kernels.cpu import library
from nanoserve.llm import LLM
from nanoserve.request import RequestOutput, SamplingParams, TokenLogprob

LAYOUTS = ("contiguous", "slots", "paged", "recompute")
LOGIT_ERROR = {"float32": 1e-4, "float16": 1e-3, "bfloat16": 5e-3, "int8": 2e-2}
"""Largest difference to the oracle, whose keys and values are rounded likewise; in a native bf16
cache queries and weights are rounded too. A value halfway between two that can be stored may be
rounded to either, so the narrow ones have a wider bound."""

STREAMED_ON = "native" if library.available() else "eager"
"""One way runs on the native executor where its core was built; all others on the eager one."""

NUM_TOKENS = 16
TOP = 64

Way = Callable[[str, str], Iterator[RequestOutput]]
"""Runs requests on a layout and a dtype, and proves that it ran them that way."""


@cache
def oracle_rows(
    text: tuple[int, ...], kv_dtype: str, product_dtype: str | None = None
) -> oracle.Float64:
    model = tiny_model()
    return oracle.logits(model.config, model.weights, text, kv_dtype, product_dtype)


def logit_errors(scored: Sequence[TokenLogprob], expected: oracle.Float64) -> oracle.Float64:
    """Row by row, the largest difference of the best tokens' log-probabilities."""
    errors = []
    for entry, row in zip(scored, oracle.log_softmax(expected), strict=True):
        ids, values = zip(*entry.top, (entry.token_id, entry.logprob), strict=True)
        assert len(ids) == TOP + 1
        errors.append(np.abs(row[list(ids)] - values).max())
    return np.array(errors)


def oracle_draws(
    expected: oracle.Float64, temperature: float, seed: int, choice: int
) -> tuple[list[int], oracle.Float64]:
    """The token the oracle draws from each row, and how close a call it was."""
    draws = oracle.uniforms(seed, choice, len(expected)).tolist()
    pairs = [oracle.draw(row, u, temperature) for row, u in zip(expected, draws, strict=True)]
    tokens, distances = zip(*pairs, strict=True)
    return list(tokens), np.array(distances)


def check_against_oracle(
    output: RequestOutput, kv_dtype: str, params: SamplingParams, product_dtype: str | None = None
) -> None:
    """Every choice of `output` is the oracle's, its log-probabilities too."""
    prompt = output.prompt_token_ids
    for choice in output.outputs:
        tokens = choice.token_ids
        assert len(tokens) == params.max_tokens
        assert choice.logprobs is not None
        text = (*prompt, *tokens[:-1])
        expected = oracle_rows(text, kv_dtype, product_dtype)[len(prompt) - 1 :]
        errors = logit_errors(choice.logprobs, expected)
        if params.temperature == 0:
            theirs, closest = expected.argmax(-1).tolist(), oracle.smallest_margin(expected)
            assert closest >= 10 * errors.max(), "too close a call: take another seed"
        else:
            theirs, calls = oracle_draws(expected, params.temperature, output.seed, choice.index)
            assert (calls >= 10 * errors).all(), "too close a call: take another seed"
        assert errors.max() < LOGIT_ERROR[kv_dtype]
        assert oracle.distinct_share(tokens) >= 0.5, "it repeats itself: take another seed"
        assert list(tokens) == theirs


GREEDY = greedy(NUM_TOKENS, logprobs=TOP)
SAMPLED = SamplingParams(
    max_tokens=NUM_TOKENS, temperature=0.4, seed=10, n=3, logprobs=TOP, ignore_eos=True
)


def one_shot(layout: str, kv_dtype: str) -> Iterator[RequestOutput]:
    engine = tiny_engine(kv_layout=layout, kv_cache_dtype=kv_dtype)
    batches = watch(engine)
    yield from run(engine, [prompt_of(47)], GREEDY)
    step = range(47, 47 + NUM_TOKENS) if layout == "recompute" else [47] + [1] * (NUM_TOKENS - 1)
    assert sizes_seen(batches) == [(size,) for size in step]
    assert_nothing_left(engine)


def chunked(layout: str, kv_dtype: str) -> Iterator[RequestOutput]:
    engine = tiny_engine(kv_layout=layout, kv_cache_dtype=kv_dtype, max_num_batched_tokens=17)
    batches = watch(engine)
    yield from run(engine, [prompt_of(47)], GREEDY)
    assert sizes_seen(batches)[:4] == [(17,), (17,), (13,), (1,)]
    assert_nothing_left(engine)


def with_mates(layout: str, kv_dtype: str) -> Iterator[RequestOutput]:
    """Requests of all lengths that come and go: prompts run in steps that decode others."""
    engine = tiny_engine(kv_layout=layout, kv_cache_dtype=kv_dtype)
    batches = watch(engine)
    deltas = []
    for number, length in enumerate((47, 8, 34, 21)):
        engine.add(f"mate-{number}", prompt_of(length), GREEDY)
        for _ in range(3):
            deltas += engine.step()
    yield from outputs_of([*deltas, *drain(engine)]).values()
    if layout != "recompute":
        assert any({1, 34} <= set(sizes) and len(sizes) >= 3 for sizes in sizes_seen(batches))
    assert max(len(sizes) for sizes in sizes_seen(batches)) == 4
    assert_nothing_left(engine)


def preempted(layout: str, kv_dtype: str) -> Iterator[RequestOutput]:
    """Three requests of up to 38 positions over a pool of 80: the newest must make room."""
    engine = tiny_engine(
        kv_layout=layout,
        kv_cache_dtype=kv_dtype,
        block_size=8,
        max_model_len=64,
        kv_cache_memory_bytes=pool_bytes(80, kv_dtype),
    )
    outputs = run(engine, [prompt_of(23), prompt_of(22), prompt_of(21)], GREEDY)
    yield from outputs
    victim = next(output for output in outputs if output.metrics.num_preemptions > 0)
    assert was_recomputed(account_of(engine, victim.request_id))
    assert_nothing_left(engine)


def prefix_hit(layout: str, kv_dtype: str) -> Iterator[RequestOutput]:
    engine = tiny_engine(kv_layout=layout, kv_cache_dtype=kv_dtype, block_size=8)
    batches = watch(engine)
    yield from run(engine, [prompt_of(47)], GREEDY)
    before = len(batches)
    longer = [*prompt_of(47)[:35], *prompt_of(9)]
    (output,) = run(engine, [longer], GREEDY)
    yield output
    num_cached = 35 if layout == "slots" else 32
    assert output.metrics.num_cached_tokens == num_cached
    assert sizes_seen(batches)[before] == (44 - num_cached,)
    assert_nothing_left(engine)


def forked(layout: str, kv_dtype: str) -> Iterator[RequestOutput]:
    """Sampled choices: each writes K and V of its own after the shared prompt."""
    engine = tiny_engine(kv_layout=layout, kv_cache_dtype=kv_dtype, block_size=8)
    batches = watch(engine)
    (output,) = run(engine, [prompt_of(22)], SAMPLED)
    yield output
    assert len({choice.token_ids for choice in output.outputs}) == 3
    num_copies = sum(len(batch.block_copies) for batch in batches)
    assert num_copies == (2 if layout in ("paged", "contiguous") else 0)
    assert engine.scheduler.counters.num_forks == (0 if layout == "recompute" else 2)
    assert output.metrics.num_cached_tokens == 0  # the first choice computed the whole prompt
    assert_nothing_left(engine)


def streamed(layout: str, kv_dtype: str) -> Iterator[RequestOutput]:
    llm = LLM(
        str(tiny_model().folder),
        device="cpu",
        executor=STREAMED_ON,
        kv_layout=layout,
        kv_cache_dtype=kv_dtype,
    )
    deltas = list(llm.stream(prompt_of(47), GREEDY))
    assert [len(delta.token_ids) for delta in deltas] == [1] * NUM_TOKENS
    output = deltas[-1].output
    assert output is not None
    assert [token for delta in deltas for token in delta.token_ids] == [
        *output.outputs[0].token_ids
    ]
    yield output
    assert_nothing_left(llm.engine)


WAYS: tuple[Way, ...] = (
    one_shot,
    chunked,
    with_mates,
    preempted,
    prefix_hit,
    forked,
    streamed,
)
CANNOT_HAPPEN = {
    ("recompute", chunked),  # it brings every sequence whole
    ("recompute", preempted),  # there is nothing to run out of
    ("recompute", prefix_hit),  # or to share
    ("contiguous", preempted),  # a sequence owns room for its whole life from the start
    ("contiguous", prefix_hit),  # and no prompt fills a block of the whole context
}
CELLS = [(way, layout) for way in WAYS for layout in LAYOUTS if (layout, way) not in CANNOT_HAPPEN]


@pytest.mark.parametrize("kv_dtype", LOGIT_ERROR)
@pytest.mark.parametrize("way,layout", CELLS, ids=[f"{way.__name__}-{la}" for way, la in CELLS])
def test_every_cell_of_the_matrix_gives_the_oracles_text(
    way: Way, layout: str, kv_dtype: str
) -> None:
    outputs = list(way(layout, kv_dtype))
    assert outputs
    rounds_products = way is streamed and STREAMED_ON == "native" and kv_dtype == "bfloat16"
    for output in outputs:
        check_against_oracle(
            output,
            kv_dtype,
            SAMPLED if way is forked else GREEDY,
            product_dtype="bfloat16" if rounds_products else None,
        )


@pytest.mark.parametrize("layout", ["slots", "paged"])
def test_a_prompt_that_is_known_to_its_end_still_computes_its_last_token(layout: str) -> None:
    """Without its row there are no logits: of four full blocks, three may be spared."""
    engine = tiny_engine(kv_layout=layout, block_size=8)
    run(engine, [prompt_of(32)], GREEDY)
    (output,) = run(engine, [prompt_of(32)], GREEDY)
    assert output.metrics.num_cached_tokens == (31 if layout == "slots" else 24)
    check_against_oracle(output, "float32", GREEDY)
    assert_nothing_left(engine)


LENGTHS = (1, 2, 8, 13, 34, 64, 150, 200)


def test_eight_prompts_as_a_batch_and_one_by_one_agree() -> None:
    engine = tiny_engine(enable_prefix_caching=False)
    batches = watch(engine)
    together = run(engine, [prompt_of(length) for length in LENGTHS], GREEDY)
    assert max(len(sizes) for sizes in sizes_seen(batches)) == len(LENGTHS)
    del batches[:]
    alone = [run(engine, [prompt_of(length)], GREEDY)[0] for length in LENGTHS]
    assert {len(sizes) for sizes in sizes_seen(batches)} == {1}
    for one, other in zip(together, alone, strict=True):
        check_against_oracle(one, "float32", GREEDY)
        check_against_oracle(other, "float32", GREEDY)
        assert one.outputs[0].text == other.outputs[0].text


SEEDED = replace(SAMPLED, n=2, logprobs=None)


def alone() -> tuple[Engine, RequestOutput]:
    engine = tiny_engine()
    return engine, run(engine, [prompt_of(22)], SEEDED)[0]


def among_unseeded() -> tuple[Engine, RequestOutput]:
    engine = tiny_engine()
    batches = watch(engine)
    for number in range(8):
        engine.add(f"mate-{number}", prompt_of(9, number), SamplingParams(max_tokens=20))
    engine.step()
    output = run(engine, [prompt_of(22)], SEEDED)[0]
    assert max(len(sizes) for sizes in sizes_seen(batches)) == 10
    return engine, output


def in_chunks() -> tuple[Engine, RequestOutput]:
    engine = tiny_engine(max_num_batched_tokens=5)
    batches = watch(engine)
    output = run(engine, [prompt_of(22)], SEEDED)[0]
    assert sizes_seen(batches)[:4] == [(5,)] * 4
    return engine, output


def after_preemption() -> tuple[Engine, RequestOutput]:
    engine = tiny_engine(block_size=8, max_model_len=64, kv_cache_memory_bytes=pool_bytes(80))
    engine.add("first", prompt_of(30), greedy(30))
    for _ in range(14):
        engine.step()
    output = run(engine, [prompt_of(22)], SEEDED)[0]
    assert output.metrics.num_preemptions > 0
    mine = [a for a in engine.log.finished if a.request.request_id == output.request_id]
    assert any(was_recomputed(account) for account in mine)
    return engine, output


def from_a_known_prefix() -> tuple[Engine, RequestOutput]:
    engine = tiny_engine(block_size=8, enable_prefix_caching=True)
    run(engine, [prompt_of(22)], greedy(1))
    output = run(engine, [prompt_of(22)], replace(SEEDED, n=2))[0]
    assert output.metrics.num_cached_tokens == 16  # the first choice's
    return engine, output


@pytest.mark.parametrize(
    "way", [alone, among_unseeded, in_chunks, after_preemption, from_a_known_prefix]
)
def test_a_seed_gives_the_same_text_whatever_happens_around_it(
    way: Callable[[], tuple[Engine, RequestOutput]],
) -> None:
    expected = alone()[1]
    engine, output = way()
    assert expected.outputs[0].token_ids != expected.outputs[1].token_ids
    assert [c.token_ids for c in output.outputs] == [c.token_ids for c in expected.outputs]
    assert [c.text for c in output.outputs] == [c.text for c in expected.outputs]
    assert_nothing_left(engine)


def test_prompt_log_probabilities_are_the_oracles_in_chunks_and_after_preemption() -> None:
    """Chunks that end anywhere, a preemption in the middle of the prompt, and more than 64 rows."""
    engine = tiny_engine(
        block_size=8,
        max_model_len=136,
        max_num_batched_tokens=67,
        kv_cache_memory_bytes=pool_bytes(160),
    )
    params = replace(GREEDY, prompt_logprobs=TOP)
    engine.add("long", prompt_of(31), greedy(40))
    engine.step()
    (output,) = run(engine, [prompt_of(120)], params)
    assert output.metrics.num_preemptions > 0
    starts = list(account_of(engine, output.request_id).starts)
    assert starts.count(0) > 1, "its prompt was not computed again"
    assert output.prompt_logprobs is not None
    first, *scored = output.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in scored if entry is not None] == prompt_of(120)[1:]
    expected = oracle_rows(tuple(prompt_of(120)), "float32")[:-1]
    errors = logit_errors([entry for entry in scored if entry is not None], expected)
    assert errors.max() < 1e-4
    assert_nothing_left(engine)


@pytest.mark.parametrize("dtype,bound", [("float16", 0.05), ("bfloat16", 0.4)])
def test_weights_in_half_precision_stay_near_the_oracle_over_the_whole_context(
    dtype: str, bound: float
) -> None:
    engine = tiny_engine(dtype=dtype)
    params = SamplingParams(
        max_tokens=None, temperature=0.0, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP
    )
    (output,) = run(engine, [prompt_of(64)], params)
    tokens, scored = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert len(tokens) == 256 - 64
    assert scored is not None
    assert output.prompt_logprobs is not None
    entries = [*(e for e in output.prompt_logprobs if e is not None), *scored]
    expected = oracle_rows((*prompt_of(64), *tokens[:-1]), "float32")
    errors = logit_errors(entries, expected)
    assert 1e-4 < errors.max() < bound  # it did round, and not by much
