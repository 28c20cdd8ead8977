"""The dense, slow, obvious generator that everything is compared with: numpy, float64, no cache.

Written from the GPT-2 paper's architecture and the flags' definitions, sharing no code with the
engine's model, caches or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nanoserve.config import ModelConfig
from nanoserve.model.weights import WeightTensor, as_float32

Float64 = NDArray[np.float64]


def dense_weights(tensors: Iterable[WeightTensor]) -> dict[str, Float64]:
    return {t.name: as_float32(t).astype(np.float64) for t in tensors}


def layer_norm(x: Float64, weight: Float64, bias: Float64, eps: float) -> Float64:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def activate(name: str, x: Float64) -> Float64:
    if name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if name == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if name == "relu":
        return np.maximum(x, 0)
    if name == "tanh":
        return np.tanh(x)
    rate = 1.702 if name == "quick_gelu" else 1.0
    return x / (1 + np.exp(-rate * x))


def stored(x: Float64, dtype: str | None) -> Float64:
    """`x` as a cache of this dtype gives it back, rounded to nearest even; None keeps it whole.

    int8: each row [D] has a scale of its own, itself rounded to float16 before it is used.
    """
    if dtype == "int8":
        scales = (np.abs(x).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
        return np.clip(np.round(x / np.where(scales > 0, scales, 1)), -127, 127) * scales
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float64)
    if dtype == "bfloat16":  # the upper half of a float32
        bits = x.astype(np.float32).view(np.uint32)
        upper = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        return upper.astype(np.uint32).view(np.float32).astype(np.float64)
    return x


def attend(
    config: ModelConfig,
    layer: int,
    qkv: Float64,
    kv_dtype: str | None = None,
    product_dtype: str | None = None,
) -> Float64:
    num_tokens = len(qkv)
    q, k, v = np.split(qkv, 3, axis=-1)
    heads = (num_tokens, config.n_head, config.head_size)
    k, v = (stored(x.reshape(heads), kv_dtype).reshape(x.shape) for x in (k, v))
    if config.scale_attn_weights:
        q = q / math.sqrt(config.head_size)
    if config.scale_attn_by_inverse_layer_idx:
        q = q / (layer + 1)
    q = stored(q, product_dtype)
    mixed = np.empty_like(q)
    for head in range(config.n_head):
        part = slice(head * config.head_size, (head + 1) * config.head_size)
        scores = q[:, part] @ k[:, part].T
        scores[np.triu_indices(num_tokens, 1)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, part] = stored(scores, product_dtype) @ v[:, part]
        mixed[:, part] /= scores.sum(-1, keepdims=True)
    return mixed


def logits(
    config: ModelConfig,
    weights: Mapping[str, Float64],
    token_ids: Sequence[int],
    kv_dtype: str | None = None,
    product_dtype: str | None = None,
) -> Float64:
    """[N, V]: row p holds the logits of the token after position p.

    `kv_dtype` rounds keys and values to what such a cache stores, `product_dtype` queries and
    attention weights before they are multiplied with them.
    """
    eps = config.layer_norm_epsilon
    x = weights["wte.weight"][list(token_ids)] + weights["wpe.weight"][: len(token_ids)]
    for layer in range(config.n_layer):
        h = {
            name.removeprefix(f"h.{layer}."): w
            for name, w in weights.items()
            if name.startswith(f"h.{layer}.")
        }
        normed = layer_norm(x, h["ln_1.weight"], h["ln_1.bias"], eps)
        qkv = normed @ h["attn.c_attn.weight"] + h["attn.c_attn.bias"]
        mixed = attend(config, layer, qkv, kv_dtype, product_dtype)
        x = x + mixed @ h["attn.c_proj.weight"] + h["attn.c_proj.bias"]
        normed = layer_norm(x, h["ln_2.weight"], h["ln_2.bias"], eps)
        inner = activate(
            config.activation_function, normed @ h["mlp.c_fc.weight"] + h["mlp.c_fc.bias"]
        )
        x = x + inner @ h["mlp.c_proj.weight"] + h["mlp.c_proj.bias"]
    head = weights["wte.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return layer_norm(x, weights["ln_f.weight"], weights["ln_f.bias"], eps) @ head.T


def greedy(
    config: ModelConfig, weights: Mapping[str, Float64], token_ids: Sequence[int], max_tokens: int
) -> list[int]:
    """`max_tokens` greedy tokens, everything recomputed for each."""
    text = list(token_ids)
    for _ in range(max_tokens):
        text.append(int(logits(config, weights, text)[-1].argmax()))
    return text[len(token_ids) :]


def draw(row: Float64, uniform: float, temperature: float) -> tuple[int, float]:
    """The token that `uniform` picks from one row of logits, and how far it is from another's.

    Inverse CDF over ids in ascending order. The distance is a probability.
    """
    weights = np.exp((row - row.max()) / temperature)
    ends = weights.cumsum() / weights.sum()
    return int((ends <= uniform).sum()), float(np.abs(ends[:-1] - uniform).min())


def uniforms(seed: int, choice: int, count: int) -> Float64:
    """What the output tokens of one choice are drawn with, in order: Philox keyed by both."""
    return np.random.Generator(np.random.Philox(key=[seed, choice])).random(count)


def log_softmax(rows: Float64) -> Float64:
    shifted = rows - rows.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def smallest_margin(rows: Float64) -> float:
    """The smallest gap between the best and the second-best logit of any row."""
    top_two = np.partition(rows, -2, axis=-1)[:, -2:]
    return float((top_two[:, 1] - top_two[:, 0]).min())


def distinct_share(token_ids: Sequence[int]) -> float:
    return len(set(token_ids)) / len(token_ids)
