"""Where keys and values live, and attention over them: a cache is a layout x a codec.

A cache has one surface: `begin(step)` once, then in every layer `append` and `attend`, then
`advance(step)`; beside them `reset` and `nbytes`. The forward pass never learns which cache it
holds. `layouts` knows addresses, `codecs` knows numbers; `RecomputeCache` keeps nothing at all.
K and V are stored first and attended as stored, prefill included, so how a sequence was chunked
cannot change what it attends to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.kv.codecs import Codec, Store
from nanoserve.kv.layouts import BlockLayout
from nanoserve.kv.step import StepTensors


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
    """Preallocated stores of K and V, each [L, num_blocks + 1, H, block_size, ...].

    The last block is scratch. Allocating reserves address space only: on a CPU a page becomes
    memory when it is first written.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        codec: Codec,
        device: torch.device,
    ) -> None:
        self.layout = BlockLayout(num_blocks=num_blocks, block_size=block_size)
        self.codec = codec
        self.scales = [config.attention_scale(layer) for layer in range(config.n_layer)]
        shape = (config.n_layer, num_blocks + 1, config.n_head, block_size)
        self.keys = codec.allocate(shape, config.head_size, device)
        self.values = codec.allocate(shape, config.head_size, device)
        self.nbytes = sum(tensor.nbytes for tensor in (*self.keys, *self.values))
        self.layers = [
            (of_layer(self.keys, layer), of_layer(self.values, layer))
            for layer in range(config.n_layer)
        ]
        self._count = LayerCount(config.n_layer)
        self._tables: list[Tensor] = []
        self._slots = torch.empty(0, dtype=torch.long)

    def begin(self, step: StepTensors) -> None:
        """Check that the step fits, copy forked blocks, and resolve its addresses.

        Raises CacheFullError before anything is written.
        """
        self.layout.check(step)
        self.copy_blocks(step.block_copies)
        self._slots = step.slot_mapping.long()
        self._tables = self.layout.tables(step)
        self._count.begin()

    def copy_blocks(self, block_copies: Sequence[Sequence[int]]) -> None:
        """The first block of each pair over the second, in every layer."""
        for source, destination in block_copies:
            for tensor in (*self.keys, *self.values):
                tensor[:, destination] = tensor[:, source]

    def append(self, layer: int, k: Tensor, v: Tensor, step: StepTensors) -> None:
        """Store this step's k, v [T, H, D] at `slot_mapping`, as the codec stores them."""
        self._count.append(layer)
        keys, values = self.layers[layer]
        self.codec.append(k, keys, self._slots)
        self.codec.append(v, values, self._slots)

    def attend(self, layer: int, q: Tensor, step: StepTensors) -> Tensor:
        """Each sequence's q over its own context -> [T, H, D]; sequences never share a kernel call,
        so who else is in the step cannot change a sequence's attention.
        """
        keys, values = self.layers[layer]
        out = torch.empty_like(q)
        for sequence, context_len in enumerate(step.context_lens):
            rows = slice(step.query_starts[sequence], step.query_starts[sequence + 1])
            table = self._tables[sequence]
            k = tuple(self.layout.gather(tensor, table, context_len) for tensor in keys)
            v = tuple(self.layout.gather(tensor, table, context_len) for tensor in values)
            out[rows] = self.codec.attend(q[rows], k, v, self.scales[layer])
        return out

    def advance(self, step: StepTensors) -> None:
        """End the step; raises RuntimeError if a layer was left out."""
        self._count.finish()

    def reset(self) -> None:
        """Forget everything. Nothing is cleared: what no block table names is never read."""
        self._tables = []

    def poison(self, blocks: list[int]) -> None:
        """Make blocks read as NaN, for tests: whoever reads a freed block cannot hide it."""
        self.codec.poison(self.keys, blocks)
        self.codec.poison(self.values, blocks)


def of_layer(store: Store, layer: int) -> Store:
    """The part of a store [L, ...] that one layer has: views."""
    return tuple(tensor[layer] for tensor in store)


class DecodeView:
    """A `BlockCache` as a step of one token a sequence sees it: shapes fixed, nothing on the host.

    A context ends with its token, so its length is the token's position plus one, on the device.
    Contexts have at most `window` positions. Attention is one call for all sequences, which is what
    a CUDA graph can hold. Whoever uses it checks addresses and copies blocks beforehand.
    """

    def __init__(self, cache: BlockCache, window: int) -> None:
        self.nbytes = cache.nbytes
        self.window = window
        self._cache = cache
        self._slots = self._context_lens = torch.empty(0)

    def begin(self, step: StepTensors) -> None:
        self._slots, self._context_lens = step.slot_mapping.long(), step.positions + 1

    def append(self, layer: int, k: Tensor, v: Tensor, step: StepTensors) -> None:
        keys, values = self._cache.layers[layer]
        self._cache.codec.append(k, keys, self._slots)
        self._cache.codec.append(v, values, self._slots)

    def attend(self, layer: int, q: Tensor, step: StepTensors) -> Tensor:
        cache = self._cache
        return cache.codec.attend_paged(
            q,
            *cache.layers[layer],
            step.block_tables,
            self._context_lens,
            cache.scales[layer],
            self.window,
        )

    def advance(self, step: StepTensors) -> None:
        """Nothing: a step that was captured whole is never torn."""

    def reset(self) -> None:
        self._cache.reset()


class RecomputeCache:
    """Keeps nothing from step to step: the naive arm. Every step brings each sequence whole.

    Within a step, a layer's K and V are held (as the codec stores them, as in every cache) from its
    `append` to its `attend`.
    """

    nbytes = 0

    def __init__(self, config: ModelConfig, *, codec: Codec) -> None:
        self.codec = codec
        self.scales = [config.attention_scale(layer) for layer in range(config.n_layer)]
        self._count = LayerCount(config.n_layer)
        self._keys: Store = ()
        self._values: Store = ()

    def begin(self, step: StepTensors) -> None:
        """Raises RuntimeError unless each sequence brings its whole context."""
        self._count.begin()
        starts = step.query_starts
        lengths = tuple(b - a for a, b in itertools.pairwise(starts))
        if lengths != step.context_lens:
            raise RuntimeError(f"recompute needs whole contexts {step.context_lens}, got {lengths}")

    def append(self, layer: int, k: Tensor, v: Tensor, step: StepTensors) -> None:
        self._count.append(layer)
        self._keys, self._values = self.codec.encode(k), self.codec.encode(v)

    def attend(self, layer: int, q: Tensor, step: StepTensors) -> Tensor:
        out = torch.empty_like(q)
        for first, last in itertools.pairwise(step.query_starts):
            k = tuple(tensor[first:last].transpose(0, 1) for tensor in self._keys)  # [H, N, ...]
            v = tuple(tensor[first:last].transpose(0, 1) for tensor in self._values)
            out[first:last] = self.codec.attend(q[first:last], k, v, self.scales[layer])
        return out

    def advance(self, step: StepTensors) -> None:
        self._count.finish()
        self.reset()

    def reset(self) -> None:
        self._keys = self._values = ()
