"""Values as objects in a bucket: S3 and what is compatible with it, Google Cloud, Azure.

One event loop in a thread of its own runs all requests of a client, so that each ends exactly at
its deadline: the request is cancelled there, and the thread that asked goes on. Bytes that came
lie in memory of obstore until the thread that asked copies them, so nothing is written late.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import re
import threading
import time
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from kvferry.config import check_endpoint
from kvferry.errors import ConfigError, StoreError
from kvferry.store.base import Buffer, PutResult
from kvferry.store.remote import RemoteClient

try:
    import obstore
    from obstore.exceptions import AlreadyExistsError, BaseError
    from obstore.store import AzureStore, GCSStore, S3Store
except ModuleNotFoundError as error:
    raise ConfigError(
        "s3://, gs:// and az:// stores need obstore: run pip install 'kvferry[s3]'"
    ) from error

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

T = TypeVar("T")

# A call without a deadline ends, too.
_LONGEST_SECONDS = 60.0
# The loop cancels at the deadline; a caller waits this much longer for a loop that is busy.
_GRACE_SECONDS = 0.2
# Ranges nearer to each other than this come with one request: the bytes between them take less
# time than a request of their own.
_GAP_BYTES = 1 << 20
_HEADS_IN_FLIGHT = 32
_CLOSE_SECONDS = 5.0
_PAGE = 1000

# Few and quick: a tier that fails is a miss, and the store above decides when to try again.
_RETRIES: RetryConfig = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(milliseconds=500),
    },
}
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
_ENDPOINTS = re.compile(r"AWS_ENDPOINT(_URL)?(_S3)?|AZURE_(STORAGE_)?ENDPOINT")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_NO_RANGE = "status code: 416"
# What of an error may be shown: never its text, which can quote the request and its key id.
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_CONNECTION = re.compile(
    r"connection refused|connection reset|connection closed|dns error|timed ?out", re.IGNORECASE
)


class ByteSpan(NamedTuple):
    """Bytes `[start, end)` of a value that one request fetches."""

    start: int
    end: int


def spans_of(ranges: Iterable[tuple[int, memoryview]]) -> list[ByteSpan]:
    """The fewest requests for `ranges`: those near each other are joined.

    >>> spans_of([(5 << 20, memoryview(b"1234")), (0, memoryview(b"12")), (9, memoryview(b"1"))])
    [ByteSpan(start=0, end=10), ByteSpan(start=5242880, end=5242884)]
    """
    spans: list[ByteSpan] = []
    for start, buffer in sorted(ranges, key=lambda each: each[0]):
        end = start + buffer.nbytes
        if end == start:
            continue
        if spans and start - spans[-1].end <= _GAP_BYTES:
            spans[-1] = ByteSpan(spans[-1].start, max(end, spans[-1].end))
        else:
            spans.append(ByteSpan(start, end))
    return spans


class ObjectClient(RemoteClient):
    """Objects of one bucket, each created once and never changed.

    Credentials come from the environment as obstore and the tools of each cloud read it
    (`AWS_ACCESS_KEY_ID`, ...; instance roles). They need the rights to list, get, put and delete
    objects.

    Args:
        scheme: s3, gs or az.
        bucket: its name; for az, the container.
        endpoint: URL of the server, for S3-compatible stores; http:// is allowed where it says so.
        region: of the bucket (s3).

    Raises:
        ConfigError: obstore refuses the options.
    """

    def __init__(
        self, scheme: str, bucket: str, *, endpoint: str | None = None, region: str | None = None
    ) -> None:
        self._where = f"{scheme}://{bucket}"
        self._scheme = scheme
        self._store = _open(scheme, bucket, endpoint, region)
        self._is_checked = False
        self._closed = False
        self._process_id = os.getpid()
        self._removing: set[str] = set()
        # Held while a request is handed to the loop, so that none is after `close`.
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="kvferry-objects", daemon=True
        )
        self._thread.start()
        # A request under way as the interpreter ends would make a thread of obstore's panic.
        atexit.register(_close_if_alive, weakref.ref(self))

    def check(self, deadline: float, name: str = "") -> None:
        """Ask for a list under the prefix of `name`. For the one who opens a store; the first call
        of any other kind does it, too: a HEAD or GET says the same of an absent bucket as of an
        absent object, and so would hide the mistake.

        Raises:
            ConfigError: the bucket or the credentials are wrong.
            StoreError: the server failed, or the deadline passed.
        """
        prefix, slash, _ = name.rpartition("/")
        # Behind all names, so that the answer is short.
        stream = self._list(prefix, offset=f"{prefix}{slash}~")
        self._run("first request", _next_page(stream), deadline)
        self._is_checked = True

    def read(
        self, name: str, ranges: Sequence[tuple[int, memoryview]], deadline: float
    ) -> int | None:
        self._first_check(name, deadline)
        spans = spans_of(ranges)
        found = self._run("read", self._fetch(name, spans), deadline)
        if found is None:
            return None
        size, parts = found
        for offset, buffer in ranges:
            target = buffer.cast("B")
            for span, content in zip(spans, parts, strict=True):
                if len(target) and span.start <= offset < span.end:
                    first = offset - span.start
                    part = content[first : first + len(target)]
                    target[: len(part)] = part
        return size

    def put(self, name: str, buffers: Sequence[Buffer], deadline: float) -> PutResult:
        self._first_check(name, deadline)
        # A copy: a request that was cancelled may look at it for a moment longer.
        content = b"".join(buffers)
        return self._run("put", self._create(name, content), deadline)

    def exists(self, names: Sequence[str], deadline: float) -> list[bool]:
        if not names:
            return []
        self._first_check(names[0], deadline)
        return self._run("look up", self._find(names), deadline)

    def delete(self, name: str, deadline: float) -> bool:
        """Of callers in several processes at once, more than one may get True."""
        self._first_check(name, deadline)
        return self._run("delete", self._remove(name), deadline)

    def scan(self, prefix: str, deadline: float) -> Iterator[tuple[str, int, float]]:
        self._first_check(prefix, deadline)
        stream = self._list(prefix.rstrip("/"))
        while page := self._run("list", _next_page(stream), deadline):
            for found in page:
                yield found["path"], found["size"], found["last_modified"].timestamp()

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if os.getpid() != self._process_id:
                return  # a forked child has neither the thread nor its requests
            # After all that was handed over before, which it therefore finds among the tasks.
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    async def _fetch(
        self, name: str, spans: Sequence[ByteSpan]
    ) -> tuple[int, list[memoryview]] | None:
        """The size of the value, and the bytes of each span; None if it is absent."""
        try:
            if not spans:
                return await self._size(name), []
            found = await _gather(self._fetch_span(name, span) for span in spans)
        except FileNotFoundError as error:
            if _NO_BUCKET.search(str(error)):
                raise
            return None
        return found[0][0], [content for _, content in found]

    async def _fetch_span(self, name: str, span: ByteSpan) -> tuple[int, memoryview]:
        try:
            response = await obstore.get_async(
                self._store, name, options={"range": (span.start, span.end)}
            )
        except BaseError as error:
            if _NO_RANGE not in str(error):
                raise
            return await self._size(name), memoryview(b"")  # all of it lies behind the end
        return response.meta["size"], memoryview(await response.bytes_async())

    async def _size(self, name: str) -> int:
        return (await obstore.head_async(self._store, name))["size"]

    async def _create(self, name: str, content: bytes) -> PutResult:
        try:
            await obstore.put_async(self._store, name, content, mode="create")
        except AlreadyExistsError:
            return PutResult.EXISTS
        return PutResult.STORED

    async def _find(self, names: Sequence[str]) -> list[bool]:
        limit = asyncio.Semaphore(_HEADS_IN_FLIGHT)

        async def find(name: str) -> bool:
            async with limit:
                try:
                    await self._size(name)
                except FileNotFoundError:
                    return False
                return True

        return await _gather(find(name) for name in names)

    async def _remove(self, name: str) -> bool:
        if name in self._removing:
            return False
        self._removing.add(name)
        try:
            await self._size(name)  # S3 says of what was absent, too, that it was deleted
            await obstore.delete_async(self._store, name)
        except FileNotFoundError:
            return False
        finally:
            self._removing.discard(name)
        return True

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    def _list(self, prefix: str, offset: str | None = None) -> ListStream[Sequence[ObjectMeta]]:
        try:
            return obstore.list(self._store, prefix or None, offset=offset, chunk_size=_PAGE)
        except ValueError:
            raise StoreError(f"{self._where}: {prefix!r} cannot be a prefix") from None

    def _first_check(self, name: str, deadline: float) -> None:
        if not self._is_checked:
            try:
                self.check(deadline, name)
            except ConfigError as error:
                raise StoreError(str(error)) from None

    def _run(self, what: str, request: Coroutine[Any, Any, T], deadline: float) -> T:
        """Run `request` on the loop until `deadline`."""
        seconds = max(0.0, min(deadline - time.monotonic(), _LONGEST_SECONDS))
        with self._lock:
            if self._closed:
                request.close()
                raise StoreError(f"{self._where}: closed")
            future = asyncio.run_coroutine_threadsafe(
                asyncio.wait_for(request, seconds), self._loop
            )
        try:
            return future.result(seconds + _GRACE_SECONDS)
        except TimeoutError:
            future.cancel()
            raise StoreError(f"{self._where}: {what} did not end within {seconds:.1f} s") from None
        except CancelledError:
            raise StoreError(f"{self._where}: closed") from None
        except (BaseError, OSError, ValueError) as error:
            # Not chained: its text can show the request.
            raise self._translate(what, str(error), type(error).__name__) from None

    def _translate(self, what: str, text: str, kind: str) -> ConfigError | StoreError:
        """One line about an error of obstore, without its text."""
        found = _CODE.search(text) or _STATUS.search(text) or _CONNECTION.search(text)
        reason = found.group(found.lastindex or 0) if found else kind
        hint = ""
        if "BadScheme" in text:
            hint = "; an http:// endpoint belongs into the URL: ?endpoint=http://..."
        elif _NO_BUCKET.search(text):
            hint = "; create it or correct its name"
        elif _DENIED.search(text):
            hint = f"; check {_CREDENTIALS[self._scheme]} and the rights to list, get and put"
        message = f"{self._where}: {what} failed: {reason}{hint}"
        return ConfigError(message) if hint and not self._is_checked else StoreError(message)


async def _gather(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once; when one fails, the others end."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _next_page(stream: ListStream[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta]:
    """Empty at the end."""
    try:
        return await anext(stream)
    except StopAsyncIteration:
        return ()


def _close_if_alive(client: weakref.ref[ObjectClient]) -> None:
    alive = client()
    if alive is not None:
        alive.close()


def _open(scheme: str, bucket: str, endpoint: str | None, region: str | None) -> ObjectStore:
    client: ClientConfig = {"timeout": f"{_LONGEST_SECONDS:.0f}s"}
    if endpoint is not None:
        if "@" in endpoint:
            raise ConfigError(
                f"{scheme}://{bucket}: an endpoint holds no credentials; "
                f"set {_CREDENTIALS[scheme]} instead"
            )
        client["allow_http"] = endpoint.startswith("http://")
    given = {"endpoint": endpoint, "region": region}
    options: Any = {name: value for name, value in given.items() if value is not None}
    unusable = options.keys() - {"s3": {"endpoint", "region"}, "az": {"endpoint"}}.get(
        scheme, set()
    )
    if unusable:
        raise ConfigError(f"{scheme}://{bucket}: {scheme} has no option {min(unusable)!r}")
    _check_environment(scheme, bucket)
    try:
        if scheme == "gs":
            return GCSStore(bucket, client_options=client, retry_config=_RETRIES)
        if scheme == "az":
            return AzureStore(bucket, config=options, client_options=client, retry_config=_RETRIES)
        # Single deletes: not every compatible server knows the bulk request.
        options["disable_bulk_delete"] = True
        return S3Store(bucket, config=options, client_options=client, retry_config=_RETRIES)
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


def _check_environment(scheme: str, bucket: str) -> None:
    """Refuse variables at which obstore would panic; values are not shown."""
    for name, value in os.environ.items():
        if name.startswith(_VARIABLES[scheme]) and not value.isprintable():
            raise ConfigError(
                f"{scheme}://{bucket}: the variable {name} holds a line break or another "
                "character that cannot be printed; remove it"
            )
        if name.startswith(_VARIABLES[scheme]) and _ENDPOINTS.fullmatch(name):
            check_endpoint(name, value, "http://minio:9000")
