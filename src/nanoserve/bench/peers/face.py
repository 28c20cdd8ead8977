"""What a peer does for the bench, whatever engine it is: continue prompts, show logits, be timed.

The model is named, never sent: a worker reads the same checkpoint (or draws the same dummy weights)
as every other, and converts what it read to what its engine takes. Peers with a step of their own
are a `SteppingPeer`. Only the step is timed, in the worker; everything before it is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from nanoserve.bench.measure import Arm, Stopwatch
from nanoserve.bench.workload import prompt_token_ids
from nanoserve.config import LoadFormat, ModelConfig
from nanoserve.model.hub import Checkpoint, find
from nanoserve.model.weights import (
    WeightTensor,
    as_float32,
    dummy_weights,
    load_model_config,
    load_weights,
)

Kind = Literal["decode", "prefill"]
Precision = Literal["float32", "bfloat16", "int8", "int8-weight-only", "int4"]

Floats = NDArray[np.float32]
Tokens = Sequence[int]

DUMMY_SEED = 0
SHORT = 128
PART = "step"
"""The part of a repetition that is compared: seconds of one step."""


class UnsupportedError(ValueError):
    """The engine cannot do what was asked: a precision, a shape, a flag of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What is timed. Decode: one step of `batch` sequences, the mean of `num_steps` in a row, of
    which the last is at `context`. Prefill: `context` tokens of one sequence from nothing, with
    logits of the last row or of all.
    """

    kind: Kind
    batch: int
    context: int
    num_steps: int = 1
    all_logits: bool = False

    @property
    def name(self) -> str:
        if self.kind == "decode":
            return f"decode, batch {self.batch}"
        return f"prefill {self.context}" + ", all logits" * self.all_logits

    @property
    def is_rehearsed(self) -> bool:
        """Whether a repetition runs twice and is timed once: a short prefill has no step before it
        that would wake threads and warm the caches, which were another engine's until then.
        """
        return self.kind == "prefill" and self.context <= SHORT

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """The whole text of each sequence, which decode is fed token by token as well."""
        return [prompt_token_ids(self.context, vocab_size, i) for i in range(self.batch)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Which model, in which precision, on how many threads; `scratch` is a folder for conversions,
    emptied by whoever made it. `variant` tells two ways of one engine apart.
    """

    model: str
    load_format: LoadFormat
    precision: Precision
    threads: int
    scratch: Path
    variant: str = ""

    def checkpoint(self) -> Checkpoint:
        return find(self.model, load_format=self.load_format)

    def config(self) -> ModelConfig:
        return load_model_config(self.checkpoint())

    def weights(self) -> dict[str, Floats]:
        """Every tensor in float32, by GPT-2's own names; the head's is there only if not tied."""
        checkpoint, config = self.checkpoint(), self.config()
        is_dummy = checkpoint.kind == "dummy"
        tensors = (
            dummy_weights(config, DUMMY_SEED) if is_dummy else load_weights(checkpoint, config)
        )
        return {tensor.name: named_float32(tensor) for tensor in tensors}


def named_float32(tensor: WeightTensor) -> Floats:
    """Its values as every converter takes them."""
    return np.ascontiguousarray(as_float32(tensor))


def require_plain(config: ModelConfig, peer: str) -> None:
    """Raise UnsupportedError for the flags of GPT-2's family that most engines do not have."""
    odd = {
        "scale_attn_weights": not config.scale_attn_weights,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "activation_function": config.activation_function not in ("gelu_new", "gelu_pytorch_tanh"),
        "tie_word_embeddings": not config.tie_word_embeddings,
    }
    if names := [name for name, is_odd in odd.items() if is_odd]:
        raise UnsupportedError(f"{peer} is not given this model: {', '.join(names)}")


class Peer(Protocol):
    """One engine with the model loaded."""

    def describe(self) -> Mapping[str, str]:
        """Versions, and each setting that differs from the engine's own defaults."""
        ...

    def greedy(self, prompt: Tokens, num_tokens: int) -> list[int]:
        """`num_tokens` after `prompt`, each the likeliest."""
        ...

    def logits(self, prompt: Tokens) -> Floats:
        """Raw logits of every row of `prompt`: [N, V]."""
        ...

    def arm(self, cell: Cell) -> Arm:
        """A repetition of `cell`, which times `PART`. Raises UnsupportedError if it has none."""
        ...


class Sequences(Protocol):
    """B sequences in an engine's cache, all of one length."""

    def step(self, token_ids: Tokens) -> Any:
        """Append one token to each and compute their logits, as far as the caller can read them."""
        ...

    def chosen(self) -> list[int]:
        """The likeliest next token of each, after what was computed last."""
        ...

    def rewind(self, length: int) -> None:
        """Drop what comes after the first `length` tokens."""
        ...


class SteppingPeer:
    """What follows for every engine that can be asked for a single step. See `Peer`."""

    vocab_size: int

    def begin(self, prompts: Sequence[Tokens]) -> Sequences:
        """New sequences that hold these prompts of one length, in a cache of their own."""
        raise NotImplementedError

    def prefill_arm(self, cell: Cell) -> Arm:
        """Of a prefill cell, see `Peer.arm`."""
        raise NotImplementedError

    def greedy(self, prompt: Tokens, num_tokens: int) -> list[int]:
        sequences = self.begin([prompt])
        written = sequences.chosen()
        while len(written) < num_tokens:
            sequences.step(written[-1:])
            written += sequences.chosen()
        return written

    def arm(self, cell: Cell) -> Arm:
        return self.prefill_arm(cell) if cell.kind == "prefill" else self.decode_arm(cell)

    def decode_arm(self, cell: Cell) -> Arm:
        """Rewind; one step that wakes threads and caches, untimed; then the steps that count."""
        texts = cell.prompts(self.vocab_size)
        columns = [list(column) for column in zip(*texts, strict=True)]
        start = cell.context - cell.num_steps - 1
        sequences = self.begin([text[:start] for text in texts])

        def steps() -> None:
            for column in columns[start + 1 :]:
                sequences.step(column)

        def arm(watch: Stopwatch) -> None:
            sequences.rewind(start)
            sequences.step(columns[start])
            timed = Stopwatch(no_device)
            timed.time("all", steps)
            watch.add(PART, timed.seconds["all"] / cell.num_steps)

        return arm


def no_device() -> None:
    """These engines have finished when they return."""


def timed_prefill(prepare: Any, work: Any) -> Arm:
    """An arm: `prepare`, untimed, empties the cache; `work` fills it."""

    def arm(watch: Stopwatch) -> None:
        prepare()
        watch.time(PART, work)

    return arm
