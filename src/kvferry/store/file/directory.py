"""The directory tree of a store: where files stand, and how a directory becomes a store.

    kvferry.json                              format marker, and the quota of the last engine;
                                              another version is refused
    erased.json                               what commands erased (`kvferry.store.erasures`)
    records/<shard>/<64 hex>.safetensors      one value per file, named by its key and nothing else
    writing/<64 hex>.<8 hex>.<24 hex>         values being written, by key and mount
    quarantine/                               values that failed verification
    namespaces/<64 hex>.json                  the model that each namespace is of
    index.sqlite3                             what is there: see `index`; not on a network mount

The files are the truth; the index is a cache of them. People may empty or remove the directory at
any time: the next write makes it a store again, and so does the next start, unless it holds things
that are not the store's. Names of records come from `key.hex()` alone.
No link in the place of a folder or file is followed, so that no name leads out of the root. A value
gets its name by a hard link, or a rename where links fail. So it appears whole or not at all, and
with links the first of two writers wins. Used by `FileStore`, `Index` and `Upkeep`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from blake3 import blake3

from kvferry.errors import FaultKind, StoreError, StorePlaceError
from kvferry.filesystem import file_system, why_refused
from kvferry.network import fault_kind
from kvferry.store.file.fileio import as_views, open_at, write_all
from kvferry.types import ChunkKey

STORE_FORMAT_VERSION = 2
_FORMAT = "kvferry-store"
MARKER = "kvferry.json"
NOTICE = "erased.json"
_QUOTA = "max_bytes"
NUM_SHARDS = 32
"""Number of shards: directories of records, 00 to 1f, named by the first five bits of the key."""

_MAX_TEXT_BYTES = 1 << 20
HEAD_BYTES = 512
"""Size of the start of a record that is read to find its namespace."""
_RECORD_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_FILE_NAMES = {
    "writing": re.compile(r"[0-9a-f]{64}\.[0-9a-f]{8}\.[0-9a-f]{24}"),
    "quarantine": re.compile(r"[0-9a-f]{64}\.[a-z0-9_.]{1,80}"),
}
_MAX_QUARANTINE_FILES = 64
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
# Left by the file system, by a command that erased, or by a process that died while it made one.
_IGNORED = re.compile(r"lost\+found|\.kvferry\.json\..*|\.?erased\.json.*")
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
    """Path of the file of a key."""
    name = record_name(key)
    return "/".join((root, *shard_of(key), name))


class Directory:
    """Files under one absolute root. Thread-safe; keeps no file open. Methods raise OSError if the
    medium refuses, unless they say what they do instead.

    Args:
        mode: of the folders that it makes; its files have the same without the right to search.
    """

    def __init__(self, root: str, mode: int = 0o700) -> None:
        self.root = root
        self.mode = mode
        self.file_mode = mode & 0o666
        self._kept_texts: dict[tuple[str, ...], str] = {}

    @cached_property
    def loses_links(self) -> bool:
        """Whether links are unreliable here, so that values get their names by renaming."""
        return file_system(self.root) in _LOSES_LINKS

    def folder(self, *names: str) -> str:
        """Return the path of a directory under the root. Raises NotADirectoryError if a link is on
        the way: no name leads out of the root."""
        path = self.root
        for name in names:
            path = f"{path}/{name}"
            if os.path.islink(path):
                raise NotADirectoryError(errno.ENOTDIR, "a link in the place of a folder", path)
        return path

    def path(self, *names: str) -> str:
        """Return the path of a file under the root; raises as `folder`."""
        return f"{self.folder(*names[:-1])}/{names[-1]}"

    def record(self, key: ChunkKey) -> str:
        name = record_name(key)
        return self.path(*shard_of(key), name)

    def made(self, *names: str) -> str:
        """Return the path of a directory under the root. If it is absent, make it, and what
        `keep_text` keeps: people may have emptied the root."""
        path = self.folder(*names)
        if not os.path.isdir(path):
            self.make_root()
            for depth in range(1, len(names) + 1):
                with suppress(FileExistsError):
                    folder = self.folder(*names[:depth])
                    os.mkdir(folder, 0o700)
                    self._share(folder)
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
            self.restore_texts()
        return path

    def make_root(self) -> None:
        """Make the root, if it is absent."""
        try:
            os.makedirs(self.root, mode=0o700)
        except FileExistsError:
            if not os.path.isdir(self.root):
                raise
        else:
            self._share(self.root)

    def _share(self, folder: str) -> None:
        """Give a new folder the mode of this directory; a bit that passes on the group stays."""
        if self.mode != 0o700:
            os.chmod(folder, self.mode | (os.stat(folder).st_mode & stat.S_ISGID))

    def open_record(self, key: ChunkKey) -> tuple[int, int] | None:
        """Open a record; return descriptor and size, None if absent. May raise `NotAFile`."""
        return _open_file(self.record(key))

    def read_head(self, key: ChunkKey) -> bytes:
        """Return the first bytes of a record; empty if they cannot be read."""
        with suppress(OSError):
            return _read(self.record(key), HEAD_BYTES) or b""
        return b""

    def find(self, key: ChunkKey) -> Found | None:
        """Return size and time of a record; None if no regular file has its name."""
        with suppress(*_ABSENT):
            status = os.lstat(self.record(key))
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
        with suppress(OSError):
            status = os.stat(self.folder("records", f"{shard:02x}"))
            return status.st_ino, status.st_mtime_ns
        return 0, 0  # absent; or it fails, as listing it will show

    def remove(self, key: ChunkKey) -> bool:
        """Remove whatever has the name of a record. False if nothing has."""
        with suppress(*_ABSENT):
            remove_any(self.record(key))
            return True
        return False

    def written_by(self, name: str) -> tuple[ChunkKey, bool]:
        """Return the key of a file of `writing`, and whether its writer's lock shows here."""
        key, machine, _ = name.split(".")
        return ChunkKey(bytes.fromhex(key)), machine == machine_of(self.folder("writing"))

    def drop(self, folder: str, name: str) -> bool:
        """Remove a file of `writing` or `quarantine`. Whether it is gone now. Never raises."""
        if _FILE_NAMES[folder].fullmatch(name) is not None:
            with suppress(OSError):
                with suppress(FileNotFoundError):
                    remove_any(self.path(folder, name))
                return True
        return False

    def list_files(self, folder: str) -> dict[str, Found]:
        """Return the files of `writing` or `quarantine` by name."""
        found = {}
        for name in filter(_FILE_NAMES[folder].fullmatch, self.listed(folder)):
            with suppress(*_ABSENT):
                found[name] = found_of(os.lstat(self.path(folder, name)))
        return found

    def drop_abandoned(self, name: str, *, is_old: bool, first: Callable[[], object]) -> bool:
        """Remove a listed file of `writing`, unless its writer lives. Call `first` before, if it is
        a regular file. Whether it was removed. Where files cannot be locked, a file counts as
        abandoned if it `is_old`."""
        try:
            fd = open_at(self.path("writing", name), os.O_WRONLY | os.O_NONBLOCK)
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

    def quarantine(self, key: ChunkKey, reason: str) -> bool:
        """Move a record into `quarantine`. Remove what is no regular file, and return False. Raises
        FileNotFoundError if nothing is there."""
        why = _UNSAFE.sub("_", reason.lower())[:32] or "unknown"
        name = f"{key.hex()}.{why}.{secrets.token_hex(8)}"
        record = self.record(key)
        if not stat.S_ISREG(os.lstat(record).st_mode):
            remove_any(record)
            return False
        os.rename(record, f"{self.made('quarantine')}/{name}")
        return True

    def bound_quarantine(self, max_bytes: int, kept_since: float = 0.0) -> None:
        """Remove the files in quarantine from before `kept_since` (seconds since the epoch). Of the
        others, remove the oldest while they are more than 64 files or a twentieth of the quota
        `max_bytes`, but keep the newest, unless it alone has more than `max_bytes`."""
        total = 0
        files = self.list_files("quarantine").items()
        for newer, (file, found) in enumerate(sorted(files, key=lambda f: -f[1].modified)):
            total += found.num_bytes
            is_too_much = total > max_bytes // 20 or newer >= _MAX_QUARANTINE_FILES
            is_kept = newer == 0 and found.num_bytes <= max_bytes
            if found.modified < kept_since or (is_too_much and not is_kept):
                self.drop("quarantine", file)

    def keep_text(self, name: str, text: str, *within: str, is_there: bool = False) -> None:
        """Make or replace a file atomically, unless it `is_there`. If people empty the directory,
        the file comes back with the next write."""
        self._kept_texts[*within, name] = text
        if not is_there:
            self.write_text(name, text, *within)

    def keep_quota(self, max_bytes: int | None) -> None:
        """Note in the marker the quota of an engine, or that it has none."""
        marker = _marker({_QUOTA: max_bytes})
        self.keep_text(MARKER, marker, is_there=marker == self.read_text(MARKER))

    def quota(self) -> dict[str, int | None]:
        """Return the quota of the engine that opened the store last, None if it had none, as
        `max_bytes`; nothing if it is not known, as in a store of an earlier version."""
        with suppress(ValueError, KeyError, TypeError, RecursionError):
            max_bytes = json.loads(self.read_text(MARKER) or "")[_QUOTA]
            if max_bytes is None or (type(max_bytes) is int and max_bytes > 0):
                return {_QUOTA: max_bytes}
        return {}

    def restore_texts(self) -> None:
        """Write again what `keep_text` keeps and people removed."""
        for (*within, name), text in tuple(self._kept_texts.items()):
            if not os.path.lexists(self.path(*within, name)):
                self.write_text(name, text, *within)

    def write_text(self, name: str, text: str, *within: str) -> None:
        """Make or replace a file atomically. All that may use the records may read it, so that
        engines see what a command writes as root, or as another user of the group."""
        path = f"{self.made(*within)}/{name}"
        temporary = f"{self.folder(*within)}/.{name}.{secrets.token_hex(8)}"
        status, mode = os.stat(self.folder(*within)), self.file_mode
        with suppress(OSError):  # not made yet
            mode |= os.stat(self.folder("records")).st_mode & 0o060
        fd = open_at(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with suppress(OSError):  # where this user may not
                os.fchown(fd, status.st_uid if os.geteuid() == 0 else -1, status.st_gid)
            write_all(fd, as_views([text.encode()]), 0)
            os.rename(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)

    def read_text(self, name: str, *within: str) -> str | None:
        """Return up to 1 MiB of a file; None if absent. Bytes that are not UTF-8 are replaced."""
        content = _read(self.path(*within, name), _MAX_TEXT_BYTES)
        return None if content is None else content.decode(errors="replace")

    def start_of(self, name: str, num_bytes: int) -> bytes:
        """Return the first bytes of a file in the root; empty if it is absent or no file."""
        with suppress(NotAFile):
            return _read(self.path(name), num_bytes) or b""
        return b""

    def listed(self, *names: str) -> list[str]:
        with suppress(*_ABSENT):
            return os.listdir(self.folder(*names))
        return []


def _open_file(path: str) -> tuple[int, int] | None:
    """Open a regular file; return descriptor and size, None if absent. May raise `NotAFile`."""
    try:
        # Without O_NONBLOCK, opening a fifo would wait for a writer for ever.
        fd = open_at(path, os.O_RDONLY | os.O_NONBLOCK)
    except _ABSENT:
        return None
    except OSError as error:
        if error.errno not in _NOT_A_FILE or not _is_no_file(path):
            raise
        raise NotAFile(error.errno, "not a regular file", path) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotAFile(errno.EINVAL, "not a regular file", path)
    except OSError:
        os.close(fd)
        raise
    return fd, status.st_size


def _is_no_file(path: str) -> bool:
    """Whether something else than a file is seen at this path. A mount that fails may say so of a
    file, too, in its own words."""
    with suppress(OSError):
        return not stat.S_ISREG(os.lstat(path).st_mode)
    return False


def _read(path: str, limit: int) -> bytes | None:
    """Return the first bytes of a regular file; None if absent."""
    opened = _open_file(path)
    if opened is None:
        return None
    try:
        return os.read(opened[0], limit)
    finally:
        os.close(opened[0])


def open_root(root: Path, *, create: bool, mode: int = 0o700) -> Directory:
    """Check that `root` is a store that this version can use: one with a marker, or one that people
    emptied in part. If `create`, make it one if it is empty or absent; a directory without a marker
    that holds other things is never turned into a store.

    Raises:
        StorePlaceError: `root` cannot be used; the message says why and what to do.
        StoreError: the medium does not answer now.
    """
    directory = Directory(os.path.abspath(root), mode)
    try:
        if create:
            directory.make_root()
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
        # Writers differ in the quota only, so it does not matter who replaces whose file.
        directory.keep_text(MARKER, _marker({}), is_there=is_store or not create)
        if not is_store and create:
            directory.made("records")
    except FileNotFoundError as error:
        raise StorePlaceError(
            f"the store directory {directory.root} does not exist; create it or check the path"
        ) from error
    except OSError as error:
        if error.errno in _AWAY:
            said = f"the store directory {directory.root} does not answer: {error.strerror}"
            raise StoreError(fault_kind(error), said) from error
        why = f"{error.strerror}"
        if isinstance(error, PermissionError):
            why += f": {why_refused(str(error.filename or directory.root))}"
        raise StorePlaceError(
            f"the store directory {directory.root} cannot be used: {why}; choose a directory that "
            "this user may read and write; users of one group share one with ?mode=0770",
            fault_kind(error) if isinstance(error, PermissionError) else FaultKind.UNUSABLE,
        ) from error
    return directory


def _marker(facts: Mapping[str, int | None]) -> str:
    return json.dumps({"format": _FORMAT, "version": STORE_FORMAT_VERSION, **facts}) + "\n"


def _read_marker(directory: Directory) -> bool:
    """Whether the directory has the marker of this version; another raises StorePlaceError."""
    text = directory.read_text(MARKER)
    if text is None:
        os.stat(directory.root)  # raises if there is no directory
        return False
    try:
        marker = json.loads(text)
        version = marker["version"] if marker["format"] == _FORMAT else None
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


def machine_of(folder: str) -> str:
    """Name this mount on this machine. Processes that get equal names see each other's locks."""
    whose = f"{_KERNEL} {os.stat(folder).st_dev}"
    return blake3(whose.encode()).hexdigest(4)


def remove_any(path: str) -> None:
    """Remove a file, or a directory with all that is in it."""
    try:
        os.unlink(path)
    except (IsADirectoryError, PermissionError):  # POSIX has the latter for directories
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise
        try:
            shutil.rmtree(path)
        except RecursionError as error:
            raise OSError(errno.ENAMETOOLONG, "a directory too deep to be removed") from error


def found_of(status: os.stat_result) -> Found:
    on_disk = max(status.st_blocks * 512, 4096)  # small files may lie within their inode
    return Found(min(status.st_size, on_disk), status.st_mtime)
