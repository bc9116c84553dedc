"""Every reason of `kvferry explain` is made to happen on a real directory, Valkey and S3.

An engine that records its requests runs into the reasons of `LookupMiss`, and the journal names
them. A store is brought into each state, and names its reason, or says what it knows instead:
servers remember no removals. An engine stores nothing, and the journal says why.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvferry.cli.explain import HIT
from kvferry.contract.handover import read_handover
from kvferry.contract.messages import LookupMiss
from kvferry.contract.spec import Mode
from kvferry.errors import FaultKind, StoreError
from kvferry.explain import PromptSearch, Space
from kvferry.store.base import NO_DEADLINE, Where
from kvferry.store.file.directory import record_path
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import Gate, StallingStore
from kvferry.testing.wrappers import WrapperStore
from kvferry.types import ChunkKey, ExtraKeys, RequestOptions
from tests.cache.conftest import make_host
from tests.cache.deciding.test_audits import be_another_model, settled_run
from tests.cache.keeping import PROMPT, assert_settles, keys_of, wait_for
from tests.cli.test_explain import SPACE, TOKENS, put_prompt, without_age
from tests.cli.test_explain import space_of as namespace_of
from tests.servers.process import LOCALHOST
from tests.servers.proxy import running_proxy

__all__ = ["make_host"]

KINDS = ["file", "valkey", "s3"]
SECOND, THIRD = list(range(200, 241)), list(range(300, 341))
MINUTE = 60.0
"""A fetch that a busy machine slows down is no `deadline`."""


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def url(kind, url_of, tmp_path):
    return (tmp_path / "store").as_uri() if kind == "file" else url_of(kind)


def damage(url: str, namespace: bytes, key: ChunkKey) -> None:
    """Flip the last bit of a record, which is of its KV."""
    with open_one(url, Opening(namespace=namespace)) as store:
        size = store.read(key, ())
        value = bytearray(size)
        store.read(key, [(0, memoryview(value))])
        assert store.delete(key)
        value[-1] ^= 1
        store.put(key, [value])


@contextmanager
def going_away(url: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """A URL of the same store, and what makes it go away as a server or a mount does."""
    if url.startswith("file://"):
        root = Path(url.removeprefix("file://"))
        yield url, lambda: root.rename(root.with_name("gone"))
        return
    port = re.search(rf"{re.escape(LOCALHOST)}:(\d+)", url)[1]
    with running_proxy(int(port)) as proxy:
        yield url.replace(f":{port}", f":{proxy.port}"), proxy.refuse


# -- what an engine decided -----------------------------------------------------------------------


class Engines:
    """Engines on one store."""

    def __init__(self, make: Callable[..., Any], url: str, kind: str, journal: Path) -> None:
        self._make = make
        self.url = url
        self.kind = kind
        self.journal = journal
        self.namespace = b""

    def open(self, wrap: Callable[[Any], Any] | None = None, **options: Any) -> Any:
        """One that reads the store; `wrap` puts a fault before it."""
        options = {"store": self.url, "load_timeout_seconds": MINUTE, **options}
        if wrap is not None:
            options["store"] = wrap(open_one(self.url, Opening(namespace=self.namespace)))
        host = self._make(**options)
        assert host.parts[0].wait_ready(MINUTE)
        return host

    def recording(self, wrap: Callable[[Any], Any] | None = None, **options: Any) -> Any:
        # Time stands still, so that a store that answers late is awaited.
        return self.open(wrap, record=str(self.journal), **{"clock": FakeClock(), **options})

    def fill(self, *prompts: list[int]) -> Any:
        """One that has stored prompts of five chunks."""
        host = self.open()
        for number, prompt in enumerate(prompts or (PROMPT,), 1):
            host.run("fills", prompt)
            host.settle()
            wait_for(lambda stored=5 * number: host.observer["put_stored"] == stored)
        self.namespace = host.scheduler.requests.namespace
        return host


def absent(engines):
    host = engines.recording()
    host.run("asked", PROMPT)
    return host


def the_end(engines):
    engines.fill()
    host = engines.recording()
    host.run("asked", PROMPT)
    return host


def shorter_than_a_chunk(engines):
    engines.fill()
    host = engines.recording()
    host.run("asked", PROMPT[:3])
    return host


def damaged(engines):
    filled = engines.fill()
    damage(engines.url, engines.namespace, keys_of(filled)[2])
    host = engines.recording()
    host.run("asked", PROMPT)
    return host


def away(engines):
    """The store went away after it had said what it has."""
    engines.fill()
    with going_away(engines.url) as (url, go_away):
        host = engines.recording(store=url)
        request = host.add("asked", PROMPT)
        wait_for(lambda: host.scheduler.lookup(request, 0) and host.pool.has_work)
        go_away()
        assert host.admit(request) == 0
        host.finish(request)
        host.scheduler.close()
    return host


def removed_under_the_engine(engines):
    """By hand, or by another client of the server."""
    filled = engines.fill()
    host = engines.recording()
    store, keys = host.parts[0].store, keys_of(host)
    store.probe(keys)
    wait_for(lambda: all(store.where(each) is Where.HERE for each in keys))
    if engines.kind == "file":
        FileStore(Path(engines.url.removeprefix("file://"))).directory.remove(keys[2])
    else:
        with open_one(engines.url, Opening(namespace=filled.scheduler.requests.namespace)) as other:
            assert other.delete(keys[2])
    host.run("asked", PROMPT)
    return host


def away_at_start(engines):
    """The far one of two tiers."""
    filled = engines.fill()
    filled.close()
    for part in filled.parts:  # one that is open makes its directory anew
        part.store.close()
    near = (engines.journal.parent / "near").as_uri()
    with going_away(engines.url) as (url, go_away):
        go_away()
        far = f"{url}?create=false" if engines.kind == "file" else url
        host = engines.recording(store=[near, far])
        host.run("asked", PROMPT)
        host.scheduler.close()
    return host


def away_while_serving(engines):
    """The far one of two tiers. Files that go away are `vanished`."""
    if engines.kind == "file":
        return away_at_start(engines)
    engines.fill()
    near = (engines.journal.parent / "near").as_uri()
    with going_away(engines.url) as (url, go_away):
        host = engines.recording(store=[near, url])
        host.run("before", PROMPT)
        go_away()
        store = host.parts[0].store

        def is_away() -> bool:
            store.probe([ChunkKey(os.urandom(32))])
            return store.tiers()[1].state == "away"

        wait_for(is_away)
        host.run("asked", SECOND)
        host.scheduler.close()
    return host


def stalled(engines, *, again=False):
    engines.fill()
    gate, clock = Gate(), FakeClock()
    host = engines.recording(
        lambda store: StallingStore(store, gate=gate, operations={"read"}), clock=clock
    )
    first = host.add("first" if again else "asked", PROMPT)

    def is_fetching() -> bool:
        assert host.scheduler.lookup(first, 0).num_tokens is None
        host.step([])
        return gate.wait_for_arrival(0)

    wait_for(is_fetching)
    clock.advance(MINUTE)
    assert host.admit(first) == 0
    host.finish(first)
    host.scheduler.policy.saw_compute(100_000, 1.0)  # this host has no model whose speed it sees
    if again:
        second = host.add("asked", PROMPT)
        host.admit(second)
        host.finish(second)
    gate.release()
    assert_settles(host)
    return host


def stalled_before(engines):
    return stalled(engines, again=True)


def small_pool(engines):
    engines.fill()
    host = engines.recording(num_slots=3)
    host.run("asked", PROMPT)
    return host


def audited(engines):
    engines.fill()
    host = engines.recording(audit=1.0)
    host.run("asked", PROMPT)
    return host


def of_another_model(engines):
    engines.fill(PROMPT, SECOND, THIRD)
    host = engines.recording(audit="first", recomputes=True)
    store = host.parts[0].store
    for prompt in (PROMPT, SECOND, THIRD):  # a look-up waits no longer than it must
        keys = keys_of(host, prompt)
        store.probe(keys)
        wait_for(lambda keys=keys: all(store.where(each) is Where.HERE for each in keys))
    be_another_model(host)
    for name, prompt in (("1", PROMPT), ("2", PROMPT), ("3", SECOND), ("asked", THIRD)):
        settled_run(host, name, prompt)
    return host


def answer_of(producer: Any) -> Any:
    """What the client of a prefill hands to the engine that decodes."""
    request = producer.add("prefill", PROMPT, handover=read_handover({"do_remote_decode": True}))
    producer.admit(request)
    producer.prefill(request)
    return read_handover(producer.finish(request))


def never_arrives(engines):
    """The producer stores elsewhere, as if it were killed before it could."""
    clock = FakeClock()
    handover = answer_of(engines.open(store="memory://elsewhere"))
    host = engines.recording(clock=clock)
    request = host.add("asked", PROMPT, handover=handover)
    assert host.scheduler.lookup(request, 0).num_tokens is None
    clock.advance(MINUTE)
    host.admit(request)
    host.finish(request)
    return host


def made_by_another(engines):
    handover = answer_of(engines.open(weights=b"o" * 32))
    host = engines.recording()
    host.run("asked", PROMPT, handover=handover)
    return host


def a_clock_in_the_template(engines):
    producer = engines.fill()
    host = engines.recording()
    handover = answer_of(producer)
    host.run("asked", [*PROMPT[:24], 99, *PROMPT[25:]], handover=handover)
    return host


def not_cached(engines, extra_keys=ExtraKeys(cacheable=False)):  # noqa: B008  # frozen
    engines.fill()
    host = engines.recording()
    request = host.add("asked", PROMPT, extra_keys=extra_keys)
    host.admit(request)
    host.prefill(request)
    host.preempt(request)
    host.admit(request)  # once more, and one line
    host.prefill(request)
    host.finish(request)
    return host


def unknown_adapter(engines):
    why = "the LoRA adapter is being hashed"
    return not_cached(engines, ExtraKeys(cacheable=False, reason=LookupMiss.ADAPTER, why=why))


def weights_under_way(engines):
    why = "the weights are being hashed"
    return not_cached(engines, ExtraKeys(cacheable=False, reason=LookupMiss.HASHING, why=why))


def no_load(engines):
    engines.fill()
    host = engines.recording()
    host.run("asked", PROMPT, options=RequestOptions(load=False))
    return host


def a_part(engines):
    engines.fill()
    host = engines.recording()
    host.run("asked", PROMPT, options=RequestOptions(max_load_tokens=16))
    return host


class Decided(NamedTuple):
    """What the journal says: tokens by reason, and a piece of the numbers behind it."""

    misses: dict[str, int]
    why: str = ""
    """A pattern."""


DECIDED: dict[Callable[[Engines], Any], Decided] = {
    absent: Decided({LookupMiss.ABSENT: 40, LookupMiss.PARTIAL: 1}),
    the_end: Decided({LookupMiss.PARTIAL: 1}),
    shorter_than_a_chunk: Decided({LookupMiss.PARTIAL: 3}),
    damaged: Decided({LookupMiss.DAMAGED: 24, LookupMiss.PARTIAL: 1}, "^bad_checksum$"),
    removed_under_the_engine: Decided({LookupMiss.VANISHED: 24, LookupMiss.PARTIAL: 1}),
    away: Decided({LookupMiss.AWAY: 40, LookupMiss.PARTIAL: 1}, "valkey server|s3://records: "),
    away_at_start: Decided(
        {LookupMiss.AWAY: 40, LookupMiss.PARTIAL: 1},
        "^(file1 opening: .* does not exist|valkey .*valkey server|s3 .*s3://records: )",
    ),
    away_while_serving: Decided(
        {LookupMiss.AWAY: 40, LookupMiss.PARTIAL: 1}, "^(file1 opening|valkey away|s3 away): ."
    ),
    stalled: Decided({LookupMiss.DEADLINE: 40, LookupMiss.PARTIAL: 1}),
    stalled_before: Decided({LookupMiss.SLOWER: 40, LookupMiss.PARTIAL: 1}, "0.000 s to compute"),
    small_pool: Decided({LookupMiss.NO_MEMORY: 16, LookupMiss.PARTIAL: 1}),
    audited: Decided({LookupMiss.AUDIT: 8, LookupMiss.PARTIAL: 1}),
    of_another_model: Decided({LookupMiss.OTHER_MODEL: 40, LookupMiss.PARTIAL: 1}, "differs"),
    never_arrives: Decided({LookupMiss.NOT_PRODUCED: 40, LookupMiss.PARTIAL: 1}, "did not come"),
    made_by_another: Decided(
        {LookupMiss.OTHER_PRODUCER: 40, LookupMiss.PARTIAL: 1}, "its namespace is"
    ),
    a_clock_in_the_template: Decided(
        {LookupMiss.OTHER_TOKENS: 16, LookupMiss.PARTIAL: 1}, "it computed other tokens"
    ),
    not_cached: Decided({LookupMiss.NOT_CACHEABLE: 41}),
    unknown_adapter: Decided({LookupMiss.ADAPTER: 41}, "is being hashed"),
    weights_under_way: Decided({LookupMiss.HASHING: 41}, "are being hashed"),
    no_load: Decided({LookupMiss.NOT_LOADING: 40, LookupMiss.PARTIAL: 1}),
    a_part: Decided({LookupMiss.NOT_LOADING: 24, LookupMiss.PARTIAL: 1}, "16 tokens at most"),
}


def test_no_reason_is_left_out():
    tables = [row.misses for row in DECIDED.values()], STATES.values(), NOT_STORED.values()
    found = {reason for table in tables for row in table for reason in row}
    of_states = {LookupMiss.NO_STATE}  # of models with states: tests/cache/test_states.py
    assert found == {HIT, *LookupMiss} - of_states


@pytest.mark.parametrize("happens", DECIDED, ids=lambda each: each.__name__)
def test_the_journal_of_an_engine_names_what_happened(run, make_host, url, kind, tmp_path, happens):
    journal = tmp_path / "journal"
    host = happens(Engines(make_host, url, kind, journal))
    host.scheduler.close()
    command = ["explain", "--journal", journal, "--request", "asked"]
    value = json.loads(run(*command, "--json", "-").out)
    misses, why = DECIDED[happens]
    if happens is away and kind == "file":  # the directory is there no more, so nothing is in it
        misses, why = {LookupMiss.VANISHED: 40, LookupMiss.PARTIAL: 1}, ""
    (asked,) = value["requests"]
    assert asked["misses"] == misses
    assert re.search(why, asked["why"])
    assert bool(asked["why"]) == bool(why)
    assert (asked["kind"] in set(FaultKind)) is (LookupMiss.AWAY in misses)
    hits = asked["num_tokens"] - sum(misses.values())
    assert sum(asked["hits"].values()) == hits
    assert set(asked["hits"]) <= {kind}
    means = {each["reason"]: each["means"] for each in value["reasons"] if each["tokens"]}
    assert means == {reason: LookupMiss(reason).meaning for reason in misses}
    shown = " ".join(run(*command).out.split())
    assert shown.startswith(f"{hits} of {asked['num_tokens']} tokens")
    assert all(reason in shown for reason in misses)


@pytest.mark.parametrize("kind", KINDS[1:], indirect=True)
def test_a_link_that_is_too_slow_is_late_and_loses_nothing(run, make_host, url, kind, tmp_path):
    """Neither the request that meets it nor the next one is told that the records are damaged."""
    engines = Engines(make_host, url, kind, tmp_path / "journal")
    engines.fill()
    port = re.search(rf"{re.escape(LOCALHOST)}:(\d+)", url)[1]
    clock = FakeClock()
    with running_proxy(int(port)) as proxy:
        # A read has one second; the engine's own clock stands still meanwhile.
        host = engines.recording(
            store=url.replace(f":{port}", f":{proxy.port}"), load_timeout_seconds=1.0, clock=clock
        )

        def hit_of(name: str) -> int:
            request = host.add(name, PROMPT)
            hit = host.admit(request)
            host.finish(request)
            return hit

        first = host.add("first", PROMPT)
        wait_for(lambda: host.scheduler.lookup(first, 0) and host.pool.has_work)
        proxy.limit(100.0)
        assert host.admit(first) == 0
        host.finish(first)
        assert hit_of("next") == 0
        proxy.pass_all()

        def is_read() -> bool:
            clock.advance(MINUTE)
            return hit_of("later") == 40

        wait_for(is_read)
        assert host.observer["records_corrupt"] == 0
        host.scheduler.close()
    for name in ("first", "next"):
        command = ["explain", "--journal", engines.journal, "--request", name, "--json", "-"]
        (asked,) = json.loads(run(*command).out)["requests"]
        (reason,) = asked["misses"].keys() - {LookupMiss.PARTIAL}
        assert reason == LookupMiss.AWAY
        assert re.search("in time|not end", asked["why"])


# -- what an engine did not store ------------------------------------------------------------------


def ends(
    host: Any, is_settled: Callable[[], bool], prompt: list[int] = PROMPT, **given: Any
) -> Any:
    """Compute a prompt, and end the request once what is saved of it has settled."""
    request = host.add("asked", prompt, **given)
    host.admit(request)
    host.prefill(request)

    def has_settled() -> bool:
        host.step([])
        return is_settled()

    wait_for(has_settled)
    host.finish(request)
    return host


def an_option(engines):
    host = engines.recording()
    return ends(host, lambda: True, options=RequestOptions(store=False))


def a_role(engines):
    return ends(engines.recording(mode=Mode.READ), lambda: True)


def less_than_a_chunk(engines):
    return ends(engines.recording(), lambda: True, PROMPT[:3])


def a_store_that_is_full_or_gone(engines):
    """A directory whose disk is full, or a server that went away."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with going_away(engines.url) as (url, go_away), pytest.MonkeyPatch.context() as patch:
        host = engines.recording(store=url)
        if engines.kind == "file":
            patch.setattr(os, "pwritev", full)
        else:
            go_away()
        refused, keys = host.scheduler.requests.refused, keys_of(host)
        ends(host, lambda: all(key in refused for key in keys))
        host.scheduler.close()
    return host


