"""The sampler against a slow twin that follows its definition literally, and against statistics."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from nanoserve.engine.batch import SAMPLED, RowSampling, StepResult
from nanoserve.engine.sampling import DrawStream, check_token_ids, sample, uniforms
from nanoserve.request import SamplingParams

JUST_UNDER_ONE = 1.0 - 2.0**-53
INF = math.inf


def row_of(
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    num_logprobs: int | None = None,
    masked: Sequence[int] = (),
    **params: Any,
) -> RowSampling:
    return RowSampling(
        params=SamplingParams(**params),
        prompt_token_ids=prompt,
        output_token_ids=output,
        num_logprobs=num_logprobs,
        masked_token_ids=masked,
    )


def sample_rows(
    logits: Any,
    rows: Sequence[RowSampling],
    draws: Sequence[float] | NDArray[np.float64] | None = None,
    *,
    targets: Sequence[int] | None = None,
    num_token_ids: int | None = None,
) -> StepResult:
    """`sample`, with every row sampled at 0.5 unless said otherwise."""
    return sample(
        np.asarray(logits, dtype=np.float32),
        np.array([SAMPLED] * len(rows) if targets is None else targets, dtype=np.int32),
        tuple(rows),
        np.array([0.5] * len(rows) if draws is None else draws, dtype=np.float64),
        num_token_ids=num_token_ids,
    )


def token_of(
    logits: Sequence[float], draw: float = 0.5, num_token_ids: int | None = None, **row: Any
) -> int:
    """The token of a single finite row."""
    result = sample_rows([logits], [row_of(**row)], [draw], num_token_ids=num_token_ids)
    assert result.finite.tolist() == [True]
    return int(result.token_ids[0])


def drawable(logits: Sequence[float], num_token_ids: int | None = None, **row: Any) -> set[int]:
    """Every token that some draw gives: a fine comb, so for small vocabularies only."""
    draws = [*np.linspace(0, 1, 400, endpoint=False), JUST_UNDER_ONE]
    rows = [row_of(**row)] * len(draws)
    result = sample_rows([logits] * len(draws), rows, draws, num_token_ids=num_token_ids)
    return set(result.token_ids.tolist())


# --- The slow twin: one row, lists and full sorts, the numbered steps of `sample` in order --------


def adjusted_slow(logits: Sequence[float], row: RowSampling, num_ids: int) -> list[float]:
    """Steps 3 to 5. The logits are float32 numbers held as Python floats."""
    params = row.params
    values = list(logits[:num_ids])
    for token_id, bias in params.logit_bias.items():
        if token_id < num_ids:
            values[token_id] += bias
    for token_id in {*row.prompt_token_ids, *row.output_token_ids}:
        penalty = params.repetition_penalty
        if token_id < num_ids and values[token_id] > 0:
            values[token_id] /= penalty
        elif token_id < num_ids:
            values[token_id] *= penalty
    for token_id, count in Counter(row.output_token_ids).items():
        if token_id < num_ids:
            values[token_id] -= params.frequency_penalty * count
            values[token_id] -= params.presence_penalty
    bans = [i for i, bias in params.logit_bias.items() if bias == -100]
    forced = [i for i, bias in params.logit_bias.items() if bias == 100]
    unforced = [i for i in range(num_ids) if i not in forced] if forced else []
    for mask in (row.masked_token_ids, bans, unforced):
        narrowed = [-INF if i in mask else value for i, value in enumerate(values)]
        if max(narrowed) > -INF:
            values = narrowed
    return values


def exp_slow(values: Sequence[float]) -> list[float]:
    """numpy's exp, whose last bit may differ from math.exp's."""
    return [float(x) for x in np.exp(np.array(values, dtype=np.float64))]


def sample_row_slow(
    logits: Sequence[float], row: RowSampling, draw: float, num_ids: int
) -> int | None:
    """The token by the definition, None for a row that is not finite."""
    if any(math.isnan(x) or x == INF for x in logits) or max(logits[:num_ids]) == -INF:
        return None
    params = row.params
    values = adjusted_slow(logits, row, num_ids)
    ranking = sorted(range(num_ids), key=lambda i: (-values[i], i))
    if params.temperature == 0:
        return ranking[0]
    peak = max(values)
    weights = exp_slow([(value - peak) / params.temperature for value in values])
    kept = ranking[: params.top_k]
    if params.top_p < 1:
        wanted = params.top_p * list(itertools.accumulate(weights[i] for i in sorted(kept)))[-1]
        prefix: list[int] = []
        running = 0.0
        for token_id in kept:
            if prefix and running >= wanted:
                break
            prefix.append(token_id)
            running += weights[token_id]
        kept = prefix
    kept = sorted(i for i in kept if params.min_p == 0 or weights[i] >= params.min_p)
    cumulative = list(itertools.accumulate(weights[i] for i in kept))
    return next(i for i, run in zip(kept, cumulative, strict=True) if run > draw * cumulative[-1])


def logprobs_slow(logits: Sequence[float]) -> list[float]:
    peak = max(logits)
    log_sum = math.log(math.fsum(math.exp(x - peak) for x in logits))
    return [(x - peak) - log_sum for x in logits]


# Few distinct values, so that most rows hold ties, and the extremes of float32 among them.
COMMON_LOGITS = st.sampled_from([-3.0, -1.5, -1.0, 0.0, 0.25, 1.0, 1.0, 2.0, 8.0])
RARE_LOGITS = st.sampled_from([-INF, -3.4e38, 3.4e38, 1e-45, -0.0, -1e4, 1e4])
ANY_LOGITS = st.floats(-30, 30, width=32)
DRAWS = st.one_of(
    st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, JUST_UNDER_ONE]),
    st.integers(0, 2**53 - 1).map(lambda i: i * 2.0**-53),
)


@st.composite
def sampler_rows(draw: st.DrawFn) -> tuple[list[float], RowSampling, float, int]:
    """Logits of one row, what is asked of it, its draw, and how many ids the tokenizer has."""
    size = draw(st.integers(1, 12))
    num_ids = draw(st.integers(1, size))
    one = draw(st.sampled_from([COMMON_LOGITS, ANY_LOGITS, COMMON_LOGITS | RARE_LOGITS]))
    logits = draw(st.lists(one, min_size=size, max_size=size))
    ids = st.lists(st.integers(0, size - 1), max_size=2 * size)
    biases = st.sampled_from([-100.0, 100.0, -100, 100, 0.0, 1.5, -2.0, 99.5, -99.5])
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 5e-324, 1e-9, 1e-4, 0.5, 1.0, 2.0, 100.0, 1e300])),
        top_k=draw(st.sampled_from([None, 1, 2, 3, 5, 10**6])),
        top_p=draw(st.sampled_from([0.0, 1e-300, 0.1, 0.3, 0.5, 0.75, 0.9, JUST_UNDER_ONE, 1.0])),
        min_p=draw(st.sampled_from([0.0, 1e-300, 0.05, 0.5, JUST_UNDER_ONE, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1e-6, 1.3, 1e150])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, 2.0, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -1.0])),
        logit_bias=draw(
            st.just({}) | st.dictionaries(st.integers(0, size - 1), biases, max_size=size)
        ),
    )
    row = RowSampling(
        params=params,
        prompt_token_ids=tuple(draw(ids)),
        output_token_ids=draw(ids),
        masked_token_ids=draw(st.just([]) | ids),
    )
    return [float(np.float32(x)) for x in logits], row, draw(DRAWS), num_ids


@settings(max_examples=500, deadline=None, derandomize=True)
@given(sampler_rows())
@example(([0.0, 0.0], row_of(), JUST_UNDER_ONE, 2))
@example(([0.0, 0.0, 5.0], row_of(top_p=0.0), 0.9, 2))
@example(([-INF, 0.0], row_of(logit_bias={0: 100}), 0.0, 2))
def test_every_parameter_agrees_with_the_slow_twin(
    case: tuple[list[float], RowSampling, float, int],
) -> None:
    logits, row, draw, num_ids = case
    wanted = sample_row_slow(logits, row, draw, num_ids)
    result = sample_rows([logits], [row], [draw], num_token_ids=num_ids)
    assert result.finite.tolist() == [wanted is not None]
    assert result.token_ids.tolist() == [wanted or 0]


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 5.0])
@pytest.mark.parametrize("levels", [3, 40, None])
def test_large_vocabularies_agree_with_the_slow_twin(spread: float, levels: int | None) -> None:
    """Nuclei that outgrow the first ranking, and ties across every border."""
    stream = np.random.default_rng(7)
    raw = stream.standard_normal(3000)
    if levels is not None:
        raw = np.round(raw * levels) / levels
    logits = (raw * spread).astype(np.float32)
    rows = [
        row_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for temperature in (0.7, 1.0)
        for top_k in (None, 50, 700)
        for top_p in (0.2, 0.95, 0.999999, 1.0)
        for min_p in (0.0, 0.02)
    ]
    draws = stream.random(len(rows))
    result = sample_rows([logits] * len(rows), rows, draws)
    plain = [float(x) for x in logits]
    wanted = [sample_row_slow(plain, r, u, 3000) for r, u in zip(rows, draws, strict=True)]
    assert result.token_ids.tolist() == wanted


def test_sums_of_weights_are_taken_one_by_one() -> None:
    """A total summed in another order differs in its last bits, and top-p can turn on them."""
    logits = np.sort(np.random.default_rng(1).standard_normal(1000).astype(np.float32))[::-1]
    plain = [float(x) for x in logits]
    running = list(itertools.accumulate(exp_slow([x - plain[0] for x in plain])))
    assert running[-1] != np.exp(logits.astype(np.float64) - plain[0]).sum()
    # Descending logits: the highest kept id, which this draw gives, tells the size of the nucleus.
    rows = [row_of(top_p=running[size] / running[-1]) for size in range(0, 1000, 20)]
    result = sample_rows([logits] * len(rows), rows, [JUST_UNDER_ONE] * len(rows))
    wanted = [sample_row_slow(plain, row, JUST_UNDER_ONE, 1000) for row in rows]
    assert result.token_ids.tolist() == wanted


# --- Draws ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**63 - 1, -1, -(2**63)])
@pytest.mark.parametrize("choice", [0, 1, 127])
def test_draws_are_numpys_philox_from_any_start(seed: int, choice: int) -> None:
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    wanted = np.random.Generator(np.random.Philox(key=key)).random(600)
    for start, count in [(0, 600), (0, 0), (0, 1), (1, 1), (3, 2), (4, 4), (255, 3), (513, 87)]:
        got = uniforms(seed, choice, start, count)
        assert got.dtype == np.float64
        assert got.tolist() == wanted[start : start + count].tolist()
    one_at_a_time = np.random.Generator(np.random.Philox(key=key))
    assert [one_at_a_time.random() for _ in range(9)] == wanted[:9].tolist()


def test_a_draw_is_the_top_53_bits_of_a_philox_word() -> None:
    """What a twin without numpy must compute; words as Random123 defines them (Salmon et al.)."""
    words = np.random.Philox(key=np.array([2**64 - 5, 3], dtype=np.uint64)).random_raw(50)
    assert uniforms(-5, 3, 0, 50).tolist() == [(int(w) >> 11) * 2.0**-53 for w in words]


def test_seeds_and_choices_have_streams_of_their_own() -> None:
    pairs = [(seed, choice) for seed in (-2, -1, 0, 1, 2) for choice in range(4)]
    assert len({tuple(uniforms(seed, choice, 0, 3)) for seed, choice in pairs}) == len(pairs)


def test_a_stream_is_exact_in_any_order() -> None:
    wanted = uniforms(-9, 2, 0, 1100)
    stream = DrawStream(-9, 2)
    assert [stream.at(i) for i in range(1100)] == wanted.tolist()
    for index in [0, 1099, 255, 256, 257, 3, 512, 511, 0]:  # back, as after a preemption
        assert stream.at(index) == wanted[index]
        assert DrawStream(-9, 2).at(index) == wanted[index]


def test_a_stream_asks_numpy_once_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(seed: int, choice: int, start: int, count: int) -> NDArray[np.float64]:
        calls.append(start)
        return uniforms(seed, choice, start, count)

    monkeypatch.setattr("nanoserve.engine.sampling.uniforms", counted)
    stream = DrawStream(1, 0)
    for index in range(1024):
        stream.at(index)
    assert len(calls) <= 1 + 4


@pytest.mark.parametrize(
    "seed, choice, start, count",
    [(2**63, 0, 0, 1), (-(2**63) - 1, 0, 0, 1), (0, -1, 0, 1), (0, 0, -1, 1), (0, 0, 0, -1)],
)
def test_draws_refuse_what_is_no_int64_or_no_index(
    seed: int, choice: int, start: int, count: int
) -> None:
    with pytest.raises(AssertionError):
        uniforms(seed, choice, start, count)


# --- Statistics -----------------------------------------------------------------------------------

# 99.9 % points of chi-square by degrees of freedom.
CHI_SQUARE_999 = {3: 16.27, 7: 24.32}


@pytest.mark.parametrize("seed", [0, -17])
@pytest.mark.parametrize(
    "params, kept",
    [
        ({}, range(8)),
        ({"temperature": 1.7}, range(8)),
        ({"top_k": 4}, [1, 3, 5, 7]),
        ({"temperature": 0.6, "top_p": 0.9}, [1, 3, 5, 7]),
        ({"min_p": 0.15}, [1, 3, 5, 7]),
    ],
)
def test_frequencies_are_the_softmax(
    seed: int, params: dict[str, Any], kept: Sequence[int]
) -> None:
    logits = np.array([-1.0, 2.0, -0.5, 1.5, -0.75, 1.25, -1.25, 1.0], dtype=np.float32)
    draws = uniforms(seed, 0, 0, 8000)
    result = sample_rows(np.tile(logits, (8000, 1)), [row_of(**params)] * 8000, draws)
    counts = np.bincount(result.token_ids, minlength=8)
    kept = list(kept)
    assert counts.sum() == counts[kept].sum() == 8000
    weights = np.exp(logits[kept].astype(np.float64) / params.get("temperature", 1.0))
    expected = 8000 * weights / weights.sum()
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert statistic < CHI_SQUARE_999[len(kept) - 1]


# --- Rows do not see one another ------------------------------------------------------------------


def mixed_batch() -> tuple[NDArray[np.float32], list[RowSampling], list[float], list[int]]:
    """Rows of every kind: greedy, sampled, filtered, penalised, biased, masked, scored, not finite.

    Their vocabulary is wide enough for numpy's vector loops and leaves a ragged end.
    """
    stream = np.random.default_rng(3)
    rows = [
        row_of(temperature=0.0),
        row_of(num_logprobs=3),
        row_of(temperature=0.0, num_logprobs=1),
        row_of(temperature=0.8, top_k=20, num_logprobs=0),
        row_of(top_p=0.9),
        row_of(min_p=0.1, temperature=1.5),
        row_of(repetition_penalty=1.4, prompt=[1, 2, 3], output=[4, 4, 5]),
        row_of(presence_penalty=1.0, frequency_penalty=0.5, output=[7] * 5),
        row_of(logit_bias={7: 100, 9: 100}),
        row_of(temperature=0.0, masked=[0, 1, 2]),
        row_of(num_logprobs=2),
        row_of(temperature=0.0),
        row_of(num_logprobs=5),
    ]
    logits = stream.standard_normal((len(rows), 1003)).astype(np.float32) * 4
    logits[11, 500] = np.nan
    targets = [SAMPLED] * len(rows)
    targets[10] = 1002
    targets[12] = 0
    return logits, rows, stream.random(len(rows)).tolist(), targets


def facts(result: StepResult, row: int) -> tuple[object, ...]:
    """One row's answer, comparable bit for bit (NaN included)."""
    return (
        int(result.token_ids[row]),
        result.logprobs[row].tobytes(),
        result.top_logprobs[row],
        bool(result.finite[row]),
    )


