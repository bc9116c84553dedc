"""The identity of weights: a digest of their content.

Two fine-tunes of one shape have files of equal names, sizes and headers, so only a hash of every
byte distinguishes them. Each file is hashed once: a cache keeps the digest with the file's device,
inode, size and times, and the file is hashed again when one of these differs. On file systems whose
times do not show every change, a sample of its bytes must be equal, too. Of processes that start
together one hashes a file, with a lock beside the cache. The digest is SHA-256, the name that hubs
give a large file in their caches, so that these need not be read.
"""

from __future__ import annotations

import enum
import hashlib
import io
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from blake3 import blake3

from kvferry.config import format_size
from kvferry.errors import ConfigError
from kvferry.filesystem import file_system, process_start, shows_changes, user_cache, why_untrusted
from kvferry.keys.encoding import canonical

logger = logging.getLogger(__name__)

WEIGHTS_TAG = b"kvferry.weight.2"

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".index.json")
"""Files that hold tensors, and the index that names the file of each tensor."""

NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
"""Files that trainers leave beside the weights; no engine loads them for inference."""

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"

_BESIDE = re.compile(
    r"pytorch_model(-\d+-of-\d+)?\.bin|pytorch_model\.bin\.index\.json|adapter_model\.bin"
    r"|rng_state(_\d+)?\.pth|.*\.gguf"
)
"""Files that no host reads by default from a directory with weights in safetensors: other forms of
the weights, and leftovers of trainers."""


class Loads(enum.Enum):
    """Which weight files of a directory a host reads, as far as this is certain."""

    ALL = "not certain: any of them"
    BY_NAME = "as Transformers: model.safetensors, else the files of its index, else any"
    BY_PATTERN = "as vLLM and SGLang by default: any in safetensors, if there are some, else any"


RACY_NS = 2_000_000_000
"""Coarsest time stamp of a file system in use (2 s). A file that changed less than this before it
was hashed may change again with equal times."""

_BUFFER_BYTES = 1024 * 1024
_NUM_THREADS = 8
"""Files that are hashed at a time: the reads of one go on while another is hashed."""

_LONG_BYTES = 1 << 30
"""From this size on, hashing a file takes a while and is logged."""

_SHA256 = re.compile("[0-9a-f]{64}")
_COMMIT = re.compile("[0-9a-f]{40}")
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")

_SAMPLE_BYTES = 64 * 1024
_NUM_SAMPLES = 64
"""Evenly spread pieces, the first bytes and the last among them: some 4 MiB of a file."""

_LOCKED_BYTES = 64 << 20
"""Smaller files are hashed faster than processes agree on who hashes them."""

_LOCK_SECONDS = 10.0
_LOCK_POLL_SECONDS = 0.02
_SLOW_BYTES_PER_SECOND = 50e6


class WeightFiles(NamedTuple):
    """The weight files of a directory."""

    counted: Mapping[str, Path]
    """By name, in the order of their names."""
    left_out: tuple[str, ...]
    """Names of those that no host would read, so that they do not count."""


def adapter_digest(path: Path) -> str:
    """Return the identity by content of the LoRA adapter in a directory.

    Raises:
        ConfigError, OSError: its files cannot be read.
    """
    settings = (path / "adapter_config.json").read_bytes()
    return f"{weights_digest(path).hex()}-{blake3(settings).hexdigest()}"


