"""The wire, statement by statement: what clients of OpenAI's HTTP API rely on.

Each test carries the id of its statement. `stub` says what a test made it say, `mini` is the
embedded model, `guarded` has a key, few slots, a chat template and the strict context. Answers are
read with strict JSON, streams with the framing asserted event by event.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from server_fixture import (
    EOS,
    NUM_POSITIONS,
    VOCAB_SIZE,
    Reply,
    Server,
    answered,
    concurrently,
    gpt2_tokenizer,
    ids_of,
    mini_engine,
    scripted_engine,
    serve,
    wait_until,
)

from nanoserve.server import exchange

GRIN = [47249, 222]
"""An emoji that takes two tokens, neither of them whole UTF-8."""

DIALOGUE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
"""DialoGPT's template: turns joined by the end-of-text token."""

KEY = {"Authorization": "Bearer sekret"}
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(scope="module")
def stub() -> Iterator[Server]:
    with serve(scripted_engine(max_num_seqs=32), max_queue=256) as server:
        yield server


@pytest.fixture(scope="module")
def mini() -> Iterator[Server]:
    with serve(mini_engine(max_num_seqs=8), served_model_name="mini") as server:
        yield server


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    engine = scripted_engine(max_num_seqs=2, strict_context=True)
    with serve(
        engine,
        headers=KEY,
        api_key="sekret",
        served_model_name="org/stub",
        max_queue=2,
        chat_template=DIALOGUE,
        allowed_origins=("https://ui.example",),
    ) as server:
        yield server


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    text = answer["choices"][index]["text"]
    assert isinstance(text, str)
    return text


def content_of(answer: dict[str, Any], index: int = 0) -> str:
    content = answer["choices"][index]["message"]["content"]
    assert isinstance(content, str)
    return content


def without_identity(answer: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same question share: all but id and time."""
    return {key: value for key, value in answer.items() if key not in ("id", "created")}


def body_for(path: str, prompt: str = "Hi", **fields: Any) -> dict[str, Any]:
    """A body that the endpoint accepts, with these fields over it."""
    if path == "/v1/completions":
        return {"model": "stub", "prompt": prompt, **fields}
    return {"model": "stub", "messages": [{"role": "user", "content": prompt}], **fields}


def body_with(path: str, field: str, value: object) -> dict[str, Any]:
    return {**body_for(path), field: value}


def refused(reply: Reply, param: str, status: int = 400) -> dict[str, Any]:
    """The error of a client's mistake: in OpenAI's shape, naming the parameter."""
    error = reply.error(status)
    assert error["type"] == "invalid_request_error"
    # A place inside a field ("stop[1]") names the field, too.
    assert (error["param"] or "").partition("[")[0].partition(".")[0] == param, error
    return error


def joined_choice(events: Sequence[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The chunks of one choice of a streamed completion, put together as a plain one."""
    text, finish_reason = "", None
    logprobs: dict[str, list[Any]] | None = None
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            assert finish_reason is None, "a chunk follows the one that finished"
            text += choice["text"]
            finish_reason = choice["finish_reason"]
            if choice["logprobs"] is not None:
                logprobs = logprobs or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    logprobs[key] += values
    return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish_reason}


def core_of(choice: dict[str, Any]) -> dict[str, Any]:
    """The four fields of a completion's choice that OpenAI has."""
    return {key: choice[key] for key in ("text", "index", "logprobs", "finish_reason")}


