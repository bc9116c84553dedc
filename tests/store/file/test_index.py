"""An index that is damaged, replaced, locked or gone: misses at worst, and made anew by itself."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvferry.errors import StoreError
from kvferry.observe import Counters
from kvferry.store.base import PutResult, Where
from kvferry.store.file import FileStore
from kvferry.store.file.database import IndexUnavailable
from kvferry.store.file.settings import FileBounds
from kvferry.testing.stores import make_key, make_value, read_value
from kvferry.testing.stores.hooks import wait_until
from tests.servers.process import let_run
from tests.store.file.settings import FAST
from tests.store.file.storing import (
    MAX_VALUE,
    NUM_KEYS,
    QUOTA,
    assert_index_agrees,
    disk_bytes,
    key_of,
    read_back,
    value_of,
)

pytestmark = pytest.mark.slow

# What a machine that stalls adds to a call. What is looked for would last for ever.
LATE_SECONDS = 10.0
SCHEMA = ("CREATE TABLE some (n INTEGER PRIMARY KEY AUTOINCREMENT)",)
OUTSIDE = b"not a database" * 100


class Place:
    """An index to be damaged.

    Attributes:
        path: of the database.
        journal: of the database.
        outside: a file that is not the store's.
        earlier: a copy of the database as it once was.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / "index.sqlite3"
        self.journal = root / "index.sqlite3-journal"
        self.outside = root.with_name("outside")
        self.earlier = root.with_name("earlier")

    def execute(self, statement: str) -> None:
        db = sqlite3.connect(self.path, isolation_level=None, timeout=10)
        db.execute("PRAGMA writable_schema = ON")
        db.execute(statement)
        db.close()

    def overwrite(self, path: Path, content: bytes, offset: int = 0) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(content)


def is_deleted(place):
    place.path.unlink()


def is_deleted_with_its_journal(place):
    place.path.unlink()
    place.journal.unlink(missing_ok=True)


def is_empty(place):
    os.truncate(place.path, 0)


def is_cut(place):
    os.truncate(place.path, 5000)


def is_noise(place):
    place.overwrite(place.path, random.Random(1).randbytes(place.path.stat().st_size))


def is_noise_in_the_middle(place):
    for start in range(4096, place.path.stat().st_size, 8192):
        place.overwrite(place.path, random.Random(2).randbytes(4096), start)


def put_in_place(path, make):
    """What `make` makes, whoever makes the file anew in the moment between."""
    for _ in range(1000):
        path.unlink(missing_ok=True)
        try:
            return make()
        except (FileExistsError, NotADirectoryError):  # the latter is what a renamed directory gets
            continue
    raise AssertionError(f"{path} is made again each time")


def has_a_cut_journal(place):
    os.truncate(place.journal, 100)


def has_a_journal_of_noise(place):
    place.journal.write_bytes(random.Random(3).randbytes(9000))


def is_overwritten_by_an_earlier_copy(place):
    place.overwrite(place.path, place.earlier.read_bytes())
    os.truncate(place.path, place.earlier.stat().st_size)


def is_replaced_by_an_earlier_copy(place):
    os.replace(place.earlier, place.path)


def _other(place):
    other = place.path.with_name("other")
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE records (key, num_bytes)")
    db.commit()
    db.close()
    return other


def is_replaced_by_another_schema(place):
    os.replace(_other(place), place.path)


def is_overwritten_by_another_schema(place):
    other = _other(place)
    is_empty(place)
    place.overwrite(place.path, other.read_bytes())
    other.unlink()


def is_a_link(place):
    put_in_place(place.path, lambda: place.path.symlink_to(place.outside))


def is_a_link_to_itself_elsewhere(place):
    os.replace(place.path, place.outside.with_name("moved"))
    put_in_place(place.path, lambda: place.path.symlink_to(place.outside.with_name("moved")))


def is_a_link_to_nowhere(place):
    put_in_place(place.path, lambda: place.path.symlink_to(place.outside.with_name("nowhere")))


def is_a_directory(place):
    made = place.outside.with_name("directory")
    made.mkdir()
    (made / "file").touch()
    put_in_place(place.path, lambda: made.rename(place.path))


def is_a_fifo(place):
    put_in_place(place.path, lambda: os.mkfifo(place.path))


