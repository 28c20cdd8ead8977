"""The caches by themselves: what is written where, in which precision, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.kernels.attention import attention_reference
from nanoserve.kv.cache import BlockCache, CacheFullError, KVCache, RecomputeCache
from nanoserve.kv.step import StepTensors
from nanoserve.planner.model import kv_bytes_per_token

CPU = torch.device("cpu")
H, D, L = 3, 16, 2
CONFIG = ModelConfig(
    vocab_size=11, n_positions=64, n_embd=H * D, n_layer=L, n_head=H, n_inner=4 * H * D
)


def cache_of(
    num_blocks: int = 6, block_size: int = 4, dtype: torch.dtype = torch.float32
) -> BlockCache:
    """A cache full of NaN: whatever is attended must have been written by the test."""
    cache = BlockCache(
        CONFIG, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=CPU
    )
    cache.poison(list(range(num_blocks + 1)))
    return cache


def step_of(
    sequences: Sequence[tuple[int, int, Sequence[int]]],
    block_size: int,
    copies: tuple[tuple[int, int], ...] = (),
) -> StepTensors:
    """A step in which each sequence advances from a start to a stop, over a block table."""
    slots, starts = [], [0]
    for start, stop, table in sequences:
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, stop)]
        starts.append(len(slots))
    width = max(len(table) for *_, table in sequences)
    tables = [[*table, *[0] * (width - len(table))] for *_, table in sequences]
    return StepTensors(
        token_ids=torch.zeros(len(slots), dtype=torch.int32),
        positions=torch.zeros(len(slots), dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logit_rows=torch.zeros(0, dtype=torch.int32),
        query_starts=tuple(starts),
        context_lens=tuple(stop for _, stop, _ in sequences),
        block_copies=copies,
    )


def drawn(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of a step: [T, H, D] each."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, num_tokens, H, D, generator=generator)
    return q, k, v


def run_step(cache: KVCache, step: StepTensors, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The whole step, the same q, k, v in every layer; what the last layer attended to."""
    cache.begin(step)
    mixed = q
    for layer in range(L):
        cache.append(layer, k, v, step)
        mixed = cache.attend(layer, q, step)
    cache.advance(step)
    return mixed


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention_reference(
        q, k.transpose(0, 1), v.transpose(0, 1), CONFIG.attention_scale(L - 1)
    )


@pytest.mark.parametrize(
    "block_size,table",
    [(64, [2]), (1, [9, 0, 4, 7, 1, 2, 8, 3, 6, 5]), (4, [5, 0, 3])],
    ids=["contiguous", "slots", "paged"],
)
@pytest.mark.parametrize("cuts", [(10,), (1, 10), (6, 10), (3, 4, 9, 10), tuple(range(1, 11))])
def test_a_context_is_attended_whole_however_it_was_cut_and_wherever_it_lies(
    block_size: int, table: list[int], cuts: tuple[int, ...]
) -> None:
    """A chunk over a filled cache must see all that is before it and nothing that is after."""
    cache = cache_of(num_blocks=10, block_size=block_size)
    q, k, v = drawn(10)
    parts = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        rows = slice(start, stop)
        step = step_of([(start, stop, table)], block_size)
        parts.append(run_step(cache, step, q[rows], k[rows], v[rows]))
    torch.testing.assert_close(torch.cat(parts), reference(q, k, v), atol=1e-6, rtol=1e-5)


def test_who_else_is_in_the_step_changes_no_bit() -> None:
    """Rows of q take multiples of 64 bytes, as in GPT-2: alignment could change bits."""
    tables = ([5, 0, 3], [1], [2, 4])
    lengths = [10, 3, 7]
    inputs = [drawn(length, seed=length) for length in lengths]
    together = run_step(
        cache_of(),
        step_of([(0, n, t) for n, t in zip(lengths, tables, strict=True)], 4),
        *(torch.cat(parts) for parts in zip(*inputs, strict=True)),
    )
    for n, table, part, mine in zip(
        lengths, tables, inputs, torch.split(together, lengths), strict=True
    ):
        alone = run_step(cache_of(), step_of([(0, n, table)], 4), *part)
        assert torch.equal(alone, mine)