def test_mates_and_order_change_no_bit() -> None:
    logits, rows, draws, targets = mixed_batch()
    whole = sample_rows(logits, rows, draws, targets=targets, num_token_ids=1000)
    alone = [
        sample_rows(logits[[i]], [rows[i]], [draws[i]], targets=[targets[i]], num_token_ids=1000)
        for i in range(len(rows))
    ]
    assert [facts(whole, i) for i in range(len(rows))] == [facts(one, 0) for one in alone]
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(len(rows)).tolist()
        shuffled = sample_rows(
            logits[order],
            [rows[i] for i in order],
            [draws[i] for i in order],
            targets=[targets[i] for i in order],
            num_token_ids=1000,
        )
        assert [facts(shuffled, k) for k in range(len(rows))] == [facts(whole, i) for i in order]


def test_the_result_has_the_seams_types_and_logits_stay_as_they_were() -> None:
    logits, rows, draws, targets = mixed_batch()
    before = logits.copy()
    result = sample_rows(logits, rows, draws, targets=targets, num_token_ids=1000)
    np.testing.assert_array_equal(logits, before)
    assert result.token_ids.dtype == np.int32
    assert result.logprobs.dtype == np.float64
    assert result.finite.dtype == np.bool_
    assert len(result.top_logprobs) == len(rows)
    assert all(
        type(i) is int and type(value) is float for top in result.top_logprobs for i, value in top
    )


