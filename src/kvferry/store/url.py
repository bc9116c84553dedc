"""Parses store URLs and opens stores, when an engine or a command starts. What differs by scheme is
in its `StoreKind`, which `kvferry.store.kinds` finds."""

from __future__ import annotations

import math
import posixpath
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import FunctionType
from urllib.parse import unquote

from kvferry.config import OPTION_NAME, build_config, format_size, unknown
from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.observe import Observer
from kvferry.store.base import Store, ValueCheck
from kvferry.store.faults import Calls, Faults, reason_of
from kvferry.store.kind import HOST, Opening, StoreKind, StoreUrl, is_host, shown_url
from kvferry.store.kinds import MODULES, find_kind, kind_of, schemes
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tier import Unopened
from kvferry.store.tiers.tiered import TieredStore

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)


def parse_store_url(url: str | StoreUrl) -> StoreUrl:
    """Parse a URL such as `file:///abs/path?max_bytes=10GiB`, `memory://name` or
    `valkey://user:password@host:6379/prefix`. Percent escapes are decoded (write %3F for ?, %23
    for #, %40 for @ and %2F for / where they do not separate). `read_options` checks the options.
    A parsed URL is returned as it is.

    Raises:
        ConfigError: not a string, no or an unknown scheme, a relative path, a host that is missing
            or must not be there, text that is not escaped, an option given twice or without value.
    """
    if isinstance(url, StoreUrl):
        return url
    if not isinstance(url, str):
        raise ConfigError(
            "a store URL is text such as file:///var/cache/kvferry, not a value of type "
            f"{type(url).__name__}"
        )
    where = f"store URL {shown_url(url)!r}"
    if not url.isprintable():
        raise ConfigError(f"{where} holds a character that cannot be printed; escape it as %XX")
    match = _SCHEME.fullmatch(url)
    if match is None:
        raise ConfigError(f"{where}: {_without_scheme(shown_url(url))}")
    scheme, rest = match[1].lower(), match[2]
    kind = find_kind(scheme)
    if kind is None:
        raise ConfigError(f"{where}: {unknown('scheme', match[1], schemes())}")
    if "#" in rest:
        raise ConfigError(f"{where}: a store URL has no fragment; write # as %23")
    raw_path, _, query = rest.partition("?")
    if kind.hosts:
        return _parse_server_url(where, scheme, kind, raw_path, query)
    path = _unquote(where, raw_path, repr(raw_path))
    if "\0" in path:
        raise ConfigError(f"{where}: a path cannot hold a zero byte")
    with _named(kind.check_path):
        kind.check_path(where, raw_path, path)
    return StoreUrl(scheme=scheme, path=path, options=_parse_options(where, query))


def _parse_server_url(where: str, scheme: str, kind: StoreKind, raw: str, query: str) -> StoreUrl:
    authority, _, raw_path = raw.partition("/")
    userinfo, _, raw_hosts = authority.rpartition("@")
    username, _, password = userinfo.partition(":")
    hosts = []
    for raw_host in raw_hosts.split(","):
        match = HOST.fullmatch(raw_host)
        port = 0 if match is None else int(match[2] or 1)
        is_place = match is not None and (kind.names_bucket or is_host(match[1].strip("[]")))
        if match is None or not is_place or not 0 < port < 65536 or "@" in raw_path + query:
            # The text is not shown: it may be a piece of a password that was not escaped.
            raise ConfigError(f"{where}: names no {kind.hosts.replace('{scheme}', scheme)}")
        hosts.append((match[1].strip("[]"), None if match[2] is None else port))
    if re.search(r"[&;=]", raw_path):
        raise ConfigError(
            f"{where}: the prefix holds &, ; or =; options begin with ?; in the prefix, escape "
            "these as %26, %3B or %3D"
        )
    # User and password are in no message: so bytes that are not UTF-8 are replaced, not refused.
    return StoreUrl(
        scheme=scheme,
        path=_unquote(where, raw_path, repr(raw_path)).strip("/"),
        options=_parse_options(where, query),
        hosts=tuple(hosts),
        username=unquote(username, errors="replace"),
        password=unquote(password, errors="replace"),
    )


