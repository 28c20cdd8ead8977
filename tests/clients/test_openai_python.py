"""The `openai` package: what it parses, raises, repeats, times out and cancels."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from serving import KEY, RunningServer

from nanoserve import LLM, SamplingParams

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

PROMPT = "Once upon a time"
USER = [{"role": "user", "content": PROMPT}]
ENDLESS: dict[str, Any] = {"max_tokens": 900, "n": 64, "extra_body": {"ignore_eos": True}}
"""More than any test here waits for."""


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=server.base_url, api_key="none is needed", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def limited(guarded: RunningServer) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=guarded.base_url, api_key=KEY, max_retries=0) as opened:
        yield opened


def async_client(server: RunningServer) -> AsyncOpenAI:
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=server.base_url, api_key="none is needed", max_retries=0)


@contextmanager
def occupied(client: OpenAI, server: RunningServer) -> Iterator[None]:
    """While inside, a stream holds the only place of the server."""
    stream = client.completions.create(model="mini", prompt=PROMPT, stream=True, **ENDLESS)
    with closing(stream):
        server.wait_busy()
        yield
    server.wait_idle()


def test_the_model_is_listed_and_found(client: OpenAI) -> None:
    from openai import NotFoundError

    (model,) = client.models.list()
    assert (model.id, model.object) == ("mini", "model")
    assert client.models.retrieve("mini") == model
    with pytest.raises(NotFoundError) as raised:
        client.models.retrieve("gpt-4/turbo")
    assert raised.value.code == "model_not_found"


def test_a_completion_is_the_one_of_the_python_api(client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=-7)
    (expected,) = llm.generate(PROMPT, params)
    completion = client.completions.create(
        model="mini", prompt=PROMPT, max_tokens=24, temperature=0.8, seed=-7
    )
    assert completion.choices[0].text == expected.outputs[0].text
    assert completion.choices[0].finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert completion.usage.completion_tokens == 24
    assert completion.usage.total_tokens == completion.usage.prompt_tokens + 24


@pytest.mark.parametrize("logprobs", [None, 2])
def test_answers_have_the_types_that_the_package_declares(
    client: OpenAI, logprobs: int | None
) -> None:
    """The package itself never validates; whoever lets it be typed relies on it all the same."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    completion = client.completions.with_raw_response.create(
        model="mini", prompt=[PROMPT, "The sea"], logprobs=logprobs
    )
    assert len(Completion.model_validate_json(completion.http_response.text).choices) == 2
    asked: dict[str, Any] = {"model": "mini", "messages": USER, "max_tokens": 8}
    if logprobs is not None:
        asked |= {"logprobs": True, "top_logprobs": logprobs}
    chat = client.chat.completions.with_raw_response.create(**asked)
    assert len(ChatCompletion.model_validate_json(chat.http_response.text).choices) == 1
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"


def test_a_stream_is_the_plain_answer_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "mini", "prompt": PROMPT, "max_tokens": 32, "seed": 11}
    plain = client.completions.create(**asked)
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.text for chunk in chunks for c in chunk.choices) == plain.choices[0].text
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert not chunks[-1].choices
    assert chunks[-1].usage == plain.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_chat_stream_helper_puts_the_answer_together(client: OpenAI) -> None:
    """`chat.completions.stream` accumulates deltas by its own rules: roles, indices, logprobs.

    It takes an answer that ended with `length` for a failure, so these end with a full stop.
    """
    asked: dict[str, Any] = {"model": "mini", "messages": USER, "stop": ".", "seed": 5, "n": 2}
    asked |= {"logprobs": True, "top_logprobs": 1}
    plain = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion()
    for ours, theirs in zip(final.choices, plain.choices, strict=True):
        assert ours.index == theirs.index
        assert ours.message.role == theirs.message.role == "assistant"
        assert ours.message.content == theirs.message.content
        assert ours.finish_reason == theirs.finish_reason == "stop"
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs.content == theirs.logprobs.content


