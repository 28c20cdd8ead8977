"""The `llm` command line, told about the server by `extra-openai-models.yaml`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import KEY, RunningServer, run_program, script

from nanoserve import LLM, SamplingParams

PROMPT = "Once upon a time"

MODELS = """
- model_id: mini-chat
  model_name: mini
  api_base: "{server}"
- model_id: mini-text
  model_name: mini
  api_base: "{server}"
  completion: true
- model_id: mini-guarded
  model_name: mini
  api_base: "{guarded}"
  api_key_name: guarded
"""


@pytest.fixture
def home(tmp_path: Path, server: RunningServer, guarded: RunningServer) -> Path:
    """Where it keeps models, keys and its log."""
    listed = MODELS.format(server=server.base_url, guarded=guarded.base_url)
    (tmp_path / "extra-openai-models.yaml").write_text(listed)
    (tmp_path / "keys.json").write_text(json.dumps({"guarded": KEY}))
    return tmp_path


def ask(home: Path, *arguments: str) -> str:
    return run_program([script("llm"), *arguments], LLM_USER_PATH=str(home))


def expected_text(llm: LLM, prompt: str = PROMPT, max_tokens: int = 16) -> str:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    (output,) = llm.generate(prompt, params)
    return output.outputs[0].text


@pytest.mark.parametrize("model,how", [("mini-chat", "--no-stream"), ("mini-text", "-u")])
def test_an_answer_is_printed(home: Path, llm: LLM, model: str, how: str) -> None:
    """`-u` shows the usage, and streams."""
    text = ask(home, "-m", model, "-o", "max_tokens", "16", "-o", "temperature", "0", how, PROMPT)
    assert text == expected_text(llm) + "\n"


def test_a_conversation_goes_on_and_is_logged(home: Path, llm: LLM) -> None:
    """With a key, which the server asks for."""
    options = ("-m", "mini-guarded", "-o", "max_tokens", "8", "-o", "temperature", "0")
    first = expected_text(llm, max_tokens=8)
    assert ask(home, *options, PROMPT) == first + "\n"
    second = expected_text(llm, f"{PROMPT}\n{first}\nAnd then", max_tokens=8)
    assert ask(home, *options, "-c", "And then") == second + "\n"
    logged = json.loads(ask(home, "logs", "list", "--json", "-n", "0"))
    assert {entry["response"] for entry in logged} == {first, second}
    assert {entry["output_tokens"] for entry in logged} == {8}
