"""The `openai` package for Node: `node/openai.mjs` does the asking and reports what it saw.

`make clients` installs it (`npm ci` in the folder `node`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import KEY, RunningServer, run_program

from nanoserve import LLM, SamplingParams

NODE = Path(__file__).parent / "node"


@pytest.fixture(scope="module")
def report(server: RunningServer, guarded: RunningServer) -> Any:
    urls = (server.base_url, guarded.base_url)
    return json.loads(run_program(["node", "openai.mjs", *urls, KEY], cwd=NODE))


def test_the_answer_is_the_one_of_the_python_api(report: Any, llm: LLM) -> None:
    (expected,) = llm.generate("Once upon a time", SamplingParams(max_tokens=24, seed=11))
    assert report["models"] == ["mini"]
    (choice,) = report["plain"]["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": expected.outputs[0].text,
        "refusal": None,
    }
    assert report["plain"]["requestId"]


def test_streams_are_the_plain_answer_in_pieces(report: Any) -> None:
    (choice,) = report["plain"]["choices"]
    streamed = report["streamed"]
    assert streamed["texts"] == {"0": choice["message"]["content"]}
    assert streamed["ends"] == {"0": [choice["finish_reason"]]}
    assert streamed["usage"] == report["plain"]["usage"]


def test_the_chat_stream_helper_puts_the_answer_together(report: Any) -> None:
    plain, helped = report["helper"]
    assert helped == plain
    assert helped["finish_reason"] == "stop"
    assert helped["logprobs"]["content"]


def test_every_choice_ends_once(report: Any) -> None:
    texts = report["choices"]["texts"]
    assert sorted(texts) == ["0", "1", "2"]
    assert len(set(texts.values())) == 3
    assert [len(ends) for ends in report["choices"]["ends"].values()] == [1, 1, 1]


def test_completion_logprobs_are_four_lists(report: Any) -> None:
    assert [choice["index"] for choice in report["completions"]] == [0, 1]
    for choice in report["completions"]:
        scores = choice["logprobs"]
        assert {len(scores[name]) for name in scores} == {4}
        assert "".join(scores["tokens"]) == choice["text"]
        assert scores["token_logprobs"] == [max(top.values()) for top in scores["top_logprobs"]]


@pytest.mark.parametrize(
    "request_name,expected",
    [
        ("value", {"name": "BadRequestError", "status": 400, "param": "top_p", "hasId": True}),
        ("model", {"name": "NotFoundError", "status": 404, "code": "model_not_found"}),
        ("key", {"name": "AuthenticationError", "status": 401, "code": "invalid_api_key"}),
        ("timeout", {"name": "APIConnectionTimeoutError"}),
        ("stream", {"name": "APIError", "code": "timeout"}),
    ],
)
def test_errors_are_the_classes_that_callers_catch(
    report: Any, request_name: str, expected: dict[str, Any]
) -> None:
    assert report["refusals"][request_name].items() >= expected.items()


def test_streams_that_were_left_run_no_longer(report: Any, server: RunningServer) -> None:
    assert report["chunksBeforeAbort"] >= 3
    server.wait_idle(1)