def deltas_of(events: Sequence[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    """The chunks of one choice of a streamed chat."""
    return [c for event in events for c in event["choices"] if c["index"] == index]


# --- Requests, both endpoints ---------------------------------------------------------------------


@pytest.mark.parametrize("path", ENDPOINTS)
def test_R01_model_and_prompt_are_required(stub: Server, path: str) -> None:
    body = body_for(path)
    for missing in body:
        rest = {key: value for key, value in body.items() if key != missing}
        error = refused(stub.post(path, rest), missing)
        assert missing in error["message"]


NULLABLE = [
    *(
        "frequency_penalty",
        "logit_bias",
        "logprobs",
        "max_tokens",
        "n",
        "presence_penalty",
        "seed",
        "stop",
        "stream",
    ),
    *("stream_options", "temperature", "top_p", "user", "metadata", "store", "service_tier"),
    *(
        "top_k",
        "min_p",
        "repetition_penalty",
        "min_tokens",
        "ignore_eos",
        "stop_token_ids",
        "priority",
    ),
    *(
        "include_stop_str_in_output",
        "skip_special_tokens",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "return_token_ids",
    ),
]
NULLABLE_THERE = {
    "/v1/completions": [*NULLABLE, "best_of", "echo", "suffix"],
    "/v1/chat/completions": [
        *NULLABLE,
        *("max_completion_tokens", "top_logprobs", "tools", "tool_choice", "response_format"),
        *("functions", "function_call", "parallel_tool_calls", "modalities", "audio"),
    ],
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_R02_null_acts_as_absent(stub: Server, path: str) -> None:
    stub.say("R02", " one two three")
    plain = without_identity(answered(stub.post(path, body_for(path, "R02"))))
    assert plain["usage"]["completion_tokens"] == 4  # three words and the end of text
    names = NULLABLE_THERE[path]
    for fields in (*({name: None} for name in names), dict.fromkeys(names)):
        reply = stub.post(path, body_for(path, "R02", **fields))
        assert without_identity(answered(reply)) == plain, fields


def test_R03_completions_stop_at_16_tokens_and_chat_at_the_end(stub: Server) -> None:
    stub.say("R03", " go" * 40)
    answer = stub.complete(prompt="R03")
    assert (text_of(answer), len(answer["choices"])) == (" go" * 16, 1)
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"] is None
    answer = stub.chat("R03")
    assert content_of(answer) == " go" * 40
    assert answer["choices"][0]["finish_reason"] == "stop"
    endless = stub.chat(" a" * 1000)
    assert endless["usage"]["completion_tokens"] == NUM_POSITIONS - 1000
    assert endless["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ENDPOINTS)
def test_R03_sampling_defaults(stub: Server, path: str) -> None:
    spelt: dict[str, Any] = {"temperature": 1, "top_p": 1, "n": 1, "stream": False}
    spelt |= {"presence_penalty": 0, "frequency_penalty": 0, "stop": None, "logit_bias": {}}
    if path == "/v1/completions":
        spelt |= {"best_of": 1, "echo": False}
    few: dict[str, Any] = {"seed": 3, "max_tokens": 12}
    default, same, greedy = (
        without_identity(answered(stub.post(path, body_for(path, "R03 noise", **few, **more))))
        for more in ({}, spelt, {"temperature": 0})
    )
    assert default == same
    assert default["choices"] != greedy["choices"]


OUT_OF_RANGE = [
    *(("temperature", value) for value in (-0.01, 2.01)),
    *(("top_p", value) for value in (-0.01, 1.01)),
    *(("presence_penalty", value) for value in (-2.01, 2.01)),
    *(("frequency_penalty", value) for value in (-2.01, 2.01)),
    *(("n", value) for value in (0, 129)),
    ("max_tokens", -1),
]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("field, value", OUT_OF_RANGE)
def test_R04_out_of_range_is_400(stub: Server, path: str, field: str, value: float) -> None:
    error = refused(stub.post(path, body_with(path, field, value)), field)
    assert field in error["message"]


def test_R04_log_probabilities_out_of_range(stub: Server) -> None:
    refused(stub.completion(prompt="Hi", logprobs=-1), "logprobs")
    for value in (-1, 21):
        reply = stub.chat_completion("Hi", logprobs=True, top_logprobs=value)
        error = refused(reply, "top_logprobs")
        assert "20" in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_R04_the_bounds_themselves_are_legal(stub: Server, path: str) -> None:
    bounds: list[dict[str, Any]] = [
        {"temperature": 0, "top_p": 0, "presence_penalty": -2, "frequency_penalty": -2, "n": 1},
        {"temperature": 2, "top_p": 1, "presence_penalty": 2, "frequency_penalty": 2, "n": 128},
    ]
    for fields in bounds:
        answer = answered(stub.post(path, body_for(path, max_tokens=1, **fields)))
        assert len(answer["choices"]) == fields["n"]


def test_R06_stop_forms(stub: Server) -> None:
    stub.say("R06", " a b c d e f")
    for stop, text in (
        (" c", " a b"),
        ([" c"], " a b"),
        ([], " a b c d e f"),
        (None, " a b c d e f"),
        ([f"never {number}" for number in range(9)] + [" d e"], " a b c"),
    ):
        answer = stub.complete(prompt="R06", stop=stop)
        assert text_of(answer) == text, stop
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert content_of(stub.chat("R06", stop=stop)) == text, stop


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stop", [[""], ["x", ""], "", [1], 1, {"x": 1}])
def test_R06_an_empty_stop_is_400(stub: Server, path: str, stop: object) -> None:
    error = refused(stub.post(path, body_for(path, stop=stop)), "stop")
    assert "stop" in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_R08_logit_bias(stub: Server, path: str) -> None:
    (word,) = ids_of(" yes")
    stub.say("R08", " no" * 3)
    plain = answered(stub.post(path, body_for(path, "R08", max_tokens=2)))
    for none in ({}, {"15": 0}, {"15": 0.0}, {str(word): 1.5}, {str(word): -100}):
        answer = answered(stub.post(path, body_for(path, "R08", max_tokens=2, logit_bias=none)))
        assert answer["choices"] == plain["choices"], none
    forced = body_for(path, "R08", max_tokens=2, logit_bias={str(word): 90}, temperature=0)
    assert " yes yes" in json.dumps(answered(stub.post(path, forced)))


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("key", ["50257", "-1", "abc", "1.5", "", " 15", "1_0", "٣", "9" * 5000])
def test_R08_a_key_that_is_no_token_id_is_400(stub: Server, path: str, key: str) -> None:
    error = refused(stub.post(path, body_for(path, logit_bias={key: 1})), "logit_bias")
    assert key[:20] in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("bias", [100.5, -101, "1", None, True, [1]])
def test_R08_a_bias_out_of_range_is_400(stub: Server, path: str, bias: object) -> None:
    error = refused(stub.post(path, body_for(path, logit_bias={"15": bias})), "logit_bias")
    assert "15" in error["message"]


def test_R09_bias_of_100_bans_and_forces(stub: Server) -> None:
    (word,) = ids_of(" yes")
    stub.say("R09", " a b")
    ended = stub.complete(prompt="R09", max_tokens=6)
    assert ended["choices"][0]["finish_reason"] == "stop"
    banned = stub.complete(prompt="R09", max_tokens=6, logit_bias={str(EOS): -100})
    assert banned["choices"][0]["finish_reason"] == "length"
    assert banned["usage"]["completion_tokens"] == 6
    assert text_of(banned).startswith(" a b")
    for temperature in (0, 0.01, 1, 2):
        forced = stub.complete(
            prompt="R09", max_tokens=6, logit_bias={str(word): 100}, temperature=temperature
        )
        assert text_of(forced) == " yes" * 6


def test_R10_any_int64_is_a_seed(stub: Server) -> None:
    def text(seed: int | None) -> str:
        return text_of(stub.complete(prompt="R10", seed=seed, max_tokens=8))

    seeds = [0, 1, -1, 2**63 - 1, -(2**63)]
    texts = [text(seed) for seed in seeds]
    assert len(set(texts)) == len(seeds)
    assert concurrently([partial(text, seed) for seed in seeds]) == texts
    assert text(None) != text(None)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1, 1.5, "1", True, 10**400])
def test_R10_no_int64_is_400(stub: Server, path: str, seed: object) -> None:
    error = refused(stub.post(path, body_for(path, seed=seed)), "seed")
    assert "seed" in error["message"]


def test_R12_choices_differ_and_the_set_repeats(stub: Server) -> None:
    first, second = (
        stub.complete(prompt="R12", n=4, seed=7, max_tokens=8)["choices"] for _ in range(2)
    )
    assert len({choice["text"] for choice in first}) == 4
    assert [choice["index"] for choice in first] == [0, 1, 2, 3]
    assert first == second


HARMLESS: dict[str, Any] = {
    "user": "someone",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "parallel_tool_calls": True,
    "never_heard_of": {"deep": [1]},
    "tools": [],
    "tool_choice": "none",
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("field", HARMLESS)
def test_R13_harmless_and_unknown_fields_change_nothing(
    stub: Server, path: str, field: str
) -> None:
    stub.say("R13", " just so")
    plain, more = (
        without_identity(answered(stub.post(path, body_for(path, "R13", **fields))))
        for fields in ({}, {field: HARMLESS[field]})
    )
    assert more == plain


CHANGES_THE_OUTPUT: list[tuple[str, str, Any]] = [
    ("/v1/completions", "suffix", " the end"),
    *((path, "response_format", {"type": "json_object"}) for path in ENDPOINTS),
    ("/v1/chat/completions", "tools", [{"type": "function", "function": {"name": "f"}}]),
    ("/v1/chat/completions", "tool_choice", "required"),
    ("/v1/chat/completions", "functions", [{"name": "f"}]),
    ("/v1/chat/completions", "modalities", ["text", "audio"]),
    ("/v1/chat/completions", "audio", {"voice": "alloy", "format": "wav"}),
    ("/v1/chat/completions", "prediction", {"type": "content", "content": "x"}),
    ("/v1/chat/completions", "web_search_options", {"search_context_size": "low"}),
    *((path, "guided_json", {"type": "object"}) for path in ENDPOINTS),
    *((path, "use_beam_search", True) for path in ENDPOINTS),
]


@pytest.mark.parametrize("path, field, value", CHANGES_THE_OUTPUT)
def test_R13_what_would_change_the_output_is_never_ignored(
    stub: Server, path: str, field: str, value: object
) -> None:
    error = refused(stub.post(path, body_with(path, field, value)), field)
    assert field in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"true",
        b"null",
        b"12",
        b'"x"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"model": "stub", "temperature": NaN, "prompt": "x", "messages": []}',
        b'{"model": "stub", "seed": ' + b"9" * 5_000 + b"}",
    ],
    ids=lambda data: data[:12].decode("latin-1"),
)
def test_R15_a_body_that_is_no_object_is_400(stub: Server, path: str, data: bytes) -> None:
    error = stub.post(path, data=data).error(400)
    assert error["type"] == "invalid_request_error"


WRONG_TYPES: dict[str, list[Any]] = {
    "model": [5, []],
    "temperature": ["hot", [1], True, {}],
    "n": ["two", 1.5, True],
    "max_tokens": ["many", 1.5, True, []],
    "stream": ["yes", [], {}],
    "logit_bias": [[], "x", 1],
    "stream_options": [True, [], "x"],
    "stop_token_ids": ["x", [1.5], [VOCAB_SIZE], [-1]],
    "top_k": ["x", 1.5, -2],
    "min_p": [1.1],
    "repetition_penalty": [0],
    "ignore_eos": ["x"],
    "priority": ["high"],
    "truncate_prompt_tokens": [0],
}


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("field, value", [(f, v) for f, vs in WRONG_TYPES.items() for v in vs])
def test_R15_wrong_types_are_400(stub: Server, path: str, field: str, value: object) -> None:
    error = refused(stub.post(path, body_with(path, field, value)), field)
    assert field in error["message"]


BAD_MESSAGES: list[Any] = [
    "hi",
    {},
    5,
    [],
    [1],
    [{}],
    ["hi"],
    [{"content": "no role"}],
    [{"role": "wizard", "content": "hi"}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": 5}],
    [{"role": "user", "content": "\ud800"}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 5}]}],
    [{"role": "user", "content": ["hi"]}],
]


