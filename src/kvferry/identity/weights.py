"""The identity of weights: a digest of their content.

Two fine-tunes of one shape have files of equal names, sizes and headers, so only a hash of every
byte distinguishes them. Each file is hashed once: a cache keeps the digest with the file's device,
inode, size and times, and the file is hashed again when one of these differs. On file systems whose
times do not show every change, the digest is not kept.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from blake3 import blake3

from kvferry.config import format_size
from kvferry.errors import ConfigError
from kvferry.filesystem import shows_changes, user_cache
from kvferry.keys.encoding import canonical

logger = logging.getLogger(__name__)

WEIGHTS_TAG = b"kvferry.weight.1"

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")
"""Files that hold tensors, and the index that names the file of each tensor."""

NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
"""Files that trainers leave beside the weights; no engine loads them for inference."""

RACY_NS = 2_000_000_000
"""Coarsest time stamp of a file system in use (2 s). A file that changed less than this before it
was hashed may change again with equal times."""

_BUFFER_BYTES = 16 * 1024 * 1024
_LONG_BYTES = 1 << 30
"""From this size on, hashing a file takes a while and is logged."""


def weights_digest(
    model_dir: Path,
    *,
    weights_version: str | None = None,
    clock_ns: Callable[[], int] = time.time_ns,
) -> bytes:
    """Hash names and contents of all weight files of `model_dir` to 32 bytes.

    Weight files are those of the directory itself, and those that the `weight_map` of an index in
    it names, also in sub-directories. The digest does not depend on path, owner and times of the
    directory, so a copy has the same one. Memory stays below 17 MiB whatever the sizes.

    `kvferry/weights` in the user's cache directory keeps the digests of unchanged files. A cache
    that cannot be written, is damaged, or is not private to this user is ignored: it costs time,
    never correctness.

    Args:
        model_dir: a directory with .safetensors, .bin, .gguf, .pt or .pth files, sharded or not; or
            a single such file.
        weights_version: what stands for the weights of a directory that has none.
        clock_ns: wall clock in nanoseconds, of the same epoch as the file system's time stamps.

    Raises:
        ConfigError: no such directory, no weights in it, an index that names a file outside of it,
            a file that cannot be read or that changes while it is read.
    """
    files = _weight_files(model_dir, may_be_none=weights_version is not None)
    if not files:
        return blake3(WEIGHTS_TAG + str(weights_version).encode()).digest()
    cache = _DigestCache(_default_cache_dir())
    hasher = blake3(WEIGHTS_TAG)
    for name, path in files.items():
        try:
            digest = _file_digest(path, cache, clock_ns)
        except OSError as error:
            raise ConfigError(f"cannot read the weights in {path}: {error.strerror}") from error
        hasher.update(canonical([name, digest.hex()]))
    return hasher.digest()


def weights_state(model_dir: Path) -> object:
    """Return a value that differs after a weight file of `model_dir` is changed, added or removed.
    Reads no weights. Raises ConfigError as `weights_digest`."""
    return {name: _identity(_stat(path)) for name, path in _weight_files(model_dir).items()}


def newest_change(model_dir: Path) -> float:
    """Return when a weight file of `model_dir` last changed, by the clock of its file system, in
    seconds since the epoch. Raises ConfigError as `weights_digest`."""
    return max(_stat(path).st_ctime for path in _weight_files(model_dir).values())


def _weight_files(model_dir: Path, *, may_be_none: bool = False) -> dict[str, Path]:
    """Return the weight files by name, in the order of their names."""
    if model_dir.is_file() and model_dir.name.endswith(WEIGHT_SUFFIXES[:-1]):  # no lone index
        return {model_dir.name: model_dir}
    if not model_dir.is_dir():
        raise ConfigError(f"{model_dir} is not a model directory: no such directory")
    try:
        names = {
            name
            for name in os.listdir(model_dir)
            if name.endswith(WEIGHT_SUFFIXES) and name not in NOT_WEIGHTS
        }
    except OSError as error:
        raise ConfigError(f"cannot list the weights in {model_dir}: {error.strerror}") from error
    indexes = {name for name in names if name.endswith(".index.json")}
    for index in indexes:
        names |= _indexed(model_dir / index)
    if names == indexes:
        if may_be_none:
            return {}
        raise ConfigError(
            f"{model_dir} holds no weights; expected files ending in "
            f"{', '.join(WEIGHT_SUFFIXES[:-1])}"
        )
    files = {name: model_dir / name for name in sorted(names, key=os.fsencode)}
    for path in files.values():
        if not path.is_file():
            raise ConfigError(f"{path} is not a file, or a link to one that is missing")
    return files


def _indexed(path: Path) -> set[str]:
    """Return the files that an index names; none if a loader would not follow the index."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = {str(PurePosixPath(name)) for name in weight_map.values()}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
        return set()
    for name in names:
        if name.startswith("/") or ".." in name.split("/"):
            raise ConfigError(f"{path} names {name!r}, a file outside of the model directory")
    return names


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise ConfigError(f"cannot look at {path}: {error.strerror}") from error


