"""Bodies to calls to prompts: every field read or refused by name, whatever JSON arrives."""

from __future__ import annotations

import json
import logging
from dataclasses import fields as dataclass_fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire import END, gpt2, served

from nanoserve.request import MAX_STOP_CHARS, SamplingParams
from nanoserve.server.bodies import (
    CHAT_FIELDS,
    CHAT_SCHEMA,
    CHAT_UNSUPPORTED,
    COMPLETION_FIELDS,
    COMPLETION_SCHEMA,
    HARMLESS,
    UNSUPPORTED,
)
from nanoserve.server.errors import ApiError
from nanoserve.server.protocol import (
    Call,
    Prepared,
    prepare,
    read_chat,
    read_completion,
    read_json,
)

HELLO = [{"role": "user", "content": "Hello"}]


def completion(changes: dict[str, Any] | None = None, **more: Any) -> Call:
    body = {"model": "gpt2", "prompt": "Hello", **(changes or {}), **more}
    return read_completion(body, served())


def chat(changes: dict[str, Any] | None = None, **more: Any) -> Call:
    body = {"model": "gpt2", "messages": HELLO, **(changes or {}), **more}
    return read_chat(body, served())


def prepared(prompt: object, **more: Any) -> list[Prepared]:
    limits = served(strict_context=more.pop("strict", False))
    body = {"model": "gpt2", "prompt": prompt, **more}
    return prepare(read_completion(body, limits), gpt2(), limits)


def assert_refused(read: Any, param: str | None, words: str = "", **more: Any) -> ApiError:
    """The 400 that `read` answers with; it names `param`, and its message holds `words`."""
    with pytest.raises(ApiError) as caught:
        read(**more)
    error = caught.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert words in error.message, error.message
    assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    json.dumps(error.body(), ensure_ascii=False).encode("utf-8")
    return error


# What is required, and what holds where nothing is said


@pytest.mark.parametrize(
    "read,body,param",
    [
        (read_completion, {"prompt": "x"}, "model"),
        (read_completion, {"model": None, "prompt": "x"}, "model"),
        (read_completion, {"model": "gpt2"}, "prompt"),
        (read_chat, {"messages": HELLO}, "model"),
        (read_chat, {"model": "gpt2"}, "messages"),
        (read_chat, {"model": "gpt2", "messages": None}, "messages"),
    ],
)
def test_r01_a_required_field_that_is_missing_is_named(read: Any, body: object, param: str) -> None:
    error = assert_refused(lambda: read(body, served()), param, "is required")
    assert error.code == "missing_required_parameter"


def test_another_model_is_a_404() -> None:
    with pytest.raises(ApiError, match="only gpt2") as caught:
        completion(model="gpt-4")
    error = caught.value
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert completion(model="openai-community/gpt2").model == "openai-community/gpt2"


@pytest.mark.parametrize("name", sorted(COMPLETION_FIELDS.keys() - {"model"}))
def test_r02_null_is_absent_in_completions(name: str) -> None:
    if name == "prompt":
        assert completion(prompt=None).prompts == ("",)
    else:
        assert completion({name: None}) == completion()


@pytest.mark.parametrize("name", sorted(CHAT_FIELDS.keys() - {"model", "messages"}))
def test_r02_null_is_absent_in_chats(name: str) -> None:
    assert chat({name: None}) == chat()


@pytest.mark.parametrize("name", sorted(CHAT_UNSUPPORTED))
def test_r02_null_asks_for_nothing(name: str) -> None:
    assert chat({name: None}) == chat()


def test_r03_the_defaults_are_openais() -> None:
    assert completion().params == SamplingParams(max_tokens=16)
    assert chat().params == SamplingParams(max_tokens=None)
    call = completion()
    assert (call.params.temperature, call.params.top_p, call.params.n) == (1, 1, 1)
    flags = (call.echo, call.stream, call.include_usage, call.continuous_usage)
    assert flags == (False,) * 4
    assert call.params.num_choices == 1


