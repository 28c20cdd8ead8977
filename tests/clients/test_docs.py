"""docs/clients.md: what it tells to type does what it says.

Its lines for lm-eval and GuideLLM are run by the tests of those.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import DOCUMENTED_URL, RunningServer, documented, run_program, script

NODE = Path(__file__).parent / "node"
PROGRAMS = {"curl", "guidellm", "llm", "lm_eval", "nanoserve", "npm", "pip"}


def blocks(language: str, word: str, server: RunningServer) -> list[str]:
    """Those that hold `word`, with this server in their address."""
    found = [block for block in documented(language) if word in block]
    assert found
    return [block.replace(DOCUMENTED_URL, server.url) for block in found]


def test_nothing_else_is_told_to_be_typed() -> None:
    assert {block.split()[0] for block in documented("bash")} == PROGRAMS


@pytest.mark.parametrize(
    "first_words", ["from openai import", "from langchain_openai import", "import litellm"]
)
def test_python(
    server: RunningServer,
    first_words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would fetch a list of prices
    (block,) = blocks("python", first_words, server)
    exec(block, {})
    assert len(capsys.readouterr().out) > 50


def test_node(server: RunningServer) -> None:
    (block,) = blocks("js", "openai", server)
    assert len(run_program(["node", "--input-type=module", "-e", block], cwd=NODE)) > 50


def test_curl(server: RunningServer) -> None:
    (block,) = blocks("bash", "curl", server)
    *events, done, rest = run_program(["bash", "-euc", block]).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    assert len("".join(delta.get("content", "") for delta in deltas)) > 50


def test_llm(server: RunningServer, tmp_path: Path) -> None:
    (models,) = blocks("yaml", "model_id", server)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    (block,) = blocks("bash", "llm -m", server)
    path = f"{script('llm').parent}:/usr/bin:/bin"
    text = run_program(["bash", "-euc", block], PATH=path, LLM_USER_PATH=str(tmp_path))
    assert len(text) > 150
