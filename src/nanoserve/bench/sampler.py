"""Rows of logits through the native sampler alone, in every way of sampling that users have.

The rows are made up: seeded normal values with a standard deviation of 3. That is about a model's
spread, without its few high peaks, so a nucleus is large and the sampler is spared nothing. A
repetition takes 32 different rows in turn, each timed on its own, so that no branch predictor
learns a row; all are drawn once before, as a step has just written the logits that it samples.
Only vector instruction sets are timed: the portable object is there to prove bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoserve.bench.measure import Arm, Stopwatch
from nanoserve.engine.batch import SAMPLED, RowSampling, StepResult
from nanoserve.engine.native import PreparedRow
from nanoserve.engine.sampling import sample
from nanoserve.kernels.cpu import library
from nanoserve.request import SamplingParams, TokenLogprob

NUM_ROWS = 32
SPREAD = 3.0
"""Standard deviation of a row's logits."""

HISTORY = 200
"""Tokens that a penalty looks at, half of them of the prompt."""

NUM_BIASES = 20
LARGEST_BIAS = 5.0
NUM_LOGPROBS = 5

ROWS = "rows"
"""The part of a repetition that is all its rows."""

_SEED = 0


def row_part(number: int) -> str:
    """The part of a repetition that is one row; a name like that of one request among many."""
    return f"row {number}"


def make_rows(vocab_size: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Logits [NUM_ROWS, V], and the uniform that each row draws with [NUM_ROWS]."""
    rng = np.random.default_rng(_SEED)
    logits = rng.normal(0.0, SPREAD, (NUM_ROWS, vocab_size)).astype(np.float32)
    return logits, rng.random(NUM_ROWS)


def sampling_modes(vocab_size: int) -> Mapping[str, RowSampling]:
    """Each way of sampling by its name; all have the same history, which few of them look at."""
    rng = np.random.default_rng(_SEED)
    history = rng.integers(vocab_size, size=HISTORY).tolist()
    biased = rng.permutation(vocab_size)[:NUM_BIASES].tolist()
    biases = rng.uniform(-LARGEST_BIAS, LARGEST_BIAS, len(biased)).tolist()
    bias = dict(zip(biased, biases, strict=True))

    def mode(num_logprobs: int | None = None, **params: Any) -> RowSampling:
        return RowSampling(
            params=SamplingParams(**params),
            prompt_token_ids=history[: HISTORY // 2],
            output_token_ids=history[HISTORY // 2 :],
            num_logprobs=num_logprobs,
        )

    return {
        "greedy": mode(temperature=0.0),
        f"greedy, {NUM_LOGPROBS} log-probabilities": mode(NUM_LOGPROBS, temperature=0.0),
        "temperature 1": mode(),
        "top-k 50": mode(top_k=50),
        "top-p 0.9": mode(top_p=0.9),
        f"top-p 0.9, {NUM_LOGPROBS} log-probabilities": mode(NUM_LOGPROBS, top_p=0.9),
        "min-p 0.05": mode(min_p=0.05),
        "repetition penalty 1.1": mode(repetition_penalty=1.1),
        f"bias on {NUM_BIASES} tokens": mode(logit_bias=bias),
        "all together": mode(
            NUM_LOGPROBS,
            temperature=0.8,
            top_k=50,
            top_p=0.9,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.1,
            logit_bias=bias,
        ),
    }


def vector_isas() -> list[str]:
    """The instruction sets of this machine that were built, weakest first, the portable one not."""
    return [isa for isa in library.available() if isa != "portable"]


def load_core(isa: str) -> library.Library:
    """The core for one of `vector_isas`. Raises ValueError for an object that cannot be loaded."""
    try:
        return library.load(isa)
    except library.UnavailableError as error:
        raise ValueError(f"the native sampler cannot be timed: {error}") from error


def prepare_rows(
    core: library.Library,
    logits: NDArray[np.float32],
    draws: NDArray[np.float64],
    sampling: RowSampling,
) -> list[PreparedRow]:
    """Every row of `make_rows` for one mode."""
    return [
        PreparedRow(core, row, sampling, draw)
        for row, draw in zip(logits, draws.tolist(), strict=True)
    ]


def rows_arm(prepared: Sequence[PreparedRow]) -> Arm:
    """Each row once, after all of them untimed: its own part, and `ROWS` for all of them."""
    parts = [(row_part(number), row.draw) for number, row in enumerate(prepared)]

    def arm(watch: Stopwatch) -> None:
        for _, draw in parts:
            draw()
        for part, draw in parts:
            watch.time(part, draw)
        watch.add(ROWS, sum(watch.seconds.values()))

    return arm


def native_tokens(prepared: Sequence[PreparedRow]) -> list[list[TokenLogprob]]:
    """What the native sampler draws, row by row, each followed by its alternatives, best first."""
    for row in prepared:
        row.draw()
    return [tokens for row in prepared for tokens in tokens_of(row.read())]


def reference_tokens(
    logits: NDArray[np.float32], draws: NDArray[np.float64], sampling: RowSampling
) -> list[list[TokenLogprob]]:
    """What `engine.sampling.sample`, the definition, draws from the same rows."""
    targets = np.full(len(logits), SAMPLED, dtype=np.int32)
    return tokens_of(sample(logits, targets, (sampling,) * len(logits), draws))


def tokens_of(result: StepResult) -> list[list[TokenLogprob]]:
    """Per row the token and its alternatives: a text that a gate can compare."""
    drawn = zip(result.token_ids.tolist(), result.logprobs.tolist(), strict=True)
    return [
        [TokenLogprob(token_id=i, logprob=logprob) for i, logprob in (token, *alternatives)]
        for token, alternatives in zip(drawn, result.top_logprobs, strict=True)
    ]
