"""The caches by themselves: what is written where, in which precision, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanoserve.config import ModelConfig
from nanoserve.kernels.attention import attention_reference
from nanoserve.kernels.paged import quantise
from nanoserve.kv.cache import BlockCache, DecodeView, KVCache, RecomputeCache
from nanoserve.kv.codecs import Codec, Int8Codec, PlainCodec, Store, codec_of
from nanoserve.kv.layouts import CacheFullError
from nanoserve.kv.step import StepTensors
from nanoserve.planner.model import kv_bytes_per_token

CPU = torch.device("cpu")
H, D, L = 3, 16, 2
CONFIG = ModelConfig(
    vocab_size=11, n_positions=64, n_embd=H * D, n_layer=L, n_head=H, n_inner=4 * H * D
)


def cache_of(num_blocks: int = 6, block_size: int = 4, dtype: str = "float32") -> BlockCache:
    """A cache full of NaN: whatever is attended must have been written by the test."""
    cache = BlockCache(
        CONFIG, num_blocks=num_blocks, block_size=block_size, codec=codec_of(dtype), device=CPU
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


LAYOUTS = pytest.mark.parametrize(
    "block_size,table",
    [(64, [2]), (1, [9, 0, 4, 7, 1, 2, 8, 3, 6, 5]), (4, [5, 0, 3])],
    ids=["contiguous", "slots", "paged"],
)


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("cuts", [(10,), (1, 10), (6, 10), (3, 4, 9, 10), tuple(range(1, 11))])
def test_a_context_is_attended_whole_however_it_was_cut_and_wherever_it_lies(
    block_size: int, table: list[int], dtype: str, cuts: tuple[int, ...]
) -> None:
    """A chunk over a filled cache must see all that is before it and nothing that is after."""
    cache = cache_of(num_blocks=10, block_size=block_size, dtype=dtype)
    q, k, v = drawn(10)
    parts = []
    for start, stop in zip((0, *cuts), cuts, strict=False):
        rows = slice(start, stop)
        step = step_of([(start, stop, table)], block_size)
        parts.append(run_step(cache, step, q[rows], k[rows], v[rows]))
    expected = reference(q, as_stored(k, dtype), as_stored(v, dtype))
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-6, rtol=1e-5)


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
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    with pytest.raises(CacheFullError, match=words):
        cache.begin(step)
    for tensor, old in zip((*cache.keys, *cache.values), before, strict=True):
        assert torch.equal(tensor, old)


def zeroed() -> BlockCache:
    cache = cache_of()
    for tensor in (*cache.keys, *cache.values):
        tensor.zero_()
    cache.keys[0][:, 1] = 1.0
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
    for block in (7, -1):  # -1 would silently be the scratch block
        table = step_of([(0, 4, [block])], 4, fork)
        assert_refused_untouched(
            zeroed(), replace(table, slot_mapping=within.slot_mapping), f"names block {block}"
        )
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
    assert torch.equal(cache.keys[0][0, 5, :, 0], k[0])
    assert torch.equal(cache.keys[0][0, 6, :, 3], k[1])


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
    assert torch.equal(cache.keys[0][:, 1, :, :2], cache.keys[0][:, 3, :, :2])


def as_stored(x: Tensor, dtype: str) -> Tensor:
    """What a cache of this dtype gives back."""
    if dtype == "int8":
        values, scales = quantise(x)
        return values.float() * scales.float()[..., None]
    return x.to(getattr(torch, dtype)).float()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("keeps", [True, False], ids=["blocks", "recompute"])
def test_keys_and_values_are_rounded_first_and_attended_as_stored(dtype: str, keeps: bool) -> None:
    recompute = RecomputeCache(CONFIG, codec=codec_of(dtype))
    cache: KVCache = cache_of(dtype=dtype) if keeps else recompute
    q, k, v = drawn(7)
    mixed = run_step(cache, step_of([(0, 7, [2, 0])], 4), q, k, v)
    rounded = reference(q, as_stored(k, dtype), as_stored(v, dtype))
    assert mixed.dtype == torch.float32
    torch.testing.assert_close(mixed, rounded, atol=1e-6, rtol=1e-5)
    assert float((mixed - reference(q, k, v)).abs().max()) > 1e-5, "rounding changed nothing"


@pytest.mark.parametrize("keeps", [True, False], ids=["blocks", "recompute"])
def test_a_torn_step_is_noticed(keeps: bool) -> None:
    cache: KVCache = (
        cache_of() if keeps else RecomputeCache(CONFIG, codec=PlainCodec(torch.float32))
    )
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
    cache = RecomputeCache(CONFIG, codec=PlainCodec(torch.float32))
    q, k, v = drawn(5)
    step = step_of([(0, 2, [0]), (0, 3, [1])], 4)
    mixed = run_step(cache, step, q, k, v)
    expected = torch.cat([reference(q[:2], k[:2], v[:2]), reference(q[2:], k[2:], v[2:])])
    torch.testing.assert_close(mixed, expected, atol=1e-6, rtol=1e-5)
    assert cache.nbytes == 0
    assert cache._keys == cache._values == ()
    with pytest.raises(RuntimeError, match=r"whole contexts \(7,\), got \(2,\)"):
        cache.begin(step_of([(5, 7, [0, 1])], 4))


@pytest.mark.parametrize(
    "dtype,per_token",
    [("float32", 73_728), ("float16", 36_864), ("bfloat16", 36_864), ("int8", 19_008)],
)
@pytest.mark.parametrize("block_size", [1, 16, 1024])
def test_nbytes_is_exact(dtype: str, per_token: int, block_size: int) -> None:
    """124M: 2 (K and V) x 12 layers x 768 values, and in int8 a float16 scale for each of 12 heads.

    The scratch block counts: it is memory too.
    """
    model = ModelConfig.from_hf({"model_type": "gpt2"})
    cache = BlockCache(
        model,
        num_blocks=2048 // block_size,
        block_size=block_size,
        codec=codec_of(dtype),
        device=CPU,
    )
    assert cache.nbytes == per_token * (2048 + block_size)
    assert cache.nbytes == sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
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


def one_by_one(q: Tensor, k: Tensor, v: Tensor, dtype: str) -> Tensor:
    """Each row of q over the k and v up to its own, as a cache of this dtype holds them."""
    return reference(q, as_stored(k, dtype), as_stored(v, dtype))


@LAYOUTS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_decode_step_in_fixed_shapes_is_the_step_of_the_cache_it_looks_at(
    block_size: int, table: list[int], dtype: str
) -> None:
    """Three sequences, one of them a padded row in the scratch block; tables wider than needed."""
    cache = cache_of(num_blocks=10, block_size=block_size, dtype=dtype)
    q, k, v = drawn(10)
    run_step(cache, step_of([(0, 9, table)], block_size), q[:9], k[:9], v[:9])
    view = DecodeView(cache, window=min(64, block_size * len(table)))
    step = step_of([(9, 10, table), (0, 1, [10] * len(table))], block_size)
    step = replace(
        step, positions=torch.tensor([9, 0], dtype=torch.int32), query_starts=(), context_lens=()
    )
    rows = [9, 9]
    mixed = run_step(view, step, q[rows], k[rows], v[rows])
    expected = one_by_one(q, k, v, dtype)
    torch.testing.assert_close(mixed[:1], expected[9:], atol=1e-6, rtol=1e-5)
    alone = as_stored(v[9:], dtype)
    torch.testing.assert_close(mixed[1:], alone, atol=1e-6, rtol=1e-5)


def test_int8_values_are_rounded_with_the_scale_that_is_stored() -> None:
    """Half a step of the *stored* scale at most: with the exact one, ties would fall otherwise."""
    x = drawn(500, seed=5)[0] * torch.logspace(-4, 3, 500)[:, None, None]
    values, scales = quantise(x)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float16, (500, H))
    steps = x / scales.float()[..., None]
    assert torch.equal(values.float(), steps.round().clamp(-127, 127))
    assert int(values.abs().max()) == 127
    exact = x.abs().amax(-1) / 127
    large = exact > 2.0**-14  # below it, float16 is subnormal
    # The scale may be rounded down by 2**-11: the largest value is then 127.06 steps, and cut.
    assert float((values.float() - steps).abs().amax(-1)[large].max()) <= 0.5
    assert float((scales.float() / exact - 1).abs()[large].max()) <= 2.0**-11


def test_a_row_of_zeros_a_tiny_one_and_one_that_is_not_finite_are_stored_as_what_they_are() -> None:
    x = torch.zeros(4, H, D)
    x[1] = 1e-9
    x[2, :, 3] = torch.nan
    x[3, :, 3] = torch.inf
    values, scales = quantise(x)
    assert torch.equal(values, torch.zeros_like(values))
    assert torch.equal(scales[:2], torch.zeros_like(scales[:2]))
    assert bool(scales[2:].isnan().all())


def test_an_int8_cache_is_smaller_by_what_the_issue_promises() -> None:
    """3.8 x fp32 and 1.9 x fp16, scales included."""
    model = ModelConfig.from_hf({"model_type": "gpt2"})
    tokens = {d: kv_bytes_per_token(model, d) for d in ("float32", "float16", "int8")}
    assert tokens["int8"] == 18_432 + 576
    assert tokens["float32"] / tokens["int8"] >= 3.8
    assert tokens["float16"] / tokens["int8"] >= 1.9


def largest_scores_step(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """How far a score can move when each value of a key moves by half a step: [H, N]."""
    half_step = quantise(k)[1].float() / 2 * (1 + 2.0**-10)
    return q.abs().sum(-1)[0][:, None] * half_step.T * scale


@pytest.mark.parametrize("context", [64, 512, 1023])
def test_attention_over_int8_stays_within_what_its_steps_allow(context: int) -> None:
    """Derived from the quantisation step alone, for inputs as peaked as a trained model's.

    Half a step in each key value moves a score by at most |q|_1 * step / 2 * scale =: e; a softmax
    whose scores move by at most e changes its weights by factors within exp(+-2e), so by at most
    exp(2e) - 1 in sum; a mix of values moves by that times the largest |v|, and by half a step of
    a value.
    """
    heads, size, scale = 12, 64, 64**-0.5
    generator = torch.Generator().manual_seed(context)
    q = torch.randn(1, heads, size, generator=generator)
    k, v = torch.randn(2, context, heads, size, generator=generator)
    codec: Codec = Int8Codec()

    def turned(store: Store) -> Store:
        return tuple(tensor.transpose(0, 1) for tensor in store)

    got = codec.attend(q, turned(codec.encode(k)), turned(codec.encode(v)), scale)
    exact = attention_reference(q, k.transpose(0, 1), v.transpose(0, 1), scale)
    moved = float(largest_scores_step(q, k, scale).max())
    value_step = float(quantise(v)[1].max()) / 2 * (1 + 2.0**-10)
    bound = (torch.tensor(2 * moved).exp().item() - 1) * float(v.abs().max()) + value_step
    error = float((got - exact).abs().max())
    assert error < bound
    # What is typical is far less: the errors of many positions cancel.
    assert 1e-5 < error < 0.02
    assert bound < 4.0
