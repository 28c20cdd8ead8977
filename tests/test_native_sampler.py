"""The native sampler is the twin of `engine.sampling.sample`: equal tokens for equal draws.

Rows are drawn with everything that can go wrong in them: ties, infinities, NaN, signed zeros, ids
beyond the tokenizer, bans of everything, temperatures at either end, draws at either end. Each
instruction set that this machine has is held to the reference, and to the others bit by bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nanoserve.engine.batch import SAMPLED, RowSampling, StepResult
from nanoserve.engine.native import PreparedRow
from nanoserve.engine.sampling import sample
from nanoserve.kernels.cpu import library
from nanoserve.request import SamplingParams

ISAS = library.available()
pytestmark = pytest.mark.skipif(not ISAS, reason="needs the native core, which was not built here")

INF = math.inf
JUST_UNDER_ONE = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of logits and everything that decides its token."""

    logits: NDArray[np.float32]
    sampling: RowSampling
    draw: float
    target: int = SAMPLED
    num_token_ids: int


def reference(case: Case) -> StepResult:
    return sample(
        case.logits[np.newaxis],
        np.array([case.target], dtype=np.int32),
        (case.sampling,),
        np.array([case.draw]),
        num_token_ids=case.num_token_ids,
    )


def native(isa: str, case: Case) -> StepResult:
    """The same row through `ns_sample`."""
    row = PreparedRow(
        library.load(isa),
        case.logits,
        case.sampling,
        case.draw,
        num_token_ids=case.num_token_ids,
        target=case.target,
    )
    row.draw()
    return row.read()


def check_twin(isa: str, case: Case) -> None:
    ours, theirs = native(isa, case), reference(case)
    assert ours.finite.tolist() == theirs.finite.tolist()
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-12)
    ids, values = zip(*ours.top_logprobs[0], strict=True) if ours.top_logprobs[0] else ((), ())
    wanted = zip(*theirs.top_logprobs[0], strict=True) if theirs.top_logprobs[0] else ((), ())
    wanted_ids, wanted_values = wanted
    assert ids == wanted_ids
    np.testing.assert_allclose(values, wanted_values, rtol=0, atol=1e-12)


def some_logits(rng: np.random.Generator, vocab_size: int) -> NDArray[np.float32]:
    """Of one of many kinds, most of them unkind."""
    spread = rng.choice([0.01, 1, 5, 30])
    row = rng.normal(0, spread, vocab_size)
    kind = rng.integers(7)
    if kind == 1:
        row = np.round(row)  # ties
    elif kind == 2:
        row = np.zeros(vocab_size)
    elif kind == 3:
        row[rng.random(vocab_size) < 0.5] = -INF
    elif kind == 4:
        row[rng.integers(vocab_size)] = rng.choice([math.nan, INF, -INF])
    elif kind == 5:
        row = rng.choice([-0.0, 0.0, 1.0], vocab_size)
    return row.astype(np.float32)


def some_case(seed: int, vocab_size: int) -> Case:
    rng = np.random.default_rng([seed, vocab_size])

    def ids(most: int) -> list[int]:
        return [int(i) for i in rng.integers(0, vocab_size, rng.integers(0, most))]

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    penalises = rng.random() < 0.4
    biases = {i: pick(-100.0, 100.0, -100.0, 7.25, -3.5) for i in ids(6)}
    params = SamplingParams(
        temperature=pick(0.0, 1.0, 1.0, 0.7, 1e-3, 1e-300, 5.0, 1e30, 0.8),
        top_p=pick(1.0, 1.0, 0.9, 0.5, 0.0, 0.999, 0.1, 1 - 1e-12),
        top_k=pick(None, None, 1, 2, 5, 40, 300),
        min_p=pick(0.0, 0.0, 0.0, 0.05, 0.5, 1.0, 0.1),
        repetition_penalty=pick(1.0, 1.3, 0.5, 1e300) if penalises else 1.0,
        presence_penalty=pick(0.0, 0.5, -2.0) if penalises else 0.0,
        frequency_penalty=pick(0.0, 0.5, -0.3) if penalises else 0.0,
        logit_bias=biases if rng.random() < 0.3 else {},
    )
    sampling = RowSampling(
        params=params,
        prompt_token_ids=ids(10),
        output_token_ids=ids(30),
        num_logprobs=pick(None, None, 0, 1, 5, 64),
        masked_token_ids=tuple(ids(4)) if rng.random() < 0.3 else (),
    )
    return Case(
        logits=some_logits(rng, vocab_size),
        sampling=sampling,
        draw=pick(0.0, 0.5, JUST_UNDER_ONE, 0.25, 1e-14, *rng.random(5).tolist()),
        target=int(rng.integers(vocab_size)) if rng.random() < 0.1 else SAMPLED,
        num_token_ids=int(rng.integers(1, vocab_size + 1)) if rng.random() < 0.4 else vocab_size,
    )


