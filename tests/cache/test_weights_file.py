"""What a reset keeps: nothing, unless the operator's file says that the weights are the same."""

from __future__ import annotations

import os

import pytest

from kvferry.cache.deciding.weights_file import READ_SECONDS
from kvferry.errors import ConfigError
from kvferry.testing.clock import FakeClock

from .keeping import PROMPT, open_store

HIT = 40


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "weights"
    path.write_text("step 1\n")
    return path


@pytest.fixture
def host(make_host, file):
    host = make_host(weights_version_file=str(file), clock=FakeClock())
    fill(host)
    return host


def fill(host):
    host.run("writer", PROMPT)
    host.settle()
    assert host.scheduler.reset()


def hit(host):
    tokens = host.run("reader", PROMPT).num_external_tokens
    host.settle()
    return tokens


CHANGES = {
    "the same": (lambda file: None, HIT),
    "the same with other spaces": (lambda file: file.write_text(" step 1"), HIT),
    "another": (lambda file: file.write_text("step 2"), 0),
    "empty": (lambda file: file.write_text(""), 0),
    "no text": (lambda file: file.write_bytes(b"\xff\xfe"), 0),
    "none": (lambda file: file.unlink(), 0),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_reset_keeps_what_was_stored_if_the_file_says_the_same(host, file, change, expected):
    """It is read at the first look-up: a host resets before it loads other weights."""
    waiting = host.add("waits", PROMPT)
    change(file)
    assert hit(host) == expected
    assert host.admit(waiting) == HIT
    host.complete(waiting)
    assert hit(host) == HIT, "what was stored since is read"
    assert host.pool.num_taken == 0


def test_without_the_file_a_reset_keeps_nothing(make_host):
    host = make_host()
    fill(host)
    assert hit(host) == 0


def test_weights_that_were_others_are_not_those_of_the_start_again(host, file):
    """The host's own cache may still hold KV of the others, which this engine would store."""
    file.write_text("step 2")
    assert hit(host) == 0
    for text in ("step 1", "step 2"):
        file.write_text(text)
        assert host.scheduler.reset()
        assert hit(host) == 0


def test_other_engines_read_what_is_stored_after_such_a_reset(make_host, file, tmp_path):
    host = make_host(store=open_store(tmp_path / "store"), weights_version_file=str(file))
    assert host.scheduler.reset()
    host.run("after", PROMPT)
    host.settle()
    assert hit(make_host(store=open_store(tmp_path / "store"))) == HIT


def test_a_look_up_that_was_under_way_begins_again(host):
    assert hit(host) == HIT
    host.forget_memory()
    request = host.add("asks", PROMPT)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    assert host.scheduler.reset()
    assert host.admit(request) == HIT
    host.complete(request)
    assert host.pool.num_taken == 0


def test_records_in_doubt_are_not_read_again(host):
    assert hit(host) == HIT
    assert host.scheduler.identity.distrust("a test")
    for _ in range(2):
        assert host.scheduler.reset()
        assert hit(host) == 0


def test_a_file_that_cannot_be_read_in_time_holds_up_nothing(make_host, file):
    clock = FakeClock()
    host = make_host(weights_version_file=str(file), clock=clock)
    fill(host)
    file.unlink()
    os.mkfifo(file)  # the read waits for a writer
    request = host.add("asks", PROMPT)
    try:
        for _ in range(3):
            assert host.scheduler.lookup(request, 0).num_tokens is None
        clock.advance(READ_SECONDS)
        assert host.admit(request) == 0
    finally:
        writer = os.open(file, os.O_RDWR)
        text = file.with_name("text")
        text.write_text("1")
        text.replace(file)  # a later read finds a file
        os.close(writer)
    host.complete(request)


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_an_engine_does_not_start_without_the_name_of_its_weights(make_host, tmp_path, text):
    path = tmp_path / "absent"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"^weights_version_file: .*absent"):
        make_host(weights_version_file=str(path))
