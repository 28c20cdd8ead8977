"""The native executor: equal bits of logits whatever the way, and the eager executor's tokens.

Each way runs the same requests on an engine of its own and notes, for every text whose next token
was drawn, the bytes of its row of logits. Two ways agree if they noted the same texts with the same
bytes. As everywhere, a way fails unless it really happened. Instruction sets, threads and tile
shapes are held to one another in the same manner, each that this machine has.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import (
    TinyModel,
    assert_nothing_left,
    drain,
    greedy,
    outputs_of,
    prompt_of,
    run,
    sizes_seen,
    tiny_config,
    tiny_model,
    tokens_of,
    write_model,
)
from numpy.typing import NDArray

from nanoserve.config import EngineConfig
from nanoserve.engine import build, native
from nanoserve.engine.batch import PARTS, StepBatch, StepResult, batch_of, pack_batch
from nanoserve.engine.engine import Engine, StepError
from nanoserve.engine.native import NativeExecutor
from nanoserve.kernels.cpu import library
from nanoserve.kernels.cpu.library import UnavailableError
from nanoserve.kernels.probes import make_native_probes
from nanoserve.llm import LLM, engine_config
from nanoserve.planner.model import kv_bytes_per_token
from nanoserve.request import FinishReason, RequestOutput, SamplingParams
from nanoserve.verify import verify

ISAS = library.available()
"""Weakest first; the last is what runs unless another is named."""

pytestmark = pytest.mark.skipif(not ISAS, reason="needs the native core, which was not built here")

NUM_TOKENS = 10
GREEDY = greedy(NUM_TOKENS)
LENGTHS = (1, 5, 17, 64, 129, 300)
"""Of the prompts that every way runs; the model's context is longer than any of them needs."""

Seen = dict[tuple[int, ...], bytes]
"""Text to the bytes of the logits of what follows it."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Wider than one block of a sum (256), at a head size and a width that no tile divides."""
    folder = tmp_path_factory.mktemp("wide")
    return write_model(folder, n_embd=280, n_head=5, n_layer=2, n_positions=1024, n_inner=600)


class Noted:
    """An engine on the native executor, and the logits of every text it continued."""

    def __init__(self, model: TinyModel, **options: Any) -> None:
        config = engine_config(model=str(model.folder), device="cpu", executor="native", **options)
        self.engine = Engine(config, poison_freed=True)
        self.seen: Seen = {}
        self.batches: list[StepBatch] = []
        executor = self.engine.executor
        assert isinstance(executor, NativeExecutor)
        self._executor = executor
        executor.execute = self._execute  # type: ignore[method-assign]

    def _execute(self, batch: StepBatch) -> StepResult:
        self.batches.append(batch)
        result, logits = self._executor.execute_with_logits(batch)
        for row, sampling, target in zip(logits, batch.sampling, batch.targets, strict=True):
            if target < 0:
                text = (*sampling.prompt_token_ids, *sampling.output_token_ids)
                assert self.seen.setdefault(text, row.tobytes()) == row.tobytes()
        return result

    def run(self, prompts: list[list[int]]) -> Seen:
        run(self.engine, prompts, GREEDY)
        assert_nothing_left(self.engine)
        return self.seen


def prompts() -> list[list[int]]:
    return [prompt_of(length) for length in LENGTHS]


def one_by_one(noted: Noted) -> Seen:
    for prompt in prompts():
        noted.run([prompt])
    return noted.seen


def naive(model: TinyModel, **options: Any) -> Seen:
    noted = Noted(model, kv_layout="recompute", **options)
    seen = one_by_one(noted)
    steps = zip(noted.batches, sizes_seen(noted.batches), strict=True)
    assert all(sizes == tuple(batch.context_lens) for batch, sizes in steps)
    return seen


def cached(model: TinyModel, **options: Any) -> Seen:
    noted = Noted(model, kv_layout="contiguous", max_num_batched_tokens=4096, **options)
    seen = one_by_one(noted)
    assert {sizes[0] for sizes in sizes_seen(noted.batches)} == {1, *LENGTHS}
    return seen


