"""What one kind of store brings: its schemes' options, what their URLs name, and how one is opened.

A module that brings a `StoreKind` as `KIND` and has a line in `kvferry.store.url` adds a store.
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
from kvferry.store.base import Store

# A path, in which an @ separates nothing.
_LOCAL = re.compile(r"/(?!/)|file:(?:///|/(?!/))|(?:file|memory):(?!/)[^@:]*$", re.IGNORECASE)
HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", re.ASCII)
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_ENDPOINT = re.compile(
    r"([a-z]+)://([^/?#@]*@)?([^/?#@]+)(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:/-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerBounds:
    """Waits and sizes of a store on a server.

    Attributes:
        call_seconds: deadline of calls that have none.
        probe_seconds: timeout of a question, longer than a look-up waits: a late answer serves the
            next look-up.
        describe_seconds: an engine's start waits so long for the description of its namespace to
            be stored.
        delete_seconds: timeout of a delete.
        check_seconds: how long the opening of a store waits to hear that its bucket is wrong.
        max_text_bytes: a longer value is no description of ours.
        max_listed: a longer listing is taken for one that has no end.
        max_remembered: names that a listing remembers, to find those that come twice.
        max_repeats: a server may list a name twice. When most of so many were listed before, its
            listing goes in a circle.
    """

    call_seconds: float = 30.0
    probe_seconds: float = 1.0
    describe_seconds: float = 2.0
    delete_seconds: float = 2.0
    check_seconds: float = 2.0
    max_text_bytes: int = 1 << 20
    max_listed: int = 1 << 22
    max_remembered: int = 1 << 16
    max_repeats: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a store is opened, apart from its URL; see also `open_store`.

    Attributes:
        value_bytes: size of every value; a `put` to a server replaces one of another size. None:
            sizes differ.
        may_create: False where a directory must be a store already.
        bounds: waits and sizes where it is on a server; tests change them.
    """

    observer: Observer = field(default_factory=Observer)
    multi_process: bool = False
    index: bool = True
    namespace: bytes = bytes(32)
    value_bytes: int | None = None
    may_create: bool = True
    bounds: ServerBounds = ServerBounds()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreKind:
    """One kind of store.

    Attributes:
        options: dataclass of what may stand behind the ? of a URL; `max_bytes` is a quota.
        open: opens the store of a URL with these options; raises as `open_store`.
        hosts: of servers: what a URL has to name and how it is written, for messages; "{scheme}"
            stands for the scheme. Empty where a store is on this machine.
        names_bucket: what a URL names in place of a host is no host, but a bucket.
        default_port: of a server whose URL names none.
        aliases: schemes that name the same place as another.
        check_path: raises ConfigError for a path that cannot be: gets how the message begins, the
            path as it was written, and without escapes.
        is_private: every opening is a store of its own.
    """

    options: type[Any]
    open: Callable[[StoreUrl, Any, Opening], Store]
    hosts: str = ""
    names_bucket: bool = False
    default_port: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    check_path: Callable[[str, str, str], None] = lambda _where, _raw, _path: None
    is_private: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """A store URL taken apart. `str` is what messages and logs show of it: scheme, hosts, path.

    Attributes:
        scheme: one of `MODULES` of `kvferry.store.url`.
        path: for file, the absolute directory; for memory, the name; for servers, what the names of
            all values begin with, without slashes around it. The last two may be empty.
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
        """How messages begin that are about it."""
        return f"store URL {str(self)!r}"

    def __str__(self) -> str:
        # A path that is not UTF-8 is shown as the bytes it is, though no URL leads to it.
        path = quote(self.path, errors="surrogateescape")
        hosts = ",".join(join_host(host, port) for host, port in self.hosts)
        slash = "/" if self.hosts and path else ""
        return f"{self.scheme}://{hosts}{slash}{path}"


def shown_url(url: str) -> str:
    """Of a store URL as it was given, which may be any text, what messages and logs show: scheme,
    hosts and path. Hides too much rather than too little: a password whose special characters were
    not escaped moves the bounds of the parts, and what is no host may be a piece of one.

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
    # What stands for options without a ? may be a secret, too.
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
    """Check an option or a variable that is the URL of a server: a scheme, a host, and perhaps a
    port and a path. Client libraries panic at others, or show them.

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
            f"{name!r} is not the URL of a server, without user and query; write {name}={example}"
        )


def refuse_relative(**files: str | None) -> None:
    """Messages name files: only what is a path for sure."""
    for option, file in files.items():
        if file is not None and not file.startswith("/"):
            raise ConfigError(f"option {option!r} is not an absolute path; begin it with /")


# Regions and devices: what no header and no file system takes otherwise.
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", re.ASCII)
