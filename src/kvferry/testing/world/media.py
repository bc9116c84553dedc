"""What lies outside of engines: servers that are dicts, and the links between peers. Each has
faults that a scenario switches on and off.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvferry.errors import FaultKind, StoreError
from kvferry.store.base import Buffer, PutResult, ReadRange
from kvferry.store.erasures import HEAD_BYTES
from kvferry.store.kind import Opening, StoreKind, StoreUrl
from kvferry.store.memory import copy_ranges
from kvferry.store.servers.remote import RemoteClient, RemoteStore, open_remote
from kvferry.testing.world.loop import Loop, Wrong
from kvferry.testing.world.records import with_nan
from kvferry.testing.world.truth import Truth
from kvferry.transfer.base import KeyState
from kvferry.types import ChunkKey

OUTAGES = (
    "slow",  # every call takes seconds
    "error",  # every call fails
    "odd",  # every call raises what a client must not raise
    "hang",  # calls end at their deadline
    "stuck",  # calls do not end, whatever their deadline
    "refuse",  # nothing is stored
    "partition",  # one engine does not reach it
)
DAMAGE = (
    "flip",  # what is read has a flipped bit
    "cut",  # what is read is shorter than what was stored
)
FAULTS = OUTAGES + DAMAGE
"""What a medium can do wrong while it lasts; see `Medium.faults`."""

LOSSES = ("empty", "restart")
"""A medium loses all, its notice too."""

OFFENCES = ("evict", "empty", "spoil", "foreign", "restart")
"""What happens to a medium at once; see `Medium.suffer`."""

NOTICE = "kv/erased.json"
"""Where a medium has the notice of what was erased, as our stores read it."""

VAIN_SECONDS = 15.0
"""So long after a client has learnt that a name has no value, what was ordered before is read."""

NOT_FINITE = "not finite"
"""An offence, too: a release that stored NaN has written records."""


@dataclass
class Speed:
    """How fast a medium answers: seconds, and bytes a second."""

    latency: float = 0.002
    bandwidth: float = 50e6


class Medium:
    """A server whose values are a dict. Several engines share it.

    Args:
        max_bytes: what the server keeps; it then evicts what was used longest ago.
        truth: what records must hold; None: it holds none.

    Attributes:
        faults: the faults that are on, and whom they hit: the name of an engine, or "" for all.
        failed_questions: the engines whose questions for keys have failed.
        failed_deletes: the names that a client could not delete.
    """

    def __init__(
        self,
        name: str,
        loop: Loop,
        seed: int,
        max_bytes: int | None = None,
        truth: Truth | None = None,
    ) -> None:
        self.name = name
        self.loop = loop
        self._random = random.Random(f"medium {name} {seed}")
        self.speed = self._random.choice((Speed(), Speed(), Speed(0.03, 2e5)))
        self.values: OrderedDict[str, bytes] = OrderedDict()
        self.faults: dict[str, str] = {}
        self.failed_questions: set[str] = set()
        self.failed_deletes: set[str] = set()
        self._max_bytes = max_bytes
        self._truth = truth

    @property
    def keeps_all(self) -> bool:
        return self._max_bytes is None

    def has(self, fault: str, owner: str) -> bool:
        return self.faults.get(fault) in ("", owner)

    def enter(self, owner: str, deadline: float, num_bytes: int) -> None:
        """Take the time of a call. Raises StoreError."""
        loop = self.loop
        while self.has("stuck", owner):
            loop.sleep(0.5)
        if self.has("hang", owner) or self.has("partition", owner):
            loop.sleep(min(deadline, loop.now + 3600.0) - loop.now)
            raise StoreError(FaultKind.LATE, "no answer in time")
        slow = 1.0 if self.has("slow", owner) else 0.0
        mean = self.speed.latency + slow
        seconds = min(self._random.expovariate(1 / mean), 5 * mean)
        seconds += num_bytes / self.speed.bandwidth
        if loop.now + seconds > deadline:
            loop.sleep(deadline - loop.now)
            raise StoreError(FaultKind.LATE, "no answer in time")
        loop.sleep(seconds)
        if self.has("odd", owner):
            raise TypeError("a client's own fault")
        if self.has("error", owner):
            raise StoreError(FaultKind.AWAY, "the server is down")

    def damaged(self, value: bytes, owner: str) -> bytes:
        if self.has("flip", owner):
            changed = bytearray(value)
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
            return bytes(changed)
        return value[: len(value) // 2] if self.has("cut", owner) else value

    def store(self, name: str, value: bytes) -> None:
        """Keep a value. Ends the world if it is a record of other KV than its key stands for."""
        if self._truth is not None and not name.endswith(".json"):
            try:
                self._truth.check_record(self.name, key_in(name), value)
            except Wrong as wrong:
                self.loop.fail(wrong)
        self.values[name] = value
        while self._max_bytes is not None and self.num_bytes > self._max_bytes:
            oldest, left = self.values.popitem(last=False)
            if oldest == NOTICE:  # all engines read it every few seconds
                self.values[oldest] = left

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.values.values()))

    def suffer(self, offence: str) -> None:
        """Have something happen to the values, as servers and people do."""
        records = [name for name in self.values if not name.endswith(".json")]
        chosen = [name for name in records if self._random.random() < 0.5]
        if offence in LOSSES:
            self.values.clear()
        elif offence == "evict":
            for name in chosen:
                del self.values[name]
        elif offence == "spoil":  # what is stored is wrong for good
            for name in chosen:
                spoilt = bytearray(self.values[name])
                spoilt[self._random.randrange(len(spoilt))] ^= 0x10
                self.values[name] = bytes(spoilt)
        elif offence == "foreign" and chosen:  # another owner writes under our names
            values = [self.values[name] for name in chosen]
            for name, value in zip(chosen, [*values[1:], b"not a record"], strict=True):
                self.values[name] = value
        elif offence == NOT_FINITE:
            assert self._truth is not None
            for name in chosen:
                changed = with_nan(key_in(name), self.values[name], self._random)
                if changed is not None:
                    self.values[name] = changed
                    self._truth.be_not_finite(key_in(name))
        else:
            assert offence in OFFENCES


def key_in(name: str) -> ChunkKey:
    """The key in the name of a record."""
    return ChunkKey(bytes.fromhex(name[-64:]))


class MediumClient(RemoteClient):
    """A client of a medium, in the process of one engine.

    Args:
        is_alone: whether its engine has one rank and one store, so that it knows what is there.
    """

    def __init__(self, medium: Medium, owner: str, *, is_alone: bool) -> None:
        self._medium = medium
        self._owner = owner
        self._is_alone = is_alone
        self._gone: dict[str, float] = {}  # since when it knows that a name has no value
        self._written: dict[str, float] = {}
        self.is_closed = False

    def _enter(self, deadline: float, num_bytes: int = 0) -> None:
        self._medium.enter(self._owner, deadline, num_bytes)

    def _check_vain(self, name: str) -> None:
        """What a client knows to be gone it reads only after it heard that it is there again."""
        since = self._gone.get(name, math.inf)
        if self._medium.loop.now > since + VAIN_SECONDS:
            said = f"{self._owner} reads {name}, which it knows to be gone"
            self._medium.loop.fail(Wrong("in vain", said))

    def read(self, name: str, ranges: Sequence[ReadRange], deadline: float) -> int | None:
        num_bytes = sum(len(buffer) for _, buffer in ranges)
        if self._is_alone and num_bytes > HEAD_BYTES:  # less is read to see whether it is there
            self._check_vain(name)
        self._enter(deadline, num_bytes)
        value = self._medium.values.get(name)
        if value is None:
            now = self._medium.loop.now
            # The report of a write may come after its removal.
            if now > self._written.get(name, -math.inf) + VAIN_SECONDS:
                self._gone.setdefault(name, now)
            return None
        self._gone.pop(name, None)
        self._medium.values.move_to_end(name)
        if ranges and not name.endswith(".json"):
            value = self._medium.damaged(value, self._owner)
        return copy_ranges(value, ranges)

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        value = b"".join(buffers)  # before the wait: the bytes of the call, and no later ones
        self._enter(deadline, len(value))
        if self._medium.has("refuse", self._owner):
            return PutResult.NO_SPACE
        self._written[name] = self._medium.loop.now
        self._gone.pop(name, None)
        if name in self._medium.values and not replaces:
            return PutResult.EXISTS
        self._medium.store(name, value)
        return PutResult.STORED

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        began = self._medium.loop.now
        try:
            self._enter(deadline)
        except (StoreError, TypeError):
            self._medium.failed_questions.add(self._owner)
            raise
        found = [name in self._medium.values for name in names]
        for name, is_there in zip(names, found, strict=True):
            if is_there and self._gone.get(name, math.inf) <= began:
                del self._gone[name]
        return found

    def delete(self, name: str, deadline: float) -> bool:
        try:
            self._enter(deadline)
        except (StoreError, TypeError):
            self._medium.failed_deletes.add(name)
            raise
        return self._medium.values.pop(name, None) is not None

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        self._enter(deadline)
        for name, value in list(self._medium.values.items()):
            if name.startswith(prefix):
                yield name, len(value), 0.0

    def close(self) -> None:
        self.is_closed = True


@dataclass(frozen=True)
class _NoOptions:
    """A medium's URL has none."""


