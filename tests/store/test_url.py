from __future__ import annotations

import doctest
import threading
from urllib.parse import quote

import pytest

import kvferry.store.url
from kvferry.errors import ConfigError, StoreError
from kvferry.observe import Counters
from kvferry.store import late
from kvferry.store.base import PutResult
from kvferry.store.file.store import FileStore
from kvferry.store.memory import MemoryStore
from kvferry.store.url import open_store, open_tiers
from kvferry.testing.stores import make_key, read_value
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey


def test_examples_in_docstrings_are_true():
    result = doctest.testmod(kvferry.store.url)
    assert (result.attempted, result.failed) == (1, 0)


def test_a_memory_url_opens_a_memory_store():
    counters = Counters()
    with open_store("memory://name?max_bytes=1KiB", observer=counters) as store:
        assert isinstance(store, MemoryStore)
        assert store.url == "memory://name"
        assert store.stat().max_bytes == 1024
        store.put(make_key(0), [bytes(1000)])
        store.put(make_key(1), [bytes(1000)])
    assert counters["store_evicted_records"] == 1


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("memory://x?max_byte=1GiB", ["unknown option 'max_byte'", "'max_bytes'"]),
        ("memory://x?direct_io=on", ["unknown option 'direct_io'"]),
        ("memory://x?max_bytes=lots", ["'max_bytes'", "10GiB"]),
        ("memory://x?max_bytes=0", ["'max_bytes' is 0"]),
        ("memory://x?max_bytes=0.5B", ["'max_bytes' is 0"]),
        ("file:///x?max_bytes=-5", ["'max_bytes'", "not a size"]),
        ("file:///x?read_onyl=yes", ["unknown option 'read_onyl'", "'read_only'"]),
        ("file:///x?create=perhaps", ["'create'", "true nor false"]),
        ("file:///x?direct_io=maybe", ["'direct_io'", "auto, off"]),
        ("/var/cache/kv", ["did you mean 'file:///var/cache/kv'?"]),
        ("http://host", ["unknown scheme 'http'", "file, gs, memory"]),
        ("valkey://a?clustre=true", ["unknown option 'clustre'", "'cluster'"]),
        ("valkey://a,b/kv", ["2 servers", "?cluster=true"]),
        ("valkey://a/k{v}", ["holds a brace"]),
        ("valkey://a?ca_file=/x", ["files for TLS, and no TLS", "valkeys://"]),
        ("rediss://a?ca_file=/absent", ["/absent: No such file"]),
        ("rediss://a?cert_file=/absent", ["/absent: No such file"]),
        ("valkeys://a?ca_file=/dev/null", ["/dev/null: holds no usable PEM"]),
        ("valkey://a?password_file=/absent", ["password_file: No such file"]),
    ],
)
def test_unusable_urls_are_refused_in_one_line(url, parts):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    message = str(caught.value)
    assert "\n" not in message
    shown = url.partition("?")[0].replace("{", "%7B").replace("}", "%7D")
    for part in [repr(shown), *parts]:
        assert part in message


def test_two_passwords_are_refused_and_not_shown():
    with pytest.raises(ConfigError, match="give one of them") as caught:
        open_store("valkey://me:secret@host?password_file=/x")
    assert "secret" not in str(caught.value)


def test_a_key_file_alone_is_refused():
    with pytest.raises(ConfigError, match="without cert_file"):
        open_store("valkeys://a?key_file=/x")


def test_the_url_of_a_store_on_servers_shows_no_credentials():
    url = "redis://me:secret@h-1,[::1]:7000/a/kv/?cluster=true"
    with open_store(url, multi_process=True) as store:
        assert store.url == "redis://h-1,[::1]:7000/a/kv"
        assert store.multi_process
        (server,) = [tier.store for tier in store._tiers]
        assert "secret" not in f"{store!r} {vars(server)!r} {vars(server._client)!r}"
        assert "me" not in store.url


def test_memory_is_refused_where_several_processes_must_share():
    with pytest.raises(ConfigError, match=r"one process only.*file:///"):
        open_store("memory://x", multi_process=True)


def test_a_file_url_opens_a_file_store_with_its_options(tmp_path):
    counters = Counters()
    root = tmp_path / "a b%?#"
    url = f"file://{quote(str(root))}?max_bytes=1MiB&direct_io=off"
    with open_store(url, observer=counters, multi_process=True) as store:
        assert isinstance(store, FileStore)
        assert store.stat().max_bytes == 2**20
        assert store.put(make_key(), [b"value"]) is PutResult.STORED
    assert root.is_dir()
    assert counters["store_put_records"] == 1
    with open_store(f"file://{quote(str(root))}?read_only=yes") as store:
        assert read_value(store, make_key()) == b"value"
        assert store.put(make_key(1), [b"value"]) is PutResult.FAILED


