"""The stores benchmark measures what it says, on real servers, and leaves nothing there."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks import Options, stores
from kvferry.errors import ConfigError, KVError
from tests.servers.valkey import running_valkey

ROOT = Path(__file__).parents[2]


def measured(tmp_path, *urls):
    options = Options(directory=tmp_path, threads=1, quick=True, stores=urls)
    return stores.run(options)


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
    assert valkey_server.ask("KEYS", "bench*") == []


def test_mooncake_is_measured_beside_its_plain_client(tmp_path, mooncake):
    """In a process of its own, since Mooncake's client ends with its process."""
    url, out = f"mooncake://{mooncake.master}/bench", tmp_path / "rows.json"
    command = ["-m", "benchmarks", "stores", "--quick", "--store", url, "--json", str(out)]
    subprocess.run([sys.executable, *command], check=True, timeout=120, cwd=ROOT)
    assert [row["put_ratio"] > 0 for row in json.loads(out.read_text())["rows"]] == [True, True]
    with urllib.request.urlopen(f"{mooncake.admin}/get_all_keys", timeout=5) as response:
        assert "bench" not in response.read().decode()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("valkey://127.0.0.1:9/kv", "Connection refused"),
        ("mooncake://127.0.0.1:9/kv", "no connection to the master"),
        ("s3://bucket/kv?bogus=1", "unknown option 'bogus'"),
    ],
)
def test_a_store_that_cannot_be_used_is_one_line(tmp_path, url, message):
    with pytest.raises(KVError, match=message):
        measured(tmp_path, url)


def test_a_password_of_a_file_is_given_to_both(tmp_path):
    file = tmp_path / "password"
    file.write_text("correct-horse")
    with running_valkey(requirepass="correct-horse") as server:
        (row,) = measured(tmp_path, f"valkey://127.0.0.1:{server.port}/kv?password_file={file}")
    assert row["put_ratio"] > 0


def test_a_store_without_room_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="does not store"):
        measured(tmp_path, "memory://small?max_bytes=1MiB")
