"""Causal attention of one sequence: the slow, obvious form, its fast twin, and one over int8.

All take queries at positions `N - Q .. N - 1` over keys and values at `0 .. N - 1`, so a whole
prefill (Q = N), a chunk appended to a filled cache (1 < Q < N) and a decode step (Q = 1) are the
same call. Softmax is in fp32 whatever the storage.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
"""Positions of int8 that are floats at a time: there is never a float copy of the whole context."""


def attention_reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale + causal mask) v, written out in fp32.

    q: [Q, H, D]; k, v: [H, N, D] -> [Q, H, D] in q's dtype.
    """
    num_queries, context_len = q.shape[0], k.shape[1]
    scores = q.float().transpose(0, 1) @ k.float().transpose(1, 2) * scale  # [H, Q, N]
    visible = torch.ones(num_queries, context_len, dtype=torch.bool, device=q.device)
    visible = visible.tril(context_len - num_queries)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return (weights @ v.float()).transpose(0, 1).to(q.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """`attention_reference` through PyTorch's fused kernel.

    `is_causal=True` aligns its mask to the *first* key, which is right only for a whole prefill;
    a chunk over a filled cache needs the offset mask, a single query none at all.
    Computed in the wider of the two dtypes, so K and V enter exactly as they are stored.
    """
    num_queries, context_len = q.shape[0], k.shape[1]
    dtype = torch.promote_types(q.dtype, k.dtype)
    mask = None
    if 1 < num_queries < context_len:
        mask = torch.ones(num_queries, context_len, dtype=torch.bool, device=q.device)
        mask = mask.tril(context_len - num_queries)
    mixed = F.scaled_dot_product_attention(
        q.to(dtype).transpose(0, 1)[None],  # [1, H, Q, D]
        k.to(dtype)[None],
        v.to(dtype)[None],
        attn_mask=mask,
        is_causal=num_queries == context_len and num_queries > 1,
        scale=scale,
    )
    return mixed[0].transpose(0, 1).to(q.dtype)


class Quantised(NamedTuple):
    """Keys or values as int8: `values` [H, N, D] stand for themselves times `scales` [H, N]."""

    values: Tensor
    scales: Tensor


def attention_int8(q: Tensor, k: Quantised, v: Quantised, scale: float) -> Tensor:
    """`attention_reference` on int8 as it is stored: q: [Q, H, D] -> [Q, H, D] in q's dtype.

    A score is summed over a key's integers and then multiplied by its scale; a value's scale is
    multiplied into its softmax weight. So a tile of integers becomes floats, and no more.
    """
    num_queries, context_len = q.shape[0], k.values.shape[1]
    query = q.float().transpose(0, 1) * scale  # [H, Q, D]
    tiles = [slice(first, first + TILE) for first in range(0, context_len, TILE)]
    products = [query @ k.values[:, tile].float().transpose(1, 2) for tile in tiles]
    scores = torch.cat(products, -1) * k.scales.float()[:, None]  # [H, Q, N]
    if num_queries > 1:
        visible = torch.ones(num_queries, context_len, dtype=torch.bool, device=q.device)
        scores.masked_fill_(~visible.tril(context_len - num_queries), float("-inf"))
    weights = scores.softmax(dim=-1) * v.scales.float()[:, None]
    mixed = torch.zeros_like(query)
    for tile in tiles:
        mixed += weights[:, :, tile] @ v.values[:, tile].float()
    return mixed.transpose(0, 1).to(q.dtype)
