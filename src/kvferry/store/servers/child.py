"""The child process of a `ChildClient`, a script: it hands the commands of its lanes to a worker.

Each lane is a socket and a part of shared memory. A lane reads one command, works, and sends one
answer: lines of JSON. The first answer says that the lane is ready: 0, or why it cannot be.

The worker is a file, `mooncake_child.py` or `objects_child.py`, of which this runs

    make_lanes(options, memories)   the `Worker` of each lane, or the reason why there is none
    close(workers)                  once a lane has ended

Neither imports anything of kvferry: where the parent found it may be no place of the child's.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import mmap
import os
import signal
import socket
import sys
from typing import Any, Protocol

_MAX_COMMAND_BYTES = 64 << 20


class Worker(Protocol):
    """Carries out the commands of one lane, one after the other."""

    idle_seconds: float | None
    """After so long without a command, `idle` is called; None for never."""

    async def answer(self, command: str, *arguments: Any) -> object:  # noqa: ANN401
        """The answer to a command; what this raises ends the process."""

    async def idle(self) -> None:
        """No command came for a while, or none will come any more."""


async def serve_lane(end: socket.socket, worker: Worker) -> None:
    """Until the other end closes."""
    reader, writer = await asyncio.open_connection(sock=end, limit=_MAX_COMMAND_BYTES)
    answer: object = 0
    while True:
        writer.write(json.dumps(answer).encode() + b"\n")
        await writer.drain()
        coming = asyncio.ensure_future(reader.readline())
        while not (await asyncio.wait([coming], timeout=worker.idle_seconds))[0]:
            await worker.idle()
        if not (line := await coming):
            return await worker.idle()
        answer = await worker.answer(*json.loads(line))


async def serve(options: dict[str, Any]) -> None:
    """Serve until the parent closes a socket, or is gone."""
    ends = [socket.socket(fileno=fd) for fd in options["sockets"]]
    num_bytes = options["lane_bytes"]
    memory = memoryview(mmap.mmap(options["memory"], num_bytes * len(ends)))
    memories = [memory[at * num_bytes : (at + 1) * num_bytes] for at in range(len(ends))]
    spec = importlib.util.spec_from_file_location("worker", options["worker"])
    module: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # a .py file
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    workers = module.make_lanes(options, memories)
    if isinstance(workers, str):
        for end in ends:
            end.sendall(json.dumps(workers).encode() + b"\n")
        return
    lanes = [
        asyncio.ensure_future(serve_lane(end, worker))
        for end, worker in zip(ends, workers, strict=True)
    ]
    await asyncio.wait(lanes, return_when=asyncio.FIRST_COMPLETED)
    module.close(workers)
    os._exit(0)  # without the end of what is under way, in which threads may panic or hang


if __name__ == "__main__":
    # Ctrl-C is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(serve(json.load(sys.stdin)))
    finally:
        os._exit(0)