@pytest.mark.parametrize("messages", BAD_MESSAGES, ids=lambda m: json.dumps(m)[:40])
def test_R15_bad_messages_are_400(stub: Server, messages: object) -> None:
    body = {"model": "stub", "messages": messages}
    error = stub.post("/v1/chat/completions", body).error(400)
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith("messages")


def test_R18_fields_spelt_as_vllm_spells_them(stub: Server) -> None:
    def text(**fields: Any) -> str:
        return text_of(stub.complete(prompt="R18 noise", seed=5, max_tokens=10, **fields))

    drawn, greedy = text(), text(temperature=0)
    assert drawn != greedy
    assert text(top_k=0) == text(top_k=-1) == text(min_p=0) == text(repetition_penalty=1.0) == drawn
    assert text(top_k=1) == text(min_p=1) == greedy
    loop = {"temperature": 0, "logit_bias": {"15": 30, "16": 22}}
    assert set(text(**loop)) == {"0"}
    assert set(text(**loop, repetition_penalty=3.0)) != {"0"}
    assert text(add_special_tokens=False) == text(add_special_tokens=True) == drawn
    assert text(priority=7) == text(priority=-7) == drawn


def test_R18_where_a_text_ends(stub: Server) -> None:
    stub.say("R18", " a b")

    def choice(**fields: Any) -> tuple[str, str, int]:
        answer = stub.complete(prompt="R18", max_tokens=5, **fields)
        return (
            text_of(answer),
            answer["choices"][0]["finish_reason"],
            answer["usage"]["completion_tokens"],
        )

    assert choice() == (" a b", "stop", 3)
    assert choice(ignore_eos=True) == (" a b", "length", 5)  # a script goes on saying its end
    assert choice(ignore_eos=True, skip_special_tokens=False) == (
        " a b" + 3 * "<|endoftext|>",
        "length",
        5,
    )
    text, reason, num_tokens = choice(min_tokens=5)
    assert (text[:4], reason, num_tokens) == (" a b", "length", 5)
    assert "<|endoftext|>" not in text
    assert choice(stop_token_ids=ids_of(" b"))[:2] == (" a", "stop")
    assert choice(stop=" b")[:2] == (" a", "stop")
    assert choice(stop=" b", include_stop_str_in_output=True)[:2] == (" a b", "stop")


def test_R18_prompt_ids(stub: Server) -> None:
    prompt = ids_of("one two three four")
    stub.say(prompt[-2:], " five")
    answer = stub.complete(prompt=prompt, truncate_prompt_tokens=2, return_token_ids=True)
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["choices"][0]["prompt_token_ids"] == prompt[-2:]
    assert answer["choices"][0]["token_ids"] == [*ids_of(" five"), EOS]
    assert text_of(answer) == " five"
    untouched = stub.complete(prompt=prompt, truncate_prompt_tokens=100, max_tokens=1)
    assert untouched["usage"]["prompt_tokens"] == len(prompt)
    assert "token_ids" not in untouched["choices"][0]


# --- Completions ----------------------------------------------------------------------------------


def test_R18_a_lower_priority_runs_first() -> None:
    with serve(scripted_engine(max_num_seqs=1), max_queue=4) as server, server.held() as gate:
        first = server.stream(prompt="R18 first", max_tokens=1)
        wait_until(lambda: gate.num_blocked == 1, 5, "no step was begun")
        later = [
            server.stream(prompt="R18 later", max_tokens=1, priority=priority)
            for priority in (5, -5, 0)
        ]
        order: list[int] = []
        for _ in range(4):
            gate.grant(1)
            wait_until(lambda: gate.num_blocked == 1 or server.num_unfinished == 0, 5, "no step")
            order += [i for i, s in enumerate(later) if i not in order and s.has_answer(0.05)]
        for stream in (first, *later):
            stream.close()
    assert order == [1, 2, 0]


def test_P01_forms_of_a_prompt(stub: Server) -> None:
    first, second = ids_of("P01 one"), ids_of("P01 two")
    stub.say(first, " uno")
    stub.say(second, " dos")
    stub.say([EOS], " nothing")
    for prompt, texts in (
        ("P01 one", [" uno"]),
        (["P01 two", "P01 one"], [" dos", " uno"]),
        (first, [" uno"]),
        ([second, first, second], [" dos", " uno", " dos"]),
        (None, [" nothing"]),
    ):
        choices = stub.complete(prompt=prompt)["choices"]
        assert [choice["text"] for choice in choices] == texts
        assert [choice["index"] for choice in choices] == list(range(len(texts)))


def test_P03_an_empty_prompt_starts_from_end_of_text(stub: Server) -> None:
    stub.say([EOS], " nothing")
    for prompt in ("", [""]):
        answer = stub.complete(prompt=prompt)
        assert text_of(answer) == " nothing"
        assert answer["usage"]["prompt_tokens"] == 1
    assert [c["text"] for c in stub.complete(prompt=["", ""])["choices"]] == 2 * [" nothing"]


BAD_PROMPTS: list[Any] = [
    [],
    [[]],
    [[1], []],
    [-1],
    [VOCAB_SIZE],
    [2**32 - 2],
    [2**40],
    [10**400],
    [1.0],
    [[1.5]],
    [True],
    [None],
    [1, "a"],
    ["a", 1],
    ["a", [1]],
    [[1], 2],
    [[1], "a"],
    [[[1]]],
    {"text": "a"},
    5,
    True,
    "\ud800",
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: json.dumps(p)[:20])
def test_P03_what_is_no_prompt_is_400(stub: Server, prompt: object) -> None:
    error = refused(stub.completion(prompt=prompt), "prompt")
    assert "prompt" in error["message"]
    assert stub.complete(prompt="Hi", max_tokens=1)["usage"]["total_tokens"] == 2


