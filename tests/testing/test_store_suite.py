"""The conformance suite finds what it is there to find: each broken store fails its test."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvferry.errors import FaultKind, StoreError
from kvferry.store.base import (
    EXISTS,
    STORED,
    PutResult,
    Where,
)
from kvferry.store.catalogue import Entry
from kvferry.store.memory import MemoryCatalogue, MemoryStore, _Value, copy_ranges
from kvferry.testing.stores import ScanTests, StoreTests, make_key, store_machine
from tests.store.memory_hooks import MemoryHooks


class Overwriting(MemoryStore):
    def put(self, key, buffers, *deadline):
        self.delete(key)
        return super().put(key, buffers, *deadline)


class Lossy(MemoryStore):
    """Keeps what one write call takes."""

    def put(self, key, buffers, *deadline):
        return super().put(key, buffers[:1024])


class ShortOfPages(MemoryStore):
    def put(self, key, buffers, *deadline):
        content = b"".join(buffers)
        return super().put(key, [content[: max(1, len(content) // 4096 * 4096)]])


class Borrowing(MemoryStore):
    """Keeps the caller's buffer."""

    def read(self, key, *args):
        value = self._values.get(key)
        return None if value is None else copy_ranges(value.content, args[0])

    def put(self, key, buffers, *deadline):
        result = super().put(key, buffers, *deadline)
        if result.result is PutResult.STORED and len(buffers) == 1:
            self._values[key] = _Value(buffers[0], 0.0)
        return result


class Piecewise(MemoryStore):
    """Shows a value while it is being written."""

    def put(self, key, buffers, *deadline):
        for end in range(1, len(buffers) + 1):
            self.delete(key)
            result = super().put(key, buffers[:end])
            threading.Event().wait(0.01)
        return result


class Unbounded(MemoryStore):
    def _make_room(self, num_bytes):
        return []


class FirstInFirstOut(MemoryStore):
    def touch(self, keys):
        pass


class TouchingFromTheRoot(MemoryStore):
    def touch(self, keys):
        super().touch(reversed(list(keys)))


class RecentByReading(MemoryStore):
    def read(self, key, *args):
        self.touch([key])
        return super().read(key, *args)


class EvictingForNothing(MemoryStore):
    def put(self, key, buffers, *deadline):
        with self._lock:
            self._make_room(min(sum(map(len, buffers)), self._max_bytes or 0))
        return super().put(key, buffers, *deadline)


class Leaking(MemoryStore):
    """Loses the room of what is deleted."""

    def delete(self, key):
        return self._values.pop(key, None) is not None


class Trusting(MemoryStore):
    """Serves what failed verification."""

    def discard(self, key, reason):
        self._observer.count("store_quarantined")


class CountingTwice(MemoryStore):
    def discard(self, key, reason):
        super().discard(key, reason)
        self._observer.count("store_quarantined")


class RemovedByEverybody(MemoryStore):
    def delete(self, key):
        was_there = key in self._values
        threading.Event().wait(0.01)
        super().delete(key)
        return was_there


class StoredByEverybody(MemoryStore):
    def put(self, key, buffers, *deadline):
        is_free = key not in self._values
        threading.Event().wait(0.01)
        super().put(key, buffers, *deadline)
        return STORED if is_free else EXISTS


class Immortal(MemoryStore):
    def close(self):
        pass


class Raising(MemoryStore):
    def put(self, key, buffers, *deadline):
        if self._closed:
            raise StoreError(FaultKind.CLOSED, "closed")
        return super().put(key, buffers, *deadline)


class LeavingThreads(MemoryStore):
    """Starts a thread that nobody ends."""

    stop = threading.Event()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        threading.Thread(target=self.stop.wait, daemon=True).start()


