"""Hits copied into the blocks while the forward runs: each layer's before its attention.

That is right only if the host calls `wait_for_layer_load` before each layer. Nothing says that it
does: a forward that was compiled or captured may come without hooks. So a hook is relied on once
it was seen; a layer without one is copied before the forward; and a hook that was relied on and
does not come fails the step's hits, and is the last one that was relied on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.rank_device import ChunkCopy
    from kvferry.connectors.shared_storage.rank_rows import RankRows
    from kvferry.connectors.shared_storage.rank_tables import LayerPlace
    from kvferry.store.io_pool import IOPool


class LayerHooks:
    """Which layers' hooks the host calls, as its forwards show. Runs in: worker.

    Attributes:
        relied_on: layers whose hook came in every forward in which any did, in their order.
        learns: no hook came so far.
    """

    def __init__(self) -> None:
        self.relied_on: tuple[str, ...] = ()
        self._seen: dict[str, None] = {}
        self.learns = True
        self._in_forward = False

    def begin_step(self) -> None:
        self._seen = {}
        self._in_forward = True

    def saw(self, layer_name: str) -> None:
        """A hook came. Those after the forward are of something else: a model that drafts."""
        if self._in_forward:
            self._seen[layer_name] = None

    def end_forward(self) -> None:
        """Learn from the hooks that came. A step without any had no forward, or does not tell."""
        self._in_forward = False
        if not self._seen:
            return
        if self.learns:
            self.learns = False
            self.relied_on = tuple(self._seen)
        else:
            self.relied_on = tuple(name for name in self.relied_on if name in self._seen)

    def give_up(self) -> None:
        """Rely on none from now on."""
        self.relied_on = ()
        self.learns = False


class _Item(NamedTuple):
    place: LayerPlace
    chunk: int


class LayerCopies:
    """The copies of one step's hits, under way. Runs in: worker; the copies there and in `pool`.

    Args:
        rows: what the rank moves.
        pool: threads that copy meanwhile, as far as they are free.
        num_threads: how many of them.
        chunks: from where to where.
        hooked: layers that are waited for by name, in the order of the forward; all others are
            copied when this returns.
    """

    def __init__(
        self,
        rows: RankRows,
        pool: IOPool,
        num_threads: int,
        chunks: Sequence[ChunkCopy],
        hooked: Sequence[str],
    ) -> None:
        self._rows = rows
        self._chunks = chunks
        self._errors: list[Exception | None] = [None] * len(chunks)
        self._stops: dict[str, int] = {}
        items: list[_Item] = []
        later = set()
        for name in hooked:
            for place in rows.layers[name]:
                later.add(place)
                items += self._items(place)
            self._stops[name] = len(items)
        now = {place for places in rows.layers.values() for place in places} - later
        first = [item for place in sorted(now) for item in self._items(place)]
        self._note(first, pool.spread(first, self._copy))
        self._later = items
        self._spread = pool.begin(items, self._copy, num_threads)

    def _items(self, place: LayerPlace) -> list[_Item]:
        return [_Item(place, index) for index in range(len(self._chunks))]

    def _copy(self, item: _Item) -> None:
        chunk = self._chunks[item.chunk]
        self._rows.scatter_layer(chunk.slot, item.place, chunk.runs, chunk.first_token)

    def _note(self, items: Sequence[_Item], errors: Sequence[Exception | None]) -> None:
        for item, error in zip(items, errors, strict=True):
            if error is not None:
                self._errors[item.chunk] = error

    def wait(self, layer_name: str) -> None:
        """Return when a layer's copies are complete: those that nobody has begun are done here."""
        stop = self._stops.get(layer_name)
        if stop is not None:
            self._spread.complete(stop)
            del self._stops[layer_name]

    @property
    def missed(self) -> Sequence[str]:
        """Layers that nobody has waited for."""
        return tuple(self._stops)

    def end(self) -> Sequence[Exception | None]:
        """Have all copies complete; what was raised, by chunk."""
        self._spread.complete(len(self._later))
        self._note(self._later, self._spread.errors)
        return self._errors

    def abandon(self) -> None:
        """Begin no more copies; return when none is under way."""
        self._spread.end()
