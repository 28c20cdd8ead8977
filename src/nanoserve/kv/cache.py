"""Where keys and values live, and attention over them.

A cache has one surface: `begin(step)` once, then in every layer `append` and `attend`, then
`advance(step)`; beside them `reset` and `nbytes`. The forward pass never learns which cache it
holds. Layouts differ only in the size of a block (`contiguous`: one block of `max_model_len` a
sequence; `slots`: blocks of one position; `paged`: many) or keep nothing at all (`recompute`).
K and V are stored first and attended as stored, prefill included, so how a sequence was chunked
cannot change what it attends to. A step that does not fit raises before a byte is written.
"""

from __future__ import annotations

import itertools
from typing import Protocol

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.kernels.attention import attention
from nanoserve.kv.step import StepTensors

TORCH_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


class CacheFullError(RuntimeError):
    """A step addresses positions or slots that the cache does not have; nothing was written."""


class KVCache(Protocol):
    """What the model needs of a cache. `k`, `v`, `q` and the result of `attend` are [T, H, D]."""

    nbytes: int

    def begin(self, step: StepTensors) -> None: ...

    def append(self, layer: int, k: Tensor, v: Tensor, step: StepTensors) -> None: ...

    def attend(self, layer: int, q: Tensor, step: StepTensors) -> Tensor: ...

    def advance(self, step: StepTensors) -> None: ...

    def reset(self) -> None: ...


class LayerCount:
    """Counts the layers a step has appended, so that `advance` can tell a torn step."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.num_appended = 0

    def begin(self) -> None:
        self.num_appended = 0

    def append(self, layer: int) -> None:
        if layer != self.num_appended:
            raise RuntimeError(f"layer {layer} appended after {self.num_appended} layers")
        self.num_appended += 1

    def finish(self) -> None:
        if self.num_appended != self.num_layers:
            raise RuntimeError(f"{self.num_appended} of {self.num_layers} layers were appended")


class BlockCache:
    """Preallocated K and V, each [L, num_blocks + 1, H, block_size, D]; the last block is scratch.

    `torch.empty` reserves address space only: a page becomes memory when it is first written.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.scales = [config.attention_scale(layer) for layer in range(config.n_layer)]
        shape = (config.n_layer, num_blocks + 1, config.n_head, block_size, config.head_size)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.nbytes = self.keys.nbytes + self.values.nbytes
        self._layers = LayerCount(config.n_layer)
        self._tables: list[Tensor] = []  # per sequence: the blocks that hold its context, in order
        self._write_blocks = self._write_offsets = torch.empty(0, dtype=torch.long)

    def begin(self, step: StepTensors) -> None:
        """Check that the step fits, copy forked blocks, and resolve every address once.

        Raises CacheFullError before anything is written.
        """
        num_needed = [-(-n // self.block_size) for n in step.context_lens]
        if num_needed and max(num_needed) > step.block_tables.shape[1]:
            raise CacheFullError(
                f"a context of {max(step.context_lens)} positions needs {max(num_needed)} blocks "
                f"of {self.block_size}, its block table has {step.block_tables.shape[1]}"
            )
        for block in itertools.chain.from_iterable(step.block_copies):
            if not 0 <= block < self.num_blocks:
                raise CacheFullError(
                    f"block {block} is copied from or to, this cache has {self.num_blocks}"
                )
        slots = step.slot_mapping.long()
        if step.slot_mapping.device.type == "cpu" and slots.numel():
            self._check_slots(int(slots.min()), int(slots.max()))
        for source, destination in step.block_copies:
            self.keys[:, destination] = self.keys[:, source]
            self.values[:, destination] = self.values[:, source]
        self._write_blocks, self._write_offsets = slots // self.block_size, slots % self.block_size
        self._tables = [
            row[:n] for row, n in zip(step.block_tables.long(), num_needed, strict=True)
        ]
        self._layers.begin()

    def _check_slots(self, low: int, high: int) -> None:
        limit = (self.num_blocks + 1) * self.block_size
        if low < 0 or high >= limit:
            raise CacheFullError(
                f"slot {low if low < 0 else high} is outside this cache's {limit} "
                f"({self.num_blocks} blocks of {self.block_size} and a scratch block)"
            )

    def append(self, layer: int, k: Tensor, v: Tensor, step: StepTensors) -> None:
        """Store this step's k, v [T, H, D] at `slot_mapping`, rounded to the cache's dtype."""
        self._layers.append(layer)
        dtype = self.keys.dtype
        self.keys[layer][self._write_blocks, :, self._write_offsets] = k.to(dtype)
        self.values[layer][self._write_blocks, :, self._write_offsets] = v.to(dtype)

    def attend(self, layer: int, q: Tensor, step: StepTensors) -> Tensor:
        """Each sequence's q over its own context -> [T, H, D]; sequences never share a kernel call,
        so who else is in the step cannot change a sequence's attention.
        """
        out = torch.empty_like(q)
        for sequence, context_len in enumerate(step.context_lens):
            rows = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
            table = self._tables[sequence]
            k = self._context(self.keys[layer], table, context_len)
            v = self._context(self.values[layer], table, context_len)
            out[rows] = attention(q[rows], k, v, self.scales[layer])
        return out

    def _context(self, store: Tensor, table: Tensor, context_len: int) -> Tensor:
        """[H, N, D]: a view where one block holds the context, a gathered copy otherwise."""
        if table.shape[0] == 1:
            return store[table[0]][:, :context_len]
        blocks = store.index_select(0, table)  # [M, H, B, D]
        return blocks.transpose(0, 1).flatten(1, 2)[:, :context_len]

    def advance(self, step: StepTensors) -> None:
        """End the step; raises RuntimeError if a layer was left out."""
        self._layers.finish()

    def reset(self) -> None:
        """Forget everything. Nothing is cleared: what no block table names is never read."""
        self._tables = []

    def poison(self, blocks: list[int]) -> None:
        """Fill blocks with NaN, for tests: whoever reads a freed block then cannot hide it."""
        self.keys[:, blocks] = torch.nan
        self.values[:, blocks] = torch.nan


class RecomputeCache:
    """Keeps nothing from step to step: the naive arm. Every step brings each sequence whole.

    Within a step, a layer's K and V are held (rounded to the cache's dtype, as every cache does)
    from its `append` to its `attend`.
    """

    nbytes = 0

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.scales = [config.attention_scale(layer) for layer in range(config.n_layer)]
        self._layers = LayerCount(config.n_layer)
        self._keys = self._values = torch.empty(0)

    def begin(self, step: StepTensors) -> None:
        """Raises RuntimeError unless each sequence brings its whole context."""
        self._layers.begin()
        starts = step.query_starts
        lengths = tuple(b - a for a, b in itertools.pairwise(starts))
        if lengths != step.context_lens:
            raise RuntimeError(f"recompute needs whole contexts {step.context_lens}, got {lengths}")

    def append(self, layer: int, k: Tensor, v: Tensor, step: StepTensors) -> None:
        self._layers.append(layer)
        self._keys, self._values = k.to(self.dtype), v.to(self.dtype)

    def attend(self, layer: int, q: Tensor, step: StepTensors) -> Tensor:
        out = torch.empty_like(q)
        for first, last in itertools.pairwise(step.query_starts):
            k = self._keys[first:last].transpose(0, 1)  # [H, N, D]
            v = self._values[first:last].transpose(0, 1)
            out[first:last] = attention(q[first:last], k, v, self.scales[layer])
        return out

    def advance(self, step: StepTensors) -> None:
        self._layers.finish()
        self.reset()

    def reset(self) -> None:
        self._keys = self._values = torch.empty(0)
