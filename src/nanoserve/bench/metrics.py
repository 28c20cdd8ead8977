"""Statistics and metrics, defined once: pure functions of samples and of request times.

No distribution is assumed. Intervals are order statistics (David and Nagaraja 2003, section 7.1):
the number of samples below a true quantile is binomial, so two of the sorted samples enclose it
with a probability that is computed exactly. Too few samples give None, never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CONFIDENCE = 0.95
NOISY_SPREAD = 0.10
INVALID_SPREAD = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A two-sided 95 % interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def percentile(samples: Sequence[float], share: float) -> float:
    """The `share` quantile, linear between the two nearest order statistics (Hyndman-Fan 7)."""
    if not samples:
        raise ValueError("a percentile of nothing")
    ordered = sorted(samples)
    rank = share * (len(ordered) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


def median(samples: Sequence[float]) -> float:
    return percentile(samples, 0.5)


def min_samples(share: float) -> int:
    """Samples needed before the `share` quantile has a two-sided 95 % interval at all.

    6 for the median, 36 for p90, 72 for p95, 368 for p99: the largest (or smallest) sample must be
    beyond the quantile with probability 1 - 0.05/2.
    """
    extreme = max(share, 1 - share)
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(extreme))


def supported_percentile(samples: Sequence[float], share: float) -> float | None:
    """`percentile`, or None where there are too few samples to say."""
    return percentile(samples, share) if len(samples) >= min_samples(share) else None


def median_interval(samples: Sequence[float]) -> Interval | None:
    """Order-statistic 95 % interval of the median: the narrowest symmetric pair of ranks.

    None below 6 samples: then not even the whole range encloses the median with that probability.
    """
    n, tail, rank = len(samples), 0.0, 0
    while True:
        # P(at most `rank` samples below the median), exactly, for Binomial(n, 1/2)
        tail += math.comb(n, rank) / 2**n
        if tail > (1 - CONFIDENCE) / 2:
            break
        rank += 1
    if rank == 0:
        return None
    ordered = sorted(samples)
    return Interval(low=ordered[rank - 1], high=ordered[n - rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """What is reported of one cell: median, inter-quartile range, n, interval, and its mark."""

    median: float
    q1: float
    q3: float
    n: int
    interval: Interval | None

    @property
    def spread(self) -> float:
        """Inter-quartile range over median."""
        return (self.q3 - self.q1) / self.median

    @property
    def mark(self) -> Literal["", "noisy", "invalid"]:
        if self.spread > INVALID_SPREAD:
            return "invalid"
        return "noisy" if self.spread > NOISY_SPREAD else ""


def describe(samples: Sequence[float]) -> Distribution:
    return Distribution(
        median=median(samples),
        q1=percentile(samples, 0.25),
        q3=percentile(samples, 0.75),
        n=len(samples),
        interval=median_interval(samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """When things happened to one request, in seconds on one clock.

    `arrival_s` is the *scheduled* arrival: a sender that fell behind does not make the server look
    faster. `token_s` are the times at which each output token was available, in order.
    """

    arrival_s: float
    first_scheduled_s: float
    token_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.token_s:
            raise ValueError("a request without tokens has no latencies")


def queue_delay(request: RequestTimes) -> float:
    """d - a: seconds from scheduled arrival to the first step that held the request."""
    return request.first_scheduled_s - request.arrival_s


def ttft(request: RequestTimes) -> float:
    """f - a: seconds to the first token, tokenization included."""
    return request.token_s[0] - request.arrival_s


def tpot(request: RequestTimes) -> float | None:
    """(c - f) / (n - 1): mean seconds per token after the first; None for a single token.

    vLLM's TPOT; GuideLLM and AIPerf call this ITL.
    """
    gaps = len(request.token_s) - 1
    return (request.token_s[-1] - request.token_s[0]) / gaps if gaps else None


def itl(requests: Sequence[RequestTimes]) -> list[float]:
    """Every t_i - t_(i-1), pooled over requests: token-weighted, so not the mean of `tpot`."""
    return [
        after - before
        for request in requests
        for before, after in zip(request.token_s, request.token_s[1:], strict=False)
    ]


def e2e(request: RequestTimes) -> float:
    """c - a: seconds from scheduled arrival to the last token."""
    return request.token_s[-1] - request.arrival_s


def duration(requests: Sequence[RequestTimes]) -> float:
    """Last token minus first scheduled arrival, over all requests."""
    return max(r.token_s[-1] for r in requests) - min(r.arrival_s for r in requests)


def throughput_out(requests: Sequence[RequestTimes]) -> float:
    """Output tokens per second: total over total, never a mean of rates."""
    return sum(len(r.token_s) for r in requests) / duration(requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Requests that met every objective: their rate, and their share of all that were offered."""

    requests_per_s: float
    share: float


def goodput(
    requests: Sequence[RequestTimes], *, num_offered: int, max_ttft_s: float, max_tpot_s: float
) -> Goodput:
    """Requests meeting both objectives. A request that failed counts in `num_offered` alone.

    A single-token request has no `tpot` and meets that objective.
    """
    if num_offered < len(requests):
        raise ValueError(f"num_offered must be at least the {len(requests)} served: {num_offered}")
    good = sum(ttft(r) <= max_ttft_s and (tpot(r) or 0.0) <= max_tpot_s for r in requests)
    if not good:
        return Goodput(requests_per_s=0.0, share=0.0)
    return Goodput(requests_per_s=good / duration(requests), share=good / num_offered)


def mbu(num_bytes: float, step_s: float, read_bytes_per_s: float) -> float:
    """Share of the measured read bandwidth that a step reached by the bytes it had to move."""
    return num_bytes / (step_s * read_bytes_per_s)


def computed_over_asked(num_rows_computed: int, num_tokens_asked: int) -> float:
    """Decode rows computed per token asked for: 1.0 without waste, more under static batching."""
    return num_rows_computed / num_tokens_asked
