"""What a request gets from the engine: where it ends, what it is refused, and what cannot hurt it.

That its tokens are the right ones is the business of test_equality.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import oracle
import pytest
from helpers import (
    EOS,
    NUM_TOKEN_IDS,
    account_of,
    assert_nothing_left,
    assert_replays,
    break_rows_of,
    drain,
    fail_once,
    greedy,
    outputs_of,
    pool_bytes,
    prompt_of,
    run,
    run_each,
    sizes_seen,
    tiny_engine,
    tiny_model,
    tokens_of,
    watch,
)

from nanoserve.engine.batch import StepBatch, StepResult
from nanoserve.engine.build import make_scheduler
from nanoserve.engine.engine import Engine, StepError
from nanoserve.engine.metrics import EngineLog, replay
from nanoserve.request import FinishReason, RequestDelta, RequestOutput, SamplingParams

ASCII_ONLY = dict.fromkeys((*range(94, 256), EOS), -100.0)
"""Bans every byte that is no visible ASCII, so that a greedy text is easy to read and to cut."""


@cache
def free_text(length: int = 22, num_tokens: int = 24) -> RequestOutput:
    """A readable greedy text that nothing stops."""
    params = greedy(num_tokens, logit_bias=ASCII_ONLY)
    return run(tiny_engine(), [prompt_of(length)], params)[0]


def test_a_text_ends_before_any_stop_string_however_tokens_cut_it() -> None:
    """Every piece of the text, of one to four characters, stops it where it first occurs."""
    text, tokens = free_text().outputs[0].text, tokens_of(free_text())
    engine = tiny_engine()
    stops = sorted({text[i : i + size] for size in (1, 2, 3, 4) for i in range(0, len(text), 3)})
    assert len(text) > len(tokens), "no token spells two characters"
    for stop in stops:
        engine.add(stop, prompt_of(22), greedy(24, logit_bias=ASCII_ONLY, stop=(stop,)))
    deltas = drain(engine)
    for stop, output in outputs_of(deltas).items():
        (choice,) = output.outputs
        assert choice.text == text[: text.index(stop)]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
        assert list(choice.token_ids) == tokens[: len(choice.token_ids)]
        assert "".join(d.text for d in deltas if d.request_id == stop) == choice.text
        decoded = [engine.tokenizer.decode(tokens[:n]) for n in range(1, len(choice.token_ids) + 1)]
        assert [stop in so_far for so_far in decoded] == [False] * (len(decoded) - 1) + [True]
    assert_nothing_left(engine)


def test_a_stop_string_can_stay_in_the_text_and_waits_for_min_tokens() -> None:
    text = free_text().outputs[0].text
    stop = text[3:5]
    kept = greedy(24, logit_bias=ASCII_ONLY, stop=(stop,), include_stop_str_in_output=True)
    (output,) = run(tiny_engine(), [prompt_of(22)], kept)
    assert output.outputs[0].text == text[: text.index(stop) + 2]
    late = greedy(24, logit_bias=ASCII_ONLY, stop=(stop,), min_tokens=20)
    (output,) = run(tiny_engine(), [prompt_of(22)], late)
    assert len(output.outputs[0].token_ids) >= 20
    assert output.outputs[0].text.startswith(text[: text.index(stop) + 2])


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    text = free_text().outputs[0].text
    params = greedy(24, logit_bias=ASCII_ONLY, stop=(text[-3:] + "\0",))
    engine = tiny_engine()
    engine.add("held", prompt_of(22), params)
    deltas = drain(engine)
    assert "".join(delta.text for delta in deltas) == text
    assert len(deltas[-1].text) >= 3
    assert deltas[-1].finish_reason == "length"


EOS_PROMPT = 12
"""Of the prompts, one whose greedy text reaches the end-of-text token within 16 tokens."""


def test_end_of_text_is_a_token_but_no_text() -> None:
    (free,) = run(tiny_engine(), [prompt_of(EOS_PROMPT)], greedy(16))
    place = tokens_of(free).index(EOS)
    assert 0 < place < 15
    params = SamplingParams(max_tokens=16, temperature=0.0, logprobs=0)
    (output,) = run(tiny_engine(), [prompt_of(EOS_PROMPT)], params)
    (choice,) = output.outputs
    assert list(choice.token_ids) == tokens_of(free)[: place + 1]
    assert choice.logprobs is not None
    assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)
    assert "endoftext" not in choice.text
    assert "endoftext" not in free.outputs[0].text
    assert free.outputs[0].text.startswith(choice.text)


def test_min_tokens_forbids_what_would_end_the_text_and_nothing_else() -> None:
    (free,) = run(tiny_engine(), [prompt_of(EOS_PROMPT)], greedy(16))
    place = tokens_of(free).index(EOS)
    params = SamplingParams(max_tokens=16, temperature=0.0, min_tokens=place + 1)
    (output,) = run(tiny_engine(), [prompt_of(EOS_PROMPT)], params)
    tokens = tokens_of(output)
    assert tokens[:place] == tokens_of(free)[:place]
    text = [*prompt_of(EOS_PROMPT), *tokens[:place]]
    row = oracle.logits(tiny_model().config, tiny_model().weights, text)[-1]
    row[EOS] = -np.inf
    assert tokens[place] == int(row.argmax())
    stopped = replace(params, stop_token_ids=(tokens_of(free)[0],), min_tokens=1)
    (output,) = run(tiny_engine(), [prompt_of(EOS_PROMPT)], stopped)
    assert tokens_of(output)[0] != tokens_of(free)[0]


def test_a_stop_id_ends_the_text_and_says_so() -> None:
    (free,) = run(tiny_engine(), [prompt_of(22)], greedy(16))
    stop_id = tokens_of(free)[5]
    assert stop_id not in tokens_of(free)[:5]
    (output,) = run(tiny_engine(), [prompt_of(22)], greedy(16, stop_token_ids=(9, stop_id)))
    (choice,) = output.outputs
    assert list(choice.token_ids) == tokens_of(free)[:6]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop_id)
    assert choice.text == tiny_engine().tokenizer.decode(tokens_of(free)[:5])


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    """The model's vocabulary has an id that its tokenizer has not; a bias cannot reach it."""
    beyond = NUM_TOKEN_IDS
    params = greedy(8, logit_bias={beyond: 99.0}, logprobs=64)
    (output,) = run(tiny_engine(), [prompt_of(22)], params)
    (free,) = run(tiny_engine(), [prompt_of(22)], greedy(8))
    assert tokens_of(output) == tokens_of(free)
    assert tiny_model().config.vocab_size == beyond + 1
    (output,) = run(tiny_engine(), [[beyond, 1]], greedy(2))  # as a prompt it is the model's own
    assert len(tokens_of(output)) == 2


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("prompt_logprobs", [None, 3])
def test_no_tokens_asked_for(n: int, prompt_logprobs: int | None) -> None:
    engine = tiny_engine()
    params = SamplingParams(max_tokens=0, prompt_logprobs=prompt_logprobs, n=n)
    engine.add("none", prompt_of(22), params)
    deltas = drain(engine)
    output = outputs_of(deltas)["none"]
    assert [c.token_ids for c in output.outputs] == [()] * n
    assert [c.finish_reason for c in output.outputs] == ["length"] * n
    assert [delta.token_ids for delta in deltas] == [()] * n
    if prompt_logprobs is None:
        assert output.prompt_logprobs is None
    else:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 22
    assert output.metrics.first_token_s is None
    assert_nothing_left(engine)


