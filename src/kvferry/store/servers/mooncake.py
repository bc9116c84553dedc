"""Values in Mooncake Store: the memory of many machines as one pool, over TCP or RDMA.

A child process holds Mooncake's client (`mooncake_child` says why). The master serves the list of
names over HTTP.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Literal
from urllib.parse import urlsplit

from kvferry.errors import ConfigError, FaultKind, StoreError, install_hint
from kvferry.network import reason_of, seconds_left
from kvferry.store.base import Buffer, PutResult
from kvferry.store.kind import PLAIN_NAME, Opening, StoreKind, StoreUrl, check_endpoint
from kvferry.store.servers import mooncake_child
from kvferry.store.servers.child_client import LONGEST_SECONDS, Call, ChildClient
from kvferry.store.servers.mooncake_child import ABSENT, EXISTS, EXISTS_HERE, PENDING
from kvferry.store.servers.remote import RemoteStore, open_remote

_NUM_LANES = 4
_LANE_BYTES = 8 << 20
_CLOSE_SECONDS = 3.0
_SIZES_AT_ONCE = 1000
_NO_SPACE = -200
_PIECE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeOptions:
    """Options of `mooncake:` URLs.

    Attributes:
        metadata: URL of the metadata server; P2PHANDSHAKE means no metadata server.
        segment: memory that this process lends to the others.
        protocol: protocol between machines.
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
        if self.device and not all(map(PLAIN_NAME.fullmatch, self.device.split(","))):
            raise ConfigError(
                "option 'device' is not a list of devices; write device=mlx5_0,mlx5_1"
            )


class MooncakeClient(ChildClient):
    """Values in the memory that Mooncake's clients lend to its master. They are lost when the
    lending process or the master exits.

    Mooncake has no authentication and no encryption: for trusted networks only.

    Args:
        master: `host:port` of the master.
        options: `scan` fails without `admin`, the metrics port.

    Raises:
        ConfigError: Mooncake is not installed.
    """

    script = mooncake_child.__file__
    num_lanes = _NUM_LANES
    lane_bytes = _LANE_BYTES

    def __init__(self, master: str, options: MooncakeOptions) -> None:
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(
                f"mooncake:// stores need Mooncake: {install_hint('mooncake')}, "
                "and apt-get install libibverbs1"
            )
        self._admin = options.admin
        # A child that lends memory needs time to deregister from the master.
        self.close_seconds = _CLOSE_SECONDS if options.segment else 0.0
        host = own_address(master.rpartition(":")[0])
        super().__init__(
            f"mooncake://{master}", {**asdict(options), "master": master, "host": host}
        )

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        size = 0
        for pieces in _batches(ranges) or [[]]:
            wanted = [(offset, len(buffer)) for offset, buffer in pieces]
            with self._lane("read", deadline) as call:
                size = _code(call, call.ask(["read", name, wanted]))
                if size in (ABSENT, PENDING):
                    return None
                _check(call, size)
                used = 0
                for offset, buffer in pieces:
                    length = max(0, min(len(buffer), size - offset))
                    buffer[:length] = call.lane.memory[used : used + length]
                    used += length
        return size

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        if replaces:
            # The master never overwrites. A crash between delete and put loses the value: the next
            # read is a miss. If another writer stores in between, the result is EXISTS.
            self.delete(name, deadline)
        parts = [memoryview(buffer).cast("B") for buffer in buffers]
        size = sum(map(len, parts))
        offset = 0
        with self._lane("put", deadline) as call:
            while offset < size:
                length = 0
                while parts and length < _LANE_BYTES:
                    part = parts[0][: _LANE_BYTES - length]
                    call.lane.memory[length : length + len(part)] = part
                    length += len(part)
                    parts[0] = parts[0][len(part) :]
                    if not parts[0]:
                        del parts[0]
                code = _code(call, call.ask(["put", name, size, offset, length]))
                if code == EXISTS or (code == EXISTS_HERE and offset == 0):
                    return PutResult.EXISTS
                if code == _NO_SPACE:
                    return PutResult.NO_SPACE
                _check(call, code)
                offset += length
        return PutResult.STORED

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        if not names:
            return []
        with self._lane("look up", deadline) as call:
            answers = _codes(call, call.ask(["exists", list(names)]), len(names))
            _check(call, min(answers))
        return [answer == 1 for answer in answers]

    def delete(self, name: str, deadline: float) -> bool:
        with self._lane("delete", deadline) as call:
            code = _code(call, call.ask(["delete", name]))
            if code == ABSENT:
                return False
            _check(call, code)
        return True

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        """The last-use time is always 0: Mooncake does not report it."""
        for names in self._list(prefix, deadline):
            with self._lane("list", deadline) as call:
                sizes = _codes(call, call.ask(["sizes", names]), len(names))
            yield from (
                (name, size, 0.0) for name, size in zip(names, sizes, strict=True) if size >= 0
            )

    def _list(self, prefix: str, deadline: float) -> Iterator[list[str]]:
        if self._admin is None:
            raise StoreError(
                FaultKind.UNLISTED,
                f"{self._where}: Mooncake lists names on its metrics port only: "
                "add admin=http://host:9003 to the URL",
            )
        some: list[str] = []
        try:
            for name in _names_at(f"{self._admin}/get_all_keys", deadline):
                if name.startswith(prefix):
                    some.append(name)
                if len(some) == _SIZES_AT_ONCE:
                    yield some
                    some = []
        except ValueError as error:
            raise StoreError(
                FaultKind.UNLISTED, f"{self._where}: no list of names: {error}"
            ) from None
        if some:
            yield some


