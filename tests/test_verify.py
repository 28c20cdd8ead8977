"""`verify`: every way happens whatever the options, and a way that is wrong does not pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from helpers import pool_bytes, tiny_config

from nanoserve.request import (
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
    TokenLogprob,
)
from nanoserve.verify import WAYS, Report, Way, compare, verify


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_layout": "recompute"},
        {"kv_layout": "slots", "kv_cache_dtype": "float16"},
        {"kv_layout": "contiguous", "kv_cache_memory_bytes": pool_bytes(512)},
        {"batching": "static"},
        {"max_num_seqs": 1},
        {"max_model_len": 24},
        {"block_size": 64},
        {"max_num_batched_tokens": 8, "enable_prefix_caching": False},
        {"context_overflow": "slide", "slide_window": 200},
        {"strict_context": True},
    ],
)
def test_every_way_happens_whatever_the_options(options: dict[str, Any]) -> None:
    told: list[str] = []
    report = verify(tiny_config(**options), num_tokens=6, progress=told.append)
    assert told == ["naive", *WAYS]
    assert [way.name for way in report.ways] == list(WAYS)
    assert {way.name: way.evidence for way in report.ways if not report.passed(way)} == {}
    assert report.ok


@pytest.mark.parametrize("num_tokens", [2, 40])
def test_few_tokens_and_many_are_enough_to_preempt(num_tokens: int) -> None:
    report = verify(tiny_config(), num_tokens=num_tokens)
    assert all(way.evidence for way in report.ways)


@pytest.mark.parametrize(
    "options,num_tokens,words",
    [
        ({}, 1, "at least 2 new tokens, got 1"),
        ({"max_model_len": 16}, 9, r"holds 16 tokens \(--max-model-len\).*at least 17"),
    ],
)
def test_what_cannot_be_verified_is_refused(
    options: dict[str, Any], num_tokens: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        verify(tiny_config(**options), num_tokens=num_tokens)


def row(token_id: int, *best: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token_id=token_id, logprob=dict(best)[token_id], top=best)


def output(*rows: TokenLogprob) -> RequestOutput:
    """A request's only choice, of these rows."""
    choice = CompletionOutput(
        index=0,
        text="",
        token_ids=tuple(entry.token_id for entry in rows),
        finish_reason=FinishReason.LENGTH,
        logprobs=rows,
    )
    return RequestOutput(
        request_id="0",
        prompt=None,
        prompt_token_ids=(1,),
        outputs=(choice,),
        seed=0,
        metrics=RequestMetrics(arrival_s=0.0),
    )


FIRST, CLOSE = row(5, (5, -0.1), (6, -3.0)), row(7, (7, -1.0), (8, -1.01))


def compared(rows: Sequence[TokenLogprob]) -> Way:
    return compare("some", "it happened", [output(FIRST, CLOSE, FIRST)], [output(*rows)])


def passed(way: Way, *, exact_tokens: bool) -> bool:
    report = Report(
        model="some",
        setting={},
        exact_tokens=exact_tokens,
        bound=0.02,
        distinct_share=1.0,
        ways=(way,),
    )
    assert report.passed(way) == report.ok
    return report.ok


def test_equal_rows_are_equal_bits() -> None:
    way = compared([FIRST, CLOSE, FIRST])
    assert (way.bit_equal, way.num_tokens, way.num_different) == (True, 3, 0)
    assert passed(way, exact_tokens=True)
    assert not passed(replace(way, evidence=None), exact_tokens=True)


def test_a_close_call_may_fall_the_other_way_in_half_precision_only() -> None:
    """After it the texts differ, so nothing later is compared."""
    way = compared([FIRST, row(8, (8, -1.0), (7, -1.005)), row(9, (9, -0.2), (4, -2.0))])
    assert way.num_different == 2
    assert way.max_error == pytest.approx(0.01)
    assert passed(way, exact_tokens=False)
    assert not passed(way, exact_tokens=True)


@pytest.mark.parametrize(
    "wrong",
    [row(6, (6, -0.1), (5, -3.0)), row(1, (1, -0.1), (2, -3.0)), row(5, (5, -0.3), (6, -2.0))],
    ids=["another order", "other tokens", "other values"],
)
def test_the_row_that_first_differs_is_held_to_the_bound(wrong: TokenLogprob) -> None:
    """Wrong from the first token on, a way would otherwise have nothing to be compared by."""
    way = compared([wrong, CLOSE, FIRST])
    assert way.max_error >= 0.2
    assert not passed(way, exact_tokens=False)


def test_a_request_that_broke_off_does_not_pass() -> None:
    way = compared([FIRST, CLOSE])
    assert (way.num_different, way.max_error) == (1, math.inf)
    assert not passed(way, exact_tokens=False)
