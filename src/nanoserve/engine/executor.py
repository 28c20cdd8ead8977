"""What an executor is: the one face every backend has, and what it is built from.

`eager`, `graph` and `native` differ in how a step is computed and in nothing else; the engine holds
whichever it was given and never asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nanoserve.config import CacheDtype, Dtype, Kernels, Layout, ModelConfig, Quantization
from nanoserve.engine.batch import StepBatch, StepResult

Backend = Literal["eager", "graph", "native"]
"""The executors there are; `config.ExecutorName` has "auto" beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSpec:
    """Everything a backend must know before it sees a weight; all values resolved, no "auto".

    `block_size` x (`num_blocks` + 1 scratch block) positions are addressable; both are 0 for
    `recompute`. `quantization` None: weights in `dtype`. `num_token_ids`: ids from there on are
    unknown to the tokenizer and never drawn. `max_num_seqs` is the most that a step may have
    (buffers of a captured step are made for as many).
    """

    model: ModelConfig
    executor: Backend
    dtype: Dtype
    quantization: Quantization | None
    cache_dtype: CacheDtype
    layout: Layout
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    device: str
    kernels: Kernels
    threads: int | None
    num_token_ids: int

    @property
    def has_equal_bits(self) -> bool:
        """Whether a row's logits are the same bits in every way, by definition (EXACTNESS.md)."""
        return self.executor == "native"

    @property
    def is_exact(self) -> bool:
        """Whether every way of this executor must emit equal tokens.

        Elsewhere half precision and int8 round by the shape of a step, and a near tie may part.
        """
        return self.has_equal_bits or {self.dtype, self.cache_dtype} == {"float32"}


class Executor(Protocol):
    """Runs steps."""

    spec: ExecutorSpec

    def execute(self, batch: StepBatch) -> StepResult:
        """Append, attend, sample: the only device-to-host point of a step is the result."""
        ...

    def execute_with_logits(self, batch: StepBatch) -> tuple[StepResult, NDArray[np.float32]]:
        """`execute`, and the raw logits [R, V] beside it: for whoever compares them."""
        ...

    def warm_up(self) -> None:
        """Run a real step, so that the first request does not pay for lazy set-up."""
        ...

    def synchronize(self) -> None:
        """Return when the device has nothing left to do."""
        ...

    def memory_stats(self) -> dict[str, int]:
        """Bytes by purpose: at least `weights_bytes` and `cache_bytes` (reserved, not touched)."""
        ...

    def describe(self) -> dict[str, str]:
        """What really runs: executor, kernels, library versions, threads."""
        ...

    def poison(self, blocks: list[int]) -> None:
        """Fill freed blocks with NaN; for tests, which must notice whoever reads them."""
        ...

    def close(self) -> None:
        """Give memory and threads back."""
        ...
