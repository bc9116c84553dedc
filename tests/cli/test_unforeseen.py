"""Errors that nobody foresaw, below commands: a line and an exit code, no traceback, and never
"nothing is wrong". Also hosts in FIPS mode, which refuse BLAKE2.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest

from kvferry.doctor import stores as doctor_stores
from kvferry.doctor import vllm as doctor_vllm
from kvferry.store.file import store
from kvferry.store.kind import Opening, ServerBounds, StoreUrl
from kvferry.store.kinds import MODULES
from kvferry.store.servers.remote import RemoteStore, open_remote
from kvferry.store.url import open_one
from tests.cli.conftest import put_records
from tests.cli.test_doctor import found, root, url
from tests.cli.test_explain import SPACE, put_prompt
from tests.store import toy
from tests.store.errors import METHODS, Odd, Stuck, error, io

__all__ = ["error", "found", "io", "root", "url"]


@pytest.fixture
def odd(monkeypatch, request):
    """The client of the stores at odd://host."""
    client = getattr(request, "param", Odd)()

    def open_url(url: StoreUrl, options: object, opening: Opening) -> RemoteStore:
        quick = replace(opening, bounds=ServerBounds(close_seconds=0.1))
        return open_remote(url, client, quick)

    monkeypatch.setattr(toy, "KIND", replace(toy.KIND, open=open_url))
    monkeypatch.setitem(MODULES, "odd", "tests.store.toy")
    return client


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv", "listdir"])
def test_a_directory_that_fails_in_any_way_is_a_finding(found, url, io, error, call):
    put_records(url.partition("?")[0])
    io.fail[call] = error
    assert found(url) != []
    io.fail.clear()


@pytest.mark.parametrize("call", ["read", "put", "exists", "scan"])
def test_a_client_that_fails_in_any_way_is_a_finding_that_names_it(found, odd, error, call):
    put_records("odd://host/kv")
    assert found("odd://host/kv") == []
    odd.method, odd.error = call, error
    (said, *_) = found("odd://host/kv")
    assert f"Odd.{call} failed: " in said
    assert said.startswith("bug odd://host/kv: ")


@pytest.mark.parametrize(
    ("call", "answer"), [("exists", None), ("exists", []), ("put", None), ("read", "x")]
)
def test_what_is_no_answer_of_a_client_is_a_finding_that_names_it(found, odd, call, answer):
    odd.method, odd.answer = call, answer
    (said, *_) = found("odd://host/kv")
    assert said.startswith("bug odd://host/kv: ")
    assert f"Odd.{call} failed: it returned a " in said


@pytest.mark.parametrize("odd", [Stuck], indirect=True)
@pytest.mark.parametrize("call", sorted(METHODS))
def test_a_call_of_a_client_that_does_not_end_is_a_finding_that_names_it(
    found, odd, monkeypatch, call
):
    odd.method = call
    if call == "exists":  # on a thread of its own
        monkeypatch.setattr(doctor_stores, "ANSWER_SECONDS", 1)
    try:
        (said, *_) = found("odd://host/kv", "--timeout", 60 if call in ("close", "exists") else 1)
    finally:
        odd.ends.set()
    assert said.startswith("late odd://host/kv: ")
    what = "closing it takes long" if call == "close" else "took more than 1 s"
    assert said.endswith(f"{what}, in Stuck.{call}")


def test_look_ups_that_do_not_find_what_is_stored_are_a_finding(found, odd):
    odd.exists = lambda names, deadline: [False] * len(names)
    assert found("odd://host/kv") == [
        "not-found odd://host/kv: a record that was just stored can be read, but look-ups do not "
        "find it"
    ]


def test_a_check_that_fails_itself_is_a_finding(found, monkeypatch, error):
    def fail(*_arguments):
        raise error

    monkeypatch.setattr(doctor_vllm, "check_installed", fail)
    (said,) = found("--vllm")
    assert said.startswith("bug vllm: ")


def test_explain_has_what_a_client_raised_as_the_reason(run, tmp_path, odd, error, tokens_file):
    near = (tmp_path / "near").as_uri()
    for place in (near, "odd://host/kv"):
        put_prompt(place)
    odd.method, odd.error = "read", error
    whose = ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file]
    ran = run("explain", "odd://host/kv", *whose)
    assert ran.code == 2
    assert "Odd.read failed: " in ran.error_line
    value = json.loads(run("explain", near, "odd://host/kv", *whose, "--json", "-").out)
    assert value["hit_tokens"] == 16
    assert set(value["faults"].values()) <= {"bug"}
    assert all("Odd.read failed: " in why for why in value["away"].values())


@pytest.mark.parametrize("side", ["source", "target"])
def test_copy_ends_with_one_line(run, tmp_path, odd, error, side):
    put_records((tmp_path / "store").as_uri())
    put_records("odd://host/kv", seed=6)
    odd.method, odd.error = ("read" if side == "source" else "put"), error
    places = ["odd://host/kv", (tmp_path / "store").as_uri()]
    ran = run("copy", *(places if side == "source" else reversed(places)))
    assert ran.code == 2
    assert f"Odd.{odd.method} failed: " in ran.err.splitlines()[-1]
    assert "Traceback" not in ran.err


def test_warm_says_that_nothing_was_kept(run, model_dir, tmp_path, io, error):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps(list(range(3, 90))) + "\n")
    open_one((tmp_path / "kv").as_uri()).close()
    io.fail["pwritev"] = error
    command = ["warm", model_dir, "--prompts", prompts, "--chunk-tokens", 16]
    ran = run(*command, "--store", (tmp_path / "kv").as_uri())
    assert ran.code == 1
    assert "did not keep it" in ran.out
    assert "Traceback" not in ran.err


# -- FIPS -----------------------------------------------------------------------------------------


@pytest.fixture(params=[ValueError, TypeError, AttributeError], ids=lambda kind: kind.__name__)
def fips(request, monkeypatch):
    def unsupported(*_arguments, **_named):
        raise request.param("[digital envelope routines] unsupported")

    for name in ("blake2b", "blake2s", "md5", "sha1"):
        monkeypatch.setattr(hashlib, name, unsupported)


@pytest.mark.usefixtures("fips")
@pytest.mark.parametrize("place", ["a local disk", "a network mount"])
def test_hosts_without_blake2_store_read_copy_and_are_found_right(
    run, found, url, root, tmp_path, monkeypatch, caplog, place
):
    if place == "a network mount":
        monkeypatch.setattr(store, "is_of_one_machine", lambda _root: False)
    _, keys = put_records(url)
    assert found(url) == []
    other = (tmp_path / "other").as_uri()
    assert run("copy", url, other).code == 0
    for each in (url, other):
        with open_one(each) as opened:
            assert all(opened.read(key, ()) for key in keys)
    assert caplog.messages == []


def test_the_index_that_an_earlier_version_named_is_used(root, monkeypatch, tmp_path):
    """It has times of last use and removals, which no listing gives back."""
    monkeypatch.setattr(store, "is_of_one_machine", lambda _root: False)
    named = hashlib.blake2b(str(root).encode(), digest_size=16).hexdigest()
    folder = tmp_path / "cache" / "kvferry" / "index"
    folder.mkdir(parents=True)
    earlier = folder / f"{named}.sqlite3"
    put_records(root.as_uri())
    (made,) = folder.glob("*.sqlite3")
    assert made != earlier
    made.rename(earlier)
    put_records(root.as_uri(), seed=6)
    assert list(folder.glob("*.sqlite3")) == [earlier]