def test_asked_for_prompt_log_probabilities_bypass_the_prefix_cache() -> None:
    engine = tiny_engine(block_size=4)
    params = greedy(2, prompt_logprobs=2)
    (first,) = run(engine, [prompt_of(22)], params)
    (again,) = run(engine, [prompt_of(22)], params)
    (without,) = run(engine, [prompt_of(22)], greedy(2))
    assert without.metrics.num_cached_tokens == 20
    assert again.metrics.num_cached_tokens == 0
    assert again.prompt_logprobs == first.prompt_logprobs
    assert tokens_of(again) == tokens_of(without)


@pytest.mark.parametrize("best_of", [None, 4])
def test_log_probabilities_of_the_prompt_come_with_the_first_delta(best_of: int | None) -> None:
    engine = tiny_engine()
    params = SamplingParams(
        max_tokens=4, prompt_logprobs=1, n=3, best_of=best_of, seed=5, ignore_eos=True
    )
    engine.add("asked", prompt_of(22), params)
    deltas = drain(engine)
    output = outputs_of(deltas)["asked"]
    assert deltas[0].prompt_logprobs == output.prompt_logprobs
    assert deltas[0].prompt_logprobs is not None
    assert len(deltas[0].prompt_logprobs) == 22
    assert [delta.prompt_logprobs for delta in deltas[1:]] == [None] * (len(deltas) - 1)


def test_special_tokens_show_in_the_text_if_wanted() -> None:
    shown = {
        skip: run(
            tiny_engine(),
            [prompt_of(5)],
            greedy(3, logit_bias={EOS: 100.0}, skip_special_tokens=skip),
        )[0].outputs[0]
        for skip in (True, False)
    }
    assert shown[True].token_ids == shown[False].token_ids == (EOS,) * 3
    assert shown[True].text == ""
    assert shown[False].text == 3 * tiny_engine().tokenizer.decode([EOS])


def test_an_automatic_token_budget_is_resolved_once() -> None:
    """A replay after the machine was measured anew must not plan with another budget."""
    engine = tiny_engine()
    assert engine.config.scheduler.max_num_batched_tokens == engine.scheduler.max_num_batched_tokens


