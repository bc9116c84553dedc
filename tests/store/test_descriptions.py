"""What an engine wrote once at its start and needs later: the description of its namespace, and the
marker of a directory. They come again with the next use if the store lost them, of every kind.
"""

from __future__ import annotations

import errno
import shutil
import time

import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.errors import Fault, FaultKind
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.servers import remote
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.store.url import open_one
from kvferry.testing.clock import FakeClock
from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey
from tests.cli.conftest import run
from tests.servers.places import client_of, valkey_url
from tests.servers.valkey import running_valkey
from tests.store.servers.remote_client import DictClient
from tests.store.test_wrong_values import url

__all__ = ["run", "url"]

SPACE, TEXT = b"n" * 32, '{"model": "of this engine"}'

DOWN = Fault(FaultKind.AWAY, "down")


def use(store, how):
    if how == "a look-up":
        store.probe([make_key(7)])
    else:
        assert store.put(make_key(time.monotonic_ns() % 97), [b"value"]).is_there


@pytest.mark.parametrize("how", ["a look-up", "a write"])
@pytest.mark.parametrize("lost", ["all", "the description"])
def test_a_server_that_lost_it_gets_it_again(url, monkeypatch, lost, how):
    monkeypatch.setattr(remote, "_LOOK_SECONDS", 0.0)
    with open_one(url, Opening(namespace=SPACE)) as store:
        store.describe(SPACE, TEXT)
        for number in range(3):
            store.put(make_key(number), [b"value"])
        client, until = client_of(store), time.monotonic() + 30
        texts = store._texts
        texts._given, kept = {}, texts._given  # nothing comes back meanwhile
        prefix = store.name_of(make_key()).rpartition("/")[0]
        names = [f"{prefix}/about.json"]
        names += [store.name_of(make_key(number)) for number in range(3)] if lost == "all" else []
        for name in names:
            wait_until(lambda name=name: client.read(name, (), until) is not None, "it is there")
            assert client.delete(name, until)
        with open_one(url, Opening(namespace=SPACE, index=False)) as other:
            assert other.catalogue().description(SPACE) is None
            texts._given = kept
            use(store, how)
            wait_until(
                lambda: other.catalogue().description(SPACE) == TEXT, "it is described again"
            )


@pytest.mark.parametrize("how", ["FLUSHALL", "a restart"])
def test_after_a_server_came_back_empty_commands_find_the_model(run, tmp_path, monkeypatch, how):
    monkeypatch.setattr(remote, "_LOOK_SECONDS", 0.0)
    model = make_tiny_model(tmp_path / "model")
    options = {"audit": "off", "chunk_tokens": 16}
    with running_valkey() as server:
        place = valkey_url(server.port)
        with LLM(str(model), store=place, connector_options=options) as llm:

            def generate(first):
                llm.generate([list(range(first, first + 100))], SamplingParams(max_tokens=1))
                assert llm.drain(60)

            generate(3)
            if how == "FLUSHALL":
                server.ask("FLUSHALL")
            else:
                server.process.kill()
                server.start()
            assert run("rm", place, "--model", model, "--dry-run").code != 0
            seeds = iter(range(4, 90))

            def is_described():
                generate(next(seeds))
                return run("rm", place, "--model", model, "--dry-run").code == 0

            wait_until(is_described, "it is described again", 60)


REMOVED = {
    "everything": lambda root: [
        shutil.rmtree(each) if each.is_dir() else each.unlink() for each in root.iterdir()
    ],
    "the descriptions": lambda root: shutil.rmtree(root / "namespaces"),
    "one description": lambda root: (root / "namespaces" / f"{SPACE.hex()}.json").unlink(),
    "the marker": lambda root: (root / "kvferry.json").unlink(),
}


@pytest.mark.parametrize("removed", REMOVED)
def test_a_directory_that_lost_it_gets_it_again(tmp_path, removed):
    root = tmp_path / "kv"
    with FileStore(root, background=False) as store:
        store.describe(SPACE, TEXT)
        store.put(make_key(), [b"value"])
        REMOVED[removed](root)
        # In a folder that is there: one that is made brings the texts back at once.
        store.put(ChunkKey(make_key()[:-1] + b"x"), [b"value"])
        store.maintain()  # all that comes once a minute
        assert (root / "kvferry.json").is_file()
        with open_one(f"{root.as_uri()}?read_only=true") as other:
            assert other.catalogue().description(SPACE) == TEXT


@pytest.mark.parametrize("fails", ["read_text", "write_text"])
def test_a_directory_that_was_away_gets_its_description_once_it_is_back(
    tmp_path, monkeypatch, fails
):
    def does_not_answer(*_args):
        raise OSError(errno.EIO, "Input/output error")

    with FileStore(tmp_path / "kv", background=False) as store:
        store.put(make_key(), [b"value"])
        with monkeypatch.context() as away:
            away.setattr(store.directory, fails, does_not_answer)
            store.describe(SPACE, TEXT)
        store.maintain()
        assert store.catalogue().description(SPACE) == TEXT


def test_upkeep_makes_no_store_where_a_mount_is_away(tmp_path):
    root = tmp_path / "kv"
    with FileStore(root, background=False) as store:
        store.describe(SPACE, TEXT)
        store.put(make_key(), [b"value"])
        root.rename(tmp_path / "away")
        root.mkdir()
        store.maintain()
        assert not (root / "kvferry.json").exists()
        assert not (root / "namespaces").exists()


def test_a_description_is_looked_for_rarely_and_one_of_another_text_stays():
    client, clock = DictClient(), FakeClock()
    opening = Opening(namespace=SPACE)
    store = RemoteStore("dict://h", client, opening, clock=clock)
    store.describe(SPACE, TEXT)
    (name,) = client.values
    asked = []
    client.read, read = (
        lambda name, *given: (asked.append(name), read(name, *given))[1],
        client.read,
    )
    for number in range(100):
        store.put(make_key(number), [b"value"], clock() + 30)
        clock.advance(1.0)
    assert 9 <= asked.count(name) / 2 <= 11
    client.values[name] = b"of a newer kvferry"
    clock.advance(60.0)
    store.put(make_key(100), [b"value"], clock() + 30)
    assert client.values[name] == b"of a newer kvferry"
    del client.values[name]
    clock.advance(60.0)
    store.put(make_key(101), [b"value"], clock() + 30)
    assert client.values[name] == TEXT.encode()
    store.close()


def test_a_server_that_was_away_at_the_start_is_described_later():
    client, clock = DictClient(), FakeClock()
    client.down = True
    store = RemoteStore("dict://h", client, Opening(namespace=SPACE), clock=clock)
    store.describe(SPACE, TEXT)
    client.down = False
    clock.advance(60.0)
    store.put(make_key(), [b"value"], clock() + 30)
    assert store.catalogue().description(SPACE) == TEXT
    store.close()


def test_a_tier_that_is_away_is_described_once_it_is_back():
    client, clock = DictClient(), FakeClock()
    far = RemoteStore("dict://h", client, Opening(namespace=SPACE), clock=clock)
    with TieredStore([MemoryStore(), far], clock=clock) as store:
        store._tiers[1]._event(lambda health: health.is_lost(DOWN))
        client.down = True
        store.describe(SPACE, TEXT)
        client.down = False
        clock.advance(60.0)
        wait_until(lambda: store.tiers()[1].state == "up", "it is used again")
        store.put(make_key(), [b"value"])
        wait_until(lambda: far.catalogue().description(SPACE) == TEXT, "it is described")
