"""Configuration values: what the model is, how its cache is laid out, how requests share it.

Floor 0: the standard library only, frozen, no torch. The command line, the environment variables
and the Python API all take their defaults from the dataclasses below, so a default has one home.
Each class checks itself on construction and raises ValueError with what was got, the limit and the
option that moves it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "float16", "bfloat16"]
Layout = Literal["recompute", "contiguous", "slots", "paged"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one stored value, for every dtype that weights or a cache may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Every GPT-2 config flag that changes the maths, under Hugging Face's own names."""

    vocab_size: int
    n_positions: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    reorder_and_upcast_attn: bool = False
    tie_word_embeddings: bool = True

    @property
    def head_size(self) -> int:
        """D: values in one head of one query, key or value."""
        return self.n_embd // self.n_head

    def attention_scale(self, layer: int) -> float:
        """What q.k is multiplied by in `layer` (counted from 0).

        1/sqrt(D) if `scale_attn_weights`; divided again by (layer + 1) if
        `scale_attn_by_inverse_layer_idx` (Mistral's GPT-2 runs, CodeParrot).
        """
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """How keys and values are laid out and stored.

    `dtype` None means "the model's". `memory_bytes` None means "sized from the machine".
    """

    layout: Layout = "paged"
    dtype: Dtype | None = None
    block_size: int = 16
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the steps and the cache.

    `max_num_batched_tokens` None means "auto": chosen by the engine for the machine.
    `max_model_len` None means the model's `n_positions`. `slide_window` None means half of it.
    """

    batching: Literal["continuous", "static"] = "continuous"
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    context_overflow: Literal["error", "slide"] = "error"
    slide_window: int | None = None
    strict_context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything needed to build an engine; `nanoserve serve`, `LLM` and `bench` all make one."""

    model: str = "mini"
    revision: str | None = None
    load_format: Literal["auto", "safetensors", "pt", "dummy"] = "auto"
    dummy_seed: int = 0
    tokenizer: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    executor: Literal["auto", "eager"] = "auto"
    threads: int | None = None
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