def test_every_field_changes_what_is_asked() -> None:
    """A field that is accepted and ignored would be a lie."""
    values: dict[str, Any] = {
        "model": "openai-community/gpt2",
        "prompt": "Other",
        "messages": [{"role": "user", "content": "Other"}],
        "max_tokens": 7,
        "max_completion_tokens": 8,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 1,
        "logit_bias": {"5": 1},
        "stop": "x",
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": 1,
        "n": 2,
        "best_of": 2,
        "stream": True,
        "echo": True,
        "add_special_tokens": True,
        "add_generation_prompt": False,
        "truncate_prompt_tokens": 3,
        "return_token_ids": True,
        "priority": 1,
    }
    for read, fields in ((completion, COMPLETION_FIELDS), (chat, CHAT_FIELDS)):
        asked = {**values, "logprobs": True if read is chat else 2}
        for name in fields.keys() - {"stream_options", "top_logprobs"}:
            assert read({name: asked[name]}) != read(), name
    assert chat(logprobs=True, top_logprobs=3).params.logprobs == 3
    streamed = completion(stream=True)
    assert completion(stream=True, stream_options={"include_usage": True}) != streamed
    assert completion(stream=True, stream_options={"continuous_usage_stats": True}) != streamed
    assert completion(stream=True, stream_options={"include_usage": None}) == streamed


# Ranges and kinds

BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0001, 2, 2.0], [-0.1, 2.1, float("nan"), 10**400]),
    "top_p": ([0, 1e-9, 1], [-0.1, 1.01, float("inf")]),
    "min_p": ([0, 1], [-0.1, 1.01]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.5, 1.0, 50], [0, -1]),
    "n": ([1, 128], [0, -1, 129, 100000]),
    "max_tokens": ([0, 1, 10**9], [-1, 2**2000]),
    "min_tokens": ([0, 16], [-1, 17]),
    "top_k": ([-1, 0, 1, 50258], [-2]),
    "seed": ([-(2**63), -1, 0, 2**63 - 1], [-(2**63) - 1, 2**63, 10**400]),
    "logprobs": ([0, 5, 64], [-1, 65]),
    "best_of": ([1, 20], [0, 21]),
    "truncate_prompt_tokens": ([-1, 1, 5000], [0, -2]),
    "priority": ([-5, 0, 5], [2**64]),
}


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_r04_r10_numbers_are_held_to_their_ranges(name: str) -> None:
    inside, outside = BOUNDS[name]
    for value in inside:
        completion({name: value})
    for value in outside:
        assert_refused(completion, name, name, changes={name: value})


def test_r04_chat_top_logprobs() -> None:
    for value in (0, 20):
        assert chat(logprobs=True, top_logprobs=value).params.logprobs == value
    for value in (-1, 21):
        assert_refused(chat, "top_logprobs", logprobs=True, top_logprobs=value)
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=False).params.logprobs is None


def test_c06_top_logprobs_need_logprobs() -> None:
    assert_refused(chat, "top_logprobs", "needs logprobs", top_logprobs=2)
    assert_refused(chat, "top_logprobs", "needs logprobs", top_logprobs=2, logprobs=False)


WRONG = {
    "number": ["1", True, [], {}],
    "integer": ["1", True, 1.0, 1.5, [], {}],
    "boolean": ["true", 1, 0, [], {}],
    "string": [1, True, [], {}],
    "array": ["x", 1, {}, [1.0], [True], ["x"], [-1]],
    "object": ["x", 1, []],
}


@pytest.mark.parametrize("read", [completion, chat], ids=["completion", "chat"])
def test_r15_nothing_is_coerced(read: Any) -> None:
    fields = COMPLETION_FIELDS if read is completion else CHAT_FIELDS
    checked = 0
    for name, field in fields.items():
        for value in WRONG.get(field.schema.get("type", ""), []):
            if name == "messages" and value in ("x", 1, {}):
                continue  # below
            with pytest.raises(ApiError) as caught:
                read({name: value, "stream": True} if name == "stream_options" else {name: value})
            assert (caught.value.param or "").startswith(name), (name, value, caught.value.message)
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("body", [[], True, "x", 1, 1.5, None], ids=repr)
@pytest.mark.parametrize("read", [read_completion, read_chat])
def test_r15_a_body_that_is_no_object(read: Any, body: object) -> None:
    assert_refused(lambda: read(body, served()), None, "must be a JSON object")