def test_choices_differ_and_repeat_on_a_second_call() -> None:
    engine = tiny_engine()
    params = SamplingParams(max_tokens=12, n=4, seed=11, ignore_eos=True)
    (first,) = run(engine, [prompt_of(22)], params)
    (second,) = run(engine, [prompt_of(22)], params)
    texts = [choice.token_ids for choice in first.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert [choice.token_ids for choice in second.outputs] == texts
    (unseeded,) = run(engine, [prompt_of(22)], replace(params, seed=None))
    (again,) = run(engine, [prompt_of(22)], replace(params, seed=None))
    assert unseeded.seed != again.seed
    (repeated,) = run(engine, [prompt_of(22)], replace(params, seed=unseeded.seed))
    assert [c.token_ids for c in repeated.outputs] == [c.token_ids for c in unseeded.outputs]


def test_best_of_gives_the_best_by_mean_log_probability_and_only_those() -> None:
    engine = tiny_engine()
    every = SamplingParams(max_tokens=12, n=6, seed=3, logprobs=0, stop_token_ids=tuple(range(60)))
    (all_six,) = run(engine, [prompt_of(EOS_PROMPT)], every)
    totals = [choice.cumulative_logprob or 0.0 for choice in all_six.outputs]
    lengths = [len(choice.token_ids) for choice in all_six.outputs]
    best = sorted(range(6), key=lambda i: totals[i] / lengths[i], reverse=True)[:2]
    likeliest = sorted(range(6), key=totals.__getitem__, reverse=True)[:2]
    assert best not in ([0, 1], likeliest), "another seed would prove more"
    engine.add("best", prompt_of(EOS_PROMPT), replace(every, n=2, best_of=6))
    deltas = drain(engine)
    output = outputs_of(deltas)["best"]
    assert [c.token_ids for c in output.outputs] == [all_six.outputs[i].token_ids for i in best]
    assert [c.index for c in output.outputs] == [0, 1]
    assert [(d.index, d.token_ids) for d in deltas] == [
        (c.index, c.token_ids) for c in output.outputs
    ], "nothing may be seen before it is known to be among the best"
    engine.add("hidden", prompt_of(22), replace(every, n=1, best_of=2, logprobs=None))
    (choice,) = outputs_of(drain(engine))["hidden"].outputs
    assert choice.logprobs is None
    assert choice.cumulative_logprob is not None


def test_each_request_of_a_batch_is_sampled_its_own_way() -> None:
    wishes = [
        greedy(10),
        SamplingParams(max_tokens=7, temperature=0.7, top_k=5, seed=1),
        SamplingParams(max_tokens=9, temperature=1.5, top_p=0.6, seed=2, logprobs=3),
        SamplingParams(max_tokens=8, min_p=0.1, seed=3, repetition_penalty=1.3),
        SamplingParams(max_tokens=6, seed=4, presence_penalty=1.0, frequency_penalty=0.5, n=2),
        SamplingParams(max_tokens=5, seed=5, logit_bias={7: 100.0}),
        SamplingParams(max_tokens=0, prompt_logprobs=1, seed=0),
    ]
    engine = tiny_engine()
    batches = watch(engine)
    asked = [(prompt_of(20 + number), params) for number, params in enumerate(wishes)]
    together = run_each(engine, asked)
    assert max(len(sizes) for sizes in sizes_seen(batches)) == len(wishes) + 1
    for (prompt, params), mine in zip(asked, together, strict=True):
        (alone,) = run(tiny_engine(), [prompt], params)
        assert [c.token_ids for c in mine.outputs] == [c.token_ids for c in alone.outputs]
    assert set(tokens_of(together[5])) == {7}
    assert_nothing_left(engine)


def test_a_lower_priority_number_runs_first_and_later_ones_wait() -> None:
    engine = tiny_engine(max_num_seqs=1)
    engine.add("later", prompt_of(5), greedy(3), priority=1)
    engine.add("sooner", prompt_of(6), greedy(3), priority=0)
    order = [delta.request_id for delta in drain(engine)]
    assert order == ["sooner"] * 3 + ["later"] * 3


# What is refused, and what is cut


def test_a_request_that_reaches_the_contexts_end_finishes_with_length() -> None:
    engine = tiny_engine(max_model_len=64)
    (output,) = run(engine, [prompt_of(40)], greedy(100))
    assert len(tokens_of(output)) == 24  # B10: 1,000 of 1,024 and 100 more are 24
    assert output.outputs[0].finish_reason == "length"
    (after,) = run(engine, [prompt_of(40)], greedy(5))
    assert tokens_of(after) == tokens_of(output)[:5]
    (to_the_end,) = run(engine, [prompt_of(40)], replace(greedy(1), max_tokens=None))
    assert tokens_of(to_the_end) == tokens_of(output)


def test_a_prompt_that_cannot_fit_is_refused_with_the_numbers() -> None:
    engine = tiny_engine(max_model_len=64)
    for length in (64, 65, 1000):
        with pytest.raises(ValueError, match=rf"has {length} tokens .* holds 64 .* at most 63"):
            engine.add("long", prompt_of(length), greedy(1))
    assert len(tokens_of(run(engine, [prompt_of(63)], greedy(5))[0])) == 1
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    (output,) = run(engine, [prompt_of(64)], scored)  # nothing is to follow: it may fill it all
    assert len(output.prompt_logprobs or ()) == 64
    with pytest.raises(ValueError, match=r"has 65 tokens .* at most 64"):
        engine.add("long", prompt_of(65), scored)
    assert_nothing_left(engine)


def test_a_cap_that_is_too_large_is_refused_under_strict_context() -> None:
    engine = tiny_engine(max_model_len=64, strict_context=True)
    with pytest.raises(ValueError, match=r"\(40\) \+ max_tokens \(25\) is 65 tokens.* 64"):
        engine.add("long", prompt_of(40), greedy(25))
    assert len(tokens_of(run(engine, [prompt_of(40)], greedy(24))[0])) == 24
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    "prompt,words",
    [
        ([], "empty"),
        ([384], r"384 is outside the vocabulary \(0 to 383\)"),
        ([-1], "-1 is outside"),
        ([2**40], "outside the vocabulary"),
        ([1, "a"], "must be an integer, got 'a'"),
        ([True], "must be an integer, got True"),
        ([1.0], "must be an integer"),
    ],
)
def test_prompts_that_are_none(prompt: list[int], words: str) -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match=words):
        engine.add("bad", prompt, greedy(1))
    assert_nothing_left(engine)
    assert engine.log.num_arrivals == 0


