"""GPT-2, one forward over flat tokens `[T]` of any mix of sequences.

Module and weight names are GPT-2's own (Radford et al. 2019, as published: Conv1D weights are
[in, out], `c_attn` makes q, k and v at once). Sequences are told apart by the cache alone, so
prefill, chunk and decode are the same code; logits are computed only for the rows asked for.
LayerNorm runs in fp32 whatever the weights' dtype (so does softmax, in the attention kernels).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.kernels.activations import ACTIVATIONS
from nanoserve.kv.cache import KVCache
from nanoserve.kv.codecs import TORCH_DTYPES
from nanoserve.kv.step import StepTensors
from nanoserve.model.weights import WeightTensor


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias, in fp32, back in x's dtype."""

    def __init__(self, weights: dict[str, Tensor], name: str, eps: float) -> None:
        self.weight = weights[f"{name}.weight"].float()
        self.bias = weights[f"{name}.bias"].float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        normed = F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps)
        return normed.to(x.dtype)


class Conv1D:
    """x @ weight + bias with the weight as [in, out], which is how GPT-2 stores it."""

    def __init__(self, weights: dict[str, Tensor], name: str) -> None:
        self.weight = weights[f"{name}.weight"]
        self.bias = weights[f"{name}.bias"]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Attention:
    """q, k and v of each row at once; the cache keeps k and v, and attends."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], layer: int) -> None:
        self.layer = layer
        self.num_heads, self.head_size = config.n_head, config.head_size
        self.c_attn = Conv1D(weights, f"h.{layer}.attn.c_attn")
        self.c_proj = Conv1D(weights, f"h.{layer}.attn.c_proj")

    def __call__(self, x: Tensor, cache: KVCache, step: StepTensors) -> Tensor:
        qkv = self.c_attn(x).view(-1, 3, self.num_heads, self.head_size)  # [T, 3, H, D]
        q, k, v = qkv.unbind(dim=1)
        cache.append(self.layer, k, v, step)
        mixed = cache.attend(self.layer, q, step)  # [T, H, D]
        return self.c_proj(mixed.flatten(1))


class MLP:
    """Widen to `n_inner`, activate, narrow back to C."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], layer: int) -> None:
        self.c_fc = Conv1D(weights, f"h.{layer}.mlp.c_fc")
        self.c_proj = Conv1D(weights, f"h.{layer}.mlp.c_proj")
        self.act = ACTIVATIONS[config.activation_function]

    def __call__(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class Block:
    """Pre-norm transformer block: x + attn(ln_1(x)), then x + mlp(ln_2(x))."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], layer: int) -> None:
        eps = config.layer_norm_epsilon
        self.ln_1 = LayerNorm(weights, f"h.{layer}.ln_1", eps)
        self.attn = Attention(config, weights, layer)
        self.ln_2 = LayerNorm(weights, f"h.{layer}.ln_2", eps)
        self.mlp = MLP(config, weights, layer)

    def __call__(self, x: Tensor, cache: KVCache, step: StepTensors) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, step)
        return x + self.mlp(self.ln_2(x))


class GPT2:
    """The whole model. `weights` are canonical names (see `model.weights`) to tensors."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self.wte = weights["wte.weight"]  # [V, C]
        self.wpe = weights["wpe.weight"]  # [positions, C]
        self.h = [Block(config, weights, layer) for layer in range(config.n_layer)]
        self.ln_f = LayerNorm(weights, "ln_f", config.layer_norm_epsilon)
        self.lm_head = self.wte if config.tie_word_embeddings else weights["lm_head.weight"]
        self.nbytes = sum(tensor.nbytes for tensor in weights.values())

    @classmethod
    def load(
        cls,
        config: ModelConfig,
        tensors: Iterable[WeightTensor],
        *,
        dtype: str,
        device: torch.device,
    ) -> GPT2:
        """Build from named numpy arrays, one at a time: the checkpoint is never held twice."""
        weights = {t.name: to_torch(t, TORCH_DTYPES[dtype], device) for t in tensors}
        return cls(config, weights)

    @property
    def device(self) -> torch.device:
        return self.wte.device

    def hidden(self, step: StepTensors, cache: KVCache) -> Tensor:
        """[R, C]: the final LayerNorm's output at the rows whose logits are asked for."""
        cache.begin(step)
        x = F.embedding(step.token_ids, self.wte) + F.embedding(step.positions, self.wpe)  # [T, C]
        for block in self.h:
            x = block(x, cache, step)
        cache.advance(step)
        return self.ln_f(x.index_select(0, step.logit_rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, C] -> [R, V] in fp32."""
        return F.linear(hidden, self.lm_head).float()

    def __call__(self, step: StepTensors, cache: KVCache) -> Tensor:
        """[R, V] logits in fp32."""
        return self.logits(self.hidden(step, cache))


def to_torch(tensor: WeightTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`tensor` in torch, without a copy where its dtype is right; bf16 arrives as uint16."""
    owned = torch.from_numpy(tensor.data)
    if tensor.dtype == "bfloat16":
        owned = owned.view(torch.bfloat16)
    return owned.to(device=device, dtype=dtype)
