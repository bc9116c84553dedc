"""The benchmark of the path that hosts take: that it is that path, and that its figures say so."""

from __future__ import annotations

import os

import pytest

from kvferry.bench import BenchOptions, datapath
from kvferry.bench.host import CHUNK_TOKENS
from kvferry.bench.limits import bring_into_cache, drop_from_cache
from kvferry.errors import StoreError

COLUMNS = [
    "case",
    "gb_per_s",
    "limit",
    "limit_gb_per_s",
    "ratio",
    "cpu_s_per_gb",
    "limit_all_threads_gb_per_s",
    "in_hand_gb_per_s",
]


@pytest.fixture
def kv():
    """KV of prompts of one chunk."""
    return datapath.PagedPrompt(CHUNK_TOKENS, 0)


@pytest.fixture
def open_host(kv, tmp_path):
    """Hosts over one store."""

    def open_host(memory_prompts=8):
        return datapath.prompt_host(
            kv, tmp_path / "store", io_threads=2, memory_prompts=memory_prompts
        )

    return open_host


def num_read_bytes() -> int:
    """Bytes that this process has read from files so far."""
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar:"))


def test_every_row_has_the_same_columns(tmp_path, monkeypatch):
    monkeypatch.setattr(datapath, "SHARED_MEMORY", tmp_path / "none")
    size = datapath.Size(prompt_tokens=CHUNK_TOKENS, num_prompts=5, rounds=1)
    options = BenchOptions(directory=tmp_path)
    rows = datapath.measure(options, size)
    assert [row["case"] for row in rows] == ["save_disk", "load_warm", "load_cold"]
    for row in rows:
        assert list(row) == COLUMNS
        assert row["ratio"] == pytest.approx(row["gb_per_s"] / row["limit_gb_per_s"])
    # The promise comes before the copy.
    assert all(row["in_hand_gb_per_s"] > row["gb_per_s"] for row in rows[1:])


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="not a Linux system")
def test_a_load_reads_its_prompt_from_the_store(open_host, kv):
    with open_host() as host:
        for number in range(5):
            host.save(number)
    with open_host(memory_prompts=2) as host:
        for number in (0, 1, 2, 3, 4, 0, 1):
            before = num_read_bytes()
            in_hand, in_blocks = host.load(number)
            assert num_read_bytes() - before >= kv.num_bytes
            assert 0 < in_hand.wall < in_blocks.wall


def test_kv_that_does_not_come_back_is_no_figure(open_host):
    with open_host() as host:
        host.save(0)
        with pytest.raises(StoreError, match="0 of 128 tokens hit"):
            host.load(1)


def test_a_prompt_is_saved_once(open_host):
    with open_host() as host:
        host.save(0)
        with pytest.raises(StoreError, match="128 tokens of a new prompt"):
            host.save(0)


def test_unlike_what_was_saved_is_seen(kv):
    assert kv.is_restored()
    kept = {name: layer.clone() for name, layer in kv.layers.items()}
    kv.clear()
    assert not kv.is_restored()
    for name, layer in kv.layers.items():
        layer.copy_(kept[name])
    assert kv.is_restored()


@pytest.mark.skipif(
    not (hasattr(os, "O_DIRECT") and hasattr(os, "RWF_NOWAIT")), reason="not a Linux system"
)
def test_files_brought_into_the_cache_are_there(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(3 << 20))
    drop_from_cache([file])
    bring_into_cache([file])
    fd = os.open(file, os.O_RDONLY)
    try:
        assert os.preadv(fd, [bytearray(3 << 20)], 0, os.RWF_NOWAIT) == 3 << 20
    finally:
        os.close(fd)


def test_sizes_leave_samples():
    for size in (datapath.FULL, datapath.QUICK):
        assert size.num_prompts > max(datapath.SAVE_MEMORY_PROMPTS, datapath.LOAD_MEMORY_PROMPTS)
        assert size.prompt_tokens % CHUNK_TOKENS == 0
