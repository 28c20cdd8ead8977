"""The block pool: who holds what, what is found again, what goes first, what is called broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanoserve.scheduling.blocks import BlockPool


def filled(pool: BlockPool, owner: str, tokens: list[int]) -> tuple[int, ...]:
    """`owner` holds blocks for `tokens`, and the full ones can be found."""
    table = pool.book(owner, len(tokens))
    assert table is not None
    assert pool.block_size is not None
    pool.register(owner, 0, tokens[: len(tokens) // pool.block_size * pool.block_size])
    pool.check_integrity()
    return table


def test_a_table_grows_by_whole_blocks_and_its_positions_keep_their_blocks() -> None:
    pool = BlockPool(4, 4)
    assert pool.book("a", 1) == (0,)
    assert pool.book("a", 4) == (0,)
    assert pool.book("b", 5) == (1, 2)
    assert pool.book("a", 5) == (0, 3)
    assert pool.table("a") == (0, 3)
    assert pool.num_available == 0
    pool.check_integrity()


def test_what_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3, 2)
    pool.book("a", 4)
    assert pool.book("a", 8) is None
    assert pool.book("b", 3) is None
    assert pool.share("b", pool.table("a"), 8) is None
    assert pool.table("a") == (0, 1)
    assert pool.table("b") == ()
    assert pool.num_available == 1
    pool.check_integrity()


def test_scratch_is_never_handed_out() -> None:
    pool = BlockPool(5, 1)
    assert pool.book("a", 5) == (0, 1, 2, 3, 4)
    assert pool.book("a", 6) is None


def test_freeing_twice_or_nothing_is_harmless() -> None:
    pool = BlockPool(2, 2)
    pool.book("a", 3)
    pool.free("a")
    pool.free("a")
    pool.free("never seen")
    assert pool.num_available == 2
    pool.check_integrity()


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_a_prefix_is_found_block_by_block(block_size: int) -> None:
    pool = BlockPool(16, block_size)
    tokens = list(range(4 * block_size))
    table = filled(pool, "a", tokens)
    assert pool.match(tokens) == (list(table), 4 * block_size)
    assert pool.match([*tokens[: 2 * block_size], 99, *tokens[2 * block_size :]]) == (
        list(table[:2]),
        2 * block_size,
    )
    assert pool.match([99, *tokens[1:]]) == ([], 0)
    assert pool.match(tokens[: block_size - 1]) == ([], 0)


def test_the_same_block_after_another_beginning_is_another_block() -> None:
    pool = BlockPool(8, 2)
    first = filled(pool, "a", [1, 1, 7, 7])
    second = filled(pool, "b", [2, 2, 7, 7])
    assert pool.match([1, 1, 7, 7]) == (list(first), 4)
    assert pool.match([2, 2, 7, 7]) == (list(second), 4)
    assert pool.match([7, 7]) == ([], 0)


def test_keys_that_collide_are_told_apart() -> None:
    # Python hashes -1 and -2 alike, and so the tuples that hold them.
    assert hash((0, (-1, 5))) == hash((0, (-2, 5)))
    pool = BlockPool(4, 2)
    first, second = filled(pool, "a", [-1, 5]), filled(pool, "b", [-2, 5])
    assert pool.match([-1, 5])[0] == list(first)
    assert pool.match([-2, 5])[0] == list(second)


def test_shared_blocks_outlive_whoever_filled_them() -> None:
    pool = BlockPool(6, 2)
    table = filled(pool, "a", [1, 2, 3, 4])
    shared = pool.share("b", pool.match([1, 2, 3, 4, 5])[0], 5)
    assert shared is not None
    assert shared[:2] == table
    assert shared[2] not in table
    pool.free("a")
    pool.check_integrity()
    assert pool.num_available == 3
    pool.free("b")
    assert pool.num_available == 6
    pool.check_integrity()


def test_a_second_copy_stays_private_and_the_chain_goes_on_behind_it() -> None:
    pool = BlockPool(8, 2)
    first = filled(pool, "a", [1, 2])
    second = filled(pool, "b", [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4]) == ([first[0], second[1]], 4)
    pool.free("b")
    assert pool.num_available == 7  # the copy is free, the tail is cached; only `first` is held
    assert pool.num_cached == 2


def test_freed_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(4, 2)
    filled(pool, "a", [1, 2, 3])  # one cached, one partial
    pool.free("a")
    pool.book("b", 6)
    assert pool.num_evictions == 0
    assert pool.match([1, 2])[1] == 2
    pool.book("b", 7)
    assert pool.num_evictions == 1
    assert pool.match([1, 2]) == ([], 0)
    pool.check_integrity()


def test_the_tail_of_a_chain_is_evicted_first() -> None:
    pool = BlockPool(4, 1)
    tokens = [1, 2, 3, 4]
    filled(pool, "a", tokens)
    pool.free("a")
    for num_kept in (3, 2, 1, 0):
        pool.book("b", 4 - num_kept)
        assert pool.match(tokens)[1] == num_kept
        pool.check_integrity()


def test_the_least_recently_held_is_evicted_first() -> None:
    pool = BlockPool(3, 1)
    for owner, token in (("a", 1), ("b", 2), ("c", 3)):
        filled(pool, owner, [token])
    for owner in ("a", "b", "c"):
        pool.free(owner)
    pool.share("again", pool.match([1])[0], 1)
    pool.free("again")
    pool.book("new", 1)
    assert [pool.match([token])[1] for token in (1, 2, 3)] == [1, 0, 1]


def test_blocks_behind_an_evicted_one_are_not_found_under_a_new_one() -> None:
    pool = BlockPool(3, 1)
    filled(pool, "a", [1])
    filled(pool, "b", [1, 2])  # its first block is a private copy, its second is chained to a's
    pool.free("a")
    pool.book("c", 1)  # evicts the head while the tail is held
    assert pool.match([1, 2]) == ([], 0)
    pool.free("c")
    filled(pool, "c", [1])  # the same prefix under a new id
    assert pool.match([1, 2])[1] == 1
    pool.free("b")
    pool.check_integrity()
    pool.free("c")
    assert pool.book("d", 3) is not None  # what cannot be found can be evicted
    pool.check_integrity()


def test_a_chain_of_no_name_is_not_continued() -> None:
    pool = BlockPool(4, 1)
    filled(pool, "before", [7, 8, 9, 9])
    pool.free("before")
    table = pool.book("a", 2)
    assert table is not None
    assert pool.num_evictions == 2  # its blocks had names, of what is there no longer
    num_cached = pool.num_cached
    pool.register("a", 1, [2])  # block 0 was not registered: nobody knows what is before
    assert pool.num_cached == num_cached
    assert pool.match([2]) == ([], 0)


def test_what_is_forgotten_is_not_found_and_not_built_upon() -> None:
    pool = BlockPool(6, 2)
    filled(pool, "a", [1, 2, 3, 4])
    pool.share("b", pool.match([1, 2, 3, 4])[0], 6)
    pool.forget("a")
    assert pool.match([1, 2, 3, 4]) == ([], 0)
    pool.register("b", 2, [5, 6])
    pool.check_integrity()
    filled(pool, "c", [1, 2])
    assert pool.match([1, 2, 3, 4, 5, 6])[1] == 2
    for owner in ("a", "b", "c"):
        pool.free(owner)
    assert pool.num_available == 6
    pool.check_integrity()


def test_a_split_shares_whole_blocks_and_names_the_one_to_copy() -> None:
    pool = BlockPool(4, 4)
    table = pool.book("a", 11)
    assert table is not None
    assert pool.split("a", 10) == (table[:2], table[2])
    assert pool.split("a", 8) == (table[:2], None)
    assert pool.split("a", 3) == ((), table[0])
    assert pool.split("a", 0) == ((), None)


def test_without_prefix_caching_nothing_is_kept() -> None:
    pool = BlockPool(4, 2, enable_prefix_caching=False)
    filled(pool, "a", [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4]) == ([], 0)
    pool.free("a")
    pool.book("b", 8)
    assert pool.num_evictions == 0
    assert pool.num_cached == 0


def test_a_cache_that_keeps_nothing_needs_no_blocks() -> None:
    pool = BlockPool(0, None, enable_prefix_caching=False)
    assert pool.num_blocks_for(1000) == 0
    assert pool.share("a", (), 1000) == ()
    assert pool.book("a", 2000) == ()
    pool.free("a")
    pool.check_integrity()
    with pytest.raises(AssertionError, match="cannot be forked"):
        pool.split("a", 3)


def test_freed_blocks_are_reported_once_and_cached_ones_when_they_go() -> None:
    pool = BlockPool(3, 2, track_freed=True)
    filled(pool, "a", [1, 2, 3, 4, 5])
    assert pool.take_freed() == []
    pool.free("a")
    assert pool.take_freed() == [2]  # the partial one; the others can still be found
    assert pool.take_freed() == []
    pool.book("b", 4)  # the free one and the chain's tail
    assert pool.take_freed() == [1]
    with pytest.raises(RuntimeError, match="track_freed"):
        BlockPool(3, 2).take_freed()


@pytest.mark.parametrize(
    "num_blocks, block_size, caching, words",
    [
        (0, 16, True, "kv-cache-memory-bytes"),
        (4, 0, True, "block-size"),
        (4, None, False, "keeps nothing"),
        (0, None, True, "prefix caching"),
    ],
)
def test_impossible_pools_are_refused(
    num_blocks: int, block_size: int | None, caching: bool, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        BlockPool(num_blocks, block_size, caching)


def lose_a_block(pool: BlockPool) -> None:
    pool._free.pop()


def free_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def free_a_held_block(pool: BlockPool) -> None:
    pool._free.append(pool.table("a")[0])


def miscount(pool: BlockPool) -> None:
    pool._ref_counts[pool.table("a")[0]] += 1


def put_scratch_in_a_table(pool: BlockPool) -> None:
    pool._tables["a"] += (pool.num_blocks,)


def repeat_in_a_table(pool: BlockPool) -> None:
    pool._tables["a"] += pool.table("a")[:1]
    pool._ref_counts[pool.table("a")[0]] += 1


def mix_up_keys(pool: BlockPool) -> None:
    pool._keys[pool.table("a")[0]] = (0, (8, 8))


def offer_a_stranger(pool: BlockPool) -> None:
    pool._keys[pool._free[0]] = (0, (8, 8))


def evict_without_key(pool: BlockPool) -> None:
    pool._evictable[pool._free.pop()] = None


def unname(pool: BlockPool) -> None:
    pool._prefix_ids[pool.table("a")[0]] = None


def name_alike(pool: BlockPool) -> None:
    first, second = pool.table("a")[:2]
    pool._prefix_ids[second] = pool._prefix_ids[first]


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        free_twice,
        free_a_held_block,
        miscount,
        put_scratch_in_a_table,
        repeat_in_a_table,
        mix_up_keys,
        offer_a_stranger,
        evict_without_key,
        unname,
        name_alike,
    ],
)
def test_integrity_notices(damage: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(8, 2)
    filled(pool, "a", [1, 2, 3, 4, 5])
    filled(pool, "gone", [6, 7])
    pool.free("gone")
    pool.check_integrity()
    damage(pool)
    with pytest.raises(RuntimeError, match="inconsistent"):
        pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """A pool against a store that remembers what was written where."""

    block_size = 2
    happened: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, self.block_size, track_freed=True)
        self.store: dict[int, tuple[int, ...]] = {}  # block: all tokens from the beginning
        self.tokens: dict[int, list[int]] = {}
        self.num_owners = 0

    def write(self, owner: int, start: int) -> None:
        """Fill the blocks of `owner` from position `start` on; a whole block is registered."""
        tokens, size = self.tokens[owner], self.block_size
        first, last = start // size, len(tokens) // size
        for index, block in enumerate(self.pool.table(owner)):
            if index >= first:
                self.store[block] = tuple(tokens[: (index + 1) * size])
        self.pool.register(owner, first, tokens[first * size : last * size])

    def poison(self) -> None:
        for block in self.pool.take_freed():
            self.store.pop(block, None)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def join(self, tokens: list[int]) -> None:
        blocks, num_hit = self.pool.match(tokens[:-1])
        for index, block in enumerate(blocks):
            assert self.store[block] == tuple(tokens[: (index + 1) * self.block_size])
        owner, before = self.num_owners, self.pool.num_available
        if self.pool.share(owner, blocks, len(tokens)) is None:
            assert self.pool.num_available == before
            assert self.pool.table(owner) == ()
            self.happened.add("refused")
            return
        self.poison()
        self.num_owners += 1
        self.tokens[owner] = tokens
        self.write(owner, num_hit)
        if num_hit:
            self.happened.add("hit")

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def grow(self, data: st.DataObject, extra: list[int]) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        num_before = len(self.tokens[owner])
        if self.pool.book(owner, num_before + len(extra)) is not None:
            self.poison()
            self.tokens[owner] += extra
            self.write(owner, num_before)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), forget=st.booleans())
    def leave(self, data: st.DataObject, forget: bool) -> None:
        owner = data.draw(st.sampled_from(sorted(self.tokens)))
        if forget:
            self.pool.forget(owner)
        self.pool.free(owner)
        self.poison()
        del self.tokens[owner]

    @invariant()
    def all_is_in_its_place(self) -> None:
        self.pool.check_integrity()
        for owner, tokens in self.tokens.items():
            for index, block in enumerate(self.pool.table(owner)):
                stop = (index + 1) * self.block_size
                assert self.store[block] == tuple(tokens[:stop])
        if self.pool.num_evictions:
            self.happened.add("evicted")

    def teardown(self) -> None:
        for owner in list(self.tokens):
            self.pool.free(owner)
        self.pool.check_integrity()
        assert self.pool.num_available == self.pool.num_blocks


def test_whatever_happens_every_table_holds_its_own_tokens() -> None:
    PoolMachine.happened.clear()
    run_state_machine_as_test(PoolMachine, settings=settings(stateful_step_count=30))
    assert PoolMachine.happened == {"refused", "hit", "evicted"}
