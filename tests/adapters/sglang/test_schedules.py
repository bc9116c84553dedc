"""Random schedules of several threads on a store that misses, fails, hangs and damages pages."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import pytest
import torch

from kvferry.adapters.sglang import identity, pages, storage
from kvferry.errors import FaultKind, StoreError
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Where
from kvferry.store.memory import MemoryStore, copy_ranges
from kvferry.testing.faults import flip_bit
from kvferry.testing.wrappers import WrapperStore
from tests.adapters.sglang import host
from tests.adapters.sglang.conftest import Attach
from tests.adapters.sglang.host import HostPool, chain

NUM_THREADS, NUM_CALLS, NUM_LIVES, NUM_KEYS = 3, 8, 2, 5
SECONDS = 120.0
"""A limit for threads that would wait for ever."""
KEYS = chain(NUM_KEYS)


class Kept(MemoryStore):
    """Keeps its values when it is closed."""

    def close(self) -> None:
        pass


class Moody(WrapperStore):
    """Misses, fails, damages what it reads, leaves questions open, and hangs until it thaws."""

    def __init__(self, inner: MemoryStore, seed: int) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._gates: list[threading.Event] = []
        self.is_sound = False

    def _mood(self) -> str:
        with self._lock:
            if self.is_sound:
                return "sound"
            return self._random.choices(
                ("sound", "absent", "fails", "damages", "hangs"), (40, 3, 3, 3, 1)
            )[0]

    def _hang(self) -> None:
        gate = threading.Event()
        with self._lock:
            self._gates.append(gate)
        if not self.is_sound:
            gate.wait(SECONDS)

    def thaw(self) -> None:
        """End all hangs."""
        with self._lock:
            gates, self._gates = self._gates, []
        for gate in gates:
            gate.set()

    def where(self, key):
        mood = self._mood()
        if mood == "hangs":
            return Where.ASKED
        return Where.ABSENT if mood == "absent" else self.inner.where(key)

    def read(self, key, ranges, deadline=float("inf")):
        mood = self._mood()
        if mood == "hangs":
            self._hang()
        if mood == "absent":
            return None
        if mood == "fails":
            raise StoreError(FaultKind.REFUSED, "no read")
        if mood != "damages":
            return self.inner.read(key, ranges, deadline)
        size = self.inner.read(key, ())
        if size is None:
            return None
        content = bytearray(size)
        self.inner.read(key, [(0, memoryview(content))])
        return copy_ranges(flip_bit(8 * size - 1)(bytes(content)), ranges)

    def put(self, key, buffers, deadline=float("inf")):
        mood = self._mood()
        if mood == "hangs":
            self._hang()
        if mood == "fails":
            raise StoreError(FaultKind.REFUSED, "no put")
        return self.inner.put(key, buffers, deadline)


@cache
def content(number: int, epoch: int) -> torch.Tensor:
    """The page of a key, as the weights of an epoch compute it."""
    return HostPool().fill(0, seed=100 * epoch + number)


class WatchedPool(HostPool):
    """A host pool that knows which pages are lent to a call, and notes what touches others.

    Attributes:
        is_attached: whether a back end was told its pages.
        is_closed: set when the back end is closed; from then on no page is lent.
        wrong: what happened that must not.
    """

    # Not among the attributes of which kvferry must know each.
    __slots__ = ("_lent", "is_attached", "is_closed", "wrong")

    def __init__(self) -> None:
        super().__init__()
        self.is_attached = self.is_closed = False
        self.wrong: list[str] = []
        self._lent: set[int] = set()

    @contextmanager
    def lent(self, pages: list[int]) -> Iterator[None]:
        self._lent.update(pages)
        yield
        self._lent.difference_update(pages)

    def put_page(self, page: int, value: torch.Tensor) -> None:
        self._page(page * host.PAGE).copy_(value)

    def _touch(self, how: str, index: int) -> None:
        if self.is_closed or index // host.PAGE not in self._lent:
            self.wrong.append(f"a page is {how} that is not lent")

    def get_data_page(self, index, flat=True):
        if self.is_attached:
            self._touch("read", int(index))
        return super().get_data_page(index, flat)

    def set_from_flat_data_page(self, index, data_page):
        super().set_from_flat_data_page(index, data_page)
        self._touch("written", int(index))


class Weights:
    """The weights of a running model. They change while pages of before wait to be stored. Later
    SGLang flushes its cache, when none waits any more."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._epochs = [0]
        self._num_flushed = 1
        self._permits = threading.Semaphore(NUM_THREADS)

    @contextmanager
    def held(self) -> Iterator[int]:
        with self._permits:
            yield self._epochs[-1]

    def change(self, meanwhile: Callable[[], None]) -> None:
        host.WeightUpdater().update_weights_from_tensor()
        meanwhile()
        for _ in range(NUM_THREADS):
            while not self._permits.acquire(timeout=0.01):
                meanwhile()
        self._epochs.append(next(self._numbers))
        host.HiCacheController().reset()
        self._num_flushed = len(self._epochs)
        self._permits.release(NUM_THREADS)

    @property
    def num_flushed(self) -> int:
        return self._num_flushed

    def since(self, num_flushed: int) -> list[int]:
        """The epochs of which a load that began then may bring pages."""
        return self._epochs[num_flushed - 1 :]


