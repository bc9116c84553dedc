"""The script of a `ChildClient`'s child process: it hands the commands of its lanes to workers.

A lane is a socket and a part of shared memory, and has a thread. The thread reads one command,
works, and sends one answer; each is a line of JSON. The first answer is 0 if the lane is ready, or
says why it cannot be.

The option `worker` names a file, `mooncake_child.py`. From it come

    make_lanes(options, memories)   the `Worker` of each lane, or the reason why there is none
    close(workers)                  called once a lane has ended

Neither file imports anything of kvferry, as the child may not find it where the parent did.
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
        """Return the answer to a command. An exception ends the process."""

    def give_up(self) -> None:
        """End work that waits for another command. Also called when the lane ends."""


def serve_lane(end: socket.socket, worker: Worker) -> None:
    """Answer the commands of a lane until the other end closes."""
    lines = end.makefile("rb")
    # Not `select`, which takes no descriptor above 1023: the number is the parent's.
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
    """Serve all lanes until the parent closes a socket, or is gone."""
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
    over = threading.Event()

    def run(end: socket.socket, worker: Worker) -> None:
        try:
            serve_lane(end, worker)
        finally:
            over.set()

    for each in zip(ends, workers, strict=True):
        threading.Thread(target=run, args=each, daemon=True).start()
    # One that ends is enough: the parent closes or is gone, or a worker raised. Others may hang.
    over.wait()
    module.close(workers)


if __name__ == "__main__":
    # Ctrl-C is for the parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        serve(json.load(sys.stdin))
    finally:
        os._exit(0)  # at once: in an orderly exit, threads may panic or hang