SIZES = st.sampled_from([1, 2, 5, 8, 17, 100, 383, 700, 3000])


@pytest.mark.parametrize("isa", ISAS)
@given(seed=st.integers(0, 2**32), vocab_size=SIZES)
@example(seed=0, vocab_size=50257)
@example(seed=1, vocab_size=50257)
@example(seed=2, vocab_size=50257)
def test_whatever_the_row_the_token_is_the_references(isa: str, seed: int, vocab_size: int) -> None:
    for offset in range(10):  # a row is cheap, and an example of hypothesis is not
        check_twin(isa, some_case(seed + offset, vocab_size))


def row_of(**params: Any) -> RowSampling:
    return RowSampling(params=SamplingParams(**params), prompt_token_ids=(), output_token_ids=())


case_of = partial(Case, sampling=row_of(), draw=0.5)

FLAT = np.zeros(4096, dtype=np.float32)
STEPS = np.repeat(np.arange(16, dtype=np.float32), 256)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("draw", [0.0, 0.25, 0.5, 0.75, JUST_UNDER_ONE])
@pytest.mark.parametrize("logits", [FLAT, STEPS], ids=["flat", "steps"])
def test_ties_at_every_boundary_are_decided_by_the_definition(
    isa: str, top_p: float, draw: float, logits: NDArray[np.float32]
) -> None:
    """The nucleus ends among ties, and the draw falls on the edge of a token: no margin helps."""
    check_twin(
        isa,
        case_of(logits=logits, sampling=row_of(top_p=top_p), draw=draw, num_token_ids=len(logits)),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("sampled", [-3.0, 3.0])
def test_a_nucleus_is_found_where_no_sample_of_the_row_would_guess_it(
    isa: str, top_p: float, sampled: float
) -> None:
    """Every 49th logit, which is what the guess looks at, is unlike all others."""
    logits = np.random.default_rng(5).normal(0, 0.1, 50257).astype(np.float32)
    logits[24::49] += np.float32(sampled)
    for draw in (1e-9, 0.31, 0.77, JUST_UNDER_ONE):
        case = case_of(
            logits=logits, sampling=row_of(top_p=top_p), draw=draw, num_token_ids=len(logits)
        )
        check_twin(isa, case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_weight_of_exactly_min_p_is_judged_by_the_definition(
    isa: str, temperature: float
) -> None:
    logits = np.linspace(-4, 0, 3001, dtype=np.float32)
    for place in (1500, 2222, 2999):
        min_p = float(np.exp(float(logits[place]) / temperature))
        for limit in (min_p, math.nextafter(min_p, 1), math.nextafter(min_p, 0)):
            case = case_of(
                logits=logits,
                sampling=row_of(min_p=limit, temperature=temperature),
                draw=1e-9,  # the first that is kept
                num_token_ids=len(logits),
            )
            check_twin(isa, case)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}])
