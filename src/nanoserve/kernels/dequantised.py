"""Attention over an int8 cache the usual way: read it back as floating point, then attend to that.

What a kernel that attends to int8 directly is measured against, and how long the same attention
takes over a cache in float32. Buffers are made once and only read and written afterwards, so
whoever times a call allocates nothing but the result. PyTorch is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

Float32 = NDArray[np.float32]
Attend = Callable[[int, int], Float32]
"""(sequences, context) -> [S, H, D]: what the queries of so many sequences make of every layer's
first keys and values, the last layer's result."""


def quantise(values: Float32) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """(int8 values, a float16 scale for each vector [..., D]): symmetric, as the caches store it.

    A value is divided by the scale as it was rounded, and clipped to +-127.
    """
    scales = (np.abs(values).max(axis=-1) / np.float32(127)).astype(np.float16)
    divisor = np.where(scales == 0, 1, scales).astype(np.float32)[..., None]
    steps = np.clip(np.rint(values / divisor), -127, 127)
    return steps.astype(np.int8), scales


def dequantise(steps: NDArray[np.int8], scales: NDArray[np.float16]) -> Float32:
    """Inverse of `quantise`, but for what it rounded away."""
    values: Float32 = steps.astype(np.float32) * scales.astype(np.float32)[..., None]
    return values


class TorchAttention:
    """PyTorch's fused attention, `num_layers` times over K and V of its own.

    `q` is [S, H, D], `k` and `v` are [S, H, N, D]: the same in every layer, but each layer has its
    copy, because that is what has to be read. `scale` is what q.k is multiplied by.
    """

    def __init__(
        self, q: Float32, k: Float32, v: Float32, *, num_layers: int, scale: float
    ) -> None:
        import torch
        from torch.nn import functional

        self._inference_mode = torch.inference_mode
        self._fused = functional.scaled_dot_product_attention
        self._scale = scale
        self._q = torch.from_numpy(q)[:, :, None]  # [S, H, 1, D]
        self._plain = [
            torch.from_numpy(given).expand(num_layers, *given.shape).clone() for given in (k, v)
        ]
        self._steps, self._scales = [], []
        for given in (k, v):
            steps, scales = (torch.from_numpy(part) for part in quantise(given))
            self._steps.append(steps.expand(num_layers, *steps.shape).clone())
            self._scales.append(scales.expand(num_layers, *scales.shape).clone())
        self._scratch = [torch.empty(given.shape) for given in (k, v)]  # of one layer

    def over_float32(self, num_seqs: int, context: int) -> Float32:
        """Over K and V in float32."""
        for k, v in zip(*self._plain, strict=True):
            mixed = self._attend(num_seqs, k[:num_seqs, :, :context], v[:num_seqs, :, :context])
        return mixed

    def over_int8(self, num_seqs: int, context: int) -> Float32:
        """Over int8 K and V, each layer's read back to float32 before it is attended to."""
        for layer in range(len(self._steps[0])):
            k, v = (
                self._read_back(part, layer, num_seqs, context) for part in range(len(self._steps))
            )
            mixed = self._attend(num_seqs, k, v)
        return mixed

    def _read_back(self, part: int, layer: int, num_seqs: int, context: int) -> Tensor:
        target = self._scratch[part][:num_seqs, :, :context]
        target.copy_(self._steps[part][layer, :num_seqs, :, :context])
        return target.mul_(self._scales[part][layer, :num_seqs, :, :context, None])

    def _attend(self, num_seqs: int, k: Tensor, v: Tensor) -> Float32:
        with self._inference_mode():
            mixed = self._fused(self._q[:num_seqs], k, v, scale=self._scale)
        result: Float32 = mixed[:, :, 0].numpy()
        return result
