"""`StepBatch`: one step's metadata as one frozen value, built once from a plan and passed down.

Every layout speaks one addressing scheme: position p of a sequence lives in slot
`block_tables[s, p // block_size] * block_size + p % block_size`. Contiguous is one block of
`max_model_len`, `slots` has blocks of one, `paged` many. The integers are views of one int32 array,
so a device needs one transfer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoserve.request import SamplingParams
from nanoserve.scheduling.plan import ScheduledRequest, StepPlan

SAMPLED = -1
"""In `StepBatch.targets`: this row draws a new token instead of scoring a given one."""

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """What the sampler must know about one row beside its logits.

    `num_logprobs` None: no log-probability wanted; k: the row's token's and the k best.
    `masked_token_ids` cannot be drawn in this row (end-of-text and stop ids below `min_tokens`).
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    num_logprobs: int | None = None
    masked_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """T token rows of S sequences; logits are computed for R of the rows."""

    token_ids: Int32  # [T]
    positions: Int32  # [T], within each sequence's window
    slot_mapping: Int32  # [T], where each row's K and V are written
    query_starts: Int32  # [S + 1], sequence s owns rows query_starts[s]:query_starts[s + 1]
    context_lens: Int32  # [S], N of each sequence, this step's tokens included
    block_tables: Int32  # [S, M], padded with the scratch block
    logit_rows: Int32  # [R], rows whose logits are needed
    targets: Int32  # [R], the token a row scores, or SAMPLED
    block_copies: Int32  # [C, 2] (source, destination), done before any append
    sampling: tuple[RowSampling, ...]  # [R]
    draws: NDArray[np.float64]  # [R], the uniform each row draws with


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gives back to the host: R tokens and the log-probabilities asked for.

    `logprobs[r]` is the raw model's log-probability of row r's token (drawn, or its target), NaN
    where none was asked. `top_logprobs[r]` are (id, log-probability), best first, ties by lower id.
    `finite[r]` is False where row r's logits held NaN or infinity; its token means nothing then.
    """

    token_ids: Int32  # [R]
    logprobs: NDArray[np.float64]  # [R]
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...]  # [R]
    finite: NDArray[np.bool_]  # [R]


class LogitRow(NamedTuple):
    """One row of logits a scheduled request wants: `offset` counts from its first token row."""

    offset: int
    target: int  # a token to score, or SAMPLED
    sampling: RowSampling
    draw: float


def build_batch(
    plan: StepPlan,
    logit_rows: Callable[[ScheduledRequest], Sequence[LogitRow]],
    *,
    block_size: int,
    scratch_block: int,
) -> StepBatch:
    """The plan as arrays. `logit_rows` says which rows of a scheduled request need logits.

    Rows of a finished request that the static policy still computes write into the scratch block.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts, context_lens = [0], []
    rows: list[int] = []
    wanted: list[LogitRow] = []
    for item in plan.scheduled:
        start, stop = item.start, item.start + item.num_tokens
        first_row = len(token_ids)
        token_ids += item.request.window_tokens(start, stop)
        positions += range(start, stop)
        slots += slot_range(item, block_size, scratch_block)
        starts.append(len(token_ids))
        context_lens.append(stop)
        for row in logit_rows(item):
            rows.append(first_row + row.offset)
            wanted.append(row)
    width = max((len(item.block_table) for item in plan.scheduled), default=0)
    tables: list[int] = []
    for item in plan.scheduled:
        tables += item.block_table
        tables += [scratch_block] * (width - len(item.block_table))
    copies = [block for pair in plan.block_copies for block in pair]
    parts = [token_ids, positions, slots, starts, context_lens, rows]
    parts += [[row.target for row in wanted], copies, tables]
    views = split_buffer(parts)
    return StepBatch(
        token_ids=views[0],
        positions=views[1],
        slot_mapping=views[2],
        query_starts=views[3],
        context_lens=views[4],
        logit_rows=views[5],
        targets=views[6],
        block_copies=views[7].reshape(-1, 2),
        block_tables=views[8].reshape(len(plan.scheduled), width),
        sampling=tuple(row.sampling for row in wanted),
        draws=np.array([row.draw for row in wanted], dtype=np.float64),
    )


def scratch_batch(block_size: int, num_blocks: int) -> StepBatch:
    """One token through the scratch block, drawn by nobody: what a backend warms up with."""
    drawn = RowSampling(params=SamplingParams(), prompt_token_ids=(), output_token_ids=())
    return StepBatch(
        token_ids=np.zeros(1, np.int32),
        positions=np.zeros(1, np.int32),
        slot_mapping=np.full(1, num_blocks * block_size, np.int32),
        query_starts=np.array([0, 1], np.int32),
        context_lens=np.ones(1, np.int32),
        block_tables=np.full((1, 1), num_blocks, np.int32),
        logit_rows=np.zeros(1, np.int32),
        targets=np.full(1, SAMPLED, np.int32),
        block_copies=np.zeros((0, 2), np.int32),
        sampling=(drawn,),
        draws=np.zeros(1),
    )


def slot_range(item: ScheduledRequest, block_size: int, scratch_block: int) -> list[int]:
    """Where the rows of one scheduled request write their K and V; [] positions have no block."""
    start, stop, table = item.start, item.start + item.num_tokens, item.block_table
    if not item.writes or not table:
        return [scratch_block * block_size] * item.num_tokens
    if item.num_tokens == 1:
        return [table[start // block_size] * block_size + start % block_size]
    return [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]


def split_buffer(parts: Sequence[Sequence[int]]) -> list[Int32]:
    """The lists as views of one int32 array, in order."""
    ends = list(itertools.accumulate(map(len, parts)))
    buffer = np.fromiter(itertools.chain.from_iterable(parts), dtype=np.int32, count=ends[-1])
    return [buffer[start:end] for start, end in zip([0, *ends], ends, strict=False)]
