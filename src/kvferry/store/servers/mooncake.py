"""Values in Mooncake Store: the memory of many machines as one pool, over TCP or RDMA.

A child process holds Mooncake's client (`mooncake_child` says why).
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Buffer, PutResult
from kvferry.store.kind import PLAIN_NAME, Opening, StoreKind, StoreUrl, check_endpoint
from kvferry.store.servers import mooncake_child
from kvferry.store.servers.child_client import LONGEST_SECONDS, Call, ChildClient
from kvferry.store.servers.mooncake_child import ABSENT, EXISTS, EXISTS_HERE, PENDING
from kvferry.store.servers.name_list import names_at
from kvferry.store.servers.remote import RemoteStore, open_remote

_NUM_LANES = 4
_LANE_BYTES = 8 << 20
# Some of it is for the stacks of threads, which take no memory.
_CHILD_BYTES = 96 << 20
_CLOSE_SECONDS = 3.0
_SIZES_AT_ONCE = 1000
_NO_SPACE = -200


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
        if self.device and not all(map(PLAIN_NAME.fullmatch, self.device.split(","))):
            raise ConfigError(
                "option 'device' is not a list of devices; write device=mlx5_0,mlx5_1"
            )


class MooncakeClient(ChildClient):
    """Values in the memory that Mooncake's clients lend to its master. They go when the process
    that lends the memory ends, and when the master does.

    Mooncake has no authentication and no encryption: for trusted networks only.

    Args:
        master: `host:port` of the master.
        metadata: URL of its metadata server; P2PHANDSHAKE where there is none.
        segment_bytes: memory that this client lends; 0 to use that of others.
        protocol: tcp or rdma.
        device: names of RDMA devices, separated by commas; empty for all.
        admin: URL of the master's metrics port, which lists names; without it `scan` fails.

    Raises:
        ConfigError: Mooncake is not installed, or `master` is not host:port.
    """

    script = mooncake_child.__file__
    memory_bytes = _CHILD_BYTES
    num_lanes = _NUM_LANES
    lane_bytes = _LANE_BYTES

    def __init__(
        self,
        master: str,
        *,
        metadata: str = "P2PHANDSHAKE",
        segment_bytes: int = 0,
        protocol: str = "tcp",
        device: str = "",
        admin: str | None = None,
    ) -> None:
        where = f"mooncake://{master}"
        if importlib.util.find_spec("mooncake") is None:
            raise ConfigError(
                "mooncake:// stores need Mooncake: run pip install 'kvferry[mooncake]' "
                "and apt-get install libibverbs1"
            )
        host, _, port = master.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"{where}: the master is host:port, such as 10.0.0.1:50051")
        self._admin = admin
        # Only who lends memory has something to tell the master.
        self.close_seconds = _CLOSE_SECONDS if segment_bytes else 0.0
        options: dict[str, object] = {
            "master": master,
            "host": own_address(host),
            "metadata": metadata,
            "segment_bytes": segment_bytes,
            "protocol": protocol,
            "device": device,
        }
        super().__init__(where, options)

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
        if replaces:  # the master overwrites nothing
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
        """When values were used, Mooncake does not say."""
        for names in self._list(prefix, deadline):
            with self._lane("list", deadline) as call:
                sizes = _codes(call, call.ask(["sizes", names]), len(names))
            yield from (
                (name, size, 0.0) for name, size in zip(names, sizes, strict=True) if size >= 0
            )

    def _list(self, prefix: str, deadline: float) -> Iterator[list[str]]:
        if self._admin is None:
            raise StoreError(
                f"{self._where}: Mooncake lists names on its metrics port only: "
                "add admin=http://host:9003 to the URL"
            )
        some: list[str] = []
        try:
            for name in names_at(f"{self._admin}/get_all_keys", deadline, LONGEST_SECONDS):
                if name.startswith(prefix):
                    some.append(name)
                if len(some) == _SIZES_AT_ONCE:
                    yield some
                    some = []
        except ValueError as error:
            raise StoreError(f"{self._where}: no list of names: {error}") from None
        if some:
            yield some


def _code(call: Call, answer: object) -> int:
    if not isinstance(answer, int):
        raise call.failed("failed: Mooncake's answer cannot be read")
    return answer


def _codes(call: Call, answers: object, count: int) -> list[int]:
    if not isinstance(answers, list) or len(answers) != count:
        raise call.failed("failed: Mooncake's answer cannot be read")
    return [_code(call, each) for each in answers]


def _check(call: Call, code: int) -> None:
    """StoreError for the negative codes that no answer is made of."""
    if code < 0:
        raise call.failed(f"failed: Mooncake says {code}")


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
    """The address under which the machine `host` reaches this one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


def _open_url(url: StoreUrl, options: MooncakeOptions, opening: Opening) -> RemoteStore:
    (host, port), *others = url.hosts
    if others or port is None or url.username or url.password:
        raise ConfigError(
            f"{url.where}: names no single master; write mooncake://host:50051/prefix"
        )
    given = asdict(options)
    client = MooncakeClient(f"{host}:{port}", segment_bytes=given.pop("segment"), **given)
    return open_remote(url, client, opening)


KIND = StoreKind(
    options=MooncakeOptions, open=_open_url, hosts="master; write mooncake://host:50051/prefix"
)