def test_P04_the_envelope(stub: Server) -> None:
    before = int(time.time())
    answer = stub.complete(prompt="Hi", max_tokens=1)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert type(answer["created"]) is int
    assert before <= answer["created"] <= time.time()
    assert answer["model"] == "stub"
    other = stub.complete(prompt="Hi", max_tokens=1)
    assert other["id"] != answer["id"]


EXTRAS = {"stop_reason"}
"""What a choice has beside OpenAI's four fields, as docs/serving.md says."""


def test_P05_fields_of_a_choice(stub: Server) -> None:
    stub.say("P05", " a")
    for fields, reason in (({}, "stop"), ({"max_tokens": 1}, "length")):
        (choice,) = stub.complete(prompt="P05", **fields)["choices"]
        assert set(choice) - EXTRAS == {"text", "index", "logprobs", "finish_reason"}
        assert choice["logprobs"] is None
        assert choice["finish_reason"] == reason


def test_P06_usage(stub: Server) -> None:
    stub.say("P06 one", " a b")
    stub.say("P06 two two", " a b c d")
    prompts = ["P06 one", "P06 two two"]
    usage = stub.complete(prompt=prompts, n=3)["usage"]
    num_prompt_tokens = sum(len(ids_of(prompt)) for prompt in prompts)
    assert usage["prompt_tokens"] == num_prompt_tokens
    assert usage["completion_tokens"] == 3 * 3 + 3 * 5
    assert usage["total_tokens"] == num_prompt_tokens + 24
    choices = stub.complete(prompt=prompts, n=3)["choices"]
    assert [choice["text"] for choice in choices] == 3 * [" a b"] + 3 * [" a b c d"]
    assert [choice["index"] for choice in choices] == list(range(6))
    events = stub.events(prompt=prompts, n=3)
    assert [joined_choice(events, index) for index in range(6)] == [core_of(c) for c in choices]


def test_P07_max_tokens_0(stub: Server) -> None:
    plain = stub.complete(prompt="P07 back", max_tokens=0)
    echoed = stub.complete(prompt="P07 back", max_tokens=0, echo=True)
    scored = stub.complete(prompt="P07 back", max_tokens=0, echo=True, logprobs=1)
    num_prompt_tokens = len(ids_of("P07 back"))
    assert (text_of(plain), text_of(echoed)) == ("", "P07 back")
    for answer in (plain, echoed, scored):
        assert answer["usage"] == {**answer["usage"], "completion_tokens": 0}
        assert answer["usage"]["total_tokens"] == num_prompt_tokens
        assert answer["choices"][0]["finish_reason"] == "length"
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == num_prompt_tokens
    events = stub.events(prompt="P07 back", max_tokens=0, echo=True)
    assert core_of(joined_choice(events)) == core_of(echoed["choices"][0])


def test_P09_best_of_by_mean_log_probability(stub: Server) -> None:
    asked = {"prompt": "P09", "seed": 3, "max_tokens": 6, "temperature": 1.5, "logprobs": 0}
    every = stub.complete(**asked, n=6)["choices"]
    best = stub.complete(**asked, n=2, best_of=6)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        return float(sum(choice["logprobs"]["token_logprobs"])) / 6

    ranked = sorted(every, key=mean, reverse=True)
    assert ranked[:2] != every[:2], "a draw for which the first are the best proves nothing"
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best] == [0, 1]


def test_P09_what_best_of_may_be(stub: Server) -> None:
    for fields in (
        {"best_of": 1, "n": 2},
        {"best_of": 0},
        {"best_of": 21},
        {"best_of": 3, "stream": True},
    ):
        error = refused(stub.completion(prompt="Hi", **fields), "best_of")
        assert "best_of" in error["message"]
    assert len(stub.complete(prompt="Hi", best_of=20, max_tokens=1)["choices"]) == 1


def test_P11_streamed_and_plain_share_one_shape(stub: Server) -> None:
    stub.say("P11", " a b c")
    asked = {"prompt": "P11", "echo": True, "logprobs": 2}
    plain = stub.complete(**asked)
    events = stub.events(**asked)
    assert {event["object"] for event in events} == {"text_completion"}
    for event in events:
        assert set(plain) - {"usage"} == set(event)
        for choice in event["choices"]:
            assert set(choice) == set(plain["choices"][0])
    assert joined_choice(events) == core_of(plain["choices"][0])


# --- Log-probabilities, completions ---------------------------------------------------------------


def test_L01_four_lists_of_one_length(stub: Server) -> None:
    stub.say("L01", " a b c")
    for echo, num_tokens in ((False, 4), (True, len(ids_of("L01")) + 4)):
        logprobs = stub.complete(prompt="L01", logprobs=2, echo=echo)["choices"][0]["logprobs"]
        assert set(logprobs) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
        assert {len(values) for values in logprobs.values()} == {num_tokens}


def test_L02_the_k_best_and_the_chosen_one(stub: Server) -> None:
    for num_best in (0, 1, 3, 5):
        asked = {"prompt": "L02", "max_tokens": 3, "logprobs": num_best, "temperature": 0}
        free = stub.complete(**asked)["choices"][0]["logprobs"]
        forced = stub.complete(**asked, logit_bias={"15": 100})["choices"][0]["logprobs"]
        assert [len(top) for top in free["top_logprobs"]] == 3 * [max(1, num_best)]
        assert [len(top) for top in forced["top_logprobs"]] == 3 * [num_best + 1]
        for logprobs in (free, forced):
            for token, logprob, top in zip(
                logprobs["tokens"],
                logprobs["token_logprobs"],
                logprobs["top_logprobs"],
                strict=True,
            ):
                assert top[token] == logprob
        others = [v for k, v in forced["top_logprobs"][0].items() if k != "0"]
        assert others == sorted(others, reverse=True)
        assert all(value > forced["token_logprobs"][0] for value in others)


def test_L03_echo_starts_with_null(stub: Server) -> None:
    answer = stub.complete(prompt="L03 and more", max_tokens=2, logprobs=2, echo=True)
    logprobs = answer["choices"][0]["logprobs"]
    for name in ("token_logprobs", "top_logprobs"):
        assert logprobs[name][0] is None
        assert None not in logprobs[name][1:]
    assert None not in logprobs["tokens"] + logprobs["text_offset"]


@pytest.mark.parametrize("num_best", [1, 5])
def test_L04_the_chosen_one_equals_the_best_bit_for_bit(mini: Server, num_best: int) -> None:
    answer = mini.complete(
        prompt="Once upon a time there was", max_tokens=24, logprobs=num_best, temperature=0
    )
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 24
    for logprob, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert logprob == max(top.values())


LM_EVAL = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True, "seed": 1234}


