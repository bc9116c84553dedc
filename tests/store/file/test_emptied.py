"""Directories that people empty, as one clears a cache, while a store uses them or while none does:
later writes are stored, and the next start finds a store."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from contextlib import closing

import pytest

from kvferry.errors import ConfigError
from kvferry.store.base import PutResult
from kvferry.testing.stores import make_key, make_value, read_value

NAMESPACE = bytes(range(32))


def remove_content(root):
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def remove_and_make(root):
    shutil.rmtree(root)
    root.mkdir()


def remove_files(root):
    for path in root.rglob("*"):
        if path.is_file():
            path.unlink()


def leave_the_notice(root):
    text = (root / "erased.json").read_text()
    remove_content(root)
    (root / "erased.json").write_text(text)


def move_away(root):
    root.rename(root.with_name("old"))
    root.mkdir()


CLEAN_UPS = {
    "rm -rf DIR/*": remove_content,
    "rm -rf DIR": shutil.rmtree,
    "rm -rf DIR; mkdir DIR": remove_and_make,
    "find DIR -type f -delete": remove_files,
    "all but erased.json": leave_the_notice,
    "rm DIR/kvferry.json": lambda root: (root / "kvferry.json").unlink(),
    "mv DIR old; mkdir DIR": move_away,
    "rm -rf DIR/records": lambda root: shutil.rmtree(root / "records"),
}
FOLLOWING = {
    "nothing": lambda _store: None,
    "upkeep": lambda store: store.maintain(),
    "writes": lambda store: [store.put(make_key(n), [make_value(1000)]) for n in range(10, 14)],
    "upkeep and writes": lambda store: (store.maintain(), FOLLOWING["writes"](store)),
}


@pytest.mark.parametrize("following", FOLLOWING)
@pytest.mark.parametrize("how", CLEAN_UPS)
def test_the_next_start_finds_a_store(bench, how, following):
    store = bench.open(max_bytes=100_000)
    store.describe(NAMESPACE, "a model")
    store.catalogue().notice("{}")
    for number in range(4):
        assert store.put(make_key(number), [make_value(1000)]).result is PutResult.STORED
    CLEAN_UPS[how](bench.root)
    FOLLOWING[following](store)
    store.close()
    with bench.open(max_bytes=100_000) as after:
        assert (bench.root / "kvferry.json").is_file()
        after.maintain()
        assert after.put(make_key(20), [make_value(1000)]).result is PutResult.STORED
        assert read_value(after, make_key(20)) == make_value(1000)
        assert after.stat().used_bytes == sum(
            entry.stored_bytes for entry in after.catalogue().scan()
        )
    with bench.open(read_only=True) as reader:
        assert read_value(reader, make_key(20)) == make_value(1000)


@pytest.mark.parametrize("index", ["in the directory", "elsewhere"])
@pytest.mark.parametrize("how", ["rm -rf DIR/*", "rm -rf DIR", "mv DIR old; mkdir DIR"])
def test_a_running_store_makes_the_directory_a_store_again(bench, tmp_path, how, index):
    other = None if index == "in the directory" else tmp_path / "index" / "own.sqlite3"
    store = bench.open(max_bytes=100_000, index_file=other)
    store.describe(NAMESPACE, "a model")
    store.put(make_key(0), [make_value(1000)])
    CLEAN_UPS[how](bench.root)
    store.maintain()
    assert store.put(make_key(1), [make_value(1000)]).result is PutResult.STORED
    assert json.loads((bench.root / "kvferry.json").read_text())["version"] == 2
    assert store.catalogue().described() == [NAMESPACE]
    # Without any upkeep of this process, another one reads what is there.
    with bench.open(read_only=True) as reader:
        assert read_value(reader, make_key(1)) == make_value(1000)
        assert reader.catalogue().description(NAMESPACE) == "a model"


@pytest.mark.parametrize("create", [True, False])
@pytest.mark.parametrize(
    "theirs", ["thesis.tex", "records/2024.csv", "writing/draft", "quarantine/mail", "namespaces/a"]
)
def test_somebody_elses_files_among_our_names_are_named_and_left_alone(bench, theirs, create):
    bench.open().put(make_key(), [b"value"])
    (bench.root / "kvferry.json").unlink()
    (bench.root / theirs).parent.mkdir(exist_ok=True)
    (bench.root / theirs).write_text("mine")
    before = sorted(bench.root.rglob("*"))
    with pytest.raises(ConfigError, match=theirs):
        bench.open(create=create)
    assert sorted(bench.root.rglob("*")) == before


@pytest.mark.parametrize("create", [True, False])
def test_a_database_of_another_program_is_left_alone(bench, create):
    bench.root.mkdir(exist_ok=True)
    with closing(sqlite3.connect(bench.root / "index.sqlite3")) as db:
        db.execute("CREATE TABLE theirs (a)")
    before = (bench.root / "index.sqlite3").read_bytes()
    with pytest.raises(ConfigError, match=r"'index.sqlite3' is in it"):
        bench.open(create=create)
    assert os.listdir(bench.root) == ["index.sqlite3"]
    assert (bench.root / "index.sqlite3").read_bytes() == before


def test_the_index_alone_is_left_of_a_store(bench):
    bench.open().put(make_key(), [b"value"])
    (bench.root / "kvferry.json").unlink()
    for name in ("records", "writing"):
        shutil.rmtree(bench.root / name)
    assert bench.open().put(make_key(), [b"value"]).result is PutResult.STORED


def test_what_is_left_of_a_store_is_opened_by_those_who_may_not_make_one(bench):
    bench.open().put(make_key(), [b"value"])
    remove_files(bench.root)
    bench.open(read_only=True).close()
    store = bench.open(create=False)
    assert store.put(make_key(), [b"value"]).result is PutResult.STORED
    remove_and_make(bench.root)
    with pytest.raises(ConfigError, match="is not a kvferry store"):
        bench.open(create=False)
    assert os.listdir(bench.root) == []
