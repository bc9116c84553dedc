"""LMCache's server, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry.bench.vllm.cases import SERVER_PORT
from kvferry.errors import ConfigError

START_SECONDS = 120.0


@contextmanager
def lmcache_server(directory: Path, log: Path) -> Iterator[None]:
    """Run a server that keeps its files in `directory`; its whole process group ends afterwards.

    Raises:
        ConfigError: it does not come up in time.
    """
    adapter = json.dumps({"type": "fs", "base_path": str(directory)})
    http_port = _free_port()
    command = [
        *(sys.executable, "-m", "lmcache.cli.main", "server"),
        *("--port", str(SERVER_PORT), "--http-port", str(http_port)),
        *("--l1-size-gb", "1", "--eviction-policy", "LRU"),
        *("--supported-transfer-mode", "auto", "--l2-adapter", adapter),
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    try:
        _await(process)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _await(process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", SERVER_PORT)) == 0:
                return
        time.sleep(0.2)
    raise ConfigError("LMCache's server does not start")
