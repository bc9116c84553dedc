"""Records in the memory of other engines (peers), as a read-only store: `peer://host:port`.

A peer's memory changes without notice. So the keys that it says it holds are a hint, records that
it sends are verified as all others are, and nothing is removed there. A URL with several peers is
as many tiers.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass

from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.network import is_loopback
from kvferry.store.base import (
    COMPUTED_WRONG,
    NO_DEADLINE,
    Address,
    Buffer,
    Put,
    ReadRange,
    RecordBytes,
    Where,
)
from kvferry.store.kind import Opening, StoreKind, StoreUrl, refuse_relative
from kvferry.store.servers.server_keys import ServerStore
from kvferry.transfer.auth import PeerFiles
from kvferry.transfer.base import KeyState
from kvferry.transfer.client import PeerClient
from kvferry.types import ChunkKey

MAX_WRONG = 3
"""Number of wrong records after which a peer is not asked again until another process answers."""

_MAX_SERVED = 1024
"""Number of records remembered as served, in case their readers find them wrong."""

_READ_ONLY = Fault(FaultKind.READ_ONLY, "a peer is only read")
_WHERE = {
    KeyState.HELD: Where.HERE,
    KeyState.ABSENT: Where.ABSENT,
    KeyState.PENDING: Where.COMING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerOptions(PeerFiles):
    """Options of `peer:` URLs."""

    def __post_init__(self) -> None:
        refuse_relative(**asdict(self))


class PeerStore(ServerStore):
    """The records of one peer, read-only: a `put` is FAILED, and `discard` and `delete` remove
    nothing at the peer. `stat` counts the keys that this process knows.

    Args:
        client: the connection to the peer, closed with the store.
    """

    def __init__(self, client: PeerClient, opening: Opening) -> None:
        super().__init__(f"peer://{client}", opening, time.monotonic)
        self._client = client
        self._served: OrderedDict[ChunkKey, None] = OrderedDict()
        self._num_wrong = 0
        self._distrusted = b""

    def accepts(self) -> Fault | None:
        return _READ_ONLY

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float = NO_DEADLINE
    ) -> RecordBytes | None:
        if self._closed:
            return None
        with self._keys.call() as learn:
            self._check_trust(deadline)
            state, size = self._client.read(key, ranges, deadline)
            if state is not KeyState.HELD:
                self._keys.forget(key)
                return None
            learn(key, size)
        self._served[key] = None
        if len(self._served) > _MAX_SERVED:
            with suppress(KeyError):  # another thread was first
                self._served.popitem(last=False)
        return RecordBytes(size)

    def _is_of(self, holder: Address | None) -> bool:
        return holder is not None and self._client.is_at(*holder)

    def _find(self, keys: Sequence[ChunkKey]) -> list[Where]:
        deadline = self._clock() + self._bounds.probe_seconds
        self._check_trust(deadline)
        states = self._client.states_of(keys, deadline)
        return [_WHERE[state] for state in states]

    def _check_trust(self, deadline: float) -> None:
        """Raise StoreError if the peer is the process that sent too many wrong records."""
        if not self._distrusted:
            return
        if self._client.incarnation == self._distrusted:
            self._client.states_of((), deadline)  # perhaps another process answers now
            if self._client.incarnation == self._distrusted:
                said = f"peer {self._client}: it sent {MAX_WRONG} wrong records"
                raise StoreError(FaultKind.PROTOCOL, said)
        self._distrusted, self._num_wrong = b"", 0

    def put(self, key: ChunkKey, buffers: Sequence[Buffer], deadline: float = NO_DEADLINE) -> Put:
        return Put.failed(_READ_ONLY)

    def discard(self, key: ChunkKey, reason: str) -> None:
        """Forget the key; remove nothing at the peer. If this peer sent the record, count it as a
        wrong one, unless this process computed another one wrong."""
        self._keys.forget(key)
        if reason == COMPUTED_WRONG:
            return
        try:
            del self._served[key]
        except KeyError:  # it did not send it, or another reader counted it
            return
        self._observer.count("peer_wrong_records")
        self._num_wrong += 1
        if self._num_wrong >= MAX_WRONG:
            self._distrusted = self._client.incarnation

    def delete(self, key: ChunkKey) -> bool:
        self._keys.forget(key)
        return False

    def describe(self, namespace: bytes, description: str) -> None:
        pass

    def in_namespace(self, namespace: bytes) -> PeerStore:
        return self

    def catalogues(self) -> Sequence[Fault]:
        return [Fault(FaultKind.UNLISTED, f"{self.url} cannot list its values")]

    def close(self) -> None:
        self._keys.is_closed = True
        self._client.close()  # first, as it ends calls under way
        self._keys.close()


def _open_url(url: StoreUrl, options: PeerOptions, opening: Opening) -> PeerStore:
    if url.path or url.username or url.password:
        raise ConfigError(f"{url.where}: a peer has an address only: peer://host:port")
    ((host, port),) = url.hosts
    if port is None:
        raise ConfigError(f"{url.where}: {host!r} has no port; write peer://host:port")
    if options.key_file is None and not is_loopback(host):
        raise ConfigError(
            f"{url.where}: {host!r} is another machine, and no key is given; add "
            "?key_file=/path to the key that all peers share"
        )
    try:
        key, tls = options.open_key(), options.open_tls("client")
    except ConfigError as error:
        raise ConfigError(f"{url.where}: {error}", error.kind) from None
    return PeerStore(PeerClient(host, port, opening.namespace, key, tls), opening)


KIND = StoreKind(
    options=PeerOptions,
    open=_open_url,
    hosts="peer; write {scheme}://host:port, or several with commas between them",
    is_peer=True,
)
