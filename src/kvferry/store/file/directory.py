"""The directory tree of a store: where files stand, and how a directory becomes a store.

    kvferry.json                              format marker; another version is refused
    records/<shard>/<64 hex>.safetensors      one value per file, named by its key and nothing else
    writing/<64 hex>.<8 hex>.<24 hex>         values being written, by key and mount
    quarantine/                               values that failed verification
    namespaces/<64 hex>.json                  the model that each namespace is of
    index.sqlite3                             what is there: see `index`; not on a network mount

The files are the truth; the index is a cache of them. People may empty or remove the directory at
any time: the next write makes it a store again, and so does the next start, unless it holds things
that are not the store's. Names of records come from `key.hex()` alone.
Every file is opened from the directory above it, through no link, so that no name leads out of the
root. A value gets its name by a hard link, or a rename where links fail. So it appears whole or not
at all, and with links the first of two writers wins. Used by `FileStore`, `Index` and `Upkeep`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kvferry.errors import StoreError, StorePlaceError
from kvferry.filesystem import file_system
from kvferry.store.file.fileio import as_views, open_at, open_below, write_all
from kvferry.types import ChunkKey

STORE_FORMAT_VERSION = 2
MARKER = "kvferry.json"
NUM_SHARDS = 32
"""Number of shards: directories of records, 00 to 1f, named by the first five bits of the key."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
_MAX_TEXT_BYTES = 1 << 20
HEAD_BYTES = 512
"""Size of the start of a record that is read to find its namespace."""
_RECORD_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_FILE_NAMES = {
    "writing": re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}\.[0-9a-f]{24}"),
    "quarantine": re.compile(r"[0-9a-f]{64}\.[a-z0-9_.]{1,80}"),
}
_INDEX = "index.sqlite3"
_OWN_NAME = re.compile(re.escape(_INDEX) + ".*")
_IN_OWN_INDEX = b"CREATE INDEX records_by_use"
_INDEX_HEAD_BYTES = 1 << 16
"""Size of the start of an index that names its tables."""
_OWN_FOLDERS = {
    "records": re.compile(r"[01][0-9a-f]"),
    "namespaces": re.compile(r"\.?[0-9a-f]{64}\.json.*"),
    **_FILE_NAMES,
}
_UNSAFE = re.compile(r"[^a-z0-9_]+")
# Left by the file system, or by a process that died while it made this store.
_IGNORED = re.compile(r"lost\+found|\.kvferry\.json\..*")
# SeaweedFS lets two machines link to one name at once. A machine that saw a file under its first
# name never finds it under its second.
_LOSES_LINKS = frozenset({"fuse.seaweedfs"})
_NOT_A_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR})
_ABSENT = (FileNotFoundError, NotADirectoryError)
# Errors of a mount whose server is away, and of a disk that fails.
_AWAY = frozenset(
    {
        *(errno.EIO, errno.ENOTCONN, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN),
        *(errno.EHOSTUNREACH, errno.ENODEV, errno.EAGAIN),
    }
)


class NotAFile(OSError):
    """A directory, link, fifo, socket or device stands where a file should."""


class Found(NamedTuple):
    """Size and time of a file in the directory."""

    num_bytes: int
    """Bytes on the disk, at most the size of the file: a sparse file of 1 TiB is not 1 TiB."""
    modified: float
    """Seconds since the epoch."""


def shard_of(key: ChunkKey) -> tuple[str, str]:
    """Names of the directories from the root to the record of `key`."""
    return "records", f"{key[0] >> 3:02x}"


def record_name(key: ChunkKey) -> str:
    if len(key) != 32:
        raise ValueError(f"a chunk key has 32 bytes, not {len(key)}")
    return f"{key.hex()}.safetensors"


def record_path(root: str, key: ChunkKey) -> str:
    """Path of the file of a key, for messages and tools; the store itself opens by handles."""
    return "/".join((root, *shard_of(key), record_name(key)))


