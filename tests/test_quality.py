"""Quality of the number formats: the arithmetic of it, and the bounds that each format promises."""

from __future__ import annotations

import math

import pytest

from nanoserve.bench.quality import (
    FORMATS,
    REFERENCE,
    Quality,
    Reading,
    compare,
    cut_windows,
    main,
    measure,
    quality_table,
    read,
)
from nanoserve.kernels.cpu import library
from nanoserve.llm import LLM

needs_native = pytest.mark.skipif(
    not library.available(), reason="needs the native core, which was not built here"
)

MOST_INCREASE = {
    "bfloat16": 0.005,
    "KV bfloat16": 0.002,
    "KV float16": 0.001,
    "KV int8": 0.003,
    "int8-weight-only": 0.003,
    "int8": 0.005,
    "int8, KV int8": 0.005,
    "int4": 0.05,
    "int4, KV int8": 0.05,
}
"""Of the trained model's perplexity on held-out text, as a share."""

LEAST_AGREEMENT = {name: 0.85 if name.startswith("int4") else 0.96 for name in MOST_INCREASE}


def test_perplexity_of_a_guess_among_eight_is_eight() -> None:
    guess = Reading(logprobs=(math.log(1 / 8),) * 5, choices=(0,) * 5)
    assert guess.perplexity == pytest.approx(8.0)


def test_a_comparison_is_of_single_tokens() -> None:
    reference = Reading(logprobs=(-1.0, -2.0, -9.0, -4.0), choices=(1, 2, 3, 4))
    worse = Reading(logprobs=(-1.1, -2.1, -9.1, -4.1), choices=(1, 2, 3, 5))
    quality = compare(reference, worse)
    assert quality.num_tokens == 4
    assert quality.increase == pytest.approx(math.exp(0.1) - 1)
    assert quality.perplexity == pytest.approx(reference.perplexity * math.exp(0.1))
    assert quality.uncertainty == pytest.approx(0.0, abs=1e-9)  # every token lost the same
    assert quality.agreement == 0.75
    same = compare(reference, reference)
    assert (same.increase, same.uncertainty, same.agreement) == (0.0, 0.0, 1.0)


def test_readings_of_different_texts_are_not_compared() -> None:
    long = Reading(logprobs=(-1.0, -1.0, -1.0), choices=(1, 1, 1))
    short = Reading(logprobs=(-1.0, -1.0), choices=(1, 1))
    with pytest.raises(ValueError, match="compared, got 3 and 2 tokens"):
        compare(long, short)


def test_windows_are_spread_over_the_text() -> None:
    tokenizer = LLM("mini").tokenizer
    text = "Once upon a time there lived a king. " * 40
    ids = tokenizer.encode(text)
    windows = cut_windows(tokenizer, text, 4, 32)
    assert [len(window) for window in windows] == [32] * 4
    stride = len(ids) // 4
    assert windows == [ids[i * stride : i * stride + 32] for i in range(4)]


@pytest.mark.parametrize("num_windows, length", [(0, 8), (1, 1), (100, 8)])
def test_windows_that_cannot_be_are_refused(num_windows: int, length: int) -> None:
    with pytest.raises(ValueError, match="window"):
        cut_windows(LLM("mini").tokenizer, "Once upon a time.", num_windows, length)


def test_a_window_is_read_as_the_model_scores_it() -> None:
    llm = LLM("mini", dtype="float32")
    window = llm.tokenizer.encode("Once upon a time there was a little girl who lived in a wood")
    reading = read(llm, [window, window[:5]])
    scored = [token.logprob for token in llm.score(window) if token is not None]
    assert list(reading.logprobs) == scored + scored[:4]
    assert len(reading.choices) == len(reading.logprobs)


def test_a_bound_for_every_format() -> None:
    assert set(MOST_INCREASE) == set(FORMATS) - {REFERENCE}


@needs_native
def test_every_format_keeps_its_bound_on_the_trained_model() -> None:
    qualities = measure("mini", FORMATS, num_windows=16, length=384, executor="native")
    reference = qualities.pop(REFERENCE)
    assert (reference.increase, reference.agreement) == (0.0, 1.0)
    for name, quality in qualities.items():
        assert quality.increase < MOST_INCREASE[name], (name, quality)
        assert quality.agreement > LEAST_AGREEMENT[name], (name, quality)
        # A format that changed nothing was not used at all.
        assert quality.perplexity != reference.perplexity, (name, quality)


def test_the_table_has_a_line_for_each_format() -> None:
    quality = Quality(
        num_tokens=9, perplexity=20.0, increase=0.01, uncertainty=0.002, agreement=0.5
    )
    table = quality_table({"float32": quality, "int8": quality})
    assert table.row_count == 2


@needs_native
def test_too_many_windows_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--windows", "100000"]) == 2
    assert "--windows" in capsys.readouterr().err


def test_one_token_has_no_uncertainty_and_is_not_compared() -> None:
    one = Reading(logprobs=(-1.0,), choices=(0,))
    with pytest.raises(ValueError, match="2 tokens or more are compared, got 1 and 1"):
        compare(one, one)


def test_a_broken_models_perplexity_is_infinite_and_no_error() -> None:
    sound, broken = (Reading(logprobs=(nats, nats - 1.0), choices=(0, 1)) for nats in (-1.0, -5e3))
    quality = compare(sound, broken)
    assert quality.perplexity == quality.increase == math.inf
    assert "inf" in str(list(quality_table({"a": quality}).columns[1].cells))
