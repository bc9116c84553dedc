"""Mooncake's master on free ports of loopback, and a process that lends it memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import LOCALHOST, ServerProcess, accepts, free_ports

INSTALL = "pip install mooncake-transfer-engine-non-cuda"
LIBRARY = "apt-get install -y libibverbs1"
SEGMENT_BYTES = 192 << 20

# Lends memory until it is killed.
_LENDER = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, num_bytes = sys.argv[1:]
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(num_bytes), 0, "tcp", "", master)
assert code == 0, code
threading.Event().wait()
"""


class MooncakeServer:
    """A master and a lender of 192 MiB.

    Attributes:
        master: `host:port`.
        admin: URL of its metrics port.
        process: the running master.
        lender: the process that holds the values.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._rpc, self._admin = free_ports(2)
        self.master = f"{LOCALHOST}:{self._rpc}"
        self.admin = f"http://{LOCALHOST}:{self._admin}"
        self.start()

    def start(self) -> None:
        """Start both, on the same ports as before and empty."""
        self.process = ServerProcess(
            [
                str(_package() / "mooncake_master"),
                f"-rpc_port={self._rpc}",
                f"-metrics_port={self._admin}",
                "-logtostderr=1",
            ],
            self._root / "master.log",
        )
        self.process.wait_ready(lambda: accepts(self._rpc) and accepts(self._admin))
        self.lender = ServerProcess(
            [sys.executable, "-c", _LENDER, self.master, str(SEGMENT_BYTES)],
            self._root / "lender.log",
        )
        self.lender.wait_ready(self._has_segment)

    def stop(self) -> None:
        self.lender.kill()
        self.process.kill()

    def _has_segment(self) -> bool:
        with urllib.request.urlopen(f"{self.admin}/get_all_segments", timeout=5) as response:
            return bool(response.read().strip())


def _package() -> Path:
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.fail(f"Mooncake is not installed: run {INSTALL}", pytrace=False)
    package = Path(spec.origin).parent
    linked = subprocess.run(
        ["ldd", package / "mooncake_master"], capture_output=True, text=True, check=False
    )
    missing = [line.split()[0] for line in linked.stdout.splitlines() if "not found" in line]
    if missing:
        pytest.fail(f"Mooncake lacks {', '.join(missing)}: run {LIBRARY}", pytrace=False)
    return package


@pytest.fixture(scope="session")
def mooncake() -> Iterator[MooncakeServer]:
    """A running server, which ends with the session; a test that stops it starts it again."""
    with tempfile.TemporaryDirectory(prefix="kvferry-mooncake-") as root:
        server = MooncakeServer(Path(root))
        try:
            yield server
        finally:
            server.stop()
