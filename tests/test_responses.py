"""What clients get: one shape, streamed or whole; log-probabilities and offsets that add up.

Some tests write the engine's deltas by hand, so that any token may come; the others run the engine
on the tiny model. Its head has one id more than its tokenizer, which log-probabilities survive.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from helpers import EOS, NUM_TOKEN_IDS, tiny_engine
from wire import END, gpt2, served

from nanoserve.chat import ChatFormat
from nanoserve.engine.engine import Engine
from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from nanoserve.server.errors import ApiError
from nanoserve.server.protocol import Call, Served, prepare, read_chat, read_completion
from nanoserve.server.responses import DONE, Writer, error_event
from nanoserve.tokenizer import Tokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def writer_of(call: Call, tokenizer: Tokenizer, limits: Served) -> Writer:
    return Writer(
        call,
        prepare(call, tokenizer, limits),
        reply_id="cmpl-7" if call.kind == "completion" else "chatcmpl-7",
        created=1_700_000_000,
        model="tiny",
        fingerprint="fp_1",
        tokenizer=tokenizer,
    )


def parse(stream: bytes) -> list[dict[str, Any]]:
    """The events' JSON, the way the strictest client reads them; [DONE] must not be among them."""
    assert stream.isascii()
    events = stream.decode("ascii").split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [
        json.loads(event.removeprefix("data: "), parse_constant=pytest.fail) for event in events
    ]


# Deltas by hand, over GPT-2's tokenizer

SCORE = -1.5


def scored(token_id: int, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=SCORE, top=top)


def delta(
    token_id: int | None,
    text: str = "",
    reason: FinishReason | None = None,
    stop_reason: str | int | None = None,
    index: int = 0,
    **more: Any,
) -> RequestDelta:
    logprobs = None if token_id is None else (scored(token_id),)
    return RequestDelta(
        request_id="r",
        index=index,
        token_ids=() if token_id is None else (token_id,),
        text=text,
        logprobs=logprobs,
        finish_reason=reason,
        stop_reason=stop_reason,
        **more,
    )


def output_of(deltas: Sequence[RequestDelta], prompt_logprobs: Any = None) -> RequestOutput:
    """What the engine would say of these deltas of one choice."""
    last = deltas[-1]
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(15496,),
        outputs=(
            CompletionOutput(
                index=0,
                text="".join(d.text for d in deltas),
                token_ids=tuple(i for d in deltas for i in d.token_ids),
                finish_reason=last.finish_reason,
                stop_reason=last.stop_reason,
                logprobs=tuple(lp for d in deltas for lp in d.logprobs or ()),
            ),
        ),
        seed=0,
        prompt_logprobs=prompt_logprobs,
        metrics=RequestMetrics(arrival_s=0.0),
    )


def completion_writer(**body: Any) -> Writer:
    call = read_completion({"model": "gpt2", "prompt": "Hello", **body}, served())
    return writer_of(call, gpt2(), served())


def chat_writer(**body: Any) -> Writer:
    messages = [{"role": "user", "content": "Hello"}]
    call = read_chat({"model": "gpt2", "messages": messages, **body}, served())
    return writer_of(call, gpt2(), served())


HI = [delta(17250, "Hi"), delta(11, ","), delta(612, " there", LENGTH)]


