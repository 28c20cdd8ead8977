"""The native executor: a whole step, from token ids to sampled tokens, in one call of the C++ core.

It keeps its own packed weights and its own cache, addressed by the engine's block ids, and needs no
PyTorch. Invariant: the bits of a row's logits depend on its own text alone, not on batch mates,
chunks, layout, threads or instruction set (docs/EXACTNESS.md). A step's arrays are passed as they
are; what is built here per step are a few pointers, and for each row what its sampling needs.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Sequence
from ctypes import sizeof
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nanoserve.engine.batch import (
    PARTS,
    SAMPLED,
    Int32,
    RowSampling,
    StepBatch,
    StepResult,
    scratch_batch,
)
from nanoserve.engine.executor import ExecutorSpec
from nanoserve.kernels.cpu import library
from nanoserve.kernels.cpu.library import MAX_TOP_LOGPROBS, Batch, Config, Library, Result, Row
from nanoserve.model.weights import WeightTensor
from nanoserve.planner.hardware import num_granted_cores
from nanoserve.request import SamplingParams

_NO_TOP_K = 0
_NO_LOGPROBS = -1
_MAX_PLAIN_ROWS = 1024
"""Parameters remembered in the core's form; a server sees the same few again and again."""

INT32_BYTES = 4
TARGETS = PARTS.index("targets")
ROW_DOUBLES, ROW_INTS = sizeof(Row) // 8, sizeof(Row) // 4
"""A row of the core, as an array of doubles or of int32 holds it."""

DRAW, TARGET = Row.draw.offset // 8, Row.target.offset // 4


