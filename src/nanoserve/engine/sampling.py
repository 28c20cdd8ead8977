"""From logits to tokens: the reference sampler, numpy only.

Invariant: a row's token is a function of that row's logits, its `RowSampling` and its draw, and of
nothing else. Neither its place in the batch, nor its mates, nor how often the request was preempted
changes a bit of it. `sample` states the order of operations; a device or native twin follows that
text and gives equal tokens for equal draws. Only the sampler masks ids: logits are never written.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoserve.engine.batch import SAMPLED, Int32, RowSampling, StepResult
from nanoserve.request import SamplingParams, check_range

FORCING_BIAS = 100.0
"""A `logit_bias` of this much leaves no other choice; of minus this much, it is a ban."""

Float64 = NDArray[np.float64]
Ids = NDArray[np.int64]
Values = NDArray[np.floating[Any]]  # float32 logits as they came, or adjusted in float64
TopLogprobs = tuple[tuple[int, float], ...]

_PHILOX_DRAWS = 4  # 64-bit words, so uniforms, of one Philox counter value
_CHUNK_DRAWS = 64 * _PHILOX_DRAWS
_FIRST_RANKED = 256  # tokens that top-p ranks before it looks further; most nuclei are smaller
# A larger repetition penalty ranks float32 logits no differently, but could overflow float64.
_MAX_REPETITION_PENALTY = 1e200


def uniforms(seed: int, choice: int, start: int, count: int) -> Float64:
    """Draws [start, start + count) of choice `choice` of a request seeded with `seed`: [count].

    Draw i is the i-th `np.random.Generator(np.random.Philox(key=[seed, choice])).random()`, with an
    int64 `seed` taken modulo 2**64: a multiple of 2**-53 in [0, 1). Philox is counter-based (Salmon
    et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so any `start` costs the same.
    """
    assert -(2**63) <= seed < 2**63, f"seed must be an int64, got {seed}"
    assert min(choice, start, count) >= 0, (choice, start, count)
    key = np.array([seed % 2**64, choice], dtype=np.uint64)
    counter, skipped = divmod(start, _PHILOX_DRAWS)
    stream = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return stream.random(skipped + count)[skipped:]


class DrawStream:
    """The draws of one choice, by index: amortised O(1) in order, exact in any order.

    Nothing has to be rewound when a preempted request is computed again.
    """

    __slots__ = ("_choice", "_chunk", "_seed", "_start")

    def __init__(self, seed: int, choice: int) -> None:
        self._seed, self._choice, self._start = seed, choice, 0
        self._chunk: list[float] = []  # drawn when first asked for

    def at(self, index: int) -> float:
        """The uniform that output token `index` (from 0) is drawn with."""
        if not self._start <= index < self._start + len(self._chunk):
            self._start = index - index % _CHUNK_DRAWS
            self._chunk = uniforms(self._seed, self._choice, self._start, _CHUNK_DRAWS).tolist()
        return self._chunk[index - self._start]


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise ValueError for a `logit_bias` key or stop id that is no id of this vocabulary."""
    for token_id in params.logit_bias:
        check_range("logit_bias key (a token id)", token_id, 0, vocab_size - 1, integer=True)
    for token_id in params.stop_token_ids:
        check_range("stop_token_ids entry", token_id, 0, vocab_size - 1, integer=True)


def sample(
    logits: NDArray[np.float32],
    targets: Int32,
    sampling: Sequence[RowSampling],
    draws: Float64,
    *,
    num_token_ids: int | None = None,
) -> StepResult:
    """Turn logits [R, V] into R tokens and the log-probabilities asked for. The definition:

    1. A row is finite unless it holds NaN or +inf, or no id below `num_token_ids` is above -inf.
       A row that is not gets token 0 and no log-probability; its neighbours never notice.
    2. A row with a target gives that target. The other rows go on, in float64:
    3. `logit_bias` is added.
    4. Repetition penalty, once per id of prompt and output: a logit above zero is divided by it,
       any other multiplied (CTRL, Keskar et al. 2019). Then output ids only: minus
       `frequency_penalty` x count, minus `presence_penalty`. Bias before penalties, repetition
       before the other two: vLLM's order.
    5. Masks, the strongest first: ids from `num_token_ids` on (None: no such ids);
       `masked_token_ids`; ids with bias -100; with a bias of +100 anywhere, every other id. A mask
       (never the first) that would leave no logit above -inf is void, and a +-100 then still
       counts as the number added in 3. So bias +100 is the only choice at any temperature, a ban
       of everything bans nothing, and `min_tokens` outlasts both.
    6. Temperature 0 takes the lowest id among the maxima. Otherwise an id's weight is
       exp((value - max) / temperature), and ids are ranked by value, ties by lower id.
    7. Kept are the first `top_k` of the ranking; of those the shortest prefix, at least one id,
       whose weight reaches `top_p` of theirs; of those the ids with weight >= `min_p` (the best
       id's weight is 1).
    8. Inverse CDF: the first kept id, ascending, whose running weight exceeds draw x total.
       Every sum of weights is taken one by one in its order: ascending id for a total, ranking
       for a prefix.

    Log-probabilities are log_softmax of the raw row in float64, before 3, ids beyond the tokenizer
    included. `draws` [R] are in [0, 1); only rows that sample read theirs.
    """
    num_rows, vocab_size = logits.shape
    num_ids = vocab_size if num_token_ids is None else num_token_ids
    _check_inputs(logits, targets, sampling, draws, num_ids)
    peaks, best, finite = _best_ids(logits, num_ids)
    token_ids = np.where(targets == SAMPLED, best, targets).astype(np.int32)
    token_ids[~finite] = 0
    logprobs = np.full(num_rows, np.nan)
    top_logprobs: list[TopLogprobs] = [()] * num_rows
    for row in np.flatnonzero(finite).tolist():
        wanted = sampling[row]
        if targets[row] == SAMPLED and not takes_raw_best(wanted):
            token_ids[row] = _choose(logits[row, :num_ids], wanted, float(draws[row]))
        if wanted.num_logprobs is not None:
            logprobs[row], top_logprobs[row] = _raw_logprobs(
                logits[row], float(peaks[row]), int(token_ids[row]), wanted.num_logprobs
            )
    return StepResult(
        token_ids=token_ids, logprobs=logprobs, top_logprobs=tuple(top_logprobs), finite=finite
    )


def _check_inputs(
    logits: NDArray[np.float32],
    targets: Int32,
    sampling: Sequence[RowSampling],
    draws: Float64,
    num_ids: int,
) -> None:
    """Assert what the engine owes the sampler; users' ids were refused by `check_token_ids`."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == np.float32, logits.dtype
    assert 0 < num_ids <= vocab_size, (num_ids, vocab_size)
    assert len(targets) == len(sampling) == len(draws) == num_rows
    assert np.all((targets == SAMPLED) | ((targets >= 0) & (targets < vocab_size))), targets
    for row in sampling:
        largest = max((*row.params.logit_bias, *row.masked_token_ids), default=0)
        assert largest < vocab_size, (largest, vocab_size)


def _best_ids(
    logits: NDArray[np.float32], num_ids: int
) -> tuple[NDArray[np.float32], Ids, NDArray[np.bool_]]:
    """Each row's raw maximum, its best id below `num_ids`, and whether the row is finite: [R] each.

    One pass: argmax takes NaN for the greatest, and the first of equals. So the maximum is NaN if
    the row holds one, +inf if it holds that, and -inf only if it holds nothing else.
    """
    best = logits.argmax(axis=1)  # [R]
    peaks = np.take_along_axis(logits, best[:, np.newaxis], axis=1)[:, 0]
    finite = np.isfinite(peaks)
    for row in np.flatnonzero(best >= num_ids):
        best[row] = logits[row, :num_ids].argmax()
        finite[row] &= logits[row, best[row]] > -np.inf
    return peaks, best, finite


def takes_raw_best(sampling: RowSampling) -> bool:
    """Whether the row is greedy over its logits as they are."""
    return sampling.params.temperature == 0 and not _adjusts(sampling)


def _adjusts(sampling: RowSampling) -> bool:
    """Whether bias, penalties or masks may touch the row's logits."""
    params = sampling.params
    return len(params.logit_bias) > 0 or len(sampling.masked_token_ids) > 0 or params.penalises


def _choose(row: Values, sampling: RowSampling, draw: float) -> int:
    """The token of one finite row [V], which ends where the tokenizer does."""
    values = _adjust(row, sampling) if _adjusts(sampling) else row
    if sampling.params.temperature == 0:
        return int(values.argmax())
    assert 0.0 <= draw < 1.0, draw
    ids, weights = _keep(values, sampling.params)
    running = weights.cumsum()
    # total >= 1 and draw <= 1 - 2**-53, so the product rounds below the total: never past the end.
    return int(ids[running.searchsorted(draw * running[-1], side="right")])


def _adjust(row: Values, sampling: RowSampling) -> Float64:
    """A copy of `row` with bias, penalties and masks applied, in float64. Some value is > -inf."""
    params = sampling.params
    values = row.astype(np.float64)
    biased = _ids_below(params.logit_bias, len(row))
    bias = np.array([params.logit_bias[token_id] for token_id in biased.tolist()], dtype=np.float64)
    values[biased] += bias
    _penalise(values, sampling)
    _forbid(values, _ids_below(sampling.masked_token_ids, len(row)))
    _forbid(values, biased[bias <= -FORCING_BIAS])
    _force(values, biased[bias >= FORCING_BIAS])
    return values


def _ids_below(token_ids: Collection[int], limit: int) -> Ids:
    """Those of `token_ids` below `limit`, in their order."""
    ids = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
    assert np.all(ids >= 0), ids
    return ids[ids < limit]


def _penalise(values: Float64, sampling: RowSampling) -> None:
    """Lower, in place, what was said already."""
    params = sampling.params
    if params.repetition_penalty != 1.0:
        seen = [*sampling.prompt_token_ids, *sampling.output_token_ids]
        ids = _ids_below(seen, len(values))  # an id twice in it is still penalised once
        penalty = min(params.repetition_penalty, _MAX_REPETITION_PENALTY)
        values[ids] = np.where(values[ids] > 0, values[ids] / penalty, values[ids] * penalty)
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        output = _ids_below(sampling.output_token_ids, len(values))
        ids, counts = np.unique(output, return_counts=True)
        values[ids] -= params.frequency_penalty * counts
        values[ids] -= params.presence_penalty


def _forbid(values: Float64, ids: Ids) -> None:
    """Mask `ids` in place, unless nothing would be left to draw."""
    saved = values[ids]
    values[ids] = -np.inf
    if values.max() == -np.inf:
        values[ids] = saved


def _force(values: Float64, ids: Ids) -> None:
    """Mask all but `ids` in place, unless nothing would be left to draw."""
    saved = values[ids]
    if saved.max(initial=-np.inf) > -np.inf:
        values.fill(-np.inf)
        values[ids] = saved


def _keep(values: Values, params: SamplingParams) -> tuple[Ids, Float64]:
    """The ids that may be drawn, ascending, and their weights."""
    peak = float(values.max())
    if params.top_k is not None and params.top_k < len(values):
        ids = np.sort(_rank(values, params.top_k))
        values = values[ids]
    else:
        ids = np.arange(len(values))
    with np.errstate(over="ignore"):  # near temperature 0 a gap becomes -inf, and weighs 0
        weights = np.exp(np.subtract(values, peak, dtype=np.float64) / params.temperature)
    if params.top_p < 1.0:
        # Positions ascend as ids do, so ties still go to the lower id.
        nucleus = np.sort(_nucleus(values, weights, params.top_p))
        ids, weights = ids[nucleus], weights[nucleus]
    if params.min_p > 0.0:
        likely = weights >= params.min_p
        ids, weights = ids[likely], weights[likely]
    return ids, weights


def _nucleus(values: Values, weights: Float64, top_p: float) -> Ids:
    """Positions of the shortest prefix of the ranking that weighs `top_p` of the whole, best first.

    Holtzman et al. 2020, "The curious case of neural text degeneration". Ranks further only while
    it must; the running weight of a prefix has the same bits however far the ranking goes.
    """
    wanted = top_p * weights.cumsum()[-1]  # cumsum, not sum: added one by one, as defined
    count = min(_FIRST_RANKED, len(values))
    while True:
        ranked = _rank(values, count)
        running = weights[ranked].cumsum()
        if running[-1] >= wanted or count == len(values):
            return ranked[: running.searchsorted(wanted) + 1]
        count = min(8 * count, len(values))


def _rank(values: Values, count: int) -> Ids:
    """The `count` (at most all) ids of highest value, best first, ties by lower id."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    cut = len(values) - count
    ids = np.flatnonzero(values >= np.partition(values, cut)[cut])  # ties at the cut: all of them
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


def _raw_logprobs(
    row: NDArray[np.float32], peak: float, token_id: int, num_logprobs: int
) -> tuple[float, TopLogprobs]:
    """log_softmax of `row` [V] at `token_id` and at its `num_logprobs` best ids, best first.

    One vector gives both, so the best token's value is the first of the top, bit for bit.
    """
    shifted = np.subtract(row, peak, dtype=np.float64)
    best = _rank(row, num_logprobs)
    logprobs = shifted[np.append(best, token_id)] - np.log(np.exp(shifted).sum())
    top = tuple(zip(best.tolist(), logprobs[:-1].tolist(), strict=True))
    return float(logprobs[-1]), top
