"""What a request may ask for: every value of another kind or outside its range is refused by name.

Refused means ValueError before anything is queued, in one line that names the field.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from helpers import assert_nothing_left, drain, greedy, outputs_of, prompt_of, run, tiny_engine

from nanoserve import generate
from nanoserve.config import SchedulerConfig
from nanoserve.engine.eager import EagerExecutor
from nanoserve.llm import as_prompts
from nanoserve.model.gpt2 import GPT2
from nanoserve.request import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams, check_range

HUGE = 10**400  # an int that no float holds
OPTIONAL = ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "best_of")
NUMBERS = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "n",
)


def refusal(field: str, value: object) -> str:
    """The message with which `value` is refused."""
    params: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"^{field}") as raised:
        SamplingParams(**params)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 200
    return message


@pytest.mark.parametrize("field", OPTIONAL)
def test_none_is_for_what_may_be_absent(field: str) -> None:
    params: dict[str, Any] = {field: None}
    assert getattr(SamplingParams(**params), field) is None


@pytest.mark.parametrize(
    "field",
    [*NUMBERS, "stop", "stop_token_ids", "logit_bias", "ignore_eos", "include_stop_str_in_output"],
)
def test_none_is_refused_everywhere_else(field: str) -> None:
    assert refusal(field, None).endswith("got None")


@pytest.mark.parametrize("field", [*NUMBERS, *OPTIONAL])
@pytest.mark.parametrize("value", ["1", True, False, math.nan, math.inf, [1], HUGE])
def test_no_number_or_none_that_is_finite(field: str, value: object) -> None:
    assert refusal(field, value).startswith(field)


def test_an_integer_that_no_float_holds_is_named_by_its_size() -> None:
    assert refusal("temperature", HUGE) == "temperature is too large: got an integer of 1329 bits"
    for field in (*NUMBERS, *OPTIONAL):
        assert "16610 bits" in refusal(field, 10**5000)
    refusal("logit_bias", {HUGE: 1.0})
    refusal("logit_bias", {1: HUGE})
    refusal("stop_token_ids", [HUGE])
    for value in (-HUGE, -(10**5000)):
        with pytest.raises(ValueError, match=r"^x is too large"):
            check_range("x", value, -math.inf, math.inf)
    with pytest.raises(ValueError, match=r"^x is too large: got an integer of 1024 bits"):
        check_range("x", 2**1024 - 1, 0, math.inf)  # rounds to no float
    check_range("x", int(sys.float_info.max), 0, math.inf)


@pytest.mark.parametrize(
    "field, value",
    [
        ("ignore_eos", "false"),
        ("ignore_eos", 0),
        ("include_stop_str_in_output", "true"),
        ("stop_token_ids", (None,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (1.0,)),
        ("stop_token_ids", (True,)),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 12),
        ("logit_bias", {None: 1.0}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: "1"}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"1": 1.0}),
        ("logit_bias", [(1, 1.0)]),
        ("stop", 3),
        ("stop", {"a"}),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a", None]),
        ("stop", b"ab"),
        ("top_k", -2),
    ],
)
def test_values_of_another_kind(field: str, value: object) -> None:
    assert refusal(field, value).startswith(field)


def test_how_many_stop_strings_and_how_long() -> None:
    stops = [f"<{number}>" for number in range(MAX_STOP_STRINGS - 1)] + ["x" * MAX_STOP_CHARS]
    assert SamplingParams(stop=tuple(stops)).stop == tuple(stops)
    assert (MAX_STOP_STRINGS, MAX_STOP_CHARS) == (64, 10_000)
    assert refusal("stop", [*stops, "y"]) == "stop must hold at most 64 strings, got 65"
    assert refusal("stop", "x" * 10_001).endswith("at most 10000 characters, got one of 10001")


def test_a_request_keeps_what_it_was_given() -> None:
    bias, stop, ids = {3: 1.0}, ["a"], [5]
    kept: dict[str, Any] = {"logit_bias": bias, "stop": stop, "stop_token_ids": ids}
    params = SamplingParams(**kept)
    bias[3] = 1e9
    bias[-7] = math.nan
    stop.append("")
    ids.append(-1)
    assert params.logit_bias == {3: 1.0}
    assert (params.stop, params.stop_token_ids) == (("a",), (5,))


@pytest.mark.parametrize(
    "name, value",
    [
        ("priority", None),
        ("priority", "high"),
        ("priority", 1.0),
        ("priority", True),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
        ("timeout_s", HUGE),
        ("timeout_s", "3"),
        ("timeout_s", True),
        ("arrival_s", math.nan),
        ("arrival_s", "now"),
    ],
)
def test_what_the_queues_cannot_sort_by_never_reaches_them(name: str, value: object) -> None:
    engine = tiny_engine()
    engine.add("before", prompt_of(5), greedy(3))
    given: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=f"^{name}"):
        engine.add("bad", prompt_of(5), greedy(3), **given)
    engine.add("after", prompt_of(6), greedy(3), priority=-1, timeout_s=1e9)
    engine.scheduler.check_integrity()
    assert set(outputs_of(drain(engine))) == {"before", "after"}
    assert_nothing_left(engine)


@pytest.mark.parametrize("request_id", ["", None, 7, b"id"])
def test_a_request_id_is_a_string_that_is_not_empty(request_id: Any) -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match=r"^request_id must be a non-empty string, got"):
        engine.add(request_id, [1], greedy(1))
    assert_nothing_left(engine)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_arrays_of_integers_are_prompts(dtype: Any) -> None:
    prompt: Any = np.array([1, 2, 3], dtype)
    assert as_prompts(prompt) == [[1, 2, 3]]
    assert [list(row) for row in as_prompts(np.array([[1, 2], [3, 4]], dtype))] == [[1, 2], [3, 4]]  # type: ignore[arg-type]
    engine = tiny_engine()
    engine.add("array", prompt, greedy(3))
    engine.add("list", [1, 2, 3], greedy(3))
    outputs = outputs_of(drain(engine))
    assert {type(i) for i in outputs["array"].prompt_token_ids} == {int}
    assert outputs["array"].prompt_token_ids == (1, 2, 3)
    assert outputs["array"].outputs == outputs["list"].outputs
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    "prompt",
    [
        np.array([1.0, 2.0]),
        np.array([True, False]),
        np.array([[1, 2]]),
        [1, 2.0],
        [None],
        [True],
        ["a"],
        "ab",
    ],
)
def test_what_is_no_id_is_refused_in_one_line(prompt: Any) -> None:
    engine = tiny_engine()
    with pytest.raises(ValueError, match=r"^a prompt token id must be an integer, got [^\n]*$"):
        engine.add("bad", prompt, greedy(1))
    assert_nothing_left(engine)


@pytest.mark.parametrize("prompts", [np.array([1.0, 2.0]), np.array([True]), [1.5], [None, 2]])
def test_what_is_no_id_is_still_meant_as_one(prompts: Any) -> None:
    assert as_prompts(prompts) == [list(prompts)]


def test_cached_prompt_tokens_are_those_of_the_first_choice() -> None:
    """Four siblings fork the prompt: a sum over them would exceed it."""
    engine = tiny_engine(block_size=8, enable_prefix_caching=True)
    params = SamplingParams(max_tokens=4, seed=1, n=5, ignore_eos=True)
    first, again = (run(engine, [prompt_of(22)], params)[0] for _ in range(2))
    assert len(again.outputs) == 5
    assert (first.metrics.num_cached_tokens, again.metrics.num_cached_tokens) == (0, 16)
    assert engine.scheduler.counters.num_forks == 8
    assert_nothing_left(engine)


@pytest.mark.parametrize(
    "options", [{"kv_layout": "recompute"}, {"enable_prefix_caching": False}, {}]
)
def test_prefix_queries_count_where_something_is_looked_up(options: dict[str, Any]) -> None:
    engine = tiny_engine(**options)
    run(engine, [prompt_of(22)], greedy(2))
    assert engine.scheduler.counters.prefix_query_tokens == (0 if options else 22)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"slide_window": 9}, "--slide-window 9 needs --context-overflow slide, .* error"),
        ({"slide_window": 0, "context_overflow": "slide"}, "--slide-window must be at least 1"),
        ({"slide_window": True, "context_overflow": "slide"}, "--slide-window must be at least 1"),
        (
            {"strict_context": True, "context_overflow": "slide"},
            "--strict-context contradicts --context-overflow slide",
        ),
    ],
)
def test_context_options_that_nothing_would_read(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SchedulerConfig(**options)


def model() -> GPT2:
    executor = tiny_engine().executor
    assert isinstance(executor, EagerExecutor)
    return executor.model


@pytest.mark.parametrize("loop", [generate.naive, generate.cached, generate.stream])
def test_the_textbook_loops_refuse_at_the_call(loop: Any) -> None:
    """A stream too: not when its first token is asked for."""
    for prompt, max_tokens, words in (
        ([], 1, "empty"),
        ([1], -1, "max_tokens must be at least 0, got -1"),
        ([1, 384], 1, r"token id 384 is outside the vocabulary \(0 to 383\)"),
        ([-1], 1, "token id -1 is outside"),
        ([1], 256, "1 prompt tokens and 256 new ones exceed the model's 256 positions"),
    ):
        with pytest.raises(ValueError, match=words):
            loop(model(), prompt, max_tokens)
