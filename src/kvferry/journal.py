"""The journal (option `record`): one JSON line for each request, with its keys and its answer,
written when the request ends.

Of a prompt, a line keeps no tokens and no text, only the first bytes of the chunks' keys: digests
of tokens. As these show that a known prompt was asked, the file is for its user alone,
unless it was there before with another mode. The scheduler's thread only appends to a queue in
memory; the journal's own thread writes once a second. The commands `explain`,
`simulate`, `status` and `report` read the file. A process that is killed, or a machine, may leave a
part of a line or a block of zeros: the writer ends such a line, and readers pass over it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from kvferry.errors import ConfigError
from kvferry.filesystem import private
from kvferry.store.faults import reason_of
from kvferry.store.io_pool import IOPool
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

ENGINE = "engine"
"""Stands for a tier's name, for tokens that the engine had itself."""

KEY_BYTES = 8
"""Bytes of a chunk key that a line keeps. The chance that any two of ten million chunks collide is
1 in 370,000."""

WRITE_SECONDS = 1.0

MAX_BYTES = 256 << 20
"""Size at which the file is renamed: `.1` is appended to its name, and replaces an older one."""

MAX_WAITING = 4096
"""Most requests in the queue. If the file falls behind, further requests are left out."""

_NOT_JSON = (msgspec.DecodeError, ValueError, RecursionError)

CLOSE_SECONDS = 5.0
"""Most seconds that `close` waits for the last write, so a hanging medium holds up no engine."""


class JournalAnswer(NamedTuple):
    """Where the tokens of a prompt came from when it was first admitted; each counts once."""

    local: int
    """Tokens that the engine had itself."""
    hits: Mapping[str, int]
    """Hit tokens by `Store.tier_of`: by tier, and if the tier is several peers, by peer."""
    misses: Mapping[str, int]
    """Computed tokens by miss reason."""
    why: str
    """Details of the first reason in words; empty for most."""
    not_stored: Mapping[str, int] = {}
    """Tokens that the engine computed and did not store, by reason. Known at the end."""
    not_stored_why: str = ""
    """Details of the first reason in words; empty for most."""
    kind: str = ""
    """The `FaultKind` of that which `why` tells; empty if no store is at fault."""
    not_stored_kind: str = ""
    """The same of `not_stored_why`."""

    @property
    def num_tokens(self) -> int:
        return self.local + sum(self.hits.values()) + sum(self.misses.values())


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request.

    Attributes:
        time: when the request came, or, if it must not be cached, when it ended; seconds since the
            epoch.
        chunk_tokens: tokens of a chunk.
        num_tokens: length of the prompt.
        keys: first `KEY_BYTES` of the keys of its whole chunks, hexadecimal; none if it must not be
            cached.
        request: the host's id of the request.
        compute_rate: tokens a second that the engine computed lately; 0 if that is not known.
        local, hits, misses, why, not_stored, not_stored_why, kind, not_stored_kind: see
            `JournalAnswer`; empty if it ended before it was admitted.
    """

    time: float
    chunk_tokens: int
    num_tokens: int
    keys: list[str]
    request: str = ""
    local: int = 0
    hits: dict[str, int] = {}
    misses: dict[str, int] = {}
    why: str = ""
    not_stored: dict[str, int] = {}
    not_stored_why: str = ""
    compute_rate: float = 0.0
    kind: str = ""
    not_stored_kind: str = ""

    def by_source(self) -> dict[str, int]:
        """Return the tokens that were not computed, by tier; `ENGINE` has the engine's own."""
        own = {ENGINE: self.local} if self.local else {}
        return own | self.hits


