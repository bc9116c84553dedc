"""Connections to one Valkey or Redis server, with TLS and login, and to the servers of a cluster.

A cluster maps each name to one of 16384 hash slots, and each slot to a node. `valkey` asks them.
"""

from __future__ import annotations

import binascii
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, NoReturn

from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.network import Endpoint, load_pem
from kvferry.store.servers.resp import Command, Connection, ErrorReply, code_of, command

_NUM_SLOTS = 16384
_LEARN_SECONDS = 2.0
"""Longest time to learn a cluster's nodes."""
_MAX_MOVES = 5
"""Most redirects that a command follows, in case its slot moves on and on."""
_MAX_HOST = 255
"""Characters of a host's name."""

Place = tuple[str, int]


class Login(NamedTuple):
    """User and password of a server. `repr` does not show them."""

    username: str = ""
    password: str = ""
    password_file: str | None = None
    """Used instead of `password`: its first line is the password, read at every connect."""

    def get_credentials(self) -> tuple[str, ...]:
        """Return the arguments of AUTH: user, if there is one, and password; none for no login.
        Raises StoreError for a file that cannot be read."""
        password = self.password
        if self.password_file is not None:
            try:
                lines = Path(self.password_file).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                # The name is not shown: someone may have given the password itself.
                raise StoreError(FaultKind.LOGIN, f"password_file: {reason}") from None
            password = lines[0] if lines else ""
        if self.username:
            return (self.username, password)
        return (password,) if password else ()

    def __repr__(self) -> str:
        return "Login(...)"


class ValkeyNode(Endpoint[Connection]):
    """A server."""

    what = "valkey server"

    def __init__(self, host: str, port: int, login: Login, tls: ssl.SSLContext | None) -> None:
        super().__init__(host, port, tls, Connection)
        self._login = login

    def ask(self, commands: Sequence[Command], deadline: float) -> list[object]:
        """Return replies as `Connection.ask` does. Raises StoreError for all that fails."""
        with self.connection(deadline) as connection:
            return connection.ask(commands, deadline)

    def nodes(self, deadline: float) -> list[ValkeyNode]:
        """Return this server; see `ValkeyCluster.nodes`."""
        return [self]

    def _log_in(self, connection: Connection, deadline: float) -> None:
        """Log in, and name the connection. To the name, a server that wants a password and got none
        says so. To a large value, it would only close the connection."""
        credentials = self._login.get_credentials()
        if credentials:
            _say(connection, command("AUTH", *credentials), deadline, is_login=True)
        naming = command("CLIENT", "SETNAME", "kvferry")
        _say(connection, naming, deadline, is_login=bool(credentials))


def _say(connection: Connection, asked: Command, deadline: float, *, is_login: bool) -> None:
    """Send a command that connects. Raises StoreError if the server refuses it."""
    (reply,) = connection.ask([asked], deadline)
    code = code_of(reply)
    if reply == b"OK" or (asked.words[0] == "CLIENT" and code == "NOPERM"):
        return  # a user with rights to keys only cannot name a connection
    if not isinstance(reply, ErrorReply):
        raise StoreError(FaultKind.PROTOCOL, "sent an invalid reply while connecting")
    if is_login:
        # Show the code only: a server that does not know AUTH repeats its arguments.
        said = f"refused the login ({code}); check username and password"
        raise StoreError(FaultKind.LOGIN, said)
    hint = "; give username and password_file" if code == "NOAUTH" else ""
    raise StoreError(reply.kind, f"refused the connection: {reply}{hint}")