def test_p04_p05_p06_a_completion_has_openais_shape() -> None:
    answer = completion_writer().whole([output_of(HI)])
    assert answer == {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_1",
        "choices": [{"index": 0, "text": "Hi, there", "logprobs": None, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
    }
    assert type(answer["choices"][0]["finish_reason"]) is str


def test_p11_s02_streamed_completions_have_the_same_shape() -> None:
    writer = completion_writer(stream=True)
    chunks = [chunk for d in HI for chunk in parse(writer.events(0, d))]
    assert writer.end() == DONE == b"data: [DONE]\n\n"
    names = {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_1",
    }
    texts = [("Hi", None), (",", None), (" there", "length")]
    assert chunks == [
        names | {"choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}
        for text, reason in texts
    ]


def test_c01_a_chat_has_openais_shape() -> None:
    assert chat_writer().whole([output_of(HI)]) == {
        "id": "chatcmpl-7",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "tiny",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi, there", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
    }


def test_s03_s04_a_chat_stream_is_a_role_then_content_then_a_reason() -> None:
    writer = chat_writer(stream=True)
    first = parse(writer.events(0, HI[0]))
    chunks = [*first, *parse(writer.events(0, HI[1])), *parse(writer.events(0, HI[2]))]
    assert len(first) == 2
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-7"}
    assert not any("usage" in chunk for chunk in chunks)
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"index": 0, "delta": piece, "logprobs": None, "finish_reason": reason}
        for piece, reason in [
            ({"role": "assistant", "content": ""}, None),
            ({"content": "Hi"}, None),
            ({"content": ","}, None),
            ({"content": " there"}, None),
            ({}, "length"),
        ]
    ]


def test_s04_an_end_token_makes_no_content() -> None:
    writer = chat_writer(stream=True)
    writer.events(0, HI[0])
    (last,) = parse(writer.events(0, delta(END, "", STOP)))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")


def test_s03_a_chat_whose_first_token_is_its_last() -> None:
    chunks = parse(chat_writer(stream=True).events(0, delta(END, "", STOP)))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {},
    ]


@pytest.mark.parametrize("make", [completion_writer, chat_writer])
def test_s06_usage_comes_once_more_before_the_end(make: Any) -> None:
    writer = make(stream=True, stream_options={"include_usage": True})
    chunks = [chunk for d in HI for chunk in parse(writer.events(0, d))]
    assert all(chunk["usage"] is None for chunk in chunks)
    end = writer.end()
    assert end.endswith(b"\n\n" + DONE)
    (last,) = parse(end.removesuffix(DONE))
    assert last["usage"] == {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4}
    assert last["choices"] == []
    assert {name: last[name] for name in ("id", "object", "created", "model")} == {
        name: chunks[0][name] for name in ("id", "object", "created", "model")
    }


@pytest.mark.parametrize("make", [completion_writer, chat_writer])
def test_s07_usage_may_run(make: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    writer = make(stream=True, n=2, stream_options=options)
    totals = []
    for number, d in enumerate([*HI, delta(11, ",", LENGTH, index=1)], start=1):
        for chunk in parse(writer.events(0, d)):
            assert chunk["usage"]["completion_tokens"] == number
            totals.append(chunk["usage"]["total_tokens"])
    assert totals[-1] == 5
    assert json.loads(writer.end().split(b"\n\n")[0][6:])["usage"]["completion_tokens"] == 4


def test_b31_choices_of_many_prompts_have_indices_of_their_own() -> None:
    call = read_completion({"model": "gpt2", "prompt": ["a", "b c"], "n": 2}, served())
    writer = writer_of(call, gpt2(), served())
    chunks = [
        parse(writer.events(prompt, delta(11, ",", LENGTH, index=index)))[0]["choices"][0]
        for prompt in (1, 0)
        for index in (1, 0)
    ]
    assert [chunk["index"] for chunk in chunks] == [3, 2, 1, 0]
    assert all(chunk["finish_reason"] == "length" for chunk in chunks)
    twice = output_of(HI)
    two = RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=(64,),
        outputs=twice.outputs * 2,
        seed=0,
        metrics=twice.metrics,
    )
    answer = writer_of(call, gpt2(), served()).whole([two, two])
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}


def test_events_hold_nothing_that_a_client_could_take_for_a_line_end() -> None:
    nasty = 'a\nb\r\n\u2028\u2029\x85\x0b\x0c\x1c\x1e\x00"\\\u4f60\U0001f600'
    raw = completion_writer(stream=True).events(0, delta(11, nasty))
    assert raw.decode().splitlines() == [raw.decode().strip(), ""]
    assert parse(raw)[0]["choices"][0]["text"] == nasty


def test_an_abnormal_end_is_not_the_writers_to_tell() -> None:
    for make in (completion_writer, chat_writer):
        for reason in (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR):
            with pytest.raises(KeyError):
                make(stream=True).events(0, delta(None, "", reason))
            with pytest.raises(KeyError):
                make().whole([output_of([delta(None, "", reason)])])


def test_s12_an_error_ends_a_stream() -> None:
    raw = error_event(ApiError("\ud800 broke", status=500, type="server_error"))
    assert raw.endswith(DONE)
    assert parse(raw.removesuffix(DONE)) == [
        {"error": {"message": "? broke", "type": "server_error", "param": None, "code": None}}
    ]