def slots_that_are_all_being_written(engines):
    """A pool writes from half of its slots at a time."""
    engines.fill()  # another prompt than the one that is asked for
    gate = Gate()
    host = engines.recording(
        lambda store: StallingStore(store, gate=gate, operations={"put"}), num_slots=6
    )
    ends(host, lambda: True, SECOND)
    gate.release()
    assert_settles(host)
    return host


def values_that_are_not_finite(engines):
    host = engines.recording()
    for rank in host.ranks:
        rank.values = lambda layer, seeds, right=rank.values: right(layer, seeds) * math.inf
    return ends(host, lambda: host.observer["save_not_finite"])


NOT_STORED: dict[Callable[[Engines], Any], dict[str, int]] = {
    an_option: {LookupMiss.NOT_STORING: 40, LookupMiss.PARTIAL: 1},
    a_role: {LookupMiss.NOT_STORING: 40, LookupMiss.PARTIAL: 1},
    less_than_a_chunk: {LookupMiss.PARTIAL: 3},
    a_store_that_is_full_or_gone: {LookupMiss.REFUSED: 40, LookupMiss.PARTIAL: 1},
    slots_that_are_all_being_written: {LookupMiss.NO_MEMORY: 16, LookupMiss.PARTIAL: 1},
    values_that_are_not_finite: {LookupMiss.NOT_FINITE: 40, LookupMiss.PARTIAL: 1},
}


