"""Which blocks a request has, and which it left to a connector. No tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from enum import Enum
from typing import NamedTuple

from kvferry.engine.block_pool import BlockHash, BlockPool, HashChain
from kvferry.engine.request import Request


class KVCache:
    """Block tables of all requests over one pool, and the local prefix cache between them.

    A block is offered to the prefix cache only when the KV of all its tokens is really there: after
    the step that computed or loaded it has reported success. So nobody shares a block that a failed
    load left empty.

    Not thread-safe; belongs to the scheduler.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._chains: dict[str, HashChain] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def local_hit(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix: whole blocks, never the last token. Changes nothing
        but the request's own hashes."""
        limit = (request.num_tokens - 1) // self.block_size
        return self.pool.find_prefix(self._hashes(request)[:limit])

    def admit(self, request: Request, hit: list[int], num_tokens: int) -> bool:
        """Give a request without blocks the blocks of its local hit and new ones for the rest of
        its first `num_tokens` tokens; all or nothing."""
        # First, so that making room does not take what was found.
        self.pool.acquire(hit)
        new = self.pool.allocate(self.num_blocks_for(num_tokens) - len(hit))
        if new is None:
            self.pool.free(hit)
            return False
        request.block_ids = hit + new
        request.num_cached_blocks = len(hit)
        return True

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make the table long enough for `num_tokens` tokens; all or nothing."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        new = self.pool.allocate(missing)
        if new is None:
            return False
        request.block_ids += new
        return True

    def commit(self, request: Request) -> None:
        """Offer the blocks that computed tokens fill to the prefix cache."""
        full = request.num_computed_tokens // self.block_size
        if full <= request.num_cached_blocks:
            return
        # Hashes end where whole blocks of tokens end, which is never before computed tokens do.
        hashes = self._hashes(request)
        if hashes:
            for index in range(request.num_cached_blocks, full):
                self.pool.cache(request.block_ids[index], hashes[index])
        request.num_cached_blocks = full

    def spoil(self, request: Request, invalid_block_ids: Collection[int]) -> bool:
        """If a computed token of `request` is in one of these blocks, take back its computed tokens
        from the first such block on, and forget these blocks and all that was computed from them.

        Returns:
            True if the request uses one of the blocks.
        """
        num_computed = self.num_blocks_for(request.num_computed_tokens)
        for index, block_id in enumerate(request.block_ids[:num_computed]):
            if block_id in invalid_block_ids:
                request.num_computed_tokens = index * self.block_size
                request.num_cached_blocks = min(request.num_cached_blocks, index)
                self.pool.uncache(request.block_ids[index:])
                return True
        return False

    def take(self, request: Request) -> list[int]:
        """The request lets go of its blocks and computed tokens, the caller now holds them."""
        block_ids = request.block_ids
        # A new list: views of the last step must not see what happens to the old one.
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_cached_blocks = 0
        return block_ids

    def release(self, request: Request) -> None:
        """Free the request's blocks; its computed tokens are gone."""
        self.pool.free(self.take(request))

    def forget(self, request: Request) -> None:
        """The request is over: drop what is kept per request."""
        self._chains.pop(request.request_id, None)

    def _hashes(self, request: Request) -> list[BlockHash]:
        if not self._prefix_caching or not request.extra_keys.cacheable:
            return []
        chain = self._chains.get(request.request_id)
        if chain is None:
            chain = HashChain(self.block_size, request.extra_keys)
            self._chains[request.request_id] = chain
        return chain.extend(request.all_token_ids)


class LentFor(Enum):
    """Which report gives the blocks back."""

    LOAD = "finished_recving"
    SAVE = "finished_sending"


class _Loan(NamedTuple):
    block_ids: list[int]
    overdue: float


class LentBlocks:
    """Who was lent what, until the connector reports that it is done.

    An overdue loan is not ended, since the connector might still write: it only stops counting as
    something to wait for. One request id may have a loan of each kind.
    """

    def __init__(self) -> None:
        self._loans: dict[tuple[str, LentFor], _Loan] = {}

    def lend(self, request_id: str, reason: LentFor, block_ids: list[int], overdue: float) -> None:
        """Note a loan; `overdue` in seconds of the owner's clock."""
        self._loans[request_id, reason] = _Loan(block_ids, overdue)

    def take_back(self, request_id: str, reason: LentFor) -> list[int] | None:
        """End a loan: its blocks, or None if there is none such."""
        loan = self._loans.pop((request_id, reason), None)
        return None if loan is None else loan.block_ids

    def is_awaited(self, now: float) -> bool:
        """True if blocks are lent that should come back soon."""
        return any(loan.overdue > now for loan in self._loans.values())

    def __contains__(self, request_id: str) -> bool:
        return any((request_id, reason) in self._loans for reason in LentFor)

    def request_ids(self, reason: LentFor) -> set[str]:
        return {request_id for request_id, kind in self._loans if kind is reason}

    def tables(self) -> Iterator[list[int]]:
        return (loan.block_ids for loan in self._loans.values())

    def num_blocks(self) -> int:
        return sum(len(block_ids) for block_ids in self.tables())
