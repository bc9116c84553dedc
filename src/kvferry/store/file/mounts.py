"""Which file system a directory is on."""

from __future__ import annotations

import os
from pathlib import Path

_O_PATH: int = getattr(os, "O_PATH", os.O_RDONLY)


def file_system(directory: str | Path) -> str | None:
    """Type of the file system that holds `directory`, for example "ext4"; None if unknown, as it is
    on other systems than Linux."""
    try:
        # By the mount, not by device: btrfs gives its files a device number of their own.
        fd = os.open(directory, _O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            about = _read(f"/proc/self/fdinfo/{fd}").split()
        finally:
            os.close(fd)
        mount = about[about.index("mnt_id:") + 1]
        for line in _read("/proc/self/mountinfo").split("\n"):
            place, _, kind = line.partition(" - ")
            if place.split(" ", 1)[0] == mount:
                return kind.split()[0]
    except (OSError, ValueError, IndexError):
        pass
    return None


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
