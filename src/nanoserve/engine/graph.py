"""The graph executor: steps in which every sequence decodes one token, captured once and replayed.

A step is captured for each bucket, a number of sequences and an attention window; the smallest
bucket that fits is replayed, and its rows beyond the batch write to the scratch slot. Everything a
captured step reads or writes lies in buffers that one object owns (`DecodeGraphs`). Positions and
the choice of a bucket stay on the host; all that comes back of a step are the tokens, in one copy
(rows that are not plainly greedy: their logits). Steps with prompts run on the eager executor.
How a step is captured is a seam (`Capturer`): all else runs, and is tested, without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nanoserve.engine.batch import SAMPLED, Int32, StepBatch, StepResult
from nanoserve.engine.eager import EagerExecutor
from nanoserve.engine.executor import ExecutorSpec
from nanoserve.engine.sampling import sample, takes_raw_best
from nanoserve.kv.cache import BlockCache, DecodeView
from nanoserve.kv.step import StepTensors
from nanoserve.model.gpt2 import GPT2
from nanoserve.model.weights import WeightTensor

SMALLEST_WINDOW = 128
"""Positions; windows double from here to the longest context."""
NUM_WARM_UPS = 2
"""Runs of a step before it is captured: lazy set-up (compiling, workspaces) cannot be captured."""

Run = Callable[[], None]


class Capturer(Protocol):
    """Turns a step into something that can be replayed on the same buffers."""

    pool_bytes: int

    def capture(self, run: Run) -> Run:
        """Run `run` a few times and give what replays it."""
        ...


class CudaCapturer:
    """`torch.cuda.graph`, with one memory pool for all. Raises ValueError where there is no GPU."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ValueError("CUDA graphs need a GPU, and PyTorch finds none here")
        self.pool_bytes = 0
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(self, run: Run) -> Run:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(NUM_WARM_UPS):
                run()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            run()
        self.pool_bytes += max(0, torch.cuda.memory_reserved() - before)
        return graph.replay


class Bucket(NamedTuple):
    """Shapes that a step was captured for: sequences, and positions that each may attend to."""

    num_seqs: int
    window: int


class DecodeRows(NamedTuple):
    """One token of each of S sequences: what a decode step is told about them, on the host."""

    token_ids: Int32  # [S]
    positions: Int32  # [S]
    slots: Int32  # [S]
    tables: Int32  # [S, M]


def make_buckets(max_num_seqs: int, max_len: int) -> tuple[Bucket, ...]:
    """Every pair of a batch size and a window, smallest first; both double up to the limit."""
    return tuple(
        Bucket(num_seqs, window)
        for num_seqs in doublings(1, max_num_seqs)
        for window in doublings(SMALLEST_WINDOW, max_len)
    )


def doublings(first: int, limit: int) -> Iterable[int]:
    """`first`, twice that, ... and at last `limit`."""
    while first < limit:
        yield first
        first *= 2
    yield limit


