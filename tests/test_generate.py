"""The textbook loops and the engine agree on every token of the whole window.

The naive loop is held to the dense oracle; everything else to the naive loop, whose tokens cost a
forward pass over the whole text each.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache

import numpy as np
import oracle
import pytest
import torch
from helpers import (
    assert_nothing_left,
    donor,
    prompt_of,
    run,
    sizes_seen,
    tiny_engine,
    tiny_model,
    tokens_of,
    watch,
)

from nanoserve import generate
from nanoserve.engine.eager import EagerExecutor
from nanoserve.engine.engine import Engine
from nanoserve.kv.cache import RecomputeCache
from nanoserve.kv.codecs import PlainCodec
from nanoserve.kv.step import StepTensors
from nanoserve.llm import engine_config
from nanoserve.model.gpt2 import GPT2
from nanoserve.request import SamplingParams

WINDOW = 128
LENGTHS = (1, 7, 33, 60, 2, 90, 17, 120)
TO_THE_END = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)


def model_of(engine: Engine) -> GPT2:
    assert isinstance(engine.executor, EagerExecutor)
    return engine.executor.model


@cache
def naive_text(length: int) -> list[int]:
    """What follows `prompt_of(length)`, to the end of the window."""
    return generate.naive(model_of(donor(WINDOW)), prompt_of(length), WINDOW - length)


@torch.inference_mode()
def every_row(model: GPT2, text: list[int]) -> oracle.Float64:
    """[N, V] logits of one full pass."""
    step = StepTensors.one_sequence(text, 0, device=model.device, every_row=True)
    logits = model(step, RecomputeCache(model.config, codec=PlainCodec(torch.float32)))
    return logits.double().numpy()


@pytest.mark.parametrize("length", LENGTHS)
def test_naive_is_the_oracles_text(length: int) -> None:
    tiny, prompt, tokens = tiny_model(WINDOW), prompt_of(length), naive_text(length)
    text = [*prompt, *tokens[:-1]]
    expected = oracle.logits(tiny.config, tiny.weights, text)
    error = np.abs(every_row(model_of(donor(WINDOW)), text) - expected).max()
    mine = expected[length - 1 :]
    assert len(tokens) == WINDOW - length
    assert error < 1e-4
    assert oracle.distinct_share(tokens) >= 0.5
    assert oracle.smallest_margin(mine) >= 10 * error
    assert tokens == mine.argmax(-1).tolist()


@pytest.mark.parametrize("length", LENGTHS)
def test_cached_and_streamed_are_naive(length: int) -> None:
    model, room = model_of(donor(WINDOW)), WINDOW - length
    assert generate.cached(model, prompt_of(length), room) == naive_text(length)
    assert list(generate.stream(model, prompt_of(length), room)) == naive_text(length)


@pytest.mark.parametrize("batch_size", [1, 3, 8])
@pytest.mark.parametrize("layout", ["recompute", "contiguous", "slots", "paged"])
def test_the_engine_is_naive_over_the_whole_window(layout: str, batch_size: int) -> None:
    engine = tiny_engine(num_positions=WINDOW, kv_layout=layout, max_num_batched_tokens=1024)
    batches = watch(engine)
    lengths = LENGTHS[:batch_size]
    outputs = run(engine, [prompt_of(length) for length in lengths], TO_THE_END)
    assert max(len(sizes) for sizes in sizes_seen(batches)) == batch_size
    for length, output in zip(lengths, outputs, strict=True):
        assert tokens_of(output) == naive_text(length)
        assert output.outputs[0].finish_reason == "length"
    assert_nothing_left(engine)


def test_token_by_token_is_naive_over_the_whole_window() -> None:
    engine = tiny_engine(num_positions=WINDOW, max_num_batched_tokens=1)
    batches = watch(engine)
    (output,) = run(engine, [prompt_of(60)], TO_THE_END)
    assert tokens_of(output) == naive_text(60)
    assert sizes_seen(batches) == [(1,)] * (WINDOW - 1)


def test_a_stream_computes_a_token_when_it_is_asked_for() -> None:
    model = model_of(donor(WINDOW))
    tokens = generate.stream(model, prompt_of(33), 40)
    assert next(tokens) == naive_text(33)[0]
    other = generate.cached(model, prompt_of(60), 5)  # what runs in between changes nothing
    assert next(tokens) == naive_text(33)[1]
    assert isinstance(tokens, Generator)
    tokens.close()
    assert other == naive_text(60)[:5]


def test_nothing_to_generate_and_nothing_to_begin_with() -> None:
    model = model_of(donor(WINDOW))
    for loop in (generate.naive, generate.cached):
        assert loop(model, [1, 2, 3], 0) == []
        with pytest.raises(ValueError, match="empty"):
            loop(model, [], 3)
        with pytest.raises(ValueError, match=r"100 prompt tokens and 29 new .* 128 positions"):
            loop(model, prompt_of(100), 29)


SEEDS_124M = (1, 2, 3, 4, 5, 6)
LENGTHS_124M = [
    *(15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200),
    *(255, 256, 257, 400, 511),
]


def error_on_the_124m_shape(engine: Engine, naive: Engine, seed: int) -> tuple[float, float]:
    """(largest logit error, smallest top-two margin) of half a window, its tokens compared.

    496 cached tokens against one full pass that gives every next-token choice, and against the
    naive engine (a fresh forward over the text so far) at 19 lengths. Whole windows
    are in test_mini_equality.py and, as bytes, in test_native.py.
    """
    prompt = prompt_of(16, seed)
    half = SamplingParams(max_tokens=496, temperature=0.0, ignore_eos=True)
    (output,) = run(engine, [prompt], half)
    tokens = tokens_of(output)
    assert len(tokens) == 496
    assert oracle.distinct_share(tokens) >= 0.5
    text = [*prompt, *tokens]
    rows = every_row(model_of(engine), text[:-1])
    assert rows[15:].argmax(-1).tolist() == tokens
    one = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=64)
    errors = []
    for length in LENGTHS_124M:
        (step,) = run(naive, [text[:length]], one)
        (scored,) = step.outputs[0].logprobs or ()
        expected = oracle.log_softmax(rows[length - 1])
        errors.append(max(abs(expected[i] - value) for i, value in scored.top))
        if length >= len(prompt):
            assert tokens_of(step) == [text[length]]
    return max(errors), oracle.smallest_margin(rows[15:])


@pytest.mark.slow
def test_on_the_124m_shape_the_cached_text_is_the_naive_one() -> None:
    """In hundreds of choices of random weights one is often too close to prove anything: then the
    next seed's text is taken, until one is not. Every text's tokens and logits are compared.
    """
    shape = {"model": "gpt2", "load_format": "dummy", "device": "cpu", "executor": "eager"}
    engine = Engine(engine_config(**shape, max_num_seqs=1))
    naive = Engine(engine_config(**shape, kv_layout="recompute"), donor=engine)
    assert len(set(LENGTHS_124M)) == 19
    for seed in SEEDS_124M:
        error, margin = error_on_the_124m_shape(engine, naive, seed)
        assert error < 1e-4
        if margin >= 10 * error:
            return
    pytest.fail("every text has a choice closer than ten times the error: none proves anything")