def test_choices_differ_and_the_set_repeats(client: OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(
            model="mini", prompt=PROMPT, max_tokens=16, n=4, seed=3, temperature=1.0
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.text for choice in answer.choices]

    texts = ask()
    assert len(set(texts)) == 4
    assert ask() == texts


def test_every_choice_of_a_stream_ends_once(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "mini", "messages": USER, "max_tokens": 12, "n": 3, "seed": 9}
    texts, ends = [""] * 3, [0] * 3
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            assert not ends[choice.index]
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
    plain = client.chat.completions.create(**asked)
    assert texts == [choice.message.content for choice in plain.choices]
    assert ends == [1, 1, 1]


def test_completion_logprobs_line_up_with_the_text(client: OpenAI) -> None:
    (choice,) = client.completions.create(
        model="mini", prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3, echo=True
    ).choices
    scores = choice.logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.top_logprobs is not None
    assert scores.token_logprobs is not None
    assert scores.text_offset is not None
    assert "".join(scores.tokens) == choice.text
    assert choice.text.startswith(PROMPT)
    for token, offset in zip(scores.tokens, scores.text_offset, strict=True):
        assert choice.text[offset:].startswith(token)
    assert scores.token_logprobs[0] is scores.top_logprobs[0] is None
    best = [max(top.values()) for top in scores.top_logprobs[-8:]]
    assert scores.token_logprobs[-8:] == best  # greedy


def test_chat_logprobs_have_the_bytes_of_the_content(client: OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model="mini", messages=USER, max_tokens=16, logprobs=True, top_logprobs=2, seed=1
    ).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert choice.message.content is not None
    data = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert data == choice.message.content.encode()
    assert {len(entry.top_logprobs) for entry in choice.logprobs.content} == {2}


def test_max_completion_tokens_and_parts(client: OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}], "name": "ann"}]
    answer = client.chat.completions.create(
        model="mini",
        messages=parts,  # type: ignore[arg-type]
        max_completion_tokens=5,
        max_tokens=50,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


def test_a_wrong_request_names_its_field_and_is_sent_once(server: RunningServer) -> None:
    from openai import BadRequestError, OpenAI

    def num_refused() -> float:
        return server.metric("nanoserve:http_responses_total", status="400")

    before = num_refused()
    with OpenAI(base_url=server.base_url, api_key="x", max_retries=2) as patient:
        with pytest.raises(BadRequestError) as raised:
            patient.completions.create(model="mini", prompt=PROMPT, temperature=3)
        assert raised.value.param == "temperature"
        assert raised.value.type == "invalid_request_error"
        assert raised.value.request_id == raised.value.response.headers["x-request-id"]
        with pytest.raises(BadRequestError) as raised:
            patient.completions.create(model="mini", prompt=[5] * 1024, max_tokens=1)
        assert raised.value.code == "context_length_exceeded"
    assert num_refused() == before + 2


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    from openai import NotFoundError

    with pytest.raises(NotFoundError) as raised:
        client.chat.completions.create(model="gpt-4o", messages=USER)  # type: ignore[arg-type]
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


def test_the_request_id_is_shown_and_may_be_the_callers(client: OpenAI) -> None:
    answer = client.completions.create(model="mini", prompt=PROMPT, max_tokens=1)
    assert answer._request_id
    named = client.completions.create(
        model="mini", prompt=PROMPT, max_tokens=1, extra_headers={"X-Request-Id": "mine-17"}
    )
    assert named._request_id == "mine-17"


def test_a_wrong_key_is_refused(guarded: RunningServer) -> None:
    from openai import AuthenticationError, OpenAI

    stranger = OpenAI(base_url=guarded.base_url, api_key="guessed")
    with stranger, pytest.raises(AuthenticationError) as raised:
        stranger.models.list()
    assert raised.value.code == "invalid_api_key"


def test_a_full_server_says_when_to_come_back(limited: OpenAI, guarded: RunningServer) -> None:
    from openai import RateLimitError

    with occupied(limited, guarded), pytest.raises(RateLimitError) as raised:
        limited.completions.create(model="mini", prompt=PROMPT)
    headers = raised.value.response.headers
    assert 0 < float(headers["retry-after-ms"]) / 1000 <= float(headers["retry-after"]) <= 120
    assert "--max-queue" in raised.value.message


def test_what_was_refused_is_sent_again_and_answered(
    limited: OpenAI, guarded: RunningServer
) -> None:
    """The package obeys `retry-after-ms`: it is in when the place is free.

    The server names the time that a request took of late, so a few short ones come first.
    """
    for _ in range(50):
        limited.completions.create(model="mini", prompt=PROMPT, max_tokens=1)
    patient = limited.with_options(max_retries=20)
    with ThreadPoolExecutor(1) as pool:
        with occupied(limited, guarded):
            refused = guarded.metric("nanoserve:refused_requests_total")
            answer = pool.submit(
                patient.completions.with_raw_response.create,
                model="mini",
                prompt=PROMPT,
                max_tokens=2,
            )
            while guarded.metric("nanoserve:refused_requests_total") == refused:
                time.sleep(0.01)
        assert answer.result(30).retries_taken >= 1
        assert answer.result().parse().choices[0].text


def test_a_deadline_is_no_reason_to_try_again(guarded: RunningServer) -> None:
    """408 would be repeated, but for `x-should-retry: false`: it would only time out again."""
    from openai import APIStatusError, OpenAI

    with OpenAI(base_url=guarded.base_url, api_key=KEY, max_retries=2) as patient:
        begin = time.monotonic()
        with pytest.raises(APIStatusError) as raised:
            patient.completions.create(model="mini", prompt=PROMPT, **ENDLESS)
    assert (raised.value.status_code, raised.value.code) == (408, "timeout")
    assert time.monotonic() - begin < 6
    guarded.wait_idle(1)


def test_an_error_after_the_first_byte_is_raised(limited: OpenAI, guarded: RunningServer) -> None:
    from openai import APIError, APIStatusError

    stream = limited.completions.create(model="mini", prompt=PROMPT, stream=True, **ENDLESS)
    assert next(iter(stream)).choices
    with pytest.raises(APIError, match="request-timeout") as raised:
        for _ in stream:
            pass
    assert not isinstance(raised.value, APIStatusError)  # there was a status, and it was 200
    assert raised.value.code == "timeout"
    guarded.wait_idle(1)


def test_a_client_that_times_out_leaves_nothing_running(
    client: OpenAI, server: RunningServer
) -> None:
    from openai import APITimeoutError

    gone = server.metric("nanoserve:disconnects_total")
    with pytest.raises(APITimeoutError):
        client.with_options(timeout=0.3).completions.create(model="mini", prompt=PROMPT, **ENDLESS)
    server.wait_idle(1)
    assert server.metric("nanoserve:disconnects_total") == gone + 1


def test_closing_a_stream_ends_all_its_choices(client: OpenAI, server: RunningServer) -> None:
    gone = server.metric("nanoserve:disconnects_total")
    stream = client.completions.create(model="mini", prompt=PROMPT, stream=True, **ENDLESS)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    assert server.metric("vllm:num_requests_running") > 0
    stream.close()
    server.wait_idle(1)
    assert server.metric("nanoserve:disconnects_total") == gone + 1


def test_a_cancelled_task_ends_its_request(server: RunningServer) -> None:
    async def ask_and_cancel() -> None:
        async with async_client(server) as asking:
            task = asyncio.create_task(
                asking.completions.create(model="mini", prompt=PROMPT, **ENDLESS)
            )
            await asyncio.to_thread(server.wait_busy)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(ask_and_cancel())
    server.wait_idle(1)


def test_many_streams_at_once_are_each_what_they_are_alone(
    client: OpenAI, server: RunningServer
) -> None:
    def asked(seed: int) -> dict[str, Any]:
        return {"model": "mini", "prompt": PROMPT, "max_tokens": 24, "seed": seed}

    async def stream(asking: AsyncOpenAI, seed: int) -> str:
        pieces = await asking.completions.create(**asked(seed), stream=True)
        return "".join([chunk.choices[0].text async for chunk in pieces])

    async def stream_all() -> list[str]:
        async with async_client(server) as asking:
            return list(await asyncio.gather(*(stream(asking, seed) for seed in range(16))))

    texts = asyncio.run(stream_all())
    assert texts == [client.completions.create(**asked(seed)).choices[0].text for seed in range(16)]
    assert len(set(texts)) == 16


def test_tools_are_refused_by_name(client: OpenAI) -> None:
    from openai import BadRequestError

    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(
            model="mini",
            messages=USER,  # type: ignore[arg-type]
            tools=[tool],  # type: ignore[list-item]
        )
    assert raised.value.param == "tools"