def has_a_link_for_a_journal(place):
    put_in_place(place.journal, lambda: place.journal.symlink_to(place.outside))


def has_a_directory_for_a_journal(place):
    put_in_place(place.journal, place.journal.mkdir)


def has_a_fifo_for_a_journal(place):
    put_in_place(place.journal, lambda: os.mkfifo(place.journal))


STATEMENTS = {
    "has_a_trigger": "CREATE TRIGGER own AFTER INSERT ON records BEGIN DELETE FROM records; "
    "UPDATE totals SET num_bytes = 0; END",
    "has_a_trigger_without_end": "CREATE TRIGGER own AFTER INSERT ON records BEGIN "
    "INSERT INTO removals WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
    "SELECT i, x'00', 0, 0, '', '', '' FROM n WHERE i < 0; END",
    "has_text_keys": "INSERT INTO records VALUES (NULL, 'text', 10, 0, x'', 0)",
    "has_short_keys": "INSERT INTO records VALUES (NULL, x'00', 10, 0, x'', 0)",
    "has_negative_sizes": "UPDATE records SET num_bytes = -num_bytes",
    "has_text_sizes": "UPDATE records SET num_bytes = 'many', namespace = 'text'",
    "has_text_for_times": "UPDATE records SET last_used = 'today', namespace = 1000000000000",
    "has_negative_totals": "UPDATE totals SET num_bytes = -1000",
    "has_empty_totals": "UPDATE totals SET num_bytes = 0",
    "has_totals_of_no_records": "UPDATE totals SET num_records = 0",
    "has_too_large_totals": "UPDATE totals SET num_bytes = num_bytes + 60000",
    "has_huge_totals": "UPDATE totals SET num_bytes = 1000000000000000",
    "has_no_totals": "DELETE FROM totals",
    "has_text_for_totals": "UPDATE totals SET num_records = 'some', num_bytes = x'ff'",
    "has_no_numbers_left": "UPDATE sqlite_sequence SET seq = 9223372036854775807",
    "has_text_for_numbers": "UPDATE sqlite_sequence SET seq = 'many'",
    "has_the_last_number": "UPDATE records SET id = 9223372036854775807 "
    "WHERE id = (SELECT max(id) FROM records)",
    "has_the_last_number_of_removals": "UPDATE removals SET id = 9223372036854775807 "
    "WHERE id = (SELECT max(id) FROM removals)",
    "has_a_high_number": "UPDATE records SET id = 4503599627370496 "
    "WHERE id = (SELECT max(id) FROM records)",
}


def executed(statement: str) -> Callable[[Place], None]:
    return lambda place: place.execute(statement)


DAMAGES = {
    damage.__name__: damage
    for damage in (
        is_deleted,
        is_deleted_with_its_journal,
        is_empty,
        is_cut,
        is_noise,
        is_noise_in_the_middle,
        has_a_cut_journal,
        has_a_journal_of_noise,
        is_overwritten_by_an_earlier_copy,
        is_replaced_by_an_earlier_copy,
        is_replaced_by_another_schema,
        is_overwritten_by_another_schema,
        is_a_link,
        is_a_link_to_itself_elsewhere,
        is_a_link_to_nowhere,
        is_a_directory,
        is_a_fifo,
        has_a_link_for_a_journal,
        has_a_directory_for_a_journal,
        has_a_fifo_for_a_journal,
    )
} | {name: executed(statement) for name, statement in STATEMENTS.items()}
HIDDEN = (
    is_empty,
    is_cut,
    is_noise,
    is_noise_in_the_middle,
    is_overwritten_by_another_schema,
)
"""In the middle of a transaction, the store's own pages may hide these from it: it knows all that
is stored, its file does not."""
each_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)


