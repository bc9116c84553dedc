"""Servers behind proxies, which tests break while an engine uses them, and the URLs of stores."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.store.servers.remote import RemoteClient, RemoteStore
from tests.servers.mooncake import MooncakeServer
from tests.servers.process import LOCALHOST
from tests.servers.proxy import Proxy, running_proxy
from tests.servers.seaweed import BUCKET, SeaweedServer
from tests.servers.valkey import ValkeyCluster, ValkeyServer, running_valkey

# How long a fault lasts. CONTRIBUTING.md says when to make it longer.
FAULT_SECONDS = float(os.environ.get("KVFERRY_TEST_FAULT_SECONDS", "1"))


class Place(NamedTuple):
    """A server, the URL of a store on it, and the proxy by which the store's clients reach it."""

    server: Any
    url: str
    proxy: Proxy

    def kill(self) -> None:
        """Kill the server and the process that holds its values; the proxy refuses connections."""
        self.server.process.kill()
        if hasattr(self.server, "lender"):
            self.server.lender.kill()
        self.proxy.refuse()

    def start(self) -> None:
        """Start the server again, empty."""
        self.server.start()
        self.proxy.pass_all()


def client_of(store: RemoteStore) -> RemoteClient:
    """Return the client of a store, by which a test can put values that a store would not put."""
    return store._client.inner


def valkey_url(port: int, login: str = "", prefix: str = "kv") -> str:
    return f"valkey://{login}{LOCALHOST}:{port}/{prefix}"


def s3_url(endpoint: str, prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}&region=us-east-1"


class AllServers(NamedTuple):
    """One server of each kind, and a directory."""

    valkey: ValkeyServer
    cluster: ValkeyCluster
    s3: SeaweedServer
    mooncake: MooncakeServer
    directory: Path

    def urls(self, prefix: str) -> dict[str, str | list[str]]:
        """Return URLs for a prefix: of a store of each kind, and of a store with three tiers."""
        valkey = valkey_url(self.valkey.port, prefix=prefix)
        nodes = ",".join(f"{LOCALHOST}:{node.port}" for node in self.cluster.nodes)
        directory = (self.directory / prefix).as_uri()
        return {
            "valkey": valkey,
            "cluster": f"valkey://{nodes}/{prefix}?cluster=true",
            "s3": s3_url(self.s3.endpoint, prefix),
            "mooncake": f"mooncake://{self.mooncake.master}/{prefix}",
            "tiers": [
                f"{directory}?max_bytes=64MiB",
                f"{valkey}-tier",
                s3_url(self.s3.endpoint, f"{prefix}-tier"),
            ],
        }


def num_said(lines: Sequence[str], *texts: str) -> list[int]:
    """Count the log lines that have each text, and assert that there are no others."""
    said = [sum(text in line for line in lines) for text in texts]
    assert len(lines) == sum(said), lines
    return said


# What a store logs if it fails, or if a busy machine makes it too slow.
_LEFT_ALONE = (
    "not used until",
    "used again",
    "fails again",
    "a value could not be stored",
    "takes values again",
)


def assert_said_once(lines: Sequence[str], num_stores: int = 1) -> None:
    """Assert that each failing store says once that it is left alone and once that it is used
    again. It may also say, once each, that it fails again, that a value could not be stored, and
    that it takes values again: on a busy machine, or if a server answers but gives no values."""
    left, used, *besides = num_said(lines, *_LEFT_ALONE)
    assert 1 <= left == used <= num_stores, lines
    assert max(besides) <= num_stores, lines


def assert_said_if_busy(lines: Sequence[str], *texts: str, num_stores: int = 1) -> list[int]:
    """Assert that each store, though it does not fail, says each line of `_LEFT_ALONE` at most
    once, as on a busy machine. It may still be left alone at the end. Return how many of the other
    lines have each text."""
    *others, left, used, again, refused, takes = num_said(lines, *texts, *_LEFT_ALONE)
    assert again <= used <= left <= num_stores, lines
    assert max(refused, takes) <= num_stores, lines
    return others


def name_of(test: str) -> str:
    """Return a prefix for the values of one test, on servers that live longer."""
    return re.sub(r"\W+", "-", test)


@contextmanager
def valkey_place() -> Iterator[Place]:
    """Start a server of its own behind a proxy."""
    with running_valkey() as server, running_proxy(server.port) as proxy:
        yield Place(server, valkey_url(proxy.port), proxy)


def _stored_keys(place: Place) -> list[bytes]:
    return [key for key in place.server.ask("KEYS", "*") if place.server.ask("STRLEN", key) > 4096]


def _flip_all(place: Place) -> None:
    """Another last byte in every record."""
    for stored in _stored_keys(place):
        last = place.server.ask("STRLEN", stored) - 1
        byte = place.server.ask("GETRANGE", stored, last, last)
        place.server.ask("SETRANGE", stored, last, bytes([byte[0] ^ 1]))


def _nothing(_: Place) -> None:
    pass


def _fill(place: Place) -> None:
    place.server.ask("CONFIG", "SET", "maxmemory", 1)


def _make_room(place: Place) -> None:
    place.server.ask("CONFIG", "SET", "maxmemory", 0)


FAULTS: dict[str, tuple[Callable[[Place], Any], Callable[[Place], Any]]] = {
    "killed": (Place.kill, Place.start),
    "emptied": (lambda place: place.server.ask("FLUSHALL"), _nothing),
    "stopped": (
        lambda place: place.server.process.pause(),
        lambda place: place.server.process.resume(),
    ),
    "cut": (lambda place: place.proxy.cut_after(3000), lambda place: place.proxy.pass_all()),
    "full": (_fill, _make_room),
    "wrong": (_flip_all, _nothing),
    "slow": (lambda place: place.proxy.limit(4000), lambda place: place.proxy.pass_all()),
}
"""How a fault of a `valkey_place` begins, and how it ends."""


@contextmanager
def s3_place(server: SeaweedServer, prefix: str) -> Iterator[Place]:
    """Put a proxy before the server. Clients need the environment of the server."""
    with running_proxy(_port_of(server.endpoint)) as proxy:
        yield Place(server, s3_url(f"http://{LOCALHOST}:{proxy.port}", prefix), proxy)


@contextmanager
def mooncake_place(server: MooncakeServer, prefix: str) -> Iterator[Place]:
    """Put a proxy before the master. Values do not pass it."""
    with running_proxy(_port_of(server.master)) as proxy:
        yield Place(server, f"mooncake://{LOCALHOST}:{proxy.port}/{prefix}", proxy)


@contextmanager
def mooncake_values_place(root: Path) -> Iterator[Place]:
    """Start a server of its own, with a proxy before the lent memory, which all values pass."""
    server = MooncakeServer(root, has_metadata=True)
    try:
        with running_proxy(server.values_port) as proxy:
            server.move_values(proxy.port)
            yield Place(server, f"mooncake://{server.master}/kv?metadata={server.metadata}", proxy)
    finally:
        server.stop()


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