class NativeExecutor:
    """See `Executor`. `donor` shares its weights, so that arms of a comparison hold them once.

    Raises ValueError for a model or a format that the core refuses, UnavailableError where no core
    can run, MemoryError where the weights do not fit.
    """

    def __init__(
        self,
        spec: ExecutorSpec,
        tensors: Iterable[WeightTensor],
        donor: NativeExecutor | None = None,
    ) -> None:
        self.spec = spec
        self.library = library.load()
        self.num_threads = spec.threads or num_granted_cores()
        scales = [spec.model.attention_scale(layer) for layer in range(spec.model.n_layer)]
        config = core_config(spec, self.num_threads)
        shares = donor is not None and can_share(donor, spec, self.library)
        handle = self.library.open(config, scales, donor.handle if donor and shares else None)
        # However this object ends, the core's memory and threads end with it, and only once.
        self._finalizer = weakref.finalize(self, self.library.call.ns_close, handle)
        self.handle: int = handle
        if not shares:
            put_weights(self.library, handle, tensors)
        self._num_private_blocks = config.num_blocks
        self._gives_blocks = spec.layout == "recompute"
        self._rows = RowEncoder()
        self.is_open = True  # the core holds the model, until `close`

    def execute(self, batch: StepBatch) -> StepResult:
        """Raises ValueError for a batch that addresses what is not there, before it writes a byte;
        RuntimeError where that is the cache's room.
        """
        return self._run(batch, logits=None)

    def execute_with_logits(
        self, batch: StepBatch, logits: NDArray[np.float32] | None = None
    ) -> tuple[StepResult, NDArray[np.float32]]:
        """`execute`, and the raw logits [R, V] beside it: for tests, which compare their bytes, and
        for whoever times them, into memory of the caller's own. Raises ValueError, too, for memory
        that does not hold just these.
        """
        logits = self._room_for_logits(batch, logits)
        return self._run(batch, logits), logits

    def compute_logits(
        self, batch: StepBatch, logits: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """The raw logits [R, V] of a step, the bytes of `execute_with_logits`; no row is sampled.

        For whoever wants logits of every position. Raises as `execute_with_logits` does.
        """
        logits = self._room_for_logits(batch, logits)
        batch = self._runnable(batch)
        only = Result(None, None, None, None, None, address_of(logits))
        self.library.check(
            self.library.call.ns_step, self.handle, core_batch(batch, array("d")), only
        )
        return logits

    def attend(
        self,
        batch: StepBatch,
        q: NDArray[np.float32],
        k: NDArray[np.float32],
        v: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None:
        """The attention of a step alone: in every layer `k` and `v` are stored, then `q` attends.

        All are [T, C]; `out` takes the last layer's result. For benchmarks, which thus time this
        part of a step and fill a cache with what they know. Raises as `execute` does, and
        ValueError for a batch that wants logits or has more than 512 tokens.
        """
        if not self.is_open:
            raise RuntimeError("this executor was closed")
        shape = (batch.num_tokens, self.spec.model.n_embd)
        for name, given in {"q": q, "k": k, "v": v, "out": out}.items():
            check_floats(name, given, shape, is_written=given is out)
        self.library.check(
            self.library.call.ns_attend,
            self.handle,
            core_batch(batch, array("d")),
            *map(address_of, (q, k, v, out)),
        )

    def _room_for_logits(
        self, batch: StepBatch, logits: NDArray[np.float32] | None
    ) -> NDArray[np.float32]:
        shape = (batch.num_rows, self.spec.model.vocab_size)
        if logits is None:
            logits = np.empty(shape, dtype=np.float32)
        check_floats("logits", logits, shape, is_written=True)
        return logits

    def _runnable(self, batch: StepBatch) -> StepBatch:
        """With blocks, where the layout has none of its own."""
        if not self.is_open:
            raise RuntimeError("this executor was closed")
        return self._give_blocks(batch) if self._gives_blocks else batch

    def _run(self, batch: StepBatch, logits: NDArray[np.float32] | None) -> StepResult:
        batch = self._runnable(batch)
        first, stop = batch.starts[TARGETS : TARGETS + 2]
        targets = memoryview(batch.integers)[first:stop]
        rows = self._rows.encode(batch.sampling, targets, batch.uniforms)
        answer = Answer(batch.num_rows, wants_top=self._rows.wants_top)
        self.library.check(
            self.library.call.ns_step,
            self.handle,
            core_batch(batch, rows),
            answer.result(logits),
        )
        return answer.read(batch.sampling, self.spec.model.vocab_size)

    def _give_blocks(self, batch: StepBatch) -> StepBatch:
        """Of the recompute layout: a block of `max_model_len` for each sequence, for this step.

        Raises RuntimeError unless each sequence brings its whole context.
        """
        lengths = np.diff(batch.query_starts)
        if not np.array_equal(lengths, batch.context_lens):
            raise RuntimeError(
                f"recompute needs whole contexts {batch.context_lens.tolist()}, "
                f"got {lengths.tolist()}"
            )
        num_seqs, block_size = len(lengths), self.spec.max_model_len
        if num_seqs > self._num_private_blocks:
            self._num_private_blocks = 0  # of a cache that there is no memory for
            self.library.check(self.library.call.ns_resize_cache, self.handle, block_size, num_seqs)
            self._num_private_blocks = num_seqs
        blocks = np.arange(num_seqs, dtype=np.int32)
        slots = np.repeat(blocks * np.int32(block_size), lengths) + batch.positions
        return batch.with_arrays(slot_mapping=slots, block_tables=blocks.reshape(-1, 1))

    def warm_up(self) -> None:
        """One token through the scratch block, drawn and thrown away."""
        self.execute(scratch_batch(self.spec.block_size, self.spec.num_blocks))

    def synchronize(self) -> None:
        """Nothing: a step is over when `execute` returns."""

    def memory_stats(self) -> dict[str, int]:
        """Weights may be shared with a donor. What recompute holds within a step is scratch."""
        call, handle = self.library.call, self.handle
        cache_bytes: int = call.ns_cache_bytes(handle)
        scratch_bytes: int = call.ns_scratch_bytes(handle)
        if self.spec.layout == "recompute":
            cache_bytes, scratch_bytes = 0, scratch_bytes + cache_bytes
        return {
            "weights_bytes": call.ns_weights_bytes(handle),
            "cache_bytes": cache_bytes,
            "scratch_bytes": scratch_bytes,
        }

    def describe(self) -> dict[str, str]:
        return {
            "executor": "native",
            "kernels": f"C++ {self.library.isa}",
            "threads": str(self.num_threads),
            **({"quantization": self.spec.quantization} if self.spec.quantization else {}),
        }

    def poison(self, blocks: list[int]) -> None:
        if blocks and self.spec.layout != "recompute":
            ids = np.array(blocks, dtype=np.int32)
            self.library.call.ns_poison(self.handle, address_of(ids), len(ids))

    def close(self) -> None:
        """Give memory and threads back; closing again does nothing, a step then raises."""
        self.is_open = False
        self._finalizer()


def core_config(spec: ExecutorSpec, num_threads: int) -> Config:
    """The spec as the core wants it. `recompute` starts with one private block.

    Raises ValueError for a size that is no int32, which ctypes would cut.
    """
    model = spec.model
    keeps = spec.layout != "recompute"
    values: dict[str, float] = {
        "vocab_size": model.vocab_size,
        "n_positions": model.n_positions,
        "n_embd": model.n_embd,
        "n_layer": model.n_layer,
        "n_head": model.n_head,
        "n_inner": model.n_inner,
        "activation": library.ACTIVATIONS[model.activation_function],
        "tie_word_embeddings": model.tie_word_embeddings,
        "layer_norm_epsilon": model.layer_norm_epsilon,
        "weights": library.WEIGHTS[spec.quantization or spec.dtype],
        "cache": library.STORED[spec.cache_dtype],
        "block_size": spec.block_size if keeps else spec.max_model_len,
        "num_blocks": spec.num_blocks + 1 if keeps else 1,
        "num_threads": num_threads,
        "num_token_ids": spec.num_token_ids,
    }
    for name, value in values.items():
        if value >= 2**31:
            raise ValueError(f"{name} must be below 2**31 on the native executor, got {value}")
    return Config(**values)


def core_batch(batch: StepBatch, rows: array[float]) -> Batch:
    """The core's view of a step. It points into `batch` and `rows`, which must outlive it."""
    start, _ = batch.integers.buffer_info()
    where = [start + INT32_BYTES * first for first in batch.starts]
    token_ids, positions, slots, queries, contexts, logit_rows, _, copies, tables, _ = where
    return Batch(
        batch.num_tokens,
        batch.num_seqs,
        batch.table_width,
        batch.num_rows,
        (tables - copies) // (2 * INT32_BYTES),
        0,
        token_ids,
        positions,
        slots,
        queries,
        contexts,
        tables,
        logit_rows,
        copies,
        rows.buffer_info()[0],
    )


def can_share(donor: NativeExecutor, spec: ExecutorSpec, core: Library) -> bool:
    """Whether the donor still has packed weights, and they are what `spec` asks for."""
    theirs = donor.spec
    is_ready = donor.library is core and donor.is_open
    return is_ready and (theirs.model, theirs.dtype, theirs.quantization) == (
        spec.model,
        spec.dtype,
        spec.quantization,
    )


def put_weights(core: Library, handle: int, tensors: Iterable[WeightTensor]) -> None:
    """Pack the tensors one at a time: the checkpoint is never held beside the packed weights."""
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.data)
        rows, cols = data.shape if data.ndim == 2 else (1, data.size)
        core.check(
            core.call.ns_put,
            handle,
            tensor.name.encode(),
            address_of(data),
            library.STORED[tensor.dtype],
            rows,
            cols,
        )
    core.check(core.call.ns_ready, handle)


def check_floats(
    name: str, values: NDArray[np.float32], shape: tuple[int, ...], *, is_written: bool
) -> None:
    """Raise ValueError unless the core may take this array: it sees an address and nothing else."""
    if values.shape != shape or values.dtype != np.float32:
        raise ValueError(f"{name} must be float32 {shape}, got {values.dtype} {values.shape}")
    if not values.flags.c_contiguous:
        raise ValueError(f"{name} must lie without gaps, row after row")
    if is_written and not values.flags.writeable:
        raise ValueError(f"{name} is read-only, and would be written")


def address_of(values: NDArray[np.generic]) -> int:
    """Where an array's values lie. The caller keeps the array alive while the address is used."""
    interface = values.__array_interface__
    assert interface["strides"] is None, "the core reads arrays without gaps"
    address: int = interface["data"][0]
    return address


class PlainRow(NamedTuple):
    """The numbers of some parameters, in the core's form. `suffices` if they have nothing else."""

    params: SamplingParams  # kept alive, so that its `id` is not used again
    encoded: bytes
    suffices: bool


class RowEncoder:
    """Rows of a step as the core reads them, and whatever their pointers point to.

    Most rows carry nothing but numbers, the same at every step: these are made once per
    `SamplingParams` and copied.
    """

    def __init__(self) -> None:
        self.wants_top = False
        self._plain: dict[int, PlainRow] = {}
        self._kept: list[array[int] | array[float]] = []

    def encode(
        self, sampling: Sequence[RowSampling], targets: memoryview, draws: array[float]
    ) -> array[float]:
        """[R] rows of the step, end to end; valid, like `wants_top`, until the next call.

        `targets` are R int32.
        """
        self.wants_top = False
        self._kept.clear()
        rows = array("d", b"".join([self._encode_row(row) for row in sampling]))
        if rows:
            rows[DRAW::ROW_DOUBLES] = draws
            memoryview(rows).cast("B").cast("i")[TARGET::ROW_INTS] = targets
        return rows

    def _encode_row(self, sampling: RowSampling) -> bytes:
        plain = self._plain.get(id(sampling.params)) or self._plain_row(sampling.params)
        masked, num_logprobs = sampling.masked_token_ids, sampling.num_logprobs
        if plain.suffices and num_logprobs is None and not masked:
            return plain.encoded
        params, row = sampling.params, Row.from_buffer_copy(plain.encoded)
        if num_logprobs is not None:
            row.num_logprobs = num_logprobs
            self.wants_top |= num_logprobs > 0
        if params.penalises:
            row.prompt, row.num_prompt = self._keep(array("i", sampling.prompt_token_ids))
            row.output, row.num_output = self._keep(array("i", sampling.output_token_ids))
        row.bias_ids, row.num_biases = self._keep(array("i", params.logit_bias))
        row.biases, _ = self._keep(array("d", params.logit_bias.values()))
        row.masked, row.num_masked = self._keep(array("i", masked))
        return bytes(row)

    def _plain_row(self, params: SamplingParams) -> PlainRow:
        if len(self._plain) >= _MAX_PLAIN_ROWS:
            self._plain.clear()
        suffices = not (params.penalises or params.logit_bias)
        self._plain[id(params)] = made = PlainRow(params, plain_row(params), suffices)
        return made

    def _keep(self, values: array[int] | array[float]) -> tuple[int, int]:
        """Address and number of values, kept until the next step."""
        self._kept.append(values)
        return values.buffer_info()


def plain_row(params: SamplingParams) -> bytes:
    """A row that has numbers only. A `top_k` beyond any vocabulary keeps everything, so is off."""
    top_k = params.top_k if params.top_k is not None and params.top_k < 2**31 else _NO_TOP_K
    return bytes(
        Row(
            temperature=params.temperature,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            top_k=top_k,
            num_logprobs=_NO_LOGPROBS,
        )
    )


class Answer:
    """Where the core writes the tokens of R rows, and the alternatives of those that want some."""

    def __init__(self, num_rows: int, *, wants_top: bool) -> None:
        # One allocation, the widest first so that each part is aligned.
        memory = array("d", bytes(16 * max(1, num_rows)))
        self._start, _ = memory.buffer_info()
        self.logprobs = np.frombuffer(memory, np.float64, num_rows)
        self.token_ids = np.frombuffer(memory, np.int32, num_rows, 8 * num_rows)
        self.finite = np.frombuffer(memory, np.bool_, num_rows, 12 * num_rows)
        self._top_ids: Int32 | None = None
        if wants_top:
            self._top_ids = np.empty((num_rows, MAX_TOP_LOGPROBS), dtype=np.int32)
            self._top_logprobs = np.empty((num_rows, MAX_TOP_LOGPROBS), dtype=np.float64)

    def result(self, logits: NDArray[np.float32] | None = None) -> Result:
        """The core's view of it; `logits` [R, V] takes the raw rows, if they are wanted."""
        num_rows, start = len(self.finite), self._start
        top_ids = self._top_ids
        return Result(
            start + 8 * num_rows,
            start,
            start + 12 * num_rows,
            None if top_ids is None else address_of(top_ids),
            None if top_ids is None else address_of(self._top_logprobs),
            None if logits is None else address_of(logits),
        )

    def read(self, sampling: Sequence[RowSampling], vocab_size: int) -> StepResult:
        """What was written. No alternatives for a row that asked for none or is not finite."""
        top: tuple[tuple[tuple[int, float], ...], ...] = ((),) * len(self.finite)
        if self._top_ids is not None:
            wanted = [min(row.num_logprobs or 0, vocab_size) for row in sampling]
            rows = zip(self._top_ids, self._top_logprobs, wanted, self.finite.tolist(), strict=True)
            top = tuple(
                tuple(zip(ids[:num].tolist(), logprobs[:num].tolist(), strict=True)) if ok else ()
                for ids, logprobs, num, ok in rows
            )
        return StepResult(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            top_logprobs=top,
            finite=self.finite,
        )


class PreparedRow:
    """One row of logits, ready for the core's sampler alone: for tests, and for whoever times it.

    The logits [V] are read where they lie, at every `draw`. Ids from `num_token_ids` on (None:
    no such ids) are never drawn; with a `target` that token is scored instead. Raises ValueError
    for logits that are not a row of float32 without gaps, and for ids outside it.
    """

    def __init__(
        self,
        core: Library,
        logits: NDArray[np.float32],
        sampling: RowSampling,
        draw: float,
        *,
        num_token_ids: int | None = None,
        target: int = SAMPLED,
    ) -> None:
        vocab_size = logits.size
        check_floats("logits", logits, (vocab_size,), is_written=False)
        if num_token_ids is None:
            num_token_ids = vocab_size
        if not 1 <= num_token_ids <= vocab_size or target >= vocab_size:
            raise ValueError(
                f"{num_token_ids} ids to draw, target {target}: the row has {vocab_size} logits"
            )
        self._logits, self._sampling = logits, sampling
        self._encoder = RowEncoder()  # it keeps what the row points to
        rows = self._encoder.encode(
            (sampling,), memoryview(array("i", [target])), array("d", [draw])
        )
        self._answer = Answer(1, wants_top=self._encoder.wants_top)
        self._function = core.call.ns_sample
        self._arguments = (
            address_of(logits),
            vocab_size,
            num_token_ids,
            Row.from_buffer(rows),
            self._answer.result(),
        )

    def draw(self) -> None:
        """The one call, on this thread. Raises RuntimeError where the core has no memory for it."""
        status = self._function(*self._arguments)
        if status:
            raise RuntimeError(f"the core could not sample a row (status {status})")

    def read(self) -> StepResult:
        """What was drawn last, in the memory that the next `draw` writes to."""
        return self._answer.read((self._sampling,), len(self._logits))
