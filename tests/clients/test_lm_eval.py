"""lm-eval's `local-completions`: its numbers are those of `LLM.score`.

It asks for the prompt back with log-probabilities and one token more, in batches of texts of
unequal length, and counts on their number and on their being equal to the best where they are.
A text that is sent alone gets the same bits; in a batch the products of matrices have another
shape, and may round their last bits otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT, RunningServer, documented_command, run_program

from nanoserve import LLM, SamplingParams

END = 4095
"""The end of text in the embedded model's vocabulary."""
BATCH_BOUND = 1e-5
"""Nats, for the sum over a few tokens."""
TEXTS = ROOT / "tests" / "clients" / "tasks" / "cloze.jsonl"


@pytest.fixture(scope="module")
def samples(
    server: RunningServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Any]]:
    """What the line in docs/clients.md logs, by task, in the order of the data."""
    out = tmp_path_factory.mktemp("lm-eval")
    home = {"HF_DATASETS_CACHE": str(out / "datasets"), "HF_DATASETS_OFFLINE": "1"}
    run_program(documented_command("lm_eval", server, output_path=out), cwd=ROOT, **home)
    return {task: read_samples(out, task) for task in ("nanoserve_cloze", "nanoserve_prose")}


def read_samples(out: Path, task: str) -> list[Any]:
    (file,) = out.rglob(f"samples_{task}_*.jsonl")
    lines = file.read_text(encoding="utf-8").splitlines()
    found = sorted(map(json.loads, lines), key=lambda sample: sample["doc_id"])
    assert len(found) == len(TEXTS.read_text(encoding="utf-8").splitlines())
    return found


def scores_of(llm: LLM, token_ids: list[int]) -> list[float]:
    """Log-probabilities of all tokens but the first."""
    scores = llm.score(token_ids)[1:]
    return [score.logprob for score in scores if score is not None]


def expected_cloze(llm: LLM, doc: dict[str, str]) -> tuple[float, bool]:
    """The sum over the last words, and whether a greedy model would have said them."""
    context = llm.tokenizer.encode(doc["context"])
    whole = llm.tokenizer.encode(f"{doc['context']} {doc['last']}")
    assert whole[: len(context)] == context
    scores = scores_of(llm, whole)[len(context) - 1 :]
    ends = range(len(context) + 1, len(whole) + 1)
    return sum(scores), all(is_best(llm, whole[:end]) for end in ends)


def is_best(llm: LLM, token_ids: list[int]) -> bool:
    """Whether the last token is the likeliest after those before it."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    (output,) = llm.generate([token_ids[:-1]], params)
    return output.outputs[0].token_ids == (token_ids[-1],)


def test_the_scores_of_last_words_are_ours(samples: dict[str, list[Any]], llm: LLM) -> None:
    for sample in samples["nanoserve_cloze"]:
        ((logprob, is_greedy),) = sample["filtered_resps"]  # as texts
        expected_logprob, expected_greedy = expected_cloze(llm, sample["doc"])
        assert float(logprob) == pytest.approx(expected_logprob, rel=0, abs=BATCH_BOUND)
        assert is_greedy == str(expected_greedy)


def test_the_scores_of_whole_texts_are_ours(samples: dict[str, list[Any]], llm: LLM) -> None:
    for sample in samples["nanoserve_prose"]:
        text = f"{sample['doc']['context']} {sample['doc']['last']}"
        (logprob,) = sample["filtered_resps"]
        assert float(logprob) == sum(scores_of(llm, [END, *llm.tokenizer.encode(text)]))


def test_the_server_can_be_its_tokenizer(server: RunningServer, llm: LLM) -> None:
    """Then lm-eval needs no copy of it: `tokenizer_backend=remote`, or nothing at all."""
    from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

    url = f"{server.base_url}/completions"
    assert check_remote_tokenizer_support(url)
    remote = RemoteTokenizer(url)
    text = "Once upon a time \u2014 na\u00efve"
    assert remote.encode(text) == llm.tokenizer.encode(text)
    assert remote.decode(remote.encode(text)) == text
    assert (remote.eos_token, remote.eos_token_id) == ("<|endoftext|>", END)