def batch_of_32(model: TinyModel, **options: Any) -> Seen:
    """Ragged: mates of all lengths that come and go around the prompts."""
    noted = Noted(model, max_num_seqs=32, max_num_batched_tokens=4096, **options)
    mates = [prompt_of(3 + 7 * i, seed=1) for i in range(26)]
    for i, mate in enumerate(mates):
        noted.engine.add(f"mate-{i}", mate, greedy(NUM_TOKENS + 3 * (i % 4)))
        if i % 5 == 0:
            noted.engine.step()
    noted.run(prompts())
    assert max(len(sizes) for sizes in sizes_seen(noted.batches)) == 32
    return {text: row for text, row in noted.seen.items() if not is_of(text, mates)}


def is_of(text: tuple[int, ...], starts: list[list[int]]) -> bool:
    return any(list(text[: len(start)]) == start for start in starts)


def chunked(model: TinyModel, **options: Any) -> Seen:
    noted = Noted(model, max_num_batched_tokens=13, max_num_seqs=6, block_size=8, **options)
    seen = noted.run(prompts())
    assert max(sum(sizes) for sizes in sizes_seen(noted.batches)) == 13
    return seen


def whole_prefill(model: TinyModel, **options: Any) -> Seen:
    noted = Noted(model, max_num_batched_tokens=4096, max_num_seqs=6, **options)
    seen = noted.run(prompts())
    assert sorted(sizes_seen(noted.batches)[0]) == sorted(LENGTHS)
    return seen


def one_slot_blocks(model: TinyModel, **options: Any) -> Seen:
    return Noted(model, kv_layout="slots", max_num_seqs=6, **options).run(prompts())


def preempted(model: TinyModel, **options: Any) -> Seen:
    """A pool that holds the prompts and little more: the newest must make room."""
    kv_dtype = options.get("kv_cache_dtype") or options.get("dtype", "float32")
    num_tokens = sum(LENGTHS) + 28
    noted = Noted(
        model,
        block_size=4,
        max_num_seqs=6,
        max_model_len=320,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=num_tokens * kv_bytes_per_token(model.config, kv_dtype),
        **options,
    )
    seen = noted.run(prompts())
    assert noted.engine.scheduler.counters.num_preemptions > 0
    return seen


def prefix_hit(model: TinyModel, **options: Any) -> Seen:
    noted = Noted(model, block_size=8, enable_prefix_caching=True, **options)
    run(noted.engine, [[*prompt_of(300)[:200], *prompt_of(9)]], greedy(2))
    noted.seen.clear()
    outputs = [run(noted.engine, [prompt], GREEDY)[0] for prompt in prompts()]
    assert outputs[-1].metrics.num_cached_tokens == 200
    return noted.seen