class Traffic:
    """A thread that puts, reads, deletes, discards and touches, and what went wrong with it."""

    def __init__(self, store: FileStore, seed: int = 0) -> None:
        self._store = store
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self.errors: list[Exception] = []
        self.longest = 0.0
        self.num_done = 0
        self.results: Counter[PutResult] = Counter()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            number = self._rng.randrange(NUM_KEYS)
            key = key_of(number)
            action = self._rng.random()
            started = time.monotonic()
            try:
                if action < 0.5:
                    put = self._store.put(key, [value_of(number, MAX_VALUE)])
                    self.results[put.result] += 1
                elif action < 0.8:
                    read_back(self._store, number, MAX_VALUE)
                elif action < 0.85:
                    self._store.delete(key)
                elif action < 0.87:
                    self._store.discard(key, "test")
                elif action < 0.95:
                    self._store.touch([key])
                elif action < 0.97:
                    self._store.probe([key])
                else:
                    self._store.where(key)
                    self._store.stat()
            except Exception as error:  # any is one too many
                self.errors.append(error)
            self.longest = max(self.longest, time.monotonic() - started)
            self.num_done += 1
            self._stop.wait(0.002)

    def do_more(self, count: int) -> None:
        """Wait until it has done so many more actions."""
        goal = self.num_done + count
        wait_until(lambda: self.num_done >= goal or not self._thread.is_alive(), "actions", 60)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture
def place(tmp_path):
    """Of a store that was used, closed, and used again."""
    root = tmp_path / "store"
    made = Place(root)
    made.outside.write_bytes(OUTSIDE)
    with FileStore(root, max_bytes=QUOTA, background=False) as store:
        for number in range(6):
            store.put(key_of(number), [value_of(number, MAX_VALUE)])
    shutil.copy(made.path, made.earlier)
    with FileStore(root, max_bytes=QUOTA, background=False) as store:
        store.delete(key_of(0))
        for number in range(6, 10):
            store.put(key_of(number), [value_of(number, MAX_VALUE)])
        store.discard(key_of(7), "test")
    return made


def open_again(root: Path, **options) -> FileStore:
    """All that happens by the clock is faster."""
    return FileStore(root, settings=FAST, **options)


def settle(store: FileStore, root: Path, *, on_disk: bool = True) -> None:
    """Wait until a store is right again in every respect, without anybody's help."""
    errors: list[Exception] = []

    def is_right() -> bool:
        try:
            assert_right(store, root)
            if on_disk:
                assert_index_agrees(root)
        except (AssertionError, sqlite3.Error, StoreError) as error:
            errors.append(error)
            return False
        return True

    try:
        wait_until(is_right, "the store is right again", interval=0.05)
    except AssertionError as late:
        raise late from errors[-1]


def assert_right(store: FileStore, root: Path) -> None:
    number = NUM_KEYS  # whose value nobody else stores
    store.delete(key_of(number))
    assert store.put(key_of(number), [value_of(number, MAX_VALUE)]).result is PutResult.STORED
    assert read_back(store, number, MAX_VALUE)
    files = {path.name[:64] for path in root.glob("records/*/*")}
    for number in range(NUM_KEYS + 1):
        assert (store.where(key_of(number)) is Where.HERE) == (key_of(number).hex() in files)
    assert store.stat().index_complete
    assert store.stat().num_records == len(files) == len(list(store.catalogue().scan()))
    assert store.stat().used_bytes == disk_bytes(root) <= QUOTA
    store.catalogue().removals(10)
    store.catalogue().namespaces()


def assert_said_once(caplog) -> None:
    said = Counter(
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and "quarantined" not in record.getMessage()
    )
    assert len(said) <= 5, said
    assert all(times <= 1 for times in said.values()), said
    assert all(record.levelno < logging.ERROR for record in caplog.records), caplog.text


@each_damage
def test_a_store_that_serves_goes_on(tmp_path, place, damage, caplog):
    root = tmp_path / "store"
    with open_again(root, max_bytes=QUOTA) as store:
        assert store.wait_indexed(60)
        with Traffic(store) as traffic:
            traffic.do_more(20)
            damage(place)
            traffic.do_more(60)
        assert traffic.errors == []
        assert traffic.longest <= FAST.bounds.lock_seconds + LATE_SECONDS
        settle(store, root, on_disk=damage not in HIDDEN)
    # What it did not need, or notice, the next one sees.
    with open_again(root, max_bytes=QUOTA) as store:
        settle(store, root)
    assert place.outside.read_bytes() == OUTSIDE
    assert_said_once(caplog)


class DamageInTransaction(Counters):
    """Damages an index while a transaction evicts a record from it."""

    def __init__(self, damage: Callable[[], None]) -> None:
        super().__init__()
        self._damage = damage

    def count(self, name: str, amount: int = 1) -> None:
        if name == "store_evicted_records" and not self[name]:
            self._damage()
        super().count(name, amount)


