"""Several writers of one value: hidden until committed, nothing left when not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.store.base import PutResult, Store, SupportsShardedWrite
from kvferry.testing.stores.hooks import StoreHooks, make_key, make_value, read_value, same_bytes

SIZE = 40_961
HEAD = 4096

BAD_SESSIONS = (
    "",
    ".",
    "..",
    "../evil",
    "../../evil",
    "a/../../evil",
    "/tmp/evil",
    "evil\0",
    "evil\n",
    "x" * 5000,
    "\N{GREEK SMALL LETTER ALPHA}",
    "0" * 64,
)


def _able(store: Store) -> SupportsShardedWrite:
    assert isinstance(store, SupportsShardedWrite)
    return store


def _begin(store: Store, number: int = 0, num_bytes: int = SIZE) -> str:
    session = _able(store).begin(make_key(number), num_bytes)
    assert not isinstance(session, PutResult), f"begin refused: {session}"
    return session


def _tree(root: Path) -> set[Path]:
    return set(root.rglob("*"))


class ShardedWriteTests(StoreHooks):
    """For stores with `SupportsShardedWrite`. A second instance stands for another process."""

    def test_ranges_of_two_instances_make_one_value(self, tmp_path: Path) -> None:
        value = make_value(SIZE)
        with self.make_store(tmp_path) as store, self.make_store(tmp_path) as other:
            session = _begin(store)
            assert _able(store).write_at(session, HEAD, [value[HEAD:9000], value[9000:20_000]])
            assert _able(other).write_at(session, 20_000, [value[20_000:]])
            assert _able(store).commit(session, value[:HEAD]) is PutResult.STORED
            assert store.contains(make_key())
            for instance in (store, other):
                assert same_bytes(read_value(instance, make_key()), value)
            assert same_bytes(self.peek(store, make_key()), value)

    def test_nothing_is_visible_before_commit(self, tmp_path: Path) -> None:
        value = make_value(SIZE)
        with self.make_store(tmp_path) as store, self.make_store(tmp_path) as other:
            session = _begin(store)
            assert _able(store).write_at(session, HEAD, [value[HEAD:]])
            for instance in (store, other):
                assert not instance.contains(make_key())
                assert instance.open_read(make_key()) is None
                assert self.peek(instance, make_key()) is None
            _able(store).abort(session)

    def test_an_aborted_session_leaves_nothing(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, max_bytes=2 * self.charge(SIZE)) as store:
            for _ in range(5):  # without the space given back, the third would be refused
                session = _begin(store)
                assert _able(store).write_at(session, HEAD, [make_value(100)])
                _able(store).abort(session)
                assert store.open_read(make_key()) is None
            assert store.stat().used_bytes <= 2 * self.charge(SIZE)
            assert store.stat().num_records == 0

    def test_a_session_ends_once(self, tmp_path: Path) -> None:
        value = make_value(SIZE)
        with self.make_store(tmp_path) as store:
            session = _begin(store)
            assert _able(store).write_at(session, HEAD, [value[HEAD:]])
            assert _able(store).commit(session, value[:HEAD]) is PutResult.STORED
            assert _able(store).commit(session, b"?" * HEAD) is PutResult.FAILED
            _able(store).abort(session)
            assert not _able(store).write_at(session, HEAD, [b"?" * 100])
            assert same_bytes(read_value(store, make_key()), value)

    def test_after_abort_there_is_nothing_to_commit(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            session = _begin(store)
            _able(store).abort(session)
            _able(store).abort(session)
            assert not _able(store).write_at(session, HEAD, [b"?"])
            assert _able(store).commit(session, b"?" * HEAD) is PutResult.FAILED
            assert store.open_read(make_key()) is None

    def test_ranges_outside_the_value_are_refused(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store, self.make_store(tmp_path) as other:
            session = _begin(store)
            for instance in (store, other):
                assert not _able(instance).write_at(session, SIZE, [b"?"])
                assert not _able(instance).write_at(session, SIZE - 1, [b"??"])
                assert not _able(instance).write_at(session, -1, [b"?"])
                assert not _able(instance).write_at(session, 2**62, [b"?"])
            _able(store).abort(session)

    @pytest.mark.parametrize("name", BAD_SESSIONS, ids=range(len(BAD_SESSIONS)))
    def test_a_made_up_session_reaches_nothing(self, tmp_path: Path, name: str) -> None:
        root = tmp_path / "a" / "root"
        root.mkdir(parents=True)
        bystander = tmp_path / "evil"
        bystander.write_bytes(b"not yours" * 1000)
        with self.make_store(root) as store:
            store.put(make_key(), [b"value"])
            before = _tree(tmp_path)
            assert not _able(store).write_at(name, 0, [b"?"])
            assert _able(store).commit(name, b"?") is PutResult.FAILED
            _able(store).abort(name)
            assert _tree(tmp_path) == before
            assert read_value(store, make_key()) == b"value"
        assert bystander.read_bytes() == b"not yours" * 1000

    def test_an_existing_key_is_not_begun(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            store.put(make_key(), [b"first"])
            assert _able(store).begin(make_key(), SIZE) is PutResult.EXISTS

    def test_a_session_that_loses_the_race_finds_the_winner(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path) as store:
            session = _begin(store)
            assert store.put(make_key(), [b"first"]) is PutResult.STORED
            assert _able(store).write_at(session, HEAD, [make_value(SIZE - HEAD)])
            assert _able(store).commit(session, b"?" * HEAD) is PutResult.EXISTS
            assert read_value(store, make_key()) == b"first"
            assert store.stat().num_records == 1
            if self.exact_accounting:
                assert store.stat().used_bytes == self.charge(5)

    def test_space_is_reserved_at_begin(self, tmp_path: Path) -> None:
        quota = 2 * self.charge(SIZE)
        with self.make_store(tmp_path, max_bytes=quota) as store:
            assert _able(store).begin(make_key(9), quota + 1) is PutResult.NO_SPACE
            sessions = [_begin(store, number) for number in range(2)]
            # All room is promised to hidden values, which cannot be evicted.
            assert _able(store).begin(make_key(2), SIZE) is PutResult.NO_SPACE
            assert store.put(make_key(3), [make_value(SIZE)]) is PutResult.NO_SPACE
            for number, session in enumerate(sessions):
                assert _able(store).write_at(session, 0, [make_value(SIZE, number)])
                head = make_value(SIZE, number)[:HEAD]
                assert _able(store).commit(session, head) is PutResult.STORED
                assert same_bytes(read_value(store, make_key(number)), make_value(SIZE, number))
            assert store.stat().used_bytes <= quota

    def test_begin_makes_room(self, tmp_path: Path) -> None:
        with self.make_store(tmp_path, max_bytes=2 * self.charge(SIZE)) as store:
            for number in range(2):
                store.put(make_key(number), [make_value(SIZE)])
                self.settle(store)
            session = _begin(store, 2)
            assert self.peek(store, make_key(0)) is None
            _able(store).abort(session)