@pytest.mark.parametrize("happens", NOT_STORED, ids=lambda each: each.__name__)
def test_the_journal_says_what_was_not_stored(run, make_host, url, kind, tmp_path, happens):
    journal = tmp_path / "journal"
    happens(Engines(make_host, url, kind, journal)).scheduler.close()
    command = ["explain", "--journal", journal, "--request", "asked"]
    value = json.loads(run(*command, "--json", "-").out)
    (asked,) = value["requests"]
    assert asked["not_stored"] == NOT_STORED[happens]
    cause = {"file": "No space left", "valkey": "valkey", "s3": "s3"}[kind]
    causes = {a_store_that_is_full_or_gone: cause, values_that_are_not_finite: "at token 0$"}
    assert re.search(causes.get(happens, "^$"), asked["not_stored_why"])
    kinds = {"full"} if kind == "file" else {"away", "late", "protocol"}
    of_store = happens is a_store_that_is_full_or_gone
    assert asked["not_stored_kind"] in (kinds if of_store else {""})
    counted = {each["reason"]: each["not_stored"] for each in value["reasons"]}
    assert {reason: tokens for reason, tokens in counted.items() if tokens} == NOT_STORED[happens]


def test_what_is_stored_is_not_among_it(run, make_host, url, kind, tmp_path):
    """Neither of the request that stores it, nor of one that may not."""
    engines = Engines(make_host, url, kind, tmp_path / "journal")
    host = engines.recording()
    ends(host, lambda: host.observer["put_stored"] == 5)
    an_option(engines).scheduler.close()
    host.scheduler.close()
    command = ["explain", "--journal", engines.journal, "--json", "-"]
    for asked in json.loads(run(*command).out)["requests"]:
        assert asked["not_stored"] == {"partial": 1}


