"""A process that makes every call of a client to a hostile server, and measures its own memory.

    python -m tests.store.servers.attacked s3 ENDPOINT BUCKET SECONDS

It prints as JSON the outcome of each call, how long the call kept another thread from running, and
how much memory all calls took. BUCKET may be several names with commas between them, which are
asked one after the other.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from kvferry.errors import StoreError
from kvferry.store.servers.remote import RemoteClient
from tests.servers.victim import Ticker

START_SECONDS = 60.0

MOST_NAMES = 100_000
"""Names after which a scan stops here, since stores bound the length of a list, not clients."""


def make_client(kind: str, place: str, way: str) -> RemoteClient:
    if kind == "s3":
        from kvferry.store.servers.objects import ObjectClient, ObjectOptions

        return ObjectClient("s3", way, ObjectOptions(endpoint=place, region="us-east-1"))
    from kvferry.store.servers.mooncake import MooncakeClient, MooncakeOptions

    client = MooncakeClient(place, MooncakeOptions(admin=way))
    # The master is honest, and the client's child may take long to start on a busy machine.
    client.exists(["kv/a"], time.monotonic() + START_SECONDS)
    return client


def calls_of(client: RemoteClient, until: Callable[[], float]) -> dict[str, Callable[[], object]]:
    buffer = memoryview(bytearray(16))
    return {
        "read": lambda: client.read("kv/a", [(0, buffer)], until()),
        "size": lambda: client.read("kv/a", [], until()),
        "put": lambda: client.put("kv/a", [bytes(100)], until()).value,
        "exists": lambda: client.exists([f"kv/{n}" for n in range(20)], until()),
        "delete": lambda: client.delete("kv/a", until()),
        "scan": lambda: sum(1 for _ in islice(client.scan("kv/", until()), MOST_NAMES)),
    }


def attack(client: RemoteClient, seconds: float, ticker: Ticker) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, call in calls_of(client, lambda: time.monotonic() + seconds).items():
        row: dict[str, Any] = {}

        def made(call: Callable[[], object] = call, row: dict[str, Any] = row) -> None:
            started = time.monotonic()
            row.clear()
            try:
                row["result"] = call()
            except StoreError as error:
                row["error"] = str(error)
            row["seconds"] = time.monotonic() - started

        row["stall"] = ticker.stall_of(made)
        found[name] = row
    return found


def main(kind: str, place: str, ways: str, seconds: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ticker = Ticker()
    found: dict[str, dict[str, Any]] = {}
    for way in ways.split(","):
        client = make_client(kind, place, way)
        rows = attack(client, float(seconds), ticker)
        found |= {f"{way} {name}": row for name, row in rows.items()}
        client.close()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    facts = {"own_bytes": (after - before) << 10, "child_bytes": child << 10}
    print(json.dumps({"calls": found, **facts}))


if __name__ == "__main__":
    main(*sys.argv[1:])