def weights_digest(
    model_dir: Path,
    *,
    weights_version: str | None = None,
    loads: Loads = Loads.ALL,
    clock_ns: Callable[[], int] = time.time_ns,
) -> bytes:
    """Hash names and contents of the weight files of `model_dir` to 32 bytes.

    Weight files are those of the directory itself, and those that the `weight_map` of an index in
    it names, also in sub-directories; of these, the ones that a host `loads`. The digest does not
    depend on path, owner and times of the directory, so a copy has the same one. Memory stays below
    17 MiB whatever the sizes. A file that a snapshot in a hub's cache links to is known by its name
    there.

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
    files = weight_files(model_dir, loads, may_be_none=weights_version is not None).counted
    if not files:
        return blake3(WEIGHTS_TAG + str(weights_version).encode()).digest()
    cache, stopped = _DigestCache(_cache_dir()), threading.Event()

    def digest_of(path: Path) -> bytes:
        try:
            return _name_in_hub(path) or _file_digest(path, cache, clock_ns, stopped)
        except OSError as error:
            raise ConfigError(f"cannot read the weights in {path}: {error.strerror}") from error

    hasher = blake3(WEIGHTS_TAG)
    for name, digest in _digests(files, digest_of, stopped).items():
        hasher.update(canonical([name, digest.hex()]))
    return hasher.digest()


def _digests(
    files: Mapping[str, Path], digest_of: Callable[[Path], bytes], stopped: threading.Event
) -> dict[str, bytes]:
    """Digest files on threads, several at a time; return them in order. At the first error, or if
    this thread is interrupted, set `stopped`. The threads are daemons: a process that ends does not
    wait until terabytes are hashed."""
    digests = dict.fromkeys(files, b"")
    errors: list[BaseException] = []
    waiting = iter(files.items())

    def work() -> None:
        try:
            for name, path in waiting:
                if stopped.is_set():
                    return
                digests[name] = digest_of(path)
        except BaseException as error:  # raised below
            errors.append(error)
            stopped.set()

    threads = [
        threading.Thread(target=work, name=f"kvferry-weights-{number}", daemon=True)
        for number in range(min(_NUM_THREADS, len(files)))
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        stopped.set()
    if errors:
        raise errors[0]
    return digests


def weights_state(model_dir: Path, *others: str) -> object:
    """Return a value that differs after a weight file of `model_dir`, or one of `others` in it, is
    changed, replaced, added or removed. Reads no weights. Raises as `weights_digest`."""
    return {str(path): _identity(_stat(path)) for path in _files_and(model_dir, others)}


def newest_change(model_dir: Path, *others: str) -> float:
    """Return when a weight file of `model_dir`, or one of `others` in it, last changed, by the
    clock of its file system, in seconds since the epoch. A change is also that a link on the way to
    it is replaced, or its directory renamed. Raises ConfigError as `weights_digest`."""
    files = _files_and(model_dir, others)
    changes = [_stat(path).st_ctime for path in files]
    directories = [_stat(each) for each in {path.parent for path in files}]
    # Equal times are those of a file that came or went.
    renamed = [each.st_ctime for each in directories if each.st_ctime_ns != each.st_mtime_ns]
    return max([*changes, *renamed, *_link_changes(files)])


def _link_changes(files: Iterable[Path]) -> Iterator[float]:
    """Yield when each link on the way to existing files was made. Procfs has no such times: it
    stamps a link when somebody looks. A link of a process there is as old as the process."""
    ways = [path.absolute() for path in files]
    seen: set[Path] = set()
    while ways:
        way = ways.pop()
        for each in {way, *way.parents} - seen:
            seen.add(each)
            if each.is_symlink():
                ways.append(each.parent / os.readlink(each))
                if file_system(each.parent) != "proc":
                    yield each.lstat().st_ctime
                elif process := next((up for up in each.parents if up.name.isdigit()), None):
                    yield process_start(process)


def weight_files(
    model_dir: Path, loads: Loads = Loads.ALL, *, may_be_none: bool = False
) -> WeightFiles:
    """Return the weight files of a directory, or a single file; none are counted only if there
    `may_be_none`. Reads no weights. Raises ConfigError as `weights_digest`."""
    if model_dir.is_file() and model_dir.name.endswith(WEIGHT_SUFFIXES[:-1]):  # no lone index
        return WeightFiles({model_dir.name: model_dir}, ())
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
    left_out = _not_loaded(model_dir, names, loads)
    names -= left_out
    indexes = {name for name in names if name.endswith(".index.json")}
    for index in indexes:
        names |= _indexed(model_dir / index)
    if names == indexes:
        if may_be_none:
            return WeightFiles({}, ())
        raise ConfigError(
            f"{model_dir} holds no weights; expected files ending in "
            f"{', '.join(WEIGHT_SUFFIXES[:-1])}"
        )
    files = {name: model_dir / name for name in sorted(names, key=os.fsencode)}
    for path in files.values():
        if not path.is_file():
            raise ConfigError(f"{path} is not a file, or a link to one that is missing")
    return WeightFiles(files, tuple(sorted(left_out - names)))


def _not_loaded(model_dir: Path, names: set[str], loads: Loads) -> set[str]:
    """Return those of the weight files in a directory that no host reads that `loads` so. Where
    that is not certain, none."""
    shards = _indexed(model_dir / _INDEX) if _INDEX in names else set()
    if loads is Loads.ALL or not (shards or _WHOLE in names):
        return set()
    if loads is Loads.BY_NAME:
        if _names_its_files(model_dir):
            return set()
        return names - ({_WHOLE} if _WHOLE in names else {_INDEX, *shards})
    if not any(name.endswith(".safetensors") and not name.startswith(".") for name in names):
        return set()  # they are looked for in the directory itself, whatever an index names
    left_out = {name for name in names if _BESIDE.fullmatch(name)}
    if shards:  # without an index, all files in safetensors are read
        left_out |= {"adapter_model.safetensors"} & (names - shards)
    return left_out


def _names_its_files(model_dir: Path) -> bool:
    """Whether Transformers may read other files than those of the usual names: such as the
    configuration names, or an adapter's, too."""
    if (model_dir / "adapter_config.json").exists():
        return True
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except FileNotFoundError:
        return False
    except (OSError, ValueError, RecursionError):
        return True
    return '"transformers_weights":' in json.dumps(config)