# -- what a store knows ---------------------------------------------------------------------------


class Prompt(NamedTuple):
    """A prompt of four chunks and two tokens that is stored; what is done to it, and asked."""

    url: str
    kind: str
    run: Callable[..., Any]
    keys: list[ChunkKey]

    def remove(self, number: int) -> None:
        with open_one(self.url, Opening(namespace=SPACE.digest)) as store:
            assert store.delete(self.keys[number])


def as_it_is(prompt):
    return {}


def one_token_less(prompt):
    return {"tokens": TOKENS[:28]}


def two_tokens(prompt):
    return {"tokens": TOKENS[:2]}


def other_from_the_second_chunk_on(prompt):
    return {"tokens": [*TOKENS[:7], *range(23)]}


def made_room(prompt):
    ran = prompt.run("rm", prompt.url, "--max-bytes", 0, "--yes")
    assert ran.code == 0, ran.err
    return {}


def verified(prompt):
    damage(prompt.url, SPACE.digest, prompt.keys[1])
    assert prompt.run("verify", prompt.url).code == 1
    return {}


def a_program_deleted(prompt):
    prompt.remove(1)
    return {}


def removed_from_outside(prompt):
    """Where the store does not see it; on a server that is any deletion."""
    if prompt.kind != "file":
        return a_program_deleted(prompt)
    with FileStore(Path(prompt.url.removeprefix("file://")), background=False) as store:
        store.directory.remove(prompt.keys[1])
        assert store.read(prompt.keys[1], ()) is None
        store.maintain()
    return {}


