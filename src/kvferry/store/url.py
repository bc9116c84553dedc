"""From a store URL to an open store. The options of each scheme are a dataclass here."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvferry.config import (
    OBJECT_SCHEMES,
    SERVER_SCHEMES,
    StoreUrl,
    build_config,
    parse_size,
    parse_store_url,
    without_credentials,
)
from kvferry.errors import ConfigError, StoreError
from kvferry.observe import Observer
from kvferry.store.base import Store, ValueCheck
from kvferry.store.late import LateStore
from kvferry.store.memory import MemoryStore

if TYPE_CHECKING:
    from kvferry.store.mooncake import MooncakeClient
    from kvferry.store.objects import ObjectClient
    from kvferry.store.remote import RemoteClient
    from kvferry.store.valkey import ValkeyClient

_DEFAULT_PORTS = dict.fromkeys(("valkey", "valkeys", "redis", "rediss"), 6379)

# How long the opening of a store waits to hear that its bucket is wrong.
_CHECK_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """Options of `memory:` URLs.

    Attributes:
        max_bytes: sum of the sizes of all values; None for no limit.
    """

    max_bytes: int | None = field(default=None, metadata={"unit": "bytes"})

    def __post_init__(self) -> None:
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ConfigError("option 'max_bytes' is 0; give a size such as 10GiB, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(MemoryOptions):
    """Options of `file:` URLs; each is an argument of `FileStore`, which documents it."""

    create: bool = True
    read_only: bool = False
    direct_io: Literal["auto", "off"] = "auto"
    index_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ValkeyOptions:
    """Options of `valkey:`, `valkeys:`, `redis:` and `rediss:` URLs. User and password may stand in
    the URL instead; but hosts log their command line and configuration, and a file they do not.

    Attributes:
        cluster: the hosts are nodes of a cluster.
        username: at the server.
        password_file: its first line is the password; read again at every connect.
        ca_file: PEM file of those who sign the servers' certificates; the system's if left out.
        cert_file: PEM file of a certificate to show to the servers.
        key_file: PEM file of its key.
    """

    cluster: bool = False
    username: str = ""
    password_file: str | None = None
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """Options of `s3:`, `gs:` and `az:` URLs. Credentials come from the environment, under the
    names that the tools of each cloud use.

    Attributes:
        endpoint: URL of an S3-compatible server (s3, az); http:// where it has no TLS.
        region: of the bucket (s3).
    """

    endpoint: str | None = None
    region: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """Options of `mooncake:` URLs.

    Attributes:
        metadata: URL of the metadata server; P2PHANDSHAKE where there is none.
        segment: memory that this process lends to the others.
        protocol: between machines.
        device: names of RDMA devices, separated by commas; empty for all.
        admin: URL of the master's metrics port, by which commands list what is stored.
    """

    metadata: str = "P2PHANDSHAKE"
    segment: int = field(default=0, metadata={"unit": "bytes"})
    protocol: Literal["tcp", "rdma"] = "tcp"
    device: str = ""
    admin: str | None = None


def refuse_small_quota(urls: str | Sequence[str], record_bytes: int) -> None:
    """Raises ConfigError for a quota below one record. Before the store is opened: it would evict
    everything."""
    for url in (urls,) if isinstance(urls, str) else urls:
        max_bytes = parse_store_url(url).options.get("max_bytes")
        if max_bytes is not None and parse_size(max_bytes) < record_bytes:
            raise ConfigError(
                f"max_bytes={max_bytes} is smaller than one chunk of this model ({record_bytes} "
                "bytes); raise it or lower chunk_tokens"
            )


def open_tiers(
    urls: str | Sequence[str],
    observer: Observer,
    open_one: Callable[..., Store],
    check: ValueCheck | None = None,
) -> Store:
    """The store of one URL, or those of several as one, nearest first. A server has a breaker of
    its own also where it is the only store.

    Args:
        open_one: opens the store of one URL; with `may_create=False` where it was away before.
        check: of the values that are copied between tiers; see `TieredStore`.

    Raises:
        ConfigError: no URL, two of one place, or what `open_one` raised; nothing stays open.
        StoreError: the medium of the only store does not answer.
    """
    if not isinstance(urls, str | list | tuple):
        raise ConfigError(
            f"a store is a URL or a list of them, not a value of type {type(urls).__name__}"
        )
    urls = (urls,) if isinstance(urls, str) else tuple(urls)
    parsed = [parse_store_url(url) for url in urls]
    places = [_place_of(each) for each in parsed]
    if not places:
        raise ConfigError(
            "the list of stores is empty; name one, such as file:///var/cache/kvferry"
        )
    for place in places:
        if places.count(place) > 1 and not place.startswith("memory:"):
            raise ConfigError(f"two tiers are at one place, {place!r}; leave one out")
    stores: list[Store] = []
    try:
        for url in urls:
            store = _open_tier(url, open_one, is_alone=len(urls) == 1)
            stores.append(store)  # those opened are closed if one fails
    except Exception:
        for store in stores:
            store.close()
        raise
    if len(stores) == 1 and parsed[0].scheme not in SERVER_SCHEMES:
        return stores[0]
    # Only here: a process with one directory needs no breaker.
    from kvferry.store.tiered import TieredStore

    return TieredStore(stores, observer, check=check)


def _open_tier(url: str, open_one: Callable[..., Store], *, is_alone: bool) -> Store:
    """A store, or what stands for it while its medium does not answer and there are others."""
    try:
        return open_one(url)
    except StoreError:
        if is_alone:
            raise
    return LateStore(url, lambda _may_create: open_one(url, may_create=False), _CHECK_SECONDS)


def _place_of(url: StoreUrl) -> str:
    """The same text for URLs that name one place. By the names alone: to follow links on a mount
    that hangs would hang the start of an engine."""
    schemes = {"redis": "valkey", "rediss": "valkeys"}
    hosts = tuple((host, port or _DEFAULT_PORTS.get(url.scheme)) for host, port in url.hosts)
    path = posixpath.normpath(url.path) if url.path else ""
    scheme = schemes.get(url.scheme, url.scheme)
    endpoint = {name: url.options[name] for name in ("endpoint",) if name in url.options}
    return str(replace(url, scheme=scheme, hosts=hosts, path=path, options=endpoint))


def open_store(
    url: str | Sequence[str],
    *,
    observer: Observer | None = None,
    multi_process: bool = False,
    index: bool = True,
    namespace: bytes = bytes(32),
    check: ValueCheck | None = None,
) -> Store:
    """Open the store that `url` names, or several stores as tiers.

    Args:
        url: `file:///directory`, `memory://name`, `valkey://host/prefix`, `s3://bucket/prefix` or
            `mooncake://host:port/prefix`, with `?options`; or several of them, nearest first.
        observer: receives the counts of the store.
        multi_process: True where scheduler and worker roles, or several ranks, live in different
            processes and must see each other's values; refuses stores that cannot.
        index: False if `contains` is never asked: the store then does not keep track.
        namespace: under which a server keeps the values; others ask the values themselves.
        check: of the values that are copied between tiers; see `TieredStore`.

    Raises:
        ConfigError: a URL, option or directory that cannot be used.
        StoreError: the medium of the only store does not answer.

    Example:
        >>> with open_store("memory://example?max_bytes=1GiB") as store:
        ...     store.stat().max_bytes
        1073741824
    """
    return open_tiers(
        url,
        observer if observer is not None else Observer(),
        partial(
            open_one,
            observer=observer,
            multi_process=multi_process,
            index=index,
            namespace=namespace,
        ),
        check,
    )


def open_one(
    url: str,
    *,
    observer: Observer | None = None,
    multi_process: bool = False,
    index: bool = True,
    namespace: bytes = bytes(32),
    may_create: bool = True,
) -> Store:
    """Open the store of one URL, without a breaker; see `open_store`. Unless it `may_create`, a
    directory must be a store already."""
    observer = observer if observer is not None else Observer()
    parsed = parse_store_url(url)
    where = f"store URL {without_credentials(url)!r}"
    if parsed.scheme == "memory":
        memory = build_config(MemoryOptions, parsed.options, where=where)
        if multi_process:
            raise ConfigError(
                f"{where}: a memory store is seen by one process only, and here several must share "
                "one; use file:///absolute/directory (on /dev/shm if it shall stay in memory)"
            )
        return MemoryStore(parsed.path, memory.max_bytes, observer)
    if parsed.scheme in SERVER_SCHEMES:
        client = _client(parsed, where)
        return _remote_store(parsed, client, namespace, observer, index=index)
    options = build_config(FileOptions, parsed.options, where=where)
    # Only here: a process that keeps values in memory need not load threads and a database.
    from kvferry.store.file.store import FileStore

    return FileStore(
        Path(parsed.path),
        max_bytes=options.max_bytes,
        create=options.create and may_create,
        read_only=options.read_only,
        direct_io=options.direct_io,
        index_file=None if options.index_file is None else Path(options.index_file),
        index=index,
        observer=observer,
    )


def _client(url: StoreUrl, where: str) -> RemoteClient:
    if url.scheme in OBJECT_SCHEMES:
        return _object_client(url, where)
    if url.scheme == "mooncake":
        return _mooncake_client(url, where)
    return _valkey_client(url, where)


def _remote_store(
    url: StoreUrl, client: RemoteClient, namespace: bytes, observer: Observer, *, index: bool
) -> Store:
    # Only here: a process that keeps values in memory needs no threads.
    from kvferry.store.remote import RemoteStore

    return RemoteStore(
        str(replace(url, options={})),
        client,
        prefix=url.path and f"{url.path}/",
        namespace=namespace,
        observer=observer,
        index=index,
    )


def _valkey_client(url: StoreUrl, where: str) -> ValkeyClient:
    from kvferry.store.valkey import DEFAULT_PORT, Login, ValkeyClient, make_tls

    options = build_config(ValkeyOptions, url.options, where=where)
    is_tls = url.scheme in ("valkeys", "rediss")
    files = (options.ca_file, options.cert_file, options.key_file)
    try:
        if "{" in url.path or "}" in url.path:
            raise ConfigError("the prefix holds a brace, which would decide the place in a cluster")
        if url.password and options.password_file is not None:
            raise ConfigError("a password in the URL and password_file; give one of them")
        if any(files) and not is_tls:
            raise ConfigError(f"files for TLS, and no TLS; write {url.scheme}s://")
        return ValkeyClient(
            [(host, port or DEFAULT_PORT) for host, port in url.hosts],
            cluster=options.cluster,
            login=Login(options.username or url.username, url.password, options.password_file),
            tls=make_tls(*files) if is_tls else None,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _object_client(url: StoreUrl, where: str) -> ObjectClient:
    options = build_config(ObjectOptions, url.options, where=where)
    (bucket, port), *others = url.hosts
    if others or port is not None or url.username or url.password:
        raise ConfigError(
            f"{where}: names more than a bucket; write {url.scheme}://bucket/prefix, the server as "
            "?endpoint=..., and credentials into the environment"
        )
    if url.path and not {"", ".", ".."}.isdisjoint(url.path.split("/")):
        raise ConfigError(f"{where}: a prefix is made of names with one / between them")
    # Each loads what only its own scheme needs.
    from kvferry.store.objects import ObjectClient

    client = ObjectClient(url.scheme, bucket, endpoint=options.endpoint, region=options.region)
    try:
        # A server that is down may come back; a wrong bucket or secret stays wrong.
        with suppress(StoreError):
            client.check(time.monotonic() + _CHECK_SECONDS, f"{url.path}/" if url.path else "")
    except ConfigError:
        client.close()
        raise
    return client


def _mooncake_client(url: StoreUrl, where: str) -> MooncakeClient:
    options = asdict(build_config(MooncakeOptions, url.options, where=where))
    (host, port), *others = url.hosts
    if others or port is None or url.username or url.password:
        raise ConfigError(f"{where}: names no single master; write mooncake://host:50051/prefix")
    from kvferry.store.mooncake import MooncakeClient

    return MooncakeClient(f"{host}:{port}", segment_bytes=options.pop("segment"), **options)
