"""Layouts: where a position lives. They know nothing of how a number is stored.

Every layout that keeps anything is one addressing scheme: `contiguous` has one block of
`max_model_len` a sequence, `slots` blocks of one position, `paged` many. A step that does not fit
raises before a byte is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from nanoserve.kv.step import StepTensors


class CacheFullError(RuntimeError):
    """A step addresses positions or slots that the cache does not have; nothing was written."""


class BlockLayout:
    """`num_blocks` blocks of `block_size` positions, and a scratch block behind them."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size

    @property
    def scratch_slot(self) -> int:
        """Where rows that nobody will read may write."""
        return self.num_blocks * self.block_size

    def check(self, step: StepTensors) -> None:
        """Raise CacheFullError unless the step's contexts, copies, slots and blocks exist.

        Slots and blocks that lie on a GPU are not looked at: that would stop the host.
        """
        self.check_contexts(step.context_lens, step.block_tables.shape[1])
        self.check_copies(step.block_copies)
        if step.slot_mapping.device.type == "cpu" and step.slot_mapping.numel():
            self.check_slots(int(step.slot_mapping.min()), int(step.slot_mapping.max()))
        if step.block_tables.device.type == "cpu" and step.block_tables.numel():
            self.check_tables(int(step.block_tables.min()), int(step.block_tables.max()))

    def check_contexts(self, context_lens: Sequence[int], table_width: int) -> None:
        longest = max(context_lens, default=0)
        num_needed = -(-longest // self.block_size)
        if num_needed > table_width:
            raise CacheFullError(
                f"a context of {longest} positions needs {num_needed} blocks "
                f"of {self.block_size}, its block table has {table_width}"
            )

    def check_copies(self, block_copies: Sequence[Sequence[int]]) -> None:
        for block in itertools.chain.from_iterable(block_copies):
            if not 0 <= block < self.num_blocks:
                raise CacheFullError(
                    f"block {block} is copied from or to, this cache has {self.num_blocks}"
                )

    def check_slots(self, low: int, high: int) -> None:
        limit = (self.num_blocks + 1) * self.block_size
        if low < 0 or high >= limit:
            raise CacheFullError(
                f"slot {low if low < 0 else high} is outside this cache's {limit} "
                f"({self.num_blocks} blocks of {self.block_size} and a scratch block)"
            )

    def check_tables(self, low: int, high: int) -> None:
        """A block below 0 would be read from the end: another's, and no error."""
        if low < 0 or high > self.num_blocks:
            raise CacheFullError(
                f"a block table names block {low if low < 0 else high}, this cache has "
                f"{self.num_blocks} and a scratch block"
            )

    def tables(self, step: StepTensors) -> list[Tensor]:
        """Of each sequence, the blocks that hold its context, in order."""
        block_tables = step.block_tables.long()
        return [
            row[: -(-n // self.block_size)]
            for row, n in zip(block_tables, step.context_lens, strict=True)
        ]

    def gather(self, store: Tensor, table: Tensor, context_len: int) -> Tensor:
        """[P, H, B, ...] -> [H, N, ...]: a view where one block holds it all, else a copy."""
        if table.shape[0] == 1:
            return store[table[0]][:, :context_len]
        blocks = store.index_select(0, table)  # [M, H, B, ...]
        return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]
