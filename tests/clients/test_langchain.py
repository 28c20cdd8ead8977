"""`langchain-openai`: its chat and its completion class, plain, streamed, batched and async."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from serving import RunningServer

from nanoserve import LLM, SamplingParams

PROMPT = "Once upon a time"


def chat(server: RunningServer, **options: Any) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model="mini",
        base_url=server.base_url,
        api_key="none is needed",  # type: ignore[arg-type]
        max_retries=0,
        **{"temperature": 0, "max_tokens": 16, **options},
    )


def completion(server: RunningServer, **options: Any) -> Any:
    from langchain_openai import OpenAI

    return OpenAI(
        model="mini",
        base_url=server.base_url,
        api_key="none is needed",  # type: ignore[arg-type]
        max_retries=0,
        **{"temperature": 0, "max_tokens": 16, **options},
    )


def expected_text(llm: LLM, prompt: str = PROMPT) -> str:
    (output,) = llm.generate(prompt, SamplingParams(max_tokens=16, temperature=0.0))
    return output.outputs[0].text


def test_chat_is_the_answer_of_the_python_api(server: RunningServer, llm: LLM) -> None:
    message = chat(server).invoke(PROMPT)
    assert message.content == expected_text(llm)
    assert message.response_metadata["finish_reason"] in ("stop", "length")
    assert message.usage_metadata["output_tokens"] == 16
    assert message.usage_metadata["total_tokens"] == 16 + message.usage_metadata["input_tokens"]


def test_chat_streams_the_same_text_and_its_usage(server: RunningServer, llm: LLM) -> None:
    chunks = list(chat(server, stream_usage=True).stream(PROMPT))
    whole = sum(chunks[1:], start=chunks[0])
    assert len(chunks) > 3
    assert whole.content == expected_text(llm)
    assert whole.usage_metadata["output_tokens"] == 16
    assert whole.response_metadata["finish_reason"] == "length"


def test_a_conversation_with_parts_and_a_chain(server: RunningServer, llm: LLM) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage
    from langchain_core.output_parsers import StrOutputParser

    chain = chat(server) | StrOutputParser()
    parts = [{"type": "text", "text": "The sea was calm."}]
    text = chain.invoke([SystemMessage("A tale."), HumanMessage(content=parts)])
    assert text == expected_text(llm, "A tale.\nThe sea was calm.")


def test_logprobs_are_in_the_metadata(server: RunningServer) -> None:
    message = chat(server).bind(logprobs=True, top_logprobs=2).invoke(PROMPT)
    entries = message.response_metadata["logprobs"]["content"]
    assert len(entries) == 16
    assert b"".join(bytes(entry["bytes"]) for entry in entries) == message.content.encode()


def test_many_at_once_are_each_what_they_are_alone(server: RunningServer, llm: LLM) -> None:
    prompts = [PROMPT, "The sea", "My dear", "In the morning"]

    async def ask_all() -> list[Any]:
        return list(await asyncio.gather(*(chat(server).ainvoke(prompt) for prompt in prompts)))

    expected = [expected_text(llm, prompt) for prompt in prompts]
    assert [message.content for message in asyncio.run(ask_all())] == expected
    assert [message.content for message in chat(server).batch(prompts)] == expected


def test_stop_and_seed_reach_the_engine(server: RunningServer, llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, temperature=1.0, seed=4, stop=(".",))
    (expected,) = llm.generate(PROMPT, params)
    asking = chat(server, temperature=1.0, seed=4, max_tokens=64)
    message = asking.invoke(PROMPT, stop=["."])
    assert message.content == expected.outputs[0].text
    assert "." not in message.content


def test_completions_of_a_list(server: RunningServer, llm: LLM) -> None:
    result = completion(server).generate([PROMPT, "The sea"])
    texts = [generation.text for (generation,) in result.generations]
    assert texts == [expected_text(llm), expected_text(llm, "The sea")]
    assert result.llm_output["token_usage"]["completion_tokens"] == 32


def test_completions_stream_the_same_text(server: RunningServer, llm: LLM) -> None:
    assert "".join(completion(server).stream(PROMPT)) == expected_text(llm)


def test_a_wrong_value_is_the_packages_own_error(server: RunningServer) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="temperature"):
        chat(server, temperature=5).invoke(PROMPT)
