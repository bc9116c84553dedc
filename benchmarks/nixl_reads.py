"""Reads records from another process's memory with NIXL, for the benchmark `peer`.

    pip install --no-deps nixl nixl-cu12

Without NIXL, `peer` leaves these reads out. For each record the reader first asks on a plain
socket, which stands for the question who has a key and where. Then NIXL's UCX reads the record. UCX
chooses the way: on one machine the kernel copies, or with `UCX_TLS=tcp,self` sockets carry it.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from kvferry.errors import KVError

IS_INSTALLED = find_spec("nixl") is not None
_ASK_BYTES = 64


def _make_agent(name: str) -> Any:  # noqa: ANN401 - of a package that may be absent
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # else it writes to the standard output
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def _address_of(buffer: bytes | memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


def _register(agent: Any, buffers: Sequence[bytes | memoryview]) -> list[int]:  # noqa: ANN401
    addresses = [_address_of(each) for each in buffers]
    places = [(at, len(each), 0, "") for at, each in zip(addresses, buffers, strict=True)]
    agent.register_memory(agent.get_reg_descs(places, "DRAM"))
    return addresses


def offer(records: Sequence[bytes]) -> int:
    """Let one reader read the records. Return the port that it connects to."""
    agent = _make_agent("source")
    addresses = _register(agent, records)
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        stream, _ = listener.accept()
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        parts = [agent.get_agent_metadata(), b"".join(at.to_bytes(8, "little") for at in addresses)]
        for part in parts:
            stream.sendall(len(part).to_bytes(4, "little") + part)
        while asked := stream.recv(_ASK_BYTES, socket.MSG_WAITALL):
            stream.sendall(asked)

    threading.Thread(target=answer, daemon=True).start()
    return int(listener.getsockname()[1])


class NixlReads:
    """Reads the records of `offer` one after the other, each into its slot of memory."""

    def __init__(self, port: int, slots: Sequence[memoryview]) -> None:
        self._stream = socket.create_connection(("127.0.0.1", port))
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._agent = _make_agent("reader")
        self._peer = self._agent.add_remote_agent(self._receive_part())
        remote = np.frombuffer(self._receive_part(), dtype="<u8").tolist()
        self._places = list(zip(_register(self._agent, slots), remote, strict=True))
        self._num_bytes = len(slots[0])

    def _receive_part(self) -> bytes:
        length = self._stream.recv(4, socket.MSG_WAITALL)
        return self._stream.recv(int.from_bytes(length, "little"), socket.MSG_WAITALL)

    def read(self, count: int) -> None:
        agent = self._agent
        for number in range(count):
            self._stream.sendall(b"?" * _ASK_BYTES)
            self._stream.recv(_ASK_BYTES, socket.MSG_WAITALL)
            ends = [
                agent.get_xfer_descs([(address, self._num_bytes, 0)], "DRAM")
                for address in self._places[number % len(self._places)]
            ]
            handle = agent.initialize_xfer("READ", *ends, self._peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            handle.release()
            if state != "DONE":
                raise KVError("NIXL could not read a record")

    def close(self) -> None:
        self._stream.close()