def test_L05_one_entry_for_each_token_even_at_the_end(stub: Server) -> None:
    plain, ending, stopping = (ids_of(f"L05 {word}") for word in ("plain", "ending ever", "stop"))
    stub.say(ending, [])
    stub.say(stopping, " halt")
    prompts = [plain, ending, stopping]
    choices = stub.complete(prompt=prompts, stop=[" halt"], **LM_EVAL)["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + 1}
        text = gpt2_tokenizer().decode(prompt)
        assert choice["text"].startswith(text)
        assert "".join(logprobs["tokens"][:-1]) == text
    assert [choice["finish_reason"] for choice in choices] == ["length", "stop", "stop"]
    assert choices[1]["logprobs"]["tokens"][-1] == "<|endoftext|>"
    assert choices[2]["logprobs"]["tokens"][-1] == " halt"
    assert choices[2]["text"] == "L05 stop"


def test_L07_a_list_gives_the_numbers_of_one_at_a_time(mini: Server) -> None:
    prompts = ["The", "The sea was calm and the", "Once upon a time there was a king who"]
    together = mini.complete(prompt=prompts, **LM_EVAL)["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        (alone,) = mini.complete(prompt=prompt, **LM_EVAL)["choices"]
        assert choice["text"] == alone["text"]
        assert choice["logprobs"]["tokens"] == alone["logprobs"]["tokens"]
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
            alone["logprobs"]["token_logprobs"][1:], abs=1e-4
        )


def test_L08_minus_infinity_is_minus_9999(stub: Server) -> None:
    prompt = ids_of("L08 only two")
    (yes,) = ids_of(" yes")
    stub.executor.only[tuple(prompt)] = (yes, EOS)
    asked = {"max_tokens": 2, "min_tokens": 2, "temperature": 0}
    answer = stub.complete(prompt=prompt, logprobs=4, echo=True, **asked)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"][-2:] == [" yes", " yes"]
    assert logprobs["token_logprobs"][1 : len(prompt)] == (len(prompt) - 1) * [-9999.0]
    assert sorted(logprobs["top_logprobs"][-1].values())[:2] == [-9999.0, -9999.0]
    assert max(logprobs["top_logprobs"][-1].values()) > -1
    chat = stub.chat("L08 only two", logprobs=True, top_logprobs=4, **asked)
    entry = chat["choices"][0]["logprobs"]["content"][0]
    assert [best["logprob"] for best in entry["top_logprobs"]][2:] == [-9999.0, -9999.0]


def test_L09_log_probabilities_are_the_raw_models(stub: Server) -> None:
    asked = {"prompt": "L09 some words", "max_tokens": 1, "logprobs": 3, "echo": True, "seed": 1}
    plain = stub.complete(**asked, temperature=0)["choices"][0]["logprobs"]
    (yes,) = ids_of(" yes")
    for fields in (
        {"temperature": 0.2},
        {"temperature": 2, "top_k": 1},
        {"top_p": 0.1, "min_p": 0.5},
        {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 5},
        {"logit_bias": {str(yes): 100, "11": -100}},
    ):
        logprobs = stub.complete(**asked, **fields)["choices"][0]["logprobs"]
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            assert logprobs[name][:-1] == plain[name][:-1], fields
        # The generated token's best alternatives do not change either: all is before sampling.
        best = dict(list(plain["top_logprobs"][-1].items())[:3])
        assert best.items() <= logprobs["top_logprobs"][-1].items(), fields
    assert logprobs["tokens"][-1] == " yes"
    scored = stub.complete(prompt="L09 some words yes", max_tokens=0, logprobs=0, echo=True)
    as_prompt = scored["choices"][0]["logprobs"]["token_logprobs"][-1]
    assert logprobs["token_logprobs"][-1] == as_prompt


@pytest.mark.parametrize("echo", [False, True])
def test_L10_text_offsets_count_characters_of_the_text(stub: Server, echo: bool) -> None:
    prompt = "L10 你好 and 😀 then"
    stub.say(prompt, " so far 🫠 good")
    asked = {"prompt": prompt, "logprobs": 1, "echo": echo}
    (choice,) = stub.complete(**asked)["choices"]
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    num_whole = 0
    for token, offset in zip(tokens, offsets, strict=True):
        if not token.startswith("bytes:") and token != "<|endoftext|>":
            assert choice["text"][offset : offset + len(token)] == token
            num_whole += 1
        assert offset <= len(choice["text"])
    assert num_whole >= 3
    assert joined_choice(stub.events(**asked)) == core_of(choice)


def test_L11_tokens_that_are_no_utf8_are_spelt_in_bytes(stub: Server) -> None:
    stub.say("L11", GRIN)
    logprobs = stub.complete(prompt="L11", logprobs=1)["choices"][0]["logprobs"]
    spelt = ["bytes:\\xf0\\x9f\\x98", "bytes:\\x80"]
    assert logprobs["tokens"] == [*spelt, "<|endoftext|>"]
    assert [set(top) for top in logprobs["top_logprobs"]] == [
        {spelt[0]},
        {spelt[1]},
        {"<|endoftext|>"},
    ]
    echoed = stub.complete(prompt="😀", logprobs=1, echo=True, max_tokens=0)
    assert echoed["choices"][0]["logprobs"]["tokens"] == spelt


# --- Chat -----------------------------------------------------------------------------------------


def test_C01_the_envelope(stub: Server) -> None:
    stub.say("C01", " hello")
    before = int(time.time())
    answer = stub.chat("C01")
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert before <= answer["created"] <= time.time()
    assert answer["model"] == "stub"
    (choice,) = answer["choices"]
    assert set(choice) - EXTRAS == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"] == {"role": "assistant", "content": " hello", "refusal": None}
    assert (choice["index"], choice["logprobs"], choice["finish_reason"]) == (0, None, "stop")
    assert answer["usage"]["total_tokens"] == len(ids_of("C01")) + 2


def test_C02_max_completion_tokens_wins(stub: Server) -> None:
    for fields, num_tokens in (
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 3}, 3),
        ({"max_tokens": 5, "max_completion_tokens": None}, 5),
    ):
        usage = stub.chat("C02 noise", **fields)["usage"]
        assert usage["completion_tokens"] == num_tokens, fields
    refused(stub.chat_completion("Hi", max_completion_tokens=-1), "max_completion_tokens")


def test_C03_content_parts_roles_and_names(stub: Server) -> None:
    stub.say("C03", " fine")
    part = {"type": "text", "text": "C03"}
    for message in (
        {"role": "user", "content": "C03"},
        {"role": "user", "content": [part]},
        {"role": "user", "content": "C03", "name": None},
        {"role": "user", "content": "C03", "name": "someone"},
        *({"role": role, "content": "C03"} for role in ("system", "developer", "assistant")),
        {"role": "tool", "content": "C03", "tool_call_id": "x"},
    ):
        assert content_of(stub.chat([message])) == " fine", message
    for other in (
        {"type": "image_url", "image_url": {"url": "https://example.com/x.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "sonnet", "text": "C03"},
    ):
        body = {"model": "stub", "messages": [{"role": "user", "content": [part, other]}]}
        error = stub.post("/v1/chat/completions", body).error(400)
        assert error["param"].startswith("messages")
        assert other["type"] in error["message"]


def test_C05_without_a_template_contents_are_joined_by_newlines(stub: Server) -> None:
    stub.say("Be brief.\nHi\nHello\nBye", " see you")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert content_of(stub.chat(messages)) == " see you"


def test_C05_a_template_makes_the_prompt(guarded: Server) -> None:
    guarded.say([*ids_of("Hi"), EOS, *ids_of("Bye"), EOS], " see you")
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    assert content_of(guarded.chat(messages, max_tokens=9)) == " see you"


def test_C06_log_probabilities(stub: Server) -> None:
    stub.say("C06", " a b")
    choice = stub.chat("C06", logprobs=True, top_logprobs=2, max_tokens=2)["choices"][0]
    assert set(choice["logprobs"]) == {"content", "refusal"}
    assert choice["logprobs"]["refusal"] is None
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [" a", " b"]
    for entry in choice["logprobs"]["content"]:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert [set(best) for best in entry["top_logprobs"]] == 2 * [{"token", "logprob", "bytes"}]
        best = entry["top_logprobs"][0]
        assert {key: entry[key] for key in best} == best  # it was the likeliest
    bare = stub.chat("C06", logprobs=True, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[], []]
    for fields in ({"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": False}):
        refused(stub.chat_completion("C06", **fields), "top_logprobs")


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 5}, {"stop": " end"}])
def test_C07_bytes_join_to_the_content(stub: Server, fields: dict[str, Any]) -> None:
    stub.say("C07", " so 😀 你好 end")
    choice = stub.chat("C07", logprobs=True, top_logprobs=1, **fields)["choices"][0]
    entries = choice["logprobs"]["content"]
    spelt = b"".join(bytes(entry["bytes"] or []) for entry in entries)
    assert spelt.decode(errors="replace") == choice["message"]["content"]
    assert spelt.startswith(" so 😀".encode())
    streamed = stub.events(
        messages=[{"role": "user", "content": "C07"}], logprobs=True, top_logprobs=1, **fields
    )
    of_chunks = [c["logprobs"]["content"] for c in deltas_of(streamed) if c.get("logprobs")]
    assert [entry for content in of_chunks for entry in content] == entries