def test_layers_keep_to_themselves() -> None:
    cache = cache_of()
    step = step_of([(0, 6, [1, 2])], 4)
    inputs = [drawn(6, seed) for seed in range(L)]
    cache.begin(step)
    for layer, (q, k, v) in enumerate(inputs):
        cache.append(layer, k, v, step)
        cache.attend(layer, q, step)
    cache.advance(step)
    later = step_of([(6, 7, [1, 2])], 4)
    q, k, v = drawn(1, 9)
    cache.begin(later)
    for layer, (_, old_k, old_v) in enumerate(inputs):
        cache.append(layer, k, v, later)
        expected = attention_reference(
            q,
            torch.cat([old_k, k]).transpose(0, 1),
            torch.cat([old_v, v]).transpose(0, 1),
            CONFIG.attention_scale(layer),
        )
        torch.testing.assert_close(cache.attend(layer, q, later), expected, atol=1e-6, rtol=1e-5)


def assert_refused_untouched(cache: BlockCache, step: StepTensors, words: str) -> None:
    """The step raises, and not a byte of the cache changed."""
    before = (cache.keys.clone(), cache.values.clone())
    with pytest.raises(CacheFullError, match=words):
        cache.begin(step)
    assert torch.equal(cache.keys, before[0])
    assert torch.equal(cache.values, before[1])


def zeroed() -> BlockCache:
    cache = cache_of()
    cache.keys.zero_()
    cache.values.zero_()
    cache.keys[:, 1] = 1.0
    return cache


def test_a_step_that_does_not_fit_raises_before_a_byte_is_written() -> None:
    fork = ((1, 2),)
    within = step_of([(0, 4, [0])], 4, fork)
    too_long = replace(within, context_lens=(9,))
    assert_refused_untouched(zeroed(), too_long, "9 positions needs 3 blocks of 4.* has 1")
    for slot in (28, -1):  # 6 blocks and the scratch block are 28 slots
        slots = torch.tensor([0, 1, slot, 3], dtype=torch.int32)
        outside = replace(within, slot_mapping=slots)
        assert_refused_untouched(zeroed(), outside, f"slot {slot} is outside this cache's 28")
    for pair in ((1, 6), (1, -1), (6, 1), (-1, 1)):
        copies = step_of([(0, 4, [0])], 4, ((1, 2), pair))
        assert_refused_untouched(zeroed(), copies, "is copied from or to, this cache has 6")


def test_the_last_slot_and_the_scratch_block_can_be_written() -> None:
    cache = cache_of()
    q, k, v = drawn(2)
    step = replace(
        step_of([(0, 1, [5]), (0, 1, [6])], 4),
        slot_mapping=torch.tensor([20, 27], dtype=torch.int32),
    )
    run_step(cache, step, q, k, v)
    assert torch.equal(cache.keys[0, 5, :, 0], k[0])
    assert torch.equal(cache.keys[0, 6, :, 3], k[1])


