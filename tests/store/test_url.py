from __future__ import annotations

import doctest
import threading
import time
from dataclasses import replace
from urllib.parse import quote

import pytest

import kvferry.store.kind
import kvferry.store.url
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from kvferry.store import memory
from kvferry.store.base import PutResult
from kvferry.store.kind import Opening
from kvferry.store.kinds import MODULES
from kvferry.store.memory import MemoryStore
from kvferry.store.servers import objects
from kvferry.store.url import (
    open_one,
    open_store,
    parse_store_url,
    read_options,
)
from kvferry.testing.stores import make_key, read_value
from kvferry.testing.stores.hooks import wait_until
from tests.servers.process import LOCALHOST
from tests.servers.proxy import running_proxy


@pytest.mark.parametrize("module", [kvferry.store.url, kvferry.store.kind])
def test_examples_in_docstrings_are_true(module):
    result = doctest.testmod(module)
    assert (result.attempted, result.failed) == (1, 0)


def test_a_memory_url_opens_a_memory_store():
    counters = Counters()
    with open_store("memory://name?max_bytes=1KiB", observer=counters) as store:
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
        ("file:///~/x", ["~ is not expanded"]),
        ("file:///x?max_bytes=-5", ["'max_bytes'", "not a size"]),
        ("file:///x?read_onyl=yes", ["unknown option 'read_onyl'", "'read_only'"]),
        ("file:///x?create=perhaps", ["'create'", "true nor false"]),
        ("file:///x?direct_io=maybe", ["'direct_io'", "auto, off"]),
        ("/var/cache/kv", ["did you mean 'file:///var/cache/kv'?"]),
        ("http://host", ["unknown scheme 'http'", "file, gs, memory"]),
        ("valkey://a?clustre=true", ["unknown option 'clustre'", "'cluster'"]),
        ("valkey://a,b/kv", ["2 servers", "?cluster=true"]),
        ("valkey://a/k{v}", ["holds a brace"]),
        ("valkey://a?ca_file=/x", ["TLS files need a TLS URL", "valkeys://"]),
        ("rediss://a?ca_file=/absent", ["/absent: No such file"]),
        ("rediss://a?cert_file=/absent", ["/absent: No such file"]),
        ("valkeys://a?ca_file=/dev/null", ["/dev/null: no usable PEM"]),
        ("valkeys://a?key_file=/x", ["without cert_file"]),
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


def test_the_url_of_a_store_on_servers_shows_no_credentials():
    url = "redis://me:secret@h-1,[::1]:7000/a/kv/?cluster=true"
    with open_store(url, multi_process=True) as store:
        assert store.url == "redis://h-1,[::1]:7000/a/kv"
        assert store.multi_process
        assert "me" not in store.url
        assert "secret" not in repr(store)
    with open_one(url) as server:
        parts = [server, *vars(server).values()]
        shown = [f"{part!r} {getattr(part, '__dict__', '')!r}" for part in parts]
        assert len(shown) > 1
        assert not [text for text in shown if "secret" in text]


def test_memory_is_refused_where_several_processes_must_share():
    with pytest.raises(ConfigError, match=r"one process only.*file:///"):
        open_store("memory://x", multi_process=True)


def test_a_file_url_opens_a_file_store_with_its_options(tmp_path):
    counters = Counters()
    root = tmp_path / "a b%?#"
    url = f"file://{quote(str(root))}?max_bytes=1MiB&direct_io=off"
    with open_store(url, observer=counters, multi_process=True) as store:
        assert store.stat().max_bytes == 2**20
        assert store.put(make_key(), [b"value"]).result is PutResult.STORED
        with open_store(store.url) as again:
            assert read_value(again, make_key()) == b"value"
    assert root.is_dir()
    assert counters["store_put_records"] == 1
    with open_store(f"file://{quote(str(root))}?read_only=yes") as store:
        assert read_value(store, make_key()) == b"value"
        assert store.put(make_key(1), [b"value"]).result is PutResult.FAILED


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
            assert store.put(make_key(number), [b"value"]).result is PutResult.STORED
        assert all(read_value(store, make_key(number)) == b"value" for number in range(5))
        store.discard(make_key(), "bad_checksum")
        assert read_value(store, make_key()) is None


