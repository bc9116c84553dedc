"""Servers that lie: what they cost is bounded by what was asked, whatever they send."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.errors import StoreError
from kvferry.store.servers.mooncake import MooncakeClient, MooncakeOptions
from kvferry.store.servers.objects import ObjectClient, ObjectOptions
from kvferry.store.tiers.health import Patience
from kvferry.store.url import open_store
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from tests.servers.hostile_s3 import LISTS, WAYS, running_hostile_s3
from tests.servers.victim import MAX_STALL_SECONDS

LIMIT_SECONDS = 0.6
# Where nothing is to fail, on a busy machine either.
PATIENT_SECONDS = 30.0
# What a call may take beyond its deadline, on a busy machine. One that ignores it takes longer.
LATE_SECONDS = 5.0
MAX_BYTES = 64 << 20
HARMLESS = {"laughs", "long-name"}
"""Ways that no call has to notice."""

# Those of HTTP, whatever is asked for.
HTTP_WAYS = [
    "endless-headers", "endless-header", "endless-status", "endless-interim", "no-http",
    "redirects", "hung",
]  # fmt: skip


@pytest.fixture(autouse=True)
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "kvferry-tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "correct-horse-battery-staple")


@pytest.fixture(scope="module")
def hostile():
    with running_hostile_s3() as server:
        yield server


def attacked(kind, place, ways, seconds=LIMIT_SECONDS):
    """What came of all calls, in a process of its own that writes nothing to stderr."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.store.servers.attacked", kind, place, ways, str(seconds)],
        cwd=Path(__file__).parents[3],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    for row in found["calls"].values():
        assert row["seconds"] < seconds + LATE_SECONDS
        message = row.get("error", "")
        assert message.isprintable()
        assert len(message) < 300
    stalls = {name: row["stall"] for name, row in found["calls"].items()}
    assert not {name: each for name, each in stalls.items() if each >= MAX_STALL_SECONDS}
    assert found["own_bytes"] < MAX_BYTES
    return found


@pytest.fixture(scope="module")
def child_bytes(hostile):
    """What the child takes where the server is honest."""
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "kvferry-tests")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "correct-horse-battery-staple")
    found = attacked("s3", hostile.endpoint, "honest", PATIENT_SECONDS)
    assert not [row for row in found["calls"].values() if "error" in row]
    return found["child_bytes"]


def of_ways(found, ways):
    """The calls of a process by the way in which they were answered."""
    calls = found["calls"].items()
    return {way: {name: row for name, row in calls if name.split()[0] == way} for way in ways}


@pytest.mark.parametrize("harmless", [False, True])
def test_a_bucket_costs_no_more_than_was_asked_for(hostile, child_bytes, harmless):
    """All ways in one process, which takes no more memory than for one."""
    ways = [way for way in WAYS if (way in HARMLESS) == harmless]
    seconds = PATIENT_SECONDS if harmless else LIMIT_SECONDS
    found = attacked("s3", hostile.endpoint, ",".join(ways), seconds)
    assert found["child_bytes"] - child_bytes < MAX_BYTES
    for way, calls in of_ways(found, ways).items():
        assert calls, way
        assert any("error" in row for row in calls.values()) == (not harmless), way


def test_fuzzed_answers_of_a_bucket_are_right_or_one_error(hostile, child_bytes):
    found = attacked("s3", hostile.endpoint, ",".join(f"fuzz-{seed}" for seed in range(40)))
    assert found["child_bytes"] - child_bytes < MAX_BYTES
    failed = [row for row in found["calls"].values() if "error" in row]
    assert 0 < len(failed) < len(found["calls"])


@pytest.mark.parametrize("way", ["refused-range", "two-values"])
def test_a_read_brings_no_bytes_of_the_call_before(hostile, closing, way):
    client = closing(
        ObjectClient("s3", way, ObjectOptions(endpoint=hostile.endpoint, region="us-east-1"))
    )
    buffers = [memoryview(bytearray(16)) for _ in range(2)]
    ranges = list(zip((0, 4 << 20), buffers, strict=True))
    client.put("kv/b", [b"others" * 10], time.monotonic() + PATIENT_SECONDS)
    size = None
    with suppress(StoreError):
        size = client.read("kv/a", ranges, time.monotonic() + PATIENT_SECONDS)
    assert size is None
    assert b"others"[:2] not in bytes(buffers[0]) + bytes(buffers[1])


def test_a_list_of_mooncake_costs_no_more_than_was_asked_for(mooncake, hostile):
    ways = [f"{hostile.endpoint}/{way}" for way in (*LISTS, *HTTP_WAYS)]
    found = attacked("mooncake", mooncake.master, ",".join(ways))
    for way, calls in of_ways(found, ways).items():
        assert "list" in calls[f"{way} scan"]["error"], way


@pytest.mark.parametrize(
    "way", ["endless-body", "huge-length", "error-403", "error-404", "endless-headers", "no-range"]
)
def test_a_store_that_lies_is_left_alone_with_one_line(hostile, caplog, way):
    caplog.set_level(logging.WARNING)
    url = f"s3://{way}/kv?endpoint={hostile.endpoint}&region=us-east-1"
    with open_store(url, namespace=bytes(32)) as store:
        for _ in range(Patience().max_failures):
            with pytest.raises(StoreError):
                store.read(make_key(), [(0, memoryview(bytearray(16)))], time.monotonic() + 20)
        assert not store.takes_values
        (line,) = [each.getMessage() for each in caplog.records]
        assert "not used until it answers" in line


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


@pytest.fixture(params=["s3", "mooncake"])
def make_misled(request, tmp_path):
    """A client whose child process does something else."""
    kind, *arguments = {
        "s3": (ObjectClient, "s3", "b", ObjectOptions()),
        "mooncake": (MooncakeClient, "127.0.0.1:1", MooncakeOptions()),
    }[request.param]
    clients = []

    def make(does):
        script = tmp_path / "child.py"
        script.write_text(textwrap.dedent(_CHILD).format(does=does))
        misled = type("Misled", (kind,), {"script": str(script)})
        clients.append(misled(*arguments))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.mark.parametrize(
    "does",
    [
        r'end.sendall(b"nonsense\n")',
        r'end.sendall(b"\"text\"\n")',
        r'end.sendall(b"null\n")',
        r'end.sendall(b"[]\n")',
        r'end.sendall(b"{{}}\n")',
        r'end.sendall(b"[" * 100_000 + b"\n")',
        'while True: end.sendall(b"1" * (1 << 20))',
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


def test_a_child_that_died_of_a_flood_is_replaced(hostile):
    client = ObjectClient(
        "s3", "error-404", ObjectOptions(endpoint=hostile.endpoint, region="us-east-1")
    )
    try:
        with pytest.raises(StoreError, match="more than fits into its memory"):
            client.read("kv/a", [(0, memoryview(bytearray(16)))], time.monotonic() + 20)

        def answers():
            try:
                client.check(time.monotonic() + 20)
            except StoreError:
                return False
            return True

        wait_until(answers, "another process")
    finally:
        client.close()
