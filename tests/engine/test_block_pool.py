"""The block pool against a model of it."""

from __future__ import annotations

from itertools import takewhile

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.engine.block_pool import BlockPool
from kvferry.keys import ChunkKeys
from tests.engine.integrity import check_pool

SIZE = 3


def chain(*token_ids: int):
    keys = ChunkKeys(bytes(32), SIZE)
    keys.extend(token_ids)
    return keys.keys


def cache(pool: BlockPool, block_ids, keys, parent=None) -> None:
    for block_id, key in zip(block_ids, keys, strict=True):
        pool.cache(block_id, key, parent)
        parent = key


def cached(pool: BlockPool, keys, parent=None) -> list[int]:
    block_ids = pool.allocate(len(keys))
    cache(pool, block_ids, keys, parent)
    return block_ids


def test_allocation_is_all_or_nothing_and_never_the_null_block():
    pool = BlockPool(5)
    assert pool.allocate(5) is None
    assert pool.num_free == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.allocate(0) == []
    assert pool.allocate(1) is None


def test_blocks_without_content_go_first_then_the_end_of_the_oldest_prefix():
    pool = BlockPool(8)
    old, new = cached(pool, chain(*range(6))), cached(pool, chain(*range(50, 56)))
    empty = pool.allocate(3)
    pool.free(old)
    pool.free(new)
    pool.free(empty)
    taken = pool.allocate(7)
    assert set(taken[:3]) == set(empty)
    assert taken[3:] == [old[1], old[0], new[1], new[0]]


def test_a_used_prefix_is_the_last_to_go():
    pool = BlockPool(5)
    first, second = cached(pool, chain(1, 2, 3)), cached(pool, chain(4, 5, 6))
    pool.free(first)
    pool.free(second)
    pool.acquire(first)
    pool.free(first)
    assert pool.allocate(3)[2] == second[0]
    assert pool.find_prefix(chain(1, 2, 3)) == first


def test_of_two_equal_blocks_the_first_stays_findable():
    pool = BlockPool(5)
    (first,) = cached(pool, chain(1, 2, 3))
    (second,) = cached(pool, chain(1, 2, 3))
    assert pool.find_prefix(chain(1, 2, 3)) == [first]
    pool.free([first, second])
    check_pool(pool, [])


def test_uncaching_takes_what_was_computed_from_a_block_and_nothing_else():
    pool = BlockPool(12)
    trunk = chain(*range(9))
    branch = chain(0, 1, 2, 3, 4, 5, 99, 98, 97)
    other = chain(7, 7, 7)
    blocks = cached(pool, trunk)
    (leaf,) = cached(pool, branch[2:], branch[1])
    cached(pool, other)
    assert pool.find_prefix(branch) == [*blocks[:2], leaf]
    # The second twice over: its descendant is given as well, and an id that is not cached.
    pool.uncache([blocks[2], blocks[1], 11, 400])
    assert pool.find_prefix(trunk) == pool.find_prefix(branch) == blocks[:1]
    assert len(pool.find_prefix(other)) == 1
    # Nor is it found once the block before it is computed again.
    (again,) = cached(pool, trunk[1:2], trunk[0])
    assert pool.find_prefix(trunk) == pool.find_prefix(branch) == [blocks[0], again]


def test_integrity_check_sees_a_double_free():
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.free([block])
    pool.free([block])
    with pytest.raises(AssertionError, match="freed more often"):
        check_pool(pool, [])


class PoolMachine(RuleBasedStateMachine):
    """Holders of tables over few contents; the model is the tables and what is known where."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.tables: list[tuple[list[int], list]] = []

    @rule(tokens=st.lists(st.integers(0, 1), max_size=5 * SIZE))
    def admit(self, tokens):
        keys = chain(*tokens)
        hit = self.pool.find_prefix(keys)
        assert len(set(hit)) == len(hit)
        free = self.pool.num_free
        self.pool.acquire(hit)
        new = self.pool.allocate(len(keys) - len(hit))
        if new is None:
            self.pool.free(hit)
            assert self.pool.num_free == free
            return
        cache(self.pool, hit + new, keys)
        assert len(self.pool.find_prefix(keys)) == len(keys), "just cached"
        self.tables.append((hit + new, keys))

    @rule(data=st.data())
    def finish(self, data):
        if self.tables:
            table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.pool.free(table)

    @rule(data=st.data())
    def spoil(self, data):
        block_ids = data.draw(st.lists(st.integers(0, self.pool.num_blocks - 1), max_size=3))
        spoiled = set(block_ids)
        before = [self.pool.find_prefix(keys) for _, keys in self.tables]
        self.pool.uncache(block_ids)
        for (_, keys), blocks in zip(self.tables, before, strict=True):
            left = list(takewhile(lambda block: block not in spoiled, blocks))
            assert self.pool.find_prefix(keys) == left, "found through a spoiled block"

    @rule()
    def reset(self):
        self.pool.reset()
        for _, keys in self.tables:
            assert not any(self.pool.find_prefix([key]) for key in keys)

    @invariant()
    def books_balance(self):
        if hasattr(self, "pool"):
            check_pool(self.pool, (table for table, _ in self.tables))


TestPoolStateful = PoolMachine.TestCase
TestPoolStateful.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
