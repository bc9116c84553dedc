"""What ls and stat tell from the index: models, removals, and what they do without it."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
import tracemalloc
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.keys import ModelIdentity, Namespace
from kvferry.store.url import open_store
from kvferry.types import KVGroup

LOOKS = [
    "ls",
    "ls --sort token",
    "ls --removed",
    "ls --by namespace",
    "verify --dry-run",
]
GROUP = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16)


def namespace_of(name: str | None, **config: object) -> Namespace:
    identity = ModelIdentity(weights=b"w" * 32, config={"model_type": "llama", **config}, name=name)
    return Namespace.of(identity, (GROUP,), 7)


def asked(run, *arguments):
    ran = run(*arguments, "--json", "-")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def tree(root: Path) -> dict[str, tuple[int, ...]]:
    """All that a command could have changed below a directory, and the directory itself."""
    found = {}
    for path in [root, *root.rglob("*")]:
        status = os.lstat(path)
        found[str(path)] = (status.st_ino, status.st_mode, status.st_size, status.st_mtime_ns)
    return found


def test_a_model_without_a_name_is_called_by_its_config(make_store, run):
    space = namespace_of(None, architectures=["LlamaForCausalLM"])
    made = make_store(num_records=1, namespace=space.digest)
    with open_store(made.url) as store:
        store.describe(space.digest, space.as_text())
    assert asked(run, "ls", made.url)[0]["model"] == "LlamaForCausalLM"


def test_what_went_is_listed_with_reason_and_process(make_store, run):
    made = make_store(num_records=5)
    with open_store(made.url) as store:
        store.delete(made.keys[0])
        store.discard(made.keys[1], "bad_checksum")
        store.catalogue().gc(max_bytes=2 * made.schema.record_bytes)
    removed = asked(run, "ls", "--removed", made.url)
    assert [(row["reason"], row["detail"]) for row in removed] == [
        ("evicted", ""),
        ("damaged", "bad_checksum"),
        ("deleted", ""),
    ]
    assert removed[-1]["key"] == made.keys[0].hex()
    assert all(row["by"].startswith(f"{os.getpid()}@") for row in removed)
    assert all(abs(row["at"] - time.time()) < 60 for row in removed)
    assert len(asked(run, "ls", "--removed", made.url, "--limit", 1)) == 1
    out = run("ls", "--removed", made.url).out
    assert "damaged: bad_checksum" in out
    assert "3 records were removed last" in out


def test_stat_counts_what_went_by_reason(make_store, run):
    made = make_store(num_records=4)
    with open_store(made.url) as store:
        store.delete(made.keys[0])
        store.delete(made.keys[1])
        store.discard(made.keys[2], "bad_checksum")
    found = asked(run, "ls", made.url, "--by", "namespace")
    size = made.schema.record_bytes
    counted = {row["reason"]: (row["num_records"], row["num_bytes"]) for row in found["removed"]}
    assert counted == {"damaged": (1, size), "deleted": (2, 2 * size)}
    assert found["removed_since"] <= found["removed"][0]["last_at"]
    assert "removed in the last" in run("ls", made.url, "--by", "namespace").out


def damage_none(_index: Path) -> None:
    pass


def damage_gone(index: Path) -> None:
    index.unlink()


def damage_empty(index: Path) -> None:
    index.write_bytes(b"")


def damage_noise(index: Path) -> None:
    index.write_bytes(random.Random(1).randbytes(20_000))


def damage_cut(index: Path) -> None:
    """The first page is right, and says that there are more."""
    index.write_bytes(index.read_bytes()[:4096])


def damage_pages(index: Path) -> None:
    """It opens, and breaks when it is asked for records."""
    content = bytearray(index.read_bytes())
    content[4096:] = b"\xee" * (len(content) - 4096)
    index.write_bytes(content)


def damage_rows(index: Path) -> None:
    """It is sound, and holds what no store wrote."""
    with closing(sqlite3.connect(index)) as db, db:
        db.execute("UPDATE records SET last_used = 'x', key = substr(key, 1, 31) WHERE id = 2")
        db.execute("UPDATE records SET num_bytes = 'many' WHERE id = 3")


DAMAGES = [
    damage_none,
    damage_gone,
    damage_empty,
    damage_noise,
    damage_cut,
    damage_pages,
    damage_rows,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_store_is_looked_at_whatever_became_of_its_index(make_store, run, damage):
    made = make_store(num_records=4)
    damage(made.root / "index.sqlite3")
    rows = asked(run, "ls", made.url)
    assert {row["key"] for row in rows} == {key.hex() for key in made.keys}
    assert not any("error" in row for row in rows)
    assert len(asked(run, "ls", made.url, "--sort", "token", "--limit", 3)) == 3
    assert asked(run, "ls", "--removed", made.url) == []
    found = asked(run, "ls", made.url, "--by", "namespace")
    assert (found["num_records"], found["index_complete"]) == (4, True)
    assert sum(each["num_records"] for each in found["namespaces"]) == 4
    assert asked(run, "ls", made.url, made.keys[2].hex())["verdict"] == "right"
    assert asked(run, "verify", made.url, "--dry-run")["records"] == 4
    assert asked(run, "rm", made.url, "--max-bytes", 0, "--dry-run")["records"] == 4


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("command", [*LOOKS, "ls KEY", "rm --max-bytes 0 --dry-run"])
def test_looking_leaves_no_trace(make_store, run, command, damage):
    made = make_store(num_records=3)
    made.flip(0, -1)
    damage(made.root / "index.sqlite3")
    before, files = tree(made.root), made.snapshot()
    name, *options = command.replace("KEY", made.keys[1].hex()).split()
    run(name, made.url, *options)
    assert (tree(made.root), made.snapshot()) == (before, files)


def test_a_listing_without_an_index_says_so(make_store, run, caplog):
    made = make_store(num_records=1)
    (made.root / "index.sqlite3").unlink()
    run("ls", made.url)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no usable index" in caplog.text


def test_looking_at_many_records_takes_memory_for_those_shown(make_store, run):
    made = make_store(num_records=1)
    rng = random.Random(3)
    num_records = 60_000
    with closing(sqlite3.connect(made.root / "index.sqlite3")) as db, db:
        db.executemany(
            "INSERT INTO records (key, num_bytes, last_used, namespace) VALUES (?, ?, 1.0, ?)",
            ((rng.randbytes(32), rng.randrange(1, 9), bytes(32)) for _ in range(num_records)),
        )
    run("ls", made.url, "--by", "namespace")  # loads what is loaded once
    for command in (["ls"], ["ls", "--by", "namespace"]):
        tracemalloc.start()
        try:
            ran = run(command[0], made.url, *command[1:])
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert ran.code == 0
        assert str(num_records + 1) in ran.out.replace(",", "")
        assert peak < 4e6, command  # all of them would take 15 MB