@pytest.mark.parametrize("damage", [*HIDDEN, is_overwritten_by_an_earlier_copy])
def test_damage_that_a_transaction_hides_shows_to_nobody(tmp_path, place, damage, caplog):
    root = tmp_path / "store"
    observer = DamageInTransaction(lambda: damage(place))
    with open_again(root, max_bytes=QUOTA, observer=observer) as store:
        assert store.wait_indexed(60)
        for number in range(10, NUM_KEYS):
            store.put(key_of(number), [value_of(number, MAX_VALUE)])
        assert observer["store_evicted_records"]
        settle(store, root, on_disk=False)
        wait_for_a_full_listing(root)
        # One that writes makes the file anew, for both.
        with open_again(root, max_bytes=QUOTA) as other:
            settle(other, root)
        settle(store, root)
    # Both may have made it anew, and logged so.
    assert all(record.levelno < logging.ERROR for record in caplog.records), caplog.text


def wait_for_a_full_listing(root: Path) -> None:
    """Until one that only reads lists all records: for a moment, the index may be made anew."""

    def lists_all() -> bool:
        with suppress(StoreError), open_again(root, read_only=True) as reader:
            listed = {entry.key.hex() for entry in reader.catalogue().scan()}
            return listed == {path.name[:64] for path in root.glob("records/*/*")}
        return False

    wait_until(lists_all, "all records are listed", interval=0.05)


@each_damage
def test_a_store_that_is_opened_later_is_right(tmp_path, place, damage, caplog):
    root = tmp_path / "store"
    damage(place)
    with open_again(root, max_bytes=QUOTA) as store, Traffic(store) as traffic:
        traffic.do_more(40)
    assert traffic.errors == []
    with open_again(root, max_bytes=QUOTA) as store:
        settle(store, root)
    assert place.outside.read_bytes() == OUTSIDE
    assert_said_once(caplog)


@each_damage
def test_one_that_only_reads_serves_what_is_there(tmp_path, place, damage):
    root = tmp_path / "store"
    files = {path.name[:64] for path in root.glob("records/*/*")}
    damage(place)
    with open_again(root, read_only=True) as store:
        for number in range(NUM_KEYS):
            assert read_back(store, number, MAX_VALUE) == (key_of(number).hex() in files)
        store.stat()
        for ask in (
            lambda: list(store.catalogue().scan()),
            store.catalogue().namespaces,
            lambda: store.catalogue().removals(5),
        ):
            with suppress(StoreError):
                ask()
    assert place.outside.read_bytes() == OUTSIDE


@pytest.mark.parametrize(
    "damage",
    [is_deleted, is_noise, is_a_link, is_empty, DAMAGES["has_no_totals"]],
)
def test_two_processes_that_find_it_damaged_rebuild_it_once_each_at_most(
    tmp_path, place, damage, caplog
):
    root = tmp_path / "store"
    with open_again(root, max_bytes=QUOTA) as store, open_again(root, max_bytes=QUOTA) as other:
        assert store.wait_indexed(60)
        assert other.wait_indexed(60)
        with Traffic(store) as traffic, Traffic(other, 1) as also:
            also.do_more(10)
            damage(place)
            traffic.do_more(40)
            also.do_more(10)
        assert traffic.errors == also.errors == []
        settle(store, root)
        settle(other, root)
        settle(store, root)
    # Once, unless both look before either sets it aside.
    assert caplog.text.count("is rebuilt") <= 2


@pytest.mark.parametrize(
    "num_damages",
    [
        pytest.param(20, marks=pytest.mark.slow),  # each kind three times
        pytest.param(60, marks=pytest.mark.sweep),
    ],
)
def test_processes_damage_and_kills_together_lose_no_byte(tmp_path, place, children, num_damages):
    root = tmp_path / "store"
    rng = random.Random(11)
    breaking = [is_deleted, is_empty, is_noise, is_noise_in_the_middle, is_a_link, is_a_fifo]
    most = 0
    for number in range(num_damages):
        while len(children.alive) < 3:
            children.use(root, rng.random())
        let_run(rng.random() * 0.3)
        with suppress(OSError):  # somebody is just making it anew
            breaking[number % len(breaking)](place)
        for _ in range(5):
            let_run(rng.random() * 0.05)
            most = max(most, min(disk_bytes(root) for _ in range(3)))
        children.kill(rng.choice(children.alive))
    for pid in list(children.alive):
        children.kill(pid)
    # Of each process one value is being written, and one is stored that an index just lost.
    assert most <= QUOTA + 6 * MAX_VALUE
    with open_again(root, max_bytes=QUOTA) as store:
        settle(store, root)
    assert place.outside.read_bytes() == OUTSIDE
    allowed = ("rebuilt from the directory", "kvferry works without it")
    assert [line for line in children.complaints() if not line.endswith(allowed)] == []