def removed_by_hand(prompt):
    """While no engine runs."""
    if prompt.kind != "file":
        return a_program_deleted(prompt)
    Path(record_path(prompt.url.removeprefix("file://"), prompt.keys[1])).unlink()
    return {}


def evicted_and_stored_again(prompt):
    made_room(prompt)
    put_prompt(prompt.url)
    return {}


def evicted_stored_again_and_removed_by_hand(prompt):
    evicted_and_stored_again(prompt)
    return removed_by_hand(prompt)


def overwritten(prompt):
    with open_one(prompt.url, Opening(namespace=SPACE.digest)) as store:
        assert store.delete(prompt.keys[1])
        store.put(prompt.keys[1], [b"x" * 100])
    return {}


def of_a_tenant(prompt):
    tenant = namespace_of("team-a")
    put_prompt(prompt.url, tenant, range(7))
    return {"space": tenant}


def with_a_salt(prompt):
    return {"options": ["--salt", "s"]}


STATES: dict[Callable[[Prompt], dict[str, Any]], tuple[str, ...]] = {
    as_it_is: (HIT, LookupMiss.PARTIAL),
    one_token_less: (HIT, LookupMiss.PARTIAL),
    two_tokens: (LookupMiss.PARTIAL,),
    other_from_the_second_chunk_on: (HIT, LookupMiss.ABSENT, LookupMiss.PARTIAL),
    made_room: (LookupMiss.EVICTED, LookupMiss.PARTIAL),
    verified: (HIT, LookupMiss.DAMAGED, LookupMiss.BEHIND, LookupMiss.PARTIAL),
    a_program_deleted: (HIT, LookupMiss.DELETED, LookupMiss.BEHIND, LookupMiss.PARTIAL),
    removed_from_outside: (HIT, LookupMiss.VANISHED, LookupMiss.BEHIND, LookupMiss.PARTIAL),
    removed_by_hand: (HIT, LookupMiss.VANISHED, LookupMiss.BEHIND, LookupMiss.PARTIAL),
    evicted_and_stored_again: (HIT, LookupMiss.PARTIAL),
    evicted_stored_again_and_removed_by_hand: (
        HIT,
        LookupMiss.VANISHED,
        LookupMiss.BEHIND,
        LookupMiss.PARTIAL,
    ),
    overwritten: (HIT, LookupMiss.DAMAGED, LookupMiss.BEHIND, LookupMiss.PARTIAL),
    of_a_tenant: (LookupMiss.OTHER_NAMESPACE,),
    with_a_salt: (LookupMiss.OTHER_KEYS,),
}
"""What a directory says; where only one is given, it is the reason of the whole prompt."""