WAYS: tuple[Callable[..., Seen], ...] = (
    cached,
    batch_of_32,
    chunked,
    whole_prefill,
    one_slot_blocks,
    preempted,
    prefix_hit,
)
FORMATS: dict[str, dict[str, str]] = {
    "fp32": {},
    "fp32-kv-bf16": {"kv_cache_dtype": "bfloat16"},
    "fp32-kv-fp16": {"kv_cache_dtype": "float16"},
    "fp32-kv-int8": {"kv_cache_dtype": "int8"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int8-weight-only": {"quantization": "int8-weight-only"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
}


@pytest.fixture(scope="module")
def naive_seen(wide: TinyModel) -> Callable[[str], Seen]:
    """What the naive way notes in a format, run once."""
    return cache(lambda name: naive(wide, **FORMATS[name]))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_way_gives_the_bits_of_the_naive_one(
    way: Callable[..., Seen], name: str, wide: TinyModel, naive_seen: Callable[[str], Seen]
) -> None:
    expected = naive_seen(name)
    assert len(expected) == len(LENGTHS) * NUM_TOKENS
    assert len(set(expected.values())) == len(expected), "rows that are all alike prove nothing"
    assert way(wide, **FORMATS[name]) == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_gives_the_same_bits(
    isa: str,
    name: str,
    wide: TinyModel,
    naive_seen: Callable[[str], Seen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = naive_seen(name)
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    noted = Noted(wide, max_num_seqs=6, max_num_batched_tokens=100, **FORMATS[name])
    assert noted.engine.describe()["kernels"] == f"C++ {isa}"
    assert noted.run(prompts()) == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_no_bit(
    threads: int, name: str, wide: TinyModel, naive_seen: Callable[[str], Seen]
) -> None:
    noted = Noted(wide, threads=threads, max_num_seqs=6, **FORMATS[name])
    assert noted.engine.describe()["threads"] == str(threads)
    assert noted.run(prompts()) == naive_seen(name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8])
def test_the_shape_of_a_tile_changes_no_bit(
    rows: int,
    name: str,
    wide: TinyModel,
    naive_seen: Callable[[str], Seen],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = naive_seen(name)
    core_config = native.core_config

    def with_tile(*arguments: Any) -> library.Config:
        config = core_config(*arguments)
        config.tile_rows = rows
        return config

    monkeypatch.setattr(native, "core_config", with_tile)
    assert whole_prefill(wide, **FORMATS[name]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_the_bits_agree_to_the_end_of_the_window(name: str, wide: TinyModel) -> None:
    """Contexts to 1,024: the whole window recomputed once must be what the cache wrote."""
    writes = Noted(wide, max_num_batched_tokens=256, **FORMATS[name])
    prompt = prompt_of(700)
    params = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    (output,) = run(writes.engine, [prompt], params)
    text = [*prompt, *tokens_of(output)]
    assert len(text) == 1024
    for length in (701, 768, 769, 900, 1000, 1023):
        reads = Noted(wide, kv_layout="recompute", **FORMATS[name])
        run(reads.engine, [text[:length]], greedy(1))
        assert reads.seen[tuple(text[:length])] == writes.seen[tuple(text[:length])]


# --- Equal tokens with the eager executor ---------------------------------------------------------

SAMPLINGS: dict[str, SamplingParams] = {
    "greedy": greedy(24, logprobs=5),
    "sampled": SamplingParams(max_tokens=24, temperature=0.8, seed=3, n=2, ignore_eos=True),
    "nucleus": SamplingParams(max_tokens=24, top_p=0.9, seed=4, min_p=0.02, ignore_eos=True),
    "penalised": SamplingParams(
        max_tokens=24,
        temperature=0.7,
        top_k=40,
        seed=5,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={7: 2.5, 9: -100.0},
        logprobs=3,
        prompt_logprobs=2,
    ),
    "min_tokens": SamplingParams(max_tokens=24, min_tokens=20, seed=6),
}


@cache
def both(**options: Any) -> tuple[LLM, LLM]:
    """The tiny model on either executor."""
    folder = str(tiny_model().folder)
    return tuple(  # type: ignore[return-value]
        LLM(folder, device="cpu", executor=executor, **options) for executor in ("native", "eager")
    )


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_the_eager_executors(name: str) -> None:
    outputs: list[list[RequestOutput]] = [
        llm.generate([prompt_of(n) for n in (1, 9, 34, 100)], SAMPLINGS[name])
        for llm in both(max_num_batched_tokens=40)
    ]
    for ours, theirs in zip(*outputs, strict=True):
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
        assert [c.finish_reason for c in ours.outputs] == [c.finish_reason for c in theirs.outputs]
        scored = [*(ours.outputs[0].logprobs or ()), *(ours.prompt_logprobs or ())[1:]]
        expected = [*(theirs.outputs[0].logprobs or ()), *(theirs.prompt_logprobs or ())[1:]]
        for mine, yours in zip(scored, expected, strict=True):
            assert mine is not None
            assert yours is not None
            assert mine.logprob == pytest.approx(yours.logprob, abs=1e-4)
            assert [i for i, _ in mine.top] == [i for i, _ in yours.top]


@pytest.mark.parametrize("activation", sorted(library.ACTIVATIONS))
def test_every_activation_and_flag_of_the_family(activation: str, tmp_path: Path) -> None:
    """Odd sizes: a head of 7, an inner width of 50, scores scaled by layer, a tied head."""
    model = write_model(tmp_path, n_embd=21, n_head=3, n_inner=50)
    config = tmp_path / "config.json"
    flags = ', "scale_attn_by_inverse_layer_idx": true, "layer_norm_epsilon": 0.001}'
    text = config.read_text().replace("}", f', "activation_function": "{activation}"{flags}')
    config.write_text(text)
    ours, theirs = (
        LLM(str(model.folder), device="cpu", executor=executor).score(prompt_of(60))
        for executor in ("native", "eager")
    )
    errors = [abs(a.logprob - b.logprob) for a, b in zip(ours, theirs, strict=True) if a and b]
    assert len(errors) == 59
    assert max(errors) < 2e-4


def test_mini_writes_the_same_text_on_either() -> None:
    texts = [
        LLM("mini", device="cpu", executor=executor).generate(
            ["Once upon a time", "The sea"], SamplingParams(max_tokens=48, top_p=0.9, seed=1)
        )
        for executor in ("native", "eager")
    ]
    ours, theirs = ([o.outputs[0].text for o in outputs] for outputs in texts)
    assert ours == theirs


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}])
def test_verify_demands_equal_bits(options: dict[str, str]) -> None:
    report = verify(tiny_config(**options, executor="native"), num_tokens=6)
    assert report.bound == 0.0
    assert [way.name for way in report.ways if not (way.bit_equal and report.passed(way))] == []


# --- What it is built from, and its end -----------------------------------------------------------


def tiny_native(**options: Any) -> Engine:
    return Engine(tiny_config(executor="native", **options))


def executor_of(engine: Engine) -> NativeExecutor:
    assert isinstance(engine.executor, NativeExecutor)
    return engine.executor


def test_a_donor_shares_its_packed_weights_and_outlives_nobody() -> None:
    donor = tiny_native()
    heir = Engine(tiny_config(executor="native", kv_layout="recompute"), donor=donor)
    (expected,) = run(donor, [prompt_of(20)], GREEDY)
    executor_of(donor).close()
    with pytest.raises(StepError) as failed:
        run(donor, [prompt_of(20)], GREEDY)
    assert "closed" in str(failed.value.__cause__)
    (output,) = run(heir, [prompt_of(20)], GREEDY)
    assert tokens_of(output) == tokens_of(expected)
    executor_of(donor).close()  # again: nothing to do


def test_another_format_than_the_donors_is_loaded_anew() -> None:
    donor = tiny_native()
    half = Engine(tiny_config(executor="native", dtype="bfloat16"), donor=donor)
    ours, theirs = (executor_of(e).memory_stats()["weights_bytes"] for e in (half, donor))
    assert ours < theirs


def test_memory_is_what_the_model_needs() -> None:
    stats = executor_of(tiny_native(kv_layout="recompute")).memory_stats()
    assert stats["cache_bytes"] == 0
    engine = tiny_native(max_num_seqs=4)
    engine.executor.warm_up()
    stats = executor_of(engine).memory_stats()
    blocks = engine.spec.num_blocks + 1
    per_token = kv_bytes_per_token(engine.model_config, "float32")
    assert stats["cache_bytes"] >= blocks * engine.spec.block_size * per_token
    assert stats["scratch_bytes"] > 0
    engine.executor.synchronize()


def test_recompute_needs_whole_contexts_and_makes_room_for_more_sequences() -> None:
    noted = Noted(tiny_model(), kv_layout="recompute", max_num_seqs=5)
    run(noted.engine, [prompt_of(9)], GREEDY)
    run(noted.engine, [prompt_of(n) for n in (3, 40, 7, 9)], GREEDY)
    executor = executor_of(noted.engine)
    torn = noted.batches[0].with_arrays(context_lens=noted.batches[0].context_lens + 1)
    with pytest.raises(RuntimeError, match="whole contexts"):
        executor._run(torn, None)


def test_what_a_step_cannot_address_is_refused_before_it_writes() -> None:
    noted = Noted(tiny_model())
    run(noted.engine, [prompt_of(9)], greedy(2))
    executor = executor_of(noted.engine)
    batch = noted.batches[0]
    outside = np.full_like(batch.slot_mapping, 10**8)
    with pytest.raises(RuntimeError, match="slot 100000000"):
        executor._run(batch.with_arrays(slot_mapping=outside), None)
    with pytest.raises(ValueError, match="token id 5000"):
        executor._run(batch.with_arrays(token_ids=np.full_like(batch.token_ids, 5000)), None)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"block_tables": np.zeros((1, 1), np.int32)}, r"block_tables must have shape \(2, 1\)"),
        ({"context_lens": np.zeros(5, np.int32)}, r"query_starts must have shape \(6,\)"),
        ({"token_ids": np.zeros((3, 4), np.int32)}, r"must have shape \(12,\)"),
        ({"logit_rows": np.zeros(0, np.int32)}, r"logit_rows must have shape \(2,\), got \(0,\)"),
        ({"block_copies": np.zeros(3, np.int32)}, r"block_copies must have shape \(3, 2\)"),
        ({"positions": np.full(12, 2**31)}, "positions must hold int32, got int64"),
        ({"positions": np.full(12, 2**32 + 1, np.uint64)}, "positions must hold int32"),
        ({"positions": np.zeros(12)}, "positions must hold int32, got float64"),
        ({"positions": np.zeros(12, np.bool_)}, "positions must hold int32, got bool"),
        ({"lengths": np.zeros(2, np.int32)}, "a step is made of token_ids, .* lengths"),
        *(({name: np.array(0, np.int32)}, r"must have shape \(.+\), got \(") for name in PARTS),
    ],
    ids=str,
)
def test_arrays_that_make_no_step_are_refused(changes: dict[str, Any], words: str) -> None:
    noted = Noted(tiny_model())
    run(noted.engine, [prompt_of(5), prompt_of(7)], greedy(1))
    batch = noted.batches[0]
    assert (batch.num_tokens, batch.num_seqs) == (12, 2)
    with pytest.raises(ValueError, match=words):
        batch.with_arrays(**changes)
    same = batch.with_arrays(positions=batch.positions.astype(np.int64))
    assert same.integers == batch.integers


