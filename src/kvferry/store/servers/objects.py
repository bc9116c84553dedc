"""Values as objects in a bucket: `s3:` (Amazon and compatible servers), `gs:` and `az:` URLs.

The library obstore runs in a child process; `objects_child` says why.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Buffer, PutResult
from kvferry.store.kind import PLAIN_NAME, Opening, StoreKind, StoreUrl, check_endpoint
from kvferry.store.servers.child_client import LONGEST_SECONDS, Call, ChildClient
from kvferry.store.servers.remote import RemoteStore, open_remote

try:
    from obstore.exceptions import BaseError

    from kvferry.store.servers import objects_child
    from kvferry.store.servers.objects_child import NO_BUCKET, WrongAnswer, make_store
except ModuleNotFoundError as error:
    raise ConfigError(
        "s3://, gs:// and az:// stores need obstore: run pip install 'kvferry[s3]'"
    ) from error

if TYPE_CHECKING:
    from obstore.store import ClientConfig

# Ranges that are nearer to each other than this share one request: to read the bytes between them
# takes less time than another request.
_GAP_BYTES = 1 << 20
_NUM_LANES = 16
# Enough for the reads in flight and one page of a list.
_CHILD_BYTES = 56 << 20
# Address space: only what is written takes memory.
_LANE_BYTES = 1 << 30

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
_DENIED = re.compile(
    r"status code: 40[13]|PermissionDenied|Unauthenticated|169\.254\.169\.254|metadata\.google"
)
# Variables of the environment that obstore reads.
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS = re.compile(r"AWS_ENDPOINT(_URL)?(_S3)?|AZURE_(STORAGE_)?ENDPOINT")
# The parts of an error that may be shown. Its text can quote the request and its key id.
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_CONNECTION = re.compile(
    r"connection refused|connection reset|connection closed|dns error|timed ?out", re.IGNORECASE
)


def spans_of(ranges: Iterable[tuple[int, memoryview]]) -> list[tuple[int, int]]:
    """Return the requests for `ranges`, as bytes `[start, end)`; ranges near each other share one.

    >>> spans_of([(5 << 20, memoryview(b"1234")), (0, memoryview(b"12")), (9, memoryview(b"1"))])
    [(0, 10), (5242880, 5242884)]
    """
    spans: list[tuple[int, int]] = []
    for start, buffer in sorted(ranges, key=lambda each: each[0]):
        end = start + buffer.nbytes
        if end == start:
            continue
        if spans and start - spans[-1][1] <= _GAP_BYTES:
            first, last = spans.pop()
            spans.append((first, max(end, last)))
        else:
            spans.append((start, end))
    return spans


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectOptions:
    """Options of `s3:`, `gs:` and `az:` URLs. Credentials come from the environment, under the
    names that the tools of each cloud use.

    Attributes:
        endpoint: URL of a server other than the cloud's (s3, az); http:// where it has no TLS.
        region: region of the bucket (s3).
    """

    endpoint: str | None = None
    region: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            check_endpoint("endpoint", self.endpoint, "http://minio:9000")
        if self.region is not None and PLAIN_NAME.fullmatch(self.region) is None:
            raise ConfigError("option 'region' is not a region; write region=eu-central-1")


class ObjectClient(ChildClient):
    """A client of one bucket (az: container). Objects are created once; only wrong ones change.

    Needs the rights to list, get, put and delete objects. Raises ConfigError for options or
    variables of the environment that cannot be used.
    """

    worker = objects_child.__file__
    environment = objects_child.ENVIRONMENT
    memory_bytes = _CHILD_BYTES
    num_lanes = _NUM_LANES
    lane_bytes = _LANE_BYTES

    def __init__(self, scheme: str, bucket: str, options: ObjectOptions) -> None:
        self._scheme = scheme
        self._is_checked = False
        super().__init__(f"{scheme}://{bucket}", {"store": _open(scheme, bucket, options)})

    def check(self, deadline: float, name: str = "") -> None:
        """Check bucket and credentials by a list under the prefix of `name`. Runs when a store is
        opened, and before other calls until it has succeeded. HEAD and GET would hide a mistake:
        they say the same of an absent bucket as of an absent object.

        Raises:
            ConfigError: the bucket or the credentials are wrong.
            StoreError: the server failed, or the deadline passed.
        """
        prefix, slash, _ = name.rpartition("/")
        with self._lane("first request", deadline) as call:
            # From an offset behind all names, so that the answer is short.
            self._ask(call, "list", prefix, f"{prefix}{slash}~")
        self._is_checked = True

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        self._first_check(name, deadline)
        spans = spans_of(ranges)
        with self._lane("read", deadline) as call:
            call.used_bytes = sum(end - start for start, end in spans)
            if call.used_bytes > _LANE_BYTES:
                raise call.failed(f"failed: its limit is {_LANE_BYTES} bytes")
            size = self._ask(call, "read", name, spans)
            if size is None:
                return None
            for offset, buffer in ranges:
                target, at = buffer.cast("B"), 0
                for start, end in spans:
                    if start <= offset < end:
                        length = max(0, min(len(target), size - offset))
                        first = at + offset - start
                        target[:length] = call.lane.memory[first : first + length]
                    at += end - start
        return int(size)

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        self._first_check(name, deadline)
        with self._lane("put", deadline) as call:
            at = 0
            for buffer in buffers:
                content = memoryview(buffer).cast("B")
                if at + len(content) > _LANE_BYTES:
                    raise call.failed(f"failed: a value has at most {_LANE_BYTES} bytes")
                call.lane.memory[at : at + len(content)] = content
                at += len(content)
            call.used_bytes = at
            is_stored = self._ask(call, "put", name, at, replaces)
        return PutResult.STORED if is_stored else PutResult.EXISTS

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        if not names:
            return []
        self._first_check(names[0], deadline)
        with self._lane("look up", deadline) as call:
            return list(self._ask(call, "exists", list(names)))

    def delete(self, name: str, deadline: float) -> bool:
        """See `RemoteClient.delete`. Several processes that delete at once may all get True."""
        self._first_check(name, deadline)
        with self._lane("delete", deadline) as call:
            return bool(self._ask(call, "delete", name))

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        self._first_check(prefix, deadline)
        with self._lane("list", deadline) as call:
            page = self._ask(call, "list", prefix.rstrip("/"), None)
            while page:
                yield from ((name, size, changed) for name, size, changed in page)
                call.restart(deadline)
                page = self._ask(call, "next")

    def _first_check(self, name: str, deadline: float) -> None:
        if not self._is_checked:
            try:
                self.check(deadline, name)
            except ConfigError as error:
                raise StoreError(str(error)) from None

    def _ask(self, call: Call, command: str, *arguments: object) -> Any:  # noqa: ANN401
        """Return the result of a command of the child. Raises as `check`."""
        answer = call.ask([command, call.seconds_left, *arguments])
        match answer:
            case {"result": result}:
                return result
            case {"error": str(text), "kind": str(kind)}:
                # Not chained: the text can show the request.
                raise self._translate(call.what, text, kind)
            case {"late": True}:
                raise call.late()
        raise call.failed("failed: the answer of its process cannot be read")

    def _translate(self, what: str, text: str, kind: str) -> ConfigError | StoreError:
        """Make a one-line exception of an error. It shows only a code or cause from its text."""
        found = _CODE.search(text) or _STATUS.search(text) or _CONNECTION.search(text)
        reason = found.group(found.lastindex or 0) if found else kind
        if kind == WrongAnswer.__name__:
            reason = text
        hint = ""
        if "BadScheme" in text:
            hint = "; an http:// endpoint belongs into the URL: ?endpoint=http://..."
        elif NO_BUCKET.search(text):
            hint = "; create it or correct its name"
        elif _DENIED.search(text):
            hint = f"; check {_CREDENTIALS[self._scheme]} and the rights to list, get and put"
        message = f"{self._where}: {what} failed: {reason}{hint}"
        return ConfigError(message) if hint and not self._is_checked else StoreError(message)


def _open(scheme: str, bucket: str, given: ObjectOptions) -> list[Any]:
    """Return arguments for the child's `make_store`, which were tried here."""
    client: ClientConfig = {"timeout": f"{LONGEST_SECONDS:.0f}s"}
    if given.endpoint is not None:
        client["allow_http"] = given.endpoint.startswith("http://")
    options: Any = {name: value for name, value in asdict(given).items() if value is not None}
    unusable = options.keys() - {"s3": {"endpoint", "region"}, "az": {"endpoint"}}.get(
        scheme, set()
    )
    if unusable:
        raise ConfigError(f"{scheme}://{bucket}: {scheme} has no option {min(unusable)!r}")
    _check_environment(scheme, bucket)
    if scheme == "s3":
        # Single deletes: not every compatible server knows the bulk request.
        options["disable_bulk_delete"] = True
    try:
        make_store(scheme, bucket, options, client)
    except (BaseError, OSError, ValueError) as error:
        raise ConfigError(
            f"{scheme}://{bucket}: obstore refuses it ({type(error).__name__}); "
            f"check {_CREDENTIALS[scheme]}"
        ) from None
    except BaseException as error:
        # A panic of obstore, whose class cannot be imported, is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise ConfigError(f"{scheme}://{bucket}: obstore failed at its options") from None
    return [scheme, bucket, options, client]


