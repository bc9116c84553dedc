"""Values as objects in a bucket: `s3:` (Amazon and compatible servers), `gs:` and `az:` URLs.

One event loop, in a thread of its own, runs all requests of a client. A request is cancelled at its
deadline. Its bytes lie in memory of obstore until the thread that asked copies them, so no buffer
is written late.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakSet

from kvferry.errors import ConfigError, FaultKind, StoreError, install_hint
from kvferry.store.base import Buffer, PutResult
from kvferry.store.kind import PLAIN_NAME, Opening, StoreKind, StoreUrl, check_endpoint
from kvferry.store.servers.object_faults import (
    CREDENTIALS,
    OF_SETUP,
    fault_of,
    is_denied,
    is_without_bucket,
)
from kvferry.store.servers.remote import RemoteClient, RemoteStore, open_remote

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import AzureStore, GCSStore, S3Store
except ModuleNotFoundError as error:
    raise ConfigError(
        f"s3://, gs:// and az:// stores need obstore: {install_hint('s3')}"
    ) from error

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")

_LONGEST_SECONDS = 60.0
"""Longest time of a call, also of one without a deadline."""

# A caller waits this much longer than its deadline for a loop that is busy.
_GRACE_SECONDS = 0.2
_CLOSE_SECONDS = 5.0
# Ranges that are nearer to each other than this share one request: to read the bytes between them
# takes less time than another request.
_GAP_BYTES = 1 << 20
_HEADS_IN_FLIGHT = 32
_PAGE = 1000

# Few and quick: a failed call is a miss, and the tier above decides when to try again.
_RETRIES: RetryConfig = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(milliseconds=500),
    },
}
_NO_RANGE = "status code: 416"
# Variables of the environment that obstore reads.
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_REGIONS = ("AWS_REGION", "AWS_DEFAULT_REGION")
_ENDPOINTS = re.compile(r"AWS_ENDPOINT(_URL)?(_S3)?|AZURE_(STORAGE_)?ENDPOINT")


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


class ObjectClient(RemoteClient):
    """A client of one bucket (az: container). Objects are created once; only wrong ones change.

    Needs the rights to list, get, put and delete objects. Raises ConfigError for options or
    variables of the environment that cannot be used.
    """

    _process: ClassVar[int] = 0
    """The process in which obstore runs. Its threads do not survive a fork."""

    def __init__(self, scheme: str, bucket: str, options: ObjectOptions) -> None:
        self._where = f"{scheme}://{bucket}"
        ObjectClient._process = ObjectClient._process or os.getpid()
        if os.getpid() != self._process:
            raise ConfigError(
                f"{self._where}: obstore does not work in the fork of a process that used it; "
                "start processes by spawn (vLLM: VLLM_WORKER_MULTIPROCESSING_METHOD=spawn)"
            )
        self._scheme = scheme
        self._store = _open(scheme, bucket, options)
        self._is_checked = False
        self._removing: set[str] = set()
        self._heads = asyncio.Semaphore(_HEADS_IN_FLIGHT)
        self._lock = threading.Lock()  # held while a request goes to the loop, and by `close`
        self._loop = _Loop()
        thread = threading.Thread(
            target=_serve, args=[self._loop], name="kvferry-objects", daemon=True
        )
        thread.start()
        # Also as the interpreter ends: a request under way then makes a thread of obstore panic.
        self._end = weakref.finalize(self, _end, self._loop, thread, os.getpid())

    def close(self) -> None:
        with self._lock:
            self._end()

    def check(self, deadline: float, name: str = "") -> None:
        """Check bucket and credentials by a list under the prefix of `name`. Runs when a store is
        opened, and before other calls until it has succeeded. HEAD and GET would hide a mistake:
        they say the same of an absent bucket as of an absent object.

        Raises:
            ConfigError: the bucket or the credentials are wrong.
            StoreError: the server failed, or the deadline passed.
        """
        prefix, slash, _ = name.rpartition("/")
        # From an offset behind all names, so that the answer is short.
        stream = self._list(prefix, offset=f"{prefix}{slash}~")
        self._run("first request", _next_page(stream), deadline)
        self._is_checked = True

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        self._first_check(name, deadline)
        spans = spans_of(ranges)
        found = self._run("read", self._read(name, spans), deadline)
        if found is None:
            return None
        size, contents = found
        for offset, buffer in ranges:
            target = buffer.cast("B")
            for (start, end), content in zip(spans, contents, strict=True):
                if start <= offset < end:
                    part = content[offset - start :][: len(target)]
                    target[: len(part)] = part
        return size

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        self._first_check(name, deadline)
        # A copy: a request that was cancelled may look at it for a moment longer.
        content = b"".join(buffers)
        return self._run("put", self._put(name, content, replaces), deadline)

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        if not names:
            return []
        self._first_check(names[0], deadline)
        return self._run("look up", self._find_all(names), deadline)

    def delete(self, name: str, deadline: float) -> bool:
        """See `RemoteClient.delete`. Several processes that delete at once may all get True."""
        self._first_check(name, deadline)
        return self._run("delete", self._delete(name), deadline)

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        self._first_check(prefix, deadline)
        stream = self._list(prefix.rstrip("/"))
        while page := self._run("list", _next_page(stream), deadline):
            for found in page:
                yield found["path"], found["size"], found["last_modified"].timestamp()

    # ---- on the loop

    async def _read(
        self, name: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[int, list[memoryview]] | None:
        """Return the size of a value and the bytes of each span, up to the value's end; None if it
        is absent or was replaced."""
        try:
            if not spans:
                return await self._size(name), []
            found = await _gather(self._read_span(name, *span) for span in spans)
        except FileNotFoundError as error:
            if is_without_bucket(error):
                raise
            return None
        # Sizes differ if the value was replaced between two requests.
        is_one = len({size for size, _ in found}) == 1
        return (found[0][0], [content for _, content in found]) if is_one else None

    async def _read_span(self, name: str, start: int, end: int) -> tuple[int, memoryview]:
        try:
            response = await obstore.get_async(self._store, name, options={"range": (start, end)})
        except BaseError as error:
            if _NO_RANGE not in str(error):
                raise
            return await self._size(name), memoryview(b"")  # all of it is behind the value's end
        # obstore raises if these are fewer or other bytes than those of the range.
        return int(response.meta["size"]), memoryview(await response.bytes_async())

    async def _size(self, name: str) -> int:
        return int((await obstore.head_async(self._store, name))["size"])

    async def _find_all(self, names: Sequence[str]) -> list[bool]:
        """Whether each object is there. One that this user may not read is not, but if the server
        refuses all, that is an error."""
        found = await _gather(self._find(name) for name in names)
        refused = [each for each in found if isinstance(each, BaseError)]
        if len(refused) == len(found):
            raise refused[0]
        return [each is True for each in found]

    async def _find(self, name: str) -> bool | BaseError:
        async with self._heads:
            try:
                await self._size(name)
            except FileNotFoundError:
                return False
            except BaseError as error:
                if not is_denied(error):
                    raise
                return error
            return True

    async def _put(self, name: str, content: bytes, replaces: bool) -> PutResult:
        try:
            mode: Any = "overwrite" if replaces else "create"
            await obstore.put_async(self._store, name, content, mode=mode)
        except AlreadyExistsError:
            return PutResult.EXISTS
        return PutResult.STORED

    async def _delete(self, name: str) -> bool:
        if name in self._removing:
            return False
        self._removing.add(name)
        try:
            await self._size(name)  # S3 says of absent objects, too, that it deleted them
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            return False
        finally:
            self._removing.discard(name)
        return True

    # ---- to the loop

    def _list(self, prefix: str, offset: str | None = None) -> ListStream[Sequence[ObjectMeta]]:
        return obstore.list(self._store, prefix or None, offset=offset, chunk_size=_PAGE)

    def _first_check(self, name: str, deadline: float) -> None:
        if not self._is_checked:
            try:
                self.check(deadline, name)
            except ConfigError as error:
                raise StoreError(*error.fault) from None

    def _run(self, what: str, request: Coroutine[Any, Any, T], deadline: float) -> T:
        """Return the result of a request that ends at the deadline. Raises as `check`."""
        seconds = min(deadline - time.monotonic(), _LONGEST_SECONDS)
        if seconds <= 0:  # a request that is sent could still be carried out
            request.close()
            raise StoreError(FaultKind.LATE, f"{self._where}: {what}: the deadline passed")
        if os.getpid() != self._process:
            request.close()
            said = f"{self._where}: opened before a fork; open it after"
            raise StoreError(FaultKind.CLOSED, said)
        with self._lock:
            if not self._end.alive:
                request.close()
                raise StoreError(FaultKind.CLOSED, f"{self._where}: closed")
            future = asyncio.run_coroutine_threadsafe(_limited(request, seconds), self._loop)
        try:
            return future.result(seconds + _GRACE_SECONDS)
        except TimeoutError:
            future.cancel()
            said = f"{self._where}: {what} did not end within {seconds:.1f} s"
            raise StoreError(FaultKind.LATE, said) from None
        except CancelledError:
            raise StoreError(FaultKind.CLOSED, f"{self._where}: closed") from None
        except BaseException as error:
            if not _is_of_obstore(error):
                raise
            # Not chained: the text can show the request.
            raise self._translate(what, error) from None

    def _translate(self, what: str, error: BaseException) -> ConfigError | StoreError:
        """Make a one-line exception of an error."""
        fault = fault_of(error, self._scheme)
        message = f"{self._where}: {what} failed: {fault}"
        if fault.kind in OF_SETUP and not self._is_checked:
            return ConfigError(message, fault.kind)
        return StoreError(fault.kind, message)


def _is_of_obstore(error: BaseException) -> bool:
    """Whether obstore raises this. Its panics are no Exceptions, and their class has no import."""
    is_panic = type(error).__name__ in ("PanicException", "RustPanic")
    return is_panic or isinstance(error, BaseError | OSError | ValueError)


async def _limited(request: Coroutine[Any, Any, T], seconds: float) -> T:
    async with asyncio.timeout(seconds):
        return await request


async def _gather(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all requests at once and return their results. When one fails, cancel the others."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _next_page(stream: ListStream[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta]:
    """Return the next names of a list, and nothing at its end."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return ()


