"""A cluster of Valkey or Redis servers: which of them has a name."""

from __future__ import annotations

import binascii
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvferry.errors import StoreError
from kvferry.store.resp import Command, ErrorReply, command
from kvferry.store.valkey_node import ValkeyNode

_NUM_SLOTS = 16384
_LEARN_SECONDS = 2.0
"""Limit of learning the nodes."""
_MAX_MOVES = 5
"""A name whose slot moves on and on is given up."""
_SLOTS_ROOM = 16 << 20
"""A cluster with each slot in a range of its own, and a replica of each, takes so much."""

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
        self._failed: ValkeyNode | None = None

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
        for node in list(self._nodes.values()):
            node.close()

    def _ask(self, node: ValkeyNode, commands: Sequence[Command], deadline: float) -> list[object]:
        try:
            return node.ask(commands, deadline)
        except StoreError:
            self._failed, self._is_stale = node, True
            raise

    def _follow(self, node: ValkeyNode, asked: Command, reply: object, deadline: float) -> object:
        """The reply to a command whose slot has moved, or is about to."""
        for _ in range(_MAX_MOVES):
            if not isinstance(reply, ErrorReply) or reply.code not in ("MOVED", "ASK"):
                break
            self._is_stale = True
            host, _, port = reply.text.rpartition(" ")[2].rpartition(":")
            if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 1 << 16):
                _refuse(node)
            node = self._node_at((host or node.host, int(port)))
            # A server that has the slot for good takes this, too.
            _, reply = self._ask(node, [command("ASKING"), asked], deadline)
        return reply

    def _node_at(self, place: Place) -> ValkeyNode:
        return self._nodes.get(place) or self._nodes.setdefault(place, self._new_node(*place))

    def _learnt(self, deadline: float) -> list[ValkeyNode | None]:
        """The owner of each slot. Keeps the old ones if no node answers."""
        if self._owners and not self._is_stale:
            return self._owners
        # Other threads go on with the old ones.
        self._is_stale, failed, owners = False, self._failed, self._owners
        until = min(deadline, time.monotonic() + _LEARN_SECONDS)
        if owners:  # half of the time at most, so that the call itself can still succeed
            until = (until + time.monotonic()) / 2
        nodes = [*self._nodes.values(), *map(self._node_at, self._seeds)]
        fault = StoreError("valkey cluster: it has no nodes")
        for node in sorted(dict.fromkeys(nodes), key=lambda each: each is failed):
            now = time.monotonic()
            try:
                # Half of what is left, so that one that hangs leaves time to ask another.
                (reply,) = node.ask(
                    [command("CLUSTER", "SLOTS", room=_SLOTS_ROOM)], now + (until - now) / 2
                )
                if isinstance(reply, ErrorReply):
                    raise StoreError(f"valkey server {node}: it answered {reply}")
                return self._take(node, reply)
            except StoreError as error:
                fault = error
        if not owners:
            self._is_stale = True
            raise fault
        return owners

    def _take(self, asked: ValkeyNode, reply: object) -> list[ValkeyNode | None]:
        """Learn what a node answered. Raises StoreError."""
        owners: list[ValkeyNode | None] = [None] * _NUM_SLOTS
        left = _NUM_SLOTS
        for each in reply if isinstance(reply, list) else [reply]:
            match each:
                case [int(first), int(last), [host, int(port), *_], *_] if (
                    0 <= first <= last < _NUM_SLOTS
                    and 0 < port < 1 << 16
                    and (host is None or isinstance(host, bytes))
                ):
                    left -= last - first + 1
                    if left < 0:
                        _refuse(asked)
                    # Where a node does not know its own name, it is the one that was used.
                    known = (host or b"?").decode("utf-8", "replace")
                    name = asked.host if known == "?" else known
                    owners[first : last + 1] = [self._node_at((name, port))] * (last - first + 1)
                case _:
                    _refuse(asked)
        used = {asked, *owners}
        for place, node in list(self._nodes.items()):
            if node not in used:
                self._nodes.pop(place, None)
                node.close()
        self._owners = owners
        return owners


def _refuse(node: ValkeyNode) -> NoReturn:
    raise StoreError(f"valkey server {node}: what it says of its cluster makes no sense")


def _slot_of(name: str) -> int:
    """Of a name without braces."""
    return binascii.crc_hqx(name.encode(), 0) % _NUM_SLOTS
