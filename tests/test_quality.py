"""Quality of the number formats: the arithmetic of it, and the bounds that each format promises."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from numpy.typing import NDArray

from nanoserve.bench.experiments.precision import Scale, open_studied, read_formats
from nanoserve.bench.findings.precision import check_bounds
from nanoserve.bench.measure import Rules
from nanoserve.bench.quality import (
    MARGINS,
    Divergence,
    Positions,
    Quality,
    Reference,
    conclude,
    cut_windows,
    first_differences,
    log_softmax,
    read_logits,
)
from nanoserve.bench.session import Options, Screen, open_engine
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
}
"""Of the trained model's perplexity on held-out text, as a share."""

LEAST_AGREEMENT = {name: 0.85 if name.startswith("int4") else 0.96 for name in MOST_INCREASE}


def random_logits(seed: int, num_rows: int = 50, vocab_size: int = 40) -> NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return rng.normal(0, 2, (num_rows, vocab_size)).astype(np.float32)


def compared(logits: NDArray[np.float32], others: NDArray[np.float32]) -> Positions:
    return Reference(logits, [3] * len(logits)).compare(others)


def test_perplexity_of_a_guess_among_forty_is_forty() -> None:
    even = np.zeros((5, 40), dtype=np.float32)
    assert conclude(compared(even, even)).perplexity == pytest.approx(40.0)


def test_a_reading_against_itself_is_identical() -> None:
    logits = random_logits(1)
    quality = conclude(compared(logits, logits))
    assert quality.is_identical
    assert (quality.increase, quality.uncertainty, quality.agreement) == (0.0, 0.0, 1.0)
    assert quality.divergence == 0.0
    assert (quality.num_disagreeing, quality.widest_disagreement) == (0, 0.0)


def test_what_all_logits_have_in_common_is_no_error() -> None:
    logits = random_logits(2)
    quality = conclude(compared(logits, logits + np.float32(7)))
    assert quality.largest_error < 1e-5
    assert quality.divergence < 1e-9


def test_divergence_and_perplexity_by_their_definitions() -> None:
    logits, others = random_logits(3), random_logits(4)
    found = compared(logits, others)
    p = np.exp(log_softmax(logits))
    q = np.exp(log_softmax(others))
    assert found.divergence == pytest.approx((p * np.log(p / q)).sum(-1))
    quality = conclude(found)
    lost = np.log(p[:, 3] / q[:, 3])
    assert quality.increase == pytest.approx(math.exp(lost.mean()) - 1)
    assert quality.uncertainty == pytest.approx(
        math.exp(lost.mean()) * lost.std(ddof=1) / math.sqrt(50)
    )
    assert quality.agreement == pytest.approx(np.mean(logits.argmax(-1) == others.argmax(-1)))


@pytest.mark.parametrize("noise", [0.01, 0.3, 5.0])
def test_rounding_explains_every_disagreement_that_it_makes(noise: float) -> None:
    logits = random_logits(5, num_rows=400)
    rng = np.random.default_rng(6)
    found = compared(logits, logits + rng.uniform(-noise, noise, logits.shape).astype(np.float32))
    quality = conclude(found)
    assert quality.num_disagreeing > 0
    assert quality.num_unexplained == 0
    assert quality.widest_disagreement <= 2 * noise + 1e-6


def test_a_disagreement_beyond_twice_the_error_is_counted() -> None:
    found = compared(random_logits(7, num_rows=4), random_logits(7, num_rows=4))
    broken = Positions(
        reference_logprob=found.reference_logprob,
        logprob=found.logprob,
        margin=np.array([0.5, 0.5, 0.5, 0.1]),
        error=np.array([0.2, 0.3, 0.2, 0.2]),
        divergence=found.divergence,
        agrees=np.array([False, False, True, False]),
    )
    quality = conclude(broken)
    assert (quality.num_disagreeing, quality.num_unexplained) == (3, 1)
    assert quality.widest_disagreement == 0.5


