"""The textbook loops: what generating with and without a KV cache *is*, readable top to bottom.

`naive` runs the whole text through the model for every new token; `cached` runs each token once and
keeps its keys and values; `stream` is `cached` handing tokens out as they come. All are greedy,
take one sequence of token ids, and are tested equal to the engine, which everything else uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from nanoserve.kv.cache import BlockCache, RecomputeCache
from nanoserve.kv.step import StepTensors
from nanoserve.model.gpt2 import GPT2


@torch.inference_mode()
def naive(model: GPT2, token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """`max_tokens` greedy tokens after `token_ids`, recomputing everything for each.

    The n-th token costs a forward pass over all n tokens before it: quadratic in the length (cubic
    in attention). Raises ValueError as `check_room` does.
    """
    check_room(model, token_ids, max_tokens)
    nothing_kept = RecomputeCache(model.config, dtype=model.wte.dtype)
    text = list(token_ids)
    for _ in range(max_tokens):
        step = StepTensors.one_sequence(text, 0, device=model.device)
        text.append(lowest_best(model(step, nothing_kept)))
    return text[len(token_ids) :]


@torch.inference_mode()
def cached(model: GPT2, token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The same tokens, computing each position once and keeping its keys and values."""
    return list(stream(model, token_ids, max_tokens))


def stream(model: GPT2, token_ids: Sequence[int], max_tokens: int) -> Iterator[int]:
    """`cached`, one token at a time: the next is computed when it is asked for.

    What `check_room` refuses is refused here and now, not when the first token is asked for.
    """
    check_room(model, token_ids, max_tokens)
    return _one_by_one(model, token_ids, max_tokens)


@torch.inference_mode()
def _one_by_one(model: GPT2, token_ids: Sequence[int], max_tokens: int) -> Iterator[int]:
    cache = BlockCache(
        model.config,
        num_blocks=1,
        block_size=model.config.n_positions,
        dtype=model.wte.dtype,
        device=model.device,
    )
    new_tokens, position = list(token_ids), 0
    for _ in range(max_tokens):
        step = StepTensors.one_sequence(new_tokens, position, device=model.device)
        position += len(new_tokens)
        new_tokens = [lowest_best(model(step, cache))]
        yield new_tokens[0]


def lowest_best(logits: torch.Tensor) -> int:
    """The lowest id among the largest logits of the last row; logits: [R, V]."""
    return int(logits[-1].argmax())


def check_room(model: GPT2, token_ids: Sequence[int], max_tokens: int) -> None:
    """Raise ValueError unless `max_tokens` tokens can follow `token_ids` in the model's positions.

    An empty prompt, an id outside the vocabulary and a negative `max_tokens` are refused too.
    """
    limit, vocab_size = model.config.n_positions, model.config.vocab_size
    if len(token_ids) == 0:
        raise ValueError("the prompt is empty: at least one token is needed")
    if max_tokens < 0:
        raise ValueError(f"max_tokens must be at least 0, got {max_tokens}")
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"token id {token_id} is outside the vocabulary (0 to {vocab_size - 1})"
            )
    if len(token_ids) + max_tokens > limit:
        raise ValueError(
            f"{len(token_ids)} prompt tokens and {max_tokens} new ones exceed the model's "
            f"{limit} positions"
        )