UNKNOWN_TO_SERVERS = (
    LookupMiss.EVICTED, LookupMiss.DELETED, LookupMiss.DAMAGED, LookupMiss.VANISHED,
)  # fmt: skip
"""A server forgets without a note: of all these it says `absent`."""


@pytest.fixture
def ask(run, tmp_path):
    """The answer about a prompt, as JSON; the table says the same."""
    file = tmp_path / "tokens.json"

    def call(url: str, space=SPACE, tokens=TOKENS, options=()) -> dict[str, Any]:
        file.write_text(json.dumps(list(tokens)))
        command = ["explain", url, "--namespace", space.digest.hex(), "--tokens", file, *options]
        command += ["--block-size", 1]
        shown = run(*command)
        assert shown.code == 0, shown.err
        value = json.loads(run(*command, "--json", "-").out)
        assert without_age(shown.out.splitlines()[0]) == without_age(value["summary"])
        chunks = value["namespaces"][0]["chunks"]
        assert all(each["why"] in " ".join(shown.out.split()) for each in chunks)
        return value

    return call


@pytest.mark.parametrize("happens", STATES, ids=lambda each: each.__name__)
def test_a_store_names_what_became_of_a_prompt(run, ask, url, kind, happens):
    prompt = Prompt(url, kind, run, put_prompt(url))
    value = ask(url, **happens(prompt))
    is_forgotten = kind != "file" and happens is not overwritten  # which is still there
    said = [
        LookupMiss.ABSENT if is_forgotten and why in UNKNOWN_TO_SERVERS else why
        for why in STATES[happens]
    ]
    first = next((why for why in said if why not in (HIT, LookupMiss.PARTIAL)), said[-1])
    assert value["reason"] == first
    assert value["summary"].startswith(f"{first}: ")
    if len(said) == 1:
        if happens is of_a_tenant:
            differs = {"tenant": {"there": "", "here": "team-a"}}
            assert value["elsewhere"]["differs"] == differs
            assert value["elsewhere"]["namespace"] == SPACE.digest.hex()
        return
    chunks = value["namespaces"][0]["chunks"]
    assert [each["why"] for each in chunks] == said
    if happens is verified:
        known = "bad_checksum" if kind == "file" else "was stored before: later chunks are there"
        assert chunks[1]["detail"] == known
    if happens in (removed_by_hand, evicted_stored_again_and_removed_by_hand) and kind == "file":
        assert "gone, though the index lists it" in value["summary"]
    if chunks[1]["at"] is not None:
        assert chunks[1]["by"].startswith(f"{os.getpid()}@")


