"""The client of Valkey and Redis, against servers that answer wrongly: each wrong reply is one line
in time, and takes no memory for what was not asked."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import StoreError
from kvferry.store.servers.resp import Connection, command
from kvferry.store.servers.valkey import Login, ValkeyClient
from kvferry.store.servers.valkey_nodes import ValkeyNode
from kvferry.store.url import open_one
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from tests.servers.hostile_valkey import (
    ATTACKS,
    hostile_valkey,
    sends,
    silent,
)
from tests.servers.process import LOCALHOST

# A machine may stall for seconds; a call that ignores its deadline takes much longer, or much CPU.
CALL_SECONDS = 0.3
GRACE_SECONDS = 10.0
MAY_BE_RIGHT = "the right reply"
"""Attacks that begin so: a call may have its answer before it sees more."""


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def calls_of(client):
    buffers = [memoryview(bytearray(each)) for each in (100, 64_000, 38_300)]
    ranges = [(0, buffers[0]), (100, buffers[1]), (64_100, buffers[2])]
    return {
        "read": lambda until: client.read("kv/1", ranges, until),
        "size": lambda until: client.read("kv/1", [], until),
        "put": lambda until: client.put("kv/2", [bytes(200_000)], until),
        "exists": lambda until: client.exists(["kv/1", "kv/2"] * 100, until),
        "delete": lambda until: client.delete("kv/1", until),
        "scan": lambda until: list(client.scan("kv/", until)),
    }


@pytest.mark.parametrize("cluster", [False, True])
@pytest.mark.parametrize("fault", ATTACKS)
def test_a_wrong_reply_is_one_line_in_time(fault, cluster, closing):
    """If it begins right, a call may have its answer before it sees more."""
    with hostile_valkey(ATTACKS[fault]) as server:
        client = closing(ValkeyClient([(LOCALHOST, server.port)], cluster=cluster))
        for what, call in calls_of(client).items():
            started, said = time.monotonic(), "valkey: answered"
            if fault.startswith(MAY_BE_RIGHT):
                with contextlib.suppress(StoreError):
                    call(started + CALL_SECONDS)
            else:
                with pytest.raises(StoreError) as caught:
                    call(started + CALL_SECONDS)
                said = str(caught.value)
            assert time.monotonic() - started < CALL_SECONDS + GRACE_SECONDS, what
            assert said.startswith("valkey"), what
            assert said.isprintable(), what
            assert len(said) < 300, what


PIECES = st.one_of(
    st.sampled_from([b"*", b"$", b":", b"+", b"-", b">", b"%", b"_", b"\r\n", b"\n", b"-1", b"?"]),
    st.sampled_from([b"$3\r\nabc\r\n", b":1\r\n", b"+OK\r\n", b"*2\r\n", b"$-1\r\n", b"*-1\r\n"]),
    st.integers(-(1 << 65), 1 << 65).map(lambda number: b"%d\r\n" % number),
    st.binary(max_size=20),
)


@settings(deadline=None, max_examples=500)
@given(st.lists(PIECES, max_size=30).map(b"".join))
def test_whatever_comes_is_an_answer_or_a_fault(sent):
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours), theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        buffer = bytearray(b"....")
        asked = [command("a", "b", into=memoryview(buffer)), command("c", "d")]
        with contextlib.suppress(StoreError, OSError):
            first, second = Connection(ours).ask(asked, soon())
            if isinstance(first, memoryview):
                assert sent.startswith(b"$%d\r\n%b\r\n" % (len(first), first))
            assert sum(map(len, texts_of(second))) <= len(sent)


def texts_of(reply: object) -> list[bytes]:
    if isinstance(reply, list):
        return [text for each in reply for text in texts_of(each)]
    return [reply] if isinstance(reply, bytes) else []


def test_a_size_below_zero_is_a_fault_of_the_server():
    with hostile_valkey(sends(b":-5\r\n:1\r\n")) as server:
        url = f"valkey://{LOCALHOST}:{server.port}/kv"
        with open_one(url) as store:
            with pytest.raises(StoreError, match="makes no sense"):
                store.read(make_key(), [], soon())
            assert store.stat().used_bytes == 0
            with pytest.raises(StoreError):
                store.catalogue().description(bytes(32))


def test_connections_go_while_other_threads_take_them():
    """Threads that find the server refusing close what is idle, all at once."""

    class Taken(list):
        def __len__(self):
            return 1  # what one thread sees before another takes the last

    node = ValkeyNode(LOCALHOST, 1, Login(), None)
    node._idle = Taken()
    node.refresh()


def test_a_process_that_can_start_no_thread_has_a_fault(monkeypatch):
    def start(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    client = ValkeyClient([(LOCALHOST, 1)])
    with pytest.raises(StoreError, match="a thread to look up its address"):
        client.exists(["kv/1"], soon())


def num_unread(port: int) -> int:
    """Bytes from a port of loopback that have arrived here, and that nobody has read."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(row[4][9:], 16) for row in rows if row[2].endswith(f":{port:04X}"))


def test_what_comes_between_two_calls_is_the_answer_to_neither(closing):
    goes_on = threading.Event()

    def late(right):
        yield right
        goes_on.wait(20)
        yield b":1\r\n"
        yield from silent(right)

    with hostile_valkey(late) as server:
        client = closing(ValkeyClient([(LOCALHOST, server.port)]))
        assert client.exists(["kv/absent"], soon()) == [False]
        goes_on.set()
        wait_until(lambda: num_unread(server.port) == len(b":1\r\n"), "more than was asked for")
        server.answer = None
        assert client.exists(["kv/absent"], soon()) == [False]


def test_a_list_of_many_pages_is_whole(closing):
    with hostile_valkey() as server:
        pages = iter([*(str(number).encode() for number in range(1, 2001)), b"0"])
        server.next_cursor = lambda _cursor: next(pages)
        client = closing(ValkeyClient([(LOCALHOST, server.port)]))
        assert sum(1 for _ in client.scan("kv/", soon(100.0))) == 2001


def test_a_list_without_an_end_ends_at_its_deadline(closing):
    with hostile_valkey() as server:
        cursors = itertools.count(1)
        server.next_cursor = lambda _cursor: str(next(cursors)).encode()
        client = closing(ValkeyClient([(LOCALHOST, server.port)]))
        until = soon(1.0)
        with pytest.raises(StoreError, match="no answer in time"):
            for _ in client.scan("kv/", until):
                pass
        assert time.monotonic() < until + GRACE_SECONDS


@pytest.mark.parametrize("names", [[b"kv/%0130d" % n for n in range(40_000)], [b"kv/" * 1_600_000]])
def test_a_page_far_larger_than_asked_for_is_an_error(names, closing):
    with hostile_valkey() as server:
        server.names = names
        client = closing(ValkeyClient([(LOCALHOST, server.port)]))
        with pytest.raises(StoreError, match="more than was asked for"):
            list(client.scan("kv/", soon()))
