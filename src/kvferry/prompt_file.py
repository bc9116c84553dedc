"""The records of a prompt as one file to keep and move: `kvferry export` and `kvferry import`.

The file is an uncompressed tar: a description of the prompt, then each record as a store keeps it,
in the order of the prompt. `docs/format.md` is the normative text. Input is hostile, so no tar
library parses it: the reader builds each tar header again from the only valid values, and compares
the bytes. So it never follows a path or a link.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any, NamedTuple

import msgspec

from kvferry.errors import ConfigError, StoreError
from kvferry.keys import KEY_VERSION, ChunkKeys, JsonValue, Namespace
from kvferry.keys.namespace import describe_group
from kvferry.record.check import MissReason, check_head, check_record
from kvferry.record.schema import RecordSchema, digest
from kvferry.store.base import Buffer, PutResult, Store
from kvferry.types import FORMAT_VERSION, ChunkKey, ExtraKeys, KVGroup

FILE_FORMAT = "kvferry-prompt"
FILE_VERSION = 1

MAX_PROMPT_BYTES = 16 << 20
"""Limit of a prompt's description; a million tokens need less, so a longer one is hostile."""

MAX_RECORD_BYTES = 4 << 30
"""Limit of a record; one is in memory at a time."""

_PROMPT = "the description of its prompt"
_BLOCK_BYTES = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK_BYTES)

Progress = Callable[[int], None]
"""Called after each record with the number of records so far."""


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt in one namespace.

    Attributes:
        extra: cache salt and LoRA adapter of the request.

    Raises:
        ConfigError: by `keys` and `schema`, if the namespace's keys do not follow from tokens, or
            it has another version or describes impossible records.
    """

    namespace: Namespace
    token_ids: list[int]
    extra: ExtraKeys

    @cached_property
    def schema(self) -> RecordSchema:
        """The schema of the prompt's records."""
        described = self.namespace.description
        where = f"namespace {self.namespace.digest.hex()[:16]}"
        if self.namespace.is_opaque:
            raise ConfigError(
                f"{where} holds opaque {self.namespace.title}: their keys are hashes of the host, "
                "which do not follow from the tokens of a prompt"
            )
        versions = described.get("format_version"), described.get("key_version")
        if versions != (FORMAT_VERSION, KEY_VERSION):
            raise ConfigError(
                f"{where} is of versions {str(versions)[:40]} of records and keys, this kvferry "
                f"has {(FORMAT_VERSION, KEY_VERSION)}; use the release that stored it"
            )
        try:
            return RecordSchema.for_groups(
                namespace=self.namespace.digest,
                chunk_tokens=msgspec.convert(described["chunk_tokens"], int),
                groups=_groups(described["groups"]),
            )
        except (KeyError, ValueError, msgspec.ValidationError):
            raise ConfigError(f"{where} describes records that no store can have") from None

    @cached_property
    def keys(self) -> list[ChunkKey]:
        """The keys of the prompt's whole chunks."""
        keys = ChunkKeys(self.namespace.digest, self.schema.chunk_tokens, self.extra)
        keys.extend(self.token_ids)
        return keys.keys

    def tokens_in(self, num_records: int) -> int:
        """Return how many tokens `num_records` records hold."""
        return num_records * self.schema.chunk_tokens

    def why_wrong(self, number: int, record: memoryview, size: int) -> MissReason | None:
        """Say why `record`, the first bytes of a value of `size` bytes, is not the whole and right
        record of chunk `number`; None if it is."""
        key = self.keys[number]
        return check_head(self.schema, key, self.tokens_in(number), size, record) or check_record(
            self.schema, key, record, size
        )

    def room(self) -> memoryview:
        """Return memory for one record. Raises ConfigError above `MAX_RECORD_BYTES`."""
        num_bytes = self.schema.record_bytes
        if num_bytes > MAX_RECORD_BYTES:
            raise ConfigError(
                f"a record of {num_bytes} bytes is above the bound of {MAX_RECORD_BYTES}"
            )
        return memoryview(mmap.mmap(-1, num_bytes))

    def as_json(self) -> bytes:
        """Return the description of the prompt. Raises ConfigError if it is too long."""
        value: dict[str, JsonValue] = {
            "format": FILE_FORMAT,
            "version": FILE_VERSION,
            "namespace": self.namespace.digest.hex(),
            "model": self.namespace.model,
            "description": self.namespace.description,
            "salt": self.extra.cache_salt,
            "lora": self.extra.lora,
            "token_ids": self.token_ids,
        }
        text = json.dumps(value, separators=(",", ":")).encode()
        if len(text) > MAX_PROMPT_BYTES:
            raise ConfigError(f"a prompt of {len(self.token_ids)} tokens is too long for a file")
        return text


