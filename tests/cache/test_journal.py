"""The journal: a file that `kvferry simulate` reads, and that never stands in the way."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvferry.errors import ConfigError
from kvferry.journal import (
    KEY_BYTES,
    MAX_WAITING,
    Journal,
    JournalAnswer,
    JournalLine,
    journal_lines,
    read_journal,
)
from kvferry.simulate.trace import read_trace
from kvferry.testing.stores import make_key
from kvferry.types import ChunkKey
from tests.cache.keeping import NUM_CHUNKS, PROMPT
from tests.store.errors import error

__all__ = ["error"]

A, B = make_key(1), make_key(2)


def lines_of(path: Path) -> list[JournalLine]:
    decoder = msgspec.json.Decoder(JournalLine)
    return [decoder.decode(line) for line in path.read_bytes().splitlines()]


def add(
    journal: Journal, num_tokens: int, keys: list[ChunkKey], answer: JournalAnswer | None = None
) -> None:
    journal.add(12.3456, "id", num_tokens, keys, answer)


def test_each_request_is_one_line_without_its_tokens(tmp_path):
    journal = Journal(tmp_path / "r.jsonl", 8)
    add(journal, 20, [A, B], JournalAnswer(4, {"file": 8}, {"absent": 7, "partial": 1}, ""))
    add(journal, 3, [])
    journal.close()
    journal.close()
    first, second = lines_of(tmp_path / "r.jsonl")
    keys = [A[:KEY_BYTES].hex(), B[:KEY_BYTES].hex()]
    misses = {"absent": 7, "partial": 1}
    assert first == JournalLine(12.346, 8, 20, keys, "id", 4, {"file": 8}, misses)
    assert second == JournalLine(12.346, 8, 3, [], "id")


def test_an_error_that_nobody_foresaw_ends_the_journal_alone(tmp_path, monkeypatch, caplog, error):
    def fail(_self: Journal) -> None:
        raise error

    monkeypatch.setattr(Journal, "_write", fail)
    journal = Journal(tmp_path / "r.jsonl", 8)
    add(journal, 20, [A, B])
    journal.close()
    add(journal, 20, [A, B])
    assert journal.num_left_out == 2
    (line,) = caplog.messages
    assert line.startswith("requests are no longer recorded in ")
    assert "\n" not in line


@pytest.mark.parametrize("what", ["request", "why", "tier"])
def test_text_that_is_no_text_costs_no_line(tmp_path, caplog, what):
    """Half of a surrogate pair: as in the name of a file that is not UTF-8."""
    journal = Journal(tmp_path / "r.jsonl", 8)
    texts = {"request": "id", "why": "", "tier": "file"} | {what: "a \ud800 b"}
    hits = {texts["tier"]: 8}
    add(journal, 3, [])
    journal.add(1.0, texts["request"], 20, [A], JournalAnswer(4, hits, {}, texts["why"]))
    add(journal, 3, [])
    journal.close()
    first, second, third = lines_of(tmp_path / "r.jsonl")
    assert first == third
    assert (second.num_tokens, second.keys) == (20, [A[:KEY_BYTES].hex()])
    assert "a ? b" in (second.request, second.why, *second.hits)
    assert (journal.num_left_out, caplog.messages) == (0, [])


def test_a_line_that_cannot_be_made_is_counted_and_costs_no_other(tmp_path, caplog):
    journal = Journal(tmp_path / "r.jsonl", 8)
    add(journal, 3, [])
    for _ in range(2):
        add(journal, 20, [A], JournalAnswer(4, {"file": object()}, {}, ""))
    add(journal, 3, [])
    journal.close()
    assert len(lines_of(tmp_path / "r.jsonl")) == 2
    assert journal.num_left_out == 2
    first, last = caplog.messages
    assert first.startswith("a request is missing from ")
    assert last.startswith("2 requests are missing from ")


def test_a_connector_records_its_requests_once_each(make_host, tmp_path):
    path = tmp_path / "r.jsonl"
    host = make_host(record=str(path))
    host.run("first", PROMPT)
    host.settle()
    host.run("second", PROMPT)
    host.run("third", [7, 7, 7])
    host.scheduler.close()
    trace = read_trace(path)
    assert trace.num_tokens.tolist() == [41, 41, 3]
    assert trace.blocks.tolist() == 2 * trace.blocks.tolist()[:NUM_CHUNKS]
    assert trace.block_tokens == 8


def test_a_line_has_the_speed_at_which_the_engine_computes(make_host, tmp_path):
    path = tmp_path / "r.jsonl"
    host = make_host(record=str(path))
    host.run("first", PROMPT)
    host.scheduler.policy.saw_compute(10_000, 4.0)
    speed = host.scheduler.policy.compute_rate
    assert 0 < speed < float("inf")
    host.run("second", PROMPT)
    host.scheduler.close()
    assert lines_of(path)[1].compute_rate == pytest.approx(host.scheduler.policy.compute_rate, 0.1)


FILE_EVENTS = (
    "open", "os.open", "os.rename", "os.remove", "os.link", "os.symlink", "os.mkdir", "os.truncate",
    "os.utime", "os.chmod", "os.listdir", "os.scandir", "fcntl.flock", "fcntl.lockf",
    "sqlite3.connect",
)  # fmt: skip
"""Of Python's audit: each is raised before a file is opened or changed."""

