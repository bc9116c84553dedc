"""What was stored and removed, as vLLM's KV events.

The hashes are our chunk keys, not vLLM's block hashes: a chunk has its own number of tokens, and
subscribers find it by the tokens that the event holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from kvferry.contract.messages import ChunksRemoved, ChunkStored
from kvferry.types import ExtraKeys

logger = logging.getLogger("vllm.kvferry")


class EventTranslator:
    """Makes a host's events.

    Args:
        events: the host's module of KV events.
        medium: tier of the store, as the host names it: "STORAGE" or "CPU".
    """

    def __init__(self, events: Any, medium: str) -> None:  # noqa: ANN401 - a module of the host's
        self._stored, self._removed = events.BlockStored, events.BlockRemoved
        self._stored_fields = frozenset(self._stored.__struct_fields__)
        self._removed_fields = frozenset(self._removed.__struct_fields__)
        self._medium = medium
        self._is_known = True

    def translate(self, said: Iterable[object]) -> list[Any]:
        """The host's events, in order; none any more once the host turns out to want other events
        than we know. A chunk whose content depends on more than its tokens is left out where the
        host's event has no room for that: a subscriber would take it for the plain one."""
        if not self._is_known:
            return []
        try:
            return list(self._translate(said))
        except TypeError as error:
            self._is_known = False
            logger.warning("kvferry: this vLLM wants other KV events, none are sent: %s", error)
            return []

    def _translate(self, said: Iterable[object]) -> Iterator[Any]:
        for event in said:
            if isinstance(event, ChunkStored):
                extra = _extra(event.extra_keys)
                if extra and "extra_keys" not in self._stored_fields:
                    continue
                yield self._make(
                    self._stored,
                    self._stored_fields,
                    block_hashes=[event.key],
                    parent_block_hash=event.parent,
                    token_ids=list(event.token_ids),
                    block_size=len(event.token_ids),
                    lora_id=None,
                    medium=self._medium,
                    lora_name=None,
                    extra_keys=[extra] if extra else None,
                )
            elif isinstance(event, ChunksRemoved):
                yield self._make(
                    self._removed,
                    self._removed_fields,
                    block_hashes=list(event.keys),
                    medium=self._medium,
                )

    @staticmethod
    def _make(kind: type[Any], known: frozenset[str], **values: object) -> Any:  # noqa: ANN401
        return kind(**{name: value for name, value in values.items() if name in known})


def _extra(extra: ExtraKeys) -> tuple[Any, ...]:
    """What decides a chunk's content besides its tokens."""
    found: list[Any] = [] if extra.lora is None else [extra.lora]
    found += [(item.digest, item.offset) for item in extra.items]
    found += [] if extra.cache_salt is None else [extra.cache_salt]
    return tuple(found)
