"""The graph executor with everything but `torch.cuda.graph`: buckets, buffers, padding, tokens.

A stand-in captures a step by keeping it and replays it by calling it, on the same static buffers
that a CUDA graph would read and write. What a real graph makes of it needs a GPU (test_gpu.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    NUM_TOKEN_IDS,
    assert_nothing_left,
    donor,
    greedy,
    prompt_of,
    run,
    tiny_config,
    tiny_engine,
    tokens_of,
)

from nanoserve.engine.batch import SAMPLED, RowSampling, pack_batch
from nanoserve.engine.build import graph_obstacle, make_shadow, resolve_executor
from nanoserve.engine.eager import EagerExecutor
from nanoserve.engine.engine import Engine
from nanoserve.engine.graph import (
    Bucket,
    CudaCapturer,
    DecodeGraphs,
    DecodeRows,
    GraphExecutor,
    best_ids,
    make_buckets,
)
from nanoserve.engine.sampling import sample
from nanoserve.generate import cached, graphed
from nanoserve.kv.cache import BlockCache
from nanoserve.kv.layouts import CacheFullError
from nanoserve.request import SamplingParams

LOGIT_BOUND = 1e-4
"""Largest difference to the eager step, whose sums run over other shapes."""


class StandIn:
    """Captures by keeping the step, replays by calling it; `log` says what was done."""

    def __init__(self) -> None:
        self.pool_bytes = 123
        self.num_captured = 0
        self.num_replayed = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


def graph_engine(**options: Any) -> tuple[Engine, GraphExecutor, StandIn]:
    """A tiny engine whose executor is exchanged for the graph executor over the same weights."""
    engine = tiny_engine(**options)
    eager, stand_in = engine.executor, StandIn()
    assert isinstance(eager, EagerExecutor)
    graph = GraphExecutor(eager.spec, (), donor=eager, capturer=stand_in)
    engine.executor = graph
    return engine, graph, stand_in


PROMPTS = [prompt_of(length) for length in (5, 40, 17, 126)]


@pytest.mark.parametrize("layout", ["paged", "slots", "contiguous"])
def test_it_gives_the_eager_executors_tokens(layout: str) -> None:
    """Across a window's end (128), with every layout; prompts and mixed steps run eagerly."""
    engine, graph, stand_in = graph_engine(kv_layout=layout)
    params = greedy(16)
    outputs = run(engine, PROMPTS, params)
    expected = run(tiny_engine(kv_layout=layout), PROMPTS, params)
    assert [tokens_of(o) for o in outputs] == [tokens_of(o) for o in expected]
    assert stand_in.num_replayed == 15
    assert {Bucket(4, 128), Bucket(1, 256)} <= set(graph.graphs._replays)
    assert_nothing_left(engine)


@pytest.mark.parametrize("kv_dtype,kernels", [("int8", "torch"), ("int8", "triton")])
def test_either_kernels_and_either_codec_give_the_same_text(kv_dtype: str, kernels: str) -> None:
    engine, graph, stand_in = graph_engine(kv_cache_dtype=kv_dtype, kernels=kernels)
    assert graph.describe()["kernels"] == f"{kernels} over block tables"
    outputs = run(engine, PROMPTS[:1], greedy(3))
    expected = run(tiny_engine(kv_cache_dtype=kv_dtype), PROMPTS[:1], greedy(3))
    assert [tokens_of(o) for o in outputs] == [tokens_of(o) for o in expected]
    assert stand_in.num_replayed == 2


def test_what_is_not_plainly_greedy_is_sampled_from_the_logits() -> None:
    """Drawn tokens, log-probabilities, penalties and several choices: as the eager executor."""
    params = SamplingParams(
        max_tokens=8, temperature=0.7, seed=4, n=2, logprobs=3, repetition_penalty=1.1
    )
    engine, _, stand_in = graph_engine()
    (got,) = run(engine, PROMPTS[:1], params)
    (expected,) = run(tiny_engine(), PROMPTS[:1], params)
    assert [c.token_ids for c in got.outputs] == [c.token_ids for c in expected.outputs]
    for mine, theirs in zip(got.outputs, expected.outputs, strict=True):
        assert mine.logprobs is not None
        assert theirs.logprobs is not None
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=LOGIT_BOUND)
    assert stand_in.num_replayed > 0