class Directory:
    """Files under one absolute root. Thread-safe; keeps no file open. Methods raise OSError if the
    medium refuses, unless they say what they do instead."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._kept_texts: dict[tuple[str, ...], str] = {}

    @cached_property
    def loses_links(self) -> bool:
        """Whether links are unreliable here, so that values get their names by renaming."""
        return file_system(self.root) in _LOSES_LINKS

    @contextmanager
    def opened(self, *names: str, make: bool = False) -> Iterator[int]:
        """`open` a directory, and close its handle after the block."""
        fd = self.open(*names, make=make)
        try:
            yield fd
        finally:
            os.close(fd)

    def open(self, *names: str, make: bool = False) -> int:
        """Return a handle of the directory `names` under the root; make the directory if `make`,
        and what `keep_text` keeps: people may have emptied the root."""
        try:
            return self._open(names)
        except FileNotFoundError:
            if not (make and names):
                raise
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        for depth in range(len(names)):
            with self.opened(*names[:depth]) as above, suppress(FileExistsError):
                os.mkdir(names[depth], 0o700, dir_fd=above)
        self._restore_texts()
        return self._open(names)

    def _open(self, names: Sequence[str]) -> int:
        if len(names) == 1:
            with suppress(FileNotFoundError):
                return open_at(f"{self.root}/{names[0]}", _DIRECTORY)
        handles = [os.open(self.root, _DIRECTORY | os.O_CLOEXEC)]  # the root may be a link
        try:
            below = open_below(names, _DIRECTORY, handles[0]) if len(names) > 1 else None
            if below is not None:
                return below
            for name in names:
                handles.append(open_at(name, _DIRECTORY, handles[-1]))
            return handles.pop()
        finally:
            for fd in handles:
                os.close(fd)

    def open_record(self, key: ChunkKey) -> tuple[int, int] | None:
        """Open a record; return descriptor and size, None if absent. May raise `NotAFile`."""
        return self._open_file(record_name(key), *shard_of(key))

    def read_head(self, key: ChunkKey) -> bytes:
        """Return the first bytes of a record; empty if they cannot be read."""
        with suppress(OSError):
            return self._read(record_name(key), HEAD_BYTES, *shard_of(key)) or b""
        return b""

    def find(self, key: ChunkKey) -> Found | None:
        """Return size and time of a record; None if no regular file has its name."""
        with suppress(*_ABSENT), self.opened(*shard_of(key)) as shard:
            status = lstat_at(record_name(key), shard)
            return found_of(status) if stat.S_ISREG(status.st_mode) else None
        return None

    def list_shard(self, shard: int) -> set[ChunkKey]:
        """Return the keys of all files named like a record of this shard; empty without a shard."""
        place = "records", f"{shard:02x}"
        names = filter(_RECORD_NAME.fullmatch, self.listed(*place))
        keys = {ChunkKey(bytes.fromhex(name[:64])) for name in names}
        return {key for key in keys if shard_of(key) == place}

    def is_empty(self) -> bool:
        """Whether there is no shard yet; False if the directory cannot be listed."""
        with suppress(OSError):
            return not self.listed("records")
        return False

    def mark_of_shard(self, shard: int) -> tuple[int, int]:
        """Return a value that changes when a file enters or leaves this shard. Never raises."""
        with suppress(OSError), self.opened("records") as records:
            status = lstat_at(f"{shard:02x}", records)
            return status.st_ino, status.st_mtime_ns
        return 0, 0  # absent; or it fails, as listing it will show

    def remove(self, key: ChunkKey) -> bool:
        """Remove whatever has the name of a record. False if nothing has."""
        with suppress(*_ABSENT), self.opened(*shard_of(key)) as shard:
            remove_any(record_name(key), shard)
            return True
        return False

    def written_by(self, name: str) -> tuple[ChunkKey, bool]:
        """Return the key of a file of `writing`, and whether its writer's lock shows here."""
        key, machine, _ = name.split(".")
        with self.opened("writing") as writing:
            return ChunkKey(bytes.fromhex(key)), machine == machine_of(writing)

    def drop(self, folder: str, name: str) -> bool:
        """Remove a file of `writing` or `quarantine`. Whether it is gone now. Never raises."""
        if _FILE_NAMES[folder].fullmatch(name) is not None:
            with suppress(OSError):
                with suppress(FileNotFoundError), self.opened(folder) as directory:
                    remove_any(name, directory)
                return True
        return False

    def list_files(self, folder: str) -> dict[str, Found]:
        """Return the files of `writing` or `quarantine` by name."""
        found = {}
        for name in filter(_FILE_NAMES[folder].fullmatch, self.listed(folder)):
            with suppress(*_ABSENT), self.opened(folder) as directory:
                found[name] = found_of(lstat_at(name, directory))
        return found

    def drop_abandoned(self, name: str, *, is_old: bool, first: Callable[[], object]) -> bool:
        """Remove a listed file of `writing`, unless its writer lives. Call `first` before, if it is
        a regular file. Whether it was removed. Where files cannot be locked, a file counts as
        abandoned if it `is_old`."""
        try:
            with self.opened("writing") as writing:
                fd = open_at(name, os.O_WRONLY | os.O_NONBLOCK, writing)
        except OSError as error:
            return error.errno in _NOT_A_FILE and self.drop("writing", name)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK or not is_old:
                    return False
            first()
            return self.drop("writing", name)
        finally:
            os.close(fd)

    def quarantine(self, key: ChunkKey, reason: str) -> tuple[str, int] | None:
        """Move a record into `quarantine`; return its new name and size in bytes. Remove what is no
        regular file, and return None. Raises FileNotFoundError if nothing is there."""
        why = _UNSAFE.sub("_", reason.lower())[:32] or "unknown"
        name = f"{key.hex()}.{why}.{secrets.token_hex(8)}"
        with self.opened(*shard_of(key)) as shard:
            status = lstat_at(record_name(key), shard)
            if not stat.S_ISREG(status.st_mode):
                remove_any(record_name(key), shard)
                return None
            with self.opened("quarantine", make=True) as aside:
                os.rename(record_name(key), name, src_dir_fd=shard, dst_dir_fd=aside)
        return name, found_of(status).num_bytes

    def keep_text(self, name: str, text: str, *within: str, is_there: bool = False) -> None:
        """Make or replace a file atomically, unless it `is_there`. If people empty the directory,
        the file comes back with the next write."""
        self._kept_texts[*within, name] = text
        if not is_there:
            self._write_text(name, text, *within)

    def _restore_texts(self) -> None:
        for (*within, name), text in tuple(self._kept_texts.items()):
            try:
                with self.opened(*within) as directory:
                    lstat_at(name, directory)
            except FileNotFoundError:
                self._write_text(name, text, *within)

    def _write_text(self, name: str, text: str, *within: str) -> None:
        temporary = f".{name}.{secrets.token_hex(8)}"
        with self.opened(*within, make=True) as directory:
            fd = open_at(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, directory)
            try:
                write_all(fd, as_views([text.encode()]), 0)
                os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=directory)
                raise
            finally:
                os.close(fd)

    def read_text(self, name: str, *within: str) -> str | None:
        """Return up to 1 MiB of a file; None if absent. Bytes that are not UTF-8 are replaced."""
        content = self._read(name, _MAX_TEXT_BYTES, *within)
        return None if content is None else content.decode(errors="replace")

    def start_of(self, name: str, num_bytes: int) -> bytes:
        """Return the first bytes of a file in the root; empty if it is absent or no file."""
        with suppress(NotAFile):
            return self._read(name, num_bytes) or b""
        return b""

    def listed(self, *names: str) -> list[str]:
        with suppress(*_ABSENT), self.opened(*names) as fd:
            return os.listdir(fd)
        return []

    def _open_file(self, name: str, *within: str) -> tuple[int, int] | None:
        try:
            # Without O_NONBLOCK, opening a fifo would wait for a writer for ever.
            flags = os.O_RDONLY | os.O_NONBLOCK
            with self.opened() as root:
                fd = open_below((*within, name), flags, root)
            if fd is None:
                with self.opened(*within) as directory:
                    fd = open_at(name, flags, directory)
        except _ABSENT:
            return None
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            raise NotAFile(error.errno, "not a regular file", name) from error
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise NotAFile(errno.EINVAL, "not a regular file", name)
        except OSError:
            os.close(fd)
            raise
        return fd, status.st_size

    def _read(self, name: str, limit: int, *within: str) -> bytes | None:
        opened = self._open_file(name, *within)
        if opened is None:
            return None
        try:
            return os.read(opened[0], limit)
        finally:
            os.close(opened[0])


