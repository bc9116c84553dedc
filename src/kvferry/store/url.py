"""From a store URL to an open store. The options of each scheme are a dataclass here."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvferry.config import (
    NAME,
    OBJECT_SCHEMES,
    SERVER_SCHEMES,
    StoreUrl,
    build_config,
    check_endpoint,
    format_size,
    parse_store_url,
)
from kvferry.errors import ConfigError, StoreError
from kvferry.observe import Observer
from kvferry.store.base import Store, ValueCheck
from kvferry.store.memory import MemoryStore
from kvferry.store.tiers.late import LateStore

if TYPE_CHECKING:
    from kvferry.store.servers.mooncake import MooncakeClient
    from kvferry.store.servers.objects import ObjectClient
    from kvferry.store.servers.remote import RemoteClient
    from kvferry.store.servers.valkey import ValkeyClient

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

    def __post_init__(self) -> None:
        # Without arguments, `super` finds no class that slots were added to.
        MemoryOptions.__post_init__(self)
        _refuse_relative(index_file=self.index_file)


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

    def __post_init__(self) -> None:
        _refuse_relative(
            password_file=self.password_file,
            ca_file=self.ca_file,
            cert_file=self.cert_file,
            key_file=self.key_file,
        )


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

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            check_endpoint("endpoint", self.endpoint, "http://minio:9000")
        if self.region is not None and NAME.fullmatch(self.region) is None:
            raise ConfigError("option 'region' is not a region; write region=eu-central-1")


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

    def __post_init__(self) -> None:
        if self.metadata != "P2PHANDSHAKE":
            check_endpoint(
                "metadata",
                self.metadata,
                "http://10.0.0.7:8080/metadata",
                schemes=("http", "https", "etcd", "redis"),
                allows_login=True,
            )
        if self.admin is not None:
            check_endpoint("admin", self.admin, "http://10.0.0.7:9003")
        if self.device and not all(map(NAME.fullmatch, self.device.split(","))):
            raise ConfigError(
                "option 'device' is not a list of devices; write device=mlx5_0,mlx5_1"
            )


Options = MemoryOptions | ValkeyOptions | ObjectOptions | MooncakeOptions

OPTIONS: Mapping[str, type[Options]] = {
    "memory": MemoryOptions,
    "file": FileOptions,
    **dict.fromkeys(_DEFAULT_PORTS, ValkeyOptions),
    **dict.fromkeys(OBJECT_SCHEMES, ObjectOptions),
    "mooncake": MooncakeOptions,
}
"""What may stand behind the ? of each scheme."""


def read_options(url: StoreUrl) -> Options:
    """The options of a URL, of the class that its scheme has in `OPTIONS`.

    Raises:
        ConfigError: one is unknown or wrong; what was given is not shown.
    """
    return build_config(OPTIONS[url.scheme], url.options, where=_where(url), hides=True)


def _where(url: StoreUrl) -> str:
    return f"store URL {str(url)!r}"


def _refuse_relative(**files: str | None) -> None:
    """Messages name files: only what is a path for sure."""
    for option, file in files.items():
        if file is not None and not file.startswith("/"):
            raise ConfigError(f"option {option!r} is not an absolute path; begin it with /")


def refuse_small_quota(urls: str | Sequence[str], record_bytes: int) -> None:
    """Raises ConfigError for a quota below one record. Before the store is opened: it would evict
    everything."""
    for url in (urls,) if isinstance(urls, str) else urls:
        options = read_options(parse_store_url(url))
        max_bytes = options.max_bytes if isinstance(options, MemoryOptions) else None
        if max_bytes is not None and max_bytes < record_bytes:
            raise ConfigError(
                f"max_bytes={format_size(max_bytes)} is smaller than one chunk of this model "
                f"({record_bytes} bytes); raise it or lower chunk_tokens"
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
    for url, place in zip(parsed, places, strict=True):
        if places.count(place) > 1 and url.scheme != "memory":
            raise ConfigError(f"two tiers are at one place, {str(url)!r}; leave one out")
    stores = [open_one(urls[0])] if len(urls) == 1 else _open_all(urls, open_one)
    if len(stores) == 1 and parsed[0].scheme not in SERVER_SCHEMES:
        return stores[0]
    # Only here: a process with one directory needs no breaker.
    from kvferry.store.tiers.tiered import TieredStore

    return TieredStore(stores, observer, check=check)


def _open_all(urls: Sequence[str], open_one: Callable[..., Store]) -> list[Store]:
    """Open stores side by side: servers that hang cost an engine's start the time of one. Raises
    what the first one raised that cannot be opened; the others are closed."""
    with ThreadPoolExecutor(len(urls), "kvferry-open") as openers:
        opened = [openers.submit(_open_tier, url, open_one) for url in urls]
    faults = [fault for each in opened if (fault := each.exception()) is not None]
    stores = [each.result() for each in opened if each.exception() is None]
    if faults:
        for store in stores:
            store.close()
        raise faults[0]
    return stores


def _open_tier(url: str, open_one: Callable[..., Store]) -> Store:
    """A store, or what stands for it while its medium does not answer."""
    with suppress(StoreError):
        return open_one(url)
    return LateStore(url, lambda _may_create: open_one(url, may_create=False), _CHECK_SECONDS)


def _place_of(url: StoreUrl) -> tuple[object, ...]:
    """The same value for URLs that name one place. By the names alone: to follow links on a mount
    that hangs would hang the start of an engine."""
    schemes = {"redis": "valkey", "rediss": "valkeys"}
    hosts = tuple((host, port or _DEFAULT_PORTS.get(url.scheme)) for host, port in url.hosts)
    path = posixpath.normpath(url.path) if url.path else ""
    return schemes.get(url.scheme, url.scheme), hosts, path, url.options.get("endpoint")


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
        check: of values that are copied between tiers (see `TieredStore`), or are in the way of a
            `put` (see `RemoteStore`).

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
            value_bytes=None if check is None else check.num_bytes,
        ),
        check,
    )


def open_one(
    url: str | StoreUrl,
    *,
    observer: Observer | None = None,
    multi_process: bool = False,
    index: bool = True,
    namespace: bytes = bytes(32),
    value_bytes: int | None = None,
    may_create: bool = True,
) -> Store:
    """Open the store of one URL, without a breaker; see `open_store`. Unless it `may_create`, a
    directory must be a store already."""
    observer = observer if observer is not None else Observer()
    parsed = url if isinstance(url, StoreUrl) else parse_store_url(url)
    options = read_options(parsed)
    if not isinstance(options, MemoryOptions):
        client = _client(parsed, options)
        # Only here: a process that keeps values in memory needs no threads.
        from kvferry.store.servers.remote import RemoteStore

        return RemoteStore(
            str(parsed),
            client,
            prefix=parsed.path and f"{parsed.path}/",
            namespace=namespace,
            observer=observer,
            index=index,
            value_bytes=value_bytes,
        )
    if not isinstance(options, FileOptions):
        if multi_process:
            raise ConfigError(
                f"{_where(parsed)}: a memory store is seen by one process only, and here several "
                "must share one; use file:///absolute/directory (on /dev/shm if it shall stay in "
                "memory)"
            )
        return MemoryStore(parsed.path, options.max_bytes, observer)
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


def _client(
    url: StoreUrl, options: ValkeyOptions | ObjectOptions | MooncakeOptions
) -> RemoteClient:
    match options:
        case ObjectOptions():
            return _object_client(url, options)
        case MooncakeOptions():
            return _mooncake_client(url, options)
        case ValkeyOptions():
            return _valkey_client(url, options)


def _valkey_client(url: StoreUrl, options: ValkeyOptions) -> ValkeyClient:
    from kvferry.store.servers.valkey import DEFAULT_PORT, Login, ValkeyClient, make_tls

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
        raise ConfigError(f"{_where(url)}: {error}") from None


def _object_client(url: StoreUrl, options: ObjectOptions) -> ObjectClient:
    where = _where(url)
    (bucket, port), *others = url.hosts
    if others or port is not None or url.username or url.password:
        raise ConfigError(
            f"{where}: names more than a bucket; write {url.scheme}://bucket/prefix, the server as "
            "?endpoint=..., and credentials into the environment"
        )
    is_name = url.path.isprintable() and {"", ".", ".."}.isdisjoint(url.path.split("/"))
    if url.path and not is_name:
        raise ConfigError(f"{where}: a prefix is made of names with one / between them")
    # Each loads what only its own scheme needs.
    from kvferry.store.servers.objects import ObjectClient

    client = ObjectClient(url.scheme, bucket, endpoint=options.endpoint, region=options.region)
    try:
        # A server that is down may come back; a wrong bucket or secret stays wrong.
        with suppress(StoreError):
            client.check(time.monotonic() + _CHECK_SECONDS, f"{url.path}/" if url.path else "")
    except BaseException:
        client.close()
        raise
    return client


def _mooncake_client(url: StoreUrl, options: MooncakeOptions) -> MooncakeClient:
    (host, port), *others = url.hosts
    if others or port is None or url.username or url.password:
        raise ConfigError(
            f"{_where(url)}: names no single master; write mooncake://host:50051/prefix"
        )
    from kvferry.store.servers.mooncake import MooncakeClient

    given = asdict(options)
    return MooncakeClient(f"{host}:{port}", segment_bytes=given.pop("segment"), **given)