# --- Streaming ------------------------------------------------------------------------------------


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_S01_framing(stub: Server, path: str) -> None:
    stub.say("S01", " a\n\nb\r\n c\u2028")
    reply = stub.post(path, body_for(path, "S01", stream=True))
    assert reply.status == 200
    assert reply.headers["content-type"].partition(";")[0] == "text/event-stream"
    blocks = reply.body.split(b"\n\n")
    assert blocks.pop() == b""
    assert blocks.pop() == b"data: [DONE]"
    for block in blocks:
        assert block.startswith(b"data: {")
        assert not {b"\n", b"\r"} & {block[i : i + 1] for i in range(len(block))}
        assert isinstance(json.loads(block.removeprefix(b"data: ")), dict)


@pytest.mark.parametrize("asked", [{"prompt": "S02"}, {"messages": user("S02")}])
def test_S02_chunks_share_their_identity(stub: Server, asked: dict[str, Any]) -> None:
    stub.say("S02", " a b c")
    events = stub.events(**asked, n=2, stream_options={"include_usage": True})
    assert len(events) > 6
    identities = {
        (e["id"], e["created"], e["model"], e["object"], e["system_fingerprint"]) for e in events
    }
    ((reply_id, created, model, kind, _),) = identities
    is_chat = "messages" in asked
    assert reply_id.startswith("chatcmpl-" if is_chat else "cmpl-")
    assert type(created) is int
    assert (model, kind) == ("stub", "chat.completion.chunk" if is_chat else "text_completion")


def test_S03_the_role_comes_with_the_first_token(stub: Server) -> None:
    stub.say("S03", " a b")
    with stub.held() as gate, stub.stream(messages=user("S03"), n=2) as stream:
        wait_until(lambda: gate.num_blocked == 1, 5, "no step was begun")
        assert not stream.has_answer(within_s=0.15)
        gate.open()
        events = list(stream)
    for index in (0, 1):
        first, *rest = deltas_of(events, index)
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert first["finish_reason"] is None
        assert all("role" not in chunk["delta"] for chunk in rest)
        assert "".join(chunk["delta"].get("content", "") for chunk in rest) == " a b"


def test_S04_one_last_chunk_per_choice(stub: Server) -> None:
    stub.say("S04", " a b")
    events = stub.events(messages=user("S04"), n=3)
    for index in range(3):
        *before, last = deltas_of(events, index)
        assert (last["delta"], last["finish_reason"]) == ({}, "stop")
        assert {chunk["finish_reason"] for chunk in before} == {None}
    cut = stub.events(messages=user("S04"), max_tokens=1)
    assert deltas_of(cut)[-1]["finish_reason"] == "length"


@pytest.mark.parametrize("asked", [{"prompt": "S06"}, {"messages": user("S06")}])
def test_S06_usage_in_a_chunk_of_its_own(stub: Server, asked: dict[str, Any]) -> None:
    stub.say("S06", " a b")
    *chunks, last = stub.events(**asked, n=2, stream_options={"include_usage": True})
    num_prompt = len(ids_of("S06"))
    assert last["choices"] == []
    assert {k: v for k, v in last["usage"].items() if not isinstance(v, dict)} == {
        "prompt_tokens": num_prompt,
        "completion_tokens": 6,
        "total_tokens": num_prompt + 6,
    }
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        events = stub.events(**asked, **options)
        assert all("usage" not in event and event["choices"] for event in events)


def test_S06_stream_options_need_a_stream(stub: Server) -> None:
    reply = stub.completion(prompt="Hi", stream_options={"include_usage": True})
    error = refused(reply, "stream_options")
    assert "stream" in error["message"]