def test_an_absent_directory_is_refused_where_it_may_not_be_made(tmp_path):
    with pytest.raises(ConfigError, match="absent"):
        open_store(f"file://{tmp_path}/absent?create=no")
    with pytest.raises(ConfigError, match="absent"):
        open_store(f"file://{tmp_path}/absent?read_only=yes")
    assert list(tmp_path.iterdir()) == []


def test_the_url_of_an_open_store_opens_it_again(tmp_path):
    with open_store(f"file://{quote(str(tmp_path / 'a b%?#'))}") as store:
        store.put(make_key(), [b"value"])
        with open_store(store.url) as again:
            assert read_value(again, make_key()) == b"value"


def test_a_store_without_an_index_knows_no_keys(tmp_path):
    with open_store(f"file://{tmp_path}/s", index=False) as store:
        assert isinstance(store, FileStore)
        assert not store.wait_indexed(60.0)


@pytest.mark.parametrize(
    "urls",
    [
        ["file:///tmp/kv-tiers", "file:///tmp/kv-tiers/"],
        ["file:///tmp/kv-tiers", "file:///tmp/other/../kv-tiers?max_bytes=1GiB"],
        ["valkey://host/kv", "valkey://host:6379/kv"],
        ["redis://host/kv", "valkey://host/kv"],
    ],
)
def test_two_tiers_at_one_place_are_refused(urls):
    with pytest.raises(ConfigError, match="two tiers are at one place"):
        open_store(urls)


def test_two_paths_of_one_directory_do_no_harm(tmp_path):
    """Only names are compared: a link may lead to a mount that hangs."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with open_store([(tmp_path / name).as_uri() for name in ("real", "link")]) as store:
        for number in range(5):
            assert store.put(make_key(number), [b"value"]) is PutResult.STORED
        assert all(read_value(store, make_key(number)) == b"value" for number in range(5))
        store.discard(make_key(), "bad_leaf")
        assert read_value(store, make_key()) is None


def test_a_tier_whose_medium_does_not_answer_is_used_once_it_does(monkeypatch, caplog):
    monkeypatch.setattr(late, "RETRY_SECONDS", 0.01)
    is_away = threading.Event()
    is_away.set()

    def open_one(url, may_create=True):
        assert may_create or url.endswith("far")
        if url.endswith("far") and is_away.is_set():
            raise StoreError("away")
        return MemoryStore(url)

    with open_tiers(["memory://near", "memory://far"], Counters(), open_one) as store:
        assert store.put(make_key(), [b"value"]) is PutResult.STORED
        assert store.stat().num_records == 1
        is_away.clear()
        wait_until(lambda: store.stat().num_records == 2, "the far one has it, too")
    assert len(caplog.records) == 2
    is_away.set()
    with pytest.raises(StoreError, match="away"):
        open_tiers("memory://far", Counters(), open_one)


def test_one_bucket_name_at_two_servers_is_two_places():
    urls = ["s3://kv/x?endpoint=http://one", "s3://kv/x?endpoint=http://two"]
    open_tiers(urls, Counters(), MemoryStore).close()
    with pytest.raises(ConfigError, match="two tiers are at one place"):
        open_tiers([*urls, urls[0]], Counters(), MemoryStore)


@pytest.mark.parametrize("urls", [None, 5, {"a": 1}])
def test_what_is_no_url_and_no_list_is_refused(urls):
    with pytest.raises(ConfigError, match="a URL or a list"):
        open_store(urls)


def test_an_empty_list_is_refused():
    with pytest.raises(ConfigError, match="list of stores is empty"):
        open_store([])


def test_several_urls_are_tiers(tmp_path):
    with open_store([(tmp_path / "near").as_uri(), "memory://far"]) as store:
        assert store.url == f"{(tmp_path / 'near').as_uri()}, memory://far"
        assert store.put(ChunkKey(bytes(32)), [b"value"]) is PutResult.STORED


def test_of_tiers_none_stays_open_if_one_cannot_be_opened(tmp_path):
    before = threading.active_count()
    with pytest.raises(ConfigError):
        open_store([(tmp_path / "near").as_uri(), "file:///proc/nowhere"])
    assert threading.active_count() == before