CALLS = (
    "write", "writev", "pwrite", "pwritev", "read", "readinto", "pread", "preadv", "fsync", "flush",
    "stat",
)  # fmt: skip
"""Of what is open already, for which there is no audit."""

WATCHED: dict[int, list[str]] = {}
"""Files by the thread that opened or changed them, while a test watches it."""


def note_file(event: str, arguments: tuple[object, ...]) -> None:
    if event in FILE_EVENTS and (files := WATCHED.get(threading.get_ident())) is not None:
        files.append(f"{event}{arguments}")


@contextmanager
def watched() -> Iterator[list[str]]:
    """What this thread does to files, seen by an audit hook and a profile function."""
    files: list[str] = []

    def note_call(_frame: object, event: str, called: object) -> None:
        if event == "c_call" and getattr(called, "__name__", "") in CALLS:
            files.append(repr(called))

    WATCHED[threading.get_ident()] = files
    sys.setprofile(note_call)
    try:
        yield files
    finally:
        sys.setprofile(None)
        del WATCHED[threading.get_ident()]


def test_the_scheduler_thread_does_nothing_to_files(make_host, tmp_path):
    """While it admits, saves, loads, preempts and ends requests, with the journal on."""
    path = tmp_path / "r.jsonl"
    host = make_host(record=str(path), store=(tmp_path / "store").as_uri())
    sys.addaudithook(note_file)  # stays, as all do, and notes nothing when nobody watches
    host.run("first", PROMPT)
    host.settle()
    with watched() as files:
        # The workers of this host run in this thread, too.
        host.run("second", PROMPT)
        host.run("third", [7, 7, 7])
        preempted = host.admitted("fourth", PROMPT)
        host.prefill(preempted)
        host.preempt(preempted)
        host.admit(preempted)
        host.finish(preempted)
        host.finish(host.add("gone", PROMPT))
        host.settle()
    assert files == []
    with watched() as files:  # else the above says nothing
        (tmp_path / "other").write_bytes(b"x")
    assert [each for each in files if each.startswith("open")]
    assert [each for each in files if "write" in each and not each.startswith("open")]
    host.scheduler.close()
    assert len(lines_of(path)) == 5


def test_a_request_has_its_answer_and_the_numbers_behind_it(make_host, tmp_path):
    path = tmp_path / "r.jsonl"
    host = make_host(record=str(path))
    host.run("writer", PROMPT)
    host.settle()
    preempted = host.admitted("hits", PROMPT)
    host.prefill(preempted)
    host.preempt(preempted)
    host.admit(preempted)  # counted again, and one line
    host.finish(preempted)
    host.forget_memory()
    policy = host.scheduler.policy
    policy.saw_compute(10_000, 0.001)
    policy.saw_slow_load("memory", 8, 1000.0)
    computes = host.admitted("computes", PROMPT)
    host.finish(computes)
    gone = host.add("gone", PROMPT)
    host.finish(gone)
    host.scheduler.close()
    writer, hits, computes, gone = lines_of(path)
    assert (writer.request, writer.hits) == ("writer", {})
    assert writer.misses == {"absent": 40, "partial": 1}
    assert (hits.request, hits.hits) == ("hits", {"memory": 40})
    assert hits.misses == {"partial": 1}
    assert computes.misses == {"slower": 40, "partial": 1}
    assert computes.why == "expected 10000.000 s to load, 0.000 s to compute"
    assert (gone.request, gone.hits, gone.misses) == ("gone", {}, {})
    assert all(line.keys == writer.keys for line in (hits, computes, gone))
    assert writer.time <= hits.time <= computes.time <= gone.time


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a full device")
def test_a_full_disk_costs_the_recording_and_one_line(make_host, caplog):
    host = make_host(record="/dev/full")
    host.run("first", PROMPT)
    host.settle()
    with caplog.at_level(logging.WARNING):
        host.scheduler.close()
    assert [record.message for record in caplog.records if "recorded" in record.message] == [
        "requests are no longer recorded in /dev/full: No space left on device"
    ]
    assert host.run("second", PROMPT).num_external_tokens == 40
    host.scheduler.close()


