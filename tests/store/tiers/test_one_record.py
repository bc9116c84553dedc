"""A fault of one record is that record's miss; a tier goes away by faults of its medium alone.

Tables: errors of a directory, statuses of a bucket, refusals of a server, each of one record and of
all.
"""

from __future__ import annotations

import errno
import time

import pytest

from kvferry.errors import StoreError
from kvferry.observe import Counters
from kvferry.store.base import PutResult, Where
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening, ServerBounds
from kvferry.store.servers.objects import ObjectClient, ObjectOptions
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.servers.valkey import Login, ValkeyClient
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ChunkKey
from tests.servers.process import LOCALHOST
from tests.servers.valkey import running_valkey
from tests.servers.wrong_s3 import REFUSED, SIZE, running_wrong_s3
from tests.store.errors import OF_FILES, Odd, io
from tests.store.tiers.states import rest

__all__ = ["io"]

SPACE = b"n" * 32
OPENING = Opening(namespace=SPACE, bounds=ServerBounds(probe_seconds=20.0))
QUICK = Patience(look_seconds=0.01)
BAD, GOOD = ChunkKey(bytes.fromhex(REFUSED)), make_key(2)


@pytest.fixture
def tier_of():
    made = []

    def make(inner):
        made.append(TieredStore([inner], Counters(), clock=FakeClock(), patience=QUICK))
        return made[-1]

    yield make
    for each in made:
        each.close()


def read_bad(tiered: TieredStore) -> None:
    """Read the record again and again, also while its tier is tried."""
    for _ in range(5 * QUICK.max_failures):
        try:
            tiered.read(BAD, [(0, memoryview(bytearray(16)))])
        except StoreError:
            rest(tiered)


def is_up(tiered: TieredStore) -> bool:
    return tiered.tiers()[0].state == "up"


@pytest.mark.parametrize("is_all", [False, True], ids=["one record", "the medium"])
@pytest.mark.parametrize("call", ["open", "preadv"])
@pytest.mark.parametrize("number", OF_FILES)
def test_an_error_of_one_file_leaves_the_directory_up(
    tmp_path, tier_of, io, caplog, number, call, is_all
):
    tiered = tier_of(FileStore(tmp_path / "kv", background=False))
    for key in (BAD, GOOD):
        tiered.put(key, [b"value"])
    if is_all:
        io.fail = dict.fromkeys((call, "open", "listdir"), getattr(errno, number))
    elif call == "open":
        io.fail, io.only_in = {call: getattr(errno, number)}, REFUSED
    else:
        io.fail = {call: getattr(errno, number)}  # of whichever file is read
    read_bad(tiered)
    if is_all:
        assert not is_up(tiered)
        assert "not used until it answers" in caplog.text
        io.fail.clear()
        return
    assert is_up(tiered)
    if call == "preadv":
        io.fail.clear()
    assert tiered.read(GOOD, [(0, memoryview(bytearray(16)))]) == 5
    assert tiered.put(make_key(3), [b"value"]).result is PutResult.STORED
    assert "not used until" not in caplog.text


@pytest.mark.parametrize("status", ["403", "404"])
@pytest.mark.parametrize("scope", ["one", "all"])
def test_a_bucket_that_refuses_one_key_is_up(tier_of, monkeypatch, scope, status):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with running_wrong_s3() as endpoint:
        client = ObjectClient("s3", f"{scope}-{status}", ObjectOptions(endpoint=endpoint))
        tiered = tier_of(RemoteStore("s3://b", client, OPENING))
        read_bad(tiered)
        assert is_up(tiered) is (scope == "one" or status == "404")
        if scope == "one":
            assert tiered.read(GOOD, [(0, memoryview(bytearray(16)))]) == SIZE
            # The whole prompt is asked for at once: the other keys of it are found.
            tiered.probe([GOOD, BAD, make_key(3)])
            wait_until(lambda: tiered.where(make_key(3)) is not Where.ASKED, "it is answered")
            found = [tiered.where(key) is Where.HERE for key in (GOOD, BAD, make_key(3))]
            assert found == [True, False, True]
        elif status == "403":
            with pytest.raises(StoreError):
                client.exists(["kv/a", "kv/b"], time.monotonic() + 20)
        tiered.close()


def test_a_bucket_that_is_gone_is_away(tier_of, seaweed, monkeypatch):
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    client = ObjectClient("s3", "no-such-bucket", ObjectOptions(endpoint=seaweed.endpoint))
    client._is_checked = True  # it was there when the store was opened
    tiered = tier_of(RemoteStore("s3://b", client, OPENING))
    read_bad(tiered)
    assert not is_up(tiered)
    tiered.close()


def test_a_server_that_refuses_one_key_is_up(tier_of):
    with running_valkey() as server:
        allowed = [f"~kv/{SPACE.hex()}/{key}" for key in (GOOD.hex(), make_key(3).hex(), "ff*")]
        server.ask("ACL", "SETUSER", "kv", "on", ">secret", "+@all", *allowed)
        login = Login("kv", "secret")
        client = ValkeyClient([(LOCALHOST, server.port)], login=login)
        tiered = tier_of(RemoteStore("valkey://h", client, OPENING, prefix="kv/"))
        for key in (GOOD, make_key(3)):
            assert tiered.put(key, [b"value"]).result is PutResult.STORED
        read_bad(tiered)
        assert is_up(tiered)
        assert tiered.read(GOOD, ()) == 5
        other = tier_of(RemoteStore("valkey://h", client, OPENING, prefix="kv/"))
        other.probe([GOOD, BAD, make_key(3)])
        wait_until(lambda: other.where(make_key(3)) is not Where.ASKED, "it is answered")
        found = [other.where(key) is Where.HERE for key in (GOOD, BAD, make_key(3))]
        assert found == [True, False, True]
        server.ask("ACL", "SETUSER", "kv", "resetkeys")
        read_bad(tiered)
        assert not is_up(tiered)


@pytest.mark.parametrize("is_all", [False, True], ids=["one record", "the medium"])
def test_a_client_that_breaks_at_one_name_does_not_take_its_tier_away(tier_of, is_all):
    odd = Odd()
    odd.error, odd.only_in = KeyError("missing"), "" if is_all else REFUSED
    tiered = tier_of(RemoteStore("odd://h", odd, OPENING))
    tiered.put(GOOD, [b"value"])
    odd.method = "read"
    read_bad(tiered)
    assert is_up(tiered) is not is_all
