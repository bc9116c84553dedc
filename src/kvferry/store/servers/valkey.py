"""Values as strings on a Valkey or Redis server, or a cluster of them: `valkey:` and `redis:` URLs.

A value is a string under one key. It appears by SET NX (by SET, if it replaces another one), and
goes by UNLINK, expiry or the server's eviction, so kvferry needs no quota. Names share no hash tag,
so a cluster spreads them.

kvferry has its own client, which must bound each reply before taking memory for it, and each whole
call by its deadline. `resp.py` reads replies, `valkey_nodes.py` connects.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.network import call_ends
from kvferry.store.base import Buffer, PutResult
from kvferry.store.kind import Opening, StoreKind, StoreUrl, refuse_relative
from kvferry.store.servers.remote import RemoteClient, RemoteStore, open_remote
from kvferry.store.servers.resp import Command, ErrorReply, code_of, command
from kvferry.store.servers.valkey_nodes import Login, ValkeyCluster, ValkeyNode, make_tls

__all__ = ["DEFAULT_PORT", "Login", "ValkeyClient", "make_tls"]

DEFAULT_PORT = 6379
_LIST_SECONDS = 600.0
"""Longest time of a list, also of one without a deadline."""
_FACTS_SECONDS = 5.0
_PAGE_NAMES = 500
"""Names asked for at once. A server may send more while it resizes its table."""
_OTHER_TYPE_BYTES = 1
"""Size reported for a list or a hash under the name of a value. No record is so small: a reader
takes it for a damaged one and discards it, which frees the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions:
    """Options of `valkey:`, `valkeys:`, `redis:` and `rediss:` URLs. User and password may stand in
    the URL instead, but engines log their command line and configuration. They log no file's
    content.

    Attributes:
        cluster: whether the hosts are nodes of a cluster.
        username: user at the server.
        password_file: file whose first line is the password; read again at every connect.
        ca_file: PEM file of those who sign the servers' certificates; the system's if left out.
        cert_file: PEM file of a certificate to show to the servers.
        key_file: PEM file of that certificate's key, unless `cert_file` holds it.
    """

    cluster: bool = False
    username: str = ""
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        refuse_relative(
            password_file=self.password_file,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
        )