class _Loop(asyncio.SelectorEventLoop):
    """A loop that knows its futures. Threads of obstore have them for a moment longer than a
    request that was cancelled, and panic if Python ends meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.futures: WeakSet[asyncio.Future[Any]] = WeakSet()

    def create_future(self) -> asyncio.Future[Any]:
        future = super().create_future()
        self.futures.add(future)
        return future


def _serve(loop: _Loop) -> None:
    loop.run_forever()
    loop.close()


def _end(loop: _Loop, thread: threading.Thread, process: int) -> None:
    """Cancel all requests of a loop, and end its thread. A fork has neither."""
    if os.getpid() != process:
        return

    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        latest = loop.time() + _CLOSE_SECONDS
        while loop.futures and loop.time() < latest:
            time.sleep(0.001)  # no other request is left; `asyncio.sleep` would make a future
            await asyncio.sleep(0)
            # A thread that drops a future without the interpreter's lock leaves that to the next
            # call into obstore.
            obstore.parse_scheme("memory:")
        loop.stop()

    asyncio.run_coroutine_threadsafe(end(), loop)
    if thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)


def _open(scheme: str, bucket: str, given: ObjectOptions) -> ObjectStore:
    client: ClientConfig = {"timeout": f"{_LONGEST_SECONDS:.0f}s"}
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
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    try:
        store: ObjectStore = kind(
            bucket, config=options, client_options=client, retry_config=_RETRIES
        )
    except BaseException as error:
        if not _is_of_obstore(error):
            raise
        raise ConfigError(
            f"{scheme}://{bucket}: obstore refuses it ({type(error).__name__}); "
            f"check {CREDENTIALS[scheme]}"
        ) from None
    return store


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
            until = time.monotonic() + opening.bounds.quick_seconds
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