# Log-probabilities by hand


def lists_of(deltas: Sequence[RequestDelta], **body: Any) -> dict[str, list[Any]]:
    """The whole answer's lists, which the stream's must equal."""
    body = {"logprobs": 0, **body}
    whole = completion_writer(**body).whole([output_of(deltas)])["choices"][0]["logprobs"]
    writer = completion_writer(stream=True, **body)
    pieces = [parse(writer.events(0, d))[0]["choices"][0]["logprobs"] for d in deltas]
    joined = {name: [item for piece in pieces for item in piece[name]] for name in whole}
    assert joined == whole
    assert len({len(entries) for entries in whole.values()}) == 1
    return dict(whole)


def test_l01_four_lists() -> None:
    assert lists_of(HI) == {
        "tokens": ["Hi", ",", " there"],
        "token_logprobs": [SCORE] * 3,
        "top_logprobs": [{"Hi": SCORE}, {",": SCORE}, {" there": SCORE}],
        "text_offset": [0, 2, 3],
    }


def test_l02_the_best_and_the_chosen() -> None:
    score = TokenLogprob(token_id=11, logprob=-3.0, top=((0, -0.5), (1, -1.0)))
    made = RequestDelta(request_id="r", index=0, token_ids=(11,), text=",", logprobs=(score,))
    top = lists_of([made, delta(END, "", STOP)])["top_logprobs"][0]
    assert top == {"!": -0.5, '"': -1.0, ",": -3.0}
    assert list(top) == ["!", '"', ","]


def test_l08_what_cannot_happen_is_a_number() -> None:
    score = TokenLogprob(token_id=11, logprob=-math.inf, top=((0, -0.5), (1, -math.inf)))
    made = RequestDelta(request_id="r", index=0, token_ids=(11,), text=",", logprobs=(score,))
    lists = lists_of([made, delta(END, "", STOP)])
    assert lists["token_logprobs"][0] == -9999.0
    assert lists["top_logprobs"][0] == {"!": -0.5, '"': -9999.0, ",": -9999.0}
    entry = chat_writer(logprobs=True, top_logprobs=2).whole([output_of([made])])
    assert entry["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0
    json.dumps(entry, allow_nan=False)


def test_l11_tokens_that_are_no_text() -> None:
    """😀 is two tokens: neither has a character of its own, together they are one."""
    lists = lists_of([delta(47249), delta(222, "😀"), delta(0, "!", LENGTH)])
    assert lists["tokens"] == ["bytes:\\xf0\\x9f\\x98", "bytes:\\x80", "!"]
    assert lists["text_offset"] == [0, 0, 1]


def test_l05_the_end_token_is_listed() -> None:
    lists = lists_of([delta(END, "", STOP)])
    assert lists["tokens"] == ["<|endoftext|>"]
    assert lists["text_offset"] == [0]


def test_l10_tokens_that_a_stop_string_cut_off_keep_their_place() -> None:
    """The stop string is "there, H": it begins inside a token, which was held back."""
    deltas = [
        delta(17250, "Hi"),
        delta(612, " "),
        delta(11, ""),
        delta(367, "", STOP, "there, H"),
    ]
    assert lists_of(deltas)["text_offset"] == [0, 2, 8, 9]


def test_l10_skipped_special_tokens_take_no_room() -> None:
    shown = [delta(END, "<|endoftext|>"), delta(11, ",", LENGTH)]
    skipped = [delta(END, ""), delta(11, ",", LENGTH)]
    assert lists_of(shown, skip_special_tokens=False, ignore_eos=True)["text_offset"] == [0, 13]
    assert lists_of(skipped, ignore_eos=True)["text_offset"] == [0, 0]


def test_l03_l10_an_echo_stands_before() -> None:
    scores = (None, scored(995))
    first = delta(11, ",", prompt_logprobs=scores)
    deltas = [first, delta(612, " there", LENGTH)]
    body = {"prompt": "Hello world", "echo": True, "logprobs": 0}
    (choice,) = completion_writer(**body).whole([output_of(deltas, scores)])["choices"]
    assert choice["text"] == "Hello world, there"
    assert choice["logprobs"] == {
        "tokens": ["Hello", " world", ",", " there"],
        "token_logprobs": [None, SCORE, SCORE, SCORE],
        "top_logprobs": [None, {" world": SCORE}, {",": SCORE}, {" there": SCORE}],
        "text_offset": [0, 5, 11, 12],
    }
    writer = completion_writer(stream=True, **body)
    pieces = [parse(writer.events(0, d))[0]["choices"][0] for d in deltas]
    assert [piece["text"] for piece in pieces] == ["Hello world,", " there"]
    assert [piece["logprobs"]["text_offset"] for piece in pieces] == [[0, 5, 11], [12]]


def test_choices_wait_for_the_scores_of_their_prompt() -> None:
    """They come with choice 0, and another choice may be the first to have a token."""
    body = {"prompt": "Hello world", "echo": True, "logprobs": 0, "n": 2}
    writer = completion_writer(stream=True, **body)
    assert writer.events(0, delta(11, ",", index=1)) == b""
    assert writer.events(0, delta(0, "!", LENGTH, index=1)) == b""
    chunks = parse(writer.events(0, delta(612, " there", prompt_logprobs=(None, scored(995)))))
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks] == [
        (0, "Hello world there"),
        (1, "Hello world,"),
        (1, "!"),
    ]
    assert chunks[1]["choices"][0]["logprobs"]["token_logprobs"] == [None, SCORE, SCORE]


