"""Device copies beside the engine's own work: pinned memory, a side stream, and marks in streams.

    engine's thread                    copying thread
    ───────────────                    ──────────────
    produced = side.mark()             done = side.run(gather_and_write, after=produced)
    ...next step...                    done.wait(timeout)

    loaded.hold()  # work that the engine submits from here on waits for the mark `loaded`

`blocks.copies` uses this. On a CPU the same code runs; all work is done when a call returns.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

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

    def hold(self) -> None:
        """Make the current stream's next work wait for this mark. Does not block the thread."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class SideStream:
    """A stream of one device for copies only, so that they run beside compute. Thread-safe: work
    of several threads runs in the order in which it was submitted."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def overlaps(self) -> bool:
        """Whether work goes on after `run` has returned: True on a device."""
        return self._stream is not None

    def mark(self) -> Mark:
        """Return a mark behind all work submitted so far to the caller's current stream."""
        if self._stream is None:
            return Mark()
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return Mark(event, self._device)

    def hold(self, mark: Mark) -> None:
        """Make the next work of the caller's current stream on this device wait for `mark`. Does
        not block the thread."""
        if self._stream is not None:
            with torch.cuda.device(self._device):
                mark.hold()

    def end(self) -> Mark:
        """Return a mark behind all copies submitted so far, by any thread."""
        return self.run(lambda: None, after=Mark())

    def run(self, work: Callable[[], object], *, after: Mark) -> Mark:
        """Call `work`, which submits copies, with this stream as the current one. No copy runs
        before `after` is reached. Return the mark behind them. Device memory that `work` allocates
        belongs to this stream."""
        if self._stream is None:
            work()
            return Mark()
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            after.hold()
            work()
            return self.mark()


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
        code = runtime.cudaHostRegister(address, len(view), _REGISTER_PORTABLE)
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
