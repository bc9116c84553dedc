"""Copies beside the engine's work; on a GPU the same tests see real streams."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvferry.errors import TransferError
from kvferry.layout.streams import DeviceStream, Mark, Streams, pinned
from tests.layout.paging import Cache, expected_rows

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["NHD", "2BNHD", "BLHNC"])
def test_a_round_trip_through_pinned_staging_on_a_side_stream(layout, device):
    source = Cache(layout, device=device, head_dim=4)
    target = Cache("HND", device=device, head_dim=4)
    there, here = source.paged(), target.paged()
    engine, side = DeviceStream(device, is_engines=True), DeviceStream(device)
    shape = (2, 3, 8, 8)
    staging = memoryview(mmap.mmap(-1, 4 * int(np.prod(shape))))
    rows = there.as_rows(staging, shape)
    with pinned(staging, device):
        source.fill()  # the engine's work: in its own stream, right before
        gathered = side.run(
            lambda: there.gather(rows, 0, there.runs([2, 4], 0, 8), 0), engine.run()
        )
        assert gathered.wait(10)
        expected = expected_rows(source, [2, 4], 0, 8)
        assert np.frombuffer(staging, np.int32).tobytes() == expected.tobytes()
        loaded = side.run(lambda: here.scatter(rows, 0, here.runs([5, 1], 0, 8), 0))
        engine.run(None, loaded)
        assert np.array_equal(expected_rows(target, [5, 1], 0, 8), expected)
    assert loaded.poll()


class NeverReached:
    """An event that does not happen."""

    def query(self) -> bool:
        return False


def test_waiting_ends_at_its_deadline():
    mark = Mark(NeverReached())
    assert not mark.poll()
    assert mark.wait(0.001) is False
    assert Mark().wait(0.0) is True


class CudaByThread:
    """Stands for `torch.cuda`: every thread begins on device 0, as CUDA's do. Notes on which device
    each call is made, and counts the streams of each device."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.calls: list[tuple[str, int]] = []
        self.streams: list[tuple[int, str]] = []

    def note(self, call: str) -> None:
        self.calls.append((call, getattr(self._current, "device", 0)))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = getattr(self._current, "device", 0)
        self._current.device = device.index
        try:
            yield
        finally:
            self._current.device = before

    def stream(self, _stream: object) -> AbstractContextManager[None]:
        return nullcontext()

    def Stream(self, device: torch.device) -> object:
        self.streams.append((device.index, threading.current_thread().name))
        return object()

    def Event(self) -> NotedEvent:
        return NotedEvent(self)

    def current_stream(self, _device: torch.device | None = None) -> NotedEvent:
        return NotedEvent(self)


class NotedEvent:
    """An event or a stream."""

    def __init__(self, cuda: CudaByThread) -> None:
        self._cuda = cuda

    def record(self, _stream: object) -> None:
        self._cuda.note("record")

    def wait_event(self, _event: object) -> None:
        self._cuda.note("wait_event")

    def query(self) -> bool:
        self._cuda.note("query")
        return True


@pytest.fixture
def cuda(monkeypatch):
    fake = CudaByThread()
    for name in ("device", "stream", "Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


@pytest.mark.parametrize("index", [0, 3])
def test_every_thread_asks_events_on_their_own_device(index, cuda):
    engine, side, *_others = Streams.of(torch.device("cuda", index))
    mark = side.run(None, engine.run())
    waiters = [
        threading.Thread(target=ask)
        for ask in (mark.poll, lambda: mark.wait(1.0), lambda: side.run().poll())
    ]
    for thread in waiters:
        thread.start()
        thread.join()
    assert cuda.calls.count(("query", index)) == 3
    assert {device for _, device in cuda.calls} == {index}


def test_a_rank_has_three_streams_of_its_own_on_its_device_and_a_cpu_none(cuda):
    assert Streams.of(torch.device("cpu")) is None
    assert cuda.streams == []
    assert Streams.of(torch.device("cuda", 2)) is not None
    assert cuda.streams == [(2, threading.current_thread().name)] * 3


@pytest.mark.parametrize("kind", ["xpu", "hpu", "meta"])
def test_a_device_of_another_kind_is_refused_by_name(kind):
    with pytest.raises(TransferError, match=kind):
        Streams.of(torch.device(kind))


class Runtime:
    """CUDA's, as far as memory is pinned. `answer` is its code, or what it raises."""

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.unpinned: list[int] = []

    def cudaHostRegister(self, address: int, _num_bytes: int, _flags: int) -> object:
        self.address = address
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def cudaHostUnregister(self, address: int) -> None:
        self.unpinned.append(address)


@pytest.fixture
def pin_with(monkeypatch):
    """Pins a buffer with a runtime; returns the runtime's notes of what was unpinned."""

    def pin(runtime):
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "device", lambda _device: nullcontext())
        monkeypatch.setattr(torch, "ones", lambda *_args, **_options: None)
        with pinned(memoryview(mmap.mmap(-1, 4096)), "cuda:0"):
            assert runtime.unpinned == []

    return pin


@pytest.mark.parametrize(
    ("runtime", "message"),
    [
        (object(), "this driver pins no memory of others: .*cudaHostRegister"),
        (Runtime(RuntimeError("not supported")), "pins no memory of others: not supported"),
        (Runtime(801), "4096 bytes cannot be pinned: CUDA error 801; lower memory_bytes"),
        (Runtime(SimpleNamespace(value=2)), "CUDA error 2"),
    ],
)
def test_memory_that_a_driver_does_not_pin_is_refused_in_one_line(runtime, message, pin_with):
    with pytest.raises(TransferError, match=message) as refused:
        pin_with(runtime)
    assert "\n" not in str(refused.value)
    assert getattr(runtime, "unpinned", []) == []


@pytest.mark.parametrize("code", [0, SimpleNamespace(value=0)])
def test_pinned_memory_is_unpinned_at_the_end(code, pin_with):
    runtime = Runtime(code)
    pin_with(runtime)
    assert runtime.unpinned == [runtime.address]