def test_a_step_needs_a_draw_for_each_row() -> None:
    noted = Noted(tiny_model())
    run(noted.engine, [prompt_of(5)], greedy(1))
    batch = noted.batches[0]
    arrays = {name: getattr(batch, name) for name in PARTS}
    for draws in ((), (0.5, 0.5)):
        with pytest.raises(ValueError, match=f"1 rows need a draw each, got {len(draws)}"):
            batch_of(sampling=batch.sampling, draws=draws, **arrays)


@pytest.mark.parametrize("context_len", [257, 2**31 - 1])
def test_a_context_beyond_the_models_is_refused(context_len: int) -> None:
    noted = Noted(tiny_model(), block_size=16)
    run(noted.engine, [prompt_of(9)], greedy(1))
    batch = noted.batches[0].with_arrays(
        context_lens=np.array([context_len], np.int32), block_tables=np.zeros((1, 64), np.int32)
    )
    with pytest.raises(ValueError, match=f"a context of {context_len} positions is longer than"):
        executor_of(noted.engine)._run(batch, None)


READ_ONLY = np.zeros((1, 384), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    "memory, words",
    [
        (np.zeros((1, 383), np.float32), r"must be float32 \(1, 384\), got float32 \(1, 383\)"),
        (np.zeros(384, np.float32), r"got float32 \(384,\)"),
        (np.zeros((0, 384), np.float32), r"got float32 \(0, 384\)"),
        (np.zeros((1, 384)), "got float64"),
        (np.zeros((1, 384), ">f4"), "got >f4"),
        (np.zeros((1, 768), np.float32)[:, ::2], "without gaps"),
        (np.zeros((1, 384), np.float32)[:, ::-1], "without gaps"),
        (READ_ONLY, "read-only"),
    ],
    ids=str,
)
def test_memory_that_does_not_hold_the_logits_is_refused(
    memory: NDArray[np.float32], words: str
) -> None:
    noted = Noted(tiny_model())
    run(noted.engine, [prompt_of(9)], greedy(1))
    executor = executor_of(noted.engine)
    with pytest.raises(ValueError, match=words):
        executor.execute_with_logits(noted.batches[0], memory)
    ours = np.full((1, 384), np.nan, np.float32)
    _, logits = executor.execute_with_logits(noted.batches[0], ours)
    assert logits is ours
    assert {ours.tobytes()} == set(noted.seen.values())


