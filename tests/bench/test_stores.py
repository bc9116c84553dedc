"""The stores benchmark measures what it says, on real servers, and leaves nothing there."""

from __future__ import annotations

import pytest

from kvferry.bench import BenchOptions, stores
from kvferry.errors import ConfigError
from tests.servers.valkey import valkey_server

__all__ = ["valkey_server"]


def measured(tmp_path, *urls):
    return stores.run(BenchOptions(directory=tmp_path, quick=True, threads=1, stores=urls))


def test_a_directory_and_memory_are_measured_by_default(tmp_path):
    rows = measured(tmp_path)
    assert [row["store"] for row in rows] == ["file", "memory"]
    assert all(row[name] > 0 for row in rows for name in ("put_gbps", "read_gbps", "verified_gbps"))
    assert rows[0]["read_ratio"] == rows[0]["read_gbps"] / rows[0]["plain_get_gbps"]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert list((tmp_path / "store" / "records").glob("*/*")) == []


def test_a_server_is_measured_beside_its_plain_client(tmp_path, valkey_server):
    (row,) = measured(tmp_path, f"valkey://127.0.0.1:{valkey_server.port}/bench")
    assert row["put_ratio"] > 0
    assert row["read_ratio"] > 0
    assert row["ask_us"] > 0
    assert valkey_server.ask("DBSIZE") == 0


def test_a_store_without_room_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="does not store"):
        measured(tmp_path, "memory://small?max_bytes=1MiB")