def test_a_step_without_logit_rows_gives_an_empty_result() -> None:
    result = sample_rows(np.zeros((0, 50)), [])
    assert result.token_ids.shape == result.logprobs.shape == result.finite.shape == (0,)
    assert result.top_logprobs == ()


def test_scored_rows_give_their_target_and_draw_nothing() -> None:
    logits, rows, draws, targets = mixed_batch()
    draws[10] = draws[12] = math.nan  # nobody reads them
    result = sample_rows(logits, rows, draws, targets=targets, num_token_ids=1000)
    assert result.token_ids[[10, 12]].tolist() == [1002, 0]
    assert result.logprobs[10] == pytest.approx(logprobs_slow(logits[10].tolist())[1002], rel=1e-12)
    assert result.logprobs[12] == pytest.approx(logprobs_slow(logits[12].tolist())[0], rel=1e-12)


# --- Rows that are not finite ---------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 8, 33, 129])
@pytest.mark.parametrize("poison", [math.nan, INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_bad_logit_anywhere_condemns_its_row_alone(
    size: int, poison: float, temperature: float
) -> None:
    """At every position, since vector loops and their tails are different code."""
    clean = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    logits = np.tile(clean, (size + 2, 1))
    for row in range(size):
        logits[row + 1, row] = poison
    rows = [row_of(temperature=temperature, num_logprobs=1)] * len(logits)
    result = sample_rows(logits, rows)
    assert result.finite.tolist() == [True, *[False] * size, True]
    assert result.token_ids[1:-1].tolist() == [0] * size
    assert np.isnan(result.logprobs[1:-1]).all()
    assert set(result.top_logprobs[1:-1]) == {()}
    alone = sample_rows(logits[:1], rows[:1])
    assert facts(result, 0) == facts(result, size + 1) == facts(alone, 0)


def test_nan_is_seen_beside_infinities_and_beyond_the_tokenizer() -> None:
    bad = [
        [math.nan, INF, 0.0, 0.0],
        [INF, math.nan, -INF, 0.0],
        [-INF, -INF, -INF, math.nan],
        [0.0, 1.0, 2.0, math.nan],
        [0.0, 1.0, 2.0, INF],
        [-INF, -INF, -INF, -INF],
        [-INF, -INF, -INF, 5.0],  # only an id that the tokenizer lacks could be drawn
    ]
    for temperature in (0.0, 1.0):
        rows = [row_of(temperature=temperature)] * len(bad)
        result = sample_rows(bad, rows, num_token_ids=3)
        assert not result.finite.any()
        assert result.token_ids.tolist() == [0] * len(bad)


def test_a_scored_row_can_be_not_finite_too() -> None:
    logits = [[0.0, math.nan, 1.0], [0.0, 1.0, 2.0]]
    result = sample_rows(logits, [row_of(num_logprobs=1)] * 2, targets=[2, 2])
    assert result.finite.tolist() == [False, True]
    assert result.token_ids.tolist() == [0, 2]
    assert math.isnan(result.logprobs[0])
    assert not math.isnan(result.logprobs[1])


def test_minus_infinity_is_an_ordinary_logit_that_is_never_drawn() -> None:
    assert drawable([-INF, 1.0, -INF, 1.0]) == {1, 3}
    assert token_of([-INF, -INF, -2.0], temperature=0.0) == 2
    assert token_of([-INF, 1.0], draw=0.0, temperature=1e300) == 1


# --- Greedy, temperature and the kept set ---------------------------------------------------------


@pytest.mark.parametrize("size", [4, 67, 1024])
def test_greedy_ties_take_the_lowest_id(size: int) -> None:
    for first, second in [(0, size - 1), (1, 2), (size - 2, size - 1)]:
        logits = [0.0] * size
        logits[first] = logits[second] = 3.0
        assert token_of(logits, temperature=0.0) == first
        assert token_of(logits, temperature=0.0, presence_penalty=1.0) == first
    assert token_of([2.0, 1.0, 2.0], temperature=0.0, output=[0], presence_penalty=0.5) == 2


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9, 1e-4])
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_temperature_near_zero_is_greedy(temperature: float, scale: float) -> None:
    logits = np.random.default_rng(5).permutation(100).astype(np.float32) * np.float32(scale)
    for draw in (0.0, 0.5, JUST_UNDER_ONE):
        assert token_of(logits.tolist(), draw, temperature=temperature) == int(logits.argmax())


