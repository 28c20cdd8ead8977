"""Triton twins of `paged.paged_attention_reference` and its int8 form: one query a sequence.

Flash-decoding (Dao et al. 2023): each context is split, every split keeps a running softmax over
its tiles, and a second kernel weighs the splits by their maxima. int8 keys and values are read as
they are stored; a score, and a weight, is multiplied by its position's scale. What lies beyond a
context is never loaded.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 32
"""Positions that one program reads at a time."""
MIN_SPLIT = 128
"""A split of fewer positions costs more to weigh than it saves."""
WANTED_PROGRAMS = 512
"""Enough to fill a large GPU a few times over; a batch that has them is split no further."""


@triton.jit
def _split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    tables_ptr,
    lens_ptr,
    mixed_ptr,
    maxima_ptr,
    sums_ptr,
    scale,
    q_stride_s,
    q_stride_h,
    num_heads,
    block_size,
    table_width,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    INT8: tl.constexpr,
):
    sequence, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    context_len = tl.load(lens_ptr + sequence)
    per_split = (context_len + num_splits * TILE - 1) // (num_splits * TILE) * TILE
    first = split * per_split
    last = tl.minimum(first + per_split, context_len)
    d = tl.arange(0, BLOCK_D)
    q = tl.load(q_ptr + sequence * q_stride_s + head * q_stride_h + d, mask=d < D, other=0.0)
    q = q.to(tl.float32) * scale
    maximum, total = float("-inf"), 0.0
    mixed = tl.full((BLOCK_D,), 0.0, tl.float32)
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        live = position < last
        table = tables_ptr + sequence * table_width + position // block_size
        block = tl.load(table, mask=live, other=0).to(tl.int64)
        row = (block * num_heads + head) * block_size + position % block_size
        inside = live[:, None] & (d < D)[None, :]
        place = row[:, None] * D + d[None, :]
        k = tl.load(k_ptr + place, mask=inside, other=0.0).to(tl.float32)
        score = tl.sum(k * q[None, :], 1)
        if INT8:
            score = score * tl.load(k_scales_ptr + row, mask=live, other=0.0).to(tl.float32)
        score = tl.where(live, score, float("-inf"))
        highest = tl.maximum(maximum, tl.max(score, 0))
        kept = tl.exp(maximum - highest)
        weight = tl.exp(score - highest)
        total = total * kept + tl.sum(weight, 0)
        if INT8:
            weight = weight * tl.load(v_scales_ptr + row, mask=live, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + place, mask=inside, other=0.0).to(tl.float32)
        mixed = mixed * kept + tl.sum(weight[:, None] * v, 0)
        maximum = highest
    part = (sequence * num_heads + head) * num_splits + split
    tl.store(mixed_ptr + part * D + d, mixed, mask=d < D)
    tl.store(maxima_ptr + part, maximum)
    tl.store(sums_ptr + part, total)


@triton.jit
def _reduce_kernel(
    mixed_ptr,
    maxima_ptr,
    sums_ptr,
    out_ptr,
    num_heads,
    num_splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row = tl.program_id(0) * num_heads + tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    d = tl.arange(0, BLOCK_D)
    exists = split < num_splits
    part = row * num_splits + split
    # A split without positions has maximum -inf, hence weight 0. The first one is never empty.
    maxima = tl.load(maxima_ptr + part, mask=exists, other=float("-inf"))
    weight = tl.exp(maxima - tl.max(maxima, 0))
    total = tl.sum(weight * tl.load(sums_ptr + part, mask=exists, other=0.0), 0)
    inside = exists[:, None] & (d < D)[None, :]
    mixed = tl.load(mixed_ptr + part[:, None] * D + d[None, :], mask=inside, other=0.0)
    out = tl.sum(weight[:, None] * mixed, 0) / total
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)


def num_splits_of(num_seqs: int, num_heads: int, window: int) -> int:
    """Into how many parts each context is cut: a power of two, by shapes alone."""
    useful = max(1, window // MIN_SPLIT)
    wanted = max(1, WANTED_PROGRAMS // max(1, num_seqs * num_heads))
    return 1 << (min(useful, wanted).bit_length() - 1)


def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """See `paged.paged_attention_reference`."""
    return _launch(q, (k, k), (v, v), block_tables, context_lens, scale, window)


def paged_attention_int8(
    q: Tensor,
    k: Tensor,
    k_scales: Tensor,
    v: Tensor,
    v_scales: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """See `paged.paged_attention_int8_reference`."""
    return _launch(q, (k, k_scales), (v, v_scales), block_tables, context_lens, scale, window)


def _launch(
    q: Tensor,
    keys: tuple[Tensor, Tensor],
    values: tuple[Tensor, Tensor],
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    num_seqs, num_heads, head_size = q.shape
    block_size = keys[0].shape[2]
    tables = block_tables.contiguous()
    for tensor in (*keys, *values):
        assert tensor.is_contiguous(), "rows are addressed by number"
    assert q.stride(2) == 1, "a head's values lie side by side"
    num_splits = num_splits_of(num_seqs, num_heads, window)
    parts = (num_seqs, num_heads, num_splits)
    mixed = torch.empty(*parts, head_size, dtype=torch.float32, device=q.device)
    maxima, sums = torch.empty(2, *parts, dtype=torch.float32, device=q.device)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sizes = {"D": head_size, "BLOCK_D": triton.next_power_of_2(head_size)}
    if num_seqs == 0:
        return out
    _split_kernel[(num_seqs, num_heads, num_splits)](
        q,
        keys[0],
        values[0],
        keys[1],
        values[1],
        tables,
        context_lens,
        mixed,
        maxima,
        sums,
        scale,
        q.stride(0),
        q.stride(1),
        num_heads,
        block_size,
        tables.shape[1],
        **sizes,
        TILE=TILE,
        INT8=keys[0].dtype == torch.int8,
    )
    _reduce_kernel[(num_seqs, num_heads)](
        mixed, maxima, sums, out, num_heads, num_splits, **sizes, BLOCK_SPLITS=num_splits
    )
    return out
