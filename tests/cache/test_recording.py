"""The option `record`: a file that `kvferry simulate` reads, and that never stands in the way."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.cache.recording import (
    KEY_BYTES,
    MAX_WAITING,
    RecordedRequest,
    Recording,
)
from kvferry.errors import ConfigError
from kvferry.simulate.trace import read_trace
from kvferry.testing.stores import make_key

from .keeping import NUM_CHUNKS, PROMPT

A, B = make_key(1), make_key(2)


def lines_of(path: Path) -> list[RecordedRequest]:
    decoder = msgspec.json.Decoder(RecordedRequest)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def test_each_request_is_one_line_without_its_tokens(tmp_path):
    recording = Recording(tmp_path / "r.jsonl", 8, clock=lambda: 12.3456)
    recording.add(20, [A, B])
    recording.add(3, [])
    recording.close()
    recording.close()
    first, second = lines_of(tmp_path / "r.jsonl")
    assert first == RecordedRequest(12.346, 8, 20, [A[:KEY_BYTES].hex(), B[:KEY_BYTES].hex()])
    assert (second.num_tokens, second.keys) == (3, [])


def test_a_second_engine_appends(tmp_path):
    for key in (A, B):
        recording = Recording(tmp_path / "r.jsonl", 8)
        recording.add(8, [key])
        recording.close()
    assert read_trace(tmp_path / "r.jsonl").blocks.tolist() == [0, 1]


def test_a_connector_records_its_requests_once_each(make_host, tmp_path):
    path = tmp_path / "r.jsonl"
    host = make_host(record=str(path))
    host.run("first", PROMPT)
    host.settle()
    host.run("second", PROMPT)
    host.run("third", [7, 7, 7])
    host.scheduler.close()
    trace = read_trace(path)
    assert trace.num_tokens.tolist() == [41, 41, 3]
    assert trace.blocks.tolist() == 2 * trace.blocks.tolist()[:NUM_CHUNKS]
    assert trace.block_tokens == 8


def test_without_the_option_nothing_is_recorded(make_host, tmp_path):
    host = make_host()
    host.run("first", PROMPT)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full device")
def test_a_full_disk_costs_the_recording_and_one_line(make_host, caplog):
    host = make_host(record="/dev/full")
    host.run("first", PROMPT)
    host.settle()
    with caplog.at_level(logging.WARNING):
        host.scheduler.close()
    assert [record.message for record in caplog.records if "recorded" in record.message] == [
        "requests are no longer recorded in /dev/full: [Errno 28] No space left on device"
    ]
    assert host.run("second", PROMPT).num_external_tokens == 40
    host.scheduler.close()


def test_a_disk_that_takes_half_a_line_leaves_whole_lines(tmp_path):
    # In another process: the limit holds for every file that a process writes.
    code = (
        "import resource, sys; from pathlib import Path;"
        "from kvferry.cache.recording import Recording;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "recording = Recording(Path(sys.argv[1]), 8, clock=lambda: 1.0);"
        "recording.add(8, [b'a' * 32]); recording.add(8, [b'b' * 32]); recording.close()"
    )
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "requests are no longer recorded in" in done.stderr
    assert [line.keys for line in lines_of(path)] == [[b"a".hex() * KEY_BYTES]]
    recording = Recording(path, 8)
    recording.add(8, [B])
    recording.close()
    assert read_trace(path).num_requests == 2


def test_requests_that_find_the_queue_full_are_left_out(tmp_path, caplog):
    recording = Recording(tmp_path / "r.jsonl", 8)
    for _ in range(MAX_WAITING + 3):
        recording._waiting.append((0.0, 8, (A,)))
    recording.add(8, [B])
    assert recording.num_left_out == 1
    with caplog.at_level(logging.WARNING):
        recording.close()
    assert len(lines_of(tmp_path / "r.jsonl")) == MAX_WAITING + 3
    assert "lacks 1 requests" in caplog.text


def test_a_file_that_cannot_be_opened_is_refused_at_start(make_host, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot record requests in .*No such file"):
        make_host(record=str(tmp_path / "missing" / "r.jsonl"))


def test_a_recording_that_ends_within_a_line_is_read_to_there(tmp_path):
    path = tmp_path / "r.jsonl"
    recording = Recording(path, 8)
    recording.add(8, [A])
    recording.add(8, [B])
    recording.close()
    path.write_bytes(path.read_bytes()[:-9])
    assert read_trace(path).num_requests == 1