@pytest.fixture
def opens(monkeypatch):
    """Has a function open the URLs of a kind of store."""

    def make(opener, module=memory):
        def opened(url, _options, opening):
            return opener(str(url), opening.may_create)

        monkeypatch.setattr(module, "KIND", replace(module.KIND, open=opened))

    return make


def test_one_bucket_name_at_two_servers_is_two_places(opens):
    opens(lambda url, _: MemoryStore(url), objects)
    urls = ["s3://kv/x?endpoint=http://one", "s3://kv/x?endpoint=http://two"]
    open_store(urls).close()
    with pytest.raises(ConfigError, match="two tiers are at one place"):
        open_store([*urls, urls[0]])


@pytest.mark.parametrize(
    ("urls", "says"),
    [*((each, "a URL or a list") for each in (None, 5, {"a": 1})), ([], "list of stores is empty")],
)
def test_what_is_no_url_and_no_list_is_refused(urls, says):
    with pytest.raises(ConfigError, match=says):
        open_store(urls)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/kv?endpoint=minio:9000",
        "s3://b/kv?endpoint=http://[::1",
        "s3://b/kv?endpoint=http://[1::2::3]:9000",
        "s3://b/kv?endpoint=http://[fe80::1%251]:9000",
        "s3://b/kv?endpoint=http://a%20b:9000",
        "s3://b/kv?endpoint=http://256.1.1.1:9000",
        "s3://b/kv?endpoint=http://minio:99999",
        "s3://b/kv?endpoint=http://minio:9000/a%20b",
        "s3://b/kv?endpoint=http://minio:9000/%3Fa=b",
        "s3://b/kv?endpoint=http://%C3%A9.example",
        "s3://b/kv?endpoint=ftp://minio",
        "az://c/kv?endpoint=minio:9000",
    ],
)
def test_an_endpoint_that_would_be_a_panic_of_the_library_is_refused(url, capfd, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(ConfigError, match=r"write endpoint=http://minio:9000$"):
        open_store(url)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("url", "what_to_write"),
    [
        ("s3://b?region=a%0Ab", "write region=eu-central-1"),
        ("s3://b?region=a b", "write region=eu-central-1"),
        ("valkey://256.1.1.1/kv", "write valkey://host:6379/prefix"),
        ("valkey://a..b/kv", "write valkey://host:6379/prefix"),
        ("valkey://[1::2::3]/kv", "write valkey://host:6379/prefix"),
        ("mooncake://-a:1/kv", "write mooncake://host:50051/prefix"),
        ("mooncake://a:1/kv?metadata=http:/x", "write metadata=http://"),
        ("mooncake://a:1/kv?admin=a:9003", "write admin=http://"),
        ("mooncake://a:1/kv?device=a b", "write device=mlx5_0"),
        ("valkeys://a?ca_file=pem", "begin it with /"),
        ("file:///a?index_file=b", "begin it with /"),
        ("valkeys://a?ca_file=/a%00b", "option 1 holds a zero byte"),
    ],
)
def test_what_no_library_takes_is_refused_before(url, what_to_write):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert what_to_write in str(caught.value)


@pytest.mark.parametrize("mark", ["&token=", ";token=", "/token="])
@pytest.mark.parametrize("server", ["valkey://h", "s3://b", "mooncake://h:1"])
def test_options_without_a_question_mark_are_no_prefix(server, mark):
    with pytest.raises(ConfigError, match="options begin with") as caught:
        parse_store_url(f"{server}/kv{mark}hunter2")
    assert "hunter2" not in str(caught.value)
    assert parse_store_url(f"{server}/kv{quote(mark)}x").path == f"kv{mark}x"