def test_a_store_that_goes_away_is_asked_no_further_and_is_the_answer(url, kind):
    keys = put_prompt(url)

    class GoesAway(WrapperStore):
        def read(self, key, ranges, deadline=NO_DEADLINE):
            if key == keys[1]:
                raise StoreError(FaultKind.LATE, "it hangs")
            assert key == keys[0]
            return super().read(key, ranges, deadline)

    with GoesAway(open_one(url, Opening(namespace=SPACE.digest))) as store:
        search = PromptSearch({kind: store}, TOKENS)
        with pytest.raises(StoreError, match=f"^{kind}: away: it hangs$"):
            search.answer([Space(SPACE, {})], list)


def test_a_tier_that_is_away_is_named(run, url, kind, tmp_path):
    near = (tmp_path / "near").as_uri()
    put_prompt(near, tokens=TOKENS[:14])
    put_prompt(url)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(list(TOKENS)))
    with going_away(url) as (far, go_away):
        command = ["explain", near, far, "--namespace", SPACE.digest.hex(), "--tokens", file]
        command += ["--block-size", 1]
        assert run(*command).out.splitlines()[0].endswith("; 28 of 30 tokens would hit")
        go_away()
        for tiers, number in (([near, far], 2), ([far, near], 1)):
            ran = run("explain", *tiers, *command[3:])
            assert ran.code == 0
            lines = ran.out.splitlines()
            start = "away: the chunk at token 15, "
            assert lines[0].startswith(f"{start}tier {number}, {far.partition('?')[0]}: away: ")
            assert lines[0].endswith("; 14 of 30 tokens would hit")
            cause = "does not exist" if kind == "file" else r"valkey server|s3://records: "
            note = lines[0].removeprefix(start).removesuffix("; 14 of 30 tokens would hit")
            said, note = "".join(ran.out.split()), "".join(note.split())
            said = said.partition("namespace")[2]  # behind the first line; wrapped
            assert re.search(cause.replace(" ", ""), said)
            assert note.removesuffix("...") in said
            ran = run("explain", *tiers, "--namespace", "0" * 12, *command[5:])
            assert ran.code == 2
            assert f"; see `kvferry ls`; tier {number}, {far.partition('?')[0]}: away: " in ran.err
        assert run("explain", far, far, *command[3:]).code == 2


