"""The cache's blocks: which are free, who holds which, and which can be found again by content.

Book-keeping only: a block is an integer in [0, num_blocks), and what it stores lives elsewhere. Id
`num_blocks` is the scratch block, the one extra that a store has for rows whose K and V nobody
reads; it is in no table. Invariant, held by `check_integrity`: every block is exactly one of free,
cached and unreferenced, or referenced, by as many tables as its count says.

A block can be found by content once all its tokens have K and V. Its key is exact: the id of the
key before it in its chain, and its own tokens. Ids are never reused and keys are compared by
equality, so that a hash collision costs a comparison and can never change a result.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator, Sequence

BlockKey = tuple[int, tuple[int, ...]]
"""(prefix id of the block before, 0 for none; the block's own tokens)."""

ROOT_PREFIX = 0


class BlockPool:
    """Reference-counted blocks of `block_size` positions, a table of them per owner, prefix cache.

    An owner is any hashable value; its table maps position p to `table[p // block_size]`. Unheld
    blocks with a key stay findable until they are needed: least recently held goes first, and of
    one chain the tail before its head. `block_size` None is a cache that keeps nothing: every table
    is empty. `track_freed` lets `take_freed` report blocks whose content became garbage.

    Raises ValueError for sizes that make no pool.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int | None,
        enable_prefix_caching: bool = True,
        *,
        track_freed: bool = False,
    ) -> None:
        if block_size is None and (num_blocks != 0 or enable_prefix_caching):
            raise ValueError(
                "a cache that keeps nothing (block_size None) has num_blocks 0 and no prefix "
                f"caching, got {num_blocks} and {enable_prefix_caching}"
            )
        if block_size is not None and (block_size < 1 or num_blocks < 1):
            raise ValueError(
                "num_blocks (--kv-cache-memory-bytes) and block_size (--block-size) must be at "
                f"least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_evictions = 0
        self._next_prefix_id = itertools.count(ROOT_PREFIX + 1)
        self._freed: set[int] | None = set() if track_freed else None
        self._make_empty()

    def reset(self) -> None:
        """Take every table away and forget what could be found; all blocks are garbage."""
        if self._freed is not None:
            self._freed.update(range(self.num_blocks))
        self._make_empty()

    def _make_empty(self) -> None:
        num_blocks = self.num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: lowest id first
        self._tables: dict[Hashable, tuple[int, ...]] = {}
        self._cached: dict[BlockKey, int] = {}
        self._keys: list[BlockKey | None] = [None] * num_blocks  # the inverse of _cached
        # What a full block's chain is called, its own tokens included. Also known for a block whose
        # content another one already offers, so that the blocks after it can be chained.
        self._prefix_ids: list[int | None] = [None] * num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently held first

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: the free ones and the unreferenced cached ones."""
        return len(self._free) + len(self._evictable)

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by content, held or not."""
        return len(self._cached)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` positions."""
        return 0 if self.block_size is None else -(-num_tokens // self.block_size)

    def table(self, owner: Hashable) -> tuple[int, ...]:
        """The blocks of `owner` in order of position; empty if it holds none."""
        return self._tables.get(owner, ())

    def owners(self) -> Iterator[Hashable]:
        """Everyone who has a table."""
        return iter(self._tables)

    def book(self, owner: Hashable, num_tokens: int) -> tuple[int, ...] | None:
        """The table of `owner`, grown to hold `num_tokens` positions.

        None if there are not enough blocks; nothing is changed then.
        """
        table = self._tables.get(owner, ())
        num_missing = self.num_blocks_for(num_tokens) - len(table)
        if num_missing <= 0:
            return table
        if num_missing > self.num_available:
            return None
        table += tuple([self._take() for _ in range(num_missing)])
        self._tables[owner] = table
        return table

    def share(
        self, owner: Hashable, shared: Sequence[int], num_tokens: int
    ) -> tuple[int, ...] | None:
        """A first table for `owner`: blocks that others filled, then own ones up to `num_tokens`.

        `shared` are full blocks: found by `match`, or of a table that is forked. None if there are
        not enough blocks; nothing is changed then.
        """
        assert owner not in self._tables, f"{owner!r} has a table already"
        num_idle = sum(not self._ref_counts[block] for block in shared)
        num_missing = self.num_blocks_for(num_tokens) - len(shared)
        if num_missing > self.num_available - num_idle:
            return None
        for block in shared:
            if not self._ref_counts[block]:
                del self._evictable[block]
            self._ref_counts[block] += 1
        self._tables[owner] = tuple(shared)
        return self.book(owner, num_tokens)

    def split(self, owner: Hashable, num_tokens: int) -> tuple[tuple[int, ...], int | None]:
        """How a fork takes the first `num_tokens` positions of `owner`: blocks to share, to copy.

        Blocks that lie wholly inside are shared. The block that the fork will write into must be
        its own: it is copied if it holds earlier positions, else None.
        """
        assert self.block_size is not None, "a cache that keeps nothing cannot be forked"
        num_whole, num_partial = divmod(num_tokens, self.block_size)
        table = self._tables[owner]
        return table[:num_whole], table[num_whole] if num_partial else None

    def free(self, owner: Hashable) -> None:
        """Take the table of `owner` away, if it has one; what is cached stays findable.

        Last block first, so that eviction shortens a chain from its tail: a block is of no use
        without those before it.
        """
        for block in reversed(self._tables.pop(owner, ())):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if self._keys[block] is not None:
                self._evictable[block] = None
            else:
                self._free.append(block)
                self._note_garbage(block)

    def match(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Cached blocks that hold the longest known prefix of `tokens`, and how many those hold.

        Whole blocks only.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching or self.block_size is None:
            return blocks, 0
        size, prefix_id = self.block_size, ROOT_PREFIX
        for first in range(0, len(tokens) - size + 1, size):
            block = self._cached.get((prefix_id, tuple(tokens[first : first + size])))
            if block is None:
                break
            blocks.append(block)
            prefix_id = self._prefix_id_of(block)
        return blocks, len(blocks) * size

    def register(self, owner: Hashable, first: int, tokens: Sequence[int]) -> None:
        """Make blocks `first`, `first + 1`, ... of `owner` findable: they are full, of `tokens`.

        If another block already offers the same prefix it goes on doing so; this one is only given
        its name. Does nothing without prefix caching.
        """
        if not self.enable_prefix_caching or self.block_size is None:
            return
        table, size = self._tables[owner], self.block_size
        prefix_id = self._prefix_ids[table[first - 1]] if first else ROOT_PREFIX
        for offset in range(0, len(tokens), size):
            if prefix_id is None:  # the chain before it has no name: it could not be found
                return
            block = table[first + offset // size]
            prefix_id = self._name(block, (prefix_id, tuple(tokens[offset : offset + size])))

    def forget(self, owner: Hashable) -> None:
        """Make no block of `owner` findable any longer: its step failed, its content is suspect."""
        for block in self._tables.get(owner, ()):
            self._unregister(block)

    def take_freed(self) -> list[int]:
        """Blocks that lost their content since the last call, ascending; for tests that poison it.

        Some may have a new owner already, which has not written yet if this is asked between
        `Scheduler.schedule` and the step: ask there, every step. Raises RuntimeError without
        `track_freed`.
        """
        if self._freed is None:
            raise RuntimeError("this pool does not track freed blocks: make it with track_freed")
        freed = sorted(self._freed)
        self._freed.clear()
        return freed

    def check_integrity(self) -> None:
        """Recount everything. Raises RuntimeError with all that is wrong."""
        problems = [*self._count_problems(), *self._state_problems(), *self._cache_problems()]
        if problems:
            raise RuntimeError("the block pool is inconsistent: " + "; ".join(problems))

    def _take(self) -> int:
        """One block, referenced once, of no content: a free one, else the oldest cached one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._unregister(block)
            self._note_garbage(block)
            self.num_evictions += 1
        self._prefix_ids[block] = None
        self._ref_counts[block] = 1
        return block

    def _name(self, block: int, key: BlockKey) -> int:
        """The prefix id of `key`, given to `block`, which now offers it if no other does."""
        twin = self._cached.setdefault(key, block)
        if twin == block:
            self._keys[block] = key
            prefix_id = next(self._next_prefix_id)
        else:
            prefix_id = self._prefix_id_of(twin)
        self._prefix_ids[block] = prefix_id
        return prefix_id

    def _prefix_id_of(self, block: int) -> int:
        prefix_id = self._prefix_ids[block]
        assert prefix_id is not None, f"cached block {block} has no prefix id"
        return prefix_id

    def _unregister(self, block: int) -> None:
        # Blocks chained to it keep a parent id that no key will ever have again. They cannot be
        # found, do no harm, and are evicted in their turn.
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None

    def _note_garbage(self, block: int) -> None:
        if self._freed is not None:
            self._freed.add(block)

    def _count_problems(self) -> Iterator[str]:
        counts = Counter(block for table in self._tables.values() for block in table)
        for owner, table in self._tables.items():
            if len(set(table)) != len(table):
                yield f"the table of {owner!r} names a block twice: {table}"
        for block in counts:
            if not 0 <= block < self.num_blocks:
                yield f"block {block} in a table, of {self.num_blocks} (scratch or out of range)"
        for block, count in enumerate(self._ref_counts):
            if count != counts[block]:
                yield f"block {block} counts {count} references, tables hold {counts[block]}"

    def _state_problems(self) -> Iterator[str]:
        free = Counter(self._free)
        for block, count in enumerate(self._ref_counts):
            states = free[block] + (block in self._evictable) + (count > 0)
            if states != 1:
                yield (
                    f"block {block} is in {states} states: {free[block]} times free, "
                    f"evictable {block in self._evictable}, {count} references"
                )
        if len(self._free) + len(self._evictable) > self.num_blocks:
            yield f"{self.num_available} blocks available of {self.num_blocks}"

    def _cache_problems(self) -> Iterator[str]:
        for key, block in self._cached.items():
            if self._keys[block] != key:
                yield f"block {block} is cached under {key}, but says {self._keys[block]}"
            if self._prefix_ids[block] is None or len(key[1]) != self.block_size:
                yield f"cached block {block} is unnamed or not full: {key}"
        if len(self._cached) != sum(key is not None for key in self._keys):
            yield f"{len(self._cached)} cached blocks, but other blocks have a key too"
        for block in self._evictable:
            if self._keys[block] is None:
                yield f"block {block} is evictable, but has no key"
        names = [self._prefix_ids[block] for block in self._cached.values()]
        if len(set(names)) != len(names):
            yield "two cached blocks have the same prefix id"
