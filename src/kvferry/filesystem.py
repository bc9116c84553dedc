"""Facts about directories: the type of file system, who may change one, and where caches belong."""

from __future__ import annotations

import grp
import math
import os
import pwd
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from kvferry.errors import ConfigError

_OF_DISKS = frozenset({
    "apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "ramfs", "reiserfs",
    "tmpfs", "ufs", "xfs", "zfs",
})  # fmt: skip


def user_cache() -> Path:
    """Return this user's directory for caches, which services and logins share. Raises ConfigError
    if no home directory is known, as in some containers."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise ConfigError(
            "no home directory was found; set XDG_CACHE_HOME=/absolute/directory"
        ) from error


def private(path: str | Path, flags: int) -> int:
    """Open a file, as an `opener` for `open`: one that this makes is for this user alone. One that
    is there keeps its mode."""
    return os.open(path, flags, 0o600)


def is_of_one_machine(directory: str) -> bool:
    """Whether no other machine can change `directory`. True if its file system is unknown."""
    kind = file_system(directory)
    return kind is None or kind == "overlay" or kind in _OF_DISKS


def shows_changes(directory: str | Path) -> bool:
    """Whether every change of a file below `directory` gives it a new change time. False if times
    come from an image (squashfs, erofs, also under an overlay), another machine or a program
    (FUSE), and on a read-only mount."""
    kind = file_system(directory)
    is_known = kind in _OF_DISKS or (kind is None and sys.platform != "linux")
    return is_known and not os.statvfs(directory).f_flag & os.ST_RDONLY


def why_untrusted(root: str, *, shares_group: bool = False) -> str | None:
    """Say why others may be able to change this directory; None if only this user and root can, or,
    with `shares_group`, a group of this process, which its operator trusts."""
    status = os.stat(root)
    if shares_group and status.st_gid in {os.getegid(), *os.getgroups()}:
        is_shared = status.st_mode & 0o002
        return f"can be written by others (mode {_mode(status)})" if is_shared else None
    return why_shared(status, 0o022)


def why_shared(status: os.stat_result, rights: int) -> str | None:
    """Say who else has one of these rights to a file: 0o022 to change it, 0o077 also to read it.
    None if only this user and root have them, or a group that only they are in."""
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}"
    taken = status.st_mode & rights
    if taken & ~0o070 or (taken and not _is_own_group(status.st_gid)):
        verb = "written" if taken & 0o022 else "read"
        mode = _mode(status)
        group = "" if taken & ~0o070 else f", group {status.st_gid}"
        return f"can be {verb} by others (mode {mode}{group})"
    return None


def _mode(status: os.stat_result) -> str:
    return f"{stat.S_IMODE(status.st_mode):o}"


def _is_own_group(group_id: int) -> bool:
    """Whether no account but this user and root is in a group of this process. A pod's `fsGroup` is
    such a group: at each mount, the kubelet gives it every file of the volume. It has no name."""
    if group_id == 0:
        return True  # who is in it was made an equal of root
    if group_id not in {os.getegid(), *os.getgroups()}:
        return False
    try:
        named = set(grp.getgrgid(group_id).gr_mem)
    except KeyError:
        return True
    accounts = pwd.getpwall()
    is_listed = os.getuid() in {each.pw_uid for each in accounts}
    if not is_listed and _has_account():
        return False  # a directory service that knows it lists no accounts
    members = {each.pw_name: each.pw_uid for each in accounts if each.pw_gid == group_id}
    members |= {each.pw_name: each.pw_uid for each in accounts if each.pw_name in named}
    return named <= members.keys() and set(members.values()) <= {os.getuid(), 0}


def _has_account() -> bool:
    try:
        return bool(pwd.getpwuid(os.getuid()))
    except KeyError:
        return False  # as in most containers


def why_refused(path: str) -> str:
    """Say whose a file is that this process may not use, or the nearest folder above it that can be
    looked at, and who this process is."""
    while True:
        try:
            status = os.lstat(path)
            break
        except OSError:
            above = os.path.dirname(path)
            if above == path:
                return f"this process is user {os.geteuid()}"
            path = above
    return (
        f"{path} belongs to user {status.st_uid} and group {status.st_gid}, mode "
        f"{stat.S_IMODE(status.st_mode):04o}; this process is user {os.geteuid()} in groups "
        f"{', '.join(map(str, sorted({os.getegid(), *os.getgroups()})))}, umask {_umask()}"
    )


def _umask() -> str:
    """The umask of this process, read without changing it; "unknown" outside Linux."""
    with suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(errors="replace")
        return status.partition("Umask:")[2].split()[0]
    return "unknown"


def process_start(process: Path = Path("/proc/self")) -> float:
    """When a process of procfs began, in seconds since the epoch; infinite if the system does not
    tell."""
    try:
        ticks = int((process / "stat").read_text().rpartition(")")[2].split()[19])
        up_seconds = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return math.inf
    return time.time() - up_seconds + ticks / os.sysconf("SC_CLK_TCK")


def file_system(directory: str | Path) -> str | None:
    """Return the type of the file system that holds `directory`, for example "ext4"; None if
    unknown, as outside Linux."""
    try:
        # Found by mount, not by device: btrfs files have a device number of their own.
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            about = Path(f"/proc/self/fdinfo/{fd}").read_text().split()
        finally:
            os.close(fd)
        mount = about[about.index("mnt_id:") + 1]
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").split("\n"):
            place, _, kind = line.partition(" - ")
            if place.split(" ", 1)[0] == mount:
                return kind.split()[0]
    except (OSError, ValueError, IndexError):
        pass
    return None
