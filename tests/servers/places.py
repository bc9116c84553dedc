"""Servers that tests break while an engine serves from them, each behind a proxy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from kvferry.store.servers.remote import RemoteClient, RemoteStore
from tests.servers.mooncake import MooncakeServer
from tests.servers.process import LOCALHOST
from tests.servers.proxy import Proxy, running_proxy
from tests.servers.seaweed import BUCKET, SeaweedServer
from tests.servers.valkey import ValkeyCluster, ValkeyServer, running_valkey

# How long a fault lasts; CONTRIBUTING.md says when it is longer.
FAULT_SECONDS = float(os.environ.get("KVFERRY_TEST_FAULT_SECONDS", "1"))


class Place(NamedTuple):
    """A server, a store on it, and the proxy that the store's clients reach it by."""

    server: Any
    url: str
    proxy: Proxy

    def kill(self) -> None:
        """End the server, and what holds its values; those who connect are refused."""
        self.server.process.kill()
        if hasattr(self.server, "lender"):
            self.server.lender.kill()
        self.proxy.refuse()

    def start(self) -> None:
        """Start it again, empty."""
        self.server.start()
        self.proxy.pass_all()


def client_of(store: RemoteStore) -> RemoteClient:
    """The client of a store, to put under a name what a store would not."""
    return store._client


def valkey_url(port: int, login: str = "", prefix: str = "kv") -> str:
    return f"valkey://{login}{LOCALHOST}:{port}/{prefix}"


def s3_url(endpoint: str, prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}?endpoint={endpoint}&region=us-east-1"


class AllServers(NamedTuple):
    """One of each kind, and a directory."""

    valkey: ValkeyServer
    cluster: ValkeyCluster
    s3: SeaweedServer
    mooncake: MooncakeServer
    directory: Path

    def urls(self, prefix: str) -> dict[str, str | list[str]]:
        """A store of each kind, and one of three tiers, that no other prefix shares."""
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
    """How many lines have each text. The log has no others."""
    said = [sum(text in line for line in lines) for text in texts]
    assert len(lines) == sum(said), lines
    return said


# Of a store that fails, or that a busy machine makes too slow.
_LEFT_ALONE = (
    "not used until",
    "used again",
    "fails again",
    "a value could not be stored",
    "takes values again",
)


def assert_said_once(lines: Sequence[str], num_stores: int = 1) -> None:
    """Each store that fails says once that it is left alone and once that it is used again. A busy
    machine, and a server that answers while its values do not come, may have it say once each,
    besides, that it takes no value and that it fails again."""
    left, used, *besides = num_said(lines, *_LEFT_ALONE)
    assert 1 <= left == used <= num_stores, lines
    assert max(besides) <= num_stores, lines


def assert_said_if_busy(lines: Sequence[str], *texts: str, num_stores: int = 1) -> list[int]:
    """Each store, though it does not fail, says at most once that it is left alone, and so on, as
    on a busy machine. It may still be left alone at the end. How many of the other lines have each
    text."""
    *others, left, used, again, refused, takes = num_said(lines, *texts, *_LEFT_ALONE)
    assert again <= used <= left <= num_stores, lines
    assert max(refused, takes) <= num_stores, lines
    return others


def name_of(test: str) -> str:
    """A prefix for one test, on servers that live longer."""
    return re.sub(r"\W+", "-", test)


@contextmanager
def valkey_place() -> Iterator[Place]:
    """A server of its own."""
    with running_valkey() as server, running_proxy(server.port) as proxy:
        yield Place(server, valkey_url(proxy.port), proxy)


@contextmanager
def s3_place(server: SeaweedServer, prefix: str) -> Iterator[Place]:
    """Clients need the environment of the server."""
    with running_proxy(_port_of(server.endpoint)) as proxy:
        yield Place(server, s3_url(f"http://{LOCALHOST}:{proxy.port}", prefix), proxy)


@contextmanager
def mooncake_place(server: MooncakeServer, prefix: str) -> Iterator[Place]:
    """The proxy stands before the master; values do not pass it."""
    with running_proxy(_port_of(server.master)) as proxy:
        yield Place(server, f"mooncake://{LOCALHOST}:{proxy.port}/{prefix}", proxy)


@contextmanager
def mooncake_values_place(root: Path) -> Iterator[Place]:
    """A server of its own; the proxy stands before the memory that is lent, and values pass it."""
    server = MooncakeServer(root, has_metadata=True)
    try:
        with running_proxy(server.values_port) as proxy:
            server.move_values(proxy.port)
            yield Place(server, f"mooncake://{server.master}/kv?metadata={server.metadata}", proxy)
    finally:
        server.stop()


def _port_of(address: str) -> int:
    return int(address.rpartition(":")[2])