def test_equal_logits_share_the_draw_at_any_temperature_above_zero() -> None:
    assert drawable([1.0, 0.0, 1.0], temperature=1e-9) == {0, 2}


def test_a_huge_temperature_is_uniform() -> None:
    draws = [0.0, 0.24, 0.25, 0.74, 0.75, JUST_UNDER_ONE]
    tokens = [token_of([9.0, -9.0, 0.0, 3e38], u, temperature=1e300) for u in draws]
    assert tokens == [0, 0, 1, 2, 3, 3]


def test_float32_extremes_neither_overflow_nor_warn() -> None:
    top = float(np.finfo(np.float32).max)
    assert token_of([-top, top, 0.0], temperature=1e-9) == 1
    assert drawable([top, -top, top], temperature=1.0) == {0, 2}
    biased: dict[str, Any] = {
        "logit_bias": {0: 100.0, 1: 50.0},
        "repetition_penalty": 1e308,
        "prompt": [0, 1, 2],
    }
    assert token_of([-top, -top, -top], temperature=0.0, **biased) == 0
    assert token_of([-top, -top, -top], temperature=1.0, **biased) == 0


def test_the_draw_walks_ascending_ids_not_the_ranking() -> None:
    logits = [math.log(0.1), math.log(0.6), math.log(0.3)]
    assert [token_of(logits, u) for u in (0.0, 0.09, 0.11, 0.69, 0.71, JUST_UNDER_ONE)] == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


