"""The boundary of a store that somebody else wrote: each call ends with an answer of its kind.

`open_one` puts it around a store of an installed package, unless that is a `RemoteStore`, whose
client is guarded itself. Whatever the class raises, returns that is no answer, or does not end is
named by class and method, counted, and logged once a minute; the engine goes on without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from kvferry.errors import Fault, StoreError
from kvferry.store.base import (
    ABSENT,
    NO_DEADLINE,
    Address,
    Buffer,
    Put,
    PutResult,
    ReadRange,
    RecordBytes,
    Store,
    StoreStat,
    TierStatus,
    Value,
    Where,
)
from kvferry.store.catalogue import Catalogue, Entry, GcReport, Removal
from kvferry.store.faults import Faults, Guard, checked, is_size
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.wrappers import WrapperStore
from kvferry.types import ChunkKey

T = TypeVar("T")


class GuardedStore(WrapperStore):
    """See the module. A fault of a call that must not raise is its answer, and `on_result` hears of
    it, as of one of the medium."""

    __slots__ = ()

    def __init__(self, inner: Store, guard: Guard, no_view: StoreError | None = None) -> None:
        with guard("url"):
            super().__init__(inner)
            checked(isinstance(self.url, str), self.url)
        self.guard = guard
        self._no_view = no_view  # of a namespace: each call has this fault
        self._heard: Callable[[StoreError | None], None] = lambda _fault: None

    def _ask(
        self,
        method: str,
        ask: Callable[[], T],
        fits: Callable[[T], bool],
        otherwise: Callable[[Fault], T],
        deadline: float = NO_DEADLINE,
    ) -> T:
        try:
            return self._call(method, ask, fits, deadline)
        except StoreError as error:
            self._heard(error)
            return otherwise(error.fault)

    def _call(
        self, method: str, ask: Callable[[], T], fits: Callable[[T], bool], deadline: float
    ) -> T:
        if self._no_view is not None:
            raise self._no_view
        with self.guard(method, deadline):
            answer = ask()
            return checked(fits(answer), answer)

    # -- values ---------------------------------------------------------------------------------

    def accepts(self) -> Fault | None:
        return self._ask("accepts", self.inner.accepts, _is_fault_or_none, lambda fault: fault)

    @property
    def values_per_put(self) -> int:
        return self._ask(
            "values_per_put", lambda: self.inner.values_per_put, _is_count, lambda _: 1
        )

    def where(self, key: ChunkKey) -> Where:
        return self._ask("where", lambda: self.inner.where(key), _is(Where), lambda _: ABSENT)

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        return self._call(
            "read",
            lambda: self.inner.read(key, ranges, deadline),
            lambda size: size is None or is_size(size),
            deadline,
        )

    def check_medium(self, deadline: float) -> None:
        self._call("check_medium", lambda: self.inner.check_medium(deadline), _is_any, deadline)

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        return self._ask(
            "put", lambda: self.inner.put(key, buffers, deadline), _is_put, Put.failed, deadline
        )

    def put_all(self, values: Sequence[Value], deadline: float = NO_DEADLINE) -> list[Put]:
        if type(self.inner).put_all is Store.put_all:
            return super().put_all(values, deadline)
        return self._ask(
            "put_all",
            lambda: self.inner.put_all(values, deadline),
            lambda answers: _are(_is_put, answers) and len(answers) == len(values),
            lambda fault: [Put.failed(fault)] * len(values),
            deadline,
        )

    def discard(self, key: ChunkKey, reason: str) -> None:
        self._ask("discard", lambda: self.inner.discard(key, reason), _is_any, _nothing)

    def delete(self, key: ChunkKey) -> bool:
        return self._ask("delete", lambda: self.inner.delete(key), _is(bool), lambda _: False)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        self._ask("touch", lambda: self.inner.touch(keys), _is_any, _nothing)

    def describe(self, namespace: bytes, description: str) -> None:
        self._ask(
            "describe", lambda: self.inner.describe(namespace, description), _is_any, _nothing
        )

    def stat(self) -> StoreStat:
        none = StoreStat(self.url, 0, 0, None, index_complete=False)
        return self._ask("stat", self.inner.stat, _is(StoreStat), lambda _: none)

    def close(self) -> None:
        self._ask("close", self.inner.close, _is_any, _nothing)

    # -- what is known --------------------------------------------------------------------------

    def probe(self, keys: Sequence[ChunkKey], *, again: bool = False) -> Where:
        return self._ask(
            "probe", lambda: self.inner.probe(keys, again=again), _is(Where), lambda _: ABSENT
        )

    def learn(self, keys: Sequence[ChunkKey], holder: Address | None = None) -> bool:
        return self._ask(
            "learn", lambda: self.inner.learn(keys, holder), _is(bool), lambda _: False
        )

    def wait_indexed(self, timeout: float) -> bool:
        return self._ask(
            "wait_indexed", lambda: self.inner.wait_indexed(timeout), _is(bool), lambda _: False
        )

    def on_result(self, heard: Callable[[StoreError | None], None]) -> None:
        self._heard = heard
        self._ask("on_result", lambda: self.inner.on_result(heard), _is_any, _nothing)

    def tiers(self) -> list[TierStatus]:
        return self._ask(
            "tiers", self.inner.tiers, lambda found: _are(_is(TierStatus), found), lambda _: []
        )

    def tier_of(self, key: ChunkKey) -> str:
        scheme = self.url.partition(":")[0]
        return self._ask("tier_of", lambda: self.inner.tier_of(key), _is(str), lambda _: scheme)

    def erased_since(self, number: int) -> Sequence[str]:
        return self._ask(
            "erased_since",
            lambda: self.inner.erased_since(number),
            lambda found: _are(_is(str), found),
            lambda _: (),
        )

    # -- other faces ----------------------------------------------------------------------------

    def in_namespace(self, namespace: bytes) -> GuardedStore:
        """A view; without one, each of its calls has the fault of this one."""
        no_view = None
        try:
            values = self._call(
                "in_namespace", lambda: self.inner.in_namespace(namespace), _is(Store), NO_DEADLINE
            )
        except StoreError as error:  # heard of with the first call of the view
            values, no_view = self.inner, error
        if values is self.inner and no_view is None:
            return self
        view = GuardedStore(values, self.guard, no_view)
        view._heard = self._heard
        return view

    def catalogues(self) -> Sequence[Catalogue | Fault]:
        found = self._ask(
            "catalogues",
            self.inner.catalogues,
            lambda found: _are(_is(Catalogue, Fault), found) and bool(found),
            lambda fault: [fault],
        )
        return [each if isinstance(each, Fault) else _Guarded(each, self.guard) for each in found]


def calls_of(store: Store) -> dict[object, tuple[str, float]]:
    """The calls under way of the code that a store's author wrote (`Guard.calls`). Empty for a
    store of kvferry's own without a client."""
    return store.guard.calls if isinstance(store, RemoteStore | GuardedStore) else {}


