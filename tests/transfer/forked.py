"""Peers in processes that start fast, as forks of one that has imported everything.

    python -m tests.transfer.forked KEY_FILE

`test_faults` starts it. It reads lines from its standard input, "serve PORT" or "read PORT", and
forks a process for each. That process writes its id and a number: the port at which it serves, or 0
once it has read a record.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import NoReturn

from kvferry.errors import ConfigError, StoreError
from kvferry.testing.stores.hooks import wait_until
from kvferry.transfer.auth import read_key
from kvferry.transfer.base import KeyState
from kvferry.transfer.client import PeerClient
from kvferry.transfer.server import Listen, PeerServer
from tests.transfer.lending import SPACE, DictLender

RECORDS = {
    bytes([number]) * 32: random.Random(number).randbytes(size)
    for number, size in enumerate((1, 5_003, 70_001, 300_007, 2_000_003, 5_000_011))
}
KEYS = list(RECORDS)


class Reads:
    """Threads that read records until `end`. Each read must be right, or raise a StoreError.

    Attributes:
        num_right, num_errors: numbers of reads that were right, and that raised.
        wrong: descriptions of wrong reads, and of reads that ended long after their deadline.
    """

    def __init__(self, client: PeerClient, num_threads: int, seed: int) -> None:
        self.num_right = self.num_errors = 0
        self.wrong: list[str] = []
        self._client = client
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(f"{seed} {number}"),))
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, chance: random.Random) -> None:
        while not self._ends.is_set():
            key = chance.choice(KEYS)
            buffer = memoryview(bytearray(len(RECORDS[key])))
            deadline = time.monotonic() + chance.uniform(0.01, 0.3)
            try:
                found = self._client.read(key, [(0, buffer)], deadline)
            except StoreError:
                self.num_errors += 1
                self._ends.wait(0.002)
            else:
                if found != (KeyState.HELD, len(buffer)) or buffer != RECORDS[key]:
                    self.wrong.append(f"{found} of {len(buffer)}")
                self.num_right += 1
            late = time.monotonic() - deadline
            if late > 20:  # far more than a busy machine explains
                self.wrong.append(f"{late} s late")

    def end(self) -> None:
        self._ends.set()
        self._client.close()
        for thread in self._threads:
            thread.join(30)
            if thread.is_alive():
                self.wrong.append("it hangs")


def _say(number: int) -> None:
    os.write(1, f"{os.getpid()} {number}\n".encode())


def _serve(port: int, key_file: str) -> None:
    lender = DictLender(RECORDS)
    servers: list[PeerServer] = []

    def listens() -> bool:
        with suppress(ConfigError):  # the previous process is about to end and free the port
            servers.append(PeerServer(lender, lambda: SPACE, Listen(port=port, key_file=key_file)))
        return bool(servers)

    wait_until(listens, "the port is free", 60)
    _say(servers[0].address[1])


def _read(port: int, key_file: str) -> None:
    reads = Reads(PeerClient("127.0.0.1", port, SPACE, read_key(key_file)), 3, os.getpid())
    wait_until(lambda: reads.num_right, "a read is right", 60)
    _say(0)


def _child(line: str, key_file: str, lifeline: int) -> NoReturn:
    what, port = line.split()
    try:
        (_serve if what == "serve" else _read)(int(port), key_file)
        os.read(lifeline, 1)  # until the first process ends
    finally:
        os._exit(1)


def main(key_file: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    lifeline, ours = os.pipe()
    with socket.socket(fileno=os.dup(0)) as commands, commands.makefile() as lines:
        for line in lines:
            if os.fork() == 0:
                os.close(ours)
                _child(line, key_file, lifeline)


if __name__ == "__main__":
    main(*sys.argv[1:])