class Life(NamedTuple):
    """A back end from its start to its end, and what its threads see."""

    controller: host.Controller
    store: Moody
    pool: WatchedPool
    weights: Weights
    loaded: list[int]

    def run(self, thread: int, draw: random.Random) -> None:
        """The calls of one thread, on two pages of its own."""
        pages = [2 * thread, 2 * thread + 1]
        calls = (self._load, self._load, self._store, self._older, self._exists)
        try:
            for _ in range(NUM_CALLS):
                draw.choice(calls)(pages, draw.sample(range(NUM_KEYS), 2))
        except Exception as error:
            self.pool.wrong.append(f"a call raised: {error!r}")
            raise

    def _load(self, pages: list[int], numbers: list[int]) -> None:
        for page in pages:
            self.pool.put_page(page, torch.zeros_like(content(0, 0)))
        num_flushed = self.weights.num_flushed
        with self.pool.lent(pages):
            right = self.controller.backend.batch_get_v1(
                [KEYS[each] for each in numbers], host.indices(pages)
            )
        for page, number, is_right in zip(pages, numbers, right, strict=True):
            self._check(self.pool.page(page), number, num_flushed, is_right=is_right)

    def _check(self, page: torch.Tensor, number: int, num_flushed: int, *, is_right: bool) -> None:
        epochs = self.weights.since(num_flushed)
        if any(torch.equal(page, content(number, each)) for each in epochs):
            self.loaded.extend([number] * is_right)  # else it came as the call gave up
        elif is_right:
            self.pool.wrong.append("a wrong page is given as right")
        elif page.any():
            self.pool.wrong.append("a miss left bytes in the host's memory")

    def _store(self, pages: list[int], numbers: list[int]) -> None:
        with self.weights.held() as epoch:
            for page, number in zip(pages, numbers, strict=True):
                self.pool.put_page(page, content(number, epoch))
            with self.pool.lent(pages):
                self.controller.backend.batch_set_v1(
                    [KEYS[each] for each in numbers], host.indices(pages)
                )
            for page in pages:  # SGLang uses its memory again
                self.pool.put_page(page, content(0, 0) + 1)

    def _older(self, _pages: list[int], numbers: list[int]) -> None:
        with self.weights.held() as epoch:
            self.controller.backend.set(KEYS[numbers[0]], content(numbers[0], epoch).clone())
        given = torch.zeros_like(content(0, 0))
        num_flushed = self.weights.num_flushed
        found = self.controller.backend.get(KEYS[numbers[1]], given)
        self._check(given, numbers[1], num_flushed, is_right=found is not None)

    def _exists(self, _pages: list[int], numbers: list[int]) -> None:
        if not 0 <= self.controller.backend.batch_exists([KEYS[each] for each in numbers]) <= 2:
            self.pool.wrong.append("more pages exist than were asked for")

    def administer(self, draw: random.Random) -> None:
        """What SGLang's scheduler does while calls are under way."""
        backend = self.controller.backend
        for _ in range(draw.randint(1, 5)):
            what = draw.choice(("thaw", "thaw", "change", "clear", "wait"))
            if what == "thaw":
                self.store.thaw()
            elif what == "change":
                self.weights.change(self.store.thaw)
            elif what == "clear":
                backend.clear()
            time.sleep(draw.choice((0.0, 0.002, 0.01)))

    def live(self, draw: random.Random) -> None:
        threads = [
            threading.Thread(target=self.run, args=(number, random.Random(draw.random())))
            for number in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        self.administer(draw)
        if draw.random() < 0.5:
            self._end(threads)
        _, records = self.controller.backend._pools[storage.KV]
        self.controller.backend.close()
        self.pool.is_closed = True
        self._end(threads)
        memory = self.pool.kv_buffer.clone()
        self.store.is_sound = True
        self.store.thaw()
        assert records._cache._client.close(SECONDS), "an I/O thread does not end"
        if not torch.equal(memory, self.pool.kv_buffer):
            self.pool.wrong.append("memory changed after the end")

    def _end(self, threads: list[threading.Thread]) -> None:
        until = time.monotonic() + SECONDS
        while any(thread.is_alive() for thread in threads):
            assert time.monotonic() < until, "a call does not end"
            if not self.pool.is_closed:
                self.store.thaw()
            time.sleep(0.001)


def run_schedule(seed: int, attach: Attach, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two lives of a back end on one store; return how many right pages were loaded."""
    draw = random.Random(seed)
    kept = Kept()
    numbers = count(1)
    loaded: list[int] = []
    for _ in range(NUM_LIVES):
        store = Moody(kept, draw.randrange(1 << 30))

        def opened(
            _options: Any, namespace: Any, _observer: Any, store: Moody = store, **_more: str
        ) -> Any:
            described = {
                each: namespace.description[each] for each in ("chunk_tokens", "row_bytes")
            }
            return store, RecordSchema.for_rows(namespace=namespace.digest, **described)

        monkeypatch.setattr(storage, "open_rows", opened)
        pool = WatchedPool()
        identity.WEIGHTS.have_changed = identity.WEIGHTS.left_old_kv = False  # another process
        controller = attach(pool, load_timeout_seconds=0.1)
        pool.is_attached = True
        Life(controller, store, pool, Weights(numbers), loaded).live(draw)
        assert pool.wrong == [], f"seed {seed}"
    return len(loaded)


SEEDS = range(0, 200, 50)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first", [*SEEDS, *(pytest.param(None, marks=pytest.mark.sweep) for _ in SEEDS)]
)
def test_any_schedule_brings_right_pages_or_misses_and_touches_no_memory_later(
    first: int | None, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "CLOSE_SECONDS", 0.02)
    monkeypatch.setattr(pages, "CLEAR_SECONDS", 0.02)  # it reads heads, and reads may hang
    start = random.SystemRandom().randrange(1 << 30) if first is None else first
    num_loaded = sum(run_schedule(start + each, attach, monkeypatch) for each in range(50))
    assert num_loaded > 300
