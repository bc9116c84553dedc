"""Stores with faults, damage to records, and checks of hosts, for tests of the connector."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvferry.keys import ChunkKeys
from kvferry.store.file.store import FileStore
from kvferry.testing.faults import FaultyStore, Gate
from kvferry.testing.stores.hooks import wait_until
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import ChunkKey

PROMPT = list(range(41))
NUM_CHUNKS = 5


class CountingStore(WrapperStore):
    """A store that counts how often each record was read. It ignores `touch`, which would change
    files after a while."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.opened: Counter[ChunkKey] = Counter()

    @property
    def num_opened(self) -> int:
        return sum(self.opened.values())

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        """Leave the files alone."""

    def read(self, key: ChunkKey, *args: Any) -> Any:
        self.opened[key] += 1
        return self.inner.read(key, *args)


class HangsLater(FaultyStore):
    """A store whose operations wait at `gate` once a test has set one."""

    gate: Gate | None = None

    def fault(self, operation: str) -> bool:
        if self.gate is not None:
            self.gate.pass_through()
        return True


class StallsFor(WrapperStore):
    """Reads of some records wait at a gate."""

    def __init__(self, inner: Any, gate: Gate, keys: Collection[ChunkKey]) -> None:
        super().__init__(inner)
        self._gate = gate
        self._keys = frozenset(keys)

    def read(self, key: ChunkKey, *args: Any) -> Any:
        if key in self._keys:
            self._gate.pass_through()
        return self.inner.read(key, *args)


def open_store(directory: Path) -> CountingStore:
    store = FileStore(directory)
    assert store.wait_indexed(60)
    return CountingStore(store)


def wait_for(condition: Callable[[], bool], what: str = "what the test waits for") -> None:
    wait_until(condition, what)


def records(directory: Path) -> list[Path]:
    """Return the files of the prompt's records, sorted by path."""
    found = [path for path in directory.rglob("*") if path.is_file() and len(path.name) >= 64]
    assert len(found) == NUM_CHUNKS
    return sorted(found)


def keys_of(host: Any, prompt: Sequence[int] = PROMPT) -> list[ChunkKey]:
    """Return the keys of a prompt's whole chunks, in order."""
    keys = ChunkKeys(host.scheduler.requests.namespace, host.parts[0].context.chunk_tokens)
    keys.extend(prompt)
    return list(keys.keys)


def lose_chunk(host: Any, key: ChunkKey, rank: int = 0) -> None:
    """Let a rank forget what a chunk's slot of memory holds, unknown to the scheduler role."""
    host.ranks[rank].worker.io.overwrite(host.pool.find(key).index)


def wait_indexed(host: Any) -> None:
    for part in host.parts:
        assert part.store.wait_indexed(60)


def assert_settles(host: Any) -> None:
    """Step until no slot is pinned or busy."""

    def is_settled() -> bool:
        host.step([])
        return host.pool.num_taken == 0

    wait_for(is_settled)
    assert not host.pool.is_filling
    assert not host.pool.is_writing


def run_until_stored(host: Any, prompt: Sequence[int], **prefill: Any) -> None:
    """Run a prompt, and on until all of its chunks are stored: what found no slot in one step is
    saved in a later one."""
    request = host.admitted("writer", prompt)
    host.prefill(request, **prefill)

    def is_stored() -> bool:
        host.run_for(0.5)
        if host.observer["put_stored"] == len(keys_of(host, prompt)):
            return True
        request.all_token_ids.append(1)
        host.prefill(request, budget=1)
        return False

    wait_for(is_stored)
    host.finish(request)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4200)
        byte = file.read(1)[0]
        file.seek(4200)
        file.write(bytes([byte ^ 1]))