def _check_environment(scheme: str, bucket: str) -> None:
    """Raise ConfigError for variables at which obstore would panic. Does not show values."""
    for name, value in os.environ.items():
        if name.startswith(_VARIABLES[scheme]) and not value.isprintable():
            raise ConfigError(
                f"{scheme}://{bucket}: the variable {name} holds a line break or another "
                "character that cannot be printed; remove it"
            )
        if name.startswith(_VARIABLES[scheme]) and _ENDPOINTS.fullmatch(name):
            check_endpoint(name, value, "http://minio:9000")
        if scheme == "s3" and name in _REGIONS and PLAIN_NAME.fullmatch(value) is None:
            raise ConfigError(
                f"{scheme}://{bucket}: the variable {name} is not a region; set {name}=eu-central-1"
            )


def _open_url(url: StoreUrl, options: ObjectOptions, opening: Opening) -> RemoteStore:
    (bucket, port), *others = url.hosts
    if others or port is not None or url.username or url.password:
        raise ConfigError(
            f"{url.where}: names more than a bucket; write {url.scheme}://bucket/prefix, the "
            "server as ?endpoint=..., and credentials into the environment"
        )
    is_name = url.path.isprintable() and {"", ".", ".."}.isdisjoint(url.path.split("/"))
    if url.path and not is_name:
        raise ConfigError(f"{url.where}: a prefix is made of names with one / between them")
    client = ObjectClient(url.scheme, bucket, options)
    try:
        # A server that is down may come back; a wrong bucket or secret stays wrong.
        with suppress(StoreError):
            until = time.monotonic() + opening.bounds.check_seconds
            client.check(until, f"{url.path}/" if url.path else "")
    except BaseException:
        client.close()
        raise
    return open_remote(url, client, opening)


KIND = StoreKind(
    options=ObjectOptions,
    open=_open_url,
    hosts="bucket; write {scheme}://bucket/prefix",
    names_bucket=True,
)