@pytest.mark.parametrize(
    "raw,words",
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a": NaN}', "NaN is no JSON number"),
        (b'{"a": -Infinity}', "-Infinity is no JSON number"),
        (b'{"a": "\xff\xfe"}', "byte 7 is not UTF-8"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"9" * 5000, "not valid JSON"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_r15_a_body_that_is_no_json(raw: bytes, words: str) -> None:
    assert_refused(lambda: read_json(raw), None, words)


def test_r15_json_is_read() -> None:
    assert read_json(b' {"a": [1, 1e400, null], "a\\u0308": "\xc3\xa4"} ') == {
        "a": [1, float("inf"), None],
        "a\u0308": "ä",
    }


@pytest.mark.parametrize(
    "value,stops",
    [
        ("X", ("X",)),
        (["X"], ("X",)),
        ([], ()),
        (None, ()),
        (["a"] * 64, ("a",) * 64),
        (["a", "b", "c", "d", "e"], ("a", "b", "c", "d", "e")),
        ("x" * MAX_STOP_CHARS, ("x" * MAX_STOP_CHARS,)),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_r06_stop_is_a_string_or_any_list(value: object, stops: tuple[str, ...]) -> None:
    assert completion(stop=value).params.stop == stops


@pytest.mark.parametrize(
    "value,param,words",
    [
        ("", "stop", "non-empty"),
        ([""], "stop[0]", "non-empty"),
        (["x", ""], "stop[1]", "non-empty"),
        (["x", 1], "stop[1]", "string"),
        (["x", None], "stop[1]", "string"),
        (5, "stop", "a string or a list of strings"),
        ({}, "stop", "a string or a list of strings"),
        (["a"] * 65, "stop", "at most 64"),
        (["x" * (MAX_STOP_CHARS + 1)], "stop[0]", f"at most {MAX_STOP_CHARS} characters"),
        (["\ud800"], "stop[0]", "surrogates"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_r06_a_stop_that_is_none(value: object, param: str, words: str) -> None:
    assert_refused(completion, param, words, stop=value)


def test_r08_r09_logit_bias() -> None:
    assert completion(logit_bias={}).params == completion().params
    assert completion(logit_bias=None).params == completion().params
    bias = completion(logit_bias={"50256": -100, "5": 1.5, "6": 100}).params.logit_bias
    assert bias == {50256: -100, 5: 1.5, 6: 100}


@pytest.mark.parametrize(
    "value,words",
    [
        ({"50257": 1}, "50257"),
        ({"-1": 1}, "-1"),
        ({"x": 1}, "'x'"),
        ({"": 1}, "''"),
        ({" 5": 1}, "' 5'"),
        ({"1_0": 1}, "'1_0'"),
        ({"5.0": 1}, "'5.0'"),
        ({"5": 1, "05": 2}, "'05'"),
        ({"-0": 1}, "'-0'"),
        ({"\u0665": 1}, "\u0665"),
        ({"9" * 5000: 1}, "999"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_r08_a_key_that_is_no_token_id_is_named(value: object, words: str) -> None:
    error = assert_refused(completion, "logit_bias", words, logit_bias=value)
    assert len(error.message) < 300


@pytest.mark.parametrize("value", [101, -100.5, "1", None, True, [], float("nan")], ids=repr)
def test_r08_a_bias_out_of_range(value: object) -> None:
    assert_refused(completion, "logit_bias.7", "logit_bias.7", logit_bias={"7": value})


def test_stop_token_ids_must_exist() -> None:
    assert completion(stop_token_ids=[13, END]).params.stop_token_ids == (13, END)
    assert_refused(completion, "stop_token_ids", "50257", stop_token_ids=[50257])


# What is ignored, and what is not

IGNORED: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "x",
    "prompt_cache_key": "x",
    "parallel_tool_calls": True,
    "no_such_field": {"deep": [1]},
}


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_r13_what_has_no_effect_is_ignored(name: str) -> None:
    assert completion({name: IGNORED[name]}) == completion()
    assert chat({name: IGNORED[name]}) == chat()


def test_r13_an_unknown_field_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="nanoserve"):
        for _ in range(3):
            completion({"frobnicate": 1, "user": "me", "\ud800": 2})
    assert sum("frobnicate" in message for message in caplog.messages) == 1
    assert not any("user" in message for message in caplog.messages)


ASKING: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "tool_choice": "auto",
    "functions": [{}],
    "function_call": "auto",
    "response_format": {"type": "json_object"},
    "modalities": ["text", "audio"],
    "suffix": "end",
    "use_beam_search": True,
    "bad_words": ["x"],
    "length_penalty": 0.5,
}


@pytest.mark.parametrize("name", sorted(CHAT_UNSUPPORTED))
def test_what_would_change_the_output_is_refused_by_name(name: str) -> None:
    value = ASKING.get(name, {"anything": 1})
    error = assert_refused(chat, name, f"{name} is not supported", changes={name: value})
    assert error.code == "unsupported_parameter"
    for harmless in CHAT_UNSUPPORTED[name]:
        assert chat({name: harmless}) == chat()
    if name in UNSUPPORTED:
        assert_refused(completion, name, f"{name} is not supported", changes={name: value})


def test_no_field_is_in_two_minds() -> None:
    for fields, refusals in ((COMPLETION_FIELDS, UNSUPPORTED), (CHAT_FIELDS, CHAT_UNSUPPORTED)):
        assert not fields.keys() & refusals.keys()
        assert not HARMLESS & (fields.keys() | refusals.keys())


def test_p09_best_of() -> None:
    params = completion(n=2, best_of=4).params
    assert (params.n, params.num_choices) == (2, 4)
    assert_refused(completion, "best_of", "between 3", n=3, best_of=2)
    assert_refused(completion, "best_of", "streamed", best_of=2, stream=True)
    assert_refused(completion, "best_of", "streamed", n=2, best_of=2, stream=True)
    assert completion(best_of=1, stream=True).params.num_choices == 1


def test_stream_options_need_a_stream() -> None:
    assert_refused(
        completion, "stream_options", "needs stream", stream_options={"include_usage": True}
    )
    assert_refused(
        completion,
        "stream_options.include_usage",
        "true or false",
        stream=True,
        stream_options={"include_usage": 1},
    )


def test_c02_the_newer_name_wins() -> None:
    for read in (completion, chat):
        assert read(max_tokens=5, max_completion_tokens=7).params.max_tokens == 7
        assert read(max_tokens=5, max_completion_tokens=None).params.max_tokens == 5
        assert read(max_completion_tokens=0, max_tokens=3).params.max_tokens == 0


def test_logprobs_of_the_prompt_come_with_its_echo() -> None:
    both = completion(echo=True, logprobs=1, max_tokens=0).params
    assert (both.logprobs, both.prompt_logprobs, both.max_tokens) == (1, 1, 0)
    assert completion(logprobs=1).params.prompt_logprobs is None
    assert completion(echo=True).params.prompt_logprobs is None


# Prompts


@pytest.mark.parametrize(
    "prompt,prompts",
    [
        ("a b", ("a b",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (None, ("",)),
        ("", ("",)),
        ([""], ("",)),
    ],
    ids=repr,
)
def test_p01_a_prompt_has_four_shapes(prompt: object, prompts: object) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        *([], [[]], [[1], []], [-1], [[-1]], [1.0], [1.5], [True], [None], [{}]),
        *(["a", 1], [1, "a"], ["a", [1]], [[1], 2], [["a"]], [[[1]]], 5, 1.5, True, {"a": 1}),
        *("\ud800", ["\ud800"]),
    ],
    ids=repr,
)
def test_p03_a_prompt_that_is_none(prompt: object) -> None:
    assert_refused(completion, "prompt", "prompt", prompt=prompt)


@pytest.mark.parametrize("prompt", [[50257], [4294967294], [2**40], [[1], [50257]]], ids=repr)
def test_b21_ids_outside_the_vocabulary(prompt: object) -> None:
    assert_refused(lambda: prepared(prompt), "prompt", "outside the vocabulary (0 to 50256)")


def test_b21_a_tokenizer_may_know_more_ids_than_the_model() -> None:
    limits = served(num_token_ids=50256)
    text = read_completion({"model": "gpt2", "prompt": "a<|endoftext|>"}, limits)
    assert_refused(lambda: prepare(text, gpt2(), limits), "prompt", "50256 is outside")
    messages = [{"role": "user", "content": ""}]
    turns = read_chat({"model": "gpt2", "messages": messages}, limits)
    assert_refused(lambda: prepare(turns, gpt2(), limits), "messages", "50256 is outside")


@pytest.mark.parametrize("prompt", [None, "", [""]], ids=repr)
def test_p03_an_empty_prompt_continues_from_the_end_of_text(prompt: object) -> None:
    (one,) = prepared(prompt, echo=True, logprobs=0)
    assert one == Prepared(prompt="", token_ids=(END,), echo_text="", echo_offsets=(0,))


def test_an_empty_prompt_needs_a_token_to_begin_with() -> None:
    limits = served(start_token_id=None)
    call = read_completion({"model": "gpt2", "prompt": ""}, limits)
    assert_refused(lambda: prepare(call, gpt2(), limits), "prompt", "is empty")


def test_prompts_are_prepared_in_order() -> None:
    assert [p.token_ids for p in prepared(["O P Q", "", "你好"])] == [
        (46, 350, 1195),
        (END,),
        (19526, 254, 25001, 121),
    ]
    (ids,) = prepared([464, 5417])
    assert ids == Prepared(prompt=None, token_ids=(464, 5417))


def test_b35_completions_read_special_tokens() -> None:
    (one,) = prepared("a<|endoftext|>b", echo=True)
    assert one.token_ids == (64, END, 65)
    assert one.echo_text == "a<|endoftext|>b"
    assert one.echo_offsets == (0, 1, 14)


def test_b35_chats_do_not() -> None:
    limits = served()
    for content in ("<|endoftext|>", [{"type": "text", "text": "<|endoftext|>"}]):
        messages = [{"role": "user", "content": content}]
        call = read_chat({"model": "gpt2", "messages": messages}, limits)
        (one,) = prepare(call, gpt2(), limits)
        assert one.token_ids == (27, 91, 437, 1659, 5239, 91, 29)
        assert one.prompt == "<|endoftext|>"


def test_l10_offsets_of_an_echoed_prompt_count_characters() -> None:
    (text,) = prepared("你好 😀!", echo=True, logprobs=1)
    (ids,) = prepared([list(text.token_ids)], echo=True)
    assert text.echo_text == ids.echo_text == "你好 😀!"
    assert ids.echo_offsets == text.echo_offsets
    assert text.echo_offsets == (0, 0, 1, 1, 2, 3, 4)


def test_an_unfinished_character_at_the_end_of_the_prompt() -> None:
    (one,) = prepared([15496, 47249], echo=True)
    assert (one.echo_text, one.echo_offsets) == ("Hello\ufffd", (0, 5))


def test_r18_truncate_prompt_tokens() -> None:
    assert prepared([1, 2, 3], truncate_prompt_tokens=2)[0].token_ids == (2, 3)
    assert prepared([1, 2, 3], truncate_prompt_tokens=5)[0].token_ids == (1, 2, 3)
    whole = list(range(2000))
    assert prepared(whole, truncate_prompt_tokens=-1)[0].token_ids == tuple(range(977, 2000))
    strict = prepared(whole, truncate_prompt_tokens=-1, max_tokens=100, strict=True)
    assert strict[0].token_ids == tuple(range(1076, 2000))
    for cap in (1024, 10**300):  # nothing fits beside it
        assert_refused(
            lambda cap=cap: prepared([1], truncate_prompt_tokens=-1, max_tokens=cap, strict=True),
            "prompt",
        )
    only = prepared(whole, truncate_prompt_tokens=-1, max_tokens=0)
    assert only[0].token_ids == tuple(range(976, 2000))
    assert_refused(
        lambda: prepared(whole, truncate_prompt_tokens=1024), "prompt", "1024 in the prompt"
    )


# The context


def counts(message: str) -> list[int]:
    return [int(word) for word in message.replace(".", " ").split() if word.isdigit()]


def test_e07_a_prompt_that_fills_the_context() -> None:
    error = assert_refused(lambda: prepared([1] * 1024), "prompt")
    assert error.code == "context_length_exceeded"
    assert counts(error.message) == [1024, 1040, 1024, 16]
    assert "maximum context length is 1024 tokens" in error.message
    assert len(prepared([1] * 1023)[0].token_ids) == 1023
    assert len(prepared([1] * 1024, max_tokens=0, echo=True)[0].token_ids) == 1024
    assert_refused(lambda: prepared([1] * 1025, max_tokens=0), "prompt")
    assert_refused(lambda: prepared(["fine", "x " * 2000]), "prompt")


def test_e07_a_cap_that_does_not_fit_is_clamped_unless_strict() -> None:
    assert len(prepared([1] * 1000, max_tokens=100)) == 1
    assert len(prepared([1] * 1000, max_tokens=10**12)) == 1
    error = assert_refused(lambda: prepared([1] * 1000, max_tokens=100, strict=True), "prompt")
    assert counts(error.message) == [1024, 1100, 1000, 100]
    assert len(prepared([1] * 1000, max_tokens=24, strict=True)) == 1


def test_e07_a_chat_that_fills_the_context() -> None:
    limits = served(max_model_len=8, strict_context=True)

    def prepare_chat(num_words: int) -> list[Prepared]:
        messages = [{"role": "user", "content": " x" * num_words}]
        call = read_chat({"model": "gpt2", "messages": messages}, limits)
        return prepare(call, gpt2(), limits)

    assert len(prepare_chat(7)[0].token_ids) == 7
    error = assert_refused(lambda: prepare_chat(8), "messages", "8 in the messages")
    assert error.code == "context_length_exceeded"
    assert counts(error.message) == [8, 9, 8, 1]


def test_b28_sizes_are_limited() -> None:
    assert_refused(
        completion, "prompt", "10000 prompts, one request may have 2048", prompt=["x"] * 10000
    )
    assert_refused(completion, "n", "one request may have 4096", prompt=["x"] * 100, n=128)
    assert len(completion(prompt=["x"] * 32, n=128).prompts) == 32


# Messages


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("name", [None, "ann"])
def test_c03_roles_and_contents(role: str, name: str | None) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = chat(messages=[{"role": role, "content": parts, "name": name}])
    assert call.messages == ({"role": role, "content": "a\nb"} | ({"name": name} if name else {}),)
    assert chat(messages=[{"role": role, "content": "a"}]).messages[0]["content"] == "a"


@pytest.mark.parametrize(
    "messages,param",
    [
        ([], "messages"),
        ("x", "messages"),
        ({}, "messages"),
        ([1], "messages[0]"),
        ([None], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([*HELLO, {"role": "user"}], "messages[1].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
        ),
        ([{"role": "user", "content": "x", "name": 1}], "messages[0].name"),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_c03_a_message_that_is_none(messages: object, param: str) -> None:
    assert_refused(chat, param, messages=messages)


def test_an_assistant_may_say_nothing_but_may_call_nothing() -> None:
    silent: list[Any] = [{"role": "assistant", "content": None, "tool_calls": []}]
    assert chat(messages=silent).messages == ({"role": "assistant", "content": ""},)
    calling = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    error = assert_refused(chat, "messages[0].tool_calls", messages=calling)
    assert error.code == "unsupported_parameter"


# Whatever arrives

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NAMES = sorted(COMPLETION_FIELDS.keys() | CHAT_FIELDS.keys() | UNSUPPORTED.keys())


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=4), st.sampled_from(["a", "b"]))
def test_any_json_is_a_call_or_an_error_that_can_be_sent(
    changes: dict[str, Any], kind: str
) -> None:
    read = completion if kind == "a" else chat
    outcome = outcome_of(read, changes)
    if isinstance(outcome, ApiError):
        assert outcome.status in (400, 404)
        assert len(outcome.message) < 1000
        json.dumps(outcome.body(), ensure_ascii=False).encode("utf-8")
    else:
        assert all(prompt.token_ids for prompt in outcome)


def outcome_of(read: Any, changes: dict[str, Any]) -> list[Prepared] | ApiError:
    try:
        return prepare(read(changes), gpt2(), served())
    except ApiError as error:
        return error


def test_messages_do_not_repeat_what_was_sent() -> None:
    error = assert_refused(completion, "stop[0]", stop=[{"x": "y" * 10_000}])
    assert len(error.message) < 200
    for endless in (ApiError("y" * 10**6), ApiError("\ud800" * 10**6)):
        assert len(endless.message) < 1100
    with pytest.raises(ApiError) as caught:
        completion(model="\ud800" + "x" * 10_000)
    assert len(caught.value.message) < 300


def test_the_schemas_describe_what_is_read() -> None:
    assert COMPLETION_SCHEMA["properties"].keys() == COMPLETION_FIELDS.keys()
    assert CHAT_SCHEMA["properties"].keys() == CHAT_FIELDS.keys()
    assert COMPLETION_SCHEMA["required"] == ["model", "prompt"]
    assert CHAT_SCHEMA["required"] == ["model", "messages"]
    json.dumps([COMPLETION_SCHEMA, CHAT_SCHEMA], allow_nan=False)
    temperature = {"type": "number", "minimum": 0, "maximum": 2}
    assert COMPLETION_SCHEMA["properties"]["temperature"]["anyOf"] == [
        temperature,
        {"type": "null"},
    ]


def test_every_sampling_field_has_a_way_in() -> None:
    """A new knob of the engine must be decided upon here, not forgotten."""
    known = COMPLETION_FIELDS.keys() | UNSUPPORTED.keys()
    assert {field.name for field in dataclass_fields(SamplingParams)} <= known