class DecodeGraphs:
    """The captured steps of one model over one cache, and all buffers that they read and write.

    `capture_s` and `capturer.pool_bytes` say what capturing has cost so far.
    """

    def __init__(
        self,
        model: GPT2,
        cache: BlockCache,
        *,
        max_num_seqs: int,
        max_len: int,
        num_token_ids: int,
        capturer: Capturer,
    ) -> None:
        self.buckets = make_buckets(max_num_seqs, max_len)
        self.capturer = capturer
        self.capture_s = 0.0
        self._model, self._cache, self._num_token_ids = model, cache, num_token_ids
        device = model.device
        widest = max(self._num_ints(bucket) for bucket in self.buckets)
        self._ints = torch.zeros(widest, dtype=torch.int32, device=device)
        # Pinned, so that the one copy of a step does not stop the host.
        self._staged = torch.zeros(widest, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.logits = torch.empty(max_num_seqs, model.config.vocab_size, device=device)
        self.answers = torch.empty(max_num_seqs, 2, dtype=torch.int32, device=device)
        self._replays: dict[Bucket, Run] = {}

    def find(self, num_seqs: int, context_len: int) -> Bucket | None:
        """The smallest bucket that holds so many sequences and so long a context."""
        fitting = (b for b in self.buckets if b.num_seqs >= num_seqs and b.window >= context_len)
        return min(fitting, default=None)

    def capture_all(self) -> None:
        """Capture what was not captured yet, the largest first: smaller ones reuse its memory."""
        for bucket in reversed(self.buckets):
            self._replay_of(bucket)

    def replay(self, bucket: Bucket, rows: DecodeRows) -> None:
        """Run the step; what it gave lies in the first rows of `answers` and `logits`.

        Raises CacheFullError for slots that the cache does not have, before anything is written.
        """
        if len(rows.slots):
            self._cache.layout.check_slots(int(rows.slots.min()), int(rows.slots.max()))
        replay = self._replay_of(bucket)
        self._fill(bucket, rows)
        replay()

    def _replay_of(self, bucket: Bucket) -> Run:
        if bucket not in self._replays:
            started = time.perf_counter()
            nobody = np.zeros(0, np.int32)
            self._fill(bucket, DecodeRows(nobody, nobody, nobody, nobody.reshape(0, 0)))
            self._replays[bucket] = self.capturer.capture(self._step_of(bucket))
            self.capture_s += time.perf_counter() - started
        return self._replays[bucket]

    def _table_width(self, bucket: Bucket) -> int:
        return -(-bucket.window // self._cache.layout.block_size)

    def _num_ints(self, bucket: Bucket) -> int:
        return bucket.num_seqs * (3 + self._table_width(bucket))

    def _fill(self, bucket: Bucket, rows: DecodeRows) -> None:
        """Host to device in one copy; rows beyond the batch are token 0 in the scratch slot."""
        num_ints, num_seqs, given = self._num_ints(bucket), bucket.num_seqs, len(rows.slots)
        staged = self._staged[:num_ints].numpy()
        token_ids, positions, slots = staged[: 3 * num_seqs].reshape(3, num_seqs)
        tables = staged[3 * num_seqs :].reshape(num_seqs, -1)
        staged[:] = 0
        slots[given:] = self._cache.layout.scratch_slot
        tables[:] = self._cache.layout.num_blocks
        token_ids[:given], positions[:given], slots[:given] = rows[:3]
        width = min(tables.shape[1], rows.tables.shape[1])
        tables[:given, :width] = rows.tables[:, :width]
        self._ints[:num_ints].copy_(self._staged[:num_ints], non_blocking=True)

    def _step_of(self, bucket: Bucket) -> Run:
        """The step on static buffers: nothing in it allocates outside the pool or asks the host."""
        num_seqs = bucket.num_seqs
        token_ids, positions, slots = self._ints[: 3 * num_seqs].view(3, num_seqs)
        tables = self._ints[3 * num_seqs : self._num_ints(bucket)]
        step = StepTensors(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            block_tables=tables.view(num_seqs, -1),
            logit_rows=torch.arange(num_seqs, dtype=torch.int32, device=self._model.device),
            query_starts=tuple(range(num_seqs + 1)),
            context_lens=(),  # on the host nobody knows them when the step is replayed
        )
        view = DecodeView(self._cache, bucket.window)

        def run() -> None:
            logits = self._model(step, view)
            self.logits[:num_seqs] = logits
            self.answers[:num_seqs] = best_ids(logits, self._num_token_ids)

        return run


def best_ids(logits: Tensor, num_token_ids: int) -> Tensor:
    """Of each row [V] the token that `sampling.sample` gives greedily, and 1 if the row is finite.

    [S, 2] int32. Ties go to the lowest id; a row that is not finite gives token 0.
    """
    known = logits[:, :num_token_ids]
    best = known.amax(-1, keepdim=True)  # NaN where the row holds one
    ids = torch.arange(num_token_ids, device=logits.device)
    lowest = torch.where(known == best, ids, num_token_ids).amin(-1)
    finite = logits.amax(-1).isfinite() & (best[:, 0] > -torch.inf)
    return torch.stack([lowest.where(finite, 0), finite], dim=-1).int()


class GraphExecutor:
    """See `Executor`: eager in all but pure decode steps. `donor` shares its weights.

    Raises ValueError where there is no GPU and no `capturer` is given.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        tensors: Iterable[WeightTensor],
        donor: EagerExecutor | None = None,
        capturer: Capturer | None = None,
    ) -> None:
        self.spec = spec
        self.eager = EagerExecutor(spec, tensors, donor=donor)
        cache = self.eager.cache
        if not isinstance(cache, BlockCache):
            raise ValueError(f"--executor graph: a {spec.layout} cache has no step to replay")
        self._cache = cache
        self.graphs = DecodeGraphs(
            self.eager.model,
            cache,
            max_num_seqs=spec.max_num_seqs,
            max_len=spec.max_model_len,
            num_token_ids=spec.num_token_ids,
            capturer=capturer or CudaCapturer(),
        )

    @torch.inference_mode()
    def execute(self, batch: StepBatch) -> StepResult:
        if not self._replay(batch):
            return self.eager.execute(batch)
        return self._read(batch)

    @torch.inference_mode()
    def execute_with_logits(self, batch: StepBatch) -> tuple[StepResult, NDArray[np.float32]]:
        """See `Executor`."""
        if not self._replay(batch):
            return self.eager.execute_with_logits(batch)
        logits = self._logits(batch)
        return self._sample(batch, logits), logits

    def _replay(self, batch: StepBatch) -> bool:
        """Run the step from its graph; False, and nothing done, if no bucket holds it."""
        if batch.num_tokens != batch.num_seqs or batch.num_seqs == 0:
            return False
        bucket = self.graphs.find(batch.num_seqs, int(batch.context_lens.max()))
        if bucket is None:
            return False
        copies = batch.block_copies.tolist()
        self._check(batch, copies)
        self._cache.copy_blocks(copies)
        rows = (batch.token_ids, batch.positions, batch.slot_mapping, batch.block_tables)
        self.graphs.replay(bucket, DecodeRows(*rows))
        return True

    def _check(self, batch: StepBatch, copies: list[list[int]]) -> None:
        """Raise CacheFullError, before anything is written, for what the cache does not have."""
        layout = self._cache.layout
        layout.check_contexts(batch.context_lens.tolist(), batch.table_width)
        layout.check_copies(copies)
        layout.check_slots(int(batch.slot_mapping.min()), int(batch.slot_mapping.max()))
        if batch.table_width:
            layout.check_tables(int(batch.block_tables.min()), int(batch.block_tables.max()))

    def _read(self, batch: StepBatch) -> StepResult:
        """The only place where the host waits for the device."""
        greedy = all(takes_raw_best(s) and s.num_logprobs is None for s in batch.sampling)
        if not greedy or (batch.targets != SAMPLED).any():
            return self._sample(batch, self._logits(batch))
        answers = self.graphs.answers[: batch.num_seqs].cpu().numpy()[batch.logit_rows]
        return StepResult(
            token_ids=answers[:, 0],
            logprobs=np.full(len(answers), np.nan),
            top_logprobs=((),) * len(answers),
            finite=answers[:, 1].astype(np.bool_),
        )

    def _logits(self, batch: StepBatch) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.graphs.logits[: batch.num_seqs].cpu().numpy()
        return logits[batch.logit_rows]

    def _sample(self, batch: StepBatch, logits: NDArray[np.float32]) -> StepResult:
        return sample(
            logits,
            batch.targets,
            batch.sampling,
            batch.draws,
            num_token_ids=self.spec.num_token_ids,
        )

    def warm_up(self) -> None:
        """A step through the scratch block, and every bucket captured."""
        self.eager.warm_up()
        with torch.inference_mode():
            self.graphs.capture_all()

    def synchronize(self) -> None:
        self.eager.synchronize()

    def memory_stats(self) -> dict[str, int]:
        pool_bytes = self.graphs.capturer.pool_bytes
        return self.eager.memory_stats() | {"graph_pool_bytes": pool_bytes}

    def describe(self) -> dict[str, str]:
        return self.eager.describe() | {
            "executor": "graph",
            "kernels": f"{self._cache.codec.kernels.name} over block tables",
            "graphs": str(len(self.graphs.buckets)),
            "capture_s": f"{self.graphs.capture_s:.3f}",
        }

    def poison(self, blocks: list[int]) -> None:
        self.eager.poison(blocks)

    def close(self) -> None:
        self.eager.close()