class ValkeyClient(RemoteClient):
    """A client of one Valkey or Redis server (6.2 or newer), or a cluster of them.

    Starts no thread, except while it looks up a host name. Each call takes a connection of its own,
    so calls of several threads do not wait for each other. After a server was away, the next call
    connects to it again. Works on both sides of a fork.

    Args:
        addresses: the server, or any nodes of a cluster, tried in this order.
        tls: what `make_tls` returns; None for connections in clear.

    Raises:
        ConfigError: no address, several of them without a cluster, or a password file that cannot
            be read.
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
            login.get_credentials()
        except StoreError as error:
            raise ConfigError(str(error), error.fault.kind) from None

        def new_node(host: str, port: int) -> ValkeyNode:
            return ValkeyNode(host, port, login, tls)

        self._server: ValkeyNode | ValkeyCluster = (
            ValkeyCluster(addresses, new_node) if cluster else new_node(*addresses[0])
        )
        self._closed = False

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        wanted = [(offset, view.cast("B")) for offset, view in ranges if view.nbytes]
        commands = [
            command("GETRANGE", name, offset, offset + view.nbytes - 1, into=view)
            for offset, view in wanted
        ]
        # Last, so that a value that went while its ranges were read counts as absent.
        commands += [command("STRLEN", name), command("EXISTS", name)]
        *pieces, last, exists = self._ask(commands, deadline)
        if code_of(last) == "WRONGTYPE":
            return _OTHER_TYPE_BYTES
        size = self._number(last, "read", name)
        for (offset, view), piece in zip(wanted, pieces, strict=True):
            if not isinstance(piece, memoryview):
                self._refuse(piece, "read", name)
            if piece.nbytes != max(min(view.nbytes, size - offset), 0):
                return None  # the value was replaced between two commands
        return size if self._number(exists, "read", name) else None

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        condition = () if replaces else ("NX",)
        (reply,) = self._ask([command("SET", name, buffers, *condition)], deadline)
        if code_of(reply) == "OOM":
            return PutResult.NO_SPACE
        if reply is not None and reply != b"OK":
            self._refuse(reply, "put", name)
        return PutResult.STORED if reply else PutResult.EXISTS

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        """See `RemoteClient.exists`. A key that this user may not read is not there, but if the
        server refuses all, that is an error."""
        replies = self._ask([command("EXISTS", name) for name in names], deadline)
        if any(isinstance(reply, int) for reply in replies):
            replies = [0 if code_of(reply) == "NOPERM" else reply for reply in replies]
        return [
            self._number(reply, "exists", name) > 0
            for name, reply in zip(names, replies, strict=True)
        ]

    def delete(self, name: str, deadline: float) -> bool:
        (reply,) = self._ask([command("UNLINK", name)], deadline)
        return self._number(reply, "delete", name) > 0

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        """See `RemoteClient.scan`. A value may come twice while the server resizes its table. The
        last use is unknown where the server evicts by frequency (LFU)."""
        until = min(deadline, time.monotonic() + _LIST_SECONDS)
        for node in self._open().nodes(call_ends(until)):
            for names in self._pages(node, prefix, until):
                yield from _describe(node, names, prefix, call_ends(until))

    def _pages(self, node: ValkeyNode, prefix: str, until: float) -> Iterator[list[object]]:
        """Yield the names that a server lists, page by page."""
        # Escaped, characters of the pattern language stand for themselves.
        pattern = re.sub(r"([\\*?\[\]^])", r"\\\1", prefix) + "*"
        cursor = b"0"
        while True:
            self._open()
            words = "SCAN", cursor, "MATCH", pattern, "COUNT", _PAGE_NAMES
            (reply,) = node.ask([command(*words)], call_ends(until))
            match reply:
                case [bytes(cursor), list(names)] if cursor.isdigit() and len(cursor) <= 20:
                    yield names
                case _:
                    self._refuse(reply, "scan", prefix)
            if cursor == b"0":
                return

    def facts(self) -> dict[str, int | bool | None]:
        """See `Store.facts`: the least `maxmemory` of the nodes, in bytes (0: none), and whether
        all of them evict keys that do not expire. Empty if this user may not ask."""
        until = call_ends(time.monotonic() + _FACTS_SECONDS)
        limits, evict = [], True
        for node in self._open().nodes(until):
            (reply,) = node.ask([command("INFO", "memory")], until)
            text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
            found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
            if not found.get("maxmemory", "").isdecimal() or "maxmemory_policy" not in found:
                return {}
            limits.append(int(found["maxmemory"]))
            evict &= found["maxmemory_policy"].startswith("allkeys-")
        return {"maxmemory": min(limits), "evicts_all_keys": evict} if limits else {}

    def close(self) -> None:
        self._closed = True
        self._server.close()

    def _open(self) -> ValkeyNode | ValkeyCluster:
        if self._closed:
            raise StoreError(FaultKind.CLOSED, "valkey: the store is closed")
        return self._server

    def _ask(self, commands: Sequence[Command], deadline: float) -> list[object]:
        """Return the replies, also `ErrorReply`s, after one round trip to each node."""
        if any("{" in str(each.words[1]) for each in commands):
            said = "valkey: a name holds a brace, which decides the place in a cluster"
            raise StoreError(FaultKind.UNUSABLE, said)
        server = self._open()
        if not commands:
            return []
        replies = server.ask(commands, call_ends(deadline))
        is_elsewhere = any(code_of(reply) in ("MOVED", "ASK") for reply in replies)
        if isinstance(server, ValkeyNode) and is_elsewhere:
            said = f"valkey server {server}: it is a node of a cluster; add ?cluster=true"
            raise StoreError(FaultKind.CLUSTER, said)
        return replies

    def _number(self, reply: object, what: str, name: str) -> int:
        if not isinstance(reply, int) or reply < 0:
            self._refuse(reply, what, name)
        return reply

    def _refuse(self, reply: object, what: str, name: str) -> NoReturn:
        if not isinstance(reply, ErrorReply):
            said = f"valkey: {what} of {name!r}: a reply that makes no sense"
            raise StoreError(FaultKind.PROTOCOL, said)
        self._server.refresh()  # the server may have become a replica
        raise StoreError(reply.kind, f"valkey: {what} of {name!r} refused: {reply}")


def _describe(
    node: ValkeyNode, keys: list[object], prefix: str, deadline: float
) -> list[tuple[str, int, float]]:
    """Return name, size and last use of the values that a server listed."""
    texts = [key.decode("utf-8", "replace") for key in keys if isinstance(key, bytes)]
    names = list(dict.fromkeys(text for text in texts if text.startswith(prefix)))
    if not names:
        return []
    # STRLEN counts as a use, so the last use is asked for first. Where the server knows NO-TOUCH
    # (Valkey, Redis 7.2), STRLEN does not count.
    commands = [command("CLIENT", "NO-TOUCH", "ON")]
    commands += [command("OBJECT", "IDLETIME", name) for name in names]
    commands += [command("STRLEN", name) for name in names]
    _, *replies, _ = node.ask([*commands, command("CLIENT", "NO-TOUCH", "OFF")], deadline)
    idles, sizes = replies[: len(names)], replies[len(names) :]
    now, found = time.time(), []
    for name, reply, idle in zip(names, sizes, idles, strict=True):
        size = _OTHER_TYPE_BYTES if code_of(reply) == "WRONGTYPE" else reply
        if isinstance(size, int) and size > 0:  # else it went, or is no value of kvferry
            found.append((name, size, now - idle if isinstance(idle, int) else 0.0))
    return found


def _open_url(url: StoreUrl, options: ValkeyOptions, opening: Opening) -> RemoteStore:
    is_tls = url.scheme in ("valkeys", "rediss")
    files = (options.ca_file, options.cert_file, options.key_file)
    try:
        if "{" in url.path or "}" in url.path:
            raise ConfigError("the prefix holds a brace, which would decide the place in a cluster")
        if url.password and options.password_file is not None:
            raise ConfigError("a password in the URL and password_file; give one of them")
        if any(files) and not is_tls:
            raise ConfigError(f"TLS files need a TLS URL; write {url.scheme}s://")
        client = ValkeyClient(
            [(host, port or DEFAULT_PORT) for host, port in url.hosts],
            cluster=options.cluster,
            login=Login(options.username or url.username, url.password, options.password_file),
            tls=make_tls(*files) if is_tls else None,
        )
    except ConfigError as error:
        raise ConfigError(f"{url.where}: {error}", error.kind) from None
    return open_remote(url, client, opening)


KIND = StoreKind(
    options=ValkeyOptions,
    open=_open_url,
    hosts="server; write {scheme}://host:6379/prefix, and escape /, ?, @ and : in a password as "
    "%2F, %3F, %40 and %3A",
    default_port=DEFAULT_PORT,
    aliases={"redis": "valkey", "rediss": "valkeys"},
)
