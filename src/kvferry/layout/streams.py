"""Device copies beside the engine's own work: pinned memory, streams, and marks in them.

    engine's thread                        copying thread
    ───────────────                        ──────────────
    gathered = engine.run(gather)          copied.wait(timeout)
    copied = outward.run(copy, gathered)
    ...next step...

`blocks.copies` uses this. On a CPU the same code runs; all work is done when a call returns.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvferry.errors import TransferError

_POLL_SECONDS = 50e-6
_SLOWEST_POLL_SECONDS = 1e-3
"""Pauses between polls double up to this: each poll takes the GIL from the engine's thread."""

_REGISTER_PORTABLE = 1
"""CUDA's flag to pin memory for all contexts of the process."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a stream. It is reached when all work submitted before it is done."""

    event: torch.cuda.Event | None = None
    """None: reached already."""

    device: torch.device | None = None
    """The device of the event."""

    def poll(self) -> bool:
        """Whether it is reached. Does not wait."""
        if self.event is None:
            return True
        # CUDA makes a context, of half a GiB, on the thread's current device. That is the first
        # device in every new thread, whatever the rank's own.
        with nullcontext() if self.device is None else torch.cuda.device(self.device):
            return bool(self.event.query())

    def wait(self, timeout: float) -> bool:
        """Block until it is reached, at most `timeout` seconds. Return whether it is reached."""
        deadline = time.monotonic() + timeout
        pause = _POLL_SECONDS
        while not self.poll():
            if time.monotonic() >= deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _SLOWEST_POLL_SECONDS)
        return True


REACHED = Mark()
"""For work that need not wait."""


class DeviceStream:
    """A stream of one device. Thread-safe: work of several threads runs in the order in which it
    was submitted.

    Args:
        is_engines: whether it is the stream in which the calling thread submits its own work; else
            a new one, whose work runs beside that.
    """

    def __init__(self, device: torch.device | str, *, is_engines: bool = False) -> None:
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda" and not is_engines:
            self._stream = torch.cuda.Stream(self._device)

    def run(self, work: Callable[[], object] | None = None, *after: Mark) -> Mark:
        """Call `work`, which submits copies, with this stream as the current one. No copy runs
        before the marks `after` are reached. Return the mark behind them. Device memory that `work`
        allocates belongs to this stream."""
        if self._device.type != "cuda":
            if work is not None:
                work()
            return REACHED
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            stream = torch.cuda.current_stream(self._device)
            for mark in after:
                if mark.event is not None:
                    stream.wait_event(mark.event)
            if work is not None:
                work()
            event = torch.cuda.Event()
            event.record(stream)
            return Mark(event, self._device)


class Streams(NamedTuple):
    """The streams of one rank's device. Only `engine` has the order of the engine's steps; the
    others copy between slots and the device, in both directions at once, and hash."""

    engine: DeviceStream
    inward: DeviceStream
    outward: DeviceStream
    hashing: DeviceStream

    @classmethod
    def of(cls, device: torch.device) -> Streams | None:
        """Make the streams; None for a CPU, where every copy is done at once. Raises TransferError
        for a kind of device that has no such streams."""
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            raise TransferError(f"KV on a device of kind {device.type!r} is not served")
        return cls(DeviceStream(device, is_engines=True), *(DeviceStream(device) for _ in range(3)))


@contextmanager
def pinned(view: memoryview, device: torch.device | str) -> Iterator[None]:
    """Lock the pages of a writable, page-aligned buffer inside the `with` block, so that a device
    copies to and from it at full speed. Does nothing without a device.

    Raises:
        TransferError: the system refuses, for example for lack of lockable memory. The buffer can
            still be used, more slowly.
    """
    if torch.device(device).type != "cuda":
        yield
        return
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        try:
            code = runtime.cudaHostRegister(address, len(view), _REGISTER_PORTABLE)
        except (AttributeError, RuntimeError) as error:
            raise TransferError(f"this driver pins no memory of others: {error}") from error
        code = int(getattr(code, "value", code))  # an enumeration in some releases of torch
        if code:
            # Clear the thread's last error here: else the next kernel launch would raise it.
            with suppress(RuntimeError):
                torch.ones(1, device=device)
    if code:
        raise TransferError(
            f"{len(view)} bytes cannot be pinned: CUDA error {code}; lower memory_bytes"
        )
    try:
        yield
    finally:
        runtime.cudaHostUnregister(address)
