"""Hugging Face's transformers: the reference that everybody has, eager and compiled.

Eager is what `generate` does: scaled dot-product attention, the cache that grows. Compiled is what
its documentation says about speed: a static cache, and `torch.compile` of the decode step (prefill
is left eager there, and so are prefill cells here: they are not measured twice).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from typing import Any

from nanoserve.bench.measure import Arm
from nanoserve.bench.peers.face import (
    Cell,
    Floats,
    Sequences,
    Setup,
    SteppingPeer,
    Tokens,
    UnsupportedError,
    timed_prefill,
)

COMPILED = "compiled"
CACHE_LENGTH = 128
"""Positions of a static cache: every step attends over all of them."""


class TransformersPeer(SteppingPeer):
    """See `Peer`."""

    def __init__(self, setup: Setup) -> None:
        if setup.precision not in ("float32", "bfloat16"):
            raise UnsupportedError(f"transformers is not run in {setup.precision}")
        self.torch: Any = import_module("torch")
        self.library: Any = import_module("transformers")
        self.torch.set_num_threads(setup.threads)
        self.torch.set_grad_enabled(False)
        self.is_compiled = setup.variant == COMPILED
        self.model = self._load(setup)
        self.vocab_size = int(self.model.config.vocab_size)
        self.decode = self.torch.compile(self.model) if self.is_compiled else self.model
        named = signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in named else "past_key_values"

    def _load(self, setup: Setup) -> Any:
        """Its GPT-2 with our weights, which go by the same names."""
        config = self.library.GPT2Config(**setup.checkpoint().raw_config)
        config.vocab_size = setup.config().vocab_size
        config._attn_implementation = "sdpa"
        model = self.library.GPT2LMHeadModel(config)
        prefixed = {
            (name if name.startswith("lm_head") else f"transformer.{name}"): self.torch.from_numpy(
                values
            )
            for name, values in setup.weights().items()
        }
        missing = model.load_state_dict(prefixed, strict=False)
        unset = [name for name in missing.missing_keys if name != "lm_head.weight"]
        if unset or missing.unexpected_keys:
            raise UnsupportedError(f"transformers has other weights: {unset[:3]}")
        model.tie_weights()
        return model.to(getattr(self.torch, setup.precision)).eval()

    def describe(self) -> Mapping[str, str]:
        return {
            "version": version("transformers"),
            "torch": version("torch"),
            "attention": "sdpa",
            "cache": f"static, {CACHE_LENGTH} positions" if self.is_compiled else "dynamic",
            **({"decode step": "torch.compile"} if self.is_compiled else {}),
        }

    def new_cache(self) -> Any:
        config = self.model.config
        if self.is_compiled:
            return self.library.StaticCache(config=config, max_cache_len=CACHE_LENGTH)
        return self.library.DynamicCache(config=config)

    def begin(self, prompts: Sequence[Tokens]) -> Sequences:
        return TransformersSequences(self, prompts)

    def logits(self, prompt: Tokens) -> Floats:
        ids = self.torch.tensor([prompt])
        logits: Floats = self.model(input_ids=ids, use_cache=False).logits[0].float().numpy()
        return logits

    def prefill_arm(self, cell: Cell) -> Arm:
        if self.is_compiled:
            raise UnsupportedError("its documentation compiles decode only")
        ids = self.torch.tensor(cell.prompts(self.vocab_size))
        kept = 0 if cell.all_logits else 1

        def prefill() -> object:
            cache = {self.cache_name: self.new_cache()}
            return self.model(input_ids=ids, use_cache=True, logits_to_keep=kept, **cache).logits

        return timed_prefill(lambda: None, prefill)


class TransformersSequences:
    """See `Sequences`."""

    def __init__(self, peer: TransformersPeer, prompts: Sequence[Tokens]) -> None:
        self._torch, self._model, self._cache = peer.torch, peer.decode, peer.new_cache()
        self._named_cache = {peer.cache_name: self._cache}
        self._length = len(prompts[0])
        ids = self._torch.tensor([list(prompt) for prompt in prompts])
        self._logits = self._run(peer.model, ids)

    def _run(self, model: Any, ids: Any) -> Any:
        return model(input_ids=ids, use_cache=True, logits_to_keep=1, **self._named_cache).logits

    def step(self, token_ids: Tokens) -> object:
        self._length += 1
        self._logits = self._run(self._model, self._torch.tensor(token_ids).view(-1, 1))
        return self._logits

    def chosen(self) -> list[int]:
        return [int(token) for token in self._logits[:, -1].argmax(-1)]

    def rewind(self, length: int) -> None:
        if length < self._length:
            self._cache.crop(length - self._length)
            self._length = length