@pytest.mark.parametrize(
    "options", [{}, {"kv_layout": "recompute"}, {"dtype": "bfloat16"}], ids=str
)
def test_logits_alone_are_the_bytes_of_the_whole_step(options: dict[str, Any]) -> None:
    """Of 150 positions: sampled rows are computed 64 at a time, others all at once."""
    noted = Noted(tiny_model(), max_num_batched_tokens=256, **options)
    run(noted.engine, [prompt_of(150)], greedy(1, prompt_logprobs=0))
    executor = executor_of(noted.engine)
    step = noted.batches[0]
    assert step.num_rows > 128
    _, logits = executor.execute_with_logits(step)
    alone = np.full_like(logits, np.nan)
    assert executor.compute_logits(step, alone) is alone
    assert alone.tobytes() == logits.tobytes() == executor.compute_logits(step).tobytes()
    with pytest.raises(ValueError, match="must be float32"):
        executor.compute_logits(step, alone[:-1])
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.compute_logits(step)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_rows_that_attention_cannot_take_are_refused(name: str) -> None:
    noted = Noted(tiny_model())
    run(noted.engine, [prompt_of(9)], greedy(1))
    batch = noted.batches[0]
    batch = pack_batch(
        [
            [] if part in ("logit_rows", "targets") else getattr(batch, part).ravel().tolist()
            for part in PARTS
        ],
        table_width=batch.table_width,
        sampling=(),
        draws=(),
    )
    attend = executor_of(noted.engine).attend
    rows = {each: np.zeros((9, 48), np.float32) for each in ("q", "k", "v", "out")}
    attend(batch, **rows)
    wrong = (np.zeros((9, 48)), np.zeros((9, 96), np.float32)[:, ::2], np.zeros((8, 48), "f4"))
    for given in wrong:
        with pytest.raises(ValueError, match=f"{name} must"):
            attend(batch, **{**rows, name: given})