@pytest.mark.parametrize("begin", ["BEGIN IMMEDIATE", "BEGIN EXCLUSIVE", "BEGIN"])
def test_a_process_that_stops_with_a_lock_does_not_block_others(
    tmp_path, place, children, begin, caplog
):
    root = tmp_path / "store"
    with open_again(root, max_bytes=QUOTA) as store:
        assert store.wait_indexed(60)
        files = {path.name[:64] for path in root.glob("records/*/*")}
        pid = children.start("stop_with_lock", path=str(place.path), begin=begin)
        wait_until_stopped(pid)
        started = time.monotonic()
        assert store.put(make_key(1), [b"value"]).result is PutResult.FAILED
        assert time.monotonic() - started <= 2 * FAST.bounds.lock_seconds + LATE_SECONDS
        for number in range(NUM_KEYS):
            there = key_of(number).hex() in files
            assert (store.where(key_of(number)) is Where.HERE) == there
            assert read_back(store, number, MAX_VALUE) == there
        started = time.monotonic()
        open_again(root, max_bytes=QUOTA, background=False).close()
        assert time.monotonic() - started <= 3 * FAST.bounds.lock_seconds + LATE_SECONDS
        children.kill(pid)
        settle(store, root)
    assert caplog.text.count("is rebuilt") == 0
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 6


def wait_until_stopped(pid: int) -> None:
    state = Path(f"/proc/{pid}/stat")
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", "it stops")


def test_closing_does_not_wait_for_a_process_that_stopped(tmp_path, place, children):
    store = open_again(tmp_path / "store", max_bytes=QUOTA)
    assert store.wait_indexed(60)
    pid = children.start("stop_with_lock", path=str(place.path), begin="BEGIN EXCLUSIVE")
    wait_until_stopped(pid)
    let_run(0.3)  # the thread of the store meets the lock
    started = time.monotonic()
    store.close()
    assert time.monotonic() - started <= 6 + LATE_SECONDS


def test_opening_another_store_of_a_process_keeps_its_locks(tmp_path):
    """A file that is closed loses all locks its process has on it, whoever asked for them."""
    root = tmp_path / "store"
    ask = (
        "import sqlite3, sys\n"
        f"db = sqlite3.connect('{root}/index.sqlite3', timeout=0)\n"
        "try: db.execute('BEGIN IMMEDIATE')\n"
        "except sqlite3.OperationalError: sys.exit(7)"
    )
    with FileStore(root, background=False) as store:
        with store.index.database.transaction(writes=True):
            FileStore(root, background=False).close()
            assert subprocess.run([sys.executable, "-c", ask], check=False).returncode == 7
        assert subprocess.run([sys.executable, "-c", ask], check=False).returncode == 0


READ_ONLY_SCRIPT = """
import os, sys
from pathlib import Path
from kvferry.store.base import Where
from kvferry.store.file import FileSettings, FileStore
from kvferry.store.file.settings import FileBounds
from kvferry.testing.stores.hooks import wait_until
root = Path(sys.argv[1])
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
settings = FileSettings(bounds=FileBounds(tick_seconds=0.05, rest_factor=1.0))
index = root / "index.sqlite3"
def is_stored(key):
    return store.put(key, [b"value"]).result in ("stored", "exists")
with FileStore(root, max_bytes=100_000, settings=settings) as store:
    assert store.wait_indexed(60)
    assert store.put(bytes(32), [b"first"]).result == "stored"
    for mode in (0o444, 0o000):
        os.chmod(index, mode)
        os.chmod(f"{index}-journal", mode)
        wait_until(lambda: is_stored(bytes([mode % 256]) * 32), "it can be written again")
for mode in (0o444, 0o000):
    os.chmod(index, mode)
    with FileStore(root, max_bytes=100_000, settings=settings) as store:
        wait_until(lambda: is_stored(bytes([mode % 255 + 1]) * 32), "it can be written again")
        wait_until(lambda: store.where(bytes(32)) is Where.HERE, "what is there is known")
"""


