"""The textbook loops: what generating with and without a KV cache *is*, readable top to bottom.

`naive` runs the whole text through the model for every new token; `cached` runs each token once and
keeps its keys and values; `stream` is `cached` handing tokens out as they come; `graphed` replays
its decode step from a CUDA graph. All are greedy, take one sequence of token ids, and are tested
equal to the engine, which everything else uses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from nanoserve.engine.graph import Capturer, CudaCapturer, DecodeGraphs, DecodeRows
from nanoserve.kv.cache import BlockCache, RecomputeCache
from nanoserve.kv.codecs import PlainCodec
from nanoserve.kv.step import StepTensors
from nanoserve.model.gpt2 import GPT2


@torch.inference_mode()
def naive(model: GPT2, token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """`max_tokens` greedy tokens after `token_ids`, recomputing everything for each.

    The n-th token costs a forward pass over all n tokens before it: quadratic in the length (cubic
    in attention). Raises ValueError as `check_room` does.
    """
    check_room(model, token_ids, max_tokens)
    nothing_kept = RecomputeCache(model.config, codec=PlainCodec(model.wte.dtype))
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
    cache = one_sequence_cache(model)
    new_tokens, position = list(token_ids), 0
    for _ in range(max_tokens):
        step = StepTensors.one_sequence(new_tokens, position, device=model.device)
        position += len(new_tokens)
        new_tokens = [lowest_best(model(step, cache))]
        yield new_tokens[0]


@torch.inference_mode()
def graphed(
    model: GPT2, token_ids: Sequence[int], max_tokens: int, *, capturer: Capturer | None = None
) -> list[int]:
    """`cached`, each token after the first from a captured step: one launch instead of hundreds.

    Raises ValueError where there is no GPU, unless a `capturer` of another kind is given.
    """
    check_room(model, token_ids, max_tokens)
    cache = one_sequence_cache(model)
    graphs = DecodeGraphs(
        model,
        cache,
        max_num_seqs=1,
        max_len=model.config.n_positions,
        num_token_ids=model.config.vocab_size,
        capturer=capturer or CudaCapturer(),
    )
    if max_tokens == 0:
        return []
    prompt = StepTensors.one_sequence(list(token_ids), 0, device=model.device)
    new_tokens = [lowest_best(model(prompt, cache))]
    first_block = np.zeros((1, 1), np.int32)
    for position in range(len(token_ids), len(token_ids) + max_tokens - 1):
        bucket = graphs.find(1, position + 1)
        assert bucket is not None, "check_room comes before"
        place = np.array([position], np.int32)
        last_token = np.array(new_tokens[-1:], np.int32)
        graphs.replay(bucket, DecodeRows(last_token, place, place, first_block))
        new_tokens.append(int(graphs.answers[0, 0]))
    return new_tokens


def one_sequence_cache(model: GPT2) -> BlockCache:
    """Contiguous room for all the model's positions."""
    return BlockCache(
        model.config,
        num_blocks=1,
        block_size=model.config.n_positions,
        codec=PlainCodec(model.wte.dtype),
        device=model.device,
    )


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