def test_a_disk_that_takes_half_a_line_leaves_whole_lines(tmp_path):
    # In another process: the limit holds for every file that a process writes.
    code = (
        "import resource, sys; from pathlib import Path;"
        "from kvferry.journal import Journal;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100));"
        "journal = Journal(Path(sys.argv[1]), 8);"
        "journal.add(1.0, '', 8, [b'a' * 32], None); journal.add(1.0, '', 8, [b'b' * 32], None);"
        "journal.close()"
    )
    path = tmp_path / "r.jsonl"
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "requests are no longer recorded in" in done.stderr
    assert [line.keys for line in lines_of(path)] == [[b"a".hex() * KEY_BYTES]]
    journal = Journal(path, 8)
    add(journal, 8, [B])
    journal.close()
    assert read_trace(path).num_requests == 2


def test_requests_that_find_the_queue_full_are_left_out(tmp_path, caplog):
    journal = Journal(tmp_path / "r.jsonl", 8)
    added = 0
    while journal.num_left_out == 0:
        add(journal, 8, [A])
        added += 1
    assert added > MAX_WAITING
    with caplog.at_level(logging.WARNING):
        journal.close()
    assert len(lines_of(tmp_path / "r.jsonl")) == added - 1
    assert "1 requests are missing" in caplog.text


def test_a_file_that_cannot_be_opened_is_refused_at_start(make_host, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot record requests in .*No such file"):
        make_host(record=str(tmp_path / "missing" / "r.jsonl"))


def whole(name: str) -> bytes:
    line = JournalLine(time=1.0, chunk_tokens=8, num_tokens=9, keys=["5f0c"], request=name)
    return msgspec.json.encode(line) + b"\n"


DAMAGE = {
    "torn": whole("lost")[:-9],
    **{
        f"torn at {end}, and a run of an earlier release appended": whole("lost")[:end] + whole("")
        for end in range(1, len(whole("lost")))
    },
    "torn within a letter": whole("\u00e9")[: whole("\u00e9").index(b"\xc3") + 1],
    "zeros": bytes(8192),
    "zeros within a line": whole("lost")[:20] + bytes(4096) + whole("lost")[50:],
    "empty lines": b"\n\n",
    "not of UTF-8": b"\xff\xfe\x80",
    "deeply nested": b"[" * 100_000,
}


def names_of(path: Path) -> list[str]:
    """The requests that `explain`, `status`, `doctor` and `report` read; `simulate` agrees."""
    names = [line.request for line in read_journal(path, None, 10)]
    assert names == [line.request for _, line in journal_lines(path)]
    assert read_trace(path).num_requests == len(names)
    return names


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("before", [b"", whole("a")], ids=["first", "later"])
def test_a_damaged_line_costs_one_line(tmp_path, damage, before):
    path = tmp_path / "r.jsonl"
    end = b"" if damage.endswith(b"\n") else b"\n"
    path.write_bytes(before + damage + end + whole("b") + whole("c")[:-9])
    assert names_of(path) == [*(["a"] if before else []), "b"]


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_new_run_ends_the_line_that_was_cut_short(tmp_path, damage):
    path = tmp_path / "r.jsonl"
    path.write_bytes(whole("a") + damage)
    journal = Journal(path, 8)
    add(journal, 8, [B])
    add(journal, 8, [B])
    journal.close()
    assert names_of(path) == ["a", "id", "id"]


def test_a_file_of_another_form_is_no_damage(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_bytes(whole("a") + b'{"time":1}\n' + whole("b"))
    with pytest.raises(ConfigError, match=r"line 2: .*missing required field"):
        read_journal(path, None, 10)


def test_a_full_file_is_renamed_by_the_first_engine_that_sees_it(tmp_path, monkeypatch):
    path, older = tmp_path / "r.jsonl", tmp_path / "r.jsonl.1"
    older.write_bytes(whole("older"))
    path.write_bytes(whole("old"))
    monkeypatch.setattr("kvferry.journal.MAX_BYTES", len(whole("old")))
    engines = [Journal(path, 8) for _ in range(2)]
    add(engines[0], 8, [A])
    engines[0].close()
    assert (names_of(older), names_of(path)) == (["old"], ["id"])
    monkeypatch.undo()
    add(engines[1], 8, [B])
    engines[1].close()
    assert (names_of(older), names_of(path)) == (["old"], ["id", "id"])
