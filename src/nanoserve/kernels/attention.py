"""Causal attention of one sequence: the slow, obvious form and its fast twin, one signature.

Both take queries at positions `N - Q .. N - 1` over keys and values at `0 .. N - 1`, so a whole
prefill (Q = N), a chunk appended to a filled cache (1 < Q < N) and a decode step (Q = 1) are the
same call. Softmax is in fp32 whatever the storage.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
