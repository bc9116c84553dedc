"""On which processors threads of ours run."""

from __future__ import annotations

import os
from contextlib import suppress

_THREADS = "/proc/self/task"


def process_cpus() -> frozenset[int]:
    """The processors on which some thread of this process may run.

    Engines tie each computing thread to a processor of its own, so one thread's processors are not
    all that the process was given; those of all threads are.
    """
    cpus: set[int] = set()
    if hasattr(os, "sched_getaffinity"):
        with suppress(OSError):  # a sandbox may forbid it, or have no /proc
            cpus |= os.sched_getaffinity(0)
            for thread in os.listdir(_THREADS):
                with suppress(ProcessLookupError):  # ended meanwhile
                    cpus |= os.sched_getaffinity(int(thread))
    return frozenset(cpus or range(os.cpu_count() or 1))


def leave_processor() -> None:
    """Let the calling thread run wherever some thread of this process may. It was started by one
    that computes, and would share that one's only processor."""
    if hasattr(os, "sched_setaffinity"):
        with suppress(OSError, ValueError):  # forbidden, or taken from the process meanwhile
            os.sched_setaffinity(0, process_cpus())
