"""What a number format costs in quality, position by position, on text the model never saw.

Teacher-forced: every window of the text is one step of the engine itself, so all formats read the
same tokens through the steps and the cache that would serve them, and each position's logits are
held against the reference's. A difference at one position is far smaller than the text's own
spread, which is why everything here is compared before it is averaged. `bench precision` measures
and records it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoserve.engine.batch import PARTS, RowSampling, StepBatch, pack_batch
from nanoserve.engine.engine import Engine
from nanoserve.request import SamplingParams
from nanoserve.tokenizer import Tokenizer

MARGINS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Lower edges of the bins in which agreement is counted, by the reference's margin in nats."""

Float64 = NDArray[np.float64]


def heldout_text() -> str:
    """Text that `mini` was never trained on; see `models/mini/README.md`."""
    return (files("nanoserve.bench") / "data" / "heldout.txt").read_text(encoding="utf-8")


def cut_windows(tokenizer: Tokenizer, text: str, num_windows: int, length: int) -> list[list[int]]:
    """`num_windows` windows of `length` tokens, evenly spaced over `text`, none overlapping.

    Raises ValueError if the text is too short for them, or a window for a prediction.
    """
    if num_windows < 1 or length < 2:
        raise ValueError(
            f"at least 1 window of at least 2 tokens is needed, got {num_windows} of {length}"
        )
    ids = tokenizer.encode(text)
    stride = len(ids) // num_windows
    if stride < length:
        raise ValueError(
            f"{num_windows} windows of {length} tokens do not fit into a text of {len(ids)}: "
            "use fewer or shorter ones"
        )
    return [ids[start : start + length] for start in range(0, stride * num_windows, stride)]


# --- reading --------------------------------------------------------------------------------------


def scoring_batch(window: Sequence[int], start: int, stop: int) -> StepBatch:
    """Positions `start` to `stop` of one window, in block 0 of a contiguous cache that holds those
    before: every row's logits, each scoring the token that comes next.
    """
    num_tokens = stop - start
    parts: dict[str, list[int]] = {
        "token_ids": list(window[start:stop]),
        "positions": list(range(start, stop)),
        "slot_mapping": list(range(start, stop)),
        "query_starts": [0, num_tokens],
        "context_lens": [stop],
        "logit_rows": list(range(num_tokens)),
        "targets": list(window[start + 1 : stop + 1]),
        "block_copies": [],
        "block_tables": [0],
    }
    scored = RowSampling(params=SamplingParams(), prompt_token_ids=(), output_token_ids=())
    return pack_batch(
        [parts[name] for name in PARTS],
        table_width=1,
        sampling=(scored,) * num_tokens,
        draws=[0.0] * num_tokens,
    )


def read_logits(
    engine: Engine, window: Sequence[int], *, step_tokens: int | None = None
) -> NDArray[np.float32]:
    """Logits [N - 1, V] of a window: of all positions but the last, which has nothing to predict.

    In one step, or in steps of `step_tokens`. The engine's layout is contiguous.
    """
    last = len(window) - 1
    size = step_tokens or last
    steps = [
        scoring_batch(window, start, min(start + size, last)) for start in range(0, last, size)
    ]
    found = [engine.executor.execute_with_logits(step)[1] for step in steps]
    return found[0] if len(found) == 1 else np.concatenate(found)


# --- comparing ------------------------------------------------------------------------------------