def test_parameters_that_this_model_cannot_honour_are_refused() -> None:
    engine = tiny_engine()
    for params, words in (
        (greedy(1, logit_bias={384: 1.0}), "logit_bias"),
        (greedy(1, stop_token_ids=(384,)), "stop_token_ids"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.add("bad", [1], params)
    for timeout_s in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout_s"):
            engine.add("bad", [1], greedy(1), timeout_s=timeout_s)
    engine.add("taken", [1], greedy(1))
    with pytest.raises(ValueError, match="'taken' is in use"):
        engine.add("taken", [1], greedy(1))
    drain(engine)
    engine.add("taken", [1], greedy(1))  # free again once it is finished
    drain(engine)
    assert_nothing_left(engine)


def test_a_donor_of_other_weights_is_refused() -> None:
    donor = tiny_engine()
    other = replace(donor.config, dummy_seed=1)
    with pytest.raises(ValueError, match=r"dummy_seed is 1, but the donor's weights .* with 0"):
        Engine(other, donor=donor)


def test_a_donor_of_another_dtype_shares_nothing() -> None:
    half = tiny_engine(dtype="bfloat16")
    assert (
        half.executor.memory_stats()["weights_bytes"] * 2
        == (tiny_engine().executor.memory_stats()["weights_bytes"])
    )


def test_the_cache_is_sized_as_asked_and_says_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = tiny_engine(max_model_len=100, kv_cache_memory_bytes=pool_bytes(13 * 16))
    assert engine.spec.num_blocks == 13
    assert "208 tokens, 1 requests of 100" in caplog.text  # of 7 blocks each
    with pytest.raises(ValueError, match=r"may take 1000 bytes, .* needs 86016 .*memory-bytes"):
        tiny_engine(max_model_len=100, kv_cache_memory_bytes=1000)
    default = tiny_engine(max_num_seqs=3, max_model_len=100)
    assert default.spec.num_blocks == 3 * 7


# The window that slides


UNLIKE_BEFORE = {"presence_penalty": 2.0, "frequency_penalty": 2.0}


@cache
def slid_text(length: int, num_tokens: int, window: int, kept: int) -> tuple[list[int], int]:
    """The oracle's: whenever the window is full, its last `kept` tokens start from scratch.

    What was said is penalised, in the window or not, lest so short a memory goes in circles.
    """
    model, context, num_slides = tiny_model(), prompt_of(length), 0
    tokens: list[int] = []
    for _ in range(num_tokens):
        row = oracle.logits(model.config, model.weights, context)[-1, :NUM_TOKEN_IDS]
        for token_id in set(tokens):
            row[token_id] -= 2.0 * (1 + tokens.count(token_id))
        assert oracle.smallest_margin(row[None]) > 1e-4
        tokens.append(int(row.argmax()))
        context.append(tokens[-1])
        if len(context) == window and len(tokens) < num_tokens:
            context, num_slides = context[-kept:], num_slides + 1
    return tokens, num_slides


@pytest.mark.parametrize("layout", ["recompute", "contiguous", "slots", "paged"])
@pytest.mark.parametrize("kept", [None, 5, 23])
def test_a_window_that_slides_is_encoded_from_scratch(layout: str, kept: int | None) -> None:
    """To three times the context (B12): after a slide, positions count from the window's start."""
    engine = tiny_engine(
        kv_layout=layout,
        max_model_len=24,
        block_size=8,
        context_overflow="slide",
        slide_window=kept,
    )
    (output,) = run(engine, [prompt_of(10)], greedy(72, **UNLIKE_BEFORE))
    expected, num_slides = slid_text(10, 72, window=24, kept=kept or 12)
    assert num_slides >= 4
    assert oracle.distinct_share(expected) >= 0.5
    assert tokens_of(output) == expected
    assert output.metrics.num_slides == num_slides
    assert output.outputs[0].finish_reason == "length"
    assert_nothing_left(engine)


def test_sliding_windows_share_steps_chunks_and_a_tight_pool() -> None:
    engine = tiny_engine(
        max_model_len=32,
        context_overflow="slide",
        block_size=8,
        max_num_batched_tokens=6,
        kv_cache_memory_bytes=pool_bytes(64),
    )
    lengths = (10, 3, 20)
    prompts = [prompt_of(length) for length in lengths]
    outputs = run(engine, prompts, greedy(60, **UNLIKE_BEFORE))
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    for length, output in zip(lengths, outputs, strict=True):
        expected, num_slides = slid_text(length, 60, window=32, kept=16)
        assert tokens_of(output) == expected
        assert output.metrics.num_slides == num_slides
    assert_nothing_left(engine)


# What cannot hurt others


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_that_passes_is_a_timeout() -> None:
    clock = Clock()
    engine = tiny_engine(clock=clock, max_num_seqs=2)
    engine.add("running", prompt_of(5), greedy(50), timeout_s=3.0)
    engine.add("waiting", prompt_of(5), greedy(50, n=2), timeout_s=2.0)
    engine.add("patient", prompt_of(7), greedy(6))
    for _ in range(2):
        engine.step()
    clock.now += 2.5
    deltas = engine.step()
    assert [d.finish_reason for d in deltas if d.request_id == "waiting"] == ["timeout"] * 2
    clock.now += 1.0
    deltas += drain(engine)
    outputs = outputs_of(deltas)
    assert outputs["running"].outputs[0].finish_reason is FinishReason.TIMEOUT
    assert len(tokens_of(outputs["running"])) >= 3
    assert outputs["running"].outputs[0].text
    assert outputs["patient"].outputs[0].finish_reason == "length"
    assert_nothing_left(engine)


def test_a_row_that_is_not_finite_fails_its_own_request_only() -> None:
    engine = tiny_engine()
    expected = tokens_of(run(engine, [prompt_of(22)], greedy(12))[0])
    for request_id in ("broken", "whole"):
        engine.add(request_id, prompt_of(22), greedy(12))
    for _ in range(4):
        engine.step()
    break_rows_of(engine, "broken")
    outputs = outputs_of(drain(engine))
    assert outputs["broken"].outputs[0].finish_reason is FinishReason.ERROR
    assert tokens_of(outputs["broken"]) == expected[:4]
    assert tokens_of(outputs["whole"]) == expected
    assert_nothing_left(engine)


def test_a_prompt_whose_scores_are_not_finite_ends_with_an_error() -> None:
    engine = tiny_engine(max_num_batched_tokens=8)
    engine.add("broken", prompt_of(22), greedy(4, prompt_logprobs=0))
    break_rows_of(engine, "broken")
    (choice,) = outputs_of(drain(engine))["broken"].outputs
    assert choice.finish_reason is FinishReason.ERROR
    assert choice.token_ids == ()
    assert_nothing_left(engine)


def test_a_broken_choice_is_not_the_best() -> None:
    engine = tiny_engine()
    engine.add("best", prompt_of(22), SamplingParams(max_tokens=6, best_of=3, seed=0))
    engine.step()
    sequence = engine._groups["best"].sequences[0]
    best = max(engine._groups["best"].sequences, key=lambda s: s.mean_logprob)
    best.is_broken = True
    (choice,) = outputs_of(drain(engine))["best"].outputs
    assert sequence.request.finish_reason is not None
    assert choice.finish_reason is FinishReason.LENGTH
    assert len(choice.token_ids) == 6


def test_a_step_that_fails_loses_its_requests_and_the_engine_goes_on() -> None:
    engine = tiny_engine(max_num_seqs=3, block_size=8)
    clean = tokens_of(run(engine, [prompt_of(34)], greedy(8))[0])
    for number in range(3):
        engine.add(f"lost-{number}", prompt_of(34), greedy(8))
    engine.add("kept", prompt_of(34), greedy(8))
    engine.step()
    fail_once(engine)
    with pytest.raises(StepError, match="lost-0, lost-1, lost-2") as caught:
        engine.step()
    assert caught.value.request_ids == ["lost-0", "lost-1", "lost-2"]
    assert isinstance(caught.value.__cause__, RuntimeError)
    engine.scheduler.check_integrity()
    outputs = outputs_of(drain(engine))
    assert list(outputs) == ["kept"]
    assert outputs["kept"].metrics.num_cached_tokens == 0  # nothing suspect is shared
    assert tokens_of(outputs["kept"]) == clean
    reasons = {a.request.request_id: a.finish_reason for a in engine.log.finished}
    assert reasons["lost-0"] is FinishReason.ERROR
    assert_nothing_left(engine)


def test_a_failed_step_takes_the_choices_that_waited_with_it() -> None:
    engine = tiny_engine(max_num_seqs=1)
    engine.add("twins", prompt_of(9), greedy(8, n=2))
    engine.step()
    fail_once(engine)
    with pytest.raises(StepError, match="dropped with it: twins"):
        engine.step()
    assert_nothing_left(engine)


def test_deadlines_that_pass_in_a_step_that_fails_are_still_reported() -> None:
    clock = Clock()
    engine = tiny_engine(clock=clock, max_num_seqs=1)
    engine.add("lost", prompt_of(9), greedy(8))
    engine.add("expired", prompt_of(9), greedy(8), timeout_s=1.0)
    engine.step()
    clock.now += 2.0
    fail_once(engine)
    with pytest.raises(StepError) as caught:
        engine.step()
    assert caught.value.request_ids == ["lost"]
    (delta,) = caught.value.deltas
    assert (delta.request_id, delta.finish_reason) == ("expired", FinishReason.TIMEOUT)
    assert delta.output is not None
    assert_nothing_left(engine)


def test_an_interrupted_step_loses_its_requests_and_leaves_an_engine_that_works() -> None:
    engine = tiny_engine()
    engine.add("interrupted", prompt_of(9), greedy(8))
    execute = engine.executor.execute

    def interrupt(batch: object) -> object:
        raise KeyboardInterrupt

    engine.executor.execute = interrupt  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.executor.execute = execute  # type: ignore[method-assign]
    assert not engine.is_active("interrupted")
    assert_nothing_left(engine)
    assert len(tokens_of(run(engine, [prompt_of(9)], greedy(8))[0])) == 8
    engine.scheduler.check_integrity()


STEP_FILES = {"engine.py", "sequence.py", "metrics.py", "text.py", "scheduler.py", "blocks.py"}


def interrupt_at(engine: Engine, count: int) -> bool:
    """Step, interrupted as the `count`-th line of the step's own code begins; False: it has fewer.

    Only `Engine._step` and what it calls are counted: a second Ctrl-C within the microseconds in
    which the first is being seen to is nobody's concern.
    """
    seen = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        if Path(frame.f_code.co_filename).name not in STEP_FILES:
            return None
        if event == "line":
            seen += 1
            if seen == count:
                raise KeyboardInterrupt
        return trace

    step = engine._step

    def traced_step() -> list[RequestDelta]:
        sys.settrace(trace)
        try:
            return step()
        finally:
            sys.settrace(None)

    engine._step = traced_step  # type: ignore[method-assign]
    try:
        engine.step()
    except KeyboardInterrupt:
        return True
    finally:
        engine._step = step  # type: ignore[method-assign]
    return False


def test_an_interrupt_at_any_line_of_a_step_leaves_an_engine_that_gives_the_right_tokens() -> None:
    """The step decodes one request, expires one, forks, admits and finishes others."""
    clock = Clock()
    engine = tiny_engine(clock=clock, max_num_seqs=5, block_size=4)
    expected = tokens_of(run(engine, [prompt_of(11)], greedy(5))[0])
    was_interrupted, count = True, 0
    while was_interrupted:
        count += 7
        engine.add("runs", prompt_of(9), greedy(8))
        engine.add("ends", prompt_of(6), greedy(2))
        engine.add("forks", prompt_of(6, seed=1), greedy(4, n=2))
        engine.step()
        engine.add("expires", prompt_of(5), greedy(4), timeout_s=1.0)
        engine.add("joins", prompt_of(8), greedy(4))
        engine.add("waits", prompt_of(11), greedy(5))
        clock.now += 2.0
        was_interrupted = interrupt_at(engine, count)
        engine.scheduler.check_integrity()
        assert not (was_interrupted and engine.is_active("runs"))
        outputs = outputs_of(drain(engine))
        assert tokens_of(outputs["waits"]) == expected
        assert not engine.has_unfinished
        assert not engine.scheduler.has_unfinished
        assert not list(engine.scheduler.pool.owners())
        assert not engine.log.active
        engine.scheduler.check_integrity()
    assert count > 300  # it was interrupted in many places


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_a_step_that_stops_while_its_result_is_read_leaves_no_plan_behind(
    fault: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step must neither find an uncommitted plan nor lose who was only waiting."""
    engine = tiny_engine(max_num_seqs=1)
    engine.add("lost", prompt_of(9), greedy(8))
    engine.add("waiting", prompt_of(22), greedy(8))
    engine.step()

    def stop(result: object) -> object:
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr("nanoserve.engine.engine.read_tokens", stop)
        with pytest.raises(KeyboardInterrupt if fault is KeyboardInterrupt else StepError):
            engine.step()
    assert not engine.is_active("lost")
    (output,) = outputs_of(drain(engine)).values()
    assert output.request_id == "waiting"
    assert len(tokens_of(output)) == 8
    assert_nothing_left(engine)


def test_an_abort_from_inside_a_step_takes_effect_when_it_ends() -> None:
    """A finalizer may run anywhere, a closed stream's in the middle of another's step."""
    engine = tiny_engine()
    engine.add("closed", prompt_of(9), greedy(8))
    engine.add("other", prompt_of(7), greedy(8))
    execute = engine.executor.execute

    def execute_and_abort(batch: StepBatch) -> StepResult:
        assert engine.abort("closed")
        return execute(batch)

    engine.executor.execute = execute_and_abort  # type: ignore[method-assign]
    deltas = engine.step()
    engine.executor.execute = execute  # type: ignore[method-assign]
    assert {delta.request_id for delta in deltas} == {"closed", "other"}
    assert not engine.is_active("closed")
    while engine.has_unfinished:
        assert all(delta.request_id == "other" for delta in engine.step())
    assert_nothing_left(engine)


def test_500_requests_aborted_at_random_moments_leave_nothing_behind() -> None:
    rng = np.random.default_rng(0)
    engine = tiny_engine(
        max_num_seqs=5, max_model_len=64, block_size=4, kv_cache_memory_bytes=pool_bytes(88)
    )
    engine.log = EngineLog(max_steps=100, max_finished=16)
    (before,) = run(engine, [prompt_of(22)], greedy(12))
    ends = dict.fromkeys(("unknown", "fresh", "waiting", "running", "finished"), 0)
    for number in range(500):
        length = int(rng.integers(1, 40))
        params = SamplingParams(
            max_tokens=int(rng.integers(0, 16)),
            n=1 + (rng.random() < 0.2),
            prompt_logprobs=int(rng.integers(0, 3)) if rng.random() < 0.2 else None,
            seed=number,
        )
        engine.add(f"r{number}", prompt_of(length, number % 3), params)
        for _ in range(int(rng.integers(0, 4))):
            engine.step()
        victim = f"r{rng.integers(max(0, number - 7), number + 1)}"
        group = engine._groups.get(victim)
        state = "unknown" if group is None else group.sequences[0].request.status.value
        is_fresh = victim == f"r{number}" and state == "waiting"
        ends["fresh" if is_fresh else state] += 1
        assert engine.abort(victim) == (group is not None)
        engine.scheduler.check_integrity()
    for number in range(500):
        engine.abort(f"r{number}")
    del ends["finished"]  # a first choice that left before its siblings: rarer
    assert min(ends.values()) > 20, ends
    assert engine.scheduler.counters.num_preemptions > 0
    assert engine.scheduler.counters.num_forks > 0
    engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_available == engine.scheduler.pool.num_blocks
    assert not engine._groups
    assert not engine.log.active
    assert (len(engine.log.steps), len(engine.log.finished)) == (100, 16)
    assert len(engine.log.events) <= 64
    (after,) = run(engine, [prompt_of(22)], greedy(12))
    assert tokens_of(after) == tokens_of(before)
    assert not engine.abort("r3")


def test_static_rows_that_linger_write_where_nobody_reads() -> None:
    """The short one's row is computed until the long one is finished, and changes nothing."""
    engine = tiny_engine(batching="static", block_size=8)
    batches = watch(engine)
    long, short = run_each(engine, [(prompt_of(22), greedy(9)), (prompt_of(13), greedy(3))])
    (alone,) = run(tiny_engine(), [prompt_of(22)], greedy(9))
    assert tokens_of(long) == tokens_of(alone)
    assert len(tokens_of(short)) == 3
    assert sizes_seen(batches) == [(22, 13)] + [(1, 1)] * 8
    scratch = engine.spec.num_blocks * engine.spec.block_size
    lingering = [int(batch.slot_mapping[1]) == scratch for batch in batches[1:]]
    assert lingering == [False] * 2 + [True] * 6
    assert engine.scheduler.counters.computed_rows == 18
    assert engine.scheduler.counters.asked_rows == 12
    assert_nothing_left(engine)


# The log


def test_an_account_tells_each_advance_and_each_step_its_size() -> None:
    clock = Clock()
    engine = tiny_engine(clock=clock, max_num_batched_tokens=8)
    engine.add("told", prompt_of(20), greedy(3), arrival_s=90.0)
    while engine.has_unfinished:
        clock.now += 1.0
        engine.step()
    account = account_of(engine, "told")
    assert list(account.starts) == [0, 8, 16, 20, 21]
    assert list(account.sizes) == [8, 8, 4, 1, 1]
    assert list(account.steps) == [0, 1, 2, 3, 4]
    assert [(s.num_seqs, s.num_tokens) for s in engine.log.steps] == [
        (1, 8), (1, 8), (1, 4), (1, 1), (1, 1)
    ]  # fmt: skip
    assert account.request.arrival_s == 90.0
    assert (account.first_scheduled_s, account.first_token_s) == (101.0, 103.0)
    assert (account.last_token_s, account.finish_reason) == (105.0, FinishReason.LENGTH)


def busy_engine(batching: str) -> Engine:
    """Everything that a log must hold happened: it was drained, with one request still there."""
    engine = tiny_engine(
        batching=batching,
        max_num_seqs=4,
        max_model_len=64,
        block_size=8,
        max_num_batched_tokens=20,
        kv_cache_memory_bytes=pool_bytes(96),
        context_overflow="slide",
        clock=Clock(),
    )
    assert isinstance(engine.clock, Clock)
    for number in range(9):
        params = SamplingParams(max_tokens=6 * number, seed=number, n=1 + number % 2)
        if number == 4:
            params = replace(params, prompt_logprobs=1)
        timeout_s = 4.0 if number == 6 else None
        engine.add(f"r{number}", prompt_of(30, number // 4), params, timeout_s=timeout_s)
        engine.step()
        engine.clock.now += 0.25
    engine.abort("r3")
    fail_once(engine)
    with pytest.raises(StepError):
        engine.step()
    engine.add("nan", prompt_of(9), greedy(20))
    engine.add("long", prompt_of(9), greedy(70))
    for _ in range(30):
        engine.step()
        engine.clock.now += 0.25
    if "nan" in engine._groups:
        break_rows_of(engine, "nan")
    for _ in range(20):
        engine.step()
    return engine


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_a_log_replays_whatever_happened(batching: str) -> None:
    engine = busy_engine(batching)
    assert_replays(engine)
    drain(engine)
    assert_nothing_left(engine)
    reasons = {account.finish_reason for account in engine.log.finished}
    assert {"abort", "error", "length"} <= {str(reason) for reason in reasons}
    counters = engine.scheduler.counters
    assert counters.num_slides > 0
    if batching == "continuous":
        assert counters.num_preemptions > 0
        assert counters.prefix_hit_tokens > 0
        assert counters.num_forks > 0


def test_a_replay_notices_another_plan() -> None:
    engine = tiny_engine()
    run(engine, [prompt_of(20), prompt_of(9)], greedy(5))
    config = replace(
        engine.config, scheduler=replace(engine.config.scheduler, max_num_batched_tokens=7)
    )
    with pytest.raises(ValueError, match="step 0: the replayed plan differs"):
        replay(engine.log, make_scheduler(config, engine.spec, track_freed=False))


@pytest.mark.parametrize(
    "log",
    [lambda: EngineLog(max_steps=4), lambda: EngineLog(max_finished=2)],
    ids=["steps", "requests"],
)
def test_a_log_that_dropped_something_refuses_to_be_replayed(log: Callable[[], EngineLog]) -> None:
    engine = tiny_engine()
    engine.log = log()
    run(engine, [prompt_of(20), prompt_of(9)], greedy(3))
    assert_replays(engine)
    run(engine, [prompt_of(20)], greedy(4))
    with pytest.raises(ValueError, match="dropped"):
        assert_replays(engine)


def test_a_warm_up_is_a_real_step_that_leaves_no_trace() -> None:
    for layout in ("recompute", "contiguous", "slots", "paged"):
        engine = tiny_engine(kv_layout=layout)
        engine.executor.warm_up()
        engine.executor.synchronize()
        assert engine.log.num_steps == 0
        assert tokens_of(run(engine, [prompt_of(22)], greedy(4))[0]) == tokens_of(
            run(tiny_engine(), [prompt_of(22)], greedy(4))[0]
        )


def test_naive_requests_share_every_step_however_long_they_grow() -> None:
    """Their automatic budget holds all their windows: the first ones do not starve the rest."""
    engine = tiny_engine(kv_layout="recompute", max_num_seqs=3)
    room = engine.spec.max_model_len
    for number in range(3):
        engine.add(str(number), prompt_of(room // 2, number), greedy(room // 2))
    while engine.has_unfinished:
        assert len({delta.request_id for delta in engine.step()}) == 3
    assert_nothing_left(engine)
