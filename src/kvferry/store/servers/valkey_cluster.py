"""A cluster of Valkey or Redis servers: which of them has a name."""

from __future__ import annotations

import binascii
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from kvferry.errors import StoreError
from kvferry.store.servers.resp import Command, ErrorReply, command
from kvferry.store.servers.valkey_node import ValkeyNode

_NUM_SLOTS = 16384
_LEARN_SECONDS = 2.0
"""Limit of learning the nodes."""
_MAX_MOVES = 5
"""A name whose slot moves on and on is given up."""
_SLOTS_ROOM = 4 << 20
"""4,000 ranges of slots, with a replica of each, take so much."""

_MAX_HOST = 255
"""Characters of a host's name."""

Place = tuple[str, int]


class ValkeyCluster:
    """The nodes that hold slots, learnt from any of them, and again when one failed or a slot has
    moved. Thread-safe without a lock: what threads learn at once is the same.

    Args:
        seeds: nodes to ask first, in this order.
        new_node: makes the node at a host and port.
    """

    def __init__(self, seeds: Sequence[Place], new_node: Callable[[str, int], ValkeyNode]) -> None:
        self._new_node = new_node
        self._seeds = list(seeds)
        self._nodes: dict[Place, ValkeyNode] = {}
        # By slot; empty until they are learnt.
        self._owners: list[ValkeyNode | None] = []
        self._is_stale = True
        self._failed: Place | None = None
        self._closed = False

    def ask(self, commands: Sequence[Command], deadline: float) -> list[object]:
        """Replies to commands whose second words are names; one round trip to each node."""
        owners = self._learnt(deadline)
        groups: dict[ValkeyNode, list[int]] = {}
        for number, each in enumerate(commands):
            node = owners[_slot_of(str(each.words[1]))]
            if node is None:
                self._is_stale = True
                raise StoreError("valkey cluster: no node has the slot of a name")
            groups.setdefault(node, []).append(number)
        replies: list[object] = [None] * len(commands)
        for node, numbers in groups.items():
            found = self._ask(node, [commands[number] for number in numbers], deadline)
            for number, reply in zip(numbers, found, strict=True):
                replies[number] = self._follow(node, commands[number], reply, deadline)
        return replies

    def nodes(self, deadline: float) -> list[ValkeyNode]:
        """Those that hold slots now."""
        self._is_stale = True
        return list(dict.fromkeys(node for node in self._learnt(deadline) if node is not None))

    def refresh(self) -> None:
        """Learn the nodes again at the next call."""
        self._is_stale = True

    def close(self) -> None:
        self._closed = True
        for node in list(self._nodes.values()):
            node.close()

    def _ask(self, node: ValkeyNode, commands: Sequence[Command], deadline: float) -> list[object]:
        try:
            return node.ask(commands, deadline)
        except StoreError:
            self._failed, self._is_stale = (node.host, node.port), True
            raise

    @contextmanager
    def _node_at(self, place: Place) -> Iterator[ValkeyNode]:
        """One that is not known yet is used once: servers may name as many as they like."""
        known = self._nodes.get(place)
        node = known or self._new_node(*place)
        try:
            yield node
        finally:
            if known is None:
                node.close()

    def _follow(self, node: ValkeyNode, asked: Command, reply: object, deadline: float) -> object:
        """The reply to a command whose slot has moved, or is about to."""
        for _ in range(_MAX_MOVES):
            if not isinstance(reply, ErrorReply) or reply.code not in ("MOVED", "ASK"):
                break
            self._is_stale = True
            named, _, port = reply.text.rpartition(" ")[2].rpartition(":")
            is_number = port.isascii() and port.isdigit() and len(port) < 6
            with self._node_at(_place(named, int(port) if is_number else 0, node)) as other:
                # A server that has the slot for good takes ASKING, too.
                _, reply = self._ask(other, [command("ASKING"), asked], deadline)
                node = other
        return reply

    def _learnt(self, deadline: float) -> list[ValkeyNode | None]:
        """The owner of each slot. Keeps the old ones if no node answers."""
        if self._owners and not self._is_stale:
            return self._owners
        # Other threads go on with the old ones.
        self._is_stale, failed, owners = False, self._failed, self._owners
        until = min(deadline, time.monotonic() + _LEARN_SECONDS)
        if owners:  # half of the time at most, so that the call itself can still succeed
            until = (until + time.monotonic()) / 2
        fault = StoreError("valkey cluster: it has no nodes")
        places = dict.fromkeys([*self._nodes, *self._seeds])
        for place in sorted(places, key=lambda each: each == failed):
            try:
                with self._node_at(place) as node:
                    # Half of what is left, so that one that hangs leaves time to ask another.
                    return self._take(node, (until + time.monotonic()) / 2)
            except StoreError as error:
                fault = error
        if not owners:
            self._is_stale = True
            raise fault
        return owners

    def _take(self, asked: ValkeyNode, deadline: float) -> list[ValkeyNode | None]:
        """Learn what a node answers. Raises StoreError."""
        (reply,) = asked.ask([command("CLUSTER", "SLOTS", room=_SLOTS_ROOM)], deadline)
        if isinstance(reply, ErrorReply):
            raise StoreError(f"valkey server {asked}: it answered {reply}")
        nodes: dict[Place, ValkeyNode] = {}
        owners: list[ValkeyNode | None] = [None] * _NUM_SLOTS
        left = _NUM_SLOTS
        for each in reply if isinstance(reply, list) else [reply]:
            match each:
                case [int(first), int(last), [host, int(port), *_], *_] if (
                    0 <= first <= last < _NUM_SLOTS and (host is None or isinstance(host, bytes))
                ):
                    left -= last - first + 1
                    if left < 0:
                        _refuse(asked)
                    place = _place((host or b"").decode("utf-8", "replace"), port, asked)
                    if place not in nodes:
                        nodes[place] = self._nodes.get(place) or self._new_node(*place)
                    owners[first : last + 1] = [nodes[place]] * (last - first + 1)
                case _:
                    _refuse(asked)
        former, self._nodes, self._owners = self._nodes, nodes, owners
        for node in set(former.values()) - set(nodes.values()):
            node.close()
        if self._closed:  # meanwhile
            self.close()
        return owners


def _place(host: str, port: int, asked: ValkeyNode) -> Place:
    """Where a node says that another one is. One that does not know its name leaves it out: it is
    the one that was used. Raises StoreError."""
    if not 0 < port < 1 << 16 or len(host) > _MAX_HOST or not host.isprintable():
        _refuse(asked)
    return (asked.host if host in ("", "?") else host, port)


def _refuse(node: ValkeyNode) -> NoReturn:
    raise StoreError(f"valkey server {node}: what it says of its cluster makes no sense")


def _slot_of(name: str) -> int:
    """Of a name without braces."""
    return binascii.crc_hqx(name.encode(), 0) % _NUM_SLOTS
