"""How long a step should take: its bytes and operations over what the machine was seen to do.

The roofline (Williams, Waterman, Patterson 2009): a step is bound by the bytes it must move or by
the operations it must do, whichever takes longer, plus the dispatch of its operations where they
are dispatched one by one. Bytes and operations are exact counts of necessary work, so a kernel
that moves or computes more than it must is seen as slower, never as busier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nanoserve.config import ModelConfig
from nanoserve.planner.model import StepShape, step_bytes, step_flops

EAGER_OPERATIONS_PER_LAYER = 25
"""Named term: calls that PyTorch's dispatcher sees per block in a step, beside each sequence's own.

Views and conversions that change nothing are among them. Counted, not fitted.
"""

EAGER_OPERATIONS_PER_SEQUENCE = 25
"""Named term: the same per block and sequence, since each sequence attends in calls of its own."""

EAGER_OPERATIONS_PER_STEP = 35
"""Named term: the same outside the blocks (embeddings, bookkeeping, last LayerNorm, head)."""


MAX_RATE = 1e30
"""Bytes or operations a second. Beyond it, or below one a second, lies no machine but a mistake,
and step times that no float holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a machine was measured to do at best: the only fitted terms of the step-time model.

    `matmul_flops_per_s` is by dtype; `dispatch_s` is the cost of one operation with nothing to do.
    Raises ValueError for rates that are not from 1 to `MAX_RATE`, and for a cost that is no time.
    """

    read_bytes_per_s: float
    matmul_flops_per_s: Mapping[str, float]
    dispatch_s: float

    def __post_init__(self) -> None:
        rates = [self.read_bytes_per_s, *self.matmul_flops_per_s.values()]
        if not all(1 <= rate <= MAX_RATE for rate in rates) or not 0 <= self.dispatch_s < math.inf:
            raise ValueError(
                f"ceilings must be positive, rates between 1 and {MAX_RATE:g}, got {self}"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as recorded and cached."""
        return {
            "read_bytes_per_s": self.read_bytes_per_s,
            "matmul_flops_per_s": dict(self.matmul_flops_per_s),
            "dispatch_s": self.dispatch_s,
        }

    @classmethod
    def from_json(cls, value: Any) -> Ceilings:
        """Inverse of `to_json`. Raises ValueError for anything else."""
        try:
            return cls(
                read_bytes_per_s=float(value["read_bytes_per_s"]),
                matmul_flops_per_s={k: float(v) for k, v in value["matmul_flops_per_s"].items()},
                dispatch_s=float(value["dispatch_s"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise ValueError(f"not a record of ceilings: {error}") from error


def num_eager_operations(model: ModelConfig, num_seqs: int = 1) -> int:
    """Operations dispatched in one step of the eager executor; see the named terms above."""
    per_layer = EAGER_OPERATIONS_PER_LAYER + num_seqs * EAGER_OPERATIONS_PER_SEQUENCE
    return model.n_layer * per_layer + EAGER_OPERATIONS_PER_STEP


def predict_step_s(
    ceilings: Ceilings,
    model: ModelConfig,
    step: StepShape,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    num_operations: int = 0,
) -> float:
    """Seconds of one step by the roofline. Raises ValueError as `roofline_s` does."""
    return roofline_s(
        ceilings,
        num_bytes=step_bytes(model, step, dtype=dtype, kv_dtype=kv_dtype),
        flops=step_flops(model, step),
        dtype=dtype,
        num_operations=num_operations,
    )


def roofline_s(
    ceilings: Ceilings, *, num_bytes: int, flops: int, dtype: str, num_operations: int = 0
) -> float:
    """max(bytes / read rate, flops / matmul rate) + operations x dispatch, in seconds.

    Raises ValueError if the matmul rate of `dtype` was not measured.
    """
    if dtype not in ceilings.matmul_flops_per_s:
        raise ValueError(
            f"no matmul rate for {dtype} among the measured ceilings "
            f"({', '.join(ceilings.matmul_flops_per_s)}): run `nanoserve bench ceilings`"
        )
    moving_s = num_bytes / ceilings.read_bytes_per_s
    computing_s = flops / ceilings.matmul_flops_per_s[dtype]
    return max(moving_s, computing_s) + num_operations * ceilings.dispatch_s


def predict_crossover(
    ceilings: Ceilings,
    model: ModelConfig,
    *,
    dtype: str,
    num_operations: int = 0,
    margin: float = 0.05,
) -> int | None:
    """Smallest context at which a cached step beats recomputing it by more than `margin`.

    Below it both read all weights, and that takes the time. None: nowhere in the window.
    """

    def seconds(step: StepShape) -> float:
        return predict_step_s(ceilings, model, step, dtype=dtype, num_operations=num_operations)

    for context in range(1, model.n_positions + 1):
        naive_s = seconds(StepShape(context=context, num_new=context))
        if naive_s > seconds(StepShape(context=context)) * (1 + margin):
            return context
    return None
