"""nanoserve as a peer among others: its executors, step by step, without scheduler or engine.

Steps are what the engine would ask for: the paged cache in its blocks of 16, one `StepBatch` each.
They end with the token drawn, where others stop at the logits; only a prefill with all logits stops
there too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

import nanoserve
from nanoserve.bench.measure import Arm
from nanoserve.bench.peers.face import (
    DUMMY_SEED,
    Cell,
    Floats,
    Sequences,
    Setup,
    SteppingPeer,
    Tokens,
    UnsupportedError,
    timed_prefill,
)
from nanoserve.config import CacheConfig, CacheDtype, EngineConfig, Quantization, SchedulerConfig
from nanoserve.engine.batch import SAMPLED, RowSampling, StepBatch, StepResult, pack_batch
from nanoserve.engine.build import build_parts
from nanoserve.engine.native import NativeExecutor
from nanoserve.request import SamplingParams

CACHE: Mapping[str, CacheDtype] = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "int8-weight-only": "int8",
    "int4": "int8",
}
"""What K and V are stored in beside weights of each precision."""

QUANTIZED: Mapping[str, Quantization] = {
    "int8": "int8",
    "int8-weight-only": "int8-weight-only",
    "int4": "int4",
}
NUM_SEQS = 64
"""Full windows the cache has room for: all sequences of all cells, many times over."""

ROW = RowSampling(params=SamplingParams(temperature=0.0), prompt_token_ids=(), output_token_ids=())
"""Of every row: its likeliest token."""


def engine_config(setup: Setup) -> EngineConfig:
    """`variant` "eager" runs PyTorch; else the executor is whatever `auto` takes."""
    return EngineConfig(
        model=setup.model,
        load_format=setup.load_format,
        dummy_seed=DUMMY_SEED,
        device="cpu",
        dtype="bfloat16" if setup.precision == "bfloat16" else "float32",
        quantization=QUANTIZED.get(setup.precision),
        executor="eager" if setup.variant == "eager" else "auto",
        threads=setup.threads,
        cache=CacheConfig(layout="paged", dtype=CACHE[setup.precision]),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS),
    )


class OwnPeer(SteppingPeer):
    """See `Peer`. Blocks are handed out as they are needed and never come back: a worker serves few
    cells, and memory that nobody touches is left to the other engines.
    """

    def __init__(self, setup: Setup) -> None:
        parts = build_parts(engine_config(setup))
        self.executor, self.vocab_size = parts.executor, parts.model_config.vocab_size
        self._next_block = 0
        self._logits: Floats | None = None

    def describe(self) -> Mapping[str, str]:
        spec = self.executor.spec
        return {
            "version": nanoserve.__version__,
            **self.executor.describe(),
            "KV cache": f"{spec.layout}, {spec.cache_dtype}",
        }

    def begin(self, prompts: Sequence[Tokens]) -> Sequences:
        sequences = OwnSequences(self, len(prompts))
        sequences.append(prompts)
        return sequences

    def take_blocks(self, num_blocks: int) -> range:
        """So many that nobody has. Raises MemoryError where the cache holds no more."""
        first, self._next_block = self._next_block, self._next_block + num_blocks
        held = self.executor.spec.num_blocks
        if self._next_block > held:
            raise MemoryError(
                f"the cache holds {held} blocks, {self._next_block} are wanted: free some memory"
            )
        return range(first, self._next_block)

    def logits(self, prompt: Tokens) -> Floats:
        return self.computed_logits(OwnSequences(self, 1).batch([prompt], num_rows=len(prompt)))

    def computed_logits(self, step: StepBatch) -> Floats:
        """Raw logits [R, V], in memory that is kept for the next call. Raises UnsupportedError on
        an executor that keeps them to itself.
        """
        if not isinstance(self.executor, NativeExecutor):
            raise UnsupportedError("only the native executor shows raw logits")
        shape = (step.num_rows, self.vocab_size)
        if self._logits is None or self._logits.shape != shape:
            self._logits = np.empty(shape, dtype=np.float32)
        return self.executor.compute_logits(step, self._logits)

    def prefill_arm(self, cell: Cell) -> Arm:
        (prompt,) = cell.prompts(self.vocab_size)
        num_rows = len(prompt) if cell.all_logits else 1
        step = OwnSequences(self, 1).batch([prompt], num_rows=num_rows)
        if cell.all_logits:
            self.computed_logits(step)
            return timed_prefill(lambda: None, lambda: self.computed_logits(step))
        return timed_prefill(lambda: None, lambda: self.executor.execute(step))


class OwnSequences:
    """See `Sequences`. All are of one length, and so is what a step brings to each."""

    def __init__(self, peer: OwnPeer, num_seqs: int) -> None:
        self._peer, self._executor = peer, peer.executor
        self._tables: list[list[int]] = [[] for _ in range(num_seqs)]
        self._length = 0
        self._result: StepResult | None = None

    def batch(self, texts: Sequence[Tokens], *, num_rows: int = 1) -> StepBatch:
        """A step that appends these texts, of one length, with logits of each one's last rows."""
        num_seqs, num_new, block_size = len(texts), len(texts[0]), self._executor.spec.block_size
        stop = self._length + num_new
        width = -(-stop // block_size)
        for table in self._tables:
            table.extend(self._peer.take_blocks(max(0, width - len(table))))
        positions = range(self._length, stop)
        starts = range(0, num_new * num_seqs + 1, num_new)
        rows = [end - back for end in starts[1:] for back in range(num_rows, 0, -1)]
        tables = [table[:width] for table in self._tables]
        slots = [
            t[p // block_size] * block_size + p % block_size for t in tables for p in positions
        ]
        parts = [
            [token for text in texts for token in text],
            list(positions) * num_seqs,
            slots,
            list(starts),
            [stop] * num_seqs,
            rows,
            [SAMPLED] * len(rows),
            [],
            [block for table in tables for block in table],
        ]
        return pack_batch(
            parts,
            table_width=width,
            sampling=(ROW,) * len(rows),
            draws=[0.0] * len(rows),
        )

    def append(self, texts: Sequence[Tokens]) -> StepResult:
        """Compute so many more tokens of each."""
        self._result = self._executor.execute(self.batch(texts))
        self._length += len(texts[0])
        return self._result

    def step(self, token_ids: Tokens) -> StepResult:
        return self.append([(token,) for token in token_ids])

    def chosen(self) -> list[int]:
        assert self._result is not None, "nothing was computed yet"
        return [int(token) for token in self._result.token_ids]

    def rewind(self, length: int) -> None:
        self._length = length
