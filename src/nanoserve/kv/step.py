"""`StepTensors`: the part of a step that the model and its caches read.

Index tensors live on the device, lengths on the host: nothing on the step's path ever asks the
device how long a sequence is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """T token rows of S sequences, R of them with logits; see `engine.batch.StepBatch`."""

    token_ids: Tensor  # [T]
    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    block_tables: Tensor  # [S, M]
    logit_rows: Tensor  # [R]
    query_starts: tuple[int, ...]  # [S + 1], host
    context_lens: tuple[int, ...]  # [S], host
    block_copies: tuple[tuple[int, int], ...] = ()

    @classmethod
    def one_sequence(
        cls,
        token_ids: list[int],
        start: int,
        *,
        device: torch.device,
        every_row: bool = False,
    ) -> Self:
        """`token_ids` at positions `start ..` of the sequence that owns block 0 of a cache.

        Logits of the last row, or of `every_row`. For the textbook loops, whose cache is one
        contiguous block.
        """
        num_tokens = len(token_ids)
        positions = torch.arange(start, start + num_tokens, dtype=torch.int32, device=device)
        first_row = 0 if every_row else num_tokens - 1
        return cls(
            token_ids=torch.tensor(token_ids, dtype=torch.int32, device=device),
            positions=positions,
            slot_mapping=positions,
            block_tables=torch.zeros(1, 1, dtype=torch.int32, device=device),
            logit_rows=torch.arange(first_row, num_tokens, dtype=torch.int32, device=device),
            query_starts=(0, num_tokens),
            context_lens=(start + num_tokens,),
        )
