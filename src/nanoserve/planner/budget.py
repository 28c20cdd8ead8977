"""How many token rows a step may have, so that a long prompt does not make the others wait.

A step that carries a chunk of somebody's prompt takes longer than a step of decodes alone, and
every running stream waits for it. The automatic `--max-num-batched-tokens` is the largest for which
that is at most `MAX_GAP_RATIO` times the plain step, by whatever model of a step's time is at hand.
"""

from __future__ import annotations

from collections.abc import Callable

from nanoserve.config import ModelConfig
from nanoserve.planner.model import StepShape, kv_bytes_per_token, step_bytes, step_flops
from nanoserve.planner.steptime import Ceilings, num_eager_operations, roofline_s

MAX_GAP_RATIO = 3.5
"""The longest gap between two tokens of a stream, in decode steps, that a prompt may cause."""

NUM_STREAMS = 8
"""Streams that run while the prompt arrives: the case that the ratio is promised for."""

GRAIN = 16
SMALLEST_BUDGET = 32
LARGEST_BUDGET = 2048

StepTime = Callable[[int, int], float]
"""Seconds of a step of so many decode rows and so many rows of one prompt."""


def auto_budget(
    step_time: StepTime,
    *,
    num_streams: int = NUM_STREAMS,
    max_ratio: float = MAX_GAP_RATIO,
    smallest: int = SMALLEST_BUDGET,
    largest: int = LARGEST_BUDGET,
) -> int:
    """The largest budget, in steps of `GRAIN`, whose full step takes `max_ratio` decode steps.

    `step_time` must not fall as rows are added. `smallest` is given even where it takes longer:
    below it a prompt would hardly advance. Raises ValueError for limits that contradict one
    another.
    """
    if not num_streams < smallest <= largest:
        raise ValueError(
            f"a budget needs num_streams < smallest <= largest, got {num_streams}, {smallest}, "
            f"{largest}"
        )
    limit_s = max_ratio * step_time(num_streams, 0)
    low, high = smallest // GRAIN, largest // GRAIN
    while low < high:
        middle = (low + high + 1) // 2
        if step_time(num_streams, middle * GRAIN - num_streams) <= limit_s:
            low = middle
        else:
            high = middle - 1
    return max(smallest, low * GRAIN)


def predicted_step_time(
    ceilings: Ceilings,
    model: ModelConfig,
    *,
    dtype: str,
    kv_dtype: str | None = None,
    is_eager: bool = True,
) -> StepTime:
    """Step times by the roofline, for `auto_budget`.

    Streams are in the middle of the window; the prompt's chunk, which is the dearest, at its end.
    Weights are read once for both parts of a step. What it gives raises ValueError if the matmul
    rate of `dtype` was not measured.
    """
    context = model.n_positions // 2

    def step_time(num_decode: int, num_prompt: int) -> float:
        decodes = StepShape(num_seqs=num_decode, context=context)
        num_bytes = step_bytes(model, decodes, dtype=dtype, kv_dtype=kv_dtype)
        flops = step_flops(model, decodes)
        if num_prompt:
            end = max(num_prompt, model.n_positions)
            chunk = StepShape(context=end, num_new=num_prompt)
            num_bytes += (chunk.context + num_prompt) * kv_bytes_per_token(model, kv_dtype or dtype)
            flops += step_flops(model, chunk)
        num_seqs = num_decode + (num_prompt > 0)
        return roofline_s(
            ceilings,
            num_bytes=num_bytes,
            flops=flops,
            dtype=dtype,
            num_operations=num_eager_operations(model, num_seqs) if is_eager else 0,
        )

    return step_time
