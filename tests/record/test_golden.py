"""Files written once by version 1 must read, and be written again, byte for byte, for ever."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
import xxhash

from kvferry.record.check import RecordInfo, mark_of, parse_head
from tests.record.samples import (
    GOLDEN,
    KEY,
    NAMESPACE,
    golden,
    mark_of_golden,
    of_key,
    payload_of,
    read,
    read_unknown,
)

DIRECTORY = Path(__file__).with_name("golden")
EVERY = pytest.mark.parametrize("name", GOLDEN)


def file_of(name):
    return DIRECTORY / f"{name}.safetensors"


@EVERY
def test_a_golden_record_reads_and_is_written_again_byte_for_byte(name):
    schema, first_token, data = golden(name)
    stored = file_of(name).read_bytes()
    assert read(schema, stored, first_token=first_token) is None
    assert read_unknown(stored) is None
    assert data == stored


@EVERY
def test_a_golden_record_says_what_it_is(name):
    schema, first_token, _ = golden(name)
    stored = file_of(name).read_bytes()
    info = parse_head(memoryview(stored), len(stored))
    assert isinstance(info, RecordInfo)
    assert (info.key, info.first_token) == (KEY, first_token)
    assert info.mark == mark_of_golden(name) == mark_of(stored)
    assert (info.of, info.schema.shard) == (of_key(schema), schema.shard)
    assert info.schema.namespace == NAMESPACE
    assert info.schema.components == schema.components
    assert info.schema.record_bytes == len(stored)


@EVERY
def test_plain_safetensors_opens_a_golden_record(name):
    schema, _, _ = golden(name)
    tensors = safetensors.torch.load_file(file_of(name))
    assert set(tensors) == {"root", "leaves", *(c.name for c in schema.components)}
    payload = b"".join(
        tensors[c.name].contiguous().view(torch.uint8).numpy().tobytes() for c in schema.components
    )
    assert payload == payload_of(schema)
    for component in schema.components:
        assert tuple(tensors[component.name].shape) == component.shape
    with safetensors.safe_open(file_of(name), "pt") as file:
        assert file.metadata()["format"] == "kvferry"


@pytest.mark.parametrize("name", ["tiny", "split"])
def test_numpy_opens_what_it_has_a_dtype_for(name):
    schema, _, _ = golden(name)
    tensors = safetensors.numpy.load_file(file_of(name))
    assert tensors["kv.0"].dtype == np.float32
    assert tensors["kv.0"].tobytes() == payload_of(schema)


@EVERY
def test_checksums_follow_from_the_documented_rules_alone(name):
    """docs/format.md read literally, without code of ours."""
    stored = file_of(name).read_bytes()
    (size,) = struct.unpack("<Q", stored[:8])
    header = json.loads(stored[8 : 8 + size])
    body = stored[8 + size :]
    assert stored[8 + size - 1 : 8 + size] in (b" ", b"}")
    table = []
    for tensor, entry in header.items():
        if tensor in ("__metadata__", "root", "leaves"):
            continue
        begin, end = entry["data_offsets"]
        layers, heads, _, _ = entry["shape"]
        row = (end - begin) // (layers * heads)
        for start in range(begin, end, row):
            for at in range(start, start + row, 65536):
                leaf = body[at : min(at + 65536, start + row)]
                table.append(xxhash.xxh3_128(leaf).digest())
    begin, end = header["leaves"]["data_offsets"]
    assert body[begin:end] == b"".join(table)
    root = xxhash.xxh3_128(stored[: 8 + size] + body[begin:end]).digest()
    assert body[slice(*header["root"]["data_offsets"])] == root
    assert (8 + size + end) % 4096 == 0
