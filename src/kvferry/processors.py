"""Lets I/O and server threads run on all processors that this process was given, after the engine's
threads."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

_THREADS = "/proc/self/task"

NICENESS = 6
"""Of I/O threads, above that of the process."""


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


def begin_io_thread() -> None:
    """Let the calling thread run on all of `process_cpus`, and less than the engine's threads where
    there are more threads than processors.

    A computing thread that starts it would otherwise share its only processor with it. And Linux
    gives the processor of an engine's thread that waits for the interpreter's lock to the thread
    that had the lock, which then hashes there for a whole time slice.
    """
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError, ValueError):  # forbidden, or taken from the process meanwhile
            os.sched_setaffinity(0, process_cpus())
    if sys.platform == "linux":  # elsewhere, all threads of a process are as nice
        with suppress(OSError):
            niceness = os.getpriority(os.PRIO_PROCESS, os.getpid()) + NICENESS
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