def _code(call: Call, answer: object) -> int:
    if not isinstance(answer, int):
        raise call.failed(FaultKind.PROTOCOL, "failed: Mooncake's answer cannot be read")
    return answer


def _codes(call: Call, answers: object, count: int) -> list[int]:
    if not isinstance(answers, list) or len(answers) != count:
        raise call.failed(FaultKind.PROTOCOL, "failed: Mooncake's answer cannot be read")
    return [_code(call, each) for each in answers]


def _check(call: Call, code: int) -> None:
    """Raise StoreError for a negative code that the caller did not handle."""
    if code < 0:
        raise call.failed(FaultKind.REFUSED, f"failed: Mooncake says {code}")


def _batches(
    ranges: Sequence[tuple[int, memoryview]],
) -> list[list[tuple[int, memoryview]]]:
    """`ranges`, cut so that each batch fits into the memory of a lane."""
    batches: list[list[tuple[int, memoryview]]] = []
    free = 0
    for offset, buffer in ranges:
        rest, at = buffer.cast("B"), offset
        while rest:
            if not free:
                batches.append([])
                free = _LANE_BYTES
            part = rest[:free]
            batches[-1].append((at, part))
            free -= len(part)
            at += len(part)
            rest = rest[len(part) :]
    return batches


def own_address(host: str) -> str:
    """The address under which the machine `host` reaches this one; this one's name if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _names_at(url: str, deadline: float) -> Iterator[str]:
    """Yield the words of the answer to a GET of `url`. The server may take until `deadline`, and
    `LONGEST_SECONDS` for each part of it.

    Raises:
        ValueError: the answer is not a list of names, or too slow; the message is one line without
            the URL.
    """

    def limit() -> float:
        return min(LONGEST_SECONDS, seconds_left(deadline))

    place = urlsplit(url)
    kind = HTTPSConnection if place.scheme == "https" else HTTPConnection
    port = place.port or kind.default_port  # else it looks for one in the host
    try:
        with closing(kind(place.hostname or "", port, timeout=limit())) as connection:
            connection.request("GET", place.path)
            stream = connection.sock
            response = connection.getresponse()
            if response.status != 200:
                raise ValueError(f"the server answers {response.status}")
            rest = b""
            while piece := response.read1(_PIECE_BYTES):
                stream.settimeout(limit())
                *words, rest = _split(rest + piece)
                for word in words:
                    yield word.decode(errors="replace")
            if response.length:
                raise ValueError("the list ends too early")
            if rest:
                yield rest.decode(errors="replace")
    except HTTPException as error:
        raise ValueError(f"no answer of HTTP ({type(error).__name__})") from None
    except OSError as error:
        raise ValueError(reason_of(error)) from None


def _split(text: bytes) -> list[bytes]:
    """The words of `text`; the last may be incomplete, and is empty after trailing whitespace."""
    words = text.split()
    return words if words and not text[-1:].isspace() else [*words, b""]


def _open_url(url: StoreUrl, options: MooncakeOptions, opening: Opening) -> RemoteStore:
    (host, port), *others = url.hosts
    if others or port is None or url.username or url.password:
        raise ConfigError(
            f"{url.where}: names no single master; write mooncake://host:50051/prefix"
        )
    return open_remote(url, MooncakeClient(f"{host}:{port}", options), opening)


KIND = StoreKind(
    options=MooncakeOptions, open=_open_url, hosts="master; write mooncake://host:50051/prefix"
)
