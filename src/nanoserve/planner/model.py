"""What a model weighs and what a step of it must move and compute: exact counts, nothing measured.

Every byte and operation count of the house comes from here: engine, command line, benchmarks and
reports call these functions and none of them multiplies on its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nanoserve.config import DTYPE_BYTES, ModelConfig

INT8_SCALE_BYTES = 2

QUANTIZED_BITS: dict[str, float] = {"int8": 8, "int8-weight-only": 8, "int4": 4.5}
"""Bits of one weight of a matrix; int4 counts its float16 scale for each group of 32."""

CHANNEL_SCALE_BYTES = {"int8": 4, "int8-weight-only": 4, "int4": 0}
"""Bytes beside the weights for each output channel."""


def num_block_parameters(model: ModelConfig) -> int:
    """Weights, biases and both LayerNorms of one transformer block."""
    width, inner = model.n_embd, model.n_inner
    attention = width * 3 * width + 3 * width + width * width + width
    mlp = width * inner + inner + inner * width + width
    return 2 * 2 * width + attention + mlp


def num_parameters(model: ModelConfig) -> int:
    """All parameters; a tied head (`wte` used twice) counts once."""
    embeddings = model.vocab_size * model.n_embd + model.n_positions * model.n_embd
    head = 0 if model.tie_word_embeddings else model.vocab_size * model.n_embd
    return embeddings + model.n_layer * num_block_parameters(model) + 2 * model.n_embd + head


def dtype_bytes(dtype: str) -> int:
    """Bytes of one stored value. Raises ValueError for a dtype that nothing is stored in."""
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, got {dtype!r}")
    return DTYPE_BYTES[dtype]


def num_matrix_parameters(model: ModelConfig) -> int:
    """Weights that a step multiplies with, the head included: what --quantization is about."""
    width, inner = model.n_embd, model.n_inner
    block = 4 * width * width + 2 * width * inner
    return model.n_layer * block + model.vocab_size * width


def num_output_channels(model: ModelConfig) -> int:
    """Rows of results over all those matrices."""
    return model.n_layer * (5 * model.n_embd + model.n_inner) + model.vocab_size


def read_weight_bytes(model: ModelConfig, weights: str) -> int:
    """Bytes of weights that a step must read, each once; `weights` is a dtype or a quantisation.

    `wte` counts once where it is the head, and not where the head is its own; `wpe` does not (one
    row of it is read per token). Quantised matrices keep biases and LayerNorms in float32.
    """
    skipped = model.n_positions * model.n_embd
    if not model.tie_word_embeddings:
        skipped += model.vocab_size * model.n_embd
    num_read = num_parameters(model) - skipped
    if weights not in QUANTIZED_BITS:
        return num_read * dtype_bytes(weights)
    num_quantized = num_matrix_parameters(model)
    scales = CHANNEL_SCALE_BYTES[weights] * num_output_channels(model)
    packed = math.ceil(num_quantized * QUANTIZED_BITS[weights] / 8)
    return packed + scales + (num_read - num_quantized) * dtype_bytes("float32")


def weight_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes of all parameters stored in `dtype`."""
    return num_parameters(model) * dtype_bytes(dtype)


def stored_weight_bytes(model: ModelConfig, weights: str) -> int:
    """Bytes of all parameters as they are kept; `weights` is a dtype or a quantisation.

    What a step reads (scales included), and what it only looks up: positions, of 2 bytes where the
    weights are quantised, and `wte` where it is not the head, packed like the matrices.
    """
    if weights not in QUANTIZED_BITS:
        return weight_bytes(model, weights)
    looked_up = model.n_positions * model.n_embd * dtype_bytes("bfloat16")
    if not model.tie_word_embeddings:
        packed = math.ceil(model.vocab_size * model.n_embd * QUANTIZED_BITS[weights] / 8)
        looked_up += packed + CHANNEL_SCALE_BYTES[weights] * model.vocab_size
    return read_weight_bytes(model, weights) + looked_up


def kv_bytes_per_token(model: ModelConfig, kv_dtype: str) -> int:
    """Bytes of K and V of one token over all layers: 2 L C values, plus the codec's own.

    int8 has a scale in float16 for each layer, head, and K or V.
    """
    scales = INT8_SCALE_BYTES * model.n_head if kv_dtype == "int8" else 0
    return 2 * model.n_layer * (model.n_embd * dtype_bytes(kv_dtype) + scales)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """A step of `num_seqs` sequences that each advance by `num_new` tokens up to `context`.

    Cached decode is `num_new` 1; a prefill from nothing, and a step of the recompute cache, is
    `num_new` equal to `context`.
    """

    num_seqs: int = 1
    context: int
    num_new: int = 1

    def __post_init__(self) -> None:
        if self.num_seqs < 1 or not 1 <= self.num_new <= self.context:
            raise ValueError(f"a step needs num_seqs >= 1 and 1 <= num_new <= context, got {self}")


def step_bytes(
    model: ModelConfig, step: StepShape, *, dtype: str, kv_dtype: str | None = None
) -> int:
    """Bytes a step must move: weights once, K and V of its context read, of its new tokens written.

    `dtype` may be a quantisation; then `kv_dtype` has to be given. See `read_weight_bytes`.
    """
    weights = read_weight_bytes(model, dtype)
    tokens = step.num_seqs * (step.context + step.num_new)
    return weights + tokens * kv_bytes_per_token(model, kv_dtype or dtype)


def step_flops(model: ModelConfig, step: StepShape) -> int:
    """Floating-point operations a step must do, a multiply-add counting as two.

    Matrices of every block per new token; 4 C per layer and attended pair (q.k and weights.v, the
    causal half only); the head once per sequence, since only its last row is needed.
    """
    width, inner = model.n_embd, model.n_inner
    matrices = model.n_layer * (4 * width * width + 2 * width * inner)
    before = step.context - step.num_new
    attended = step.num_new * before + step.num_new * (step.num_new + 1) // 2
    attention = 4 * width * model.n_layer * attended
    head = 2 * model.vocab_size * width
    return step.num_seqs * (2 * matrices * step.num_new + attention + head)
