"""The eager executor: the PyTorch forward pass, one operation after another.

It is the reference every faster executor is compared with, and runs wherever PyTorch does.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve.engine.batch import StepBatch, StepResult, scratch_batch
from nanoserve.engine.executor import ExecutorSpec
from nanoserve.engine.sampling import sample
from nanoserve.kernels.paged import choose_kernels
from nanoserve.kv.cache import BlockCache, KVCache, RecomputeCache
from nanoserve.kv.codecs import codec_of
from nanoserve.kv.step import StepTensors
from nanoserve.model.gpt2 import GPT2
from nanoserve.model.weights import WeightTensor

SDPA = "PyTorch scaled_dot_product_attention"
MAX_LOGIT_ROWS = 64
"""Rows of logits held at once: scoring a prompt must not need [N, V] (196 MiB at 1,024)."""


class EagerExecutor:
    """See `Executor`. `donor` shares its weights, so arms of a comparison hold them once.

    It can only where they lie in the same dtype on the same device.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        tensors: Iterable[WeightTensor],
        donor: EagerExecutor | None = None,
    ) -> None:
        self.spec = spec
        self.model: GPT2
        if spec.threads is not None:
            torch.set_num_threads(spec.threads)
        if spec.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "--device cuda: PyTorch finds no CUDA device here (--device cpu works)"
            )
        device = torch.device(spec.device)
        if donor and (donor.spec.dtype, donor.spec.device) == (spec.dtype, spec.device):
            self.model = donor.model
        else:
            self.model = GPT2.load(spec.model, tensors, dtype=spec.dtype, device=device)
        self.cache = make_cache(spec, device)

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepResult:
        hidden = self.model.hidden(step_tensors(batch, self.model.device), self.cache)
        slices = [self._sample(batch, hidden, rows) for rows in logit_slices(len(batch.targets))]
        return slices[0] if len(slices) == 1 else concatenate(slices)

    @torch.inference_mode()
    def execute_with_logits(self, batch: StepBatch) -> tuple[StepResult, NDArray[np.float32]]:
        """See `Executor`."""
        hidden = self.model.hidden(step_tensors(batch, self.model.device), self.cache)
        logits = self.model.logits(hidden).cpu().numpy()
        slices = [self._sample(batch, hidden, rows) for rows in logit_slices(len(batch.targets))]
        return concatenate(slices), logits

    def _sample(self, batch: StepBatch, hidden: Tensor, rows: slice) -> StepResult:
        logits = self.model.logits(hidden[rows])
        return sample(
            logits.cpu().numpy(),
            batch.targets[rows],
            batch.sampling[rows],
            batch.draws[rows],
            num_token_ids=self.spec.num_token_ids,
        )

    def warm_up(self) -> None:
        """One token through the scratch block, drawn and thrown away."""
        self.execute(scratch_batch(self.spec.block_size, self.spec.num_blocks))

    def synchronize(self) -> None:
        if self.spec.device == "cuda":
            torch.cuda.synchronize()

    def memory_stats(self) -> dict[str, int]:
        stats = {"weights_bytes": self.model.nbytes, "cache_bytes": self.cache.nbytes}
        return stats | (gpu_memory() if self.spec.device == "cuda" else {})

    def describe(self) -> dict[str, str]:
        return {
            "executor": "eager",
            "kernels": attention_name(self.spec),
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
        }

    def poison(self, blocks: list[int]) -> None:
        if isinstance(self.cache, BlockCache):
            self.cache.poison(blocks)

    def close(self) -> None:
        self.cache.reset()


def gpu_memory() -> dict[str, int]:
    """The most that tensors held at once in this process, and what the device has."""
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "device_bytes": torch.cuda.get_device_properties().total_memory,
    }


def logit_slices(num_rows: int) -> list[slice]:
    return [slice(first, first + MAX_LOGIT_ROWS) for first in range(0, num_rows, MAX_LOGIT_ROWS)]


def make_cache(spec: ExecutorSpec, device: torch.device) -> KVCache:
    """Layout x codec, as the spec names them. Raises ValueError for kernels that cannot run."""
    codec = codec_of(spec.cache_dtype, choose_kernels(spec.kernels, spec.device))
    if spec.layout == "recompute":
        return RecomputeCache(spec.model, codec=codec)
    return BlockCache(
        spec.model,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        codec=codec,
        device=device,
    )


def attention_name(spec: ExecutorSpec) -> str:
    """What attends over one sequence at a time."""
    return "PyTorch, on int8" if spec.cache_dtype == "int8" else SDPA


def step_tensors(batch: StepBatch, device: torch.device) -> StepTensors:
    """The integers on the device, the lengths on the host."""

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepTensors(
        token_ids=on_device(batch.token_ids),
        positions=on_device(batch.positions),
        slot_mapping=on_device(batch.slot_mapping),
        block_tables=on_device(batch.block_tables),
        logit_rows=on_device(batch.logit_rows),
        query_starts=tuple(batch.query_starts.tolist()),
        context_lens=tuple(batch.context_lens.tolist()),
        block_copies=tuple(map(tuple, batch.block_copies.tolist())),
    )


def concatenate(results: list[StepResult]) -> StepResult:
    """The slices of one step's rows, in order; no slice is a step without logits."""
    empty = np.zeros(0)
    return StepResult(
        token_ids=np.concatenate([empty.astype(np.int32), *(r.token_ids for r in results)]),
        logprobs=np.concatenate([empty, *(r.logprobs for r in results)]),
        top_logprobs=tuple(top for r in results for top in r.top_logprobs),
        finite=np.concatenate([empty.astype(np.bool_), *(r.finite for r in results)]),
    )