def test_the_best_of_a_block_is_penalised_or_another_made_the_best(
    isa: str, params: dict[str, Any]
) -> None:
    """What is known of the raw row is not what the adjusted row is like."""
    logits = np.random.default_rng(6).normal(0, 2, 3000).astype(np.float32)
    best_first = np.argsort(-logits)
    penalised = row_of(repetition_penalty=1e3, logit_bias={2500: 40.0, 7: -99.0}, **params)
    sampling = replace(penalised, output_token_ids=best_first[:40].tolist())
    plain = replace(sampling, params=SamplingParams(repetition_penalty=1e3, **params))
    for wanted in (
        sampling,
        plain,
        replace(plain, masked_token_ids=tuple(best_first[40:60].tolist())),
    ):
        check_twin(isa, case_of(logits=logits, sampling=wanted, num_token_ids=len(logits)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("top_k", [1, 5, 6, 7, 2999, 3000])
def test_the_best_k_are_found_among_ties_and_masks(isa: str, top_k: int) -> None:
    """Fewer blocks than k, and more; a cut among ties, and among ids that cannot be drawn."""
    logits = np.round(np.random.default_rng(7).normal(0, 1, 3000)).astype(np.float32)
    masked = np.where(np.arange(3000) % 500 == 3, logits, np.float32(-INF))
    for row in (logits, masked):
        for draw in (1e-9, 0.5, JUST_UNDER_ONE):
            sampling = row_of(top_k=top_k)
            check_twin(
                isa, case_of(logits=row, sampling=sampling, draw=draw, num_token_ids=len(row))
            )


@pytest.mark.parametrize("isa", ISAS)
def test_a_smallest_weight_still_counts(isa: str) -> None:
    """A weight below 2^-1022: a draw of 0 takes the first id that weighs anything at all."""
    logits = np.array([-INF, -740.0, -1.0, 0.0], dtype=np.float32)
    case = case_of(logits=logits, draw=0.0, num_token_ids=4)
    assert reference(case).token_ids.tolist() == [1]
    check_twin(isa, case)


@pytest.mark.parametrize("isa", ISAS)
def test_log_probabilities_have_the_same_bits_on_every_instruction_set(isa: str) -> None:
    sampling = RowSampling(
        params=SamplingParams(temperature=0.0),
        prompt_token_ids=(),
        output_token_ids=(),
        num_logprobs=20,
    )
    for vocab_size in (5, 64, 1001, 50257):
        logits = np.random.default_rng(vocab_size).normal(0, 4, vocab_size).astype(np.float32)
        case = Case(logits=logits, sampling=sampling, draw=0.0, num_token_ids=vocab_size)
        ours, theirs = native(isa, case), native(ISAS[-1], case)
        assert ours.logprobs.tobytes() == theirs.logprobs.tobytes()
        assert ours.top_logprobs == theirs.top_logprobs


@pytest.mark.parametrize("isa", ISAS)
def test_logits_are_not_written(isa: str) -> None:
    case = some_case(3, 700)
    before = case.logits.tobytes()
    native(isa, case)
    assert case.logits.tobytes() == before


def test_a_row_that_the_core_has_no_memory_for_is_an_error() -> None:
    core: Any = SimpleNamespace(call=SimpleNamespace(ns_sample=lambda *_: 2))
    row = PreparedRow(core, np.zeros(5, dtype=np.float32), row_of(), 0.5)
    with pytest.raises(RuntimeError, match=r"could not sample a row \(status 2\)"):
        row.draw()


@pytest.mark.parametrize(
    "logits, more, words",
    [
        (np.zeros(0, np.float32), {}, "0 logits"),
        (np.zeros((1, 5), np.float32), {}, r"must be float32 \(5,\)"),
        (np.zeros(5), {}, "got float64"),
        (np.zeros(10, np.float32)[::2], {}, "without gaps"),
        (np.zeros(5, np.float32), {"num_token_ids": 6}, "6 ids to draw"),
        (np.zeros(5, np.float32), {"num_token_ids": 0}, "0 ids to draw"),
        (np.zeros(5, np.float32), {"target": 5}, "target 5"),
    ],
    ids=str,
)
def test_a_row_that_the_core_would_read_beyond_is_refused(
    logits: NDArray[np.float32], more: dict[str, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        PreparedRow(library.load(), logits, row_of(), 0.5, **more)
