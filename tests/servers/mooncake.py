"""Runs Mooncake's master on free ports of loopback, and a process that lends it memory."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import LOCALHOST, ServerProcess, accepts, free_ports

INSTALL = "pip install mooncake-transfer-engine-non-cuda"
LIBRARY = "apt-get install -y libibverbs1 libnuma1 libcurl4"
SEGMENT_BYTES = 192 << 20

# Libraries of the system that Mooncake links, and the Debian packages that hold them.
_DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
}

# Lends memory until it is killed.
_LENDER = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, metadata, num_bytes = sys.argv[1:]
code = store.setup("127.0.0.1", metadata, int(num_bytes), 0, "tcp", "", master)
assert code == 0, code
threading.Event().wait()
"""


class MooncakeServer:
    """A master and a process that lends memory.

    Args:
        has_metadata: whether the master also tells where each lender is; otherwise lenders tell it.

    Attributes:
        master: `host:port` of the master.
        admin: URL of the master's metrics port.
        metadata: value of the clients' option `metadata`.
        process: the running master.
        lender: the process that holds the values.
    """

    def __init__(self, root: Path, *, has_metadata: bool = False) -> None:
        self._root = root
        self._rpc, self._admin, self._places = free_ports(3)
        self.metadata = "P2PHANDSHAKE"
        if has_metadata:
            self.metadata = f"http://{LOCALHOST}:{self._places}/metadata"
        self.master = f"{LOCALHOST}:{self._rpc}"
        self.admin = f"http://{LOCALHOST}:{self._admin}"
        self.start()

    def start(self) -> None:
        """Start both processes, empty, on the same ports as before."""
        command = [
            str(_package() / "mooncake_master"),
            f"-rpc_port={self._rpc}",
            f"-metrics_port={self._admin}",
            "-logtostderr=1",
        ]
        if self.metadata != "P2PHANDSHAKE":
            command += ["-enable_http_metadata_server=true"]
            command += [f"-http_metadata_server_port={self._places}"]
        self.process = ServerProcess(command, self._root / "master.log")
        self.process.wait_ready(lambda: accepts(self._rpc) and accepts(self._admin))
        self.lender = ServerProcess(
            [sys.executable, "-c", _LENDER, self.master, self.metadata, str(SEGMENT_BYTES)],
            self._root / "lender.log",
        )
        self.lender.wait_ready(self._has_segment)

    def stop(self) -> None:
        self.lender.kill()
        self.process.kill()

    @property
    def values_port(self) -> int:
        """Port on which the lender takes reads and writes of values. Needs `has_metadata`."""
        return int(self._lender_place()["tcp_data_port"])

    def move_values(self, port: int) -> None:
        """Make later clients read and write values through this port of loopback."""
        place = self._lender_place() | {"tcp_data_host": LOCALHOST, "tcp_data_port": port}
        self._ask(self._lender_url(), json.dumps(place).encode())

    def _lender_place(self) -> dict[str, object]:
        return dict(json.loads(self._ask(self._lender_url())))

    def _lender_url(self) -> str:
        (lender,) = self._ask(f"{self.admin}/get_all_segments").split()
        return f"{self.metadata}?key={urllib.parse.quote(f'mooncake/ram/{lender}', safe='')}"

    def _has_segment(self) -> bool:
        if not self._ask(f"{self.admin}/get_all_segments").strip():
            return False
        try:
            return self.metadata == "P2PHANDSHAKE" or self.values_port > 0
        except OSError:  # the lender has not said yet where it is
            return False

    @staticmethod
    def _ask(url: str, body: bytes | None = None) -> str:
        """Return the answer to a GET, or to a PUT of `body`."""
        request = urllib.request.Request(url, body, method="GET" if body is None else "PUT")
        with urllib.request.urlopen(request, timeout=5) as response:
            return str(response.read().decode())


def _package() -> Path:
    """Return the folder of the installed package, once its programs find their libraries."""
    spec = importlib.util.find_spec("mooncake")
    if spec is None or spec.origin is None:
        pytest.fail(f"Mooncake is not installed: run {INSTALL}", pytrace=False)
    package = Path(spec.origin).parent
    folder = Path(sys.prefix) / "debian-libraries"
    tried: set[str] = set()
    while missing := _missing_libraries(package / "mooncake_master", folder):
        packages = {_DEBIAN[name] for name in missing if name in _DEBIAN} - tried
        if not packages or not _unpack(sorted(packages), folder):
            pytest.fail(f"Mooncake lacks {', '.join(missing)}: run {LIBRARY}", pytrace=False)
        tried |= packages
    return package


def _missing_libraries(program: Path, folder: Path) -> list[str]:
    """Add `folder` to the library path of this process and its children, and return the libraries
    that `program` still does not find."""
    paths = [str(each.parent) for each in folder.glob("**/lib*.so*")]
    known = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    os.environ["LD_LIBRARY_PATH"] = ":".join(dict.fromkeys([*paths, *filter(None, known)]))
    if not os.environ["LD_LIBRARY_PATH"]:
        del os.environ["LD_LIBRARY_PATH"]
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)
    return sorted({line.split()[0] for line in linked.stdout.splitlines() if "not found" in line})


def _unpack(packages: list[str], folder: Path) -> bool:
    """Unpack Debian packages into a folder of the virtual environment, which needs no root."""
    folder.mkdir(exist_ok=True)
    try:
        subprocess.run(
            ["apt-get", "download", "-qq", *packages], cwd=folder, check=True, timeout=120
        )
        for each in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", each, folder], check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


@pytest.fixture(scope="session")
def mooncake() -> Iterator[MooncakeServer]:
    """A server that runs for the session. A test that stops it starts it again."""
    with tempfile.TemporaryDirectory(prefix="kvferry-mooncake-") as root:
        server = MooncakeServer(Path(root))
        try:
            yield server
        finally:
            server.stop()
