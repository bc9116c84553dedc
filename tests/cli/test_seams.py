"""Answers from room to room: what they say where records go, or descriptions come late."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry import survey as survey_module
from kvferry.cli import copy as copy_module
from kvferry.errors import FaultKind
from kvferry.explain import PromptSearch
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.url import open_one
from kvferry.survey import DESCRIBE_SECONDS, survey
from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores import make_key
from tests.cli.test_copy import other
from tests.cli.test_explain import put_prompt, space_of
from tests.store.servers.remote_client import DictClient

__all__ = ["other"]


class Listed(DictClient):
    num_lists = 0

    def scan(self, prefix, deadline):
        self.num_lists += 1
        yield from super().scan(prefix, deadline)


@pytest.mark.parametrize("num_described", [0, 5, 12])
@pytest.mark.parametrize("digits", ["", "0", bytes(32).hex(), "f" * 64])
def test_a_server_is_listed_once_for_all_its_namespaces(num_described, digits):
    client = Listed()
    remote = RemoteStore("s3://b", client, Opening(namespace=bytes(32)))
    spaces = [bytes([number]) * 32 for number in range(12)]
    for number, space in enumerate(spaces):
        remote.in_namespace(space).put(make_key(number), [b"value"])
        if number < num_described:
            remote.describe(space, "{}")
    search = PromptSearch({"s3": remote}, [1, 2, 3])
    for _ in range(3):
        found = search.namespaces(digits)
        assert sorted(found) == [each for each in spaces if each.hex().startswith(digits)]
    assert client.num_lists <= 1


@pytest.fixture
def slow(monkeypatch):
    """Each description takes a third of the time for all."""
    seconds = count(0.0, DESCRIBE_SECONDS / 3 + 0.001)
    clock = SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(survey_module, "time", clock)


@pytest.mark.usefixtures("slow")
def test_a_description_that_there_was_no_time_for_is_late_and_not_lacking(url):
    spaces = [space_of(str(number)) for number in range(6)]
    for space in spaces:
        put_prompt(url, space)
    with open_one(url) as store:
        found = survey(store, [each.digest for each in spaces])
    assert [each.fault and each.fault.kind for each in found] == [None] * 2 + [FaultKind.LATE] * 4
    assert [each.is_described for each in found] == [True] * 2 + [False] * 4


@pytest.mark.usefixtures("slow")
def test_explain_states_nothing_of_namespaces_whose_descriptions_come_late(
    run, url, tokens_file, tmp_path
):
    for number in range(6):
        put_prompt(url, space_of(str(number)))
    model = make_tiny_model(tmp_path / "model")
    ran = run("explain", url, "--model", model, "--tokens", tokens_file)
    assert ran.code == 0, ran.err
    assert "descriptions of namespaces are not known: not read within 10 s" in " ".join(
        ran.out.split()
    )
    with FileStore(url.removeprefix("file://")) as store:
        described = store.catalogue().described()
    assert len(described) == 6


def test_explain_does_not_call_records_lost_whose_descriptions_come_late(
    run, url, tokens_file, tmp_path, monkeypatch
):
    put_prompt(url)
    hours = count(0.0, 3600.0)
    clock = SimpleNamespace(monotonic=lambda: next(hours))
    monkeypatch.setattr(survey_module, "time", clock)
    model = make_tiny_model(tmp_path / "model")
    for whose in (["--model", model], ["--namespace", "0" * 12]):
        ran = run("explain", url, *whose, "--tokens", tokens_file)
        assert ran.code == 2
        assert "without a description" not in ran.error_line
        assert "1 descriptions of namespaces are not known: not read within 10 s" in ran.error_line


@pytest.mark.parametrize("when", ["before they are listed again", "before it is read"])
def test_the_sums_of_copy_add_up_though_records_vanish(run, url, other, monkeypatch, when):
    keys = put_prompt(url)
    opened, chosen = copy_module.open_one, copy_module.chosen

    def remove(key):
        with FileStore(url.removeprefix("file://"), background=False) as store:
            assert store.delete(key)

    def remove_and_open(*arguments):
        """After the records were counted."""
        remove(keys[1])
        return opened(*arguments)

    listings = count(1)

    def list_and_remove(source, choice):
        """The first listing counts, the second is read."""
        first, *others = list(chosen(source, choice))
        yield first
        if next(listings) == 2:
            remove(others[0].key)
        yield from others

    if when == "before it is read":
        monkeypatch.setattr(copy_module, "chosen", list_and_remove)
    else:
        monkeypatch.setattr(copy_module, "open_one", remove_and_open)
    file = Path(url.removeprefix("file://")).with_name("copied.json")
    ran = run("copy", url, other, "--json", file)
    assert ran.code == 0, ran.err
    assert "4 records, " in ran.out
    assert ": 3 copied, 0 were there before, 1 vanished meanwhile" in ran.out
    value = json.loads(file.read_text())
    sums = value["stored"] + value["existing"] + value["vanished"] + len(value["bad"])
    assert value["records"] == sums == 4
