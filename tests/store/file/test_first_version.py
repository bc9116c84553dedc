"""Stores of format version 1: their records stay, their accounts go."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import ConfigError
from kvferry.store.base import PutResult
from kvferry.store.file import directory
from kvferry.testing.stores import make_key, make_value, read_value

NUM_RECORDS = 50


@pytest.fixture
def first_version(bench):
    """As version 1 left it when its process was killed."""
    for number in range(NUM_RECORDS):
        path = bench.path(make_key(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_value(1000, number))
    (bench.root / "quarantine").mkdir()
    (bench.root / "quarantine" / f"{make_key(99).hex()}.bad_leaf.{'a' * 16}").write_bytes(b"rotten")
    for writer in ("0123456789abcdef", "fedcba9876543210"):
        account = bench.root / "writers" / writer
        for folder in ("tmp", "trash", "absorbed"):
            (account / folder).mkdir(parents=True)
        (account / "ledger").write_bytes(bytes(4096))
        (account / "tmp" / f"{writer}-{writer}").write_bytes(make_value(5000))
    (bench.root / "reconcile.lock").touch()
    (bench.root / "kvferry.json").write_text('{"format": "kvferry-store", "version": 1}\n')
    return bench.root


def files_of(root):
    return {path: path.lstat().st_mtime_ns for path in (root, *root.rglob("*"))}


def test_a_store_of_the_first_version_keeps_its_records_and_loses_its_accounts(
    bench, first_version
):
    store = bench.open(max_bytes=100_000)
    store.maintain()
    for number in range(NUM_RECORDS):
        assert store.contains(make_key(number))
        assert read_value(store, make_key(number)) == make_value(1000, number)
    assert store.stat().num_records == NUM_RECORDS
    assert store.stat().used_bytes == NUM_RECORDS * 1000 + len(b"rotten")
    assert store.put(make_key(100), [make_value(1000)]) is PutResult.STORED
    assert not (first_version / "writers").exists()
    assert not (first_version / "reconcile.lock").exists()
    assert json.loads((first_version / "kvferry.json").read_text()) == {
        "format": "kvferry-store",
        "version": 2,
    }


def test_a_store_of_the_first_version_opened_for_reading_is_left_untouched(bench, first_version):
    before = files_of(first_version)
    with bench.open(read_only=True) as store:
        store.maintain()
        assert all(store.contains(make_key(number)) for number in range(NUM_RECORDS))
        assert read_value(store, make_key(7)) == make_value(1000, 7)
        assert store.put(make_key(100), [b"value"]) is PutResult.FAILED
    assert files_of(first_version) == before


def test_a_process_killed_while_it_removes_the_accounts_leaves_the_rest_to_the_next(
    bench, first_version, monkeypatch
):
    monkeypatch.setattr(directory.shutil, "rmtree", lambda name, dir_fd: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.open()
    monkeypatch.undo()
    assert json.loads((first_version / "kvferry.json").read_text())["version"] == 1
    bench.open()
    assert not (first_version / "writers").exists()


def test_code_that_knows_only_the_first_version_refuses_a_new_store(bench, monkeypatch):
    bench.open().close()
    assert json.loads((bench.root / "kvferry.json").read_text())["version"] == 2
    monkeypatch.setattr(directory, "STORE_FORMAT_VERSION", 1)
    with pytest.raises(ConfigError, match="has format version 2, this kvferry knows 1") as refused:
        bench.open()
    assert "\n" not in str(refused.value)
