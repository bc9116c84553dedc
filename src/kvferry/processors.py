"""Lets I/O and server threads run on all processors that this process was given."""

from __future__ import annotations

import os
from contextlib import suppress

_THREADS = "/proc/self/task"


def process_cpus() -> frozenset[int]:
    """Return the processors on which some thread of this process may run.

    Engines bind each computing thread to one processor, so only the processors of all threads
    together are what the process was given.
    """
    cpus: set[int] = set()
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):  # a sandbox may forbid it, or have no /proc
            cpus |= os.sched_getaffinity(0)
            for thread in os.listdir(_THREADS):
                with suppress(ProcessLookupError):  # the thread has ended
                    cpus |= os.sched_getaffinity(int(thread))
    return frozenset(cpus or range(os.cpu_count() or 1))


def leave_processor() -> None:
    """Let the calling thread run on all of `process_cpus`. If a computing thread started it, it
    would otherwise share that thread's only processor."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError, ValueError):  # forbidden, or taken from the process meanwhile
            os.sched_setaffinity(0, process_cpus())
