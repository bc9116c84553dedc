"""Stored and removed chunks, as vLLM's KV events. Called by `FerryConnector.take_events`.

The events' hashes are our chunk keys, not vLLM's block hashes: chunks and blocks differ in size,
and subscribers match events by their tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from kvferry.contract.messages import ChunksRemoved, ChunkStored
from kvferry.types import ExtraKeys

logger = logging.getLogger("vllm.kvferry")


class EventTranslator:
    """Translates events of the scheduler role into KV events of vLLM.

    Args:
        events: the host's module of KV events.
        medium: the host's name for the tier of the store: "STORAGE" or "CPU".
    """

    def __init__(self, events: Any, medium: str) -> None:  # noqa: ANN401 - a module of the host's
        self._events = events
        self._medium = medium
        self._is_known = True

    def translate(self, events: Iterable[object]) -> list[Any]:
        """Return the host's events, in order; none once the host refused one. A chunk whose content
        depends on more than its tokens is left out where the host's event has no field for that: a
        subscriber would take it for the chunk of the tokens alone."""
        if not self._is_known:
            return []
        try:
            return list(self._translate(events))
        except TypeError as error:
            self._is_known = False
            logger.warning("kvferry: this vLLM's KV events differ, so none are sent: %s", error)
            return []

    def _translate(self, events: Iterable[object]) -> Iterator[Any]:
        for event in events:
            if isinstance(event, ChunkStored):
                extra = _extra(event.extra_keys)
                stored = self._events.BlockStored
                if extra and "extra_keys" not in stored.__struct_fields__:
                    continue
                yield self._make(
                    stored,
                    block_hashes=[event.key],
                    parent_block_hash=event.parent,
                    token_ids=list(event.token_ids),
                    block_size=len(event.token_ids),
                    lora_id=None,
                    lora_name=None,
                    extra_keys=[extra] if extra else None,
                )
            elif isinstance(event, ChunksRemoved):
                yield self._make(self._events.BlockRemoved, block_hashes=list(event.keys))

    def _make(self, kind: type[Any], **values: object) -> Any:  # noqa: ANN401 - the host's
        """Make an event, with those of `values` that this vLLM has fields for."""
        values["medium"] = self._medium
        fields = kind.__struct_fields__
        return kind(**{name: value for name, value in values.items() if name in fields})


def _extra(extra: ExtraKeys) -> tuple[Any, ...]:
    """Return the inputs that decide a chunk's content besides its tokens."""
    found: list[Any] = [] if extra.lora is None else [extra.lora]
    found += [(item.digest, item.offset) for item in extra.items]
    found += [] if extra.cache_salt is None else [extra.cache_salt]
    return tuple(found)
