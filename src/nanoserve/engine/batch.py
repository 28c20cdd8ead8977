"""`StepBatch`: one step's metadata as one frozen value, built once from a plan and passed down.

Every layout speaks one addressing scheme: position p of a sequence lives in slot
`block_tables[s, p // block_size] * block_size + p % block_size`. Contiguous is one block of
`max_model_len`, `slots` has blocks of one, `paged` many. The integers are views of one int32 array,
so a device needs one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nanoserve.request import SamplingParams

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


class Executor(Protocol):
    """Runs steps. Every backend (eager, graph, native) has exactly this face."""

    def execute(self, batch: StepBatch) -> StepResult: ...

    def warm_up(self) -> None: ...

    def synchronize(self) -> None: ...

    def memory_stats(self) -> dict[str, int]: ...

    def close(self) -> None: ...
