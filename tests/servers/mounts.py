"""A file server's directory, mounted twice with FUSE. The two mounts stand for two machines: each
caches attributes and pages on its own, and neither sees the other's file locks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.testing.stores.hooks import wait_until
from tests.servers.process import ServerProcess
from tests.servers.seaweed import SeaweedServer

INSTALL = "apt-get install fuse3 sshfs openssh-sftp-server"
NAMES = ("a", "b")
STALE_SECONDS = 5
"""How long SSHFS caches what it knows of a file, or that a file is absent."""


def need_fuse() -> None:
    """Fail the test if FUSE cannot be used, with a message that says what to do."""
    for tool in ("fusermount3", "sshfs"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is not installed: run {INSTALL}", pytrace=False)
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        pytest.fail(
            f"FUSE cannot be used: /dev/fuse: {error.strerror}; the kernel needs the module "
            "`fuse`, a container needs --device /dev/fuse --cap-add SYS_ADMIN",
            pytrace=False,
        )


class Mounts(ABC):
    """One directory of one server, mounted at `root/a` and `root/b`.

    Attributes:
        stale_seconds: how long one mount may not see what was done through the other.
    """

    stale_seconds = 1.0

    def __init__(self, root: Path) -> None:
        need_fuse()
        self._root = root
        self._mounts: dict[str, ServerProcess] = {}

    def start(self) -> None:
        for name in NAMES:
            place = self.place(name)
            place.mkdir()
            process = self._mounts[name] = self._mount(name)
            process.wait_ready(place.is_mount)

    def place(self, name: str) -> Path:
        return self._root / name

    def stop(self) -> None:
        """Kill the server and unmount. Whoever waits for a file gets an error."""
        self.kill_server()
        for name, process in self._mounts.items():
            process.kill()
            place = self.place(name)
            unmount = ["fusermount3", "-u", "-z", str(place)]
            subprocess.run(unmount, check=False, capture_output=True)
            wait_until(lambda path=str(place): path not in _mounted(), "the end of a mount")

    @abstractmethod
    def pause(self) -> None:
        """Stop the server from answering; the mounts stay."""

    @abstractmethod
    def resume(self) -> None: ...

    @abstractmethod
    def kill_server(self) -> None: ...

    @abstractmethod
    def _mount(self, name: str) -> ServerProcess: ...


class SeaweedMounts(Mounts):
    """Mounts of SeaweedFS by `weed mount`, with its default caches."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._server = SeaweedServer(root)

    def pause(self) -> None:
        self._server.process.pause()

    def resume(self) -> None:
        self._server.process.resume()

    def kill_server(self) -> None:
        self._server.stop()

    def _mount(self, name: str) -> ServerProcess:
        cache = self._root / f"cache-{name}"
        cache.mkdir()
        command = [
            str(Path(sys.executable).parent / "weed"), "-logtostderr=true", "mount",
            f"-filer={self._server.filer}", f"-dir={self.place(name)}", "-filer.path=/shared",
            f"-cacheDir={cache}", f"-localSocket={self._root / name}.sock",
        ]  # fmt: skip
        return ServerProcess(command, self._root / f"{name}.log")


class SshfsMounts(Mounts):
    """Mounts of SSHFS, each with its own SFTP server and caches that are stale for seconds."""

    stale_seconds = float(STALE_SECONDS)

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._shared = root / "shared"
        self._shared.mkdir()
        self._servers: list[ServerProcess] = []

    def pause(self) -> None:
        for server in self._servers:
            server.pause()

    def resume(self) -> None:
        for server in self._servers:
            server.resume()

    def kill_server(self) -> None:
        for server in self._servers:
            server.kill()

    def _mount(self, name: str) -> ServerProcess:
        of_server, of_client = socket.socketpair()
        with of_server, of_client:
            log = self._root / f"{name}.log"
            server = "/usr/lib/openssh/sftp-server"
            self._servers.append(ServerProcess([server], log, stream=of_server.fileno()))
            options = [
                f"{option}={STALE_SECONDS}"
                for option in (
                    "dcache_timeout", "attr_timeout", "entry_timeout", "negative_timeout",
                )
            ]  # fmt: skip
            options += ["passive", "max_conns=1"]
            command = [
                "sshfs", "-f", f":{self._shared}", str(self.place(name)), "-o", ",".join(options),
            ]  # fmt: skip
            return ServerProcess(command, log, stream=of_client.fileno())


KINDS: dict[str, Callable[[Path], Mounts]] = {"seaweedfs": SeaweedMounts, "sshfs": SshfsMounts}


def _mounted() -> set[str]:
    """Return the mount points in the kernel's list. A look at a place would ask a dead mount."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return {line.split()[1] for line in lines}
