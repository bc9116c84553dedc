"""The worker in the child process of `kvferry.store.servers.objects`; `child.py` runs it. Imports
nothing of kvferry.

obstore keeps in memory all that a server sends as a list or as an error, even if it has no end, and
panics on some of it. In its own process with little memory, that costs only the calls under way.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, S3Store

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig

T = TypeVar("T")

NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_NO_RANGE = "status code: 416"
_HEADS_IN_FLIGHT = 32
STACK_BYTES = 512 << 10
"""See `child.py`. Small, as stacks count as memory; deep calls run on the threads of obstore."""

_READS_IN_FLIGHT = 5

# Few and quick: a failed call is a miss, and the tier above decides when to try again.
_RETRIES: RetryConfig = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(milliseconds=500),
    },
}
# A piece of a read takes four times its size in memory for a moment. A short read is one piece.
_SHORT_BYTES = 2560 << 10
_PIECE_BYTES = 1 << 20
_PAGE = 1000
_PAGE_CHARACTERS = 128 << 10
# S3's limit; no name of a record is as long.
_MAX_NAME_CHARACTERS = 1024
_MAX_TEXT_CHARACTERS = 16 << 10
# Few threads and few arenas of malloc, as both count as memory.
ENVIRONMENT = {
    "TOKIO_WORKER_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    # Stacks of threads that look up host names: each broken connection to a slow server means one.
    "RUST_MIN_STACK": str(256 << 10),
}


def make_store(scheme: str, bucket: str, options: dict[str, Any], client: ClientConfig) -> Any:  # noqa: ANN401
    """Return a store of obstore; raises what obstore raises."""
    kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[scheme]
    return kind(bucket, config=options, client_options=client, retry_config=_RETRIES)


class WrongAnswer(Exception):
    """The server sent something other than what was asked for."""


class ObjectLane:
    """A `Worker` of `child.py`, whose commands have a time limit. Lanes share the event loop, the
    names that a lane is `removing`, and the limits of GET (`reads`) and HEAD requests (`heads`)."""

    patience = None
    give_up = staticmethod(lambda: None)

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        store: Any,  # noqa: ANN401
        memory: memoryview,
        removing: set[str],
        reads: asyncio.Semaphore,
        heads: asyncio.Semaphore,
    ) -> None:
        self._loop = loop
        self._store = store
        self._memory = memory
        self._removing = removing
        self._reads = reads
        self._heads = heads
        self._stream: Any = None
        self._listed: list[tuple[str, int, float]] = []
        self._commands: dict[str, Callable[..., Coroutine[Any, Any, object]]] = {
            "read": self.read,
            "put": self.put,
            "exists": self.exists,
            "delete": self.delete,
            "list": self.begin_list,
            "next": self.next_page,
        }

    def answer(self, command: str, *arguments: Any) -> dict[str, object]:  # noqa: ANN401
        """Run a command; return its result, that it is late, or the text and type of an error."""
        work = self._answer(command, *arguments)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _answer(self, command: str, seconds: float, *arguments: Any) -> dict[str, object]:  # noqa: ANN401
        try:
            work = self._commands[command](*arguments)
            return {"result": await asyncio.wait_for(work, seconds)}
        except TimeoutError:
            return {"late": True}
        except asyncio.CancelledError:
            raise
        except MemoryError:
            os._exit(1)  # the memory may never be freed; the parent starts a new child
        except BaseException as error:  # a panic of obstore's is no Exception
            return {"error": str(error)[:_MAX_TEXT_CHARACTERS], "kind": type(error).__name__}

    async def read(self, name: str, spans: list[tuple[int, int]]) -> int | None:
        """Copy the bytes of each span (start, end) into the lane's memory, one after the other, up
        to the value's end. Returns the size of the value; None if it is absent or was replaced."""
        starts = [sum(end - start for start, end in spans[:each]) for each in range(len(spans))]
        try:
            if not spans:
                return await self._size(name)
            sizes = await gather(
                self._read_span(name, start, self._memory[at : at + end - start])
                for (start, end), at in zip(spans, starts, strict=True)
            )
        except FileNotFoundError as error:
            if NO_BUCKET.search(str(error)):
                raise
            return None
        # Sizes differ if the value was replaced between two requests.
        return sizes[0] if len(set(sizes)) == 1 else None

    async def _read_span(self, name: str, start: int, target: memoryview) -> int:
        async with self._reads:
            try:
                response = await obstore.get_async(
                    self._store, name, options={"range": (start, start + len(target))}
                )
            except BaseError as error:
                if _NO_RANGE not in str(error):
                    raise
                size = await self._size(name)
                if size > start:  # the range begins before the end of the value
                    raise WrongAnswer("a range inside the value was refused") from None
                return size
            size = int(response.meta["size"])
            wanted, at = max(0, min(len(target), size - start)), 0
            piece_bytes = wanted if wanted <= _SHORT_BYTES else _PIECE_BYTES
            async for piece in response.stream(max(1, piece_bytes)):
                content = memoryview(piece)
                if at + len(content) > wanted:
                    raise WrongAnswer("the server sent more than asked for")
                target[at : at + len(content)] = content
                at += len(content)
                if at == wanted:
                    break
            if at < wanted:
                raise WrongAnswer("the server sent less than the size")
            return size

    async def _size(self, name: str) -> int:
        size: int = (await obstore.head_async(self._store, name))["size"]
        return size

    async def put(self, name: str, num_bytes: int, replaces: bool) -> bool:
        """Store the first `num_bytes` of the lane's memory; False if an older value stays."""
        content = self._memory[:num_bytes]
        try:
            mode: Any = "overwrite" if replaces else "create"
            await obstore.put_async(self._store, name, content, mode=mode)
        except AlreadyExistsError:
            return False
        finally:
            await released(content)
        return True

    async def exists(self, names: Sequence[str]) -> list[bool]:
        async def find(name: str) -> bool:
            async with self._heads:
                try:
                    await self._size(name)
                except FileNotFoundError:
                    return False
                return True

        return await gather(find(name) for name in names)

    async def delete(self, name: str) -> bool:
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

    async def begin_list(self, prefix: str, offset: str | None) -> list[tuple[str, int, float]]:
        """Return the first names, sizes and times of change; `next_page` returns more, and nothing
        at the end."""
        self._listed = []
        self._stream = obstore.list(self._store, prefix or None, offset=offset, chunk_size=_PAGE)
        return await self.next_page()

    async def next_page(self) -> list[tuple[str, int, float]]:
        while not self._listed:
            try:
                page = await anext(self._stream)
            except StopAsyncIteration:
                return []
            self._listed = [
                (each["path"], each["size"], each["last_modified"].timestamp())
                for each in page
                if len(each["path"]) <= _MAX_NAME_CHARACTERS
            ]
        count = characters = 0
        while count < len(self._listed) and characters < _PAGE_CHARACTERS:
            characters += len(self._listed[count][0])
            count += 1
        some, self._listed = self._listed[:count], self._listed[count:]
        return some


async def gather(requests: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all requests at once and return their results. When one fails, cancel the others."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def released(content: memoryview) -> None:
    """Wait until no request uses `content`: a cancelled one may do so for a moment longer."""
    while True:
        try:
            return content.release()
        except BufferError:
            await asyncio.sleep(0.001)


def make_lanes(options: dict[str, Any], memories: Sequence[memoryview]) -> list[ObjectLane] | str:
    """See `child.py`."""
    try:
        store = make_store(*options["store"])
    except (BaseError, OSError, ValueError) as error:
        return f"obstore refuses it ({type(error).__name__})"
    loop = asyncio.new_event_loop()

    def run() -> None:
        try:
            loop.run_forever()
        finally:
            os._exit(1)  # no memory for the loop itself: no lane would answer again

    threading.Thread(target=run, daemon=True).start()
    removing: set[str] = set()
    limits = asyncio.Semaphore(_READS_IN_FLIGHT), asyncio.Semaphore(_HEADS_IN_FLIGHT)
    return [ObjectLane(loop, store, memory, removing, *limits) for memory in memories]


def close(_lanes: Sequence[ObjectLane]) -> None:
    """Nothing to do."""