def basis_of(path: Path) -> str:
    """Say, for people, what the digest of an unchanged weight file rests on after its first hash.
    Raises OSError."""
    if _name_in_hub(path) is not None:
        return "its name in a hub's cache"
    if shows_changes(path.resolve().parent):
        return "its content, and its times since"
    return "its content, and its size, time and a sample since"


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


def _name_in_hub(path: Path) -> bytes | None:
    """The SHA-256 of a file, if it is a link of a snapshot to a blob of that name, as in Hugging
    Face's cache. None for other files, and for a blob that changed since the link was made: a
    program that writes to a snapshot's file changes the blob and not its name. (Small files, which
    are no blobs of Git LFS, have the shorter names of Git.)"""
    blob = _blob_of(path)
    return bytes.fromhex(blob.name) if blob is not None and _SHA256.fullmatch(blob.name) else None


def _blob_of(path: Path) -> Path | None:
    """The blob that a file of a hub's snapshot is a link to; None if it is no such link, or if the
    blob changed since."""
    blob = path.resolve()
    if not path.is_symlink() or blob.parent.name != "blobs" or not _BLOB.fullmatch(blob.name):
        return None
    is_snapshots = blob.parent.with_name("snapshots") in (each.resolve() for each in path.parents)
    if not is_snapshots or blob.stat().st_ctime_ns > path.lstat().st_ctime_ns:
        return None
    return blob


def is_in_snapshot(model_dir: Path, *others: str) -> bool:
    """Whether all weight files of `model_dir`, and `others` in it, are links of one commit's
    snapshot in a hub's cache to blobs that did not change since. Such a path names the content:
    each read of these files reads this. Raises ConfigError as `weights_digest`."""
    if model_dir.parent.name != "snapshots" or not _COMMIT.fullmatch(model_dir.name):
        return False  # a link to a snapshot names nothing, as it may be replaced
    return all(_blob_of(path) is not None for path in _files_and(model_dir, others))


def shows_its_changes(model_dir: Path, *others: str) -> bool:
    """Whether each change of a weight file of `model_dir`, or of `others` in it, shows in its
    times. Raises ConfigError as `weights_digest`."""
    return all(
        map(shows_changes, {path.resolve().parent for path in _files_and(model_dir, others)})
    )


def _files_and(model_dir: Path, others: Iterable[str]) -> set[Path]:
    files = weight_files(model_dir).counted.values()
    return {*files, *(model_dir / name for name in others)}


def _file_digest(
    path: Path, cache: _DigestCache, clock_ns: Callable[[], int], stopped: threading.Event
) -> bytes:
    with path.open("rb", buffering=0) as file:
        before = os.fstat(file.fileno())
        started = clock_ns()
        entry = _entry_of(file.fileno(), before, path.resolve())
        # The ranks of an engine start together: the first hashes, the others then find its digest.
        with cache.hashing(entry, before.st_size, stopped):
            cached = cache.get(entry)
            if cached is not None:
                return cached
            digest = _hash(file, before, path, stopped)
            # As for git's "racily clean" files.
            if entry.changed_ns + RACY_NS <= started:
                cache.put(entry, digest)
    return digest


def _hash(file: io.FileIO, before: os.stat_result, path: Path, stopped: threading.Event) -> bytes:
    """Hash the whole file. Raises ConfigError if it changes meanwhile, or the caller gave up."""
    if before.st_size >= _LONG_BYTES:
        logger.info("hashing %s of weights: %s", format_size(before.st_size), path)
    hasher = hashlib.sha256()
    num_bytes = 0
    for piece in _pieces(file.readinto):
        hasher.update(piece)
        num_bytes += len(piece)
        # A file may grow as fast as it is read.
        if num_bytes > before.st_size or stopped.is_set():
            break
    if _identity(before) != _identity(os.fstat(file.fileno())) or num_bytes != before.st_size:
        raise ConfigError(f"{path} changes while it is read: wait until it is complete")
    return hasher.digest()