def test_an_index_that_may_not_be_written_is_rebuilt():
    """Run as a user whom file modes bind."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o777)
        done = subprocess.run(
            [sys.executable, "-c", READ_ONLY_SCRIPT, f"{parent}/store"],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is rebuilt") <= 4
    assert len(done.stderr.splitlines()) <= 16, done.stderr


def test_a_directory_that_became_read_only_is_said_once(place, tmp_path, monkeypatch, caplog):
    """An index that is broken and cannot be set aside."""

    refused = []

    def refuse(*arguments):
        refused.append(arguments)
        raise OSError(30, "Read-only file system")

    with open_again(tmp_path / "store", max_bytes=QUOTA) as store:
        assert store.wait_indexed(60)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            patch.setattr(os, "rename", refuse)
            is_noise(place)
            wait_until(lambda: len(refused) >= 5, "it is tried again and again")
        assert_said_once(caplog)
        settle(store, tmp_path / "store")


def test_killed_while_it_rebuilds_the_next_process_rebuilds(tmp_path, place, children):
    root = tmp_path / "store"
    for calls_left in range(1, 16):
        with suppress(FileNotFoundError):  # killed between setting it aside and making it anew
            is_noise(place)
        pid = children.start(
            "follow_script",
            root=str(root),
            calls_left=calls_left,
            recover_first=True,
            max_bytes=QUOTA,
        )
        children.wait(pid)
        assert disk_bytes(root) <= QUOTA + MAX_VALUE
    with open_again(root, max_bytes=QUOTA) as store:
        settle(store, root)


def test_nothing_is_stored_below_a_quota_before_all_is_counted(bench):
    store = bench.open(max_bytes=10_000)
    for number in range(2):
        store.put(make_key(number), [make_value(4000)])
    (bench.root / "index.sqlite3").unlink()
    assert store.put(make_key(5), [make_value(4000)]).result is PutResult.FAILED
    fresh = bench.open(max_bytes=10_000)
    assert fresh.put(make_key(5), [make_value(4000)]).result is PutResult.FAILED
    assert store.put(make_key(5), [make_value(4000)]).result is PutResult.FAILED
    fresh.maintain()
    assert fresh.put(make_key(5), [make_value(4000)]).result is PutResult.STORED
    assert disk_bytes(bench.root) <= 10_000
    bench.clock.advance(100)
    store.maintain()
    assert store.put(make_key(6), [make_value(4000)]).result is PutResult.STORED
    assert disk_bytes(bench.root) <= 10_000
    store.maintain()
    assert_index_agrees(bench.root)


def test_a_store_without_a_quota_stores_while_the_index_is_made(bench):
    bench.open().put(make_key(1), [b"value"])
    (bench.root / "index.sqlite3").unlink()
    store = bench.open()
    assert store.put(make_key(2), [b"value"]).result is PutResult.STORED
    store.maintain()
    assert store.stat().num_records == 2


def test_what_could_not_be_compared_is_compared_later(bench, monkeypatch):
    """Another process held the lock meanwhile."""
    bench.open().put(make_key(1), [b"value"])
    (bench.root / "index.sqlite3").unlink()
    store = bench.open(max_bytes=10_000)

    def locked(*arguments, **named):
        raise IndexUnavailable(11, "locked")

    database, index = store.index.database, store.index
    for place, method in (
        (database, "transaction"),  # its first look
        (index, "keys"), (index, "complete"),
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(place, method, locked)
            for _ in range(100):
                store.upkeep.step(rests=False)
        assert not store.index.totals.is_complete
    for _ in range(100):
        store.upkeep.step(rests=False)
    assert store.index.totals.is_complete
    assert store.stat().num_records == 1
    assert store.where(make_key(1)) is Where.HERE


@pytest.mark.parametrize("where", ["records/00", "records/1f", "quarantine"])
def test_what_stands_in_place_of_a_directory_holds_up_nothing(bench, where):
    bench.open().put(make_key(1), [b"value"])
    (bench.root / "index.sqlite3").unlink()
    shutil.rmtree(bench.root / where, ignore_errors=True)
    (bench.root / where).symlink_to("..")
    store = bench.open(max_bytes=10_000)
    store.maintain()
    assert store.stat().index_complete
    assert store.put(make_key(2), [b"value"]).result is PutResult.STORED


def test_what_could_not_be_followed_is_followed_later(bench, monkeypatch):
    store, other = bench.open(), bench.open()
    store.maintain()
    other.put(make_key(1), [b"value"])

    def locked(*arguments):
        raise IndexUnavailable(11, "locked")

    with monkeypatch.context() as patch:
        patch.setattr(store.index, "follow", locked)
        store.upkeep.step()
    store.upkeep.step()
    assert store.where(make_key(1)) is Where.HERE


FEW_REMOVALS = FileBounds(max_removals=20)


def test_the_history_of_removals_is_bounded(bench):
    store = bench.open(bounds=FEW_REMOVALS)
    for number in range(50):
        store.put(make_key(number), [b"value"])
        store.delete(make_key(number))
    removals = store.catalogue().removals(1000)
    assert [removal.key for removal in removals] == [make_key(n) for n in range(49, 29, -1)]
    assert len(store.catalogue().removals(3)) == 3


@pytest.mark.parametrize("how", ["evicted", "deleted"])
def test_what_was_removed_during_a_comparison_did_not_vanish(bench, how):
    store = bench.open()
    store.put(make_key(1), [b"value"])
    store.maintain()
    other = bench.open()
    [listed] = [each.key for each in other.catalogue().scan()]
    if how == "evicted":
        store.catalogue().gc(max_bytes=0)
    else:
        store.delete(make_key(1))
    other.index.forget([listed], "vanished")
    assert [each.reason for each in store.catalogue().removals(9)] == [how]


@pytest.mark.parametrize("num_gone", [19, 20, 21, 45])
def test_a_follower_is_right_when_more_went_than_is_kept(bench, num_gone):
    store, other = bench.open(bounds=FEW_REMOVALS), bench.open(bounds=FEW_REMOVALS)
    keys = [make_key(number) for number in range(50)]
    for key in keys:
        other.put(key, [b"value"])
    store.maintain()
    assert all(store.where(key) is Where.HERE for key in keys)
    for key in keys[:num_gone]:
        other.delete(key)
    other.put(make_key(77), [b"value"])
    store.maintain()
    assert [store.where(key) is Where.HERE for key in keys] == [False] * num_gone + [True] * (
        50 - num_gone
    )
    assert store.where(make_key(77)) is Where.HERE


def test_what_went_and_came_again_is_followed_in_parts(bench):
    """More of each than is learnt at once, and what went comes first."""
    store, other = bench.open(), bench.open()
    keys = [make_key(number) for number in range(3000)]
    for key in keys:
        other.put(key, [b"value"])
    store.maintain()
    assert all(store.where(key) is Where.HERE for key in keys)
    for key in keys[:2500]:
        other.delete(key)
    for key in keys[:100]:
        other.put(key, [b"value"])
    while store.index.follow():
        pass
    assert [store.where(key) is Where.HERE for key in keys] == [True] * 100 + [False] * 2400 + [
        True
    ] * 500


def test_namespaces_count_what_has_none_together(bench):
    store = bench.open()
    store.put(make_key(1), [b"no record"])
    bench.path(make_key(1)).with_name(f"{make_key(2).hex()}.safetensors").write_bytes(b"by hand")
    store.maintain()
    store.put(make_key(3), [])
    assert (
        sum(count for count, _ in store.catalogue().namespaces().values())
        == store.stat().num_records
    )


def test_values_are_right_with_no_index_at_all(bench):
    store = bench.open()
    store.put(make_key(), [b"value"])
    store.index.close()
    assert read_value(store, make_key()) == b"value"
    assert store.where(make_key()) is Where.HERE
    assert store.delete(make_key())
    with pytest.raises(StoreError):
        store.catalogue().removals(1)
    with pytest.raises(StoreError):
        list(store.catalogue().scan())
    store.maintain()
    assert store.stat().num_records == 0
