"""How many threads an engine has at most."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import ExitStack

import pytest

from kvferry.store.io_pool import IOPool
from kvferry.testing.stores.hooks import wait_until
from tests.servers.peer import running_peer
from tests.servers.process import LOCALHOST

from .keeping import PROMPT

OF_DIRECTORY = Counter(
    {"kvferry-io": 4, "kvferry-seal": 1, "kvferry-store": 1, "kvferry-erased": 1}
)
OF_OTHERS = Counter({"kvferry-probe": 6, "kvferry-journal": 1, "kvferry-serve": 1})


@pytest.fixture
def threads(monkeypatch):
    """Counts by name the threads that are new, with all that the pools in use may start."""
    made, before = [], set(threading.enumerate())
    make = IOPool.__init__

    def noting(pool, *args):
        make(pool, *args)
        made.append(pool)

    monkeypatch.setattr(IOPool, "__init__", noting)

    def names() -> Counter[str]:
        """By the first two words. A busy machine makes a tier look away: then a thread tries it."""
        new = set(threading.enumerate()) - before
        return Counter("-".join(each.name.split("-")[:2]) for each in new)

    def count() -> Counter[str]:
        wait_until(lambda: not names()["kvferry-tier"], "all stores are open, nothing is copied")
        end = threading.Event()
        for pool in [each for each in made if each._threads]:
            for _ in range(pool.num_threads):
                pool.submit(lambda _job: end.wait())
        try:
            return names() - Counter({"kvferry-tier": 99})
        finally:
            end.set()

    return count


@pytest.mark.parametrize("has_all", [False, True])
def test_an_engine_has_few_threads(make_host, tmp_path, valkey_server, threads, has_all):
    options = {"store": [f"file://{tmp_path}/store"], "weights": b"t" * 32, "audit": "first"}
    options["load_timeout_seconds"] = 60.0
    with ExitStack() as stack:
        if has_all:
            namespace = make_host(weights=b"t" * 32).scheduler.requests.namespace
            peers = [
                stack.enter_context(running_peer(tmp_path / "peer", namespace, tmp_path))
                for _ in range(2)
            ]
            options["store"] += [
                f"valkey://{LOCALHOST}:{valkey_server.port}",
                *(each.url for each in peers),
            ]
            options["record"] = str(tmp_path / "journal")
            options["serve"] = f"{LOCALHOST}:0?key_file={tmp_path}/peers.key"
        host = make_host(**options)
        stack.callback(host.parts[0].close)
        tiers = host.parts[0].store.tiers
        wait_until(lambda: all(tier.state == "up" for tier in tiers()), "all stores are open")
        for name in ("writer", "reader"):
            host.run(name, PROMPT)
            host.settle()
            host.forget_memory()
        assert host.observer["audits"] == 1
        found = threads()
    assert OF_DIRECTORY <= found <= (OF_DIRECTORY + OF_OTHERS if has_all else OF_DIRECTORY)