@pytest.mark.parametrize(
    "options",
    [
        "admin=http://10.0.0.7:9003",
        "metadata=redis://:password%40h:1",
        "metadata=etcd://h:2379",
        "metadata=http://[::1]:8080/metadata",
        "device=mlx5_0,mlx5_1",
    ],
)
def test_what_mooncake_takes_passes(options):
    assert read_options(parse_store_url(f"mooncake://a:1/kv?{options}"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_ENDPOINT_URL", "minio:9000"),
        ("AWS_SECRET_ACCESS_KEY", "hunter2\n"),
        ("AWS_REGION", "hunter2 east"),
        ("AWS_DEFAULT_REGION", "hunter2/?"),
    ],
)
def test_variables_at_which_the_library_would_panic_are_refused(variable, value, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=variable) as caught:
        open_store("s3://bucket/kv")
    assert value.strip() not in str(caught.value).replace("http://minio:9000", "")


def test_tiers_open_side_by_side(opens):
    """None would open if they did not wait at the same time."""
    together = threading.Barrier(3)

    def opener(url, _):
        together.wait(60.0)
        return MemoryStore(url)

    opens(opener)
    names = ["memory://a", "memory://b", "memory://c"]
    with open_store(names) as store:
        assert [tier.state for tier in store.tiers()] == ["up"] * len(names)


def test_a_server_that_hangs_holds_up_the_start_for_seconds_only(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with running_proxy(1) as proxy:
        proxy.black_hole()
        started = time.monotonic()
        open_one(f"s3://b?endpoint=http://{LOCALHOST}:{proxy.port}").close()
        assert time.monotonic() - started < 20.0
        assert proxy.num_connections


def tiers_at_work():
    return {thread for thread in threading.enumerate() if thread.name == "kvferry-tier"}


def test_of_tiers_that_cannot_be_opened_the_first_is_named_and_the_others_are_closed(opens):
    opened, before = [], tiers_at_work()  # those of another test may hang for a while

    def opener(url, _):
        if url.endswith(("b", "c")):
            raise ConfigError(url)
        opened.append(MemoryStore(url))
        return opened[-1]

    opens(opener)
    with pytest.raises(ConfigError, match="memory://b"):
        open_store([f"memory://{name}" for name in "abcd"])
    wait_until(lambda: tiers_at_work() <= before, "one that opens now is closed, too")
    assert opened
    assert all(store._closed for store in opened)


@pytest.fixture
def _toys(monkeypatch):
    """The one line."""
    monkeypatch.setitem(MODULES, "toy", "tests.store.toy")


@pytest.mark.usefixtures("_toys")
def test_one_file_and_one_line_add_a_kind_of_store():
    url = "toy://me:secret@shelf:7/a/b?refuses=no"
    with open_one(url, Opening(namespace=b"n" * 32)) as store:
        assert store.url == "toy://shelf:7/a/b"
        assert store.put(make_key(), [b"value"]).result is PutResult.STORED
        assert read_value(store, make_key()) == b"value"
        assert [entry.namespace for entry in store.catalogue().scan()] == [b"n" * 32]
        assert store.tier_of(make_key()) == "toy"
    with open_one("toy://shelf:7?refuses=yes") as store:
        assert store.put(make_key(), [b"value"]).result is PutResult.NO_SPACE


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("toy:///a", "names no toy; write toy://host/prefix"),
        ("toy://shelf?refuse=yes", "unknown option 'refuse'; did you mean 'refuses'?"),
        ("tou://shelf", "did you mean 'toy'?"),
    ],
)
@pytest.mark.usefixtures("_toys")
def test_wrong_urls_of_an_added_kind_are_refused_like_others(url, part):
    with pytest.raises(ConfigError) as caught:
        open_one(url)
    assert part in str(caught.value)