def make_tls(
    ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
) -> ssl.SSLContext:
    """Return the `tls` of a `ValkeyClient`: it checks the server's certificate and name. Raises
    ConfigError for a file (see `ValkeyOptions`) that is absent, no usable PEM, or a lone key."""
    if key_file is not None and cert_file is None:
        raise ConfigError("key_file is given without cert_file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if ca_file is None:
        context.load_default_certs()
    load_pem(context, cert_file, key_file, ca_file)
    return context


class ValkeyCluster:
    """The nodes of a cluster that hold slots. Learnt from a known node, or else from the `seeds`,
    and again when a node failed or a slot has moved. Thread-safe without a lock: threads that learn
    at the same time learn the same."""

    def __init__(self, seeds: Sequence[Place], new_node: Callable[[str, int], ValkeyNode]) -> None:
        self._new_node = new_node
        self._seeds = list(seeds)
        self._nodes: dict[Place, ValkeyNode] = {}
        # The node of each slot; empty until learnt.
        self._owners: list[ValkeyNode | None] = []
        self._is_stale = True
        self._failed: Place | None = None
        self._closed = False

    def ask(self, commands: Sequence[Command], deadline: float) -> list[object]:
        """Return replies to commands whose second words are names: a round trip to each node."""
        owners = self._learnt(deadline)
        groups: dict[ValkeyNode, list[int]] = {}
        for number, each in enumerate(commands):
            node = owners[_slot_of(str(each.words[1]))]
            if node is None:
                self._is_stale = True
                said = "valkey cluster: no node has the slot of a name"
                raise StoreError(FaultKind.CLUSTER, said)
            groups.setdefault(node, []).append(number)
        replies: list[object] = [None] * len(commands)
        for node, numbers in groups.items():
            found = self._ask(node, [commands[number] for number in numbers], deadline)
            for number, reply in zip(numbers, found, strict=True):
                replies[number] = self._follow(node, commands[number], reply, deadline)
        return replies

    def nodes(self, deadline: float) -> list[ValkeyNode]:
        """Learn and return the nodes that hold slots now."""
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
        """Context of a node. One that is not known yet is closed at its end, not kept: servers may
        name as many as they like."""
        known = self._nodes.get(place)
        node = known or self._new_node(*place)
        try:
            yield node
        finally:
            if known is None:
                node.leave()

    def _follow(self, node: ValkeyNode, asked: Command, reply: object, deadline: float) -> object:
        """Follow redirects to the nodes that a slot has moved to; return the last reply."""
        for _ in range(_MAX_MOVES):
            if not isinstance(reply, ErrorReply) or reply.code not in ("MOVED", "ASK"):
                break
            self._is_stale = True
            named, _, port = reply.text.rpartition(" ")[2].rpartition(":")
            is_number = port.isascii() and port.isdigit() and len(port) < 6
            with self._node_at(_place(named, int(port) if is_number else 0, node)) as other:
                # A node that owns the slot accepts ASKING, too.
                _, reply = self._ask(other, [command("ASKING"), asked], deadline)
                node = other
        return reply

    def _learnt(self, deadline: float) -> list[ValkeyNode | None]:
        """Return the owner of each slot. Learn them if stale; keep the old ones if none answers."""
        if self._owners and not self._is_stale:
            return self._owners
        # Meanwhile other threads go on with the old owners.
        self._is_stale, failed, owners = False, self._failed, self._owners
        until = min(deadline, time.monotonic() + _LEARN_SECONDS)
        if owners:  # at most half of the time, so that the call itself can still succeed
            until = (until + time.monotonic()) / 2
        fault = StoreError(FaultKind.CLUSTER, "valkey cluster: it has no nodes")
        places = dict.fromkeys([*self._nodes, *self._seeds])
        for place in sorted(places, key=lambda each: each == failed):
            try:
                with self._node_at(place) as node:
                    # At most half of what is left: a node that hangs leaves time to ask another.
                    return self._learn_from(node, (until + time.monotonic()) / 2)
            except StoreError as error:
                fault = error
        if not owners:
            self._is_stale = True
            raise fault
        return owners

    def _learn_from(self, asked: ValkeyNode, deadline: float) -> list[ValkeyNode | None]:
        """Learn nodes and slots from one node's answer. Raises StoreError."""
        (reply,) = asked.ask([command("CLUSTER", "SLOTS")], deadline)
        if isinstance(reply, ErrorReply):
            # Of a server that is no cluster, no code says so.
            kind = FaultKind.CLUSTER if reply.kind is FaultKind.REFUSED else reply.kind
            raise StoreError(kind, f"valkey server {asked}: it answered {reply}")
        nodes: dict[Place, ValkeyNode] = {}
        owners: list[ValkeyNode | None] = [None] * _NUM_SLOTS
        for each in reply if isinstance(reply, list) else [reply]:
            match each:
                case [int(first), int(last), [host, int(port), *_], *_] if (
                    0 <= first <= last < _NUM_SLOTS and (host is None or isinstance(host, bytes))
                ):
                    place = _place((host or b"").decode("utf-8", "replace"), port, asked)
                    if place not in nodes:
                        nodes[place] = self._nodes.get(place) or self._new_node(*place)
                    owners[first : last + 1] = [nodes[place]] * (last - first + 1)
                case _:
                    _refuse(asked)
        former, self._nodes, self._owners = self._nodes, nodes, owners
        for node in set(former.values()) - set(nodes.values()):
            node.leave()
        if self._closed:  # meanwhile
            self.close()
        return owners


def _place(host: str, port: int, asked: ValkeyNode) -> Place:
    """Return the place of a node as the node `asked` gives it. A node that does not know its own
    name leaves it out: then its host is that of `asked`. Raises StoreError for nonsense."""
    if not 0 < port < 1 << 16 or len(host) > _MAX_HOST or not host.isprintable():
        _refuse(asked)
    return (asked.host if host in ("", "?") else host, port)


def _refuse(node: ValkeyNode) -> NoReturn:
    said = f"valkey server {node}: what it says of its cluster makes no sense"
    raise StoreError(FaultKind.PROTOCOL, said)


def _slot_of(name: str) -> int:
    """Return the hash slot of a name without braces."""
    return binascii.crc_hqx(name.encode(), 0) % _NUM_SLOTS