def test_a_draw_on_a_border_goes_to_the_next_id() -> None:
    assert [token_of([0.0] * 4, u) for u in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]


def test_top_k_keeps_the_best_ties_by_lower_id() -> None:
    logits = [1.0, 3.0, 1.0, 2.0, 1.0]
    assert drawable(logits, top_k=1) == {1}
    assert drawable(logits, top_k=2) == {1, 3}
    assert drawable(logits, top_k=3) == {0, 1, 3}
    assert drawable(logits, top_k=4) == {0, 1, 2, 3}
    for off in (None, 0, -1, 5, 6, 10**9):
        assert drawable(logits, top_k=off) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    logits = [0.0, 0.0, 0.0, 0.0]  # weights of exactly one, so borders are exact
    for top_p, kept in [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1.0, 4)]:
        assert drawable(logits, top_p=top_p) == set(range(kept))
    assert drawable([0.0, 5.0, 0.0, 5.0], top_p=0.0) == {1}
    assert drawable([0.0, 5.0, 0.0, 5.0], top_p=JUST_UNDER_ONE) == {0, 1, 2, 3}


def test_top_p_is_measured_after_temperature_and_within_top_k() -> None:
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    assert drawable(logits, top_p=0.6) == {0, 1}
    assert drawable(logits, top_p=0.6, top_k=2) == {0}  # 0.5 of 0.8
    assert drawable(logits, top_p=0.6, temperature=0.5) == {0}  # 0.25 of 0.38
    assert drawable(logits, top_p=0.8, temperature=100.0) == {0, 1, 2}


