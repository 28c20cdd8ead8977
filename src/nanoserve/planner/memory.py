"""How many sequences fit into a memory beside the weights; sizes as people write and read them.

Two views of one sum, fixed + per sequence x batch + KV(batch, context). A `MemoryPlan` counts
everything from the model's shape, for a machine that need not be there. A `MemoryModel` has its
first terms from probes of an executor that ran (`nanoserve bench memory`). K and V are exact in
both.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass
from fractions import Fraction

from nanoserve.config import ModelConfig
from nanoserve.planner.model import dtype_bytes, kv_bytes_per_token, stored_weight_bytes

LOGIT_ROWS = 64
"""Rows of logits that an executor holds at once; more rows are computed in turns."""

PREFILL_ROWS = 512
"""Token rows of a prompt that are in flight at once."""

HUGE_PAGE_BYTES = 2**21
"""What the native core's mappings are made of."""

MAX_BYTES = 2**63 - 1
"""What one address space holds at most; no memory is larger."""

UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def parse_bytes(text: str | int, *, option: str = "--gpu-memory") -> int:
    """Bytes meant by "24GiB", "512 MB", "1.5gib" or a number of bytes; from 1 to `MAX_BYTES`.

    Binary and decimal units are told apart as usual (GiB is 2**30, GB is 10**9); a bare "G" could
    be either and is refused. Raises ValueError that names `option`.
    """
    # So many digits are more than any size has, and Python reads no more than 4300 of them.
    match = re.fullmatch(r"\s*(\d{1,99}(?:\.\d{1,99})?)\s*([a-z]*)\s*", str(text).lower())
    unit = UNITS.get(match[2]) if match else None
    num_bytes = int(Fraction(match[1]) * unit) if match and unit else 0
    if not 1 <= num_bytes <= MAX_BYTES:
        raise ValueError(
            f"{option} must be a positive size such as 24GiB, 512MB or 1000000000, below 8 EiB, "
            f"got {text!r:.80}"
        )
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """For people: one decimal in the largest binary unit that keeps the number above one."""
    if num_bytes < 1024:
        return f"{num_bytes:,.0f} B"
    for unit in ("KiB", "MiB"):
        num_bytes /= 1024
        if num_bytes < 1024:
            return f"{num_bytes:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} GiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """peak = runtime + fixed + per_sequence x batch + KV(batch, context), in bytes.

    `runtime_bytes` is there before any model (interpreter, libraries), `fixed_bytes` are the
    weights and what else no sequence adds to, `per_sequence_bytes` the activations and the row of
    logits of one decoding sequence. The first three are measured or fitted; KV is exact, a scratch
    block included. Where `huge_page_bytes` is not 0, buffers and cache are mappings of such pages,
    each with one more to align it, as the native core's are.
    """

    runtime_bytes: float
    fixed_bytes: float
    per_sequence_bytes: float
    kv_bytes_per_token: int
    block_size: int
    huge_page_bytes: int

    def kv_bytes(self, batch: int, context: int) -> int:
        """Of `batch` sequences in whole blocks."""
        num_blocks = batch * -(-context // self.block_size) + 1
        num_bytes = num_blocks * self.block_size * self.kv_bytes_per_token
        return mapped_bytes(num_bytes, self.huge_page_bytes)

    def buffer_bytes(self, batch: int) -> int:
        """Of a step of `batch` decoding sequences."""
        return mapped_bytes(max(0, round(self.per_sequence_bytes * batch)), self.huge_page_bytes)

    def peak_bytes(self, batch: int, context: int) -> float:
        growing = self.buffer_bytes(batch) + self.kv_bytes(batch, context)
        return self.runtime_bytes + self.fixed_bytes + growing

    def num_sequences(self, limit_bytes: float, context: int) -> int:
        """The largest batch whose peak is within the limit; 0 if not even one sequence fits."""
        if self.peak_bytes(1, context) > limit_bytes:
            return 0
        most = 1
        while self.peak_bytes(2 * most, context) <= limit_bytes:
            most *= 2
        # `most` fits and twice as many do not: the peak never falls as the batch grows
        return (
            most
            - 1
            + bisect.bisect_right(
                range(most, 2 * most),
                limit_bytes,
                key=lambda batch: self.peak_bytes(batch, context),
            )
        )


def mapped_bytes(num_bytes: int, page_bytes: int) -> int:
    """What a mapping of so many bytes takes: whole pages, and one to align them; 0: no pages."""
    return num_bytes if page_bytes == 0 else (-(-num_bytes // page_bytes) + 1) * page_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How `memory_bytes` divide into weights, buffers of a step, whole sequences, and a rest.

    A step of B sequences holds activations of B decode rows and of one prompt's chunk
    (`prefill_bytes`), and logits of at most `LOGIT_ROWS` rows. All zero: they are ignored.
    """

    memory_bytes: int
    context: int
    weight_bytes: int
    kv_bytes_per_token: int
    prefill_bytes: int = 0
    activation_bytes: int = 0
    logits_bytes: int = 0

    @property
    def kv_bytes_per_sequence(self) -> int:
        return self.kv_bytes_per_token * self.context

    @property
    def bytes_per_sequence(self) -> int:
        """What one more sequence takes, K and V included, up to `LOGIT_ROWS` sequences."""
        return self.kv_bytes_per_sequence + self.activation_bytes + self.logits_bytes

    @property
    def num_sequences(self) -> int:
        """Sequences of full `context` that fit at once; 0 if not even one does."""
        room = self.memory_bytes - self.weight_bytes - self.prefill_bytes
        few = room // self.bytes_per_sequence
        if few < LOGIT_ROWS:
            return max(0, few)
        room -= LOGIT_ROWS * self.logits_bytes
        return room // (self.kv_bytes_per_sequence + self.activation_bytes)

    @property
    def num_tokens(self) -> int:
        """Tokens that fit however they are shared out, as in a paged cache.

        Beside the buffers of as many sequences as fit at full context.
        """
        room = self.memory_bytes - self.weight_bytes - self.buffer_bytes
        return room // self.kv_bytes_per_token

    @property
    def buffer_bytes(self) -> int:
        """Of a step of all the sequences that fit; never more than the weights leave."""
        count = self.num_sequences
        logits = min(count, LOGIT_ROWS) * self.logits_bytes
        needed = self.prefill_bytes + count * self.activation_bytes + logits
        return min(needed, self.memory_bytes - self.weight_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the sequences that fit."""
        return self.num_sequences * self.kv_bytes_per_sequence

    @property
    def free_bytes(self) -> int:
        """What is left: too little for one more sequence."""
        return self.memory_bytes - self.weight_bytes - self.buffer_bytes - self.kv_bytes


def activation_row_bytes(model: ModelConfig, dtype: str) -> int:
    """One token row between two layers and within one: x, its norm, q, k, v, heads, and the MLP.

    The buffers that both executors hold at once in a step, each counted once.
    """
    return (6 * model.n_embd + model.n_inner) * dtype_bytes(dtype)


def logits_row_bytes(model: ModelConfig) -> int:
    """Logits are float32 in every executor."""
    return model.vocab_size * dtype_bytes("float32")


def plan_memory(
    model: ModelConfig,
    *,
    memory_bytes: int,
    context: int,
    dtype: str,
    kv_dtype: str | None = None,
    quantization: str | None = None,
    with_buffers: bool = False,
) -> MemoryPlan:
    """How many sequences of `context` tokens fit beside the weights (`kv_dtype` None: `dtype`).

    `with_buffers` counts what a step holds too, see `MemoryPlan`. Raises ValueError if the context
    is outside the model's or the weights alone do not fit.
    """
    if not 1 <= context <= model.n_positions:
        raise ValueError(
            f"--context must be between 1 and the model's {model.n_positions} positions, "
            f"got {context}"
        )
    weights = stored_weight_bytes(model, quantization or dtype)
    if weights >= memory_bytes:
        raise ValueError(
            f"the weights alone take {format_bytes(weights)} in {quantization or dtype}, the "
            f"memory given is {format_bytes(memory_bytes)}: raise --gpu-memory or choose a smaller "
            "--dtype or --quantization"
        )
    row_bytes = activation_row_bytes(model, dtype) if with_buffers else 0
    return MemoryPlan(
        memory_bytes=memory_bytes,
        context=context,
        weight_bytes=weights,
        kv_bytes_per_token=kv_bytes_per_token(model, kv_dtype or dtype),
        prefill_bytes=PREFILL_ROWS * row_bytes,
        activation_bytes=row_bytes,
        logits_bytes=logits_row_bytes(model) if with_buffers else 0,
    )