def guarded(store: Store, faults: Faults) -> Store:
    """Return a store that answers every call, whoever wrote it."""
    return store if isinstance(store, RemoteStore) else GuardedStore(store, Guard(store, faults))


class _Guarded(Catalogue):
    """A catalogue whose every call ends with an answer of its kind, or StoreError."""

    def __init__(self, inner: Catalogue, guard: Guard) -> None:
        self._inner = inner
        self._guard = guard.of(inner)

    def _ask(self, method: str, ask: Callable[[], T], fits: Callable[[T], bool]) -> T:
        with self._guard(method):
            answer = ask()
            return checked(fits(answer), answer)

    def _listed(self, method: str, ask: Callable[[], Iterator[Entry]]) -> Iterator[Entry]:
        with self._guard(method):
            for entry in ask():
                yield checked(isinstance(entry, Entry), entry)

    def lists(self, key: ChunkKey) -> bool:
        return self._ask("lists", lambda: self._inner.lists(key), _is(bool))

    def scan(self) -> Iterator[Entry]:
        return self._listed("scan", self._inner.scan)

    def stored(self) -> Iterator[Entry]:
        return self._listed("stored", self._inner.stored)

    def recent(self, limit: int) -> Iterator[Entry]:
        return self._listed("recent", lambda: self._inner.recent(limit))

    def namespaces(self) -> dict[bytes, tuple[int, int]]:
        return self._ask("namespaces", self._inner.namespaces, _is(dict))

    def described(self) -> list[bytes]:
        return self._ask("described", self._inner.described, lambda each: _are(_is(bytes), each))

    def description(self, namespace: bytes) -> str | None:
        return self._ask("description", lambda: self._inner.description(namespace), _is_text)

    def notice(self, text: str | None = None) -> str | None:
        with suppress(StoreError):
            return self._ask("notice", lambda: self._inner.notice(text), _is_text)
        return text

    def removals(self, limit: int) -> list[Removal] | None:
        return self._ask(
            "removals",
            lambda: self._inner.removals(limit),
            lambda found: found is None or _are(_is(Removal), found),
        )

    def facts(self) -> dict[str, int | bool | None]:
        return self._ask("facts", self._inner.facts, _is(dict))

    def gc(self, max_bytes: int | None = None, older_than_seconds: float | None = None) -> GcReport:
        return self._ask("gc", lambda: self._inner.gc(max_bytes, older_than_seconds), _is(GcReport))

    def pin(self, keys: Iterable[ChunkKey], until: float, *, by_client: bool = False) -> int:
        return self._ask("pin", lambda: self._inner.pin(keys, until, by_client=by_client), is_size)


def _nothing(_fault: Fault) -> None: ...


def _is_any(_answer: object) -> bool:
    return True


def _is(*kinds: type) -> Callable[[object], bool]:
    return lambda answer: isinstance(answer, kinds)


def _are(fits: Callable[[T], bool], answers: Sequence[T]) -> bool:
    return isinstance(answers, list | tuple) and all(map(fits, answers))


def _is_text(answer: object) -> bool:
    return answer is None or isinstance(answer, str)


def _is_fault_or_none(answer: object) -> bool:
    return answer is None or isinstance(answer, Fault)


def _is_count(answer: object) -> bool:
    return is_size(answer) and answer != 0


def _is_put(answer: object) -> bool:
    return (
        isinstance(answer, Put)
        and isinstance(answer.result, PutResult)
        and _is_fault_or_none(answer.fault)
    )
