"""Attention against its obvious form, activations against transformers'."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from nanoserve.config import ACTIVATIONS as NAMES
from nanoserve.kernels.activations import ACTIVATIONS
from nanoserve.kernels.attention import attention, attention_reference

N, H = 37, 2
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest difference, as a share of the largest value: some units in the last place."""


def drawn(
    num_queries: int, head_size: int, q_dtype: torch.dtype, kv_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q [Q, H, D], k and v [H, N, D], peaked enough that the mask and the softmax matter."""
    generator = torch.Generator().manual_seed(num_queries * 1000 + head_size)
    q = 3 * torch.randn(num_queries, H, head_size, generator=generator)
    k, v = torch.randn(2, H, N, head_size, generator=generator)
    return q.to(q_dtype), k.to(kv_dtype), v.to(kv_dtype)


def exact(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Written once more in float64, one query at a time: [Q, H, D]."""
    rows = []
    for index, query in enumerate(q.double()):
        visible = N - len(q) + index + 1
        scores = torch.einsum("hd,hnd->hn", query, k[:, :visible].double()) * scale
        rows.append(torch.einsum("hn,hnd->hd", scores.softmax(-1), v[:, :visible].double()))
    return torch.stack(rows)


@pytest.mark.parametrize("num_queries", [1, 2, 16, N - 1, N])
@pytest.mark.parametrize("head_size", [1, 2, 3, 64, 80, 96, 120, 128])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_attention_is_its_reference(dtype: torch.dtype, head_size: int, num_queries: int) -> None:
    q, k, v = drawn(num_queries, head_size, dtype, dtype)
    scale = head_size**-0.5
    expected = exact(q, k, v, scale)
    for form in (attention, attention_reference):
        got = form(q, k, v, scale)
        assert got.dtype == dtype
        assert got.shape == q.shape
        error = float((got.double() - expected).abs().max())
        assert error < BOUNDS[dtype] * float(expected.abs().max()), form


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_queries", [1, 5, N])
def test_a_narrow_cache_is_attended_in_the_wider_precision(
    num_queries: int, kv_dtype: torch.dtype
) -> None:
    q, k, v = drawn(num_queries, 16, torch.float32, kv_dtype)
    expected = exact(q, k, v, 0.25)
    for form in (attention, attention_reference):
        got = form(q, k, v, 0.25)
        assert got.dtype == torch.float32
        assert float((got.double() - expected).abs().max()) < 1e-5


def test_a_mask_aligned_to_the_first_key_would_be_noticed() -> None:
    q, k, v = drawn(5, 16, torch.float32, torch.float32)
    wrong = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k, v, is_causal=True, scale=0.25
    ).transpose(0, 1)
    assert float((wrong - attention(q, k, v, 0.25)).abs().max()) > 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_queries", [1, 5, N])
def test_scores_beyond_half_precisions_range_are_no_trouble(
    num_queries: int, dtype: torch.dtype
) -> None:
    """q.k of 96,000, unscaled, overflows fp16 (65,504); in fp32 the softmax is merely peaked."""
    q = torch.full((num_queries, H, 96), 100.0, dtype=dtype)
    k = torch.full((H, N, 96), 10.0, dtype=dtype)
    v = torch.ones(H, N, 96, dtype=dtype)
    for form in (attention, attention_reference):
        assert torch.equal(form(q, k, v, 1.0), torch.ones_like(q)), form


def test_every_activation_is_transformers() -> None:
    assert set(ACTIVATIONS) == set(NAMES)
    x = torch.linspace(-8, 8, 4001)
    for name, function in ACTIVATIONS.items():
        torch.testing.assert_close(function(x), ACT2FN[name](x), atol=2e-6, rtol=1e-5)


def test_the_two_forms_of_gelu_differ() -> None:
    """By enough to move logits; `gelu` and `gelu_new` must not be one another."""
    x = torch.linspace(-4, 4, 401)
    assert float((ACTIVATIONS["gelu"](x) - ACTIVATIONS["gelu_new"](x)).abs().max()) > 1e-4