def test_what_the_other_tiers_say_is_named_beside_the_one_that_is_away(run, url_of, tmp_path):
    near, far = (tmp_path / "near").as_uri(), url_of("valkey")
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(list(TOKENS)))
    command = ["explain", near, far, "--namespace", SPACE.digest.hex(), "--tokens", file]
    put_prompt(near)
    put_prompt(far, tokens=TOKENS[:14])
    assert run("rm", near, "--max-bytes", 0, "--yes").code == 0
    for number, tiers in ((2, [near, far]), (1, [far, near])):
        command[1:3] = tiers
        value = json.loads(run(*command, "--block-size", 1, "--json", "-").out)
        hit, evicted, _ = value["namespaces"][0]["chunks"]
        assert (hit["why"], hit["detail"]) == (HIT, f"tier {number}, {far}")
        assert (evicted["why"], evicted["first_token"]) == (LookupMiss.EVICTED, 14)
    with going_away(far) as (gone, go_away):
        go_away()
        command[1:3] = near, gone
        (away, _) = json.loads(run(*command, "--json", "-").out)["namespaces"][0]["chunks"]
    assert away["why"] == LookupMiss.AWAY
    assert away["detail"].startswith(f"tier 2, {gone.partition('?')[0]}: away: ")
    assert away["detail"].endswith(f"; tier 1, {near}: evicted")


def test_tiers_that_answer_are_asked_on(tmp_path):
    near, other = (tmp_path / "near").as_uri(), namespace_of("b")
    put_prompt(near, tokens=TOKENS[:7])
    put_prompt(near, other, tokens=TOKENS[:21])
    with open_one(near) as store:
        search = PromptSearch({"near": store, "far": store}, TOKENS, away={"far": "gone"})
        found = search.answer([Space(SPACE, {}), Space(other, {})], list).found
    assert [each.hit_tokens for each in found] == [21, 7]
    assert {each.first_miss.why for each in found} == {LookupMiss.AWAY}
