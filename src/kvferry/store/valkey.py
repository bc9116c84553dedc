"""Values on a Valkey or Redis server, or a cluster of them, as plain strings.

A value is one string key: it appears by SET NX or by RENAMENX, and goes by UNLINK, expiry or the
server's eviction, which needs no quota of ours. Values that several ranks write together grow under
a hidden name in the hash slot of the value:

    <name>                                        a value; names hold no brace
    <name>.part-<32 hex digits>{<name>}           a session; goes by itself when it is left behind

Values of a namespace share no hash tag, so a cluster spreads them over all nodes.
"""

from __future__ import annotations

import binascii
import math
import re
import secrets
import ssl
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Buffer, PutResult
from kvferry.store.remote import RemoteClient
from kvferry.store.valkey_wire import (
    CALL_SECONDS,
    Address,
    Command,
    Connections,
    ErrorReply,
    Reply,
    pack,
    pack_with_value,
)

DEFAULT_PORT = 6379
_NUM_SLOTS = 16384
_SCAN_COUNT = 500
_MOST_REDIRECTS = 5
_SEED_SECONDS = 2.0
_SESSION_SECONDS = 600
"""A session whose ranks died is gone after this time."""
_SESSION = re.compile(r"([0-9a-f]{32})-(\d{1,12})-([^{}]+)", re.ASCII)

# Scripts, because SETRANGE would create the key of a session that is over, and transactions that
# WATCH it would fail whenever another rank writes its range.
_BEGIN = """if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
redis.call('SETRANGE', KEYS[1], ARGV[1] - 1, '\\0')
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1"""
_WRITE_AT = """if redis.call('STRLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
redis.call('SETRANGE', KEYS[1], ARGV[2], ARGV[3])
return 1"""
_COMMIT = """if redis.call('STRLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return -1 end
if redis.call('EXISTS', KEYS[2]) == 1 then redis.call('UNLINK', KEYS[1]) return 0 end
redis.call('SETRANGE', KEYS[1], 0, ARGV[2])
redis.call('PERSIST', KEYS[1])
redis.call('RENAME', KEYS[1], KEYS[2])
return 1"""