def open_root(root: Path, *, create: bool) -> Directory:
    """Check that `root` is a store that this version can use: one with a marker, or one that people
    emptied in part. If `create`, make it one if it is empty or absent; a directory without a marker
    that holds other things is never turned into a store.

    Raises:
        StorePlaceError: `root` cannot be used; the message says why and what to do.
        StoreError: the medium does not answer now.
    """
    directory = Directory(os.path.abspath(root))
    try:
        if create:
            os.makedirs(directory.root, mode=0o700, exist_ok=True)
        is_store = _read_marker(directory)
        if not is_store:
            own, foreign = _own_and_foreign(directory)
            if foreign is not None and not _read_marker(directory):
                raise StorePlaceError(
                    f"{directory.root} is not a kvferry store: it is not empty ({foreign!r} is in "
                    f"it) and has no {MARKER}; choose an empty or new directory"
                )
            if not own and not create:
                raise StorePlaceError(
                    f"{directory.root} is not a kvferry store: it has no {MARKER}; check the path, "
                    "or let the first writer create the store"
                )
        # All writers write the same bytes, so it does not matter who replaces whose file.
        marker = json.dumps({"format": "kvferry-store", "version": STORE_FORMAT_VERSION}) + "\n"
        directory.keep_text(MARKER, marker, is_there=is_store or not create)
        if not is_store and create:
            with directory.opened("records", make=True):
                pass
    except FileNotFoundError as error:
        raise StorePlaceError(
            f"the store directory {directory.root} does not exist; create it or check the path"
        ) from error
    except OSError as error:
        if error.errno in _AWAY:
            raise StoreError(
                f"the store directory {directory.root} does not answer: {error.strerror}"
            ) from error
        raise StorePlaceError(
            f"the store directory {directory.root} cannot be used: {error.strerror}; choose a "
            "directory that this user may read and write"
        ) from error
    return directory