def _file_digest(path: Path, cache: _DigestCache, clock_ns: Callable[[], int]) -> bytes:
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        started = clock_ns()
        cached = cache.get(before)
        if cached is not None:
            return cached
        if before.st_size >= _LONG_BYTES:
            logger.info("hashing %s of weights: %s", format_size(before.st_size), path)
        hasher = blake3(max_threads=blake3.AUTO)
        num_bytes = 0
        for piece in _pieces(file.readinto):
            hasher.update(piece)
            num_bytes += len(piece)
            if num_bytes > before.st_size:  # a file that grows as fast as it is read
                break
        after = os.fstat(file.fileno())
    if _identity(before) != _identity(after) or num_bytes != before.st_size:
        raise ConfigError(f"{path} changes while it is read: wait until it is complete")
    digest = hasher.digest()
    # As for git's "racily clean" files. Only ctime counts: a process cannot set it back, and every
    # change of content or mtime changes it, too.
    if before.st_ctime_ns + RACY_NS <= started and shows_changes(path.resolve().parent):
        cache.put(before, digest)
    return digest


def _pieces(readinto: Callable[[memoryview], int | None]) -> Iterator[memoryview]:
    """Yield the rest of a file in pieces of one buffer. The file is not mapped, so that a file that
    is cut short meanwhile ends the loop and not the process (SIGBUS)."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while num_bytes := readinto(buffer):
        yield buffer[:num_bytes]


def _identity(info: os.stat_result) -> tuple[int, int, int, int, int]:
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _default_cache_dir() -> Path | None:
    with suppress(ConfigError):
        return user_cache() / "kvferry" / "weights"
    return None


class _DigestCache:
    """A cache with one small file per (device, inode), replaced whole. Every fault is a miss."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory if directory is not None and _private(directory) else None

    def get(self, info: os.stat_result) -> bytes | None:
        if self._directory is None:
            return None
        try:
            text = self._path(self._directory, info).read_bytes()
        except OSError:
            return None
        digest = text[-64:]
        # A text that matches was encoded from a digest, so this is 64 hexadecimal digits.
        return bytes.fromhex(digest.decode()) if text == self._encode(info, digest) else None

    def put(self, info: os.stat_result, digest: bytes) -> None:
        if self._directory is None:
            return
        path = self._path(self._directory, info)
        # One temporary name per entry: a killed process leaves at most one small file behind, which
        # the next writer reuses. Two writers at once can at worst lose the entry, because `get`
        # checks what it reads.
        temporary = path.with_name(f".{path.name}.new")
        try:
            temporary.write_bytes(self._encode(info, digest.hex().encode()))
            os.replace(temporary, path)
        except OSError as error:
            logger.info("cannot keep a weights digest in %s: %s", self._directory, error)

    @staticmethod
    def _path(directory: Path, info: os.stat_result) -> Path:
        return directory / f"{info.st_dev:x}-{info.st_ino:x}"

    @staticmethod
    def _encode(info: os.stat_result, digest_hex: bytes) -> bytes:
        """Encode what must be unchanged, a checksum of that and the digest, and the digest."""
        state = b"kvferry weights 2 " + " ".join(map(str, _identity(info))).encode()
        return b"%s %s %s" % (state, blake3(state + digest_hex).hexdigest().encode(), digest_hex)


def _private(directory: Path) -> bool:
    """Whether `directory` exists (it is made if need be) and only this user can write to it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = directory.stat()
    except OSError as error:
        logger.info("no cache of weights digests in %s: %s", directory, error)
        return False
    if info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        logger.warning(
            "no cache of weights digests in %s: others can write to it (private is mode 700)",
            directory,
        )
        return False
    return True
