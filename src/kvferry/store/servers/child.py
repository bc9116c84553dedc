"""The child process of a `ChildClient`, a script: it hands the commands of its lanes to a worker.

Each lane is a socket and a part of shared memory. A lane reads one command, works, and sends one
answer: lines of JSON. The first answer says that the lane is ready: 0, or why it cannot be.

The worker is a file, `mooncake_child.py` or `objects_child.py`, of which this runs

    make_lanes(options, memories)   the `Worker` of each lane, or the reason why there is none
    close(workers)                  once a lane has ended

and which says how large the stack of a lane's thread is: `STACK_BYTES`, 0 for the system's size.

Neither imports anything of kvferry: where the parent found it may be no place of the child's.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import select
import signal
import socket
import sys
import threading
from typing import Any, Protocol


class Worker(Protocol):
    """Carries out the commands of one lane, one after the other, in a thread of its own."""

    @property
    def patience(self) -> float | None:
        """Seconds without a command after which `give_up` is called; None for never."""

    def answer(self, command: str, *arguments: Any) -> object:  # noqa: ANN401
        """The answer to a command; what this raises ends the process."""

    def give_up(self) -> None:
        """End what waits for another command."""


def serve_lane(end: socket.socket, worker: Worker) -> None:
    """Until the other end closes."""
    lines = end.makefile("rb")
    # Not `select`, which takes no descriptor above 1023; it is the parent's.
    coming = select.poll()
    coming.register(end, select.POLLIN)
    answer: object = 0
    while True:
        end.sendall(json.dumps(answer).encode() + b"\n")
        if worker.patience is not None and not coming.poll(1000 * worker.patience):
            worker.give_up()
        line = lines.readline()
        if not line:
            return worker.give_up()
        answer = worker.answer(*json.loads(line))


def serve(options: dict[str, Any]) -> None:
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
    are_ready, over = threading.Event(), threading.Event()

    def run(end: socket.socket, worker: Worker) -> None:
        are_ready.wait()  # with the memory of all threads: from the first answer on it is limited
        try:
            serve_lane(end, worker)
        finally:
            over.set()

    threading.stack_size(module.STACK_BYTES)
    for each in zip(ends, workers, strict=True):
        threading.Thread(target=run, args=each, daemon=True).start()
    are_ready.set()
    # The first lane that ends shows that the parent closes, or is gone: another may hang for long.
    over.wait()
    module.close(workers)


if __name__ == "__main__":
    # Ctrl-C is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(json.load(sys.stdin))
    finally:
        os._exit(0)  # without the end of what is under way, in which threads may panic or hang
