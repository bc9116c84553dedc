"""ls, show, stat, verify and gc on a store with known records."""

from __future__ import annotations

import json
import os
import time

import pytest

from tests.cli.conftest import CHUNK_TOKENS


def test_show_describes_a_record_found_by_its_first_digits(make_store, run):
    made = make_store(num_records=3)
    ran = run("ls", made.url, made.keys[1].hex()[:10].upper(), "--json", "-")
    shown = json.loads(ran.out)
    assert ran.code == 0
    assert shown["verdict"] == "right"
    assert shown["key"] == made.keys[1].hex()
    assert shown["first_token"] == CHUNK_TOKENS
    assert shown["components"] == [
        {
            "name": "kv.0",
            "dtype": "F32",
            "shape": [2, 3, CHUNK_TOKENS, 10],
            "offset": made.schema.head_bytes,
            "num_bytes": made.schema.payload_bytes,
            "num_leaves": 6,
        }
    ]


def test_show_refuses_a_prefix_of_none_or_several(make_store, run):
    made = make_store(num_records=40)  # more than 16 keys: two share their first digit
    first_digits = [key.hex()[0] for key in made.keys]
    shared = next(digit for digit in first_digits if first_digits.count(digit) > 1)
    assert "give more digits" in run("ls", made.url, shared).error_line
    assert "no record" in run("ls", made.url, "f" * 64).error_line
    assert "not a key" in run("ls", made.url, "../../etc").error_line


def test_stat_counts_records_bytes_and_quarantine(make_store, run):
    made = make_store(num_records=3)
    made.flip(2, -1)
    run("verify", made.url)
    found = json.loads(
        run("ls", f"{made.url}?max_bytes=1GiB", "--by", "namespace", "--json", "-").out
    )
    assert found["num_records"] == 2
    assert found["max_bytes"] == 2**30
    assert found["index_complete"] is True
    assert (found["quarantined"], found["quarantined_bytes"]) == (1, made.schema.record_bytes)
    assert found["used_bytes"] >= 2 * made.schema.record_bytes


@pytest.mark.parametrize(("options", "kept"), [("--older-than 90m", 2), ("--max-bytes", 3)])
def test_a_dry_run_says_what_would_go(make_store, run, options, kept):
    """Records that were last used now, one, two and three hours ago."""
    made = make_store(num_records=4)
    record_bytes, now = made.schema.record_bytes, time.time()
    for index in range(4):
        made.set_last_used(index, now - 3600.0 * index)
    words = options.split()
    if options == "--max-bytes":
        words.append(f"{kept * record_bytes}B")
    value = json.loads(run("rm", made.url, *words, "--dry-run", "--json", "-").out)
    assert value == {
        "dry_run": True,
        "records": 4 - kept,
        "num_bytes": (4 - kept) * record_bytes,
        "used_bytes": kept * record_bytes,
    }
    assert all(made.path(index).exists() for index in range(4))


def test_gc_goes_by_the_files_where_the_index_was_lost(make_store, run):
    made = make_store(num_records=3)
    os.utime(made.path(1), (1_700_000_000, 1_700_000_000))
    (made.root / "index.sqlite3").unlink()
    assert run("rm", made.url, "--older-than", "2d", "--yes").code == 0
    assert [made.path(index).exists() for index in range(3)] == [True, False, True]