def content_of(deltas: Sequence[RequestDelta], **body: Any) -> list[dict[str, Any]]:
    """The whole chat answer's entries, which the stream's must equal; their bytes add up."""
    body = {"logprobs": True, **body}
    whole = chat_writer(**body).whole([output_of(deltas)])["choices"][0]
    writer = chat_writer(stream=True, **body)
    pieces = [c["choices"][0] for d in deltas for c in parse(writer.events(0, d))]
    told = [
        entry for piece in pieces for entry in (piece["logprobs"] or {"content": []})["content"]
    ]
    assert told == whole["logprobs"]["content"]
    assert whole["logprobs"]["refusal"] is None
    assert [piece["finish_reason"] for piece in pieces].count(None) == len(pieces) - 1
    spelt = b"".join(bytes(entry["bytes"]) for entry in told)
    assert spelt.decode("utf-8", errors="replace") == whole["message"]["content"]
    return told


def test_c06_entries() -> None:
    score = TokenLogprob(token_id=11, logprob=-3.0, top=((0, -0.5), (47249, -1.0)))
    made = RequestDelta(request_id="r", index=0, token_ids=(11,), text=",", logprobs=(score,))
    (entry, _) = content_of([made, delta(END, "", STOP)], top_logprobs=2)
    assert entry == {
        "token": ",",
        "logprob": -3.0,
        "bytes": [44],
        "top_logprobs": [
            {"token": "!", "logprob": -0.5, "bytes": [33]},
            {"token": "bytes:\\xf0\\x9f\\x98", "logprob": -1.0, "bytes": [240, 159, 152]},
        ],
    }


def test_c07_bytes_add_up() -> None:
    assert [e["bytes"] for e in content_of([delta(47249), delta(222, "😀", LENGTH)])] == [
        [240, 159, 152],
        [128],
    ]


def test_c07_an_unfinished_character_adds_what_it_has() -> None:
    entries = content_of([delta(17250, "Hi"), delta(47249, "\ufffd", LENGTH)])
    assert entries[1]["bytes"] == [240, 159, 152]
    broken = content_of([delta(47249), delta(17250, "\ufffdHi"), delta(222, "\ufffd", LENGTH)])
    assert [e["bytes"] for e in broken] == [[240, 159, 152], [72, 105], [128]]


def test_c07_what_a_stop_string_cut_off_adds_nothing() -> None:
    deltas = [
        delta(17250, "Hi"),
        delta(612, " "),
        delta(11, ""),
        delta(367, "", STOP, "there, H"),
    ]
    entries = content_of(deltas)
    assert [bytes(e["bytes"]) for e in entries] == [b"Hi", b" ", b"", b""]
    assert [e["token"] for e in entries] == ["Hi", " there", ",", " H"]


