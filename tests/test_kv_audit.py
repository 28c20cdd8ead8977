"""The live meter of a reduced cache: what it measures, that it sees a fault, and what it costs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    assert_nothing_left,
    drain,
    greedy,
    outputs_of,
    prompt_of,
    run,
    tiny_config,
    tiny_engine,
    tiny_model,
    tokens_of,
)

from nanoserve.cli import main
from nanoserve.engine.audit import compare, is_chosen
from nanoserve.engine.engine import Engine
from nanoserve.kernels import paged
from nanoserve.kernels.cpu import library
from nanoserve.planner.model import kv_bytes_per_token
from nanoserve.request import KVAudit, RequestOutput, SamplingParams

EXECUTORS = [
    "eager",
    pytest.param(
        "native",
        marks=pytest.mark.skipif(not library.available(), reason="needs the native core"),
    ),
]
PROMPTS = [prompt_of(length) for length in (5, 40, 17, 61)]
KL_BOUND = 1e-3
"""Nats: what int8 keys and values do to this model is far below, a broken scale far above."""


def audited(**options: Any) -> Engine:
    return tiny_engine(**{"kv_cache_dtype": "int8", "kv_audit": 1.0, **options})


def audit_of(output: RequestOutput) -> KVAudit:
    found = output.metrics.kv_audit
    assert found is not None
    return found


def assert_small(found: KVAudit, num_tokens: int) -> None:
    assert found.num_tokens == num_tokens
    assert found.mean_kl is not None
    assert 0 < found.mean_kl <= found.max_kl < KL_BOUND
    assert 0 < found.max_logit_error < 0.3
    assert found.num_agreed >= num_tokens - 1


@pytest.mark.parametrize("executor", EXECUTORS)
def test_every_token_of_every_choice_is_compared_and_int8_is_close(executor: str) -> None:
    engine = audited(executor=executor)
    outputs = run(engine, PROMPTS, greedy(12))
    for output in outputs:
        assert_small(audit_of(output), 12)
    (both,) = run(engine, PROMPTS[:1], SamplingParams(max_tokens=9, seed=1, n=2, ignore_eos=True))
    assert_small(audit_of(both), 18)
    assert_nothing_left(engine)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_an_audit_changes_no_token(executor: str) -> None:
    options: dict[str, Any] = {"executor": executor, "kv_cache_dtype": "int8"}
    params = SamplingParams(max_tokens=12, seed=3, temperature=0.8, logprobs=2)
    watched = run(audited(**options), PROMPTS, params)
    expected = run(tiny_engine(**options), PROMPTS, params)
    assert [tokens_of(o) for o in watched] == [tokens_of(o) for o in expected]
    assert [o.outputs[0].text for o in watched] == [o.outputs[0].text for o in expected]
    assert all(o.metrics.kv_audit is None for o in expected)


def test_a_full_precision_twin_of_bfloat16_is_measured_too() -> None:
    (output,) = run(audited(kv_cache_dtype="bfloat16"), PROMPTS[:1], greedy(8))
    assert_small(audit_of(output), 8)


def test_a_broken_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that come back 30 % too small: the text may even stay the same."""
    quantise = paged.quantise

    def broken(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = quantise(x)
        return values, scales * 0.7

    monkeypatch.setattr(paged, "quantise", broken)
    (output,) = run(audited(), PROMPTS[1:2], greedy(12))
    found = audit_of(output)
    assert found.mean_kl is not None
    assert found.mean_kl > 10 * KL_BOUND
    assert found.max_logit_error > 0.3


def chunked() -> tuple[Engine, int]:
    return audited(max_num_batched_tokens=16), 0


def preempted() -> tuple[Engine, int]:
    num_bytes = 104 * kv_bytes_per_token(tiny_model().config, "int8")
    return audited(block_size=8, max_model_len=80, kv_cache_memory_bytes=num_bytes), 1


def sliding() -> tuple[Engine, int]:
    return audited(max_model_len=64, context_overflow="slide", slide_window=32), 0


@pytest.mark.parametrize("way", [chunked, preempted, sliding])
def test_its_twin_follows_wherever_the_request_goes(way: Callable[[], tuple[Engine, int]]) -> None:
    """Blocks that the scheduler lets go are poisoned in both caches: a stale one would be seen."""
    engine, at_least = way()
    outputs = run(engine, PROMPTS, greedy(18))
    assert sum(o.metrics.num_preemptions for o in outputs) >= at_least
    assert sum(o.metrics.num_slides for o in outputs) >= (way is sliding)
    for output in outputs:
        assert_small(audit_of(output), 18)
    assert_nothing_left(engine)


def test_a_prefix_that_others_computed_is_computed_for_the_twin() -> None:
    """The first request is not watched, so its blocks have no full-precision twin."""
    engine = audited(kv_audit=0.5, block_size=8)
    names = iter(f"r{number}" for number in range(100))
    unwatched = next(name for name in names if not is_chosen(name, 0.5))
    watched = next(name for name in names if is_chosen(name, 0.5))
    engine.add(unwatched, PROMPTS[1], greedy(4))
    (first,) = outputs_of(drain(engine)).values()
    assert first.metrics.kv_audit is None
    engine.add(watched, PROMPTS[1], greedy(4))
    (second,) = outputs_of(drain(engine)).values()
    assert second.metrics.num_cached_tokens >= 32
    assert_small(audit_of(second), 4)


def test_a_share_of_ids_is_chosen_always_the_same() -> None:
    ids = [f"request-{number}" for number in range(2000)]
    chosen = [name for name in ids if is_chosen(name, 0.1)]
    assert 140 < len(chosen) < 260
    assert set(chosen) <= {name for name in ids if is_chosen(name, 0.3)}
    assert [name for name in ids if is_chosen(name, 1.0)] == ids
    assert not any(is_chosen(name, 0.0) for name in ids)


def test_off_it_costs_nothing() -> None:
    engine = tiny_engine(kv_cache_dtype="int8")
    assert engine.audit is None
    assert "kv_audit" not in engine.executor.memory_stats()
    assert run(engine, PROMPTS[:1], greedy(2))[0].metrics.kv_audit is None


@pytest.mark.parametrize(
    "options,words",
    [
        ({}, "--kv-cache-dtype float32 is not reduced"),
        ({"dtype": "float16", "kv_cache_dtype": "float16"}, "float16 is not reduced"),
        ({"kv_layout": "recompute", "kv_cache_dtype": "int8"}, "recompute keeps no cache"),
    ],
    ids=str,
)
def test_it_is_refused_where_there_is_nothing_to_compare(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Engine(tiny_config(kv_audit=0.5, **options))


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan"), True, "half"])
def test_a_rate_that_is_no_share_is_refused(rate: Any) -> None:
    with pytest.raises(ValueError, match="--kv-audit must be between 0 and 1"):
        tiny_config(kv_audit=rate)


def test_the_comparison_is_the_definition() -> None:
    full = np.array([1.0, 2.0, 0.5, -np.inf], np.float32)
    reduced = np.array([1.5, 1.4, 0.5, -np.inf], np.float32)
    p, q = (np.exp(x) / np.exp(x).sum() for x in (full[:3], reduced[:3]))
    found = compare(reduced, full)
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-5)
    assert not found.agrees
    assert found.logit_error == pytest.approx(0.6, rel=1e-6)
    assert compare(full, full) == (0.0, True, 0.0)


def nanoserve(
    capsys: pytest.CaptureFixture[str], *arguments: str, executor: str = "eager"
) -> tuple[int, str, str]:
    """The command line over the tiny model, in this process: exit code, output, complaints."""
    folder = str(tiny_model().folder)
    common = ("--model", folder, "--device", "cpu", "--executor", executor)
    with pytest.raises(SystemExit) as ended:
        main(("generate", "hello there", *common, "--max-tokens", "4", "--ignore-eos", *arguments))
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_the_command_line_says_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    audit = ("--kv-cache-dtype", "int8", "--kv-audit", "1")
    code, out, _ = nanoserve(capsys, *audit, "--json")
    assert code == 0
    found = json.loads(out)["metrics"]["kv_audit"]
    assert (found["num_tokens"], found["num_agreed"]) == (4, 4)
    assert 0 < found["mean_kl"] <= found["max_kl"] < KL_BOUND
    _, _, err = nanoserve(capsys, *audit, "--stats")
    assert "KV audit: 4 tokens of 1 sequences, KL " in err
    assert "best token agrees in 100.00%" in err
    _, out, _ = nanoserve(capsys, "--json")
    assert "kv_audit" not in json.loads(out)["metrics"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    "arguments,executor,words",
    [
        ((), "graph", "--executor graph: it replays CUDA graphs, got --device cpu"),
        (("--kv-audit", "1"), "eager", "--kv-cache-dtype float32 is not reduced (int8 is)"),
        (("--kv-audit", "1.5"), "eager", "--kv-audit must be between 0 and 1, got 1.5"),
        (("--kernels", "torch"), "native", "--executor native: it has kernels of its own"),
    ],
    ids=["graph", "nothing to audit", "no share", "native"],
)
def test_what_cannot_be_had_is_refused_in_one_line(
    arguments: tuple[str, ...], executor: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = nanoserve(capsys, *arguments, executor=executor)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert words in line


def test_the_server_exports_what_was_found() -> None:
    from nanoserve.server.metrics import ServerMetrics

    metrics = ServerMetrics("tiny")
    for output in run(audited(), PROMPTS[:2], greedy(6)):
        metrics._observe_end(output, 0.0)
    lines = dict(
        line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if line[0] != "#"
    )
    label = '{model_name="tiny"}'
    assert float(lines[f"nanoserve:kv_audit_tokens_total{label}"]) == 12
    assert float(lines[f"nanoserve:kv_audit_disagreements_total{label}"]) <= 1
    assert 0 < float(lines[f"nanoserve:kv_audit_logit_error{label}"]) < 0.3
    assert float(lines[f"nanoserve:kv_audit_kl_nats_count{label}"]) == 2
