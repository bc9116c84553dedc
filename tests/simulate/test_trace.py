"""Traces of both formats, and files that are none."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import ConfigError
from kvferry.simulate.trace import read_trace
from tests.simulate.reference import make_trace

MOONCAKE = {"timestamp": 1500, "input_length": 1100, "output_length": 9, "hash_ids": [7, 900, 8]}
RECORDED = {"time": 5.25, "chunk_tokens": 128, "num_tokens": 300, "keys": ["0a", "0b"]}


def write(path, *lines) -> object:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_a_mooncake_trace(tmp_path):
    later = {**MOONCAKE, "timestamp": 4000, "input_length": 512, "hash_ids": [7]}
    trace = read_trace(write(tmp_path / "t", MOONCAKE, later, {**later, "hash_ids": []}))
    assert trace.blocks.tolist() == [0, 2, 1, 0]
    assert trace.starts.tolist() == [0, 3, 4, 4]
    assert trace.tokens().tolist() == [512, 512, 76, 512]
    assert (trace.num_requests, trace.num_references, trace.num_unique) == (3, 4, 3)
    assert (trace.block_tokens, trace.seconds) == (512, 2.5)


def test_a_recording(tmp_path):
    again = {**RECORDED, "time": 6.5, "num_tokens": 128, "keys": ["0b"]}
    trace = read_trace(write(tmp_path / "t", RECORDED, "", again))
    assert trace.blocks.tolist() == [0, 1, 1]
    assert trace.tokens().tolist() == [128] * 3
    assert (trace.block_tokens, trace.seconds) == (128, 1.25)


def test_a_trace_of_blocks():
    trace = make_trace([[5, 6], [], [5]], 16)
    assert trace.num_tokens.tolist() == [32, 0, 16]
    assert trace.num_unique == 2


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([MOONCAKE, "{"], "line 2: "),
        (["not json"], "line 1: "),
        (["[" * 100_000], "line 1: "),
        ([MOONCAKE, "[" * 100_000], "line 2: "),
        ([{**RECORDED, "chunk_tokens": 2**62}], "tokens in blocks of 4611686018427387904"),
        ([{**MOONCAKE, "input_length": 2**62}], "4611686018427387904 tokens in blocks"),
        (["[1]"], "line 1: neither a Mooncake trace"),
        ([{"time": 1}], "line 1: neither a Mooncake trace"),
        ([MOONCAKE, {"timestamp": 2, "hash_ids": [1]}], "line 2: .*missing.*`input_length`"),
        ([MOONCAKE, RECORDED], "line 2: .*missing.*`timestamp`"),
        ([RECORDED, MOONCAKE], "line 2: .*missing.*`time`"),
        ([{**MOONCAKE, "hash_ids": ["a"]}], "line 1: .*`int`, got `str`"),
        ([{**MOONCAKE, "hash_ids": [2**63]}], "line 1: "),
        ([{**MOONCAKE, "input_length": 1024}], "3 blocks of 512 tokens for 1024 tokens"),
        ([{**MOONCAKE, "input_length": -1, "hash_ids": []}], "-1 tokens in blocks of 512"),
        ([{**RECORDED, "num_tokens": 255}], "2 blocks of 128 tokens for 255 tokens"),
        ([{**RECORDED, "chunk_tokens": 0}], "300 tokens in blocks of 0"),
        ([RECORDED, {**RECORDED, "chunk_tokens": 64}], "line 2: blocks of 64 tokens after .* 128"),
        ([{**RECORDED, "keys": []}], "has no blocks: 1 requests"),
        ([""], "has no blocks: 0 requests"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, lines, says):
    with pytest.raises(ConfigError, match=says) as refused:
        read_trace(write(tmp_path / "t", *lines))
    assert str(refused.value).count(str(tmp_path)) == 1


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read trace .*missing: No such file"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\x80\x81\n")
    with pytest.raises(ConfigError, match="line 1: "):
        read_trace(tmp_path / "binary")
