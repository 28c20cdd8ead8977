"""`StepBatch`: one step's metadata as one frozen value, built once from a plan and passed down.

Every layout speaks one addressing scheme: position p of a sequence lives in slot
`block_tables[s, p // block_size] * block_size + p % block_size`. Contiguous is one block of
`max_model_len`, `slots` has blocks of one, `paged` many. All integers lie in one int32 array, so a
device needs one transfer and a C core one address; as numpy arrays they are views of it, made for
whoever asks.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


PARTS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "query_starts",
    "context_lens",
    "logit_rows",
    "targets",
    "block_copies",
    "block_tables",
)
"""The integer arrays of a `StepBatch`, in the order in which they lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """T token rows of S sequences; logits are computed for R of the rows.

    `integers` holds the arrays of `PARTS` end to end; `starts` says where each begins, and where
    the last one ends.
    """

    num_tokens: int  # T
    num_seqs: int  # S
    num_rows: int  # R
    table_width: int  # M
    integers: array[int]  # int32
    starts: tuple[int, ...]  # [len(PARTS) + 1]
    uniforms: array[float]  # [R], `draws`
    sampling: tuple[RowSampling, ...]  # [R]

    @property
    def token_ids(self) -> Int32:
        """[T]."""
        return self._part(0)

    @property
    def positions(self) -> Int32:
        """[T], within each sequence's window."""
        return self._part(1)

    @property
    def slot_mapping(self) -> Int32:
        """[T], where each row's K and V are written."""
        return self._part(2)

    @property
    def query_starts(self) -> Int32:
        """[S + 1], sequence s owns rows query_starts[s]:query_starts[s + 1]."""
        return self._part(3)

    @property
    def context_lens(self) -> Int32:
        """[S], N of each sequence, this step's tokens included."""
        return self._part(4)

    @property
    def logit_rows(self) -> Int32:
        """[R], rows whose logits are needed."""
        return self._part(5)

    @property
    def targets(self) -> Int32:
        """[R], the token a row scores, or SAMPLED."""
        return self._part(6)

    @property
    def block_copies(self) -> Int32:
        """[C, 2] (source, destination), done before any append."""
        return self._part(7).reshape(-1, 2)

    @property
    def block_tables(self) -> Int32:
        """[S, M], padded with the scratch block."""
        return self._part(8).reshape(self.num_seqs, self.table_width)

    @property
    def draws(self) -> NDArray[np.float64]:
        """[R], the uniform each row draws with."""
        return np.asarray(self.uniforms)

    def _part(self, index: int) -> Int32:
        whole: Int32 = np.asarray(self.integers)
        return whole[self.starts[index] : self.starts[index + 1]]

    def with_arrays(self, **arrays: Int32) -> StepBatch:
        """The same step with other integers, by the names of `PARTS`; none of this one's change."""
        ours = {name: getattr(self, name) for name in PARTS}
        return batch_of(sampling=self.sampling, draws=self.uniforms, **(ours | arrays))


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
    targets = [row.target for row in wanted]
    return pack_batch(
        [token_ids, positions, slots, starts, context_lens, rows, targets, copies, tables],
        table_width=width,
        sampling=tuple([row.sampling for row in wanted]),
        draws=[row.draw for row in wanted],
    )


def pack_batch(
    parts: Sequence[list[int]],
    *,
    table_width: int,
    sampling: tuple[RowSampling, ...],
    draws: Iterable[float],
) -> StepBatch:
    """A step from its integers as lists, in the order of `PARTS`."""
    return StepBatch(
        num_tokens=len(parts[0]),
        num_seqs=len(parts[4]),
        num_rows=len(parts[5]),
        table_width=table_width,
        integers=array("i", itertools.chain.from_iterable(parts)),
        starts=tuple(itertools.accumulate(map(len, parts), initial=0)),
        uniforms=array("d", draws),
        sampling=sampling,
    )


def batch_of(
    *, sampling: tuple[RowSampling, ...], draws: Iterable[float], **arrays: Int32
) -> StepBatch:
    """A step from its integers as arrays, by the names of `PARTS`, all of them.

    Raises ValueError for arrays that make no step: whoever computes one trusts its sizes.
    """
    check_arrays(arrays, len(sampling))
    uniforms = array("d", draws)
    if len(uniforms) != len(sampling):
        raise ValueError(f"{len(sampling)} rows need a draw each, got {len(uniforms)}")
    return pack_batch(
        [np.ravel(arrays[name]).tolist() for name in PARTS],
        table_width=arrays["block_tables"].shape[1],
        sampling=sampling,
        draws=uniforms,
    )


def check_arrays(arrays: Mapping[str, Int32], num_rows: int) -> None:
    """Raise ValueError unless these are the arrays of `PARTS`, of one T, S and R, and int32."""
    if arrays.keys() != set(PARTS):
        raise ValueError(f"a step is made of {', '.join(PARTS)}, got {', '.join(arrays)}")
    num_tokens, num_seqs = arrays["token_ids"].size, arrays["context_lens"].size
    shapes = {
        **dict.fromkeys(("token_ids", "positions", "slot_mapping"), (num_tokens,)),
        **dict.fromkeys(("logit_rows", "targets"), (num_rows,)),
        "query_starts": (num_seqs + 1,),
        "context_lens": (num_seqs,),
        "block_copies": (*(arrays["block_copies"].shape or (1,))[:1], 2),
        "block_tables": (num_seqs, *(arrays["block_tables"].shape or (1,))[-1:]),
    }
    for name, values in arrays.items():
        if values.shape != shapes[name]:
            raise ValueError(f"{name} must have shape {shapes[name]}, got {values.shape}")
        if not fits_int32(values):
            raise ValueError(f"{name} must hold int32, got {values.dtype} that does not fit")


def fits_int32(values: NDArray[Any]) -> bool:
    """Whether all are integers that int32 holds, whatever type they come in."""
    if values.dtype == np.int32:
        return True
    return values.dtype.kind in "iu" and bool((values == values.astype(np.int32)).all())


def scratch_batch(block_size: int, num_blocks: int) -> StepBatch:
    """One token through the scratch block, drawn by nobody: what a backend warms up with."""
    drawn = RowSampling(params=SamplingParams(), prompt_token_ids=(), output_token_ids=())
    slot = num_blocks * block_size
    return pack_batch(
        [[0], [0], [slot], [0, 1], [1], [0], [SAMPLED], [], [num_blocks]],
        table_width=1,
        sampling=(drawn,),
        draws=[0.0],
    )


def slot_range(item: ScheduledRequest, block_size: int, scratch_block: int) -> list[int]:
    """Where the rows of one scheduled request write their K and V; [] positions have no block."""
    start, stop, table = item.start, item.start + item.num_tokens, item.block_table
    if not item.writes or not table:
        return [scratch_block * block_size] * item.num_tokens
    if item.num_tokens == 1:
        return [table[start // block_size] * block_size + start % block_size]
    return [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]