def _groups(described: JsonValue) -> tuple[KVGroup, ...]:
    """Read KV groups. Raises ValueError or msgspec.ValidationError for anything else."""
    found = tuple(
        msgspec.convert({**each, "block_size": 1}, KVGroup)
        for each in msgspec.convert(described, list[dict[str, Any]])
    )
    if [describe_group(group) for group in found] != described:
        raise ValueError
    return found


# -- out of a store -------------------------------------------------------------------------------


class Exported(NamedTuple):
    """What was copied: records from the start of a prompt."""

    num_records: int
    num_bytes: int
    """Size of these records together."""
    fault: MissReason | None
    """Why the next record is wrong; None if it is absent, or the prompt has no more."""


def export_prompt(
    store: Store, prompt: StoredPrompt, path: Path | None, progress: Progress = lambda _: None
) -> Exported:
    """Verify the records of a prompt and copy them into a file, up to the first that is missing or
    wrong. The file appears whole or not at all, and only its owner may read it. If there is no
    record, a file that exists at `path` stays. If `path` is None, nothing is written.

    Raises:
        ConfigError: the file cannot be written, or see `StoredPrompt`.
        StoreError: the store cannot be read.
    """
    if path is None:
        return _copy(store, prompt, None, progress)
    text = prompt.as_json()
    part = None
    try:
        with NamedTemporaryFile(dir=path.parent, prefix=".kvferry-export-", delete=False) as file:
            part = Path(file.name)
            file.write(_prompt_member(text))
            _write_padded(file, text)
            done = _copy(store, prompt, file, progress)
            file.write(_END)
            file.flush()
            os.fsync(file.fileno())
        if done.num_records:
            part.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
    return done


def _copy(
    store: Store, prompt: StoredPrompt, file: IO[bytes] | None, progress: Progress
) -> Exported:
    """Copy the records of a prompt, up to the first that is missing or wrong."""
    values, room = store.of(prompt.namespace.digest), prompt.room()
    num_records, fault = 0, None
    for key in prompt.keys:
        size = values.read(key, [(0, room)])
        if size is None:
            break
        fault = prompt.why_wrong(num_records, room[:size], size)
        if fault is not None:
            break
        if file is not None:
            file.write(_member(_name(key), len(room)))
            _write_padded(file, room)
        num_records += 1
        progress(num_records)
    return Exported(num_records, num_records * len(room), fault)


def _name(key: ChunkKey) -> str:
    return f"{key.hex()}.safetensors"


def _prompt_member(text: bytes) -> bytes:
    return _member(f"prompt-{digest(text).hex()}.json", len(text))


