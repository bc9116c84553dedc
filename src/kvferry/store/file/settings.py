"""Settings of a directory store: rarely used options, and the waits and sizes of its work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DirectIO = Literal["auto", "off"]
Mode = Literal["0700", "0770"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileBounds:
    """Waits and sizes of a store. Its upkeep is its background thread.

    Attributes:
        lock_seconds: how long a call waits for another process, or for another thread of this one,
            that holds the index.
        room_seconds: how long a put evicts before it gives up.
        close_seconds: how long a close waits for the upkeep.
        tick_seconds: how long the upkeep sleeps when idle. So it is the longest delay until values
            of other processes with the same index are known. Values of machines with another index
            are known once their shard is compared.
        flush_seconds: interval at which times of use are written back.
        clean_seconds: interval at which the upkeep looks for what dead writers left.
        compare_seconds: rest after a pass that finds no changed shard. (A shard is one of the
            directories of records that the upkeep compares with the index.) After the first pass,
            also the shortest rest between two shards, unless machines share the directory.
        rest_factor: rest after comparing a shard, as a multiple of the time that this took. It is
            divided by the number of corrected rows: where much is wrong, the upkeep hardly rests.
        abandoned_seconds: how long a half-written file is left alone if its lock cannot be seen.
        max_removals: length of the history of removals; the oldest are dropped.
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
    """Rarely used options of a directory store.

    Attributes:
        create: whether to make the directory a store if it is absent or empty.
        mode: mode of what the store makes in its directory, whatever the umask: "0700" for this
            user alone; "0770" for its group, too, which then is trusted (files have 0660).
        direct_io: "auto" uses direct I/O to read what is not in the page cache; "off" never does.
        index: whether to know what is stored. Without that, `contains` finds nothing.
        index_file: path of the index database. The default is in the directory itself; for a
            network mount it is in this user's cache directory, so that each machine has an index.
        clock: clock that gives monotonic seconds.
        wall: clock that gives seconds since the epoch.
        bounds: waits and sizes; tests change them.
    """

    create: bool = True
    mode: Mode = "0700"
    direct_io: DirectIO = "auto"
    index: bool = True
    index_file: Path | None = None
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    bounds: FileBounds = FileBounds()
