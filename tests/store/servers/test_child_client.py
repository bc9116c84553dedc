"""The client of a child process that misbehaves, and a lane to one without the process."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import textwrap
import time

import pytest

from kvferry.errors import StoreError
from kvferry.store.servers.child_client import LaneEnd, _Gone
from kvferry.store.servers.mooncake import MooncakeClient, MooncakeOptions

LIMIT_SECONDS = 0.6
# Where nothing is to fail, on a busy machine either.
PATIENT_SECONDS = 30.0
# What a call may take beyond its deadline, on a busy machine. One that ignores it takes longer.
LATE_SECONDS = 20.0


def test_a_child_that_takes_no_command_is_not_said_to_have_crashed():
    end, unread = socket.socketpair()
    with end, unread:
        lane = LaneEnd(end, mmap.mmap(-1, 4096), 0, 4096)
        with pytest.raises(_Gone, match="did not take a command in time"):
            lane.ask(["exists", "k" * (16 << 20)], time.monotonic() + 0.01)


# Ready at once, it answers every command with the same bytes.
_CHILD = """
import json, os, socket, sys, threading
options = json.load(sys.stdin)
def serve(end):
    end.sendall(b"0\\n")
    while end.recv(1 << 20):
        {does}
ends = [socket.socket(fileno=fd) for fd in options["sockets"]]
for end in ends:
    threading.Thread(target=serve, args=[end]).start()
"""


@pytest.fixture
def make_misled(tmp_path, closing):
    """A client whose child process does something else."""

    def make(does):
        script = tmp_path / "child.py"
        script.write_text(textwrap.dedent(_CHILD).format(does=does))
        misled = type("Misled", (MooncakeClient,), {"script": str(script)})
        return closing(misled("127.0.0.1:1", MooncakeOptions()))

    return make


@pytest.mark.parametrize(
    "does",
    [
        r'end.sendall(b"nonsense\n")',
        r'end.sendall(b"\"text\"\n")',
        r'end.sendall(b"null\n")',
        r'end.sendall(b"[]\n")',
        r'end.sendall(b"{{}}\n")',
        r'end.sendall(b"[" * 100_000 + b"\n")',
        "os._exit(1)",
        "os.kill(os.getpid(), 11)",
        "pass",
    ],
)
def test_a_child_that_misbehaves_is_one_error(make_misled, does):
    client = make_misled(does)
    for call in (
        lambda until: client.read("kv/a", [(0, memoryview(bytearray(16)))], until),
        lambda until: client.exists(["kv/a"], until),
        lambda until: client.delete("kv/a", until),
        lambda until: client.put("kv/a", [bytes(10)], until),
    ):
        started = time.monotonic()
        with pytest.raises(StoreError) as caught:
            call(started + LIMIT_SECONDS)
        assert time.monotonic() - started < LIMIT_SECONDS + LATE_SECONDS
        assert str(caught.value).isprintable()


def test_a_process_with_many_open_files_makes_calls(make_misled):
    many = 1100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(many)]
    try:
        client = make_misled(r'end.sendall(b"[1]\n")')
        # Not that no descriptor fits: the child answers, and wrongly.
        with pytest.raises(StoreError, match="cannot be read"):
            client.delete("kv/a", time.monotonic() + PATIENT_SECONDS)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
