"""Fixtures for tests of commands: a store with known records, and a function that runs them."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.cli.output import Exit
from kvferry.record.schema import RecordSchema, leaf_digests
from kvferry.store.base import PutResult
from kvferry.store.file.directory import record_path
from kvferry.store.kind import Opening
from kvferry.store.recordio import put_record
from kvferry.store.url import open_one
from kvferry.testing.models import make_tiny_model
from kvferry.types import ChunkKey, KVGroup
from tests.servers.patience import make_engines_patient
from tests.servers.process import LOCALHOST
from tests.servers.seaweed import BUCKET
from tests.tokenizers import save_tiny_tokenizer

CHUNK_TOKENS = 7
TOKENS = range(100, 130)
"""Of a prompt of four chunks and an end of two tokens."""


@dataclass(frozen=True)
class MadeStore:
    """A directory store, and the records in it."""

    root: Path
    schema: RecordSchema
    keys: list[ChunkKey]

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def path(self, index: int) -> Path:
        return Path(record_path(str(self.root), self.keys[index]))

    def flip(self, index: int, at: int) -> None:
        """Flip one bit of a record on disk; negative offsets count from its end."""
        content = bytearray(self.path(index).read_bytes())
        content[at] ^= 1
        self.path(index).write_bytes(content)

    def set_last_used(self, index: int, at: float) -> None:
        """Set in the index when a record was last used, in seconds since the epoch."""
        with closing(sqlite3.connect(self.root / "index.sqlite3")) as db, db:
            changed = db.execute(
                "UPDATE records SET last_used = ? WHERE key = ?", (at, self.keys[index])
            )
            assert changed.rowcount == 1

    def snapshot(self) -> dict[str, bytes]:
        """Return the content of every file below the directory, by relative path."""
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {str(path.relative_to(self.root)): path.read_bytes() for path in files}


def put_records(
    url: str,
    *,
    num_records: int = 3,
    seed: int = 5,
    namespace: bytes | None = None,
    keys: Sequence[ChunkKey] | None = None,
) -> tuple[RecordSchema, list[ChunkKey]]:
    """Store records as an engine does, under `keys` or random ones; return their schema and their
    keys, in order."""
    rng = random.Random(seed)
    schema = RecordSchema.for_groups(
        namespace=namespace or rng.randbytes(32),
        chunk_tokens=CHUNK_TOKENS,
        groups=(
            KVGroup(num_layers=2, num_kv_heads=3, content_size=10, dtype="float32", block_size=16),
        ),
    )
    keys = keys or [ChunkKey(rng.randbytes(32)) for _ in range(num_records)]
    with open_one(url, Opening(namespace=schema.namespace)) as store:
        for number, key in enumerate(keys):
            # No number with such bytes has an exponent of ones alone: all are finite.
            payload = bytes(each % 127 for each in rng.randbytes(schema.payload_bytes))
            table = leaf_digests(schema.components[0], memoryview(payload))
            image = memoryview(bytearray(schema.head_bytes) + payload)
            stored = put_record(store, schema, key, number * CHUNK_TOKENS, table, image)
            assert stored.result is PutResult.STORED
    return schema, list(keys)


@pytest.fixture(autouse=True)
def _patient_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    make_engines_patient(monkeypatch)


@pytest.fixture
def make_store(tmp_path: Path) -> Callable[..., MadeStore]:
    def make(*, name: str = "store", **given: object) -> MadeStore:
        return MadeStore(tmp_path / name, *put_records((tmp_path / name).as_uri(), **given))

    return make


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The one line of a command that was refused, or that found nothing; fails if it printed
        anything else."""
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        nothing = self.code == Exit.NO and lines[0].startswith("nothing found: ")
        assert nothing or lines[0].startswith("error: ")
        return lines[0]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run a command in this process, through the function that the installed script calls."""

    def call(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_tiny_model(tmp_path_factory.mktemp("model"))
    save_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def tokens_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(TOKENS)))
    return path


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "store").as_uri()


@pytest.fixture
def url_of(request, monkeypatch, tmp_path):
    """The URL of a store by its kind, with a prefix of the test."""

    def url(kind: str) -> str:
        prefix = tmp_path.name
        if kind == "file":
            return (tmp_path / "store").as_uri()
        if kind == "valkey":
            return f"valkey://{LOCALHOST}:{request.getfixturevalue('valkey_server').port}/{prefix}"
        if kind == "mooncake":
            server = request.getfixturevalue("mooncake")
            return f"mooncake://{server.master}/{prefix}?admin={server.admin}"
        server = request.getfixturevalue("seaweed")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        return f"s3://{BUCKET}/{prefix}?endpoint={server.endpoint}&region=us-east-1"

    return url