def log_softmax(logits: NDArray[np.float32]) -> Float64:
    """[N, V] in nats."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    logprobs: Float64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """A format against the reference at N positions, one value each.

    `margin`: how far the reference's best logit is above its second; `error`: the largest
    difference of any logit, once what all have in common (which changes no probability) is taken
    off; `divergence`: KL(reference | format) in nats.
    """

    reference_logprob: Float64
    logprob: Float64
    margin: Float64
    error: Float64
    divergence: Float64
    agrees: NDArray[np.bool_]

    @classmethod
    def join(cls, parts: Sequence[Positions]) -> Positions:
        """One after another."""
        return cls(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in cls.__dataclass_fields__
            }
        )


class Reference:
    """What the reference makes of one window: worked out once, whatever is held against it."""

    def __init__(self, logits: NDArray[np.float32], targets: Sequence[int]) -> None:
        self._targets = np.array(targets)
        self._places = np.arange(len(targets))
        self.logprobs = log_softmax(logits)
        self._probabilities = np.exp(self.logprobs)
        self._choices = logits.argmax(axis=-1)
        top = np.partition(logits, -2, axis=-1)[:, -2:].astype(np.float64)
        self._margin = top[:, 1] - top[:, 0]

    def compare(self, logits: NDArray[np.float32]) -> Positions:
        """Of the same window in another format."""
        logprobs = log_softmax(logits)
        differences = logprobs - self.logprobs
        spread = differences.max(axis=-1) - differences.min(axis=-1)
        divergence = -(self._probabilities * differences).sum(axis=-1)
        return Positions(
            reference_logprob=self.logprobs[self._places, self._targets],
            logprob=logprobs[self._places, self._targets],
            margin=self._margin,
            error=spread / 2,
            divergence=np.maximum(divergence, 0.0),
            agrees=logits.argmax(axis=-1) == self._choices,
        )


# --- what is concluded ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MarginBin:
    """Positions whose margin is `low` or more, below the next bin's, and how many of them agree."""

    low: float
    num_positions: int
    num_agreeing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """A format against the reference.

    `increase` is how much higher its perplexity is, as a share (0.005: half a per cent), and
    `uncertainty` the standard error of that, from the differences of single tokens. Errors are of
    logits, divergences in nats. `num_unexplained` counts disagreements at a margin of twice the
    error there or more, which no rounding accounts for.
    """

    num_positions: int
    perplexity: float
    increase: float
    uncertainty: float
    num_disagreeing: int
    num_unexplained: int
    widest_disagreement: float
    divergence: float
    median_error: float
    largest_error: float
    bins: tuple[MarginBin, ...]

    @property
    def agreement(self) -> float:
        """Share of positions at which both choose the same next token."""
        return 1 - self.num_disagreeing / self.num_positions

    @property
    def is_identical(self) -> bool:
        return self.largest_error == 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Quality:
        return cls(**{**values, "bins": tuple(MarginBin(**found) for found in values["bins"])})


def exponential(nats: float) -> float:
    """exp, infinite where a float cannot hold it: a broken model's perplexity is no error."""
    return math.exp(nats) if nats < 709.0 else math.inf


def conclude(found: Positions) -> Quality:
    """Raises ValueError for fewer than two positions, which have no uncertainty."""
    num_positions = len(found.margin)
    if num_positions < 2:
        raise ValueError(f"2 positions or more are compared, got {num_positions}")
    lost = (found.reference_logprob - found.logprob).tolist()
    ratio = exponential(statistics.fmean(lost))
    disagrees = ~found.agrees
    return Quality(
        num_positions=num_positions,
        perplexity=exponential(-float(found.logprob.mean())),
        increase=ratio - 1.0,
        uncertainty=ratio * statistics.stdev(lost) / math.sqrt(num_positions),
        num_disagreeing=int(disagrees.sum()),
        num_unexplained=count_unexplained(found),
        widest_disagreement=float(found.margin[disagrees].max(initial=0.0)),
        divergence=float(found.divergence.mean()),
        median_error=float(np.median(found.error)),
        largest_error=float(found.error.max()),
        bins=bin_margins(found),
    )


def count_unexplained(found: Positions) -> int:
    """Disagreements that the error of the logits does not account for.

    To overtake the best, another logit must gain on it what it was behind, at least the margin; two
    logits that are each off by the error at most change places only below twice that.
    """
    rounding = 1e-9 * (1 + np.abs(found.margin))
    return int((~found.agrees & (found.margin > 2 * found.error + rounding)).sum())


def bin_margins(found: Positions) -> tuple[MarginBin, ...]:
    """Agreement by the reference's margin."""
    places = np.searchsorted(MARGINS, found.margin, side="right") - 1
    return tuple(
        MarginBin(
            low=low,
            num_positions=int((places == place).sum()),
            num_agreeing=int(found.agrees[places == place].sum()),
        )
        for place, low in enumerate(MARGINS)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Texts that a format wrote on its own, against the reference's from the same prompts.

    `first` is the place of the first token that differs in each text, None where none of
    `num_tokens` does.
    """

    num_tokens: int
    first: tuple[int | None, ...]

    @property
    def num_equal(self) -> int:
        return sum(place is None for place in self.first)

    @property
    def median_equal(self) -> float:
        """Tokens until a text is another one, counting those that never are with their length."""
        return statistics.median(
            self.num_tokens if place is None else place for place in self.first
        )


def first_differences(
    texts: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]
) -> Divergence:
    """Where each text leaves the reference's."""
    first = tuple(
        next((place for place, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
        for mine, theirs in zip(texts, reference, strict=True)
    )
    return Divergence(num_tokens=len(reference[0]), first=first)
