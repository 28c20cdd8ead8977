"""How many sequences fit into a memory beside the weights; sizes as people write and read them.

Exact where it counts (weights, K and V) and silent about the rest: activations depend on the
executor, and a decode step's are far below one per cent of the weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from nanoserve.config import ModelConfig
from nanoserve.planner.model import kv_bytes_per_token, weight_bytes

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
    """Bytes meant by "24GiB", "512 MB", "1.5gib" or a plain number of bytes; at least one.

    Binary and decimal units are told apart as usual (GiB is 2**30, GB is 10**9); a bare "G" could
    be either and is refused. Raises ValueError that names `option`.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    unit = UNITS.get(match[2]) if match else None
    num_bytes = int(Fraction(match[1]) * unit) if match and unit else 0
    if num_bytes < 1:
        raise ValueError(
            f"{option} must be a positive size such as 24GiB, 512MB or 1000000000, got {text!r}"
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
class MemoryPlan:
    """How `memory_bytes` divide into weights, whole sequences of `context` tokens, and a rest."""

    memory_bytes: int
    context: int
    weight_bytes: int
    kv_bytes_per_token: int

    @property
    def kv_bytes_per_sequence(self) -> int:
        return self.kv_bytes_per_token * self.context

    @property
    def num_sequences(self) -> int:
        """Sequences of full `context` that fit at once; 0 if not even one does."""
        return (self.memory_bytes - self.weight_bytes) // self.kv_bytes_per_sequence

    @property
    def num_tokens(self) -> int:
        """Tokens that fit however they are shared out: what a paged cache can hold."""
        return (self.memory_bytes - self.weight_bytes) // self.kv_bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """Bytes of the sequences that fit."""
        return self.num_sequences * self.kv_bytes_per_sequence

    @property
    def free_bytes(self) -> int:
        """What is left: too little for one more sequence."""
        return self.memory_bytes - self.weight_bytes - self.kv_bytes


def plan_memory(
    model: ModelConfig,
    *,
    memory_bytes: int,
    context: int,
    dtype: str,
    kv_dtype: str | None = None,
) -> MemoryPlan:
    """How many sequences of `context` tokens fit beside the weights (`kv_dtype` None: `dtype`).

    Raises ValueError if the context is outside the model's or the weights alone do not fit.
    """
    if not 1 <= context <= model.n_positions:
        raise ValueError(
            f"--context must be between 1 and the model's {model.n_positions} positions, "
            f"got {context}"
        )
    weights = weight_bytes(model, dtype)
    if weights >= memory_bytes:
        raise ValueError(
            f"the weights alone take {format_bytes(weights)} in {dtype}, the memory given is "
            f"{format_bytes(memory_bytes)}: raise --gpu-memory or choose a smaller --dtype"
        )
    return MemoryPlan(
        memory_bytes=memory_bytes,
        context=context,
        weight_bytes=weights,
        kv_bytes_per_token=kv_bytes_per_token(model, kv_dtype or dtype),
    )
