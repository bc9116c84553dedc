"""Sessions: requests whose prompt grows, piece by piece, with items that come late."""

from __future__ import annotations

from itertools import product

import pytest

from kvferry.types import ExtraKeys, MultimodalItem

from .test_faults import PROMPT, lose_chunk, store_prompt

CHUNK = 8
PIECES = [list(range(100, 121)), list(range(200, 219)), list(range(300, 323))]
ANSWER = [7, 8, 9]
"""What the model says to each piece. With one token more, the first piece and its answer would fill
whole chunks: the token that the host takes back ends one."""


def image(digest):
    return MultimodalItem(digest=digest, offset=2, length=6)


def items_of(digest, number):
    """The items of each piece: an image in piece `number`, from 1; none if that is 0."""
    return [[image(digest)] if number == at else [] for at in (1, 2, 3)]


def answer(host, request, tokens=ANSWER):
    """Generate `tokens`; the last one is sampled and not computed, as when a request stops."""
    host.prefill(request)
    for token in tokens:
        request.all_token_ids.append(token)
        if token is not tokens[-1]:
            host.prefill(request, budget=1)


def converse(host, name, items, *, preempted=(), until=3):
    """Run a session of three pieces. `preempted` are the pieces in which it loses its blocks: as
    the piece begins ("begin"), and after two tokens of the answer ("answer")."""
    request = host.add(name, PIECES[0], extra_keys=ExtraKeys(items=tuple(items[0])))
    hits = [host.admit(request)]
    answer(host, request)
    for number in range(1, until):
        begins = ("begin", number + 1) in preempted
        hits.append(host.go_on(request, PIECES[number], items[number], preempted=begins))
        answer(host, request, ANSWER[:2])
        if ("answer", number + 1) in preempted:
            host.preempt(request)
            hits.append(host.admit(request))
            host.prefill(request)
    host.settle()
    return request, hits


TABLE = list(product(["text", 2, 3], [True, False], [(), [("begin", 3)], [("answer", 2)]]))


@pytest.mark.parametrize(("what", "generated", "preempted"), TABLE)
def test_a_session_is_stored_and_read_as_what_it_is(make_host, what, generated, preempted):
    """The host checks every byte of KV, of what is loaded and of what was there."""
    host = make_host(chunk_tokens=CHUNK, save_generated=generated)
    at = 0 if what == "text" else what
    first, _ = converse(host, "A", items_of("of A", at), preempted=preempted)
    second, hits = converse(host, "B", items_of("of B", at), preempted=preempted)
    host.forget_memory()
    for session in (first, second):
        computed = session.num_computed_tokens if generated else session.num_prompt_tokens
        tokens = session.all_token_ids[: session.num_prompt_tokens]
        later = host.run("later", [*tokens, 1], extra_keys=session.extra_keys)
        assert later.num_external_tokens == min(computed, len(tokens)) // CHUNK * CHUNK
    # What B read of A ends where the image stands.
    assert hits[0] == (len(PIECES[0]) - 1) // CHUNK * CHUNK
    for session in (first, second):
        host.finish(session)


def test_an_item_that_comes_late_changes_the_keys_of_the_prompt(make_host):
    host = make_host(chunk_tokens=CHUNK)
    host.run("without", PIECES[0])
    request = host.add("late", PIECES[0])
    assert host.admit(request) == 16
    request.extra_keys = ExtraKeys(items=(image("late"),))
    host.preempt(request)
    assert host.admit(request) == 0
    host.prefill(request)
    host.settle()
    assert host.run("same", PIECES[0], extra_keys=request.extra_keys).num_external_tokens == 16