def test_preempted_forked_and_found_again_it_is_the_same_text() -> None:
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "max_num_seqs": 3}
    outputs = []
    for engine in (graph_engine(**options)[0], tiny_engine(**options)):
        once = run(engine, PROMPTS[:1], greedy(20))
        again = run(engine, [PROMPTS[0], PROMPTS[2]], greedy(30, n=2))
        outputs.append([c.token_ids for o in (*once, *again) for c in o.outputs])
        assert_nothing_left(engine)
    assert outputs[0] == outputs[1]


def test_its_weights_are_shared_with_an_audits_twin() -> None:
    """Whatever executor a GPU has, an audit must not hold the weights twice."""
    engine, graph, _ = graph_engine(kv_cache_dtype="int8")
    twin = make_shadow(replace(engine.parts, executor=graph))
    assert isinstance(twin, EagerExecutor)
    assert twin.model is graph.eager.model
    assert (twin.spec.cache_dtype, twin.spec.executor) == ("float32", "eager")


def decode_setup(
    num_seqs: int, context_len: int, kv_dtype: str = "float32"
) -> tuple[DecodeGraphs, EagerExecutor, DecodeRows, StandIn]:
    """Graphs over a cache filled with `num_seqs` contexts, and the rows of their next step."""
    eager = donor().executor
    assert isinstance(eager, EagerExecutor)
    spec = replace(
        eager.spec, cache_dtype=kv_dtype, num_blocks=8 * 16, block_size=16, max_num_seqs=8
    )
    executor, stand_in = EagerExecutor(spec, (), donor=eager), StandIn()
    cache = executor.cache
    assert isinstance(cache, BlockCache)
    for store in (cache.keys, cache.values):
        generator = torch.Generator().manual_seed(5)
        for tensor in store:
            if tensor.dtype == torch.int8:
                tensor.random_(-127, 128, generator=generator)
            else:
                tensor.uniform_(0.0, 0.02, generator=generator)
    graphs = DecodeGraphs(
        executor.model,
        cache,
        max_num_seqs=8,
        max_len=256,
        num_token_ids=NUM_TOKEN_IDS,
        capturer=stand_in,
    )
    tables = np.random.default_rng(1).permutation(128).astype(np.int32).reshape(8, 16)[:num_seqs]
    last = context_len - 1
    rows = DecodeRows(
        np.arange(num_seqs, dtype=np.int32) + 7,
        np.full(num_seqs, last, np.int32),
        tables[:, last // 16] * 16 + np.int32(last % 16),
        tables,
    )
    return graphs, executor, rows, stand_in


def first_rows(rows: DecodeRows, count: int) -> DecodeRows:
    return DecodeRows(*(part[:count] for part in rows))


BUCKETS = make_buckets(8, 256)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_a_replay_is_the_step_called_directly_full_and_one_row_short(
    bucket: Bucket, kv_dtype: str
) -> None:
    """Bit for bit, also after another batch left its rows in the buffers, and near the eager step.

    "Called directly": a step of the same shapes, built over buffers that nothing was replayed on.
    """
    with torch.inference_mode():
        graphs, executor, rows, _ = decode_setup(bucket.num_seqs, bucket.window, kv_dtype)
        fresh, _, _, _ = decode_setup(bucket.num_seqs, bucket.window, kv_dtype)
        graphs.replay(bucket, rows)
        full = graphs.logits[: bucket.num_seqs].clone()
        fresh._fill(bucket, rows)
        fresh._step_of(bucket)()
        assert torch.equal(full, fresh.logits[: bucket.num_seqs])
        short = bucket.num_seqs - 1
        graphs.replay(bucket, first_rows(rows, short))
        assert torch.equal(graphs.logits[:short], full[:short])
        expected = eager_logits(executor, rows)
    assert float((full - expected).abs().max()) < LOGIT_BOUND


def eager_logits(executor: EagerExecutor, rows: DecodeRows) -> torch.Tensor:
    """What the eager executor makes of the same rows."""
    seqs = range(len(rows.slots))
    given = [part.tolist() for part in (rows.token_ids, rows.positions, rows.slots)]
    starts, lens = [*seqs, len(seqs)], (rows.positions + 1).tolist()
    tables = rows.tables.ravel().tolist()
    batch = pack_batch(
        [*given, starts, lens, [*seqs], [0] * len(seqs), [], tables],
        table_width=rows.tables.shape[1],
        sampling=(ANY_SAMPLING,) * len(seqs),
        draws=[0.0] * len(seqs),
    )
    return torch.from_numpy(executor.execute_with_logits(batch)[1])


ANY_SAMPLING = RowSampling(params=SamplingParams(), prompt_token_ids=(), output_token_ids=())


def test_padded_rows_write_to_the_scratch_slot_and_nowhere_else() -> None:
    with torch.inference_mode():
        graphs, _, rows, _ = decode_setup(3, 40)
        cache = graphs._cache
        before = cache.keys[0].clone()
        graphs.replay(Bucket(8, 128), rows)
    changed = (cache.keys[0] != before).any(dim=(0, 2, 4)).nonzero().tolist()  # block, place
    written = [divmod(slot, 16) for slot in [*rows.slots.tolist(), cache.layout.scratch_slot]]
    assert sorted(map(tuple, changed)) == sorted(written)


def test_the_smallest_bucket_that_fits_is_replayed() -> None:
    assert make_buckets(6, 300) == tuple(
        Bucket(n, w) for n in (1, 2, 4, 6) for w in (128, 256, 300)
    )
    graphs, _, rows, stand_in = decode_setup(5, 130)
    assert graphs.find(5, 130) == Bucket(8, 256)
    assert graphs.find(1, 1) == Bucket(1, 128)
    assert graphs.find(4, 128) == Bucket(4, 128)
    assert graphs.find(9, 1) is graphs.find(1, 257) is None
    with torch.inference_mode():
        for _ in range(3):
            graphs.replay(Bucket(8, 256), rows)
    assert (stand_in.num_captured, stand_in.num_replayed) == (1, 3)


def test_warming_up_captures_everything_once_and_says_what_it_cost() -> None:
    engine, graph, stand_in = graph_engine(max_num_seqs=4)
    assert graph.describe()["capture_s"] == "0.000"
    graph.warm_up()
    graph.warm_up()
    num_buckets = len(make_buckets(4, 256))
    assert stand_in.num_captured == num_buckets == int(graph.describe()["graphs"])
    assert float(graph.describe()["capture_s"]) > 0
    assert graph.memory_stats()["graph_pool_bytes"] == 123
    assert engine.describe()["executor"] == "graph"
    run(engine, PROMPTS, greedy(6))
    assert stand_in.num_captured == num_buckets


def test_a_step_beyond_the_largest_bucket_or_with_a_prompt_in_it_runs_eagerly() -> None:
    engine, graph, stand_in = graph_engine(max_num_seqs=4)
    graph.graphs.buckets = (Bucket(2, 128),)
    run(engine, PROMPTS[:3], greedy(4))
    assert stand_in.num_replayed == 0
    run(engine, PROMPTS[:2], greedy(4))
    assert stand_in.num_replayed == 3


def test_slots_that_are_not_there_are_refused_before_anything_is_written() -> None:
    graphs, _, rows, _ = decode_setup(2, 40)
    before = [tensor.clone() for tensor in graphs._cache.keys]
    outside = rows._replace(slots=np.array([3, 129 * 16], np.int32))
    with pytest.raises(CacheFullError, match="slot 2064 is outside this cache's 2064"):
        graphs.replay(Bucket(2, 128), outside)
    assert all(map(torch.equal, before, graphs._cache.keys))


@pytest.mark.parametrize("slot,block,words", [(10**6, 0, "slot 1000000"), (0, -1, "block -1")])
def test_a_step_that_cannot_be_replayed_copies_no_block(slot: int, block: int, words: str) -> None:
    engine, graph, _ = graph_engine()
    run(engine, PROMPTS[:2], greedy(3))
    keys = graph._cache.keys[0].view(torch.int32)  # of NaN, too, the bits are compared
    before = keys.clone()
    batch = pack_batch(
        [[0], [0], [slot], [0, 1], [1], [0], [SAMPLED], [0, 1], [block]],
        table_width=1,
        sampling=(ANY_SAMPLING,),
        draws=[0.0],
    )
    with pytest.raises(CacheFullError, match=words):
        graph.execute(batch)
    assert torch.equal(keys, before)


def test_rows_that_are_not_finite_end_their_request_alone() -> None:
    engine, graph, _ = graph_engine(enable_prefix_caching=False)
    engine.add("broken", PROMPTS[0], greedy(8))
    engine.add("whole", PROMPTS[2], greedy(8))
    engine.step()
    replay = graph.graphs.replay

    def poison_first(bucket: Bucket, rows: DecodeRows) -> None:
        replay(bucket, rows)
        graph.graphs.answers[0] = torch.tensor([0, 0], dtype=torch.int32)

    graph.graphs.replay = poison_first  # type: ignore[method-assign]
    ended = {d.request_id: d.finish_reason for d in engine.step() if d.finish_reason}
    assert {name: reason.value for name, reason in ended.items()} == {"broken": "error"}


def test_the_best_ids_on_a_device_are_the_samplers() -> None:
    """Ties, ids beyond the tokenizer, and rows that are not finite in every way."""
    rows = np.random.default_rng(0).normal(size=(9, 12)).astype(np.float32)
    rows[1, [3, 7]] = 5.0
    rows[2, 11] = 9.0  # beyond the tokenizer
    rows[3, 4], rows[4, 5], rows[5, 11] = np.nan, np.inf, np.nan
    rows[6] = -np.inf
    rows[7, :10], rows[7, 10:] = -np.inf, 1.0
    rows[8, 2] = -np.inf
    wanted = replace(ANY_SAMPLING, params=SamplingParams(temperature=0.0))
    expected = sample(rows, np.full(9, -1, np.int32), (wanted,) * 9, np.zeros(9), num_token_ids=10)
    got = best_ids(torch.from_numpy(rows), 10).numpy()
    np.testing.assert_array_equal(got[:, 0], expected.token_ids)
    np.testing.assert_array_equal(got[:, 1].astype(bool), expected.finite)
    assert expected.finite.sum() == 4


def test_graphed_gives_the_textbook_loops_text() -> None:
    executor = donor().executor
    assert isinstance(executor, EagerExecutor)
    stand_in = StandIn()
    for prompt, num_tokens in ((PROMPTS[0], 12), (PROMPTS[3], 6), (PROMPTS[0], 1), ([1], 0)):
        got = graphed(executor.model, prompt, num_tokens, capturer=stand_in)
        assert got == cached(executor.model, prompt, num_tokens)
    assert stand_in.num_replayed == 11 + 5
    with pytest.raises(ValueError, match="exceed the model's 256 positions"):
        graphed(executor.model, PROMPTS[0], 256, capturer=stand_in)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_is_refused_by_name() -> None:
    executor = donor().executor
    assert isinstance(executor, EagerExecutor)
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        CudaCapturer()
    with pytest.raises(ValueError, match="CUDA graphs need a GPU"):
        graphed(executor.model, [1], 3)
    with pytest.raises(ValueError, match=r"--executor graph: it replays CUDA graphs, got --device"):
        Engine(tiny_config(executor="graph"))


def test_a_cache_that_keeps_nothing_has_nothing_to_replay() -> None:
    config = tiny_config(executor="graph", kv_layout="recompute")
    assert "recompute has no decode step" in str(graph_obstacle(config, "cuda"))
    config = tiny_config(executor="graph")
    assert resolve_executor(config, "cuda", "float32") == "graph"
    eager = donor().executor
    assert isinstance(eager, EagerExecutor)
    spec = replace(eager.spec, layout="recompute", num_blocks=0, block_size=0)
    with pytest.raises(ValueError, match="recompute cache has no step to replay"):
        GraphExecutor(spec, (), donor=eager, capturer=StandIn())
