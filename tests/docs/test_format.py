"""docs/format.md is normative: what it states in figures and code is what the code does."""

import re
import runpy
import sys
from pathlib import Path

from kvferry.identity.weights import NOT_WEIGHTS, WEIGHT_SUFFIXES, WEIGHTS_TAG
from kvferry.keys import KEY_VERSION, ChunkKeys
from kvferry.keys.chain import CHUNK_TAG
from kvferry.keys.namespace import IRRELEVANT_FIELDS, NAMESPACE_TAG
from kvferry.record import schema
from kvferry.record.check import ReadFault
from kvferry.types import FORMAT_VERSION, ExtraKeys

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "format.md").read_text()


def test_the_worked_example_runs_and_makes_the_golden_record(tmp_path, monkeypatch):
    made = tmp_path / "record"
    monkeypatch.setattr(sys, "argv", ["", str(made)])
    scope = runpy.run_path(str(ROOT / "examples/a_record_by_hand.py"), run_name="__main__")
    golden = ROOT / "tests" / "record" / "golden" / "tiny.safetensors"
    assert made.read_bytes() == golden.read_bytes()
    chain = ChunkKeys(scope["namespace"], 3, ExtraKeys(cache_salt="a"))
    chain.extend([5, 6, 7, 8, 9, 10])
    assert chain.keys == [scope["first"], scope["second"]]


def test_bounds_and_versions_are_those_of_the_code():
    assert f"Record format and keys, version {FORMAT_VERSION}\n" in TEXT
    assert f"`key_version` | integer, {KEY_VERSION}:" in TEXT
    assert f"n ≤ {schema.MAX_HEADER_BYTES:,}; num_leaves ≤ 2^22;" in TEXT
    assert schema.MAX_LEAVES == 2**22
    assert "a component ≤ 2^40 bytes" in TEXT
    assert schema.MAX_PAYLOAD_BYTES == 2**40
    assert f"leaves of {schema.LEAF_BYTES:,} bytes" in TEXT
    assert f"multiple of {schema.ALIGN}" in TEXT


def test_tags_are_those_of_the_code():
    for tag in (CHUNK_TAG, NAMESPACE_TAG, WEIGHTS_TAG):
        assert len(tag) == 16
        written = tag.decode().replace("\0", "\\0")
        assert f'"{written}"' in TEXT


def test_every_dropped_config_field_is_listed():
    (listed,) = re.findall(r"ends in\s`_config`:(.*?)\.\sAll others", TEXT, re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", listed)) == IRRELEVANT_FIELDS


def test_every_kind_of_weight_file_is_listed():
    (listed,) = re.findall(r"that end in\s(.*?)\.\sLinks", TEXT, re.DOTALL)
    assert set(re.findall(r"`([^`]+)`", listed)) == NOT_WEIGHTS | set(WEIGHT_SUFFIXES)


def test_every_dtype_and_every_reason_of_wrong_bytes_is_listed():
    for dtype in schema.ITEM_BYTES:
        assert f"`{dtype}`" in TEXT
    for reason in ReadFault:
        assert not reason.is_corruption or f"`{reason}`" in TEXT