class Journal:
    """The journal of one engine. `add` runs in the scheduler's thread.

    When the file can no longer be written, the journal logs one line and ends; the engine goes on.

    Args:
        path: created if missing; its directory must exist.
        chunk_tokens: tokens of a chunk.

    Attributes:
        num_left_out: requests that `add` dropped: the queue was full, or the file had failed.

    Raises:
        ConfigError: the file cannot be opened for reading and appending.
    """

    def __init__(self, path: Path, chunk_tokens: int) -> None:
        self._path = path
        self._chunk_tokens = chunk_tokens
        self.num_left_out = 0
        self._waiting: deque[Callable[[], bytes]] = deque()  # each makes a line
        self._has_failed = False
        self._has_left_out = False  # a request whose line cannot be made
        self._ends = threading.Event()
        try:
            open(path, "ab+", opener=private).close()
        except (OSError, ValueError) as error:
            why = reason_of(error, shows_text=True)
            raise ConfigError(
                f"cannot record requests in {path}: {why}; name a file in a directory "
                "that exists and may be written"
            ) from error
        self._thread = IOPool(1, "kvferry-journal")
        known, ends = weakref.ref(self), self._ends
        self._thread.submit(lambda _job: _write_lines(known, ends))

    def add(
        self,
        arrived_at: float,
        request_id: str,
        num_tokens: int,
        keys: Sequence[ChunkKey],
        answer: JournalAnswer | None,
        compute_rate: float = 0.0,
    ) -> None:
        """Queue the line of a request. `answer` is None if the request was never admitted. Never
        blocks, and does no I/O."""
        if self._has_failed or len(self._waiting) >= MAX_WAITING:
            self.num_left_out += 1
            return
        kept = tuple(keys)

        def line() -> bytes:
            """Runs in: the thread of this journal."""
            made = JournalLine(
                time=round(arrived_at, 3),
                chunk_tokens=self._chunk_tokens,
                num_tokens=num_tokens,
                keys=[key[:KEY_BYTES].hex() for key in kept],
                request=request_id,
                compute_rate=compute_rate,
                **(answer or JournalAnswer(0, {}, {}, ""))._asdict(),
            )
            return _encoded(made) + b"\n"

        self._waiting.append(line)

    def close(self) -> None:
        """Write the rest of the queue, waiting `CLOSE_SECONDS` at most. Idempotent."""
        self._ends.set()
        self._thread.close(CLOSE_SECONDS)

    def write_waiting(self) -> bool:
        """Write the lines that wait. False if the file cannot be written, now or before. Runs in:
        the thread of this journal."""
        try:
            self._write()
        except Exception as error:  # outermost loop of the thread
            self._has_failed = True
            self.num_left_out += len(self._waiting)
            self._waiting.clear()
            why = reason_of(error, shows_text=True)
            logger.warning("requests are no longer recorded in %s: %s", self._path, why)
        return not self._has_failed

    def warn_of_left_out(self) -> None:
        if self.num_left_out:
            logger.warning(
                "%d requests are missing from %s: they could not be written, or not in time",
                self.num_left_out,
                self._path,
            )

    def _write(self) -> None:
        """Append the lines of the queue. Runs in: the thread of this journal."""
        if not self._waiting:
            return
        opener = private
        with suppress(FileNotFoundError):  # another engine renamed it first
            found = self._path.stat()
            if found.st_size >= MAX_BYTES:
                self._path.replace(f"{self._path}.1")
                # Whom the operator lets read the journal may read the next one, too.
                opener = partial(os.open, mode=stat.S_IMODE(found.st_mode))
        # Opened each time, since another engine may rename the file. Unbuffered, so that the lines
        # of several engines in one file stay whole.
        with open(self._path, "ab+", buffering=0, opener=opener) as file:
            size = os.fstat(file.fileno()).st_size
            if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
                _write_whole(file, b"\n")
            while self._waiting:
                make = self._waiting.popleft()
                try:
                    line = make()
                except (TypeError, ValueError, msgspec.MsgspecError) as error:
                    self._leave_out(error)
                else:
                    _write_whole(file, line)

    def _leave_out(self, error: Exception) -> None:
        """Note that a line cannot be made. Runs in: the thread of this journal."""
        if not self._has_left_out:
            self._has_left_out = True
            why = reason_of(error, shows_text=True)
            logger.warning("a request is missing from %s: %s", self._path, why)
        self.num_left_out += 1


def _encoded(line: JournalLine) -> bytes:
    """Return the JSON of a line. Half of a surrogate pair, which a client or a name of a file may
    have brought, becomes a question mark: no reader would take it."""
    try:
        return msgspec.json.encode(line)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(line), ensure_ascii=False)
        return text.encode("utf-8", "replace")


def _write_lines(known: Callable[[], Journal | None], ends: threading.Event) -> None:
    """The loop of a journal's thread, which does not keep a dropped journal alive."""
    is_last = False
    while not is_last:
        is_last = ends.wait(WRITE_SECONDS)
        journal = known()
        if journal is None or not journal.write_waiting():
            return
        if is_last:
            journal.warn_of_left_out()
        del journal


def _write_whole(file: FileIO, line: bytes) -> None:
    """Append a whole line, or nothing.

    Raises:
        OSError: the medium took none of the line or a part of it. The part is removed, unless
            another engine has appended a line meanwhile.
    """
    num_written = file.write(line) or 0
    if num_written < len(line):
        end = file.tell()
        if end == os.fstat(file.fileno()).st_size:
            file.truncate(end - num_written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_journal(path: Path, request: str | None, limit: int) -> list[JournalLine]:
    """Return the last `limit` lines of a journal; if `request` is given, of those whose request id
    starts with it. Raises as `journal_lines` does."""
    lines = (line for _, line in journal_lines(path))
    return list(deque((line for line in lines if line.request.startswith(request or "")), limit))


def journal_lines(path: Path) -> Iterator[tuple[int, JournalLine]]:
    """Read every line of a journal, one by one, with its number, from 1. A line that is not JSON
    was cut short or damaged, and is passed over.

    Raises:
        ConfigError: the file cannot be read, a line is JSON of another form, or no line is JSON.
    """
    decoder = msgspec.json.Decoder(JournalLine)
    number, is_journal, damaged = 0, False, ""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if not line.strip():
                        continue
                    found = decoder.decode(line)
                except _NOT_JSON as error:
                    if is_json(line):
                        raise
                    if line.endswith(b"\n"):  # else it may be the first line, being written
                        damaged = damaged or f"line {number}: {error}"
                else:
                    is_journal = True
                    yield number, found
    except OSError as error:
        raise ConfigError(f"cannot read journal {path}: {error.strerror}") from error
    except _NOT_JSON as error:
        raise ConfigError(f"journal {path}, line {number}: {error}") from error
    if damaged and not is_journal:
        raise ConfigError(f"journal {path}, {damaged}")


def is_json(line: bytes) -> bool:
    """Return whether a line is JSON of any form; a part of a journal's line never is."""
    try:
        msgspec.json.decode(line)
    except _NOT_JSON:
        return False
    return True
