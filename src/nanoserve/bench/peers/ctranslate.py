"""CTranslate2: a C++ engine for transformers, which generates whole texts and has no single step.

So a decode step is the time between two of its callbacks, one for each token; its own greedy choice
is in it, as it is in ours. The prompt's state is cached by the engine (`cache_static_prompt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve.bench.measure import Arm, Stopwatch, now_s
from nanoserve.bench.peers.face import (
    PART,
    Cell,
    Floats,
    Setup,
    Tokens,
    UnsupportedError,
    require_plain,
    timed_prefill,
)
from nanoserve.config import ModelConfig

ENGINE = "CTranslate2"
NO_TOKEN = "<|none|>"
"""Its vocabulary needs an end and an unknown token; ours are ids, and none of them may end it."""


def name_of(token_id: int) -> str:
    """Its tokens are strings."""
    return f"t{token_id}"


class CTranslatePeer:
    """See `Peer`."""

    def __init__(self, setup: Setup) -> None:
        self.library: Any = import_module("ctranslate2")
        config = setup.config()
        require_plain(config, ENGINE)
        supported = self.library.get_supported_compute_types("cpu")
        if setup.precision not in supported:
            raise UnsupportedError(f"{ENGINE} has no {setup.precision} on this processor")
        self.vocab_size = config.vocab_size
        folder = setup.scratch / f"ctranslate2-{setup.precision}"
        folder.mkdir()
        convert(self.library, config, setup.weights(), folder)
        self.generator = self.library.Generator(
            str(folder),
            device="cpu",
            compute_type=setup.precision,
            inter_threads=1,
            intra_threads=setup.threads,
        )
        self.compute_type = self.generator.compute_type

    def describe(self) -> Mapping[str, str]:
        return {"version": version("ctranslate2"), "compute_type": str(self.compute_type)}

    def generate(self, texts: list[list[int]], num_tokens: int, **more: Any) -> Any:
        """`num_tokens` after each text, never ended."""
        return self.generator.generate_batch(
            [[name_of(token) for token in text] for text in texts],
            max_length=num_tokens,
            min_length=num_tokens,
            end_token=NO_TOKEN,
            include_prompt_in_result=False,
            sampling_topk=1,
            **more,
        )

    def greedy(self, prompt: Tokens, num_tokens: int) -> list[int]:
        return [
            int(token) for token in self.generate([list(prompt)], num_tokens)[0].sequences_ids[0]
        ]

    def logits(self, prompt: Tokens) -> Floats:
        rows = self.generator.forward_batch([[name_of(token) for token in prompt]])
        return np.array(rows, dtype=np.float32)[0, :, : self.vocab_size]

    def arm(self, cell: Cell) -> Arm:
        return self.decode_arm(cell) if cell.kind == "decode" else self.prefill_arm(cell)

    def prefill_arm(self, cell: Cell) -> Arm:
        texts = cell.prompts(self.vocab_size)
        names = [[name_of(token) for token in text] for text in texts]
        if cell.all_logits:
            return timed_prefill(lambda: None, lambda: self.generator.forward_batch(names))
        return timed_prefill(lambda: None, lambda: self.generate(texts, 1))

    def decode_arm(self, cell: Cell) -> Arm:
        """After a cached prompt, steps by the clock of their callbacks: the first is untimed."""
        texts = cell.prompts(self.vocab_size)
        start = cell.context - cell.num_steps - 1
        static = [name_of(token) for token in texts[0][:start]]
        firsts = [text[start : start + 1] for text in texts]

        def arm(watch: Stopwatch) -> None:
            seen: list[float] = []

            def note(result: Any) -> bool:
                if result.batch_id == cell.batch - 1:
                    seen.append(now_s())
                return False

            self.generate(firsts, cell.num_steps + 1, static_prompt=static, callback=note)
            watch.add(PART, (seen[-1] - seen[0]) / cell.num_steps)

        return arm


def convert(library: Any, config: ModelConfig, weights: Mapping[str, Floats], folder: Path) -> None:
    """Its model of GPT-2 with our weights, written into `folder`."""
    specs = library.specs
    spec = specs.TransformerDecoderModelSpec.from_config(
        config.n_layer,
        config.n_head,
        pre_norm=True,
        activation=specs.Activation.GELUTanh,
    )
    spec.config.layer_norm_epsilon = config.layer_norm_epsilon
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = NO_TOKEN
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = with_no_token(weights["wte.weight"])
    decoder.projection.weight = decoder.embeddings.weight
    decoder.position_encodings.encodings = weights["wpe.weight"]
    put_norm(decoder.layer_norm, weights, "ln_f")
    for layer, place in enumerate(decoder.layer):
        put_norm(place.self_attention.layer_norm, weights, f"h.{layer}.ln_1")
        put_linear(place.self_attention.linear[0], weights, f"h.{layer}.attn.c_attn")
        put_linear(place.self_attention.linear[1], weights, f"h.{layer}.attn.c_proj")
        put_norm(place.ffn.layer_norm, weights, f"h.{layer}.ln_2")
        put_linear(place.ffn.linear_0, weights, f"h.{layer}.mlp.c_fc")
        put_linear(place.ffn.linear_1, weights, f"h.{layer}.mlp.c_proj")
    spec.register_vocabulary([*map(name_of, range(config.vocab_size)), NO_TOKEN])
    spec.validate()
    spec.optimize()
    spec.save(str(folder))


def with_no_token(embeddings: Floats) -> Floats:
    """One more row, of zeros, for `NO_TOKEN`."""
    return np.vstack([embeddings, np.zeros((1, embeddings.shape[1]), dtype=np.float32)])


def put_norm(place: Any, weights: Mapping[str, Floats], name: str) -> None:
    place.gamma, place.beta = weights[f"{name}.weight"], weights[f"{name}.bias"]


def put_linear(place: Any, weights: Mapping[str, Floats], name: str) -> None:
    """GPT-2 keeps matrices as [in, out], everybody else as [out, in]."""
    place.weight = np.ascontiguousarray(weights[f"{name}.weight"].T)
    place.bias = weights[f"{name}.bias"]
