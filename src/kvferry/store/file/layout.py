"""Where things stand under the root of a directory store, and how a directory becomes a store.

    kvferry.json                              format marker; a newer version is refused
    records/<shard>/<64 hex>.safetensors      one value per file, named by its key and nothing else
    writers/<16 hex>/                         one per open store: ledger, tmp/, trash/, absorbed/
    quarantine/                               values that failed verification
    reconcile.lock                            advisory, only between processes that correct counts

Names come from `key.hex()` alone, so no key can lead out of the root.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.store.file.fileio import FileIO, as_views, ensure_directory, read_up_to, write_all
from kvferry.types import ChunkKey

STORE_FORMAT_VERSION = 1
MARKER = "kvferry.json"
NUM_SHARDS = 32
"""Directories of records, 00 to 1f, by the first five bits of the key. A set per shard is what the
index keeps, and small sets cost more per key: 32 stays below 150 bytes a key from 1e3 to 1e6."""
_MARKER_BYTES = 4096
_RECORD_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_WRITER_NAME = re.compile(r"[0-9a-f]{16}")
_SESSION = re.compile(r"([0-9a-f]{16})/([0-9a-f]{16}-[0-9a-f]{16})")
# Left by the file system itself or by a process that died while it made this very store.
_IGNORED = re.compile(r"lost\+found|\.kvferry\.json\..*")


def shard_of(key: ChunkKey) -> int:
    """The shard a key belongs to."""
    return key[0] >> 3


@dataclass(frozen=True, slots=True)
class Layout:
    """Paths under one absolute root."""

    root: str

    @property
    def writers(self) -> str:
        return f"{self.root}/writers"

    @property
    def quarantine(self) -> str:
        return f"{self.root}/quarantine"

    @property
    def reconcile_lock(self) -> str:
        return f"{self.root}/reconcile.lock"

    def shard(self, index: int) -> str:
        """Directory of the keys of shard `index`."""
        return f"{self.root}/records/{index:02x}"

    def record(self, key: ChunkKey) -> str:
        """File of a key.

        Raises:
            ValueError: the key has not 32 bytes.
        """
        if len(key) != 32:
            raise ValueError(f"a chunk key has 32 bytes, not {len(key)}")
        return f"{self.shard(shard_of(key))}/{key.hex()}.safetensors"

    def writer(self, writer_id: str) -> str:
        return f"{self.writers}/{writer_id}"

    def session_file(self, session: str) -> str | None:
        """Temporary file of a sharded write, None for a string that no store made."""
        match = _SESSION.fullmatch(session)
        return None if match is None else f"{self.writer(match[1])}/tmp/{match[2]}"


def key_of_record_name(name: str) -> ChunkKey | None:
    """The key a file in `records/` is named by, None for a foreign name."""
    if _RECORD_NAME.fullmatch(name) is None:
        return None
    return ChunkKey(bytes.fromhex(name[:64]))


def is_writer_name(name: str) -> bool:
    return _WRITER_NAME.fullmatch(name) is not None


def open_root(root: Path, io: FileIO, *, create: bool) -> Layout:
    """Check that `root` is a store this version can use; make it one if it is empty or absent.

    A directory that holds other things is never turned into a store.

    Raises:
        ConfigError: it cannot be used; the message says why and what to do.
    """
    layout = Layout(os.path.abspath(root))
    try:
        if create:
            os.makedirs(layout.root, mode=0o700, exist_ok=True)
        if _read_marker(layout, io) is None:
            if not create:
                raise ConfigError(
                    f"{layout.root} is not a kvferry store: it has no {MARKER}; check the path, or "
                    "let the first writer create the store"
                )
            _create(layout, io)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the store directory {layout.root} does not exist; create it or check the path"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the store directory {layout.root} cannot be used: {error.strerror}; choose a "
            "directory that this user may read and write"
        ) from error
    return layout


def _read_marker(layout: Layout, io: FileIO) -> int | None:
    path = f"{layout.root}/{MARKER}"
    try:
        text = read_up_to(io, path, _MARKER_BYTES)
    except FileNotFoundError:
        os.stat(layout.root)
        return None
    try:
        marker = json.loads(text)
        version = marker["version"] if marker["format"] == "kvferry-store" else None
    except (ValueError, KeyError, TypeError, RecursionError):
        version = None
    if type(version) is not int or version < 1:
        raise ConfigError(
            f"{path} is not the marker of a kvferry store; if the directory is a cache you can do "
            "without, remove it, else choose another one"
        )
    if version > STORE_FORMAT_VERSION:
        raise ConfigError(
            f"the store {layout.root} has format version {version}, this kvferry knows "
            f"{STORE_FORMAT_VERSION}; use a newer kvferry or another directory"
        )
    return version


def _create(layout: Layout, io: FileIO) -> None:
    foreign = [name for name in io.listdir(layout.root) if not _IGNORED.fullmatch(name)]
    if foreign and _read_marker(layout, io) is None:
        raise ConfigError(
            f"{layout.root} is not empty ({foreign[0]!r} is in it) and has no {MARKER}: it is no "
            "kvferry store and will not be made one; choose an empty or new directory"
        )
    text = json.dumps({"format": "kvferry-store", "version": STORE_FORMAT_VERSION}) + "\n"
    temporary = f"{layout.root}/.{MARKER}.{secrets.token_hex(8)}"
    fd = io.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        write_all(io, fd, as_views([text.encode()]), 0)
    finally:
        io.close(fd)
    # Whoever is first or last writes the same bytes: replacing is as good as linking here.
    io.rename(temporary, f"{layout.root}/{MARKER}")


def make_directories(layout: Layout, io: FileIO) -> None:
    """The fixed part of the tree. Shards are made when their first record comes."""
    for path in (f"{layout.root}/records", layout.writers, layout.quarantine):
        ensure_directory(io, path)