def test_min_p_is_relative_to_the_best_after_temperature() -> None:
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    assert drawable(logits, min_p=0.5) == {0, 1}
    assert drawable(logits, min_p=0.3) == {0, 1, 2}
    assert drawable(logits, min_p=0.5, temperature=0.5) == {0}
    assert drawable([2.0, 1.0, 2.0], min_p=1.0) == {0, 2}


# --- Bias, penalties, masks -----------------------------------------------------------------------


def test_logit_bias_is_added() -> None:
    assert token_of([1.0, 0.0, 0.0], temperature=0.0, logit_bias={2: 1.5}) == 2
    assert token_of([1.0, 0.0, 0.0], temperature=0.0, logit_bias={0: -1.5}) == 1
    even = [token_of([0.0, math.log(3)], u, logit_bias={0: math.log(3)}) for u in (0.49, 0.51)]
    assert even == [0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1e-9, 1.0, 2.0, 100.0, 1e300])
def test_bias_100_is_the_only_choice_and_minus_100_a_ban(temperature: float) -> None:
    logits = [200.0, 0.0, -200.0, 150.0]
    assert drawable(logits, temperature=temperature, logit_bias={2: 100}) == {2}
    banned = drawable(logits, temperature=temperature, logit_bias={0: -100, 3: -100.0})
    assert banned <= {1, 2}
    assert drawable(logits, temperature=temperature, logit_bias={0: -100, 1: 100}) == {1}


def test_several_forced_ids_share_by_their_logits() -> None:
    bias = {0: 100, 2: 100}
    assert drawable([0.0, 9.0, 0.5, 9.0], logit_bias=bias) == {0, 2}
    assert token_of([0.0, 9.0, 0.5, 9.0], temperature=0.0, logit_bias=bias) == 2
    assert drawable([0.0, 9.0, 0.5, 9.0], logit_bias=bias, top_k=1) == {2}


def test_a_mask_of_everything_is_void() -> None:
    all_banned = {0: -100, 1: -100, 2: -100}
    assert drawable([0.0, 0.5, 0.0], logit_bias=all_banned) == {0, 1, 2}
    assert token_of([0.0, 0.5, 0.0], temperature=0.0, logit_bias=all_banned) == 1
    assert drawable([0.0, 0.5, 0.0], masked=[0, 1, 2]) == {0, 1, 2}
    assert drawable([0.0, -INF, 0.0], masked=[0, 2]) == {0, 2}
    assert drawable([0.0, -INF, 0.0], logit_bias={1: 100}) == {0, 2}


def test_the_stronger_mask_wins() -> None:
    """Tokenizer, then min_tokens, then bans, then forcing; a void one still adds its number."""
    assert drawable([0.0, 0.0, 0.0], masked=[1], logit_bias={1: 100}) == {0, 2}
    assert drawable([0.0, 0.0, 0.0], masked=[1], logit_bias={0: -100, 2: -100}) == {0, 2}
    assert drawable([0.0, 0.0, 9.0], num_token_ids=2, masked=[0, 1]) == {0, 1}
    assert drawable([0.0, 0.0, 9.0], num_token_ids=2, logit_bias={2: 100}) == {0, 1}
    assert drawable([0.0, 0.0, 9.0], num_token_ids=2, logit_bias={0: -100, 1: -100}) == {0, 1}
    assert token_of([0.0, 1.0, 0.0], temperature=0.0, logit_bias={0: -50, 1: -100, 2: -100}) == 0