def test_c07_a_stop_string_that_is_the_end_of_a_character() -> None:
    entries = content_of([delta(17250, "Hi"), delta(47249), delta(222, "", STOP, "😀")])
    assert [bytes(e["bytes"]) for e in entries] == [b"Hi", b"", b""]
    kept = content_of([delta(47249), delta(222, "😀", STOP, "😀")])
    assert [bytes(e["bytes"]) for e in kept] == [b"\xf0\x9f\x98", b"\x80"]


def test_c07_an_end_token_adds_nothing() -> None:
    for token_id, reason in ((END, None), (11, 11)):
        entries = content_of([delta(17250, "Hi"), delta(token_id, "", STOP, reason)])
        assert [bytes(e["bytes"]) for e in entries] == [b"Hi", b""]
    told = content_of([delta(END, "<|endoftext|>", LENGTH)], skip_special_tokens=False)
    assert bytes(told[0]["bytes"]) == b"<|endoftext|>"


def test_held_back_tokens_are_told_with_their_text() -> None:
    writer = chat_writer(stream=True, logprobs=True)
    first = parse(writer.events(0, delta(17250, "")))
    assert [chunk["choices"][0]["logprobs"] for chunk in first] == [None, None]
    (second,) = parse(writer.events(0, delta(11, "Hi,")))
    assert [e["token"] for e in second["choices"][0]["logprobs"]["content"]] == ["Hi", ","]