class Login(NamedTuple):
    """User and password of a server. Nothing shows it."""

    username: str = ""
    password: str = ""
    password_file: str | None = None
    """Its first line is the password, read at every connect; instead of `password`."""

    def read(self) -> tuple[str, str] | None:
        """User and password; None for no login.

        Raises:
            StoreError: the file cannot be read.
        """
        password = self.password
        if self.password_file is not None:
            try:
                lines = Path(self.password_file).read_text("utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "it is not text"
                raise StoreError(f"password_file {self.password_file!r}: {reason}") from None
            password = lines[0] if lines else ""
        return (self.username, password) if self.username or password else None

    def __repr__(self) -> str:
        return "Login(...)"


class ValkeyClient(RemoteClient):
    """One Valkey or Redis server (6.2 or newer), or a cluster of them.

    Makes no thread (but one that looks a host name up, while it does). A call takes a connection of
    its own, so calls of several threads do not wait for each other. Servers that were away are
    found again by the next call. Works on both sides of a fork.

    Args:
        addresses: the server; of a cluster, any of its nodes, tried in this order.
        cluster: spread over the nodes of a cluster.
        login: None if the server asks for none.
        tls: None for a connection in clear.

    Raises:
        ConfigError: hiredis is not installed, no address, several of them without a cluster, or a
            password file that cannot be read.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, int]],
        *,
        cluster: bool = False,
        login: Login | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not addresses or (len(addresses) > 1 and not cluster):
            raise ConfigError(
                f"{len(addresses)} servers; name one, or several nodes of a cluster with "
                "?cluster=true"
            )
        login = login if login is not None else Login()
        try:
            login.read()
        except StoreError as error:
            raise ConfigError(str(error)) from None
        self._connections = Connections(login.read, tls)
        self._cluster = cluster
        self._seeds = [Address(*each) for each in addresses]
        # Of each hash slot; empty until the first call. Replaced as a whole, never changed.
        self._nodes: list[Address] = [] if cluster else self._seeds * _NUM_SLOTS
        self._nodes_are_stale = False

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        views = [view.cast("B") for _, view in ranges]
        commands = [
            pack("GETRANGE", name, offset, offset + view.nbytes - 1)
            for (offset, _), view in zip(ranges, views, strict=True)
            if view.nbytes
        ]
        views = [view for view in views if view.nbytes]
        offsets = [offset for offset, view in ranges if view.nbytes]
        # The size comes last: a value that went while its ranges were read has none.
        commands.append(pack("STRLEN", name))
        *lengths, size = self._call(name, commands, deadline, views)
        size = self._number(size, "read", name)
        for offset, view, length in zip(offsets, views, lengths, strict=True):
            if self._number(length, "read", name) != max(min(view.nbytes, size - offset), 0):
                return None  # it went, and another one came, between two ranges
        return size or None

    def put(self, name: str, buffers: Sequence[Buffer], deadline: float) -> PutResult:
        command = pack_with_value(("SET", name), buffers, (b"NX",))
        (reply,) = self._call(name, [command], deadline)
        if _is_full(reply):
            return PutResult.NO_SPACE
        if isinstance(reply, ErrorReply):
            self._refuse(reply, "put", name)
        if reply not in (b"OK", None):
            raise StoreError(f"valkey: put of {name!r}: a reply that makes no sense")
        return PutResult.STORED if reply else PutResult.EXISTS

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        limit = _limit(deadline)
        groups: dict[Address, list[str]] = {}
        for name in names:
            groups.setdefault(self._node_of(name, limit), []).append(name)
        found: dict[str, bool] = {}
        for address, group in groups.items():
            replies = self._exchange(address, [pack("EXISTS", name) for name in group], limit)
            for name, reply in zip(group, replies, strict=True):
                if _redirect_of(reply) is not None:
                    (reply,) = self._call(name, [pack("EXISTS", name)], limit)  # noqa: PLW2901
                found[name] = self._number(reply, "exists", name) > 0
        return [found[name] for name in names]

    def delete(self, name: str, deadline: float) -> bool:
        (reply,) = self._call(name, [pack("UNLINK", name)], deadline)
        return self._number(reply, "delete", name) > 0

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        """As in the base class. A value may come twice while the server resizes its table. The last
        use is unknown where the server evicts by frequency (LFU)."""
        # Characters of the pattern language stand for themselves.
        pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", prefix) + "*"
        for address in dict.fromkeys(self._current_nodes(_limit(deadline))):
            cursor = "0"
            while True:
                command = pack("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT)
                (reply,) = self._exchange(address, [command], _limit(deadline))
                cursor, names = self._page(reply, prefix)
                yield from self._describe(address, names, _limit(deadline))
                if cursor == "0":
                    break

    def close(self) -> None:
        self._connections.close()

    # Values that ranks write together; see `SupportsShardedWrite`.

    def begin(self, name: str, num_bytes: int, deadline: float) -> str | PutResult:
        """Make the hidden value of a session, `num_bytes` of zeros. Returns the session's name, or
        EXISTS or NO_SPACE."""
        session = f"{secrets.token_hex(16)}-{num_bytes}-{name}"
        keys = (_part_of(session), name)
        command = pack("EVAL", _BEGIN, 2, *keys, num_bytes, _SESSION_SECONDS)
        (reply,) = self._call(name, [command], deadline)
        if _is_full(reply):
            return PutResult.NO_SPACE
        return session if self._number(reply, "begin", name) else PutResult.EXISTS

    def write_at(
        self, session: str, offset: int, buffers: Sequence[Buffer], deadline: float
    ) -> bool:
        """Write a range of a session that any process began. False if there is none, if the range
        leaves the value, or if the server is full."""
        match = _SESSION.fullmatch(session)
        num_bytes = sum(memoryview(each).nbytes for each in buffers)
        if match is None or not 0 <= offset <= int(match[2]) - num_bytes:
            return False
        words = ("EVAL", _WRITE_AT, 1, _part_of(session), int(match[2]), offset)
        command = pack_with_value(words, buffers or (b"",))
        (reply,) = self._call(match[3], [command], deadline)
        return not _is_full(reply) and self._number(reply, "write_at", match[3]) == 1

    def commit(self, session: str, head: Buffer, deadline: float) -> PutResult:
        """Write `head` at offset 0 and give the value its name. The session is over then, whatever
        the answer: FAILED if there is none."""
        match = _SESSION.fullmatch(session)
        if match is None or memoryview(head).nbytes > int(match[2]):
            self.abort(session, deadline)
            return PutResult.FAILED
        name = match[3]
        words = ("EVAL", _COMMIT, 2, _part_of(session), name, int(match[2]))
        (reply,) = self._call(name, [pack_with_value(words, [head])], deadline)
        if _is_full(reply):
            self.abort(session, deadline)
            return PutResult.NO_SPACE
        outcomes = {1: PutResult.STORED, 0: PutResult.EXISTS}
        return outcomes.get(self._number(reply, "commit", name), PutResult.FAILED)

    def abort(self, session: str, deadline: float) -> None:
        """Remove the hidden value; nothing happens for a session that is over."""
        match = _SESSION.fullmatch(session)
        if match is not None:
            self._call(match[3], [pack("UNLINK", _part_of(session))], deadline)

    # The way to the server.

    def _call(
        self,
        name: str,
        commands: Sequence[Command],
        deadline: float,
        views: Sequence[memoryview] = (),
    ) -> list[Reply]:
        """Replies to commands that concern one name, from the node that has it."""
        limit = _limit(deadline)
        address, is_asking = self._node_of(name, limit), False
        for _ in range(_MOST_REDIRECTS):
            replies = self._exchange(address, commands, limit, views, is_asking=is_asking)
            redirect = next(filter(None, map(_redirect_of, replies)), None)
            if redirect is None:
                return replies
            if not self._cluster:
                raise StoreError(
                    f"valkey server {address}: it is a node of a cluster; add ?cluster=true"
                )
            is_asking = redirect.code == "ASK"
            if not is_asking:
                self._nodes_are_stale = True
            address = _address_in(redirect, address)
        raise StoreError(f"valkey cluster: {name!r} was moved {_MOST_REDIRECTS} times in one call")

    def _exchange(
        self,
        address: Address,
        commands: Sequence[Command],
        limit: float,
        views: Sequence[memoryview] = (),
        *,
        is_asking: bool = False,
    ) -> list[Reply]:
        """One reply for each command, in one round trip. The first ones are copied into `views`,
        and replaced by their lengths."""
        if is_asking:  # concerns the next command only
            asking = pack("ASKING")
            commands = [each for command in commands for each in (asking, command)]
        replies: list[Reply] = []
        try:
            with self._connections.borrow(address, limit) as connection:
                connection.send(commands, limit)
                for number in range(len(commands)):
                    reply = connection.receive(limit)
                    if is_asking and number % 2 == 0:
                        continue
                    if len(replies) < len(views) and not isinstance(reply, ErrorReply):
                        reply = _copy(reply, views[len(replies)])
                    replies.append(reply)
        except StoreError:
            self._nodes_are_stale = self._cluster
            raise
        return replies

    def _node_of(self, name: str, limit: float) -> Address:
        if "{" in name:
            raise StoreError(f"valkey: {name!r} holds a brace, which only sessions may")
        return self._current_nodes(limit)[binascii.crc_hqx(name.encode(), 0) % _NUM_SLOTS]

    def _current_nodes(self, limit: float) -> list[Address]:
        # Threads that find the nodes stale together use the old ones but for one, which asks; the
        # first calls of all have to wait for an answer each.
        if self._nodes_are_stale or not self._nodes:
            self._learn_nodes(limit)
        return self._nodes

    def _learn_nodes(self, limit: float) -> None:
        """Ask any node of the cluster which node has which slot. Keeps the old answer if there is
        one and no node answers."""
        self._nodes_are_stale = False
        fault: StoreError | None = None
        known = list(dict.fromkeys([*self._nodes, *self._seeds]))
        for address in known:
            try:
                soon = min(limit, time.monotonic() + _SEED_SECONDS)
                with self._connections.borrow(address, soon) as connection:
                    connection.send([pack("CLUSTER", "SLOTS")], soon)
                    nodes = _nodes_in(connection.receive(soon), address)
            except StoreError as error:
                fault = error
                continue
            self._nodes = nodes
            return
        if not self._nodes:
            raise fault or StoreError("valkey cluster: no node")

    def _page(self, reply: Reply, prefix: str) -> tuple[str, list[str]]:
        """Cursor and names of values in a reply to SCAN."""
        if isinstance(reply, ErrorReply):
            self._refuse(reply, "scan", prefix)
        match reply:
            case [bytes(cursor), list(keys)]:
                names = [key.decode("utf-8", "replace") for key in keys if isinstance(key, bytes)]
                values = (name for name in names if name.startswith(prefix) and "{" not in name)
                return cursor.decode("ascii", "replace"), list(dict.fromkeys(values))
        raise StoreError(f"valkey: scan of {prefix!r}: a reply that makes no sense")

    def _describe(
        self, address: Address, names: Sequence[str], limit: float
    ) -> Iterator[tuple[str, int, float]]:
        commands = [
            pack(*words, name) for name in names for words in (("STRLEN",), ("OBJECT", "IDLETIME"))
        ]
        replies = self._exchange(address, commands, limit) if commands else []
        now = time.time()
        for name, size, idle in zip(names, replies[::2], replies[1::2], strict=True):
            if isinstance(size, int) and size > 0:  # else it went, or is none of ours
                yield name, size, now - idle if isinstance(idle, int) else 0.0

    def _number(self, reply: Reply, what: str, name: str) -> int:
        if isinstance(reply, ErrorReply):
            self._refuse(reply, what, name)
        if not isinstance(reply, int):
            raise StoreError(f"valkey: {what} of {name!r}: a reply that makes no sense")
        return reply

    def _refuse(self, reply: ErrorReply, what: str, name: str) -> NoReturn:
        if reply.code == "READONLY":
            # The server became a replica: its name may lead to the new primary.
            for address in dict.fromkeys(self._nodes):
                self._connections.forget(address)
        self._nodes_are_stale = self._cluster
        raise StoreError(f"valkey: {what} of {name!r} refused: {reply.for_people()}")


def make_tls(
    ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
) -> ssl.SSLContext:
    """What `ValkeyClient` takes as `tls`: checks the server's certificate and name.

    Args:
        ca_file: PEM file of those who sign servers; None for those that the system trusts.
        cert_file: PEM file of a certificate to show to the server, if it asks for one.
        key_file: PEM file of its key, unless that is in the same file.

    Raises:
        ConfigError: a file that is absent or holds something else.
    """
    if key_file is not None and cert_file is None:
        raise ConfigError("key_file is given without cert_file")
    shown = ca_file
    try:
        context = ssl.create_default_context(cafile=ca_file)
        shown = f"{cert_file} and {key_file}" if key_file is not None else cert_file
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:  # an SSLError is one
        reason = "holds no usable PEM" if isinstance(error, ssl.SSLError) else error.strerror
        raise ConfigError(f"{shown}: {reason}") from None
    return context


def _limit(deadline: float) -> float:
    return deadline if deadline < math.inf else time.monotonic() + CALL_SECONDS


def _part_of(session: str) -> str:
    """The hidden key of a session. It holds a brace, so it is never that of a value."""
    token, _, name = session.split("-", 2)
    return f"{name}.part-{token}{{{name}}}"


def _is_full(reply: Reply) -> bool:
    """Whether the server has no memory left. Redis 6 wraps the answer to a script in another."""
    return isinstance(reply, ErrorReply) and "OOM command not allowed" in str(reply)


def _copy(value: Reply, view: memoryview) -> int:
    if not isinstance(value, bytes):
        raise StoreError("a reply that makes no sense")
    if len(value) > view.nbytes:
        raise StoreError("more bytes than were asked for")
    view[: len(value)] = value
    return len(value)


def _redirect_of(reply: Reply) -> ErrorReply | None:
    is_redirect = isinstance(reply, ErrorReply) and reply.code in ("MOVED", "ASK")
    return reply if is_redirect else None  # type: ignore[return-value]


def _address_in(redirect: ErrorReply, asked: Address) -> Address:
    """The node that a MOVED or ASK names: `MOVED 3999 127.0.0.1:6381`; no host: the one asked."""
    words = str(redirect).split(" ")
    host, _, port = words[2].rpartition(":") if len(words) > 2 else ("", "", "")
    if not port.isdecimal():
        raise StoreError(f"valkey cluster: {redirect.for_people()}")
    return Address(host or asked.host, int(port))


def _nodes_in(reply: Reply, asked: Address) -> list[Address]:
    """The primary of each slot, by a reply to CLUSTER SLOTS."""
    if isinstance(reply, ErrorReply):
        raise StoreError(f"CLUSTER SLOTS refused: {reply.for_people()}")
    nodes: list[Address | None] = [None] * _NUM_SLOTS
    for entry in reply if isinstance(reply, list) else []:
        match entry:
            case [int(first), int(last), [host, int(port), *_], *_]:
                name = host.decode("utf-8", "replace") if isinstance(host, bytes) else ""
                # A node that does not know its own name leaves it out.
                address = Address(asked.host if name in ("", "?") else name, port)
                for slot in range(max(first, 0), min(last + 1, _NUM_SLOTS)):
                    nodes[slot] = address
    whole = [node for node in nodes if node is not None]
    if len(whole) < _NUM_SLOTS:
        raise StoreError(f"the cluster serves {len(whole)} of {_NUM_SLOTS} slots")
    return whole
