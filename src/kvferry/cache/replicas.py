"""Host memory that ranks of one machine with the same kv heads share: the first of them makes it,
reads records into it and writes them out of it; the others only load from it.

They meet in a small file that is named after their engine. Its first bytes say where the memory is.
Behind them, each of the others has a word: how many plans it is past. The first rank fills no slot
while one of the others may still load from it.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import tempfile
import time
import weakref
from hashlib import sha256
from pathlib import Path

from kvferry.cache.memory import SlotMemory
from kvferry.contract.spec import EngineSpec
from kvferry.errors import TransferError
from kvferry.filesystem import why_untrusted

logger = logging.getLogger(__name__)

MEETING_SECONDS = 60.0
"""How long a rank waits for the memory of the first one that holds the same. Ranks load the same
model before, so they come at about the same time."""

_POLL_SECONDS = 0.02
_FILE_BYTES = 8192
_WORDS_AT = 1024


class Replicas:
    """One rank's memory, and its part in the file. Thread-safe.

    Args:
        seconds: how long to wait for the memory of the first rank.

    Attributes:
        memory: the slots.
        loads_only: whether another rank fills them.

    Raises:
        ConfigError: see `SlotMemory`.
    """

    def __init__(
        self, spec: EngineSpec, num_slots: int, slot_bytes: int, seconds: float = MEETING_SECONDS
    ) -> None:
        shard = spec.shard
        self.loads_only = False
        first = max(shard.rank - shard.rank % shard.num_replicas, spec.first_local_rank)
        self._index = shard.rank - first
        # By place among the replicas: 0 for the first, and for one with memory of its own.
        self._words = memoryview(bytes(8)).cast("Q")
        place = _meeting_place(spec, first) if shard.num_replicas > 1 else None
        if place is not None and self._index > 0:
            found = _find(place, num_slots, slot_bytes, time.monotonic() + seconds)
            if found is not None:
                self.memory, words = found
                self._words = words[: shard.num_replicas]
                self.loads_only = True
                self.move_past(0)
                return
            logger.warning(
                "rank %d finds no memory of rank %d, which holds the same kv heads: it has its own",
                shard.rank,
                first,
            )
        is_shared = spec.multi_process or shard.world_size > 1
        self.memory = SlotMemory(num_slots, slot_bytes, is_shared=is_shared)
        if place is not None and self._index == 0:
            self._words = _tell(place, self.memory)[: shard.num_replicas]

    def own_slot(self) -> memoryview:
        """Return memory of one slot that no other rank uses before the first step."""
        memory = self.memory
        if self._index * memory.slot_bytes < len(memory.view):
            return memory.slot(self._index)
        return memoryview(bytearray(memory.slot_bytes))

    def move_past(self, number: int) -> None:
        """Note that this rank, which only loads, loads no more for plans up to `number`."""
        self._words[self._index] = number + 1

    def are_past(self, number: int) -> bool:
        """Whether no other rank will load from these slots for plans up to `number`."""
        return not any(0 < word <= number for word in self._words)


def _meeting_place(spec: EngineSpec, first: int) -> Path | None:
    """The file of the replicas of which this rank is the first; None if there can be none."""
    if spec.engine_id is None:
        return None
    directory = Path(tempfile.gettempdir()) / f"kvferry-slots-{os.geteuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if why_untrusted(str(directory)) is not None:
            return None
    except OSError:
        return None
    name = f"{spec.engine_id}\0{spec.data_parallel_index}\0{first}"
    return directory / sha256(name.encode()).hexdigest()


def _tell(place: Path, memory: SlotMemory) -> memoryview:
    """Say where memory is. Return the words of all ranks, none of which is there yet."""
    head = json.dumps([memory.name, memory.process, memory.fd]).encode()
    new = place.with_suffix(f".{memory.process}")
    try:
        new.write_bytes(head.ljust(_FILE_BYTES, b"\0"))
        words = _words(_mapped(new))
        os.replace(new, place)
    except OSError as error:
        logger.warning("ranks with the same kv heads have memory of their own: %s", error)
        return memoryview(bytes(8)).cast("Q")
    weakref.finalize(memory, place.unlink, missing_ok=True)
    return words


def _find(
    place: Path, num_slots: int, slot_bytes: int, deadline: float
) -> tuple[SlotMemory, memoryview] | None:
    """Open the memory that the first rank's file names. None if there is none until the deadline.
    An engine that was killed may have left a file behind: its memory cannot be opened."""
    while True:
        try:
            file = _mapped(place)  # opened once: the first rank may be about to replace it
            name, process, fd = json.loads(bytes(file[:_WORDS_AT]).rstrip(b"\0"))
            return SlotMemory.of(name, process, fd, num_slots, slot_bytes), _words(file)
        except (OSError, ValueError, TypeError, TransferError):
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_SECONDS)


def _mapped(place: Path) -> memoryview:
    with place.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), _FILE_BYTES))


def _words(file: memoryview) -> memoryview:
    return file[_WORDS_AT:].cast("Q")