def test_rows_that_are_not_finite_end_their_request_alone() -> None:
    noted = Noted(tiny_model())
    executor = executor_of(noted.engine)
    noted.engine.add("poisoned", prompt_of(12), greedy(8))
    noted.engine.add("sound", prompt_of(13), greedy(8))
    noted.engine.step()
    executor.poison(noted.batches[-1].block_tables[0].tolist())
    outputs = outputs_of(drain(noted.engine))
    reasons = {name: output.outputs[0].finish_reason for name, output in outputs.items()}
    assert reasons == {"poisoned": FinishReason.ERROR, "sound": FinishReason.LENGTH}


# --- Choosing it, or not --------------------------------------------------------------------------


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    build.fall_back.cache_clear()


def config_of(**options: Any) -> EngineConfig:
    return tiny_config(**{"executor": "auto", **options})


def test_auto_is_native_on_a_cpu() -> None:
    assert Engine(config_of()).describe()["executor"] == "native"


def test_a_record_says_how_the_weights_were_quantised() -> None:
    assert Engine(config_of(quantization="int4")).describe()["quantization"] == "int4"
    assert "quantization" not in Engine(config_of()).describe()


@pytest.mark.usefixtures("not_built")
def test_without_the_core_auto_is_eager_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engines = [Engine(config_of()) for _ in range(3)]
    assert {engine.describe()["executor"] for engine in engines} == {"eager"}
    assert [r.getMessage() for r in caplog.records if "eager" in r.getMessage()] == [
        "the eager executor is used; native: the native core was not built: install nanoserve "
        "again where a C++17 compiler is (gcc or clang), or use a wheel"
    ]


@pytest.mark.usefixtures("not_built")
@pytest.mark.parametrize(
    "options",
    [{"executor": "native"}, {"quantization": "int8"}],
    ids=str,
)
def test_without_the_core_what_needs_it_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="the native core was not built"):
        Engine(config_of(**options))


def test_half_precision_weights_fall_back_or_are_refused_by_name() -> None:
    build.fall_back.cache_clear()
    assert Engine(config_of(dtype="float16")).describe()["executor"] == "eager"
    with pytest.raises(ValueError, match="--executor native: it has no float16 weights"):
        Engine(config_of(dtype="float16", executor="native"))


@pytest.mark.parametrize("options", [{"quantization": "int4"}, {"quantization": "int8"}], ids=str)
def test_the_eager_executor_refuses_what_only_native_has(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="needs the native executor"):
        Engine(config_of(executor="eager", **options))


def test_where_the_portable_path_is_all_there_is_auto_is_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.fall_back.cache_clear()
    monkeypatch.setattr(library, "cpu_flags", frozenset)
    with caplog.at_level(logging.WARNING):
        assert Engine(config_of()).describe()["executor"] == "eager"
    assert "portable path" in caplog.text
    assert Engine(config_of(executor="native")).describe()["kernels"] == "C++ portable"