def _unquote(where: str, text: str, what: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        # A lenient decoder would name another directory than the one that was meant.
        raise ConfigError(f"{where}: the escapes in {what} are not UTF-8") from None


def _without_scheme(url: str) -> str:
    if url.startswith("/"):
        return f"no scheme; did you mean {'file://' + url!r}?"
    if url.lower().startswith(("file:", "memory:")):
        scheme, _, rest = url.partition(":")
        slashes = "//" if scheme.lower() == "memory" or rest.startswith("/") else "///"
        return f"// is missing after the scheme; did you mean {f'{scheme}:{slashes}{rest}'!r}?"
    return "no scheme; write file:///absolute/directory, memory://name or valkey://host/prefix"


def _parse_options(where: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    # Messages show no text but names of options: behind the ? a secret may stand by mistake.
    for number, part in enumerate(query.split("&") if query else (), 1):
        name, equals, value = part.partition("=")
        name, value = (_unquote(where, text, f"option {number}") for text in (name, value))
        if not name or not equals or not value:
            raise ConfigError(f"{where}: option {number} is not of the form name=value")
        if "\0" in value:
            raise ConfigError(f"{where}: option {number} holds a zero byte")
        if name in options:
            shown = repr(name) if OPTION_NAME.fullmatch(name) else number
            raise ConfigError(f"{where}: option {shown} is given twice")
        options[name] = value
    return options


def read_options(url: StoreUrl) -> object:
    """Return the options of a URL as an object of its kind's `options` class.

    Raises:
        ConfigError: an option is unknown or wrong. The message does not show its value.
    """
    options = kind_of(url.scheme).options
    with _named(options):
        return build_config(options, url.options, where=url.where, hides=True)


def refuse_small_quota(url: StoreUrl, record_bytes: int, sized_by: str = "chunk_tokens") -> None:
    """Raise ConfigError for a quota below one record. Call it before the store is opened: to open
    it with such a quota would evict everything."""
    max_bytes = getattr(read_options(url), "max_bytes", None)
    if max_bytes is not None and max_bytes < record_bytes:
        raise ConfigError(
            f"max_bytes={format_size(max_bytes)} is smaller than one chunk of this model "
            f"({record_bytes} bytes); raise it or lower {sized_by}"
        )


def parse_tiers(urls: str | Sequence[str | StoreUrl]) -> list[StoreUrl]:
    """Parse one URL or several: one for each tier. Raises ConfigError for none, or for two that
    name one place."""
    if not isinstance(urls, str | list | tuple):
        raise ConfigError(
            f"a store is a URL or a list of them, not a value of type {type(urls).__name__}"
        )
    given = (urls,) if isinstance(urls, str) else urls
    parsed = [tier for url in given for tier in _each_host(parse_store_url(url))]
    if not parsed:
        raise ConfigError(
            "the list of stores is empty; name one, such as file:///var/cache/kvferry"
        )
    places = [_place_of(each) for each in parsed]
    for url, place in zip(parsed, places, strict=True):
        if places.count(place) > 1 and not kind_of(url.scheme).is_private:
            raise ConfigError(f"two tiers are at one place, {str(url)!r}; leave one out")
    return parsed


def _each_host(url: StoreUrl) -> list[StoreUrl]:
    if not kind_of(url.scheme).is_peer:
        return [url]
    return [replace(url, hosts=(host,)) for host in dict.fromkeys(url.hosts)]


def _place_of(url: StoreUrl) -> tuple[object, ...]:
    """Return a value that is equal for URLs that name one place. Compares names only: to follow
    links on a mount that hangs would hang the start of an engine."""
    kind = kind_of(url.scheme)
    hosts = tuple((host, port or kind.default_port) for host, port in url.hosts)
    path = posixpath.normpath(url.path) if url.path else ""
    return kind.aliases.get(url.scheme, url.scheme), hosts, path, url.options.get("endpoint")


def open_store(
    url: str | Sequence[str | StoreUrl],
    *,
    observer: Observer | None = None,
    multi_process: bool = False,
    index: bool = True,
    namespace: bytes = bytes(32),
    check: ValueCheck | None = None,
    named: Callable[[], tuple[bytes, str | None]] | None = None,
    start_seconds: float | None = None,
) -> TieredStore:
    """Open the store that `url` names, or several stores, as the tiers of one.

    Args:
        url: `file:///directory`, `memory://name`, `valkey://host/prefix`, `s3://bucket/prefix`,
            `mooncake://host:port/prefix` or `peer://host:port`, with `?options`; or several of
            them, nearest first.
        observer: receives the counts of the store.
        multi_process: whether scheduler and worker roles, or several ranks, live in different
            processes and must see each other's values. Stores that cannot do this are refused.
        index: False if `contains` is never asked: the store then tracks no keys in memory.
        namespace: namespace of the values on a server; other stores find values by key alone.
        check: finds wrong values before they are copied between tiers (see `TieredStore`). A quota
            below its value size is refused; a `put` to a server replaces a value of another size
            under the same key.
        named: in place of `namespace`, returns it and a text that says what it is, which the store
            keeps. It may wait: it is called on the thread that opens a store.
        start_seconds: how long to wait for stores to open. Goes on without a store that takes
            longer, or whose medium does not answer. None: waits for each, and raises for a single
            store whose medium does not answer. Of several stores, those in whose place stands
            something else are left out, too, until that is mended.

    Raises:
        ConfigError: no URL, two of one place, or a URL, option, quota or directory that cannot be
            used. Nothing stays open.
        StoreError: see `start_seconds`.

    Example:
        >>> with open_store("memory://example?max_bytes=1GiB") as store:
        ...     store.stat().max_bytes
        1073741824
    """
    opening = Opening(
        observer=observer if observer is not None else Observer(),
        multi_process=multi_process,
        index=index,
        namespace=namespace,
        record_bytes=None if check is None else check.record_bytes,
    )
    named = named or (lambda: (namespace, None))
    return _open_tiers(parse_tiers(url), opening, check, named, start_seconds)


def _open_tiers(
    parsed: Sequence[StoreUrl],
    opening: Opening,
    check: ValueCheck | None,
    named: Callable[[], tuple[bytes, str | None]],
    start_seconds: float | None,
) -> TieredStore:
    """See `open_store`."""
    if check is not None:
        for each in parsed:
            refuse_small_quota(each, check.record_bytes, check.sized_by)

    def opened(url: StoreUrl, calls: Calls, may_create: bool = True) -> Store:
        namespace, description = named()
        store = open_one(
            url, replace(opening, namespace=namespace, may_create=may_create, calls=calls)
        )
        if description is not None:
            store.describe(namespace, description)
        return store

    if len(parsed) == 1 and start_seconds is None:
        return TieredStore([opened(parsed[0], Calls())], opening.observer, check=check)
    calls = [Calls() for _ in parsed]
    return TieredStore(
        [
            Unopened(str(url), partial(opened, url, of_store), of_store)
            for url, of_store in zip(parsed, calls, strict=True)
        ],
        opening.observer,
        check=check,
        patience=Patience(start_seconds=math.inf if start_seconds is None else start_seconds),
    )


def open_one(url: str | StoreUrl, opening: Opening | None = None) -> Store:
    """Open the store of one URL, without a tier around it, but several peers as tiers. Raises as
    `open_store`.

    An installed package brings a client, in a `RemoteStore`: its code runs on I/O threads only, and
    every call of it is guarded. So no store's author can stop a scheduler.
    """
    opening = Opening() if opening is None else opening
    tiers = _each_host(parse_store_url(url))
    if len(tiers) > 1:
        return _open_tiers(tiers, opening, None, lambda: (opening.namespace, None), None)
    (parsed,) = tiers
    kind, options = kind_of(parsed.scheme), read_options(parsed)
    is_ours = parsed.scheme in MODULES
    is_of_client = bool(kind.hosts) or not is_ours
    faults = Faults(str(parsed), opening.observer, time.monotonic, is_of_client=is_of_client)
    passes = (ConfigError, StoreError)
    if is_ours:
        with faults.guard("open", "cannot be opened", passes=passes, is_logged=False):
            return kind.open(parsed, options, opening)
    name, until = _name_of(kind.open), time.monotonic() + opening.bounds.call_seconds
    guard = faults.guard("open", f"{name} failed", passes=passes, is_logged=False)
    with opening.calls.begun(name, "open", until), guard:
        store: object = kind.open(parsed, options, opening)
    if type(store) is not RemoteStore:  # a subclass would run on the scheduler's thread
        what = f"it returned a {type(store).__name__}, not a RemoteStore"
        raise StoreError(FaultKind.BUG, f"{parsed}: {name} failed: {what}")
    if store.opening is not opening or store.clock is not time.monotonic:
        what = "its RemoteStore must have the `opening` that it was given, and no clock of its own"
        raise StoreError(FaultKind.BUG, f"{parsed}: {name} failed: {what}")
    shown: object = store.url
    if not isinstance(shown, str):
        what = f"the URL of its RemoteStore is a {type(shown).__name__}, not text"
        raise StoreError(FaultKind.BUG, f"{parsed}: {name} failed: {what}")
    return store


@contextmanager
def _named(part: object) -> Iterator[None]:
    """Context of a part of a kind, which somebody else may have written: what it raises besides
    ConfigError is one, in one line with its name."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        said = f"{_name_of(part)} failed: {reason_of(error)}"
        raise ConfigError(said, FaultKind.BUG) from error


def _name_of(part: object) -> str:
    named = part if isinstance(part, FunctionType | type) else type(part)
    return f"{named.__module__}.{named.__qualname__}"
