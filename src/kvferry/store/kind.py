"""The description of a kind of store: the options of its URLs, what they name, how to open it.

Each store's module has a `StoreKind` named `KIND`, which `kvferry.store.url` uses to parse URLs and
to open stores, when an engine or a command starts. `kvferry.store.kinds` finds it by its scheme.
Nothing outside these modules knows a scheme: what differs is asked of the kind. Helpers check hosts
and endpoints, and mask a URL for messages.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from kvferry.errors import ConfigError
from kvferry.network import join_host
from kvferry.observe import Observer
from kvferry.store.base import RecordBytes, Store
from kvferry.store.faults import Calls

# URLs of local stores. In their paths an @ is an ordinary character.
_LOCAL = re.compile(r"/(?!/)|file:(?:///|/(?!/))|(?:file|memory):(?!/)[^@:]*$", re.IGNORECASE)
HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", re.ASCII)
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_ENDPOINT = re.compile(
    r"([a-z]+)://([^/?#@]*@)?([^/?#@]+)(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:/-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBounds:
    """Waits and sizes of a store on a server.

    Attributes:
        call_seconds: longest time of a read or a put, also of one without a deadline.
        probe_seconds: timeout of a probe, which asks which keys exist. It is longer than a look-up
            waits, as a late answer serves the next look-up.
        quick_seconds: longest time of a delete, of storing a namespace's description, and of the
            check of a bucket that is opened. An engine's start waits for the latter two.
        close_seconds: how long a close waits for that of the client.
        max_text_bytes: longest description of a namespace; a longer one is read as empty text.
    """

    call_seconds: float = 30.0
    probe_seconds: float = 1.0
    quick_seconds: float = 2.0
    close_seconds: float = 10.0
    max_text_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What opening a store takes besides its URL. `open_store` explains the other attributes.

    Attributes:
        record_bytes: size of the largest value, None if those of one key may differ in size. Else a
            `put` to a server replaces a value of another size.
        may_create: False where the store must be there already: commands that look at it make none.
        bounds: waits and sizes of a store on a server; tests change them.
        calls: where the calls of the store's author are noted, from the start of the opening on.
    """

    observer: Observer = field(default_factory=Observer)
    multi_process: bool = False
    index: bool = True
    namespace: bytes = bytes(32)
    record_bytes: RecordBytes | None = None
    may_create: bool = True
    bounds: ServerBounds = ServerBounds()
    calls: Calls = field(default_factory=Calls, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """One kind of store.

    Attributes:
        options: dataclass of the options after the ? of a URL; a field `max_bytes` is the quota.
        open: opens the store of a URL with these options; raises as `open_store`. Of an installed
            package, returns a `RemoteStore`.
        hosts: for messages of server stores: which host a URL has to name, and an example, with
            "{scheme}" for the scheme. Empty for stores on this machine.
        names_bucket: whether a URL names a bucket where others name a host.
        default_port: port of a server whose URL has none.
        aliases: by scheme, another scheme that names the same place.
        check_path: raises ConfigError for a path that a local store cannot have. It gets the start
            of the message, the path as it was written, and the path with its escapes decoded.
        is_private: whether each opening makes another store, even with an equal URL, which ends
            with its process.
        is_peer: whether a URL names other engines, whose memory is read: each host is a store, so
            `open` gets one host. It lists nothing, takes nothing, and ends with its engine.
        is_directory: whether it is a directory of records, whose options say that a command
            changes nothing of it (`create`, `read_only`, `index_file`), and whose records are
            files.
    """

    options: type[Any]
    open: Callable[[StoreUrl, Any, Opening], Store]
    hosts: str = ""
    names_bucket: bool = False
    default_port: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    check_path: Callable[[str, str, str], None] = lambda _where, _raw, _path: None
    is_private: bool = False
    is_peer: bool = False
    is_directory: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """A parsed store URL. Messages and logs show its `str`: scheme, hosts and path.

    Attributes:
        scheme: one of `kvferry.store.kinds.schemes`.
        path: for file, the absolute directory; for memory, the name; for servers, the prefix of
            all names, without slashes around it. Name and prefix may be empty.
        options: what stood after the `?`, still text.
        hosts: names or addresses of servers, with their ports (None: the usual one).
    """

    scheme: str
    path: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    hosts: tuple[tuple[str, int | None], ...] = ()
    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    @property
    def where(self) -> str:
        """The start of messages about this URL."""
        return f"store URL {str(self)!r}"

    def __str__(self) -> str:
        # No URL leads to a path that is not UTF-8, but a directory may have one: show its bytes.
        path = quote(self.path, errors="surrogateescape")
        hosts = ",".join(join_host(host, port) for host, port in self.hosts)
        slash = "/" if self.hosts and path else ""
        return f"{self.scheme}://{hosts}{slash}{path}"


def shown_url(url: str) -> str:
    """Return what messages and logs may show of a store URL, or any text: scheme, hosts and path.
    Hides what is in doubt: special characters of a password that were not escaped move the bounds
    of the parts, so that text that is not a valid host may be a piece of the password.

    >>> shown_url("rediss://user:pass/word@host/kv?token=x&cluster=true")
    'rediss://***@host/kv'
    """
    head = re.split(r"[?#]", url, maxsplit=1)[0]
    if _LOCAL.match(url):
        return head
    userinfo, at, rest = head.rpartition("@")
    scheme, separator, authority = (userinfo if at else head).partition("://")
    if not separator:
        scheme, authority = "", scheme
    hosts = (rest if at else authority).partition("/")[0]
    is_clear = all(HOST.fullmatch(host) for host in hosts.split(",")) or hosts in ("", "~")
    is_clear = is_clear or not (separator or ":" in head)
    if not is_clear or "@" in url[len(head) :]:
        return f"{scheme}{separator}***"
    # Options written without a ? may hold secrets, too.
    return re.split(r"[&;=]", f"{scheme}{separator}***@{rest}" if at else head, maxsplit=1)[0]


def is_host(host: str) -> bool:
    """Whether `host` can be the name or the address of a machine."""
    labels = host.removesuffix(".").split(".")
    if ":" in host or labels[-1].isdigit():
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return False
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def check_endpoint(
    name: str,
    url: str,
    example: str,
    *,
    schemes: Sequence[str] = ("http", "https"),
    allows_login: bool = False,
) -> None:
    """Check an option or an environment variable that must be the URL of a server: a scheme, a
    host, and perhaps a port and a path. Client libraries panic at other texts, or show them.

    Args:
        allows_login: whether the URL may have user and password.

    Raises:
        ConfigError: it is something else. The message shows the `example` only.
    """
    match = _ENDPOINT.fullmatch(url)
    place = None if match is None else HOST.fullmatch(match[3])
    if (
        match is None
        or place is None
        or match[1] not in schemes
        or (match[2] and not allows_login)
        or not is_host(place[1].strip("[]"))
        or not 0 < int(place[2] or 1) < 65536
    ):
        raise ConfigError(
            f"{name!r} must be the URL of a server without user and query; write {name}={example}"
        )


def refuse_relative(**files: str | None) -> None:
    """Raise ConfigError for a file option that is not an absolute path: messages name these files,
    and other text may be a secret."""
    for option, file in files.items():
        if file is not None and not file.startswith("/"):
            raise ConfigError(f"option {option!r} is not an absolute path; begin it with /")


# Names of regions and devices: safe in an HTTP header and as a file name.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", re.ASCII)
