"""A process that serves the records of a directory store from memory, as a peer without an engine.

    python -m tests.servers.peer KEY_FILE NAMESPACE PORT DIRECTORY

It writes its port to standard output.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvferry.store.memory import MemoryStore
from kvferry.store.url import open_one
from kvferry.transfer.server import Listen, PeerServer
from tests.servers.process import LOCALHOST, ServerProcess


class ServedDirectory:
    """The process as tests see it. Each `start` runs it again on the same port.

    Attributes:
        url: URL of the peer.
    """

    def __init__(self, directory: Path, namespace: bytes, root: Path) -> None:
        self._key_file = root / "peers.key"
        self._key_file.touch(0o600)
        self._key_file.write_bytes(b"k" * 32)
        self._log = root / "peer.log"
        self._what = (namespace.hex(), str(directory))
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"peer://{LOCALHOST}:{self.port}?key_file={self._key_file}"

    def start(self) -> None:
        space, directory = self._what
        ours, theirs = socket.socketpair()
        with ours, theirs:
            command = [sys.executable, "-m", "tests.servers.peer", str(self._key_file), space]
            self.process = ServerProcess(
                [*command, str(self.port), directory], self._log, stream=theirs.fileno()
            )
            theirs.close()
            ours.settimeout(60)
            said = ours.recv(10)
            assert said, self._log.read_text() if self._log.exists() else "it ended"
            self.port = int(said)


@contextmanager
def running_peer(directory: Path, namespace: bytes, root: Path) -> Iterator[ServedDirectory]:
    peer = ServedDirectory(directory, namespace, root)
    try:
        yield peer
    finally:
        peer.process.resume()
        peer.process.kill()


def main(key_file: str, namespace: str, port: str, directory: str) -> None:
    space, memory = bytes.fromhex(namespace), MemoryStore()
    with open_one(Path(directory).as_uri()) as store:
        for entry in store.catalogue().scan():
            value = bytearray(entry.stored_bytes)
            store.read(entry.key, [(0, memoryview(value))])
            memory.put(entry.key, [value])
    listen = Listen(port=int(port), key_file=key_file)
    with PeerServer(memory, lambda: space, listen) as server:
        sys.stdout.write(f"{server.address[1]}")
        sys.stdout.flush()
        signal.pause()  # until it is killed


if __name__ == "__main__":
    main(*sys.argv[1:])