def _pieces(readinto: Callable[[memoryview], int | None]) -> Iterator[memoryview]:
    """Yield the rest of a file in pieces of one buffer. The file is not mapped, so that a file that
    is cut short meanwhile ends the loop and not the process (SIGBUS)."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    while num_bytes := readinto(buffer):
        yield buffer[:num_bytes]


def _identity(info: os.stat_result) -> tuple[int, int, int, int, int]:
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _cache_dir() -> Path | None:
    """Return where digests are kept, which is made if need be; None if that cannot be, or if others
    can write to it."""
    try:
        directory = user_cache() / "kvferry" / "weights"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = why_untrusted(str(directory))
    except (ConfigError, OSError) as error:
        logger.info("no cache of weights digests: %s", error)
        return None
    if why is not None:
        logger.warning("no cache of weights digests: %s %s", directory, why)
    return directory if why is None else None


class _KnownFile(NamedTuple):
    """The place of a file's digest in the cache, and what must be unchanged for it to hold."""

    name: str
    state: bytes
    changed_ns: int
    """When the file changed last: a change soon afterwards may not show."""


def _entry_of(fd: int, info: os.stat_result, path: Path) -> _KnownFile:
    """Where changes show in a file's times, its inode and times stand for its content. Only ctime
    counts then: a process cannot set it back, and every change of content or mtime changes it, too.
    Elsewhere its path, size and mtime do, together with a sample of its bytes."""
    if shows_changes(path.parent):
        state = " ".join(map(str, _identity(info)))
        return _KnownFile(f"{info.st_dev:x}-{info.st_ino:x}", state.encode(), info.st_ctime_ns)
    hasher = blake3(str(path).encode())
    last = max(0, info.st_size - _SAMPLE_BYTES)
    for index in range(_NUM_SAMPLES):
        hasher.update(os.pread(fd, _SAMPLE_BYTES, last * index // (_NUM_SAMPLES - 1)))
    state = f"{info.st_size} {info.st_mtime_ns} {hasher.hexdigest()}"
    name = blake3(str(path).encode()).hexdigest()[:32]
    return _KnownFile(name, state.encode(), info.st_mtime_ns)


class _DigestCache:
    """A cache with one small file per file of weights, replaced whole. Every fault is a miss."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    @contextmanager
    def hashing(
        self, entry: _KnownFile, num_bytes: int, stopped: threading.Event
    ) -> Iterator[None]:
        """Let one process at a time hash a file. A process that waits for longer than a slow disk
        takes goes on without: another one may hang or be stopped."""
        with ExitStack() as held:
            if self._directory is not None and num_bytes >= _LOCKED_BYTES:
                until = time.monotonic() + _LOCK_SECONDS + num_bytes / _SLOW_BYTES_PER_SECOND
                place = self._directory / f"{entry.name}.lock"
                with suppress(OSError):  # files cannot be locked here
                    lock = os.open(place, os.O_RDWR | os.O_CREAT, 0o600)
                    held.callback(os.close, lock)
                    while not _locked(lock) and time.monotonic() < until and not stopped.is_set():
                        stopped.wait(_LOCK_POLL_SECONDS)
            yield

    def get(self, entry: _KnownFile) -> bytes | None:
        if self._directory is None:
            return None
        try:
            text = (self._directory / entry.name).read_bytes()
        except OSError:
            return None
        digest = text[-64:]
        # A text that matches was encoded from a digest, so this is 64 hexadecimal digits.
        return bytes.fromhex(digest.decode()) if text == self._encode(entry, digest) else None

    def put(self, entry: _KnownFile, digest: bytes) -> None:
        if self._directory is None:
            return
        path = self._directory / entry.name
        # One temporary name per entry: a killed process leaves at most one small file behind, which
        # the next writer reuses. Two writers at once can at worst lose the entry, because `get`
        # checks what it reads.
        temporary = path.with_name(f".{path.name}.new")
        try:
            temporary.write_bytes(self._encode(entry, digest.hex().encode()))
            os.replace(temporary, path)
        except OSError as error:
            logger.info("cannot keep a weights digest in %s: %s", self._directory, error)

    @staticmethod
    def _encode(entry: _KnownFile, digest_hex: bytes) -> bytes:
        """Encode what must be unchanged, a checksum of that and the digest, and the digest."""
        state = b"kvferry weights 4 " + entry.state
        return b"%s %s %s" % (state, blake3(state + digest_hex).hexdigest().encode(), digest_hex)


def _locked(fd: int) -> bool:
    """Whether this process has the lock now. Raises OSError where files cannot be locked."""
    try:
        flock(fd, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True