class Media:
    """The media of a world by name, as the kind of store `sim://NAME/PREFIX`."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.by_name: dict[str, Medium] = {}
        self.clients: list[tuple[str, MediumClient]] = []
        self.alone: set[str] = set()  # engines with one rank and one store

    def load(self) -> StoreKind:
        """What the entry point of an installed kind returns."""
        return StoreKind(
            options=_NoOptions,
            open=self._open,
            hosts="medium of a world; write {scheme}://name/prefix",
        )

    def forget(self, owner: str) -> None:
        """A process was killed: it closes nothing any more."""
        self.clients = [each for each in self.clients if each[0] != owner]

    def _open(self, url: StoreUrl, _options: Any, opening: Opening) -> RemoteStore:
        medium, task = self.by_name[url.hosts[0][0]], self._loop.current
        owner = "" if task is None else task.owner
        medium.enter(owner, self._loop.now + 2.0, 0)
        client = MediumClient(medium, owner, is_alone=owner in self.alone)
        self.clients.append((owner, client))
        return open_remote(url, client, opening)


# -- peers --------------------------------------------------------------------------------------


class Peers:
    """The addresses at which engines of a world serve what they hold, and the wires between."""

    def __init__(self, loop: Loop, seed: int) -> None:
        self.loop = loop
        self.desks: dict[int, PeerDesk] = {}
        self.wire = Medium("wire", loop, seed)

    def server(
        self, lender: Any, namespace: Callable[[], bytes], listen: Any, **_: Any
    ) -> PeerDesk:
        return PeerDesk(self, lender, namespace, listen)

    def client(self, host: str, port: int, namespace: bytes, *_: Any) -> PeerLink:
        return PeerLink(self, host, port, namespace)


class PeerDesk:
    """In the place of a `PeerServer`: no sockets, the same answers."""

    def __init__(
        self, peers: Peers, lender: Any, namespace: Callable[[], bytes], listen: Any
    ) -> None:
        task = peers.loop.current
        self.owner = "" if task is None else task.owner
        self.lender = lender
        self.namespace = namespace
        self.address = (listen.host, listen.port)
        self.incarnation = random.Random(f"{self.owner} {peers.loop.now}").randbytes(16)
        self._peers = peers
        peers.desks[listen.port] = self

    def close(self) -> None:
        if self._peers.desks.get(self.address[1]) is self:
            del self._peers.desks[self.address[1]]

    def __str__(self) -> str:
        return f"desk at {self.address[1]}"


class PeerLink:
    """In the place of a `PeerClient`: asks a desk, over a wire with faults."""

    def __init__(self, peers: Peers, host: str, port: int, namespace: bytes) -> None:
        task = peers.loop.current
        self._owner = "" if task is None else task.owner
        self._peers = peers
        self._namespace = namespace
        self.host, self.port = host, port
        self.incarnation = b""
        self.is_closed = False

    def is_at(self, host: str, port: int) -> bool:
        return (host, port) == (self.host, self.port)

    def _desk(self, deadline: float, num_bytes: int) -> PeerDesk:
        deadline = min(deadline, self._peers.loop.now + 30.0)
        self._peers.wire.enter(self._owner, deadline, num_bytes)
        desk = self._peers.desks.get(self.port)
        if desk is None or self.is_closed:
            raise StoreError(FaultKind.AWAY, "no answer")
        if desk.namespace() != self._namespace:
            raise StoreError(FaultKind.UNUSABLE, "another model is served here")
        self.incarnation = desk.incarnation
        return desk

    def states_of(self, keys: Sequence[ChunkKey], deadline: float) -> list[KeyState]:
        desk, states = self._desk(deadline, 0), []
        for key in keys:
            loan = desk.lender.lend(key, 0.0)
            is_held = not (loan is None or loan is KeyState.PENDING)
            if is_held:
                desk.lender.release(loan)
            states.append(KeyState.HELD if is_held else loan or KeyState.ABSENT)
        return states

    def read(
        self, key: ChunkKey, ranges: Sequence[ReadRange], deadline: float
    ) -> tuple[KeyState, int]:
        desk = self._desk(deadline, 0)
        loan = desk.lender.lend(key, max(0.0, min(deadline, 1e12) - self._peers.loop.now))
        if loan is None or loan is KeyState.PENDING:
            return loan or KeyState.ABSENT, 0
        try:
            # The bytes go while time passes, straight from the slot.
            before = b"".join(loan.buffers)
            self._peers.wire.enter(self._owner, deadline, sum(len(b) for _, b in ranges))
            if b"".join(loan.buffers) != before and self._peers.loop.now < loan.until:
                said = f"{desk.owner} changes what {self._owner} reads"
                self._peers.loop.fail(Wrong("lent", said))
            value = self._peers.wire.damaged(before, self._owner)
            return KeyState.HELD, copy_ranges(value, ranges)
        finally:
            desk.lender.release(loan)

    def close(self) -> None:
        self.is_closed = True

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def forget(peers: Peers, owner: str) -> None:
    """Take down what a process served that was killed."""
    for desk in list(peers.desks.values()):
        if desk.owner == owner:
            with suppress(KeyError):
                desk.close()
