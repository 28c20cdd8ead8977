"""On `mini`, over the whole window of 1,024 positions, every way gives the same text.

A trained model's greedy text goes in circles, which prove nothing; penalties on what was said keep
it moving. The dense oracle judges the text in one pass: whoever gives the same tokens is right.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import oracle
import pytest
from helpers import assert_nothing_left, drain, outputs_of, tokens_of, watch

from nanoserve import generate
from nanoserve.engine.eager import EagerExecutor
from nanoserve.engine.engine import Engine
from nanoserve.llm import LLM, engine_config
from nanoserve.model.hub import find
from nanoserve.model.weights import load_model_config, load_weights
from nanoserve.request import RequestOutput, SamplingParams

PROMPTS = ("My dear Emma, said he,", "Call me", "A")
PENALTY = 2.0
TO_THE_END = SamplingParams(
    max_tokens=None,
    temperature=0.0,
    ignore_eos=True,
    presence_penalty=PENALTY,
    frequency_penalty=PENALTY,
    logprobs=8,
)


@cache
def mini() -> LLM:
    """With the default layout; its engine lends its weights to others."""
    return LLM("mini", device="cpu", executor="eager", max_num_seqs=len(PROMPTS))


@cache
def together() -> tuple[RequestOutput, ...]:
    """All prompts as one batch, each to the end of the window."""
    return tuple(mini().generate(PROMPTS, TO_THE_END))


def run(engine: Engine, prompts: tuple[str, ...]) -> list[list[int]]:
    for prompt in prompts:
        engine.add(prompt, mini().tokenizer.encode_prompt(prompt), TO_THE_END)
    batches = watch(engine)
    outputs = outputs_of(drain(engine))
    assert max(len(batch.context_lens) for batch in batches) == len(prompts)
    assert_nothing_left(engine)
    return [tokens_of(outputs[prompt]) for prompt in prompts]


def mini_engine(**options: object) -> Engine:
    config = engine_config(model="mini", device="cpu", executor="eager", **options)
    return Engine(config, donor=mini().engine, poison_freed=True)


@pytest.mark.parametrize("number", range(len(PROMPTS)), ids=PROMPTS)
def test_the_text_of_a_whole_window_is_the_oracles(number: int) -> None:
    checkpoint = find("mini")
    config = load_model_config(checkpoint)
    weights = oracle.dense_weights(load_weights(checkpoint, config))
    output = together()[number]
    prompt, tokens = list(output.prompt_token_ids), tokens_of(output)
    assert len(prompt) + len(tokens) == 1024
    rows = oracle.logits(config, weights, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    scored = zip(output.outputs[0].logprobs or (), oracle.log_softmax(rows), strict=True)
    error = max(abs(row[i] - value) for entry, row in scored for i, value in entry.top)
    assert error < 1e-4
    assert oracle.distinct_share(tokens) >= 0.5
    counts = np.zeros(config.vocab_size)
    for place, token in enumerate(tokens):
        rows[place] -= PENALTY * counts + PENALTY * (counts > 0)
        counts[token] += 1
    assert tokens == rows.argmax(-1).tolist()
    assert oracle.smallest_margin(rows) >= 10 * error


def test_streamed_alone_it_is_the_same_text() -> None:
    deltas = list(mini().stream(PROMPTS[1], TO_THE_END))
    assert [token for delta in deltas for token in delta.token_ids] == tokens_of(together()[1])
    assert "".join(delta.text for delta in deltas) == together()[1].outputs[0].text


@pytest.mark.slow
@pytest.mark.parametrize("layout,num_prompts", [("contiguous", 3), ("slots", 1), ("paged", 3)])
def test_every_layout_and_batch_size_gives_the_same_text(layout: str, num_prompts: int) -> None:
    """Naive is in the textbook loops below: a whole window of it takes a minute."""
    engine = mini_engine(kv_layout=layout, max_num_batched_tokens=1024 * num_prompts)
    texts = run(engine, PROMPTS[:num_prompts])
    assert texts == [tokens_of(output) for output in together()[:num_prompts]]


@pytest.mark.slow
def test_token_by_token_it_is_the_same_text() -> None:
    (text,) = run(mini_engine(max_num_batched_tokens=1), PROMPTS[:1])
    assert text == tokens_of(together()[0])


@pytest.mark.slow
def test_the_textbook_loops_agree_to_the_end_of_the_window() -> None:
    """Their text does go in circles; the tests above say that the model under them is right."""
    executor = mini().engine.executor
    assert isinstance(executor, EagerExecutor)
    begun = together()[0]  # the last 200 tokens are the dearest, and positions end among them
    prompt = [*begun.prompt_token_ids, *tokens_of(begun)][:824]
    room = 1024 - len(prompt)
    naive = generate.naive(executor.model, prompt, room)
    assert generate.cached(executor.model, prompt, room) == naive
    assert list(generate.stream(executor.model, prompt, room)) == naive
    greedy = SamplingParams(max_tokens=None, temperature=0.0, ignore_eos=True)
    (output,) = mini().generate([prompt], greedy)
    assert tokens_of(output) == naive
