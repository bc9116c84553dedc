"""A process that stands for one machine of a network file system, with its mount, index and store.

The tests start it through `RemoteMachine`. It reads lines of JSON, each with number, method and
arguments, runs each on a thread of its own, and answers `[number, result, error]`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.store.base import Where
from kvferry.store.file import FileStore
from kvferry.store.maintenance import verify
from kvferry.testing.stores import make_key, read_value
from tests.store.file.halves import begin, finish
from tests.store.file.test_maintenance import make_record


class Machine:
    """What the process can do. Numbers name keys, and every key has one right value."""

    def __init__(self, root: str, max_bytes: int | None) -> None:
        self._store = FileStore(Path(root), max_bytes=max_bytes)

    def ready(self) -> bool:
        return self._store.wait_indexed(30)

    def put(self, number: int) -> str:
        return self._store.put(make_key(number), [value_of(number)]).result.name

    def put_many(self, numbers: list[int]) -> list[str]:
        return [self.put(number) for number in numbers]

    def begin(self, number: int) -> bool:
        """Start to write a value."""
        self._writing = begin(self._store, make_key(number), value_of(number))
        return True

    def commit(self, number: int) -> str:
        return finish(self._store, self._writing).name

    def contains(self, number: int) -> bool:
        return self._store.where(make_key(number)) is Where.HERE

    def probe(self, numbers: list[int]) -> None:
        self._store.probe([make_key(number) for number in numbers])

    def read(self, number: int) -> str:
        """Read a whole value. Return `whole`, `absent`, `error` or `wrong`."""
        try:
            found = read_value(self._store, make_key(number))
        except StoreError:
            return "error"
        if found is None:
            return "absent"
        return "whole" if found == value_of(number) else "wrong"

    def read_for(self, seconds: float, numbers: list[int]) -> dict[str, int]:
        """Read again and again. Return how often each answer came."""
        answers: dict[str, int] = {}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for number in numbers:
                answer = self.read(number)
                answers[answer] = answers.get(answer, 0) + 1
        return answers

    def delete(self, number: int) -> bool:
        return self._store.delete(make_key(number))

    def used(self) -> int:
        return self._store.stat().used_bytes

    def keys(self) -> list[str]:
        return sorted(entry.key.hex() for entry in self._store.catalogue().scan())

    def clean(self) -> None:
        self._store.upkeep.clean()

    def verify(self) -> tuple[int, int, int]:
        report = verify(self._store, self._store.catalogue().stored())
        return report.num_records, len(report.bad), report.num_unreadable

    def gc(self, max_bytes: int) -> int:
        return self._store.catalogue().gc(max_bytes).used_bytes

    def watch(self, seconds: float) -> float:
        """Call what the scheduler's thread calls. Return the seconds of the longest call."""
        keys = [make_key(number) for number in range(64)]
        longest = 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for call in (
                lambda: [self._store.where(key) is Where.HERE for key in keys],
                lambda: self._store.probe(keys),
                lambda: self._store.touch(keys),
                self._store.stat,
            ):
                started = time.monotonic()
                call()
                longest = max(longest, time.monotonic() - started)
            time.sleep(0.01)
        return longest

    def close(self) -> float:
        started = time.monotonic()
        self._store.close()
        return time.monotonic() - started

    def index_file(self) -> str:
        with self._store.index.database.transaction(writes=False) as db:
            (_number, _name, file), *_others = db.execute("PRAGMA database_list")
        return str(file)


def value_of(number: int) -> bytes:
    return _VALUES.setdefault(number, make_record(make_key(number)))


_VALUES: dict[int, bytes] = {}


class RemoteMachine:
    """A `Machine` in a process of its own, as the tests see it."""

    def __init__(self, root: Path, home: Path, max_bytes: int | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(root), json.dumps(max_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "XDG_CACHE_HOME": str(home)},
        )
        self._numbers = count()
        self._answers: dict[int, tuple[object, str | None]] = {}
        self._arrived = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, method: str, *arguments: object) -> int:
        """Start a call; `result` waits for its end."""
        number = next(self._numbers)
        self._process.stdin.write(json.dumps([number, method, arguments]) + "\n")
        self._process.stdin.flush()
        return number

    def result(self, number: int, seconds: float = 60.0):
        with self._arrived:
            there = self._arrived.wait_for(lambda: number in self._answers, seconds)
            assert there, f"no answer within {seconds:g} s"
            result, error = self._answers.pop(number)
        assert error is None, error
        return result

    def call(self, method: str, *arguments: object):
        return self.result(self.start(method, *arguments))

    def kill(self) -> None:
        """Kill the process. If it waits for a file server, it ends only when its mount does."""
        self._process.kill()

    def wait(self) -> None:
        self._process.wait(30)
        self._reader.join(30)
        self._process.stdout.close()
        self._process.stdin.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            number, result, error = json.loads(line)
            with self._arrived:
                self._answers[number] = (result, error)
                self._arrived.notify_all()


def main(root: str, max_bytes: str) -> None:
    machine = Machine(root, json.loads(max_bytes))
    lock = threading.Lock()

    def answer(number: int, method: str, arguments: list[object]) -> None:
        result, error = None, None
        try:
            result = getattr(machine, method)(*arguments)
        except BaseException as raised:
            error = repr(raised)
        with lock:
            print(json.dumps([number, result, error]), flush=True)

    for line in sys.stdin:
        threading.Thread(target=answer, args=json.loads(line), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
