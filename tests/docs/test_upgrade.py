"""Each sentence of the upgrade page, with the files of version 1 that every release must read."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

from kvferry.cache.config import CacheConfig
from kvferry.config import build_config
from kvferry.contract.handover import STAMP_VERSION, read_handover
from kvferry.errors import ConfigError, StorePlaceError
from kvferry.identity.weights import _DigestCache, _KnownFile
from kvferry.keys import KEY_VERSION, ModelIdentity, Namespace
from kvferry.store.file import FileStore
from kvferry.store.file.directory import STORE_FORMAT_VERSION
from kvferry.store.url import open_store
from kvferry.transfer.messages import VERSION
from kvferry.types import FORMAT_VERSION, ChunkKey
from tests.record.samples import GOLDEN, KEY, MARK, encode, golden, groups_of, payload_of, read

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/upgrade.md").read_text()
RECORDS = ROOT / "tests/record/golden"
PLACE = f"records/0c/{KEY.hex()}.safetensors"
"""Where directories of version 2 have the golden record."""


@pytest.fixture
def yesterday(tmp_path):
    """A directory as the first release left it, without its index: its layout, and a record."""
    root = tmp_path / "store"
    (root / PLACE).parent.mkdir(parents=True)
    (root / "kvferry.json").write_text('{"format": "kvferry-store", "version": 2}\n')
    (root / PLACE).write_bytes((RECORDS / "tiny.safetensors").read_bytes())
    return root


def bytes_of(store):
    size = store.read(ChunkKey(KEY), ())
    value = memoryview(bytearray(size))
    store.read(ChunkKey(KEY), [(0, value)])
    return bytes(value)


def both_read_each_others_records(yesterday):
    """What today writes is what yesterday wrote, byte for byte, under the same name and place."""
    schema, first_token, data = golden("tiny")
    with FileStore(yesterday) as store:
        stored = bytes_of(store)
        assert read(schema, stored, first_token=first_token) is None
        store.delete(ChunkKey(KEY))
        store.put(ChunkKey(KEY), [data])
    assert [
        each.relative_to(yesterday).as_posix() for each in yesterday.rglob("*.safetensors")
    ] == [PLACE]
    assert (yesterday / PLACE).read_bytes() == stored


def the_older_reads_what_the_newer_stored(_yesterday):
    for name in GOLDEN:
        assert golden(name)[2] == (RECORDS / f"{name}.safetensors").read_bytes()
    schema = golden("tiny")[0]
    marked = encode(schema, payload_of(schema), mark=MARK)
    assert b'"version":"1"' not in marked  # which is all that releases before it read


def a_new_version_makes_new_namespaces(_yesterday):
    groups = groups_of(GOLDEN["tiny"][0])
    now = Namespace.of(ModelIdentity(weights=bytes(32), config={}), groups, 16)
    for name in ("format_version", "key_version"):
        later = Namespace.described({**now.description, name: 2}, None)
        assert later.digest != now.digest


def a_directory_of_another_version_is_refused(yesterday):
    marker = yesterday / "kvferry.json"
    marker.write_text(marker.read_text().replace("2", "3"))
    with pytest.raises(StorePlaceError, match="has format version 3, this kvferry knows 2"):
        FileStore(yesterday)
    tiers = [f"file://{yesterday}", f"file://{yesterday.parent}/other"]
    with open_store(tiers, start_seconds=20.0) as store:
        states = [tier.state for tier in store.tiers()]
    assert states[0] != "up" == states[1], states
    assert (yesterday / PLACE).exists()


def an_index_of_another_schema_is_rebuilt(yesterday):
    index = yesterday / "index.sqlite3"
    with sqlite3.connect(index) as db:
        db.execute("CREATE TABLE records (key, num_bytes)")
    db.close()
    with FileStore(yesterday, max_bytes=1 << 20) as store:
        assert store.wait_indexed(20.0)
        assert [entry.key for entry in store.catalogue().scan()] == [KEY]
        assert list(store.catalogue().removals(9)) == []
    assert [each.name for each in yesterday.glob("*.broken")] == ["index.sqlite3.broken"]


def other_peers_and_handovers_are_misses(_yesterday):
    params = {"do_remote_prefill": True, "kvferry": {"v": STAMP_VERSION + 1}}
    source = read_handover(params).source
    assert source.stamp.version == STAMP_VERSION + 1
    assert source.stamp.last_key == b""  # nothing else of it is read


def kept_digests_of_another_form_are_hashed_again(yesterday):
    known, digest = _KnownFile("1-2", b"state", 0), bytes(32)
    cache = _DigestCache(yesterday)
    cache.put(known, digest)
    assert cache.get(known) == digest
    text = (yesterday / "1-2").read_bytes()
    (yesterday / "1-2").write_bytes(text.replace(b"weights 4", b"weights 5"))
    assert cache.get(known) is None


def an_unknown_option_ends_the_start(_yesterday):
    with pytest.raises(ConfigError, match="unknown option 'of_tomorrow'"):
        build_config(CacheConfig, {"store": "memory://a", "of_tomorrow": 1}, where="x")


def hosts_are_upgraded_apart(_yesterday):
    """By the namespace, which names no release of a host."""
    groups = groups_of(GOLDEN["tiny"][0])
    now = Namespace.of(ModelIdentity(weights=bytes(32), config={}), groups, 16)
    assert sorted(now.description) == [
        "chunk_tokens", "config", "format_version", "groups", "key_version", "tenant", "weights",
        "weights_version",
    ]  # fmt: skip


SENTENCES = {
    "While these stay": both_read_each_others_records,
    "A roll back": the_older_reads_what_the_newer_stored,
    "A new version of records or keys": a_new_version_makes_new_namespaces,
    "A new version of directories": a_directory_of_another_version_is_refused,
    "An index": an_index_of_another_schema_is_rebuilt,
    "Peers of another version": other_peers_and_handovers_are_misses,
    "Digests of weights": kept_digests_of_another_form_are_hashed_again,
    "A configuration": an_unknown_option_ends_the_start,
    "vLLM, SGLang and Transformers": hosts_are_upgraded_apart,
}


@pytest.mark.parametrize(("sentence", "holds"), SENTENCES.items(), ids=SENTENCES)
def test_what_the_page_says_holds(sentence, holds, yesterday):
    assert f"- {sentence}" in PAGE
    holds(yesterday)


def test_each_sentence_has_a_test():
    begun = re.findall(r"^- (.*)$", PAGE, re.MULTILINE)
    assert [next(each for each in SENTENCES if line.startswith(each)) for line in begun] == [
        *SENTENCES
    ]


def test_the_page_names_the_versions():
    versions = re.search(
        r"records (\d+), keys (\d+), directories (\d+), peers (\d+), handovers (\d+)", PAGE
    )
    now = (FORMAT_VERSION, KEY_VERSION, STORE_FORMAT_VERSION, VERSION, STAMP_VERSION)
    assert tuple(map(int, versions.groups())) == now
