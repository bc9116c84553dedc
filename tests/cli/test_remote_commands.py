"""`ls`, `verify` and `rm` in a directory and on servers, which are real ones."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from blake3 import blake3

from kvferry.keys import ModelIdentity, Namespace
from kvferry.keys.encoding import canonical
from kvferry.keys.namespace import NAMESPACE_TAG
from kvferry.record.schema import RecordSchema
from kvferry.store.kind import Opening
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.url import open_one
from kvferry.survey import UNREADABLE
from kvferry.types import ChunkKey, KVGroup
from tests.cli.conftest import CHUNK_TOKENS, put_records
from tests.servers import patience
from tests.servers.places import client_of
from tests.servers.process import LOCALHOST, free_ports
from tests.servers.seaweed import BUCKET
from tests.servers.valkey import running_valkey

KINDS = ["file", "valkey", "s3", "mooncake"]
COMMANDS = {
    "ls": [],
    "ls --by namespace": [],
    "verify": [],
    "verify --dry-run": [],
    "rm --yes": ["--max-bytes", "1GiB"],
    "rm --dry-run": ["--max-bytes", "1GiB"],
}
SECRET = "correct-horse"
GROUP = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16)
SPACE = Namespace.of(ModelIdentity(weights=bytes(32), config={}, name="org/model-7b"), (GROUP,), 7)


@dataclass(frozen=True)
class Filled:
    """Records in a directory, or on a server under a prefix of their own."""

    url: str
    schema: RecordSchema
    keys: list[ChunkKey]

    @contextmanager
    def opened(self) -> Iterator[RemoteStore]:
        with open_one(self.url, Opening(namespace=self.schema.namespace)) as store:
            yield store

    def kept(self) -> list[bool]:
        with self.opened() as store:
            return [store.read(key, ()) is not None for key in self.keys]

    def flip_last_bit(self, index: int) -> None:
        with self.opened() as store:
            value = bytearray(self.schema.record_bytes)
            store.read(self.keys[index], [(0, memoryview(value))])
            value[-1] ^= 1
            assert store.delete(self.keys[index])
            assert store.put(self.keys[index], [value]).result == "stored"

    def empty(self) -> None:
        with self.opened() as store:
            assert all(store.delete(key) for key in self.keys)


@pytest.fixture(autouse=True)
def _patient_calls(monkeypatch):
    """A call whose deadline the store sets does not fail because the machine is busy."""
    patience.make_patient(monkeypatch)


@pytest.fixture
def fill(url_of):
    def make(kind: str = "valkey", **given: object) -> Filled:
        url = url_of(kind)
        return Filled(url, *put_records(url, **given))

    return make


@pytest.fixture
def set_idle(valkey_server):
    """Let a record in Valkey count as not used for so many seconds."""

    def idle(filled: Filled, index: int, seconds: int) -> None:
        with filled.opened() as store:
            name = store.name_of(filled.keys[index])
        value = valkey_server.ask("DUMP", name)
        valkey_server.ask("RESTORE", name, 0, value, "REPLACE", "IDLETIME", seconds)

    return idle


def asked(run, *arguments, code=0):
    ran = run(*arguments, "--json", "-")
    assert ran.code == code, ran.err
    return json.loads(ran.out)


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_listed_shown_and_counted(fill, run, kind):
    made = fill(kind, namespace=SPACE.digest)
    with made.opened() as store:
        store.describe(SPACE.digest, SPACE.as_text())
    size = made.schema.record_bytes
    rows = asked(run, "ls", made.url)
    assert {(row["key"], row["first_token"], row["num_bytes"], row["model"]) for row in rows} == {
        (key.hex(), number * CHUNK_TOKENS, size, "org/model-7b")
        for number, key in enumerate(made.keys)
    }
    for row in rows:
        assert (row["last_used"] is None) == (kind == "mooncake")
        assert row["last_used"] is None or abs(row["last_used"] - time.time()) < 60
    out = run("ls", made.url, "--limit", 2).out
    assert "2 of 3 records" in out
    assert out.count("org/model-7b") == 1

    shown = asked(run, "ls", made.url, made.keys[1].hex()[:10])
    assert (shown["key"], shown["verdict"]) == (made.keys[1].hex(), "right")
    assert shown["first_token"] == CHUNK_TOKENS
    assert made.keys[1].hex() in run("ls", made.url, made.keys[1].hex()).out

    found = asked(run, "ls", made.url, "--by", "namespace")
    if kind == "valkey":  # what the server says of itself
        assert found["maxmemory"] > 0
        assert found["evicts_all_keys"] is True
    space = {"namespace": SPACE.digest.hex(), "model": "org/model-7b", "dtype": None}
    expected = {
        "url": made.url.partition("?")[0],
        "num_records": 3,
        "used_bytes": 3 * size,
        "namespaces": [{**space, "num_records": 3, "num_bytes": 3 * size}],
        "removed": [],
        "removed_since": None,
    }
    assert {name: found[name] for name in expected} == expected
    assert "org/model-7b" in run("ls", made.url, "--by", "namespace").out


# Valid JSON that is no description of a namespace, deep nesting, megabytes, and no text.
HOSTILE_TEXTS = [
    b'{"model": null, "description": []}',
    b'{"model": null, "description": "text"}',
    b'{"model": "liar", "description": {}}',
    b'{"model": "liar", "description": {"a": 1e999}}',
    b"",
    b"[]",
    b"[" * 500_000,
    b'{"a":' * 100_000,
    b"x" * (3 << 20),
    b"\xff\x1b[31mred",
    b'{"model": "\\ud800\\u001b[31m", "description": []}',
    b"1" * 10_000,
]


@pytest.mark.parametrize("kind", ["file", "valkey"])
@pytest.mark.parametrize("text", HOSTILE_TEXTS, ids=lambda text: ascii(text[:40]))
def test_a_hostile_description_is_unreadable_and_the_rest_is_shown(fill, run, text, kind):
    try:
        value = json.loads(text)
        described: object = None if value["model"] == "liar" else value["description"]
    except (ValueError, TypeError, RecursionError):
        described = None
    # The namespace that such a description would be of; a liar's is of another.
    hostile = blake3(NAMESPACE_TAG + canonical(described)).digest()
    made = fill(kind, namespace=SPACE.digest)
    put_records(made.url, namespace=hostile, num_records=1, seed=6)
    with made.opened() as store:
        store.describe(SPACE.digest, SPACE.as_text())
        if kind == "file":
            store.describe(hostile, "any")
            root = Path(made.url.removeprefix("file://"))
            (root / "namespaces" / f"{hostile.hex()}.json").write_bytes(text)
        else:
            prefix = store.name_of(made.keys[0]).partition(SPACE.digest.hex())[0]
            about = f"{prefix}{hostile.hex()}/about.json"
            client_of(store).put(about, [text], time.monotonic() + 20)
    for options in ([], ["--by", "namespace"]):
        value = asked(run, "ls", made.url, *options)
        rows = value if not options else value["namespaces"]
        assert {row["model"] for row in rows} == {"org/model-7b", UNREADABLE}
        out = run("ls", made.url, *options).out
        assert UNREADABLE in out
        assert out.replace("\n", "").isprintable()


@pytest.mark.parametrize("kind", ["file", "valkey"])
def test_lists_are_sorted_and_end_at_the_limit(fill, run, kind):
    made = fill(kind, num_records=5)
    first = asked(run, "ls", made.url, "--sort", "token", "--limit", 2)
    assert [row["first_token"] for row in first] == [0, CHUNK_TOKENS]
    with made.opened() as store:
        store.put(ChunkKey(b"k" * 32), [bytes(2 * made.schema.record_bytes)])
    (damaged,) = asked(run, "ls", made.url, "--sort", "token", "--limit", 1)
    assert (damaged["key"], damaged["error"]) == ((b"k" * 32).hex(), "bad_header")
    assert "unreadable: bad_header" in run("ls", made.url).out


def test_the_least_recently_used_comes_last(fill, run, set_idle):
    made = fill(num_records=5)
    set_idle(made, 3, 3600)
    assert [row["key"] for row in asked(run, "ls", made.url, "--limit", 0)][-1] == (
        made.keys[3].hex()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_verify_takes_out_what_is_wrong(fill, run, kind):
    made = fill(kind)
    made.flip_last_bit(1)
    bad = {"key": made.keys[1].hex(), "reason": "bad_checksum"}
    assert asked(run, "ls", made.url, made.keys[1].hex(), code=1)["verdict"] == "bad_checksum"
    found = asked(run, "verify", made.url, "--dry-run", code=1)
    assert (found["records"], found["bad"]) == (3, [{**bad, "action": "left"}])
    assert made.kept() == [True, True, True]
    ran = run("verify", made.url)
    assert ran.code == 1
    assert ("quarantined" if kind == "file" else "deleted") in ran.out
    assert made.kept() == [True, False, True]
    assert asked(run, "verify", made.url) == {
        "dry_run": False,
        "records": 2,
        "num_bytes": 2 * made.schema.record_bytes,
        "unreadable": 0,
        "bad": [],
        "reasons": {},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_gc_keeps_what_fits_while_an_engine_uses_the_store(fill, run, kind):
    made = fill(kind, num_records=5)
    size = made.schema.record_bytes
    options = ["--max-bytes", f"{2 * size + 1}B"]
    counts = {"records": 3, "num_bytes": 3 * size, "used_bytes": 2 * size}
    with made.opened() as engine:
        assert asked(run, "rm", made.url, *options, "--dry-run") == {"dry_run": True, **counts}
        assert made.kept() == [True] * 5
        assert asked(run, "rm", made.url, *options, "--yes") == {"dry_run": False, **counts}
        assert [engine.read(key, ()) is not None for key in made.keys] == made.kept()
        assert sum(made.kept()) == 2
    assert asked(run, "rm", made.url, *options, "--yes")["records"] == 0


def test_gc_goes_by_last_use(fill, run, set_idle):
    made = fill(num_records=4)
    for index, hours in ((0, 1), (1, 5), (3, 30)):
        set_idle(made, index, hours * 3600)
    assert asked(run, "rm", made.url, "--older-than", "1d", "--yes")["records"] == 1
    assert asked(run, "rm", made.url, "--max-bytes", f"{2 * made.schema.record_bytes}B", "--yes")
    assert made.kept() == [True, False, True, False]


def test_gc_of_a_bucket_goes_by_the_time_of_writing(fill, run):
    made = fill("s3")
    assert run("rm", made.url, "--older-than", "1h", "--yes").code == 1
    assert asked(run, "rm", made.url, "--older-than", "0s", "--yes")["records"] == 3


def test_gc_by_age_where_no_last_use_is_known(fill, run, caplog):
    made = fill("mooncake")
    for options in (["--dry-run"], []):
        ran = run("rm", made.url, "--older-than", "1d", *options, "--yes")
        assert ran.code == 2
        assert "does not say when its records were used" in ran.error_line
    run("rm", made.url, "--max-bytes", "1GiB", "--dry-run")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "3 of its records" in caplog.text
    assert made.kept() == [True] * 3


def test_removed_records_are_not_remembered(fill, run):
    ran = run("ls", "--removed", fill().url)
    assert ran.code == 2
    assert "does not remember what was removed" in ran.error_line


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_an_emptied_store_is_told_from_a_wrong_prefix(fill, run, kind):
    made = fill(kind, num_records=1)
    with made.opened() as store:
        store.describe(made.schema.namespace, "an engine was here")
    made.empty()
    for command in ("ls", "verify", "rm --max-bytes 0 --yes"):
        name, *options = command.split()
        assert run(name, made.url, *options).code == (1 if name == "verify" else 0)
    assert asked(run, "ls", made.url, "--by", "namespace")["num_records"] == 0
    scheme, _, rest = made.url.partition("://")
    host, _, options = rest.partition("?")
    for command, extra in COMMANDS.items():
        ran = run(*command.split(), f"{scheme}://{host}x?{options}", *extra)
        assert ran.code == 2
        assert f"nothing is stored under {scheme}://{host}x;" in ran.error_line


def test_a_server_that_is_not_there_is_one_line(run):
    (port,) = free_ports(1)
    for url, says in {
        f"valkey://me:{SECRET}@{LOCALHOST}:{port}/kv": str(port),
        f"redis://{LOCALHOST}:{port},{LOCALHOST}:{port}/kv?cluster=true": str(port),
        f"s3://{BUCKET}/kv?endpoint=http://{LOCALHOST}:{port}&region=us-east-1": f"s3://{BUCKET}",
        f"mooncake://{LOCALHOST}:{port}/kv": "admin=http://host:9003",
        f"mooncake://{LOCALHOST}:{port}/kv?admin=http://{LOCALHOST}:{port}": "no list of names",
    }.items():
        ran = run("ls", url)
        assert ran.code == 2
        assert says in ran.error_line
        assert SECRET not in ran.err


@pytest.fixture(scope="module")
def guarded():
    """A server with a password, and a user who may read only."""
    with running_valkey(requirepass=SECRET) as server:
        rules = ("on", f">{SECRET}", "~*", "+@read", "+@connection", "-@dangerous")
        server.ask("ACL", "SETUSER", "reader", *rules)
        yield server


def test_no_credential_is_shown(run, guarded, tmp_path):
    place = f"{LOCALHOST}:{guarded.port}/{tmp_path.name}"
    url = f"valkey://:{SECRET}@{place}"
    put_records(url)
    for command, extra in COMMANDS.items():
        ran = run(*command.split(), url, *extra)
        assert SECRET not in ran.out + ran.err
    assert asked(run, "ls", url, "--by", "namespace")["url"] == f"valkey://***@{place}"


def test_a_record_that_may_not_be_deleted_is_left_and_said(run, guarded, tmp_path):
    place = f"{LOCALHOST}:{guarded.port}/{tmp_path.name}"
    url = f"valkey://:{SECRET}@{place}"
    made = Filled(url, *put_records(url))
    made.flip_last_bit(0)
    reader = f"valkey://reader:{SECRET}@{place}"
    assert asked(run, "verify", reader, code=1)["bad"][0]["action"] == "left"
    ran = run("rm", reader, "--max-bytes", 0, "--yes")
    assert ran.code == 2
    assert "check your permission to delete (0 records" in ran.error_line
    assert made.kept() == [True] * 3


def test_a_cluster(run, valkey_cluster, tmp_path):
    hosts = ",".join(f"{LOCALHOST}:{node.port}" for node in valkey_cluster.nodes)
    url = f"valkey://{hosts}/{tmp_path.name}?cluster=true"
    made = Filled(url, *put_records(url, num_records=20))
    made.flip_last_bit(7)
    assert {row["key"] for row in asked(run, "ls", url)} == {key.hex() for key in made.keys}
    assert asked(run, "ls", url, "--by", "namespace")["num_records"] == 20
    assert asked(run, "verify", url, code=1)["reasons"] == {"bad_checksum": 1}
    assert asked(run, "rm", url, "--max-bytes", 0, "--yes")["records"] == 19
    assert made.kept() == [False] * 20
