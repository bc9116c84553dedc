"""Processes that use a store until they are killed, forked from a small server without torch.

Run as a script it reads one JSON line per process to start and answers with its pid.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from kvferry.store.file import FileStore
from kvferry.store.file.fileio import FileIO
from kvferry.types import ChunkKey

NUM_KEYS = 64
PROMPT = range(NUM_KEYS, NUM_KEYS + 12)
"""Keys of records of one size that are stored one after the other, as those of a prompt are."""


def key_of(number: int) -> ChunkKey:
    return ChunkKey(random.Random(number).randbytes(32))


def value_of(number: int, max_bytes: int) -> bytes:
    """What belongs under a key: anyone can tell whether bytes are wrong."""
    seed = random.Random(f"value {number}")
    if number in PROMPT:
        return seed.randbytes(512)
    return seed.randbytes(64) * (seed.randint(1, max_bytes) // 64 + 1)


def read_back(store: FileStore, number: int, max_value: int) -> bool:
    """Whether the key is there; raises if its bytes are not its own."""
    source = store.open_read(key_of(number))
    if source is None:
        return False
    with source:
        buffer = bytearray(source.size)
        num_bytes = source.read_into(memoryview(buffer), 0)
    if bytes(buffer[:num_bytes]) != value_of(number, max_value):
        raise AssertionError(f"wrong bytes under key {number}")
    return True


def one_action(store: FileStore, rng: random.Random, max_value: int) -> None:
    number = rng.randrange(NUM_KEYS)
    action = rng.random()
    if action < 0.6:
        value = value_of(number, max_value)
        middle = rng.randrange(len(value))
        store.put(key_of(number), [value[:middle], value[middle:]])
    elif action < 0.75:
        read_back(store, number, max_value)
    elif action < 0.83:
        store.delete(key_of(number))
    elif action < 0.87:
        store.discard(key_of(number), "test")
    elif action < 0.92:
        store.touch([key_of(number)])
    elif action < 0.94:
        put_prompt(store)
    else:
        value = value_of(number, max_value)
        session = store.begin(key_of(number), len(value))
        if "/" in session:
            store.write_at(session, 32, [value[32:]])
            if rng.random() < 0.8:
                store.commit(session, value[:32])
            else:
                store.abort(session)


def put_prompt(store: FileStore, num_records: int = len(PROMPT)) -> None:
    """Enough of one size that slots are made ahead."""
    for number in PROMPT[:num_records]:
        store.put(key_of(number), [value_of(number, 0)])


def use_store(root: str, seed: int, max_bytes: int, max_value: int, seconds: float) -> None:
    """Random actions until the time is up or there is a file ``stop`` beside the store."""
    rng = random.Random(seed)
    end = time.monotonic() + seconds
    stop = Path(root).with_name("stop")
    with FileStore(Path(root), max_bytes=max_bytes) as store:
        while time.monotonic() < end and not stop.exists():
            one_action(store, rng, max_value)


class DyingIO(FileIO):
    """Ends the process in front of the n-th system call that changes something."""

    def __init__(self, calls_left: int) -> None:
        self._calls_left = calls_left

    def _count(self) -> None:
        self._calls_left -= 1
        if self._calls_left == 0:
            os._exit(9)


def _dying(name):
    def call(self, *args):
        self._count()
        return getattr(FileIO, name)(self, *args)

    return call


CHANGING = (
    "pwritev",
    "truncate",
    "truncate_path",
    "mkdir",
    "rmdir",
    "link",
    "rename",
    "unlink",
    "utime",
)
for _name in CHANGING:
    setattr(DyingIO, _name, _dying(_name))


def follow_script(root: str, calls_left: int, recover_first: bool, max_bytes: int) -> None:
    """The same actions each time, most of them writes into a full store."""
    io = DyingIO(calls_left)
    store = FileStore(Path(root), max_bytes=max_bytes, background=False, io=io)
    if recover_first:
        store.maintain()
    rng = random.Random(calls_left)
    for _ in range(40):
        one_action(store, rng, max_bytes // 4)
    store.close()


def put_one(root: str, number: int, calls_left: int, max_bytes: int) -> None:
    """Store one value, as far as the process gets."""
    io = DyingIO(calls_left)
    store = FileStore(Path(root), max_bytes=max_bytes, background=False, io=io)
    store.put(key_of(number), [value_of(number, max_bytes // 4)])
    os._exit(0)


def put_prompts(root: str, calls_left: int, max_bytes: int) -> None:
    """Store a prompt, give back what was made ahead, store half of it again and die with what is
    made ahead for the other half, if not before."""
    io = DyingIO(calls_left)
    store = FileStore(Path(root), max_bytes=max_bytes, background=False, io=io)
    for num_records in (12, 7):
        put_prompt(store, num_records)
        for number in PROMPT[:num_records]:
            store.delete(key_of(number))
        if num_records == 12:
            store._volume.rest()
            store._volume.rest()
    os._exit(0)


def serve() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                arguments = json.loads(line)
                globals()[arguments.pop("run")](**arguments)
            except BaseException as error:
                # All that the test sees of a child is what stands on its error output.
                os.write(2, f"child failed: {error!r}\n".encode())
            os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
