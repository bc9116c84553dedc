"""Makes two network namespaces with a cable between them, in which tests run processes: places of
one machine, or machines of their own as far as processes can see.

Any user may make them if the kernel lets users have namespaces. Nothing outside changes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

_ADDRESSES = ("10.77.0.1", "10.77.0.2")
CABLE = ("near", "far")
"""Names of the cable's ends."""

_SECONDS = 20.0
_ENVIRONMENT = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}
"""The environment for tools, some of which lie in folders on the path of administrators only."""

_PLACE = "ip link set lo up && echo up && exec cat"
"""A command that holds namespaces until its standard input ends, at the latest with the tests."""

_MACHINE = f"mount -t tmpfs tmpfs /dev/shm && {_PLACE}"
_APART = ["--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
"""What a machine has of its own besides its network: mounts, of which `/proc` and `/dev/shm` are
made anew, ids of processes, shared memory and a name of the host."""

_KINDS = {"user": "user", "net": "net", "mnt": "mount", "pid": "pid", "ipc": "ipc", "uts": "uts"}
"""Kinds of namespaces, and the options of `nsenter` that enter them."""


class Place(NamedTuple):
    """The place of one side of a connection.

    Attributes:
        address: address at which the other side reaches this one.
        pid: id of a process in this side's namespaces; None if they are those of the tests.
    """

    address: str
    pid: int | None

    @property
    def prefix(self) -> list[str]:
        """Words in front of a command that make it run there."""
        return [] if self.pid is None else _inside(self.pid, *_kinds(self.pid))

    @property
    def network(self) -> list[str]:
        """Words in front of a command that give it this side's network, and nothing else of it."""
        return [] if self.pid is None else _inside(self.pid, "user", "net")

    def run(self, command: str) -> None:
        """Run a command of an administrator there."""
        _run([*self.prefix, *command.split()])


HERE = Place("127.0.0.1", None)
"""Where the tests run."""


class NoNamespacesError(Exception):
    """Namespaces cannot be made; the message says why."""


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=_ENVIRONMENT
    )
    if done.returncode:
        raise NoNamespacesError(f"{' '.join(command)}: {done.stderr.strip()}")


def _inside(pid: int, *kinds: str) -> list[str]:
    """Words in front of a command that make it run in namespaces of a process."""
    options = [f"--{_KINDS[kind]}" for kind in kinds]
    return ["nsenter", "--target", f"{pid}", *options, "--preserve-credentials"]


def _kinds(pid: int) -> list[str]:
    """Kinds of the namespaces in which a process is not with the tests."""
    return [
        kind
        for kind in _KINDS
        if os.readlink(f"/proc/{pid}/ns/{kind}") != os.readlink(f"/proc/self/ns/{kind}")
    ]


def _hold(stack: ExitStack, command: Sequence[str], hold: str) -> int:
    """Start a process in new namespaces, which live as long as `stack`; return its id."""
    holder = stack.enter_context(
        subprocess.Popen(
            [*command, "sh", "-c", hold],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_ENVIRONMENT,
        )
    )
    stack.callback(holder.kill)
    assert holder.stdout is not None
    if holder.stdout.readline() != "up\n":
        assert holder.stderr is not None
        raise NoNamespacesError(f"{' '.join(command)}: {holder.stderr.read().strip()}")
    # With ids of its own for processes, the process is a child.
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()
    return int(children or holder.pid)


@contextmanager
def two_places(*, are_machines: bool = False) -> Iterator[tuple[Place, Place]]:
    """Yield two namespaces joined by a cable. If the kernel or a missing tool forbids them, warn of
    the reason and yield two addresses of loopback.

    Args:
        are_machines: whether each place has processes, shared memory and mounts of its own. Files
            are the same until a test mounts others.
    """
    own, hold = (_APART, _MACHINE) if are_machines else ([], _PLACE)
    with ExitStack() as stack:
        try:
            for tool in ("unshare", "nsenter", "ip"):
                if shutil.which(tool, path=_ENVIRONMENT["PATH"]) is None:
                    raise NoNamespacesError(f"no {tool!r} is installed")
            near = _hold(stack, ["unshare", "--user", "--map-root-user", "--net", *own], hold)
            far = _hold(stack, [*_inside(near, "user"), "unshare", "--net", *own], hold)
            cable = f"ip link add near type veth peer name far netns {far}"
            _run([*_inside(near, "user", "net"), *cable.split()])
            for pid, name, address in zip((near, far), CABLE, _ADDRESSES, strict=True):
                inside = _inside(pid, "user", "net")
                _run([*inside, *f"ip address add {address}/24 dev {name}".split()])
                _run([*inside, *f"ip link set {name} up".split()])
        except NoNamespacesError as error:
            # Set it where namespaces are sure to work, so that no test goes without them unseen.
            if os.environ.get("KVFERRY_NEEDS_NETNS"):
                raise
            reason = f"no network namespaces here, so both sides are on loopback: {error}"
            warnings.warn(reason, stacklevel=3)
            yield HERE, HERE._replace(address="127.0.0.2")
        else:
            yield Place(_ADDRESSES[0], near), Place(_ADDRESSES[1], far)