def test_min_tokens_masks_are_never_drawn() -> None:
    logits = [0.0, 50.0, 0.0, 60.0]
    for temperature in (0.0, 1.0, 100.0):
        assert drawable(logits, temperature=temperature, masked=[1, 3, 3]) <= {0, 2}
        assert drawable(logits, temperature=temperature, masked=[3]) <= {0, 1, 2}


def test_ids_beyond_the_tokenizer_are_masked_in_the_sampler_only() -> None:
    logits = [0.0, 1.0, 2.0, 9.0, 9.0]
    assert token_of(logits, temperature=0.0, num_token_ids=3) == 2
    assert drawable(logits, num_token_ids=3) == {0, 1, 2}
    assert drawable(logits, num_token_ids=3, top_k=2) == {1, 2}
    assert drawable(logits, num_token_ids=1) == {0}
    result = sample_rows([logits], [row_of(num_logprobs=2)], num_token_ids=3)
    wanted = logprobs_slow(logits)
    assert [i for i, _ in result.top_logprobs[0]] == [3, 4]
    assert result.top_logprobs[0][0][1] == pytest.approx(wanted[3], rel=1e-12)
    assert result.logprobs[0] == pytest.approx(wanted[result.token_ids[0]], rel=1e-12)


def test_repetition_penalty_counts_the_prompt_once_and_divides_or_multiplies() -> None:
    penalty: dict[str, Any] = {"temperature": 0.0, "repetition_penalty": 2.0}
    assert token_of([3.0, 2.0], prompt=[0], **penalty) == 1
    assert token_of([3.0, 2.0], output=[0], **penalty) == 1
    assert token_of([3.0, 1.4], prompt=[0, 0], output=[0, 0], **penalty) == 0  # 1.5, not 3 / 16
    assert token_of([-1.0, -1.5], prompt=[0], **penalty) == 1
    assert token_of([-1.0, -2.5], prompt=[0, 0], **penalty) == 0
    assert token_of([2.0, 3.0], prompt=[0], temperature=0.0, repetition_penalty=0.5) == 0


def test_presence_and_frequency_penalties_look_at_the_output_only() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert token_of([1.0, 0.5], prompt=[0, 0, 0], presence_penalty=2.0, **greedy) == 0
    assert token_of([1.0, 0.5], prompt=[0, 0, 0], frequency_penalty=2.0, **greedy) == 0
    assert token_of([1.0, 0.5], output=[0], presence_penalty=0.6, **greedy) == 1
    assert token_of([1.0, 0.5], output=[0, 0, 0], presence_penalty=0.4, **greedy) == 0
    assert token_of([1.0, 0.5], output=[0], frequency_penalty=0.4, **greedy) == 0
    assert token_of([1.0, 0.5], output=[0, 0], frequency_penalty=0.4, **greedy) == 1
    assert token_of([1.0, 1.5], output=[0, 0], frequency_penalty=-0.4, **greedy) == 0


def test_bias_comes_before_the_penalties_and_repetition_before_the_others() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    # (1 + 2) / 2 = 1.5, and not 1 / 2 + 2 = 2.5
    assert (
        token_of([1.0, 2.0], prompt=[0], repetition_penalty=2.0, logit_bias={0: 2}, **greedy) == 1
    )
    # 4 / 2 - 1 = 1, and not (4 - 1) / 2 = 1.5
    both: dict[str, Any] = {"repetition_penalty": 2.0, "presence_penalty": 1.0, "output": [0]}
    assert token_of([4.0, 1.25], **both, **greedy) == 1


def test_penalties_ignore_ids_beyond_the_tokenizer() -> None:
    row: dict[str, Any] = {
        "prompt": [2],
        "output": [2, 2],
        "repetition_penalty": 2.0,
        "frequency_penalty": 1.0,
    }
    assert token_of([1.0, 0.0, 5.0], num_token_ids=2, temperature=0.0, **row) == 0


# --- Log-probabilities ----------------------------------------------------------------------------


def test_logprobs_are_the_raw_models_whatever_the_sampling() -> None:
    logits = np.random.default_rng(2).standard_normal(77).astype(np.float32) * 5
    wanted = logprobs_slow(logits.tolist())
    best = sorted(range(77), key=lambda i: (-logits[i], i))
    rows = [
        row_of(num_logprobs=4),
        row_of(num_logprobs=4, temperature=0.0),
        row_of(num_logprobs=4, temperature=0.3, top_k=2, top_p=0.5),
        row_of(num_logprobs=4, logit_bias={best[-1]: 100}),
        row_of(num_logprobs=4, repetition_penalty=5.0, prompt=best[:9]),
        row_of(num_logprobs=4, masked=best[:3]),
    ]
    result = sample_rows([logits] * len(rows), rows)
    assert int(result.token_ids[3]) == best[-1]
    assert len(set(result.top_logprobs)) == 1
    assert [i for i, _ in result.top_logprobs[0]] == best[:4]
    for (_, got), i in zip(result.top_logprobs[0], best, strict=False):
        assert got == pytest.approx(wanted[i], rel=1e-12)
    for token_id, got in zip(result.token_ids, result.logprobs, strict=True):
        assert got == pytest.approx(wanted[token_id], rel=1e-12)