def _read_marker(directory: Directory) -> bool:
    """Whether the directory has the marker of this version; another raises StorePlaceError."""
    text = directory.read_text(MARKER)
    if text is None:
        os.stat(directory.root)  # raises if there is no directory
        return False
    try:
        marker = json.loads(text)
        version = marker["version"] if marker["format"] == "kvferry-store" else None
    except (ValueError, KeyError, TypeError, RecursionError):
        version = None
    if type(version) is not int or version < 1:
        raise StorePlaceError(
            f"{directory.root}/{MARKER} is not the marker of a kvferry store; if the directory is "
            "a cache you can do without, remove it, else choose another one"
        )
    if version != STORE_FORMAT_VERSION:
        raise StorePlaceError(
            f"the store {directory.root} has format version {version}, this kvferry knows "
            f"{STORE_FORMAT_VERSION}; use another kvferry or another directory"
        )
    return True


def _own_and_foreign(directory: Directory) -> tuple[bool, str | None]:
    """Whether the root, which has no marker, holds names of a store, as after a clean-up by hand;
    and the path of something in it that is not the store's."""
    own, foreign = False, []
    for name in directory.listed():
        inside = _OWN_FOLDERS.get(name)
        own |= inside is not None or _OWN_NAME.fullmatch(name) is not None
        if inside is not None:
            others = (each for each in directory.listed(name) if not inside.fullmatch(each))
            foreign += [f"{name}/{each}" for each in others]
        elif not _OWN_NAME.fullmatch(name) and not _IGNORED.fullmatch(name):
            foreign.append(name)
        elif name == _INDEX:  # other programs name databases so, too
            content = directory.start_of(name, _INDEX_HEAD_BYTES)
            if content and _IN_OWN_INDEX not in content:
                foreign.append(name)
    return own, min(foreign, default=None)


def _kernel() -> str:
    """Identify this machine until it restarts. Two machines may have the same host name."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    return socket.gethostname()


_KERNEL = _kernel()


def machine_of(directory: int) -> str:
    """Name this mount on this machine. Processes that get equal names see each other's locks."""
    whose = f"{_KERNEL} {os.fstat(directory).st_dev}"
    return hashlib.blake2b(whose.encode(), digest_size=4).hexdigest()


def remove_any(name: str, directory: int) -> None:
    """Remove a file, or a directory with all that is in it."""
    try:
        os.unlink(name, dir_fd=directory)
    except (IsADirectoryError, PermissionError):  # POSIX has the latter for directories
        if not stat.S_ISDIR(lstat_at(name, directory).st_mode):
            raise
        try:
            shutil.rmtree(name, dir_fd=directory)
        except RecursionError as error:
            raise OSError(errno.ENAMETOOLONG, "a directory too deep to be removed") from error


def lstat_at(name: str, directory: int) -> os.stat_result:
    return os.stat(name, dir_fd=directory, follow_symlinks=False)


def found_of(status: os.stat_result) -> Found:
    on_disk = max(status.st_blocks * 512, 4096)  # small files may lie within their inode
    return Found(min(status.st_size, on_disk), status.st_mtime)