@pytest.mark.parametrize("asked", [{"prompt": "S07"}, {"messages": user("S07")}])
def test_S07_running_usage(stub: Server, asked: dict[str, Any]) -> None:
    stub.say("S07", " a b c")
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = stub.events(**asked, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert {1, 2, 3, 4} <= set(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 4
    assert {c["usage"]["prompt_tokens"] for c in chunks} == {len(ids_of("S07"))}
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + c["usage"]["completion_tokens"]
        for c in chunks
    )


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stop": ["a", "e", "th"]}, {"top_p": 0.7}])
def test_S08_streamed_text_is_the_plain_text(mini: Server, fields: dict[str, Any]) -> None:
    asked = {"prompt": "Once upon a time", "seed": 9, "max_tokens": 20, **fields}
    plain = mini.complete(**asked)
    *chunks, last = mini.events(**asked, stream_options={"include_usage": True})
    for choice in plain["choices"]:
        assert joined_choice(chunks, choice["index"]) == core_of(choice)
    assert last["usage"] == plain["usage"]
    del asked["prompt"]
    messages = user("Once upon a time")
    plain = mini.chat(messages, **asked)
    events = mini.events(messages=messages, **asked)
    for choice in plain["choices"]:
        chunks = deltas_of(events, choice["index"])
        text = "".join(chunk["delta"].get("content", "") for chunk in chunks)
        assert text == choice["message"]["content"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]


def test_S10_what_may_begin_a_stop_is_held_and_then_released(stub: Server) -> None:
    stub.say("S10 lost", " a O P X b")
    stub.say("S10 met", " a O P Q b")
    stub.say("S10 cut", " a O P")

    def texts(prompt: str, **fields: Any) -> list[str]:
        events = stub.events(prompt=prompt, stop=["O P Q"], **fields)
        return [text for event in events if (text := event["choices"][0]["text"])]

    assert texts("S10 lost") == [" a", " ", "O P X", " b"]
    assert texts("S10 met") == [" a", " "]
    assert texts("S10 cut") == [" a", " ", "O P"]
    assert texts("S10 cut", max_tokens=3) == [" a", " ", "O P"]


@pytest.mark.parametrize("asked", [{"prompt": "S12"}, {"messages": user("S12")}])
def test_S12_an_error_after_the_first_byte_is_an_event(stub: Server, asked: dict[str, Any]) -> None:
    stub.say("S12", " a b c d e")
    with stub.held() as gate, stub.stream(**asked) as stream:
        gate.grant(2)
        texts = ""
        while " b" not in texts:
            event = stream.next_event()
            assert event is not None
            choice = event["choices"][0]
            texts += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        stub.executor.fails = 1
        gate.grant(1)
        event = stream.next_event()
        assert event is not None
        assert set(event) == {"error"}
        assert set(event["error"]) == {"message", "type", "param", "code"}
        assert "/secret/path" not in event["error"]["message"]
        assert stream.next_event() is None  # [DONE], and nothing after
    assert text_of(stub.complete(prompt="S12")) == " a b c d e"


@pytest.mark.parametrize("asked", [{"prompt": "S12"}, {"messages": user("S12")}])
def test_S12_an_error_before_it_has_its_status(stub: Server, asked: dict[str, Any]) -> None:
    stub.say("S12", " a b c d e")
    stub.executor.fails = 1
    with stub.stream(**asked) as stream:
        error = stream.reply().error(500)
    assert "/secret/path" not in json.dumps(error)
    with stub.stream(**asked, temperature=3) as stream:
        refused(stream.reply(), "temperature")


def test_S12_a_long_wait_opens_the_stream(guarded: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """By comments, which keep proxies from cutting the line; an error is an event from then on."""
    monkeypatch.setattr(exchange, "KEEP_ALIVE_S", 0.05)
    with guarded.held() as gate, guarded.stream(prompt="S12 wait", max_tokens=2) as stream:
        assert stream.response.status == 200
        for _ in range(2):
            assert stream.response.readline() == b": keep-alive\n"
            assert stream.response.readline() == b"\n"
        guarded.executor.fails = 1
        gate.grant(1)
        event = stream.next_event()
        assert event is not None
        assert set(event) == {"error"}
        assert stream.next_event() is None
    with guarded.held() as gate, guarded.stream(prompt="S12 wait", max_tokens=2) as stream:
        assert stream.response.readline() == b": keep-alive\n"
        gate.open()
        assert stream.response.readline() == b"\n"
        assert joined_choice(list(stream))["finish_reason"] == "length"


def test_S14_a_token_leaves_before_the_next_is_computed(stub: Server) -> None:
    stub.say("S14", " a b c d")
    with stub.held() as gate, stub.stream(prompt="S14") as stream:
        for text in (" a", " b", " c"):
            gate.grant(1)
            event = stream.next_event()
            assert event is not None
            assert event["choices"][0]["text"] == text
            num_steps = stub.executor.num_steps
            wait_until(lambda: gate.num_blocked == 1, 5, "the next step was not begun")
            assert stub.executor.num_steps == num_steps, "the next token was computed already"
        headers = {name.lower(): value for name, value in stream.response.getheaders()}
    assert headers["cache-control"] == "no-cache"
    assert headers["x-accel-buffering"] == "no"


# --- Errors, headers, models ----------------------------------------------------------------------


def test_E01_every_failure_has_openais_shape(stub: Server, guarded: Server) -> None:
    too_much = {"Content-Length": str(9 << 20)}
    for server, status, method, path, more in (
        (stub, 404, "GET", "/nope", {}),
        (stub, 404, "POST", "/v1/nope", {"body": {}}),
        (stub, 404, "GET", "/v1/models/nope", {}),
        (stub, 404, "POST", "/v1/completions", {"body": {"model": "nope", "prompt": "x"}}),
        (stub, 404, "GET", "/debug/requests/nope", {}),
        (stub, 405, "GET", "/v1/completions", {}),
        (stub, 405, "DELETE", "/v1/chat/completions", {}),
        (stub, 405, "POST", "/v1/models", {"body": {}}),
        (stub, 405, "PUT", "/health", {"body": {}}),
        (stub, 400, "POST", "/v1/completions", {"body": []}),
        (stub, 400, "POST", "/tokenize", {"body": []}),
        (stub, 400, "POST", "/detokenize", {"body": {"tokens": "x"}}),
        (stub, 413, "POST", "/v1/completions", {"data": b"{", "headers": too_much}),
        (guarded, 401, "GET", "/v1/models", {"headers": {"Authorization": "Bearer no"}}),
        (guarded, 401, "GET", "/nope", {"headers": {"Authorization": "Bearer no"}}),
    ):
        reply = server.request(method, path, **more)
        error = reply.error(status)
        assert error["message"], path
    allowed = stub.get("/v1/completions").headers["allow"]
    assert "POST" in allowed


def test_E01_a_failed_step_has_openais_shape(stub: Server) -> None:
    stub.executor.fails = 1
    reply = stub.completion(prompt="E01")
    error = reply.error(500)
    assert reply.headers["x-request-id"] in error["message"]
    assert "/secret/path" not in error["message"]


def test_E02_a_clients_mistake_is_never_5xx(stub: Server, guarded: Server) -> None:
    types = {
        stub.completion(prompt="x", n=0).error(400)["type"],
        stub.get("/nope").error(404)["type"],
        stub.post("/v1/completions", {"model": "nope", "prompt": "x"}).error(404)["type"],
        guarded.get("/v1/models", headers={"Authorization": ""}).error(401)["type"],
    }
    assert types == {"invalid_request_error"}
    unknown = stub.post("/v1/completions", {"model": "nope", "prompt": "x"}).error(404)
    assert (unknown["code"], unknown["param"]) == ("model_not_found", "model")


def test_E03_429_says_when_to_come_back(guarded: Server) -> None:
    asked = {"prompt": "E03 noise", "max_tokens": 3}
    with guarded.held() as gate:
        streams = [guarded.stream(**asked) for _ in range(6)]  # two slots, two in the queue
        wait_until(
            lambda: sum(stream.has_answer() for stream in streams) == 2, 5, "not two were refused"
        )
        refusals = [stream for stream in streams if stream.has_answer()]
        for stream in refusals:
            reply = stream.reply()
            assert reply.error(429)["code"] == "rate_limit_exceeded"
            after_s, after_ms = (float(reply.headers[h]) for h in ("retry-after", "retry-after-ms"))
            assert 0 < after_ms <= 1000 * after_s <= 120_000
        gate.open()
        for stream in streams:
            if stream not in refusals:
                assert joined_choice(list(stream))["finish_reason"] == "length"
            stream.close()
    assert guarded.completion(**asked).status == 200


def test_E03_a_deadline_is_408_and_not_to_be_retried() -> None:
    engine = scripted_engine(max_num_seqs=2)
    with serve(engine, request_timeout=0.25) as server:
        server.executor.step_s = 0.05
        reply = server.completion(prompt="E03", max_tokens=900)
        error = reply.error(408)
        assert error["code"] == "timeout"
        assert reply.headers["x-should-retry"] == "false"
        with server.stream(prompt="E03", max_tokens=900) as stream:
            *chunks, last = list(stream)
        assert len(chunks) > 1
        assert last["error"]["code"] == "timeout"
        server.executor.step_s = 0.0
        assert server.completion(prompt="E03", max_tokens=2).status == 200
        server.assert_idle()


def test_E04_every_response_has_a_request_id(stub: Server, guarded: Server) -> None:
    replies = [
        stub.completion(prompt="Hi", max_tokens=1),
        stub.post("/v1/completions", body_for("/v1/completions", max_tokens=1, stream=True)),
        stub.completion(prompt="Hi", n=0),
        stub.get("/nope"),
        stub.get("/health"),
        stub.get("/metrics"),
        guarded.get("/v1/models", headers={"Authorization": "Bearer no"}),
    ]
    made = [reply.headers["x-request-id"] for reply in replies]
    assert len(set(made)) == len(made)
    assert all(made)
    for path in ("/health", "/nope", "/v1/models"):
        kept = stub.get(path, headers={"X-Request-Id": "mine-42"})
        assert kept.headers["x-request-id"] == "mine-42"
    body = body_for("/v1/completions", max_tokens=1)
    kept = stub.post("/v1/completions", body, headers={"X-Request-Id": "mine-43"})
    assert kept.headers["x-request-id"] == "mine-43"
    # Two at once under one id are both served.
    asked = [lambda: stub.post("/v1/completions", body, headers={"X-Request-Id": "twin"})] * 2
    assert [reply.status for reply in concurrently(asked)] == [200, 200]


def test_E04_the_id_leads_to_the_account(stub: Server) -> None:
    stub.say("E04", " a b c")
    body = body_for("/v1/completions", "E04", n=2)
    answer = answered(stub.post("/v1/completions", body, headers={"X-Request-Id": "mine-44"}))
    for name in (answer["id"], "mine-44"):
        account = answered(stub.get(f"/debug/requests/{name}"))
        assert (account["id"], account["request_id"]) == (answer["id"], "mine-44")
        assert (account["status"], account["outcome"]) == (200, "done")
        assert [choice["finish_reason"] for choice in account["choices"]] == ["stop", "stop"]
        assert [choice["num_output_tokens"] for choice in account["choices"]] == [4, 4]
        assert all(choice["steps"] for choice in account["choices"])


def test_E06_keys(guarded: Server) -> None:
    for headers in (
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "sekret"},
        {"Authorization": "Basic sekret"},
        {"Authorization": "Bearer sekret2"},
        {"Authorization": "Bearer s\u00e9kret"},
        {"Authorization": ""},
    ):
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            reply = guarded.request(method, path, headers=headers)
            error = reply.error(401)
            assert error["code"] == "invalid_api_key"
            assert "sekret" not in error["message"]
    for path in ("/health", "/live"):
        assert guarded.get(path, headers={"Authorization": ""}).status == 200
    assert guarded.get("/v1/models").status == 200
    preflight = guarded.request(
        "OPTIONS",
        "/v1/chat/completions",
        headers={
            "Authorization": "",
            "Origin": "https://ui.example",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://ui.example"
    for origin, allowed in (("https://ui.example", True), ("https://evil.example", False)):
        reply = guarded.get("/v1/models", headers={"Origin": origin})
        assert ("access-control-allow-origin" in reply.headers) is allowed


def test_E06_cors_is_off_unless_asked_for(stub: Server) -> None:
    reply = stub.get("/v1/models", headers={"Origin": "https://ui.example"})
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("path", ENDPOINTS)
def test_E07_a_prompt_that_fills_the_context_is_400(stub: Server, path: str) -> None:
    for num_tokens in (NUM_POSITIONS, 1030):
        reply = stub.post(path, body_for(path, " a" * num_tokens, max_tokens=7))
        error = reply.error(400)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if path == "/v1/completions" else "messages")
        for number in (NUM_POSITIONS, num_tokens, 7, num_tokens + 7):
            assert str(number) in error["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_E07_a_cap_that_does_not_fit_is_clamped(stub: Server, path: str) -> None:
    for prompt, num_tokens in ((" a" * 1020, 4), (" a" * 1023, 1)):
        answer = answered(stub.post(path, body_for(path, prompt, max_tokens=100_000)))
        assert answer["usage"]["completion_tokens"] == num_tokens
        assert answer["choices"][0]["finish_reason"] == "length"


def test_E07_strict_context_refuses_what_would_be_clamped(guarded: Server) -> None:
    error = guarded.completion(prompt=" a" * 1020, max_tokens=5).error(400)
    assert error["code"] == "context_length_exceeded"
    for number in (NUM_POSITIONS, 1020, 5, 1025):
        assert str(number) in error["message"]
    assert guarded.complete(prompt=" a" * 1020, max_tokens=4)["usage"]["total_tokens"] == 1024


def test_E08_models(stub: Server, guarded: Server) -> None:
    for server, name in ((stub, "stub"), (guarded, "org/stub")):
        listed = answered(server.get("/v1/models"))
        (model,) = listed["data"]
        assert listed["object"] == "list"
        assert (model["id"], model["object"]) == (name, "model")
        assert type(model["created"]) is int
        assert isinstance(model["owned_by"], str)
        assert answered(server.get(f"/v1/models/{name}")) == model
        error = server.get(f"/v1/models/{name}/x").error(404)
        assert error["code"] == "model_not_found"
    assert guarded.get("/v1/models/org%2Fstub").json()["id"] == "org/stub"


def test_E10_the_fingerprint_tells_what_computes() -> None:
    def fingerprint(kernels: str = "made up", **options: Any) -> str:
        engine = scripted_engine(max_num_seqs=1, **options)
        engine.executor.kernels = kernels  # type: ignore[attr-defined]
        with serve(engine) as server:
            prints = {
                server.complete(prompt="Hi", max_tokens=1)["system_fingerprint"],
                server.chat("Hi", max_tokens=1)["system_fingerprint"],
                server.events(prompt="Hi", max_tokens=1)[0]["system_fingerprint"],
            }
        (found,) = prints
        assert isinstance(found, str)
        return found

    first, again = fingerprint(), fingerprint()
    others = [
        fingerprint(dtype="bfloat16"),
        fingerprint(kv_cache_dtype="float16"),
        fingerprint(kernels="other ones"),
    ]
    assert first == again
    assert len({first, *others}) == 4


# --- What the README says -------------------------------------------------------------------------

README = Path(__file__).parent.parent / "README.md"
CURL = re.compile(r"^curl (?:'[^']*'|\\\n|[^'\n])*$", re.MULTILINE)


def test_the_readmes_curl_line_works_as_it_stands(mini: Server) -> None:
    (line,) = CURL.findall(README.read_text())
    _, *arguments = shlex.split(line.replace("\\\n", " "))
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("url")
    parser.add_argument("-N", action="store_true")
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data")
    given = parser.parse_args(arguments)
    host, _, path = given.url.removeprefix("http://").partition("/")
    assert host == "localhost:8000"
    assert given.N, "without it curl holds the stream back"
    headers = dict(header.split(": ") for header in given.headers)
    with mini.open("POST", f"/{path}", data=given.data.encode(), headers=headers) as stream:
        assert stream.response.getheader("content-type", "").startswith("text/event-stream")
        events = list(stream)
    assert stream.is_done
    assert "".join(c["delta"].get("content", "") for c in deltas_of(events)).strip()
    assert deltas_of(events)[-1]["finish_reason"] in ("stop", "length")
