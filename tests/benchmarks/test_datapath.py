"""The benchmark of the path that hosts take: that it is that path, and that its figures say so."""

from __future__ import annotations

import os

import pytest

from benchmarks import datapath
from benchmarks.host import CHUNK_TOKENS
from benchmarks.limits import Seconds, bring_into_cache, drop_from_cache
from kvferry.errors import KVError


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


def test_figures_are_of_medians_beside_one_thread_of_the_plain_operation():
    case = datapath.Timings(
        ours=[Seconds(1.0, 3.0), Seconds(4.0, 2.0), Seconds(2.0, 1.0)],
        plain=[Seconds(0.5, 0.0)],
        plain_all_threads=[Seconds(0.25, 0.0)],
    )
    row = case.row("save_disk", "pwritev", 4 * 10**9)
    assert row == {
        "case": "save_disk",
        "gb_per_s": 2.0,
        "limit": "pwritev, 1 thread",
        "limit_gb_per_s": 8.0,
        "ratio": 0.25,
        "cpu_s_per_gb": 0.5,
        "limit_all_threads_gb_per_s": 16.0,
        "in_hand_gb_per_s": None,
    }
    case.in_hand.append(Seconds(0.5, 0.0))
    assert case.row("load_warm", "memcpy", 4 * 10**9)["in_hand_gb_per_s"] == 8.0


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
        with pytest.raises(KVError, match="0 of 128 tokens hit"):
            host.load(1)


def test_a_prompt_is_saved_once(open_host):
    with open_host() as host:
        host.save(0)
        with pytest.raises(KVError, match="128 tokens of a new prompt"):
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
