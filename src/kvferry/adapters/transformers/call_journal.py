"""The journal of a `StoredKV` (option `record`): a line for each row of a call, as engines write it
for each request, so that the same commands read it."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvferry.adapters.transformers.arguments import Prompt
from kvferry.contract.messages import LookupMiss
from kvferry.journal import Journal, JournalAnswer
from kvferry.store.base import Store
from kvferry.types import ChunkKey


class CallJournal:
    """Notes what the rows of calls got. Without a file it does nothing.

    Args:
        record: the file; None: no journal.
        store: says from which tier a chunk came.
        chunk_tokens: tokens of a chunk.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, record: str | None, store: Store, chunk_tokens: int) -> None:
        self._journal = None if record is None else Journal(Path(record), chunk_tokens)
        self._store = store
        self._chunk = chunk_tokens
        self._num_rows = 0
        self._compute_rate = 0.0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Learn how fast the model computes, of computations that take more than their start."""
        if num_tokens >= self._chunk and seconds > 0:
            self._compute_rate = num_tokens / seconds

    def add(
        self,
        rows: Iterable[tuple[Prompt, list[ChunkKey]]],
        num_loaded: Sequence[int],
        limit: int,
        missed: Sequence[LookupMiss],
    ) -> None:
        """Note the rows of a call.

        Args:
            num_loaded: how many tokens were loaded of each row, padding included.
            limit: how many of each row may be loaded, padding included.
            missed: of each row, why whole chunks between these were not.
        """
        if self._journal is None:
            return
        for (prompt, keys), end_of_hit, why in zip(rows, num_loaded, missed, strict=True):
            size, chunk = len(prompt.token_ids), self._chunk
            hit = min(size, max(0, end_of_hit - prompt.num_padding))
            end = max(hit, min(size, limit - prompt.num_padding) // chunk * chunk)
            hits: Counter[str] = Counter()
            for number in range(-(-hit // chunk)):
                hits[self._store.tier_of(keys[number])] += min(chunk, hit - number * chunk)
            misses = +Counter({str(why): end - hit, str(LookupMiss.PARTIAL): size - end})
            self._num_rows += 1
            name = f"{os.getpid()}-{self._num_rows}"
            answer = JournalAnswer(0, hits, misses, "")
            rate = round(self._compute_rate, 1)
            self._journal.add(time.time(), name, size, keys, answer, rate)

    def close(self) -> None:
        """Write the rest. Idempotent."""
        if self._journal is not None:
            self._journal.close()
