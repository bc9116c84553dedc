"""The conformance suite on three tiers that are real: a directory, Valkey, and S3."""

from __future__ import annotations

import secrets

import pytest

from kvferry.observe import Observer
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.testing.stores import ProbeTests, RemoteStoreTests
from tests.servers.process import LOCALHOST
from tests.servers.seaweed import BUCKET
from tests.store.tiers.states import settle
from tests.store.tiers.test_tiered import OfNearest

SPACE = b"t" * 32


class Settled(OfNearest):
    """Puts a value in all tiers before it returns: a copy under way may be seen for a moment after
    the value was removed."""

    def put(self, key, buffers, *deadline):
        result = super().put(key, buffers, *deadline)
        settle(self)
        return result


class TestTiersOfServers(ProbeTests, RemoteStoreTests):
    persistent = True

    @pytest.fixture(autouse=True)
    def _servers(self, valkey_server, seaweed, monkeypatch):
        for name, value in seaweed.environment.items():
            monkeypatch.setenv(name, value)
        self.valkey, self.s3 = valkey_server, seaweed
        self.prefix = secrets.token_hex(8)  # of this test

    def _urls(self, tmp_path):
        place = f"{self.prefix}-{tmp_path.name}"
        options = f"endpoint={self.s3.endpoint}&region=us-east-1"
        return [
            (tmp_path / "near").as_uri(),
            f"valkey://{LOCALHOST}:{self.valkey.port}/{place}",
            f"s3://{BUCKET}/{place}?{options}",
        ]

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        assert max_bytes is None
        near, *servers = self._urls(tmp_path)
        stores = [
            open_one(near, Opening(observer=observer or Observer())),
            *(open_one(url, Opening(namespace=SPACE)) for url in servers),
        ]
        return Settled(stores, tmp_path)

    def poke(self, store, key, value):
        for each in store.stores:
            each.delete(key)
            if value is not None:
                each.put(key, [value])

    def peek(self, store, key):
        found = [*(store.tmp_path / "near").glob(f"records/*/{key.hex()}*")]
        return found[0].read_bytes() if found else None
