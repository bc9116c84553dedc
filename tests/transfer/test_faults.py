"""Processes that are killed or stopped, and connections that are cut or silent, at any instant.

Each read ends right, or with one error, by its deadline; loans come back; nothing hangs.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress

import pytest

from kvferry.errors import StoreError
from kvferry.network import Stream
from kvferry.testing.stores.hooks import wait_until
from kvferry.transfer.base import Bounds
from kvferry.transfer.client import PeerClient
from tests.servers.process import LOCALHOST, ServerProcess, let_run
from tests.transfer.forked import KEYS, RECORDS, Reads
from tests.transfer.lending import KEY, SPACE, soon

CUTS = 70
SILENCES = 30


class Forks:
    """See `tests.transfer.forked`."""

    def __init__(self, key_file, log):
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "tests.transfer.forked", key_file]
            self.process = ServerProcess(command, log, stream=theirs.fileno())
        self._socket, self._lines = ours, ours.makefile()
        ours.settimeout(60)

    def begin(self, what, port):
        """Id of a process that serves or reads, and its port."""
        self._socket.sendall(f"{what} {port}\n".encode())
        pid, number = self._lines.readline().split()
        return int(pid), int(number)

    def close(self):
        self.process.kill()
        self._lines.close()
        self._socket.close()


@pytest.fixture
def forks(key_file, tmp_path):
    forks = Forks(key_file, tmp_path / "forks.log")
    yield forks
    forks.close()


def in_turn(chance, *, kills, stops):
    """Signals in a mixed order."""
    kinds = [signal.SIGKILL] * kills + [signal.SIGSTOP] * stops
    chance.shuffle(kinds)
    return kinds


def test_a_server_that_is_killed_or_stopped_at_any_instant_costs_single_reads(forks):
    chance = random.Random(1)
    pid, port = forks.begin("serve", 0)
    client = PeerClient(LOCALHOST, port, SPACE, KEY)
    reads, incarnations = Reads(client, 3, seed=1), set()
    for kind in in_turn(chance, kills=80, stops=20):
        before = reads.num_right
        wait_until(lambda n=before: reads.num_right > n, "a read is right")
        incarnations.add(client.incarnation)
        let_run(chance.random() / 200)
        os.kill(pid, kind)
        if kind == signal.SIGKILL:
            pid, _ = forks.begin("serve", port)
        else:
            failed = reads.num_errors
            wait_until(lambda n=failed: reads.num_errors > n, "a read ends at its deadline")
            os.kill(pid, signal.SIGCONT)
    reads.end()
    assert reads.wrong == []
    assert len(incarnations) > 40


def reads_right(client):
    """Whether a read ended in time; if it did, what came is right."""
    buffer = memoryview(bytearray(len(RECORDS[KEYS[-1]])))
    with suppress(StoreError):
        client.read(KEYS[-1], [(0, buffer)], soon())
        assert buffer == RECORDS[KEYS[-1]]
        return True
    return False


def test_readers_that_are_killed_or_stopped_at_any_instant_keep_no_loan(forks, serve, lender):
    lender.records |= RECORDS
    chance = random.Random(2)
    server = serve(bounds=Bounds(answer_seconds=0.3, close_seconds=20.0))
    steady = PeerClient(*server.address, SPACE, KEY)
    for kind in in_turn(chance, kills=40, stops=10):
        pid, _ = forks.begin("read", server.address[1])
        let_run(chance.random() / 100)
        os.kill(pid, kind)
        wait_until(lambda: lender.num_lent == 0, "all loans are back")
        wait_until(lambda: reads_right(steady), "a read within the time of an answer")
        if kind == signal.SIGSTOP:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: server.num_connections == 1, "only the steady one is left")
    steady.close()


def test_a_connection_that_is_cut_or_silent_after_any_byte(serve, relay, lender):
    lender.records |= RECORDS
    chance = random.Random(3)
    server = serve(bounds=Bounds(handshake_seconds=0.5, answer_seconds=0.5, idle_seconds=0.5))
    between = relay(server.address[1])
    kinds = ["cut"] * CUTS + ["silent"] * SILENCES
    chance.shuffle(kinds)
    num_right = 0
    for kind in kinds:
        # As many within the greeting as within the record.
        between.fault = int(10 ** chance.uniform(0, 6)), kind
        client = PeerClient(LOCALHOST, between.port, SPACE, KEY)
        key, deadline = chance.choice(KEYS), soon(30 if kind == "cut" else 0.05)
        buffer = memoryview(bytearray(len(RECORDS[key])))
        try:
            client.read(key, [(0, buffer)], deadline)
        except StoreError:
            pass
        else:
            num_right += 1
            assert buffer == RECORDS[key]
        assert time.monotonic() < deadline + 20
        client.close()
    assert between.reached > len(kinds) / 2
    assert num_right
    wait_until(lambda: (lender.num_lent, server.num_connections) == (0, 0), "nothing is left")


def test_a_deadline_that_is_close_is_kept_at_once():
    """On a connection that had no deadline before."""
    near, far = socket.socketpair()
    with near, far, pytest.raises(TimeoutError):
        Stream(near).read(1, soon(0.01))


def test_bytes_read_ahead_are_what_comes_next(serve, connect, relay, lender):
    """A frame and what follows it come in any pieces."""
    lender.records |= RECORDS
    between = relay(serve().address[1])
    for size in range(1, 300, 7):
        between.fault = 270 + size, "passed in two"
        client = PeerClient(LOCALHOST, between.port, SPACE, KEY)
        buffer = memoryview(bytearray(len(RECORDS[KEYS[2]])))
        ranges = [(0, buffer[:40]), (40, buffer[40:41]), (41, buffer[41:])]
        client.read(KEYS[2], ranges, soon())
        assert buffer == RECORDS[KEYS[2]]
        client.close()
