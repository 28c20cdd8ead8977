"""Keys and values in blocks: storing them, and one query a sequence over a block table.

The slow, obvious PyTorch form of what `triton_append` and `triton_attention` do on a GPU, with the
same signatures. Shapes are fixed by the arguments' shapes and `window` alone, so a step made of
these can be captured in a CUDA graph. A store is `values` [P, H, B, D] of P blocks and, in int8,
float16 `scales` [P, H, B]. Slot `p * B + i` is place i of block p. Whatever an unused slot holds,
NaN included, is never read into a result.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_INT8 = 127.0
TILE = 128
"""Positions converted at a time: int8 is never a float copy of the whole context."""


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> int8 [..., D] and float16 scales [...]: symmetric, one scale for each row.

    scale = float16(max |x| / 127), and x is divided by the scale *as rounded*, ties to even. A row
    that is not finite has a NaN scale, so whoever reads it sees that; one of zeros has scale 0.
    """
    x = x.float()
    magnitude = x.abs().amax(-1) + (x * 0).sum(-1)  # the sum is 0, or NaN where x is not finite
    scales = (magnitude / MAX_INT8).half()
    steps = x / scales.float()[..., None]
    steps = steps.clamp(-MAX_INT8, MAX_INT8).round()  # rounding the scale down can pass 127
    return steps.where(scales[..., None] > 0, 0).to(torch.int8), scales


def append_reference(x: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store x [T, H, D] at `slots` [T], rounded to the store's dtype."""
    block_size = values.shape[2]
    slots = slots.long()
    values[slots // block_size, :, slots % block_size] = x.to(values.dtype)


def append_int8_reference(x: Tensor, values: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Quantise x [T, H, D] and store it and its scales [T, H] at `slots` [T]."""
    integers, new_scales = quantise(x)
    append_reference(integers, values, slots)
    block_size = values.shape[2]
    slots = slots.long()
    scales[slots // block_size, :, slots % block_size] = new_scales


def paged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """softmax(q k^T * scale) v of one query a sequence: q [S, H, D] -> [S, H, D] in q's dtype.

    k, v: stores. block_tables [S, M] name the blocks of each context in order; context_lens [S]
    are between 1 and `window`, itself at most M * B. Softmax and sums in fp32.
    """
    return _attend(q, (k, None), (v, None), block_tables, context_lens, scale, window)


def paged_attention_int8_reference(
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
    """The same over int8: q.k is summed over the integers and then scaled."""
    return _attend(q, (k, k_scales), (v, v_scales), block_tables, context_lens, scale, window)


_Store = tuple[Tensor, Tensor | None]


def _attend(
    q: Tensor,
    keys: _Store,
    values: _Store,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    positions = torch.arange(window, device=q.device)
    visible = positions < context_lens[:, None]  # [S, N]
    query = (q.float() * scale)[:, :, :, None]  # [S, H, D, 1]
    tiles = [slice(first, min(first + TILE, window)) for first in range(0, window, TILE)]
    scores = [
        _scaled((part @ query)[..., 0], scales)
        for part, scales in (_read(keys, block_tables, positions[tile]) for tile in tiles)
    ]
    masked = torch.cat(scores, -1).masked_fill(~visible[:, None], float("-inf"))
    weights = masked.softmax(-1)  # [S, H, N]
    mixed = torch.zeros_like(q, dtype=torch.float32)
    for tile in tiles:
        part, scales = _read(values, block_tables, positions[tile])
        unused = ~visible[:, None, tile]
        share = _scaled(weights[:, :, tile], scales).masked_fill(unused, 0.0)
        mixed += (share[:, :, None] @ part.masked_fill(unused[..., None], 0.0))[:, :, 0]
    return mixed.to(q.dtype)


def _read(store: _Store, tables: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """What lies at `positions` [N] of each sequence: floats [S, H, N, D] and scales [S, H, N]."""
    values, scales = store
    block_size = values.shape[2]
    blocks = tables.long()[:, positions // block_size]  # [S, N]
    offsets = (positions % block_size).expand_as(blocks)
    part = values[blocks, :, offsets].transpose(1, 2).float()
    return part, None if scales is None else scales[blocks, :, offsets].transpose(1, 2).float()


def _scaled(x: Tensor, scales: Tensor | None) -> Tensor:
    return x if scales is None else x * scales


class PagedKernels(NamedTuple):
    """One implementation of everything above; `name` is what a record says ran."""

    name: str
    append: Callable[[Tensor, Tensor, Tensor], None]
    append_int8: Callable[[Tensor, Tensor, Tensor, Tensor], None]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int], Tensor]
    attend_int8: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int], Tensor
    ]


TORCH = PagedKernels(
    "torch",
    append_reference,
    append_int8_reference,
    paged_attention_reference,
    paged_attention_int8_reference,
)


def choose_kernels(name: str, device: str) -> PagedKernels:
    """`torch`, `triton`, or `auto`: Triton's on a GPU where they can run, else PyTorch's.

    Raises ValueError for Triton's asked for by name where they cannot run; a fallback of `auto` on
    a GPU is logged once.
    """
    if name == "torch" or (name == "auto" and device != "cuda"):
        return TORCH
    obstacle = triton_obstacle(device)
    if obstacle is None:
        return load_triton()
    if name == "triton":
        raise ValueError(f"--kernels triton: {obstacle} (--kernels torch works)")
    return _fall_back(obstacle)


def triton_obstacle(device: str) -> str | None:
    """Why Triton's kernels cannot run here; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'nanoserve[cuda]')"
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"they need a GPU, got --device {device}"
    return None


@functools.cache
def _fall_back(obstacle: str) -> PagedKernels:
    logger.warning("PyTorch's attention kernels are used; Triton's: %s", obstacle)
    return TORCH


@functools.cache
def load_triton() -> PagedKernels:
    """The GPU twins; Triton is imported here and not before."""
    from nanoserve.kernels import triton_append, triton_attention

    return PagedKernels(
        "triton",
        triton_append.append,
        triton_append.append_int8,
        triton_attention.paged_attention,
        triton_attention.paged_attention_int8,
    )