def test_forked_blocks_are_copied_before_anything_is_appended() -> None:
    """A fork and its parent write different tokens at the same position, in one step."""
    cache = cache_of()
    q, k, v = drawn(6)
    run_step(cache, step_of([(0, 6, [0, 1])], 4), q, k, v)
    fork = step_of([(6, 7, [0, 1]), (6, 7, [0, 3])], 4, copies=((1, 3),))
    q2, k2, v2 = drawn(2, seed=1)
    mixed = run_step(cache, fork, q2, k2, v2)
    for row in range(2):
        mine = slice(row, row + 1)
        expected = reference(q2[mine], torch.cat([k, k2[mine]]), torch.cat([v, v2[mine]]))
        torch.testing.assert_close(mixed[mine], expected, atol=1e-6, rtol=1e-5)
    assert not torch.equal(mixed[0], mixed[1])
    assert torch.equal(cache.keys[:, 1, :, :2], cache.keys[:, 3, :, :2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keeps", [True, False], ids=["blocks", "recompute"])
def test_keys_and_values_are_rounded_first_and_attended_as_stored(
    dtype: torch.dtype, keeps: bool
) -> None:
    cache: KVCache = cache_of(dtype=dtype) if keeps else RecomputeCache(CONFIG, dtype=dtype)
    q, k, v = drawn(7)
    mixed = run_step(cache, step_of([(0, 7, [2, 0])], 4), q, k, v)
    rounded = reference(q, k.to(dtype).float(), v.to(dtype).float())
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, rounded, atol=1e-6, rtol=1e-5)
    assert float((mixed - reference(q, k, v)).abs().max()) > 1e-5, "rounding changed nothing"


@pytest.mark.parametrize("keeps", [True, False], ids=["blocks", "recompute"])
def test_a_torn_step_is_noticed(keeps: bool) -> None:
    cache: KVCache = cache_of() if keeps else RecomputeCache(CONFIG, dtype=torch.float32)
    step = step_of([(0, 3, [0])], 4)
    q, k, v = drawn(3)
    cache.begin(step)
    cache.append(0, k, v, step)
    with pytest.raises(RuntimeError, match="1 of 2 layers were appended"):
        cache.advance(step)
    with pytest.raises(RuntimeError, match="layer 0 appended after 1 layers"):
        cache.append(0, k, v, step)
    run_step(cache, step, q, k, v)  # begin starts afresh


def test_recompute_takes_whole_contexts_only_and_keeps_nothing() -> None:
    cache = RecomputeCache(CONFIG, dtype=torch.float32)
    q, k, v = drawn(5)
    step = step_of([(0, 2, [0]), (0, 3, [1])], 4)
    mixed = run_step(cache, step, q, k, v)
    expected = torch.cat([reference(q[:2], k[:2], v[:2]), reference(q[2:], k[2:], v[2:])])
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-5)
    assert cache.nbytes == 0
    assert cache._keys.numel() == cache._values.numel() == 0
    with pytest.raises(RuntimeError, match=r"whole contexts \(7,\), got \(2,\)"):
        cache.begin(step_of([(5, 7, [0, 1])], 4))


@pytest.mark.parametrize(
    "dtype,per_token", [("float32", 73_728), ("float16", 36_864), ("bfloat16", 36_864)]
)
@pytest.mark.parametrize("block_size", [1, 16, 1024])
def test_nbytes_is_exact(dtype: str, per_token: int, block_size: int) -> None:
    """124M: 2 (K and V) x 12 layers x 768 values. The scratch block counts: it is memory too."""
    model = ModelConfig.from_hf({"model_type": "gpt2"})
    cache = BlockCache(
        model,
        num_blocks=2048 // block_size,
        block_size=block_size,
        dtype=getattr(torch, dtype),
        device=CPU,
    )
    assert cache.nbytes == per_token * (2048 + block_size)
    assert cache.nbytes == cache.keys.nbytes + cache.values.nbytes
    assert kv_bytes_per_token(model, dtype) == per_token


def test_what_is_forgotten_can_be_written_again() -> None:
    cache = cache_of()
    q, k, v = drawn(6)
    step = step_of([(0, 6, [4, 1])], 4)
    first = run_step(cache, step, q, k, v)
    cache.reset()
    assert torch.equal(run_step(cache, step, q, k, v), first)
    cache.poison([4])
    q2, k2, v2 = drawn(1, seed=3)
    assert bool(run_step(cache, step_of([(6, 7, [4, 1])], 4), q2, k2, v2).isnan().all())
