"""Whose KV this process loads and stores, and whether it does: one owner, `CacheIdentity`.

An epoch is a namespace in use. The first has the weights of the start; a reset begins another,
under a name that no stored record has. Roles pull: at the head of each hook they compare the state
with the one that they know, so that no change comes between two of their own lines.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import NamedTuple

from kvferry.contract.messages import LookupMiss
from kvferry.errors import FaultKind, StoreError
from kvferry.keys import UNREAD, ModelIdentity, Namespace

BEING_HASHED = "the weights are being hashed"


class Epoch(NamedTuple):
    """All that is stored under one namespace is of one model, weights included."""

    number: int
    """0: the weights are those of the start."""
    namespace: bytes


class CacheState(NamedTuple):
    """What a process may do with the cache. There are three kinds:

    | starting | no epoch yet, as the weights have no digest; `miss` and `why` say so |
    | on | an epoch, and no `miss` |
    | off | `miss` and `why`; the epoch is the last there was, and None if there never was one |
    """

    epoch: Epoch | None
    miss: LookupMiss | None = None
    why: str = ""
    is_final: bool = False
    """Off, and no later epoch will be on."""

    @property
    def namespace(self) -> bytes:
        """That of the epoch; empty without one."""
        return b"" if self.epoch is None else self.epoch.namespace


class CacheIdentity:
    """The state of the cache in one process. Any thread; never waits, but for `wait_first`.

    Args:
        model: the model that runs; its weights may be `UNREAD` until `name`.
        namespace: makes the namespace of a model.

    Attributes:
        state: read it once, and decide by what was read: another thread may replace it.
        model: with the weights' digest, once that is known.

    Raises:
        ConfigError: the model has no namespace.
    """

    def __init__(
        self, model: ModelIdentity, namespace: Callable[[ModelIdentity], Namespace]
    ) -> None:
        self.model = model
        self._namespace = namespace
        self._lock = threading.Lock()
        self._first: Future[Namespace] = Future()
        self._number = 0  # of resets
        self._of_number = 0  # the epoch that is in use, or will be
        self._off: tuple[LookupMiss, str] | None = None  # for good
        self.state = CacheState(None, LookupMiss.HASHING, BEING_HASHED)
        first = namespace(model)
        if model.weights != UNREAD:
            self._first.set_result(first)
            self.state = CacheState(Epoch(0, first.digest))

    @property
    def first(self) -> bytes:
        """The digest of the first epoch's namespace; empty while it is not known."""
        found = self._first
        return found.result().digest if found.done() and found.exception() is None else b""

    def wait_first(self) -> Namespace:
        """Wait for the namespace of the first epoch.

        Raises:
            StoreError: closed before it was known.
        """
        return self._first.result()

    def name(self, weights: bytes) -> None:
        """Take the digest of weights that were `UNREAD`. An epoch begins: the first, unless a reset
        came before, after which the weights may be others."""
        model = replace(self.model, weights=weights)
        first = self._namespace(model)
        with self._lock:
            if not self._first.done():
                self.model = model
                self._first.set_result(first)
                self._begin()

    def reset(self) -> None:
        """Begin another epoch, as when weights changed. What made the last one `distrust`ed is over
        with it."""
        with self._lock:
            self._number += 1
            self._of_number = self._number
            self._begin()

    def resume_first(self) -> None:
        """Go back to the first epoch: the weights turned out to be those of the start."""
        with self._lock:
            self._of_number = 0
            self._begin()

    def _begin(self) -> None:
        if self.first:
            number, digest = self._of_number, self.first
            if number:
                version = f"epoch-{secrets.token_hex(16)}"
                digest = self._namespace(replace(self.model, weights_version=version)).digest
            self._replace(CacheState(Epoch(number, digest)))

    def distrust(self, why: str) -> bool:
        """Load and save nothing more in this epoch: a record of it is of another model. False: that
        was known."""
        with self._lock:
            if self.state.miss is LookupMiss.OTHER_MODEL:
                return False
            self._replace(CacheState(self.state.epoch, LookupMiss.OTHER_MODEL, why))
            return True

    def stop(self, why: str, miss: LookupMiss = LookupMiss.NOT_LOADING) -> bool:
        """Load and save nothing from now on. False: that was so, and its reason stays."""
        with self._lock:
            if self._off is not None:
                return False
            self._off = miss, why
            self._replace(self.state)
            return True

    def _replace(self, state: CacheState) -> None:
        if self._off is not None:
            state = CacheState(state.epoch, *self._off, is_final=True)
        self.state = state

    def close(self) -> None:
        """End the wait for a name that did not come. Idempotent."""
        with self._lock:
            if not self._first.done():
                closed = StoreError(FaultKind.CLOSED, "closed before the weights were hashed")
                self._first.set_exception(closed)
