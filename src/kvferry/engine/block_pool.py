"""The engine's KV blocks: which are free, held or cached, and which requests hold them.

The engine's scheduler calls this on the engine's thread. No tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

from kvferry.engine.request import Request
from kvferry.keys import ChunkKeys
from kvferry.types import ChunkKey

_NAMESPACE = bytes(32)
"""Keys of blocks never leave the engine, so they name token ids alone, and no model."""


class BlockPool:
    """A fixed number of reference-counted blocks, and a prefix cache of the full ones.

    Every block but the null block is either held (count > 0) or free. A free block stays in the
    cache until it is allocated again. Blocks that were not cached when they were freed are
    allocated first, the others in the order in which they were freed.

    Not thread-safe; belongs to the scheduler.
    """

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of `num_blocks` blocks, the null block included."""
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        # By block: its key, and the key of the block before it.
        self._keys_of: dict[int, tuple[ChunkKey, ChunkKey | None]] = {}
        self._block_of: dict[ChunkKey, int] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated, cached ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Hold `count` free blocks and evict their cached content; None if too few are free."""
        if count > self.num_free:
            return None
        block_ids = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
            self._forget(block_id)
        return block_ids

    def find_prefix(self, keys: Iterable[ChunkKey]) -> list[int]:
        """Return the cached blocks of the longest prefix hit. Only `acquire` holds them."""
        block_ids: list[int] = []
        for key in keys:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Increment the reference counts of cached blocks."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Decrement the reference counts of blocks, given in token order. The end of a prefix will
        be evicted before its start, because the end is useless without the start."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._keys_of:
                    self._free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, key: ChunkKey, parent: ChunkKey | None) -> None:
        """Let `find_prefix` find a held, full block; `parent` is the key of the block before it. Of
        two blocks with equal content the first stays."""
        if key not in self._block_of and block_id not in self._keys_of:
            self._keys_of[block_id] = key, parent
            self._block_of[key] = block_id

    def uncache(self, block_ids: Iterable[int]) -> None:
        """Forget the content of blocks, and of every cached block computed from it."""
        pending = [
            self._keys_of[block_id][0] for block_id in block_ids if block_id in self._keys_of
        ]
        if not pending:
            return
        children: dict[ChunkKey | None, list[ChunkKey]] = {}
        for key, parent in self._keys_of.values():
            children.setdefault(parent, []).append(key)
        while pending:
            key = pending.pop()
            # The loop may already have evicted it as a descendant of another given block.
            if key in self._block_of:
                self._forget(self._block_of[key])
            pending.extend(children.pop(key, ()))

    def reset(self) -> None:
        """Forget all cached content; held blocks stay held."""
        self._keys_of.clear()
        self._block_of.clear()

    def _forget(self, block_id: int) -> None:
        keys = self._keys_of.pop(block_id, None)
        if keys is not None:
            del self._block_of[keys[0]]


class KVCache:
    """Grows and frees the block tables of requests, and shares cached prefixes between them.

    A block enters the prefix cache only after the step that computed or loaded it has reported
    success, so no request shares a block that a failed load left empty.

    Not thread-safe; belongs to the scheduler.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_caching = prefix_caching

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def local_hit(self, request: Request) -> list[int]:
        """Return the blocks of the longest cached prefix: whole blocks, never the last token.
        Changes nothing but the request's own keys."""
        limit = (request.num_tokens - 1) // self.block_size
        return self.pool.find_prefix(self._keys(request)[:limit])

    def admit(self, request: Request, hit: list[int], num_tokens: int) -> bool:
        """Give a request that has no blocks those of its local hit, and new ones for the rest of
        its first `num_tokens` tokens. All or nothing; returns whether the pool had room."""
        # Acquire the hit first: `allocate` may evict, and must not evict it.
        self.pool.acquire(hit)
        new = self.pool.allocate(self.num_blocks_for(num_tokens) - len(hit))
        if new is None:
            self.pool.free(hit)
            return False
        request.blocks.ids = hit + new
        request.blocks.num_cached = len(hit)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the request's table long enough for `num_tokens` tokens. Returns as `admit`."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        new = self.pool.allocate(missing)
        if new is None:
            return False
        request.blocks.ids += new
        return True

    def commit(self, request: Request) -> None:
        """Offer the blocks that the request's computed tokens fill to the prefix cache."""
        full = request.num_computed_tokens // self.block_size
        keys = self._keys(request)[:full]
        for index in range(request.blocks.num_cached, len(keys)):
            parent = keys[index - 1] if index else None
            self.pool.cache(request.block_ids[index], keys[index], parent)
        request.blocks.num_cached = full

    def spoil(self, request: Request, invalid_block_ids: Collection[int]) -> bool:
        """If a computed token of `request` is in an invalid block, reset its computed tokens to the
        start of the first such block, uncache that block and everything computed from it, and
        return True. Else return False."""
        num_computed = self.num_blocks_for(request.num_computed_tokens)
        for index, block_id in enumerate(request.block_ids[:num_computed]):
            if block_id in invalid_block_ids:
                request.num_computed_tokens = index * self.block_size
                request.blocks.num_cached = min(request.blocks.num_cached, index)
                self.pool.uncache(request.block_ids[index:])
                return True
        return False

    def detach(self, request: Request) -> list[int]:
        """Take all blocks from the request and return them. Reset its computed tokens."""
        block_ids = request.block_ids
        # A new list: the last step still shows the old one.
        request.blocks.ids = []
        request.num_computed_tokens = 0
        request.blocks.num_cached = 0
        return block_ids

    def release(self, request: Request) -> None:
        """Free the request's blocks; its computed tokens are gone."""
        self.pool.free(self.detach(request))

    def _keys(self, request: Request) -> list[ChunkKey]:
        """Return the keys of all full blocks; none without prefix caching."""
        if not self._prefix_caching:
            return []
        blocks = request.blocks
        if blocks.keys is None:
            blocks.keys = ChunkKeys(_NAMESPACE, self.block_size)
        blocks.keys.extend(request.all_token_ids)
        return blocks.keys.keys