@pytest.mark.parametrize(
    "isa,expected",
    [("mmx", "must be one of portable, avx2"), ("avx512", "this CPU has no avx2, avx512bw")],
)
def test_an_instruction_set_that_cannot_run_is_refused_by_name(
    isa: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    monkeypatch.setattr(library, "cpu_flags", frozenset)
    with pytest.raises(UnavailableError, match=expected):
        library.choose()
    with pytest.raises(ValueError, match="--executor native: NANOSERVE_CPU_ISA"):
        Engine(config_of(executor="native"))


def test_an_object_of_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI_VERSION", library.ABI_VERSION + 1)
    with pytest.raises(UnavailableError, match="build it again"):
        library.Library(library.path_of(ISAS[-1]))


# --- Processes ------------------------------------------------------------------------------------


def in_a_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


GENERATE = """
from nanoserve import LLM, SamplingParams
llm = LLM("mini", device="cpu", executor="native")
params = SamplingParams(max_tokens=8, temperature=0.0)
"""


def test_a_forked_child_computes_too_and_both_end() -> None:
    """Threads stay with the parent; the child's model gets new ones."""
    out = in_a_process(
        f"{GENERATE}"
        "import os\n"
        "first = llm.generate('Once', params)[0].outputs[0].text\n"
        "child = os.fork()\n"
        "again = llm.generate('Once', params)[0].outputs[0].text\n"
        "assert again == first\n"
        "if child:\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert out == "0\n"


def test_it_runs_beside_torchs_threads_and_without_holding_the_interpreter() -> None:
    out = in_a_process(
        f"{GENERATE}"
        "import threading, torch\n"
        "stop = threading.Event()\n"
        "counts = []\n"
        "def work():\n"
        "    x = torch.randn(64, 64)\n"
        "    while not stop.is_set():\n"
        "        counts.append(float((x @ x).sum()))\n"
        "thread = threading.Thread(target=work)\n"
        "thread.start()\n"
        "texts = set()\n"
        "for _ in range(1000):\n"
        "    texts.add(llm.generate('Once', params)[0].outputs[0].text)\n"
        "    if len(texts) > 1 or len(counts) > 3: break\n"
        "stop.set()\n"
        "thread.join()\n"
        "print(len(texts), len(counts) > 3)\n"
    )
    assert out == "1 True\n"


def test_importing_it_writes_nothing() -> None:
    before = {path: path.stat().st_mtime_ns for path in library.FOLDER.rglob("*.so")}
    in_a_process(
        "import nanoserve.engine.native\nimport nanoserve.kernels.cpu.library as l; l.load()"
    )
    assert {path: path.stat().st_mtime_ns for path in library.FOLDER.rglob("*.so")} == before


def test_a_seeded_text_is_the_same_alone_and_among_31_others() -> None:
    """Drawn from all ids, so that a last bit of a logit could tip a draw: it did, on PyTorch's."""
    llm = LLM("mini", device="cpu", executor="native", max_num_seqs=32)
    params = [
        SamplingParams(seed=seed, max_tokens=24, temperature=1.0, ignore_eos=True)
        for seed in range(60, 92)
    ]
    prompt = llm.tokenizer.encode_prompt("Once upon a time")
    alone = [tokens_of(llm.generate([prompt], each)[0]) for each in params]
    for number, each in enumerate(params):
        llm.engine.add(str(number), prompt, each)
    among = outputs_of(drain(llm.engine))
    assert [tokens_of(among[str(number)]) for number in range(32)] == alone
    assert len(set(map(tuple, alone))) == 32


# --- the probes -----------------------------------------------------------------------------------


def test_native_probes_read_and_multiply_in_every_format() -> None:
    probes = make_native_probes(2)
    assert probes is not None
    values = np.ones(1 << 16, dtype=np.float32)
    reads = probes.read(values)
    assert len(reads) == 2
    for load in (*reads.values(), *(probes.matmul(3, 70, 40, dtype) for dtype in probes.dtypes)):
        load()
        load()
    assert set(probes.dtypes) in ({*library.WEIGHTS}, set())
    with pytest.raises(ValueError, match="at least 1"):
        probes.matmul(0, 8, 8, "float32")
    with pytest.raises(ValueError, match="at most 16777216"):
        probes.matmul(8, 2**31 - 1, 8, "float32")
    with pytest.raises(ValueError, match=r"N must be below 2\*\*31"):
        probes.matmul(8, 8, 2**32 + 8, "float32")  # ctypes would make 8 of it
    with pytest.raises(ValueError, match="got float16"):
        probes.matmul(8, 8, 8, "float16")
    with pytest.raises(ValueError, match="end to end"):
        next(iter(probes.read(values[::-2]).values()))()
    for num_threads in (0, -1, 2**32 + 1):
        odd = make_native_probes(num_threads)
        assert odd is not None
        with pytest.raises(ValueError, match="threads"):
            odd.read(values)


def test_without_a_core_there_are_no_native_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.ISA_VARIABLE, "mmx")
    assert make_native_probes(1) is None
