"""Every reason of `kvferry explain` is made to happen on a real directory, Valkey and S3.

An engine that records its requests runs into each reason of `LookupMiss`, and the journal names it.
A store is brought into each state of `Why`, and the store names it, or says what it knows instead:
servers remember no removals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvferry.contract.handover import read_handover
from kvferry.contract.messages import LookupMiss
from kvferry.errors import StoreError
from kvferry.explain import SENTENCES, PromptSearch, Space, TierStores, Why
from kvferry.store.base import NO_DEADLINE
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.store.wrappers import WrapperStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import Gate, StallingStore
from kvferry.types import ChunkKey, ExtraKeys, RequestOptions
from tests.cache.conftest import make_host
from tests.cache.deciding.test_audits import be_another_model, settled_run
from tests.cache.keeping import PROMPT, assert_settles, keys_of, wait_for
from tests.cli.test_explain import SPACE, TOKENS, put_prompt, without_age
from tests.cli.test_explain import space_of as namespace_of
from tests.cli.test_remote_commands import seaweed, url_of, valkey_server
from tests.servers.process import LOCALHOST
from tests.servers.proxy import running_proxy

__all__ = ["make_host", "seaweed", "url_of", "valkey_server"]

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
        return self.open(wrap, record=str(self.journal), **options)

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
        wait_for(lambda: host.scheduler.lookup(request, 0) and host.pool.has_orders)
        go_away()
        assert host.admit(request) == 0
        host.finish(request)
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
    host.scheduler.policy.saw_compute(100_000, 1.0)  # this host has no model whose speed it sees
    if again:
        host.admit(host.add("asked", PROMPT))
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
        wait_for(lambda keys=keys: all(map(store.contains, keys)))
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


DECIDED: dict[Callable[[Engines], Any], Decided] = {
    absent: Decided({LookupMiss.ABSENT: 40, LookupMiss.PARTIAL: 1}),
    the_end: Decided({LookupMiss.PARTIAL: 1}),
    shorter_than_a_chunk: Decided({LookupMiss.PARTIAL: 3}),
    damaged: Decided({LookupMiss.UNREADABLE: 24, LookupMiss.PARTIAL: 1}),
    away: Decided({LookupMiss.UNREADABLE: 40, LookupMiss.PARTIAL: 1}),
    stalled: Decided({LookupMiss.DEADLINE: 40, LookupMiss.PARTIAL: 1}),
    stalled_before: Decided({LookupMiss.SLOWER: 40, LookupMiss.PARTIAL: 1}, "0.000 s to compute"),
    small_pool: Decided({LookupMiss.NO_MEMORY: 16, LookupMiss.PARTIAL: 1}),
    audited: Decided({LookupMiss.AUDIT: 8, LookupMiss.PARTIAL: 1}),
    of_another_model: Decided({LookupMiss.OTHER_MODEL: 40, LookupMiss.PARTIAL: 1}),
    never_arrives: Decided({LookupMiss.NOT_PRODUCED: 40, LookupMiss.PARTIAL: 1}, "did not come"),
    made_by_another: Decided(
        {LookupMiss.OTHER_PRODUCER: 40, LookupMiss.PARTIAL: 1}, "its namespace is"
    ),
    a_clock_in_the_template: Decided(
        {LookupMiss.OTHER_TOKENS: 16, LookupMiss.PARTIAL: 1}, "it computed other tokens"
    ),
    not_cached: Decided({LookupMiss.NOT_CACHEABLE: 41}),
    unknown_adapter: Decided({LookupMiss.ADAPTER: 41}, "is being hashed"),
    no_load: Decided({LookupMiss.NOT_LOADING: 40, LookupMiss.PARTIAL: 1}),
    a_part: Decided({LookupMiss.NOT_LOADING: 24, LookupMiss.PARTIAL: 1}, "16 tokens at most"),
}


def test_no_reason_is_left_out():
    assert {reason for row in DECIDED.values() for reason in row.misses} == set(LookupMiss)
    states = {why for row in STATES.values() for why in row}
    # Servers say `not there`; the others have tests of their own below.
    assert states == set(Why) - {Why.NOT_THERE, Why.NO_ANSWER, Why.NOT_ASKED}


@pytest.mark.parametrize("happens", DECIDED, ids=lambda each: each.__name__)
def test_the_journal_of_an_engine_names_what_happened(run, make_host, url, kind, tmp_path, happens):
    journal = tmp_path / "journal"
    host = happens(Engines(make_host, url, kind, journal))
    host.scheduler.close()
    command = ["explain", "--journal", journal, "--request", "asked"]
    value = json.loads(run(*command, "--json", "-").out)
    misses, why = DECIDED[happens]
    (asked,) = value["requests"]
    assert asked["misses"] == misses
    assert why in asked["why"]
    assert bool(asked["why"]) == bool(why)
    hits = asked["num_tokens"] - sum(misses.values())
    assert sum(asked["hits"].values()) == hits
    assert set(asked["hits"]) <= {kind}
    assert {each["reason"]: each["means"] for each in value["reasons"]} == {
        reason: SENTENCES[reason] for reason in misses
    }
    shown = " ".join(run(*command).out.split())
    assert shown.startswith(f"{hits} of {asked['num_tokens']} tokens")
    assert all(reason in shown for reason in misses)


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


STATES: dict[Callable[[Prompt], dict[str, Any]], tuple[Why, ...]] = {
    as_it_is: (Why.HIT, Why.PARTIAL),
    one_token_less: (Why.HIT, Why.PARTIAL),
    two_tokens: (Why.PARTIAL,),
    other_from_the_second_chunk_on: (Why.HIT, Why.NEVER_STORED, Why.PARTIAL),
    made_room: (Why.EVICTED, Why.PARTIAL),
    verified: (Why.HIT, Why.QUARANTINED, Why.BEHIND, Why.PARTIAL),
    a_program_deleted: (Why.HIT, Why.DELETED, Why.BEHIND, Why.PARTIAL),
    removed_from_outside: (Why.HIT, Why.VANISHED, Why.BEHIND, Why.PARTIAL),
    overwritten: (Why.HIT, Why.UNREADABLE, Why.BEHIND, Why.PARTIAL),
    of_a_tenant: (Why.OTHER_NAMESPACE,),
    with_a_salt: (Why.OTHER_KEYS,),
}
"""What a directory says; where only one is given, it is the reason of the whole prompt."""

UNKNOWN_TO_SERVERS = (Why.NEVER_STORED, Why.EVICTED, Why.DELETED, Why.QUARANTINED, Why.VANISHED)
"""A server forgets without a note: of all these it says `not there`."""


@pytest.fixture
def ask(run, tmp_path):
    """The answer about a prompt, as JSON; the table says the same."""
    file = tmp_path / "tokens.json"

    def call(url: str, space=SPACE, tokens=TOKENS, options=()) -> dict[str, Any]:
        file.write_text(json.dumps(list(tokens)))
        command = ["explain", url, "--namespace", space.digest.hex(), "--tokens", file, *options]
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
    said = [
        Why.NOT_THERE if kind != "file" and why in UNKNOWN_TO_SERVERS else why
        for why in STATES[happens]
    ]
    if len(said) == 1:
        assert value["reason"] == said[0]
        if happens is of_a_tenant:
            differs = {"tenant": {"there": "", "here": "team-a"}}
            assert value["elsewhere"]["differs"] == differs
            assert value["elsewhere"]["namespace"] == SPACE.digest.hex()
        return
    chunks = value["namespaces"][0]["chunks"]
    assert [each["why"] for each in chunks] == said
    if happens is verified:
        known = "bad_leaf" if kind == "file" else "was stored before: later chunks are there"
        assert chunks[1]["detail"] == known
    assert value["reason"] == next(why for why in said if why is not Why.HIT)


def test_a_store_that_goes_away_is_asked_no_further(url, kind):
    keys = put_prompt(url)

    class GoesAway(WrapperStore):
        def of(self, namespace):
            return GoesAway(self.inner.of(namespace))

        def read(self, key, ranges, deadline=NO_DEADLINE):
            if key == keys[1]:
                raise StoreError("away")
            assert key == keys[0]
            return super().read(key, ranges, deadline)

    with GoesAway(open_one(url, Opening(namespace=SPACE.digest))) as store:
        search = PromptSearch(store, TOKENS)
        answer = search.answer([Space(SPACE, {})], list)
    assert [(each.why, each.detail) for each in answer.found[0].runs] == [
        (Why.HIT, kind),
        (Why.NO_ANSWER, "away"),
        (Why.NOT_ASKED, ""),
        (Why.PARTIAL, ""),
    ]


def test_a_tier_that_is_away_is_named(run, url, kind, tmp_path):
    near = (tmp_path / "near").as_uri()
    put_prompt(near, tokens=TOKENS[:14])
    put_prompt(url)
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(list(TOKENS)))
    with going_away(url) as (far, go_away):
        command = ["explain", near, far, "--namespace", SPACE.digest.hex(), "--tokens", file]
        assert run(*command).out.startswith("28 of 30 tokens would hit")
        go_away()
        for tiers, number in (([near, far], 2), ([far, near], 1)):
            ran = run("explain", *tiers, *command[3:])
            assert ran.code == 0
            lines = ran.out.splitlines()
            start = "14 of 30 tokens would hit; the chunk at token 15 could not be asked for: "
            assert lines[0].startswith(f"{start}tier {number}, {far.partition('?')[0]}: away: ")
            cause = "does not exist" if kind == "file" else r"valkey server|s3://records: "
            said, note = "".join(ran.out.split()), "".join(lines[0].removeprefix(start).split())
            said = said.partition("namespace")[2]  # behind the first line; wrapped
            assert re.search(cause.replace(" ", ""), said)
            assert note.removesuffix("...") in said
            assert "no answer" in ran.out
            assert "not asked" not in ran.out
        assert run("explain", far, far, *command[3:]).code == 2


def test_tiers_that_answer_are_asked_on(tmp_path):
    near, other = (tmp_path / "near").as_uri(), namespace_of("b")
    put_prompt(near, tokens=TOKENS[:7])
    put_prompt(near, other, tokens=TOKENS[:21])
    with open_one(near) as store:
        tiers = TierStores({"near": store, "far": store}, {"far": "gone"})
        found = PromptSearch(tiers, TOKENS).answer([Space(SPACE, {}), Space(other, {})], list).found
    assert [each.hit_tokens for each in found] == [21, 7]
    assert {each.first_miss.why for each in found} == {Why.NO_ANSWER}
