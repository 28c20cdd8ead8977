"""A short load with `guidellm`: it believes the usage of each chunk and the literal last line."""

from __future__ import annotations

import json
from pathlib import Path

from serving import ROOT, RunningServer, documented_command, run_program

NUM_REQUESTS = 16
NUM_PROMPT_TOKENS = 64
NUM_OUTPUT_TOKENS = 32
"""As in docs/clients.md, whose line is run."""


def test_every_request_of_a_load_is_counted_right(server: RunningServer, tmp_path: Path) -> None:
    report = tmp_path / "load.json"
    tokens = server.metric("vllm:generation_tokens_total")
    one_process = {"GUIDELLM__MAX_WORKER_PROCESSES": "1"}  # each is a Python that imports torch
    run_program(documented_command("guidellm", server, path=report), cwd=ROOT, **one_process)
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert not requests["errored"]
    for request in requests["successful"]:
        assert request["output_tokens"] == NUM_OUTPUT_TOKENS
        # Its texts are cut to that many tokens, which need not be the same ones when read again.
        assert abs(request["prompt_tokens"] - NUM_PROMPT_TOKENS) <= NUM_PROMPT_TOKENS // 8
        assert 0 < request["time_to_first_token_ms"] < request["request_latency"] * 1000
    generated = server.metric("vllm:generation_tokens_total") - tokens
    assert generated >= NUM_REQUESTS * NUM_OUTPUT_TOKENS
