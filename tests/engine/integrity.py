"""What must hold between the steps of the embedded engine, whatever happens in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.engine.block_pool import BlockPool
from kvferry.engine.scheduler import Scheduler
from kvferry.types import NULL_BLOCK


def check_pool(pool: BlockPool, tables: Iterable[Sequence[int]]) -> None:
    """Fail if the pool contradicts itself or `tables`, which are the block ids of every holder."""
    held = {i for i in range(1, pool.num_blocks) if pool._ref_counts[i] > 0}
    assert min(pool._ref_counts) >= 0, "a block was freed more often than held"
    assert pool._ref_counts[NULL_BLOCK] == 0, "the null block is held"
    assert NULL_BLOCK not in pool._free, "the null block is free"
    assert held.isdisjoint(pool._free), "a block is both held and free"
    assert len(held) + pool.num_free == pool.num_usable, "a block is neither held nor free"
    assert len(pool._block_of) == len(pool._keys_of), "cache maps differ in size"
    for block_id, (key, _) in pool._keys_of.items():
        assert pool._block_of[key] == block_id, "cache maps disagree"
    counts = [0] * pool.num_blocks
    for table in tables:
        for block_id in table:
            counts[block_id] += 1
    assert counts == pool._ref_counts, "reference counts differ from the holders' tables"


def check_scheduler(scheduler: Scheduler) -> None:
    """Fail if blocks and queues contradict each other."""
    requests = {request.request_id: request for request in scheduler.requests}
    waiting, running, loaded = scheduler._waiting, scheduler._running, scheduler._loaded()
    tables = [request.block_ids for request in requests.values()]
    check_pool(scheduler.pool, [*tables, *scheduler._lent_tables()])
    ids = [*(request.request_id for request in waiting), *running, *scheduler._loading]
    assert sorted(ids) == sorted(requests), "a request is in no queue, or in two"
    assert all(requests[request_id].block_ids for request_id in running)
    assert loaded == list(waiting)[: len(loaded)], "a loaded request is not at the head"
    for request in waiting:
        if request not in loaded:
            assert request.num_computed_tokens == 0, f"{request!r} has KV without blocks"
    for request in [*loaded, *running.values()]:
        assert request.num_computed_tokens < request.num_tokens, f"{request!r} is complete"
