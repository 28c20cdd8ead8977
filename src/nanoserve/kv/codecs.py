"""Codecs: how the numbers of a key or value are stored. They know nothing of who owns a position.

What a codec allocates is a store: one tensor of values [..., D] (`plain`), or values and float16
scales [...] (`int8`), all with the layout's leading dimensions, so a layout addresses every tensor
of a store alike. Keys and values are rounded once, on append, and attended as they are stored.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanoserve.kernels import paged
from nanoserve.kernels.attention import Quantised, attention, attention_int8
from nanoserve.kernels.paged import PagedKernels

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

Store = tuple[Tensor, ...]


class Codec(Protocol):
    """One way to store keys and values, and to attend over them without undoing it."""

    kernels: PagedKernels

    def allocate(self, shape: tuple[int, ...], head_size: int, device: torch.device) -> Store:
        """Room for as many rows of D values as `shape` [...] has places."""
        ...

    def encode(self, x: Tensor) -> Store:
        """x [..., D] as a store of its own, as `append` would store it."""
        ...

    def append(self, x: Tensor, store: Store, slots: Tensor) -> None:
        """Put x [T, H, D] at `slots` [T] of one layer's store [P, H, B, ...]."""
        ...

    def attend(self, q: Tensor, k: Store, v: Store, scale: float) -> Tensor:
        """One sequence's q [Q, H, D] over its context, stores [H, N, ...] -> [Q, H, D]."""
        ...

    def attend_paged(
        self,
        q: Tensor,
        k: Store,
        v: Store,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        """One q a sequence [S, H, D] over stores [P, H, B, ...] -> [S, H, D]; see `paged`."""
        ...

    def poison(self, store: Store, blocks: list[int]) -> None:
        """NaN into blocks of a store [L, P, H, B, ...]: whoever reads them cannot hide it."""
        ...


class PlainCodec:
    """Values as floats of one dtype."""

    def __init__(self, dtype: torch.dtype, kernels: PagedKernels = paged.TORCH) -> None:
        self.dtype, self.kernels = dtype, kernels

    def allocate(self, shape: tuple[int, ...], head_size: int, device: torch.device) -> Store:
        return (torch.empty((*shape, head_size), dtype=self.dtype, device=device),)

    def encode(self, x: Tensor) -> Store:
        return (x.to(self.dtype),)

    def append(self, x: Tensor, store: Store, slots: Tensor) -> None:
        self.kernels.append(x, store[0], slots)

    def attend(self, q: Tensor, k: Store, v: Store, scale: float) -> Tensor:
        return attention(q, k[0], v[0], scale)

    def attend_paged(
        self,
        q: Tensor,
        k: Store,
        v: Store,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        return self.kernels.attend(q, k[0], v[0], block_tables, context_lens, scale, window)

    def poison(self, store: Store, blocks: list[int]) -> None:
        store[0][:, blocks] = torch.nan


class Int8Codec:
    """Values as int8 with a float16 scale for each token and head; see `paged.quantise`."""

    def __init__(self, kernels: PagedKernels = paged.TORCH) -> None:
        self.kernels = kernels

    def allocate(self, shape: tuple[int, ...], head_size: int, device: torch.device) -> Store:
        values = torch.empty((*shape, head_size), dtype=torch.int8, device=device)
        return values, torch.empty(shape, dtype=torch.float16, device=device)

    def encode(self, x: Tensor) -> Store:
        return paged.quantise(x)

    def append(self, x: Tensor, store: Store, slots: Tensor) -> None:
        self.kernels.append_int8(x, store[0], store[1], slots)

    def attend(self, q: Tensor, k: Store, v: Store, scale: float) -> Tensor:
        return attention_int8(q, Quantised(*k), Quantised(*v), scale)

    def attend_paged(
        self,
        q: Tensor,
        k: Store,
        v: Store,
        block_tables: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int,
    ) -> Tensor:
        (keys, k_scales), (values, v_scales) = k, v
        return self.kernels.attend_int8(
            q, keys, k_scales, values, v_scales, block_tables, context_lens, scale, window
        )

    def poison(self, store: Store, blocks: list[int]) -> None:
        store[1][:, blocks] = torch.nan


def codec_of(dtype: str, kernels: PagedKernels = paged.TORCH) -> Codec:
    """The codec of a cache dtype, by its name in `config.CacheDtype`."""
    return Int8Codec(kernels) if dtype == "int8" else PlainCodec(TORCH_DTYPES[dtype], kernels)
