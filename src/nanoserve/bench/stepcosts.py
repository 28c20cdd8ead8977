"""What a step of the engine costs, as a function of what it computes: fitted, and then used blind.

`StepWork` counts what one plan computes. `StepCosts` turns that into seconds and is fitted on
steps that were timed for the purpose, never on those that it goes on to predict. Token rows are
alike whatever they belong to ("advance by q tokens"), so their cost is one curve, straight between
the row counts that were timed; rows that need logits, sequences, context read and attended pairs
add terms of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nanoserve.scheduling.plan import StepPlan

Float64 = NDArray[np.float64]

TERMS = ("num_logit_rows", "num_seqs", "context_tokens", "attended_pairs")
"""What a step costs beside its token rows: attributes of `StepWork`, each with a price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """What one step computes.

    `num_rows` are token rows T of `num_seqs` sequences; `num_logit_rows` R of them are sampled;
    `context_tokens` is the sum of context lengths N, this step included; `attended_pairs` counts
    (query, key) pairs, the causal half only.
    """

    num_rows: int
    num_seqs: int
    num_logit_rows: int
    context_tokens: int
    attended_pairs: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepWork:
        """Of a plan without prompt log-probabilities: one row of logits for each that samples."""
        rows = [(row.start, row.num_tokens) for row in plan.scheduled]
        return cls(
            num_rows=plan.num_tokens,
            num_seqs=len(rows),
            num_logit_rows=sum(row.samples for row in plan.scheduled),
            context_tokens=sum(start + num_tokens for start, num_tokens in rows),
            attended_pairs=sum(n * start + n * (n + 1) // 2 for start, n in rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step: `row_s` at the row counts `knots`, straight between, plus a price a term.

    `median_error` and `num_steps` say how well, and on how many steps, it was fitted.
    """

    knots: tuple[int, ...]
    row_s: tuple[float, ...]
    term_s: tuple[float, ...]  # aligned with TERMS
    median_error: float
    num_steps: int

    def __call__(self, work: StepWork) -> float:
        """Predicted seconds. Beyond the last knot rows go on costing what they did before it."""
        rows_s = float(hats(self.knots, work.num_rows) @ np.array(self.row_s))
        amounts = [float(getattr(work, term)) for term in TERMS]
        return rows_s + sum(p * n for p, n in zip(self.term_s, amounts, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Plain values, as recorded."""
        return {
            "knots": list(self.knots),
            "row_s": list(self.row_s),
            "term_s": dict(zip(TERMS, self.term_s, strict=True)),
            "median_error": self.median_error,
            "num_steps": self.num_steps,
        }


def hats(knots: Sequence[int], num_rows: int) -> Float64:
    """Weights of the values at `knots` that interpolate linearly at `num_rows`: [knots].

    Outside the knots the nearest piece goes on.
    """
    weights = np.zeros(len(knots))
    if len(knots) == 1:
        weights[0] = 1.0
        return weights
    inside = [i for i, (_, right) in enumerate(pairwise(knots)) if num_rows <= right]
    piece = inside[0] if inside else len(knots) - 2
    left, right = knots[piece], knots[piece + 1]
    share = (num_rows - left) / (right - left)
    weights[piece], weights[piece + 1] = 1 - share, share
    return weights


def fit_step_costs(
    works: Sequence[StepWork], seconds: Sequence[float], knots: Sequence[int]
) -> StepCosts:
    """Least squares of relative errors; a term that would come out negative is left out (0).

    `knots` that no step reached are dropped. Raises ValueError for nothing to fit.
    """
    if not works or len(works) != len(seconds):
        raise ValueError(f"{len(works)} steps and {len(seconds)} times are no data to fit")
    most = max(work.num_rows for work in works)
    kept = tuple(sorted({min(knot, most) for knot in knots}))
    measured = np.array(seconds, dtype=np.float64)
    columns = np.array(
        [[*hats(kept, work.num_rows), *(getattr(work, term) for term in TERMS)] for work in works],
        dtype=np.float64,
    )
    prices = non_negative_least_squares(columns / measured[:, None], np.ones(len(works)))
    errors = np.abs(columns @ prices - measured) / measured
    return StepCosts(
        knots=kept,
        row_s=tuple(prices[: len(kept)].tolist()),
        term_s=tuple(prices[len(kept) :].tolist()),
        median_error=float(np.median(errors)),
        num_steps=len(works),
    )


def non_negative_least_squares(columns: Float64, target: Float64) -> Float64:
    """Minimise |columns @ x - target| with no x below 0, by leaving out what would be.

    Not the exact constrained optimum, but equal to it where the terms left out are noise. Columns
    are scaled first: counts of pairs and of sequences differ by orders of magnitude.
    """
    scale = np.linalg.norm(columns, axis=0)
    active = scale > 0
    found = np.zeros(columns.shape[1])
    while active.any():
        solution = np.linalg.lstsq(columns[:, active] / scale[active], target, rcond=1e-10)[0]
        if (solution >= 0).all():
            found[active] = solution / scale[active]
            break
        active[np.flatnonzero(active)[solution.argmin()]] = False
    return found
