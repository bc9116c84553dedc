"""Records that several ranks write together: begun and committed by the scheduler's process.

Every rank takes its part of a chunk out of the blocks while the hidden file is created, writes it
when a plan names that file, and returns its leaf digests; when all have, the head is written and
the record becomes visible. The I/O runs on one background thread; the scheduler thread only looks
at what is ready.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvferry.connectors.shared_storage.messages import Saved, Session
from kvferry.observe import Observer
from kvferry.record.schema import DIGEST_BYTES, RecordSchema
from kvferry.store.base import PutResult, SupportsShardedWrite
from kvferry.store.io_pool import IOPool, Job
from kvferry.types import ChunkKey

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0


class Settled(NamedTuple):
    """All ranks are through with a record."""

    retry: bool
    """A rank could not take its part now: the chunk may be offered again."""


@dataclass(slots=True)
class _Session:
    key: ChunkKey
    first_token: int
    begun: Job[str | PutResult]
    reports: dict[int, Saved] = field(default_factory=dict)


class SharedWrites:
    """All records under way. Runs in: scheduler thread, but for the jobs.

    Args:
        store: where sessions live.
        schema: of the records.
        world_size: ranks that each report once.
        observer: receives counts.
    """

    def __init__(
        self,
        store: SupportsShardedWrite,
        schema: RecordSchema,
        world_size: int,
        observer: Observer,
    ) -> None:
        self._store = store
        self._schema = schema
        self._world_size = world_size
        self._observer = observer
        self._sessions: dict[bytes, _Session] = {}
        self._unnamed: dict[bytes, _Session] = {}
        self._dropped: list[Session] = []
        self._pool = IOPool(1, "kvferry-commit")

    def begin(self, key: ChunkKey, first_token: int) -> bool:
        """Start to create the file of a record; False if that record is under way. Never blocks."""
        if key in self._sessions:
            return False
        size = self._schema.record_bytes
        begun = self._pool.submit(lambda _job: self._store.begin(key, size))
        self._sessions[key] = self._unnamed[key] = _Session(key, first_token, begun)
        return True

    def named(self) -> list[Session]:
        """What the next plan tells the ranks: files that were created, or refused, since the last
        call. A record refused is over; no report of it is waited for."""
        news, self._dropped = self._dropped, []
        for key, session in list(self._unnamed.items()):
            if not session.begun.poll():
                continue
            del self._unnamed[key]
            name = session.begun.result
            if not isinstance(name, str):
                self._sessions.pop(key, None)
                self._count(name or PutResult.FAILED)
                name = None
            news.append(Session(key, name))
        return news

    def report(self, rank: int, saved: Saved) -> Settled | None:
        """A rank is through with its part; None until all are and the record is settled."""
        session = self._sessions.get(saved.key)
        if session is None:
            return Settled(saved.retry)
        session.reports.setdefault(rank, saved)
        if len(session.reports) < self._world_size:
            return None
        del self._sessions[saved.key]
        self._pool.submit(lambda _job: self._settle(session))
        return Settled(any(each.retry for each in session.reports.values()))

    def switch_namespace(self, namespace: bytes) -> None:
        """Commit records of another namespace from now on; those under way are given up."""
        self._schema = self._schema.with_namespace(namespace)
        self._give_up()

    def close(self) -> None:
        """Give up what is not complete. Bounded in time."""
        self._give_up()
        if not self._pool.close(CLOSE_SECONDS):
            logger.warning("committing records did not end in time; left behind at close")

    def _give_up(self) -> None:
        for session in self._sessions.values():
            self._pool.submit(partial(self._abort, session))
        self._dropped += [Session(key, None) for key in self._unnamed]
        self._unnamed.clear()
        self._sessions.clear()

    def _abort(self, session: _Session, _job: Job[None]) -> None:
        """Runs in: I/O thread, after the session's own `begin`."""
        if isinstance(session.begun.result, str):
            self._store.abort(session.begun.result)

    def _settle(self, session: _Session) -> None:
        """Commit or abort. Runs in: I/O thread, after the session's own `begin`."""
        name = session.begun.result
        if not isinstance(name, str):
            return
        table = self._leaf_table(session)
        if table is None:
            self._store.abort(name)
            if not any(each.retry for each in session.reports.values()):
                self._observer.count("save_failed")
            return
        head = self._schema.encode_head(session.key, session.first_token, table)
        self._count(self._store.commit(name, head))

    def _count(self, result: PutResult) -> None:
        self._observer.count(f"put_{result}")
        if result not in (PutResult.STORED, PutResult.EXISTS):
            self._observer.count("save_failed")

    def _leaf_table(self, session: _Session) -> bytes | None:
        """The table made of all ranks' parts; None unless every row was written."""
        table = bytearray(DIGEST_BYTES * self._schema.num_leaves)
        missing = set(range(self._schema.num_leaves))
        for saved in session.reports.values():
            if not saved.stored:
                return None
            at = 0
            for rows in saved.ranges:
                where = self._schema.leaf_slice(rows)
                size = where.stop - where.start
                table[where] = saved.leaf_digests[at : at + size]
                missing.difference_update(
                    range(where.start // DIGEST_BYTES, where.stop // DIGEST_BYTES)
                )
                at += size
        return bytes(table) if not missing else None