def test_bins_hold_every_position_once() -> None:
    found = compared(random_logits(8), random_logits(9))
    bins = conclude(found).bins
    assert [part.low for part in bins] == list(MARGINS)
    assert sum(part.num_positions for part in bins) == 50
    assert sum(part.num_agreeing for part in bins) == int(found.agrees.sum())
    wide = (found.margin >= 0.3) & (found.margin < 1.0)
    assert next(part for part in bins if part.low == 0.3).num_positions == int(wide.sum())


def test_one_position_has_no_uncertainty_and_is_not_compared() -> None:
    one = random_logits(1, num_rows=1)
    with pytest.raises(ValueError, match="2 positions or more are compared, got 1"):
        conclude(compared(one, one))


def test_a_broken_models_perplexity_is_infinite_and_no_error() -> None:
    broken = random_logits(1)
    broken[:, 3] -= 5e3
    quality = conclude(compared(random_logits(1), broken))
    assert quality.perplexity == quality.increase == math.inf


def test_a_quality_is_recorded_and_read_back() -> None:
    quality = conclude(compared(random_logits(1), random_logits(2)))
    assert Quality.from_json(json.loads(json.dumps(quality.to_json()))) == quality


@pytest.mark.parametrize(
    "name, increase, agreeing, unexplained, expected",
    [
        ("int8", 0.004, 900, 0, [True]),
        ("int8", 0.006, 1000, 0, [False]),
        ("int4", 0.049, 900, 0, [True]),
        ("int4", 0.051, 900, 0, [False]),
        ("KV int8", 0.5, 995, 0, [True, True]),
        ("KV int8", 0.0, 994, 0, [False, True]),
        ("KV int8", 0.0, 999, 1, [True, False]),
        ("bfloat16", 9.0, 0, 9, []),
    ],
)
def test_promises_are_checked(
    name: str, increase: float, agreeing: int, unexplained: int, expected: list[bool]
) -> None:
    quality = Quality(
        num_positions=1000,
        perplexity=20.0,
        increase=increase,
        uncertainty=0.001,
        num_disagreeing=1000 - agreeing,
        num_unexplained=unexplained,
        widest_disagreement=0.1,
        divergence=0.001,
        median_error=0.1,
        largest_error=0.2,
        bins=(),
    )
    assert [bound.holds for bound in check_bounds(name, quality)] == expected


def test_texts_part_at_their_first_difference() -> None:
    found = first_differences([[1, 2, 3], [1, 9, 3], [1, 2, 3]], [[1, 2, 3]] * 3)
    assert found == Divergence(num_tokens=3, first=(None, 1, None))
    assert (found.num_equal, found.median_equal) == (2, 3)


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


def test_a_window_is_read_as_the_model_scores_it_whatever_the_steps() -> None:
    llm = LLM("mini", dtype="float32")
    window = llm.tokenizer.encode("Once upon a time there was a little girl who lived in a wood")
    engine = open_engine(
        Options(model="mini", dtype="float32"), "auto", layout="contiguous", max_num_seqs=1
    )
    logits = read_logits(engine, window)
    logprobs = log_softmax(logits)[range(len(window) - 1), window[1:]]
    scored = [token.logprob for token in llm.score(window) if token is not None]
    assert logprobs == pytest.approx(scored, abs=1e-5)
    assert read_logits(engine, window, step_tokens=4) == pytest.approx(logits, abs=1e-4)


@needs_native
def test_every_format_keeps_its_bound_on_the_trained_model() -> None:
    scale = Scale(
        quality_formats=tuple(MOST_INCREASE),
        num_windows=8,
        length=256,
        num_texts=1,
        num_written=1,
        formats=(),
        batches=(),
        context=1,
        rules=Rules(),
    )
    studied = open_studied(Options(executor="native"), scale)
    qualities = read_formats(studied, Screen(quiet=True))
    for engine in studied.engines.values():
        engine.executor.close()
    assert not studied.gaps.keys() & MOST_INCREASE.keys()
    assert qualities["float32, another batch"].is_identical
    for name, most in MOST_INCREASE.items():
        quality = qualities[name]
        assert quality.increase < most, (name, quality)
        assert quality.agreement > LEAST_AGREEMENT[name], (name, quality)
        assert quality.num_unexplained == 0, (name, quality)
        # A format that changed nothing was not used at all.
        assert not quality.is_identical, name
