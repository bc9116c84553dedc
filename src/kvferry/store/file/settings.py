"""What few who open a directory change, and how long a store waits and how much it keeps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DirectIO = Literal["auto", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBounds:
    """Waits and sizes of a store.

    Attributes:
        lock_seconds: how long a call waits for another process, or for another thread of this one,
            that holds the index.
        room_seconds: how long a put evicts before it gives up; what is over a quota is evicted in
            the background.
        close_seconds: how long a close waits for the upkeep.
        tick_seconds: how long the upkeep sleeps when idle. What a process with the same index
            stored is known so much later at most; what another machine stored, once compared.
        flush_seconds: between two times at which times of use are written back.
        clean_seconds: between two looks for what dead writers left.
        compare_seconds: the least rest between two shards, and between two passes over them.
        rest_factor: comparing a shard is followed by so many times its own duration of rest,
            divided by the number of rows that it corrected: where much is wrong, it hardly rests.
        abandoned_seconds: how long another machine's half-written file is left alone.
        max_removals: the history of removals keeps so many, the last ones.
    """

    lock_seconds: float = 2.0
    room_seconds: float = 2.0
    close_seconds: float = 5.0
    tick_seconds: float = 0.25
    flush_seconds: float = 2.0
    clean_seconds: float = 60.0
    compare_seconds: float = 1.0
    rest_factor: float = 20.0
    abandoned_seconds: float = 3600.0
    max_removals: int = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSettings:
    """What few who open a directory change.

    Attributes:
        create: make it a store if it is absent or empty.
        direct_io: "auto" reads past the page cache what is not in it; "off" never does.
        index: know what is stored. Without, `contains` finds nothing.
        index_file: the database, if not in the directory itself. On a network mount the default is
            this user's cache directory, one index per machine.
        clock: monotonic seconds.
        wall: seconds since the epoch.
        bounds: waits and sizes; tests change them.
    """

    create: bool = True
    direct_io: DirectIO = "auto"
    index: bool = True
    index_file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    bounds: FileBounds = FileBounds()
