"""What a world knows of all chunks: which content each key stands for, when it was computed last,
and what was erased. So every value that is stored, and every chunk in memory, can be compared at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.testing.world.kv import Content, payload_of, right_but_nan
from kvferry.testing.world.loop import Wrong
from kvferry.testing.world.records import has_mark
from kvferry.types import ChunkKey


class Truth:
    """See the module.

    Attributes:
        computed: by the seed of a token, when its KV was computed last.
        erased: by the mark of a salt, when an operator erased it.
        refused: by key, when an engine found what it had computed to be wrong, if it was not saved
            again since.
        not_finite: the seeds of tokens of which a server had NaN, as older releases wrote it. A
            hit that is not audited may have it (docs/identity.md).
    """

    def __init__(self) -> None:
        self.computed: dict[int, float] = {}
        self.erased: dict[bytes, float] = {}
        self.refused: dict[ChunkKey, float] = {}
        self.not_finite: set[int] = set()
        self._contents: dict[ChunkKey, tuple[Content, bytes]] = {}
        self._payloads: dict[ChunkKey, bytes] = {}
        self._may_be_stored: set[ChunkKey] = set()

    def learn(self, key: ChunkKey, content: Content, mark: bytes, *, is_stored: bool) -> None:
        """A request has a chunk with this key, and asks that it is stored or not. Raises Wrong: the
        key stands for something else."""
        if is_stored:
            self._may_be_stored.add(key)
        known = self._contents.setdefault(key, (content, mark))
        if known[0].seeds[-1] != content.seeds[-1]:
            raise Wrong("key", f"{key.hex()} stands for two contents")

    def check_record(self, where: str, key: ChunkKey, record: bytes) -> None:
        """Raises Wrong: these bytes must not stand under a key."""
        if key in self._contents and key not in self._may_be_stored:
            raise Wrong("options", f"{where} has {key.hex()}, which no request asked to store")
        payload = self._payload(where, key)
        found = record[-len(payload) :]
        if found == payload or (self._is_not_finite(key) and right_but_nan(found, payload)):
            return
        raise Wrong("wrong record", f"{where} has wrong KV under {key.hex()}")

    def be_not_finite(self, key: ChunkKey) -> None:
        """A record with this key has NaN."""
        self.not_finite.update(self._contents[key][0].seeds)

    def _is_not_finite(self, key: ChunkKey) -> bool:
        return self._contents[key][0].seeds[-1] in self.not_finite

    def _payload(self, where: str, key: ChunkKey) -> bytes:
        known = self._contents.get(key)
        if known is None:
            raise Wrong("wrong record", f"{where} has {key.hex()}, which no request asked for")
        if key not in self._payloads:
            self._payloads[key] = payload_of(known[0])
        return self._payloads[key]

    def is_erased(self, key: ChunkKey, before: float) -> bool:
        """Whether a chunk was erased before that time, and not computed since."""
        known = self._contents.get(key)
        erased_at = None if known is None else self.erased.get(known[1])
        if known is None or erased_at is None or erased_at > before:
            return False
        return self.is_old(known[0].seeds[-1:], erased_at)

    def is_of(self, key: ChunkKey, value: bytes) -> bool:
        """Whether a value is of the salt of a chunk, and nothing foreign under its key."""
        return has_mark(value, self._contents[key][1])

    def is_old(self, seeds: Sequence[int], erased_at: float) -> bool:
        """Whether one of these tokens was not computed since then."""
        return any(self.computed.get(seed, -1.0) < erased_at for seed in seeds)
