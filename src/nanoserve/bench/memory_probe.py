"""One probe of a memory: `batch` sequences of `context` tokens, in a process that lives for it.

`python -m nanoserve.bench.memory_probe` reads a `ProbeRequest` as JSON, prints a `ProbeReport` and
exits 0, or exits `OUT_OF_MEMORY` where the allocator refused; anything else is a fault of the
probe, never an answer. On a CPU the weights are packed under a donor before the limit is set, so
what loading needs for a moment cannot fake a ceiling. Then a cache of exactly that size is made,
one block of K and V is computed and copied to all others, so that every page is written with real
values, and every sequence decodes one token at its full context.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from nanoserve.config import (
    CacheConfig,
    CacheDtype,
    Dtype,
    EngineConfig,
    ExecutorName,
    LoadFormat,
    SchedulerConfig,
)
from nanoserve.engine.batch import SAMPLED, Int32, RowSampling, StepBatch, batch_of
from nanoserve.engine.build import make_executor, resolve_spec, weight_tensors
from nanoserve.engine.executor import Executor, ExecutorSpec
from nanoserve.engine.native import NativeExecutor
from nanoserve.kernels.cpu import library
from nanoserve.model.generation import load_tokenizer
from nanoserve.model.hub import find
from nanoserve.model.weights import WeightTensor, load_model_config
from nanoserve.planner.model import kv_bytes_per_token
from nanoserve.request import SamplingParams

OUT_OF_MEMORY = 3
"""Exit code of a probe whose memory ran out: the only failure that answers the question."""

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What is to fit. `limit_bytes` None: as much as the system gives.

    On a GPU the limit comes from outside, through the allocator's environment.
    """

    model: str
    load_format: LoadFormat
    device: str
    executor: ExecutorName
    dtype: Dtype
    cache_dtype: CacheDtype
    threads: int
    batch: int
    context: int
    limit_bytes: int | None

    @property
    def blocks_per_sequence(self) -> int:
        return -(-self.context // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        return self.batch * self.blocks_per_sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Bytes of a probe that fitted.

    `peak_bytes` is what the limit counts, once the largest step was done: on a CPU private writable
    memory (RLIMIT_DATA), of which everything the step needed is still held; on a GPU the peak of
    PyTorch's allocator. `runtime_bytes` is the same before a model was there: interpreter,
    libraries, tokenizer. `written_bytes` are the pages that making and filling the cache made
    resident, `scratch_bytes` the buffers of the largest step. The rest are the executor's own
    counts.
    """

    runtime_bytes: int
    peak_bytes: int
    written_bytes: int
    weights_bytes: int
    cache_bytes: int
    scratch_bytes: int
    device_bytes: int | None = None


def probe(request: ProbeRequest) -> ProbeReport:
    """Raises MemoryError where the limit is met, ValueError for a request that cannot be one."""
    return probe_cpu(request) if request.device == "cpu" else probe_gpu(request)


def probe_cpu(request: ProbeRequest) -> ProbeReport:
    """By what the kernel counts of this process."""
    spec, small = make_spec(request), make_spec(request, is_donor=True)
    library.load()
    runtime = memory_use()
    donor = NativeExecutor(small, tensors_of(request, small))
    if request.limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (request.limit_bytes, request.limit_bytes))
    before = memory_use()
    executor = NativeExecutor(spec, (), donor=donor)
    donor.close()
    write_every_page(executor, request)
    after, stats = memory_use(), executor.memory_stats()
    return ProbeReport(
        runtime_bytes=runtime["VmData"],
        peak_bytes=after["VmData"],
        written_bytes=after["RssAnon"] - before["RssAnon"],
        weights_bytes=stats["weights_bytes"],
        cache_bytes=stats["cache_bytes"],
        scratch_bytes=stats["scratch_bytes"],
    )


def probe_gpu(request: ProbeRequest) -> ProbeReport:
    """By what PyTorch's allocator counts of its own."""
    spec = make_spec(request)
    executor = make_executor(spec, tensors_of(request, spec), None)
    write_every_page(executor, request)
    executor.synchronize()
    stats = executor.memory_stats()
    weights_bytes, cache_bytes = stats["weights_bytes"], stats["cache_bytes"]
    return ProbeReport(
        runtime_bytes=0,
        peak_bytes=stats["peak_bytes"],
        written_bytes=stats["peak_bytes"] - weights_bytes,
        weights_bytes=weights_bytes,
        cache_bytes=cache_bytes,
        scratch_bytes=stats["peak_bytes"] - weights_bytes - cache_bytes,
        device_bytes=stats["device_bytes"],
    )


def memory_use() -> dict[str, int]:
    """Bytes this process has by /proc: `VmData` private and writable, `RssAnon` of it resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {name: int(values[name].split()[0]) * 1024 for name in ("VmData", "RssAnon")}


def engine_config(request: ProbeRequest, *, is_donor: bool) -> EngineConfig:
    """An engine whose cache has just the probe's blocks; a donor's has one, and no threads.

    A thread's stack counts under the limit, which is set while the donor still lives.
    """
    num_blocks = 1 if is_donor else request.num_blocks
    context = min(BLOCK_SIZE, request.context) if is_donor else request.context
    model = load_model_config(find(request.model, load_format=request.load_format))
    block_bytes = BLOCK_SIZE * kv_bytes_per_token(model, request.cache_dtype)
    return EngineConfig(
        model=request.model,
        load_format=request.load_format,
        device="cpu" if request.device == "cpu" else "cuda",
        dtype=request.dtype,
        executor=request.executor,
        threads=1 if is_donor else request.threads,
        cache=CacheConfig(
            dtype=request.cache_dtype,
            block_size=BLOCK_SIZE,
            memory_bytes=num_blocks * block_bytes,
        ),
        scheduler=SchedulerConfig(max_num_seqs=request.batch, max_model_len=context),
    )


def make_spec(request: ProbeRequest, *, is_donor: bool = False) -> ExecutorSpec:
    """What the probe's executor is, or the one that packs its weights."""
    checkpoint = find(request.model, load_format=request.load_format)
    config = engine_config(request, is_donor=is_donor)
    return resolve_spec(config, load_model_config(checkpoint), load_tokenizer(checkpoint, None))


def tensors_of(request: ProbeRequest, spec: ExecutorSpec) -> Iterable[WeightTensor]:
    checkpoint = find(request.model, load_format=request.load_format)
    config = EngineConfig(model=request.model, load_format=request.load_format)
    return weight_tensors(config, checkpoint, spec.model)


def write_every_page(executor: Executor, request: ProbeRequest) -> None:
    """K and V in every block of every sequence, then a decode step of all at full context.

    A prompt fills the first block in chunks no longer than the batch, so that the decode is the
    largest step. Raises RuntimeError for logits that are not finite.
    """
    prompt = np.arange(min(BLOCK_SIZE, request.context), dtype=np.int32)
    first = np.arange(request.num_blocks, dtype=np.int32)
    tables = first.reshape(request.batch, request.blocks_per_sequence)
    nothing = np.zeros((0, 2), dtype=np.int32)
    for start in range(0, len(prompt), request.batch):
        chunk = prompt[start : start + request.batch]
        executor.execute(step(tables[:1], chunk, nothing))
    copies = np.stack([np.zeros_like(first), first], axis=1)[1:]
    last = np.full(request.batch, request.context - 1, dtype=np.int32)
    result = executor.execute(step(tables, last, np.ascontiguousarray(copies)))
    if not result.finite.all():
        raise RuntimeError("the probe's logits are not finite")


def step(tables: Int32, positions: Int32, copies: Int32) -> StepBatch:
    """Sequences that advance by as many rows each as `positions` has for them; a token for each."""
    num_seqs, num_rows = len(tables), len(positions)
    each = num_rows // num_seqs
    starts = np.arange(0, num_rows + 1, each, dtype=np.int32)
    last_rows = starts[1:] - 1
    owners = np.repeat(np.arange(num_seqs), each)
    blocks = tables[owners, positions // BLOCK_SIZE]
    greedy = RowSampling(
        params=SamplingParams(temperature=0.0), prompt_token_ids=(), output_token_ids=()
    )
    return batch_of(
        token_ids=np.zeros(num_rows, dtype=np.int32),
        positions=positions,
        slot_mapping=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE).astype(np.int32),
        query_starts=starts,
        context_lens=(positions[last_rows] + 1).astype(np.int32),
        block_tables=tables,
        logit_rows=last_rows.astype(np.int32),
        targets=np.full(num_seqs, SAMPLED, dtype=np.int32),
        block_copies=copies,
        sampling=(greedy,) * num_seqs,
        draws=np.zeros(num_seqs),
    )


def out_of_memory(error: BaseException) -> int:
    print(str(error) or "the interpreter has no memory left", file=sys.stderr)
    return OUT_OF_MEMORY


def main() -> int:
    """The exit code; see the module's first lines."""
    try:
        report = probe(ProbeRequest(**json.load(sys.stdin)))
    except MemoryError as error:
        return out_of_memory(error)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which is not imported here
            raise
        return out_of_memory(error)
    print(json.dumps(asdict(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