def test_r18_return_token_ids() -> None:
    (choice,) = completion_writer(return_token_ids=True).whole([output_of(HI)])["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([15496], [17250, 11, 612])
    writer = completion_writer(return_token_ids=True, stream=True)
    pieces = [parse(writer.events(0, d))[0]["choices"][0] for d in HI]
    assert [piece["token_ids"] for piece in pieces] == [[17250], [11], [612]]
    assert [piece.get("prompt_token_ids") for piece in pieces] == [[15496], None, None]
    answer = chat_writer(return_token_ids=True).whole([output_of(HI)])
    assert answer["prompt_token_ids"] == [15496]
    assert answer["choices"][0]["token_ids"] == [17250, 11, 612]
    chat = chat_writer(return_token_ids=True, stream=True)
    told = [c["choices"][0] for d in HI for c in parse(chat.events(0, d))]
    assert [piece["token_ids"] for piece in told if "token_ids" in piece] == [[17250], [11], [612]]


# Over the engine

PROMPT = [[101, 7, 300], [12, 90, 91, 92, 93], [250]]


def tiny_served(engine: Engine) -> Served:
    return Served.of(
        engine.config, engine.spec, engine.tokenizer, model_names=("tiny",), chat_template=None
    )


class Service:
    """An engine behind the wire's functions, one request at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.limits = tiny_served(engine)

    def call(self, body: dict[str, Any]) -> Call:
        read = read_chat if "messages" in body else read_completion
        return read({"model": "tiny", "seed": 5, **body}, self.limits)

    def run(self, call: Call) -> list[tuple[int, RequestDelta]]:
        """Each delta with the number of its prompt."""
        prompts = prepare(call, self.engine.tokenizer, self.limits)
        for number, prompt in enumerate(prompts):
            self.engine.add(str(number), prompt.token_ids, call.params, prompt=prompt.prompt)
        deltas: list[tuple[int, RequestDelta]] = []
        while self.engine.has_unfinished:
            deltas += [(int(d.request_id), d) for d in self.engine.step()]
        return deltas

    def whole(self, body: dict[str, Any]) -> dict[str, Any]:
        call = self.call(body)
        ended = sorted((number, d.output) for number, d in self.run(call) if d.output is not None)
        writer = writer_of(call, self.engine.tokenizer, self.limits)
        answer = writer.whole([output for _, output in ended])
        return dict(json.loads(json.dumps(answer, allow_nan=False)))

    def streamed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        call = self.call({**body, "stream": True, "stream_options": {"include_usage": True}})
        writer = writer_of(call, self.engine.tokenizer, self.limits)
        raw = b"".join(writer.events(number, d) for number, d in self.run(call)) + writer.end()
        assert raw.endswith(DONE)
        return parse(raw.removesuffix(DONE))


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, as the whole answer would have them."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices.setdefault(
                piece["index"], {"text": "", "logprobs": None, "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "something came after the reason"
            choice["finish_reason"] = piece["finish_reason"]
            choice["text"] += (
                piece["text"] if "text" in piece else piece["delta"].get("content", "")
            )
            if piece["logprobs"] is not None:
                before = choice["logprobs"] or {}
                choice["logprobs"] = {
                    name: (before.get(name) or []) + entries if entries is not None else None
                    for name, entries in piece["logprobs"].items()
                }
    return [choices[index] for index in sorted(choices)]


def told(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The same of a whole answer."""
    return [
        {
            "text": choice["text"] if "text" in choice else choice["message"]["content"],
            "logprobs": choice["logprobs"],
            "finish_reason": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


BODIES: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "a bird in the sea"},
    "greedy": {"prompt": "a bird", "temperature": 0, "max_tokens": 30},
    "echo": {"prompt": "a bird", "echo": True, "max_tokens": 5},
    "nothing": {"prompt": "a bird", "max_tokens": 0},
    "only echo": {"prompt": ["a bird", "x"], "echo": True, "logprobs": 2, "max_tokens": 0},
    "logprobs": {"prompt": "a bird", "logprobs": 3, "max_tokens": 40},
    "every logprob": {"prompt": "a", "logprobs": 64, "max_tokens": 3, "echo": True},
    "prompts": {"prompt": PROMPT, "n": 2, "echo": True, "logprobs": 1, "max_tokens": 9},
    "many": {"prompt": PROMPT, "n": 5, "max_tokens": 12, "ignore_eos": True},
    "stop": {"prompt": "a bird", "stop": ["a", "e", "o", "x"], "logprobs": 1, "max_tokens": 60},
    "kept": {
        "prompt": "a bird",
        "stop": ["a", "e"],
        "include_stop_str_in_output": True,
        "max_tokens": 60,
    },
    "special": {
        "prompt": "a",
        "logit_bias": {str(EOS): 5},
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 0,
        "max_tokens": 30,
    },
    "end": {"prompt": "a", "logit_bias": {str(EOS): 100}, "logprobs": 1, "echo": True},
}


@pytest.mark.parametrize("name", BODIES)
def test_s08_b23_a_stream_is_the_whole_answer_cut_up(name: str) -> None:
    server = Service(tiny_engine(max_num_seqs=4))
    body = BODIES[name]
    whole, chunks = server.whole(body), server.streamed(body)
    assert joined(chunks) == told(whole)
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []
    finished = [
        piece["index"]
        for chunk in chunks
        for piece in chunk["choices"]
        if piece["finish_reason"] is not None
    ]
    assert sorted(finished) == list(range(len(whole["choices"])))


CHATS: dict[str, dict[str, Any]] = {
    "plain": {"max_completion_tokens": 20},
    "to the end": {"ignore_eos": True},
    "many": {"n": 3, "max_tokens": 15},
    "logprobs": {"logprobs": True, "top_logprobs": 4, "max_tokens": 50, "n": 2},
    "stop": {"logprobs": True, "stop": ["a", "e", "x"], "max_tokens": 60, "n": 4},
    "end": {"logprobs": True, "logit_bias": {str(EOS): 100}},
    "nothing": {"max_tokens": 0, "logprobs": True},
}


@pytest.mark.parametrize("name", CHATS)
def test_s08_c07_a_chat_stream_is_the_whole_answer_cut_up(name: str) -> None:
    server = Service(tiny_engine(max_num_seqs=4))
    body = {"messages": [{"role": "user", "content": "a bird"}], **CHATS[name]}
    whole, chunks = server.whole(body), server.streamed(body)
    streamed = joined(chunks)
    if name == "nothing":  # a stream has no piece that could hold an empty list
        streamed[0]["logprobs"] = {"content": [], "refusal": None}
    assert streamed == told(whole)
    assert chunks[-1]["usage"] == whole["usage"]
    for choice in told(whole):
        if choice["logprobs"] is not None:
            entries = choice["logprobs"]["content"]
            spelt = b"".join(bytes(entry["bytes"]) for entry in entries)
            assert spelt.decode("utf-8", errors="replace") == choice["text"]


def test_l04_l05_the_evaluation_harness_can_slice() -> None:
    """Whatever ends a choice: the length, an end token, a stop."""
    server = Service(tiny_engine())
    ids = [list(range(20, 20 + length)) for length in (3, 7, 1, 40)]
    body = {
        "prompt": ids,
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 1,
        "echo": True,
        "seed": 1234,
    }
    plain = server.whole(body)
    alone = [server.whole({**body, "prompt": [one]})["choices"][0] for one in ids]
    for choice, one in zip(plain["choices"], alone, strict=True):
        assert choice["logprobs"]["tokens"] == one["logprobs"]["tokens"]
        # The order in which a product is summed may depend on how many rows it has.
        expected = pytest.approx(one["logprobs"]["token_logprobs"][1:], abs=1e-5)
        assert choice["logprobs"]["token_logprobs"][1:] == expected
    ends: list[dict[str, Any]] = [
        {},
        {"logit_bias": {str(EOS): 100}},
        {"stop_token_ids": list(range(NUM_TOKEN_IDS))},
        {"stop": [chr(code) for code in range(1, 0x7F)][:64]},
    ]
    for more in ends:
        answer = server.whole({**body, **more})
        for choice, prompt in zip(answer["choices"], ids, strict=True):
            logprobs = choice["logprobs"]
            assert {len(entries) for entries in logprobs.values()} == {len(prompt) + 1}
            assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
            assert None not in logprobs["token_logprobs"][1:] + logprobs["top_logprobs"][1:]
            for score, top in zip(
                logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
            ):
                assert 1 <= len(top) <= 2
                assert score in top.values()
    for choice in plain["choices"]:  # greedy: the new token is the best, to the last bit
        last = choice["logprobs"]["top_logprobs"][-1]
        assert choice["logprobs"]["token_logprobs"][-1] == max(last.values())


def test_l09_prompt_logprobs_are_the_raw_models() -> None:
    server = Service(tiny_engine())
    body = {"prompt": PROMPT[1], "echo": True, "logprobs": 2, "max_tokens": 0}
    plain = server.whole(body)["choices"][0]["logprobs"]
    for change in (
        {"temperature": 0.1},
        {"top_k": 1},
        {"presence_penalty": 2, "repetition_penalty": 3},
        {"logit_bias": {"90": -100}},
    ):
        assert server.whole({**body, **change})["choices"][0]["logprobs"] == plain


def test_ids_beyond_the_tokenizer_have_a_name() -> None:
    """The tiny model's head has one, and 64 of 384 sooner or later hold it."""
    server = Service(tiny_engine())
    answer = server.whole({"prompt": PROMPT[1], "logprobs": 64, "max_tokens": 40})
    tops = answer["choices"][0]["logprobs"]["top_logprobs"]
    assert any(f"token_id:{NUM_TOKEN_IDS}" in top for top in tops)
    score = TokenLogprob(token_id=11, logprob=-3.0, top=((50300, -0.5),))
    made = RequestDelta(request_id="r", index=0, token_ids=(11,), text=",", logprobs=(score,))
    (entry, _) = content_of([made, delta(END, "", STOP)], top_logprobs=1)
    assert entry["top_logprobs"] == [{"token": "token_id:50300", "logprob": -0.5, "bytes": None}]


def test_p09_best_of_returns_the_best() -> None:
    server = Service(tiny_engine())
    body = {"prompt": "a bird", "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    every = server.whole({**body, "n": 6})["choices"]
    best = server.whole({**body, "n": 2, "best_of": 6})["choices"]

    def mean(choice: dict[str, Any]) -> float:
        return float(sum(choice["logprobs"]["token_logprobs"])) / 8

    ranked = sorted(every, key=mean, reverse=True)
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best] == [0, 1]


def test_a_server_of_a_template_says_so() -> None:
    engine = tiny_engine()
    assert not tiny_served(engine).chat.has_template
    limits = Served.of(
        engine.config,
        engine.spec,
        engine.tokenizer,
        model_names=("tiny",),
        chat_template="{{ messages[0].content }}",
    )
    assert limits.chat.has_template
    assert isinstance(limits.chat, ChatFormat)
    assert (limits.num_token_ids, limits.start_token_id) == (NUM_TOKEN_IDS, EOS)
