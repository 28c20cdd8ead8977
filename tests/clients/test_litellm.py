"""`litellm`, which rebuilds answers from chunks and sorts errors by their words.

Chat goes through the provider `openai/`, completions through `text-completion-openai/`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from serving import KEY, RunningServer

from nanoserve import LLM, SamplingParams

PROMPT = "Once upon a time"
USER = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    # On import it fetches a list of prices, unless it is told to use its own.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm as imported

    monkeypatch.setattr(imported, "suppress_debug_info", True)
    return imported


def at(server: RunningServer, **more: Any) -> dict[str, Any]:
    return {"api_base": server.base_url, "api_key": "none is needed", "max_retries": 0, **more}


def chat(server: RunningServer, **more: Any) -> dict[str, Any]:
    return at(server, model="openai/mini", messages=USER, max_tokens=16, **more)


def expected_text(llm: LLM, **params: Any) -> str:
    (output,) = llm.generate(PROMPT, SamplingParams(max_tokens=16, **params))
    return output.outputs[0].text


def test_chat_is_the_answer_of_the_python_api(
    litellm: Any, server: RunningServer, llm: LLM
) -> None:
    answer = litellm.completion(**chat(server, seed=-7, temperature=0.8))
    (choice,) = answer.choices
    assert choice.message.content == expected_text(llm, seed=-7, temperature=0.8)
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 16


def test_chunks_are_put_together_with_their_usage(litellm: Any, server: RunningServer) -> None:
    """A usage chunk without id or model, or an empty one too many, breaks its builder."""
    asked = chat(server, seed=2, n=2)
    plain = litellm.completion(**asked)
    options = {"include_usage": True}
    chunks = list(litellm.completion(**asked, stream=True, stream_options=options))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in plain.choices]
    assert {chunk.model for chunk in chunks} == {"mini"}
    single = chat(server, seed=2)
    whole = litellm.stream_chunk_builder(
        list(litellm.completion(**single, stream=True, stream_options=options)), messages=USER
    )
    alone = litellm.completion(**single)
    assert whole.choices[0].message.content == alone.choices[0].message.content
    assert whole.choices[0].finish_reason == alone.choices[0].finish_reason
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(whole.usage, count) == getattr(alone.usage, count)


def test_logprobs_come_through(litellm: Any, server: RunningServer) -> None:
    (choice,) = litellm.completion(**chat(server, logprobs=True, top_logprobs=2)).choices
    data = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
    assert data == choice.message.content.encode()


def test_async_streams(litellm: Any, server: RunningServer, llm: LLM) -> None:
    async def ask() -> str:
        chunks = await litellm.acompletion(**chat(server, temperature=0), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(ask()) == expected_text(llm, temperature=0.0)


def test_completions(litellm: Any, server: RunningServer, llm: LLM) -> None:
    asked = at(server, model="text-completion-openai/mini", prompt=PROMPT, max_tokens=16, seed=4)
    expected = expected_text(llm, seed=4)
    assert litellm.text_completion(**asked).choices[0].text == expected
    chunks = litellm.text_completion(**asked, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == expected


def test_errors_are_sorted_by_what_they_are(
    litellm: Any, server: RunningServer, guarded: RunningServer
) -> None:
    long = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**chat(server), "messages": long})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**chat(server), "model": "openai/gpt-4o"})
    with pytest.raises(litellm.BadRequestError) as raised:
        litellm.completion(**chat(server, top_p=7))
    assert not isinstance(raised.value, litellm.ContextWindowExceededError)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**chat(guarded))
    answer = litellm.completion(**{**chat(guarded), "api_key": KEY})
    assert answer.choices[0].message.content