def test_the_chosen_tokens_logprob_is_its_entry_in_the_top_bit_for_bit() -> None:
    stream = np.random.default_rng(11)
    logits = (stream.standard_normal((60, 501)) * 6).astype(np.float32)
    greedy = sample_rows(logits, [row_of(temperature=0.0, num_logprobs=1)] * 60)
    for row in range(60):
        assert greedy.top_logprobs[row] == ((greedy.token_ids[row], greedy.logprobs[row]),)
    drawn = sample_rows(logits, [row_of(num_logprobs=64)] * 60, stream.random(60))
    found = [
        dict(top).get(int(t)) for top, t in zip(drawn.top_logprobs, drawn.token_ids, strict=True)
    ]
    assert sum(value is not None for value in found) > 30
    pairs = zip(found, drawn.logprobs, strict=True)
    assert all(value is None or value == logprob for value, logprob in pairs)


def test_scoring_gives_the_same_bits_as_drawing() -> None:
    logits = np.random.default_rng(4).standard_normal((1, 300)).astype(np.float32)
    drawn = sample_rows(logits, [row_of(num_logprobs=5)])
    scored = sample_rows(logits, [row_of(num_logprobs=5)], targets=[int(drawn.token_ids[0])])
    assert facts(drawn, 0) == facts(scored, 0)


def test_top_ties_go_to_the_lower_id_and_no_more_than_the_vocabulary() -> None:
    logits = [[1.0, 2.0, 2.0, 1.0, 2.0]]
    tops = [
        [i for i, _ in sample_rows(logits, [row_of(num_logprobs=k)]).top_logprobs[0]]
        for k in (0, 1, 2, 4, 5, 64)
    ]
    assert tops == [[], [1], [1, 2], [1, 2, 4, 0], [1, 2, 4, 0, 3], [1, 2, 4, 0, 3]]


def test_no_logprobs_unless_asked_and_zero_asks_for_the_tokens_own() -> None:
    logits = [[0.0, 1.0], [0.0, 1.0]]
    result = sample_rows(logits, [row_of(), row_of(num_logprobs=0)])
    assert math.isnan(result.logprobs[0])
    assert result.logprobs[1] < 0
    assert result.top_logprobs == ((), ())


def test_minus_infinity_has_log_probability_minus_infinity() -> None:
    result = sample_rows([[0.0, -INF]], [row_of(num_logprobs=2)], targets=[1])
    assert result.logprobs[0] == -INF
    assert result.top_logprobs == (((0, 0.0), (1, -INF)),)


# --- Refusals -------------------------------------------------------------------------------------


def test_check_token_ids_names_what_is_no_id_of_the_vocabulary() -> None:
    check_token_ids(SamplingParams(logit_bias={0: 1, 9: -1}, stop_token_ids=(0, 9)), 10)
    check_token_ids(SamplingParams(), 1)
    with pytest.raises(ValueError, match=r"logit_bias key .* between 0 and 9, got 10"):
        check_token_ids(SamplingParams(logit_bias={3: 1, 10: 1}), 10)
    with pytest.raises(ValueError, match=r"stop_token_ids .* between 0 and 9, got 50256"):
        check_token_ids(SamplingParams(stop_token_ids=(3, 50256)), 10)
    with pytest.raises(ValueError, match=r"stop_token_ids .* at least 0, got -1"):
        check_token_ids(SamplingParams(stop_token_ids=(-1,)), 10)


@pytest.mark.parametrize(
    "row, draw, target, num_token_ids",
    [
        (row_of(logit_bias={4: 1}), 0.5, SAMPLED, None),
        (row_of(masked=[4]), 0.5, SAMPLED, None),
        (row_of(masked=[-1]), 0.5, SAMPLED, None),
        (row_of(), 1.0, SAMPLED, None),
        (row_of(), math.nan, SAMPLED, None),
        (row_of(), 0.5, 4, None),
        (row_of(), 0.5, -2, None),
        (row_of(), 0.5, SAMPLED, 0),
        (row_of(), 0.5, SAMPLED, 5),
    ],
)
def test_a_broken_batch_trips_an_assertion(
    row: RowSampling, draw: float, target: int, num_token_ids: int | None
) -> None:
    with pytest.raises(AssertionError):
        sample_rows([[0.0] * 4], [row], [draw], targets=[target], num_token_ids=num_token_ids)