def test_the_store_is_asked_for_what_a_session_became(make_host, monkeypatch):
    host = make_host(chunk_tokens=CHUNK)
    asked = []
    monkeypatch.setattr(host.parts[0].store, "probe", lambda keys: asked.append(list(keys)))
    converse(host, "A", items_of("of A", 0), preempted=[("begin", 2)], until=2)
    assert [len(keys) for keys in asked] == [2, (len(PIECES[0]) + 2 + len(PIECES[1])) // CHUNK]


def test_what_a_session_generates_is_stored_in_its_last_piece_too(make_host):
    host = make_host(chunk_tokens=CHUNK, save_generated=True)
    session, _ = converse(host, "A", items_of("of A", 2))
    answer(host, session, list(range(50, 70)))
    host.settle()
    later = host.run("later", session.all_token_ids, extra_keys=session.extra_keys)
    assert later.num_external_tokens == session.num_computed_tokens // CHUNK * CHUNK
    assert later.num_external_tokens > session.num_prompt_tokens


@pytest.mark.parametrize("generated", [True, False])
def test_the_token_that_a_session_takes_back_is_in_no_key(make_host, generated):
    host = make_host(chunk_tokens=CHUNK, save_generated=generated)
    request = host.admitted("A", PIECES[0])
    answer(host, request)
    assert len(request.all_token_ids) % CHUNK == 0
    host.step([])  # with the sampled token, the third chunk is whole
    host.preempt(request)
    host.admit(request)  # and has a key
    host.prefill(request, budget=len(request.all_token_ids) - 1 - request.num_computed_tokens)
    request.num_computed_tokens = len(request.all_token_ids) - 1
    host.go_on(request, PIECES[1])
    host.prefill(request)
    host.settle()
    host.forget_memory()
    later = host.run("later", [*request.all_token_ids, 1])
    assert later.num_external_tokens == len(request.all_token_ids) // CHUNK * CHUNK
    host.run("another", [*PIECES[0], *ANSWER, 1, 2])


@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("with_what", ["an item of none", "an adapter that lost its own"])
def test_a_session_without_an_identity_is_not_cached_from_then_on(make_host, with_what, generated):
    host = make_host(chunk_tokens=CHUNK, save_generated=generated)
    session, _ = converse(host, "A", items_of("of A", 0), until=2)
    stored = host.observer["put_stored"]
    if with_what == "an item of none":
        host.go_on(session, PIECES[2], [image("unknown")], cacheable=False)
    else:  # as it runs, between two steps
        session.extra_keys = ExtraKeys(cacheable=False)
    answer(host, session, list(range(50, 70)))
    host.preempt(session)
    assert host.admit(session) == 0
    host.prefill(session)
    host.settle()
    host.finish(session)
    assert host.observer["put_stored"] == stored
    assert host.pool.num_taken == 0


@pytest.mark.parametrize("cacheable", [True, False])
def test_a_session_that_grows_while_its_hit_is_fetched_lets_it_go(make_host, cacheable):
    host = make_host(chunk_tokens=CHUNK)
    converse(host, "A", items_of("of A", 0))
    host.forget_memory()
    request = host.add("B", PIECES[0])
    assert host.scheduler.lookup(request, 0).num_tokens is None
    request.all_token_ids = [*PIECES[0][:9], *PIECES[1]]
    request.num_prompt_tokens = len(request.all_token_ids)
    request.extra_keys = ExtraKeys(cacheable=cacheable)
    assert host.admit(request) == (CHUNK if cacheable else 0)
    host.prefill(request)
    host.settle()
    host.finish(request)
    assert host.pool.num_taken == 0


def test_a_session_on_blocks_of_a_failed_load_is_not_stored_before_it_has_others(make_host):
    store, keys = store_prompt(make_host)
    host = make_host(store=store)
    session = host.admitted("bystander", PIECES[0])
    host.step([session], tokens=4)
    failing = host.admitted("failing", PROMPT)
    lose_chunk(host, keys[1])
    host.step([failing, session], tokens=1)
    host.prefill(session)
    host.prefill(failing)
    host.go_on(session, PIECES[1])
    host.prefill(session)
    host.settle()
    assert host.observer["put_stored"] == 0
    host.go_on(session, PIECES[2], preempted=True)
    host.prefill(session)
    host.settle()
    assert host.observer["put_stored"] == len(session.all_token_ids) // CHUNK


def test_the_pieces_of_a_session_count_as_one_look_up(make_host):
    host = make_host(chunk_tokens=CHUNK)
    converse(host, "A", items_of("of A", 2))
    assert host.observer["requests_missed"] == 1
    assert host.observer["lookup_tokens"] == len(PIECES[0])