class Stubborn(MemoryStore):
    """Its index never forgets."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = set()

    def where(self, key):
        return Where.HERE if key in self.seen else Where.ABSENT

    def put(self, key, buffers, *deadline):
        self.seen.add(key)
        return super().put(key, buffers, *deadline)


class MissingIsAnError(MemoryStore):
    def read(self, key, *args):
        size = super().read(key, *args)
        if size is None:
            raise StoreError(FaultKind.REFUSED, "absent")
        return size


class OverlappingKeys(MemoryStore):
    def read(self, key, *args):
        return super().read(next((k for k in self._values if k[:31] == key[:31]), key), *args)


class ScanningDiscarded(MemoryStore):
    def catalogues(self):
        return [_WithOneMore(self)]


class _WithOneMore(MemoryCatalogue):
    def scan(self):
        return iter([*super().scan(), Entry(make_key(0), 5, 0.0)])


class Suite(MemoryHooks, ScanTests, StoreTests):
    patience_seconds = 0.2

    def __init__(self, store_type):
        self.store_type = store_type

    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        return self.store_type(tmp_path.name, max_bytes, observer)


def run_test(suite, name, tmp_path, *arguments):
    """Run a test of the suite as pytest would."""
    test = getattr(suite, f"test_{name}")
    if "store" not in inspect.signature(test).parameters:
        test(tmp_path, *arguments)
        return
    with suite.make_store(tmp_path) as store:
        test(store, *arguments)


@pytest.mark.parametrize(
    ("store_type", "name"),
    [
        (Overwriting, "the_first_writer_wins_and_its_value_stands"),
        (Lossy, "buffers_are_joined_whatever_they_are"),
        (Borrowing, "a_buffer_may_be_reused_after_put"),
        (Piecewise, "readers_see_a_value_whole_or_not_at_all"),
        (Unbounded, "the_quota_is_never_exceeded"),
        (Unbounded, "the_least_recently_put_goes_first"),
        (Unbounded, "the_quota_holds_under_racing_writers"),
        (FirstInFirstOut, "a_touched_value_outlives_an_untouched_one"),
        (TouchingFromTheRoot, "of_one_touched_chain_the_root_outlives_the_end"),
        (RecentByReading, "reading_does_not_make_recent"),
        (EvictingForNothing, "a_value_that_can_never_fit_evicts_nothing"),
        (EvictingForNothing, "an_existing_key_evicts_nothing"),
        (Leaking, "deleting_gives_the_space_back"),
        (Leaking, "stat_counts_what_is_held"),
        (Trusting, "a_discarded_value_is_not_served_and_can_be_put_again"),
        (CountingTwice, "racing_discards_are_one"),
        (RemovedByEverybody, "one_of_racing_deletes_deletes"),
        (StoredByEverybody, "one_of_racing_writers_stores_and_the_others_find_it"),
        (Immortal, "a_closed_store_answers_every_call"),
        (Raising, "a_closed_store_answers_every_call"),
        (MissingIsAnError, "an_absent_key_is_none_and_false"),
        (LeavingThreads, "close_is_idempotent_and_leaves_no_thread"),
        (Stubborn, "what_vanishes_behind_the_index_is_none_and_forgotten"),
        (OverlappingKeys, "values_under_similar_keys_do_not_mix"),
        (ScanningDiscarded, "scan_leaves_out_what_was_deleted_or_discarded"),
    ],
)
def test_a_broken_store_fails(store_type, name, tmp_path):
    suite = Suite(store_type)
    LeavingThreads.stop.clear()
    try:
        with pytest.raises((AssertionError, StoreError)):
            run_test(suite, name, tmp_path)
    finally:
        LeavingThreads.stop.set()


def test_a_store_that_cuts_values_fails_for_some_size(tmp_path):
    suite = Suite(ShortOfPages)
    run_test(suite, "a_value_comes_back_as_it_was_put", tmp_path / "even", 4096)
    with pytest.raises(AssertionError):
        run_test(suite, "a_value_comes_back_as_it_was_put", tmp_path / "odd", 4097)


def test_an_ability_without_its_tests_fails(tmp_path):
    class WithoutScanTests(StoreTests):
        make_store, poke, peek = Suite.make_store, Suite.poke, Suite.peek
        store_type = MemoryStore

    with pytest.raises(AssertionError, match="ScanTests"):
        run_test(WithoutScanTests(), "every_ability_is_tested", tmp_path)


@pytest.mark.parametrize(
    "store_type", [Overwriting, Unbounded, Leaking, Trusting, Stubborn, EvictingForNothing]
)
def test_the_machine_finds_a_broken_store(store_type):
    machine = store_machine(Suite(store_type))
    few = settings(max_examples=200, deadline=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(machine, settings=few)


def run_python(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode != 0
    return ran.stdout + ran.stderr


FORGETFUL = """
from kvferry.store.memory import MemoryCatalogue, MemoryStore
from kvferry.testing.stores import ScanTests, StoreTests

class Forgetful(MemoryStore):
    def read(self, key, ranges, *deadline):
        return None

class TestForgetful(ScanTests, StoreTests):
    def make_store(self, tmp_path, *, max_bytes=None, observer=None):
        return Forgetful("x", max_bytes=max_bytes)
    def poke(self, store, key, value): ...
    def peek(self, store, key): ...
"""


def test_a_failure_shows_the_values_without_a_word_in_the_authors_project(tmp_path):
    (tmp_path / "test_forgetful.py").write_text(FORGETFUL)
    said = run_python(
        tmp_path, "-m", "pytest", "-q", "-n", "0", "-k", "put", f"--rootdir={tmp_path}"
    )
    assert "assert None == b" in said


@pytest.mark.parametrize("package", ["pytest", "hypothesis"])
def test_a_package_that_the_suite_needs_is_named_with_the_extra(tmp_path, package):
    code = f"import sys; sys.modules[{package!r}] = None; import kvferry.testing.stores"
    last = run_python(tmp_path, "-c", code).splitlines()[-1]
    assert last.startswith("ImportError: the suite of stores needs pytest and hypothesis: run pip")
    assert "[conformance]" in last