def _member(name: str, num_bytes: int) -> bytes:
    """Return the tar header of a regular file. It depends on name and size alone."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = num_bytes, 0o600
    return member.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")


def _write_padded(file: IO[bytes], content: Buffer) -> None:
    file.write(content)
    file.write(bytes(-len(content) % _BLOCK_BYTES))


# -- into a store ---------------------------------------------------------------------------------


class Imported(NamedTuple):
    """What a store took."""

    num_stored: int
    num_existing: int
    """Records that the store had already."""


class PromptFile:
    """A prompt file that is open for reading. A context manager.

    Raises:
        ConfigError: it cannot be opened, or does not begin like a prompt file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError(f"cannot read {path}: not a regular file")
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        try:
            self.prompt = self._read_prompt()
            self._first_record = self._file.tell()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> PromptFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def check(self, progress: Progress = lambda _: None) -> int:
        """Verify all records of the file; return how many there are.

        Raises:
            ConfigError: the file is anything but what `export_prompt` writes.
        """
        num_records = 0
        for _ in self._records():
            num_records += 1
            progress(num_records)
        return num_records

    def copy_to(self, store: Store, progress: Progress = lambda _: None) -> Imported:
        """Verify each record again and store it, in the order of the prompt. If a later record
        fails, the earlier ones stay stored.

        Raises:
            ConfigError: as for `check`.
            StoreError: the store does not take a record.
        """
        counts = dict.fromkeys(PutResult, 0)
        store.describe(self.prompt.namespace.digest, self.prompt.namespace.as_text())
        for done, (key, record) in enumerate(self._records()):
            result = store.put(key, [record])
            if result in (PutResult.NO_SPACE, PutResult.FAILED):
                why = "has no room" if result is PutResult.NO_SPACE else "does not take a record"
                because = f": {store.refusal}" if store.refusal else ""
                raise StoreError(f"{store.url} {why}{because}; {done} records were imported")
            counts[result] += 1
            progress(done + 1)
        # The start of a prompt is evicted last.
        store.touch(self.prompt.keys[: sum(counts.values())])
        return Imported(counts[PutResult.STORED], counts[PutResult.EXISTS])

    def _read_prompt(self) -> StoredPrompt:
        header = self._take(_BLOCK_BYTES)
        size = _octal(header[124:135])
        if not header.startswith(b"prompt-") or size is None or size > MAX_PROMPT_BYTES:
            raise ConfigError(f"{self._path} is no file of `kvferry export`")
        text = self._take(size)
        if header != _prompt_member(text):
            raise self._damaged(_PROMPT)
        self._skip_padding(size)
        return self._parse(text)

    def _parse(self, text: bytes) -> StoredPrompt:
        try:
            value = json.loads(text)
            is_ours = value["format"] == FILE_FORMAT
            version = value["version"] if is_ours else None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._damaged(_PROMPT) from None
        if version != FILE_VERSION:
            raise ConfigError(
                f"{self._path} is of version {str(version)[:20]!r} of such files, this kvferry "
                f"reads {FILE_VERSION}"
            )
        try:
            described = {name: value[name] for name in ("model", "description")}
            namespace = Namespace.from_text(
                bytes.fromhex(value["namespace"]), json.dumps(described)
            )
            salt, lora, token_ids = value["salt"], value["lora"], value["token_ids"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise self._damaged(_PROMPT) from None
        if namespace is None:
            raise ConfigError(f"{self._path}: the namespace is not the digest of its description")
        if (
            not (isinstance(salt, str | None) and isinstance(lora, str | None))
            or not isinstance(token_ids, list)
            or not all(type(each) is int and 0 <= each < 1 << 32 for each in token_ids)
        ):
            raise self._damaged(_PROMPT)
        prompt = StoredPrompt(namespace, token_ids, ExtraKeys(cache_salt=salt, lora=lora))
        if prompt.as_json() != text:
            raise self._damaged(_PROMPT)
        return prompt

    def _records(self) -> Iterator[tuple[ChunkKey, memoryview]]:
        """Yield each verified record. The next one overwrites its memory."""
        self._file.seek(self._first_record)
        room = self.prompt.room()
        number = 0
        while (header := self._take(_BLOCK_BYTES)) != bytes(_BLOCK_BYTES):
            if number == len(self.prompt.keys):
                raise ConfigError(f"{self._path} holds more than the prompt has")
            key = self.prompt.keys[number]
            if header != _member(_name(key), len(room)):
                raise ConfigError(
                    f"{self._path}: record {number + 1} does not belong to the tokens of the prompt"
                )
            if self._file.readinto(room) != len(room):
                raise self._truncated()
            self._skip_padding(len(room))
            reason = self.prompt.why_wrong(number, room, len(room))
            if reason is not None:
                raise ConfigError(f"{self._path}: record {number + 1} is damaged ({reason})")
            yield key, room
            number += 1
        if not number:
            raise ConfigError(f"{self._path} holds no record")
        if self._take(_BLOCK_BYTES) != bytes(_BLOCK_BYTES) or self._file.read(1):
            raise self._damaged("its end")

    def _take(self, num_bytes: int) -> bytes:
        taken = self._file.read(num_bytes)
        if len(taken) != num_bytes:
            raise self._truncated()
        return taken

    def _skip_padding(self, num_bytes: int) -> None:
        if any(self._take(-num_bytes % _BLOCK_BYTES)):
            raise self._damaged("what fills a block")

    def _truncated(self) -> ConfigError:
        return ConfigError(f"{self._path} is truncated")

    def _damaged(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path} is damaged: {what}")


def _octal(field: bytes) -> int | None:
    try:
        return int(field, 8)
    except ValueError:
        return None
