"""What tests ask and await of the tiers of a store."""

from __future__ import annotations

from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.stores.hooks import wait_until


def state(store: TieredStore, number: int = 0) -> str:
    """Of a tier. One that is up has its store."""
    tier = store._tiers[number]
    with tier._lock:
        return str(tier.status.state)


def num_waiting(store: TieredStore, number: int) -> int:
    """How many values wait to be written to a tier, the one that is being written included."""
    return store._threads[number].num_waiting


def is_at_work(store: TieredStore) -> bool:
    return any(thread.is_at_work for thread in store._threads)


def rest(store: TieredStore) -> None:
    """Wait until the threads of the tiers have done what is due."""
    wait_until(lambda: not is_at_work(store), "nothing is due")


def settle(store: TieredStore) -> None:
    """Wait until nothing waits to be written to other tiers."""

    def is_settled() -> bool:
        return not any(thread.is_at_work or thread.num_waiting for thread in store._threads)

    wait_until(is_settled, "nothing waits")
