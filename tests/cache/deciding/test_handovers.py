"""One engine prefills, another decodes, and a store that both share is all that is between them."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import example, given, settings

from benchmarks.host import HostRequest
from kvferry.adapters.vllm.connector import connector_options
from kvferry.contract.handover import read_handover
from kvferry.contract.spec import Mode
from kvferry.store.servers.remote import RemoteStore
from kvferry.testing.clock import FakeClock
from kvferry.types import ExtraKeys, KVGroup
from tests.cache.deciding.events import Events
from tests.cache.keeping import open_store
from tests.contract.test_handover import ANY_PARAMS
from tests.store.servers.remote_client import DictClient

CHUNK = 8
PROMPT = list(range(41))
ASKED = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
"""What proxies send to the engine that prefills."""


@pytest.fixture
def server():
    return DictClient()


@pytest.fixture
def make_engine(make_host):
    """A host with a client of its own of one server. Only the test moves its clock."""

    def make(client, clock=None, **options):
        clock = clock or FakeClock()
        store = RemoteStore("memory://server", client, clock=clock)
        return make_host(store=store, clock=clock, **options)

    return make


def prefill(host, prompt=PROMPT, params=ASKED, *, settles=True, name="prefill"):
    """The parameters of a prefill's answer."""
    request = host.admitted(name, prompt, handover=read_handover(params))
    host.prefill(request)
    request.all_token_ids.append(7)
    answer = host.finish(request)
    if settles:
        host.settle()
    return answer


def decode(host, params, prompt=PROMPT, name="decode", **how):
    request = host.run(name, prompt, handover=read_handover(params), **how)
    return request.num_external_tokens


# -- what the producer says -----------------------------------------------------------------------


def test_a_prefill_says_where_its_chunks_are(make_engine, server):
    host = make_engine(server)
    host.scheduler.reset()  # so the namespace is not the first one
    answer = prefill(host)
    stamp = answer.pop("kvferry")
    assert answer.pop("remote_engine_id")
    assert answer == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_request_id": "prefill",
        "remote_host": None,
        "remote_port": None,
        "remote_block_ids": [[]],
        "remote_num_tokens": 41,
        "tp_size": 1,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_mode": "pull",
        "remote_blocks_expiry_time": None,
    }
    keys = sorted(name.rpartition("/")[2] for name in server.values)
    assert stamp.pop("key") in keys
    namespace = host.scheduler.requests.namespace.hex()
    assert stamp == {"v": 1, "namespace": namespace[:16], "chunks": 5}


@pytest.mark.parametrize(
    "params",
    [None, {}, {"do_remote_decode": False}, {"do_remote_decode": 1}, {"remote_decoder": {}}, [1]],
)
def test_who_did_not_ask_is_told_nothing(make_engine, server, params):
    assert prefill(make_engine(server), params=params) is None


def test_a_prompt_shorter_than_a_chunk_has_an_answer_without_chunks(make_engine, server):
    answer = prefill(make_engine(server), [1, 2, 3])
    assert answer["kvferry"]["chunks"] == 0
    assert answer["kvferry"]["key"] is None
    host = make_engine(server)
    assert decode(host, answer, [1, 2, 3]) == 0
    assert host.observer["remote_prefills"] == 1
    assert host.observer["remote_prefills_computed"] == 0


def test_a_request_that_is_not_cached_has_no_answer(make_engine, server):
    host = make_engine(server)
    hidden = ExtraKeys(cacheable=False)
    request = host.admitted("r", PROMPT, extra_keys=hidden, handover=read_handover(ASKED))
    host.prefill(request)
    assert host.finish(request) is None


def test_what_is_held_and_no_longer_stored_is_stored_again(make_engine, server):
    """Another engine sees the store, not this engine's memory."""
    host = make_engine(server)
    host.run("before", PROMPT)
    host.settle()
    keys = set(server.values)
    server.values.clear()
    for name in keys:
        host.parts[0].store._keys.forget(bytes.fromhex(name.rpartition("/")[2]))
    request = host.add("prefill", PROMPT, handover=read_handover(ASKED))
    host.admit(request, num_local_tokens=40)
    answer = host.complete(request)
    host.settle()
    assert set(server.values) == keys
    assert decode(make_engine(server), answer) == 40


def test_a_chunk_that_found_no_slot_is_not_promised(make_engine, server):
    """The consumer does not wait for it."""
    host = make_engine(server, num_slots=2)
    answer = prefill(host)
    assert answer["kvferry"]["chunks"] < 5
    reader = make_engine(server)
    assert decode(reader, answer) == 8 * answer["kvferry"]["chunks"]


# -- what the consumer does -----------------------------------------------------------------------


def test_what_does_not_come_is_computed_after_the_deadline(make_engine, server, caplog):
    """Its producer was killed, after two chunks."""
    caplog.set_level(logging.INFO)
    prefill(make_engine(server), PROMPT[: 2 * CHUNK])
    clock = FakeClock()
    host = make_engine(server, clock)
    request = host.add("waiting", PROMPT, handover=read_handover({"do_remote_prefill": True}))
    while host.observer.snapshot().get("fetch_count", 0) < 2:
        assert host.scheduler.lookup(request, 0).num_tokens is None
        host.step([])
    clock.advance(5.1)  # `load_timeout_seconds`
    assert host.admit(request) == 2 * CHUNK
    host.prefill(request)
    assert host.observer["remote_prefills_computed"] == 1
    assert host.observer["miss_tokens/not_produced"] == 24
    [line] = [r.getMessage() for r in caplog.records if "another engine" in r.getMessage()][-1:]
    assert "not_produced" in line
    assert "the rest did not come" in line


NO_WAIT = {
    "another version": ({"v": 2}, "other_producer", "version 2"),
    "another model": ({"namespace": "0123456789abcdef"}, "other_producer", "0123456789abcdef"),
    "other tokens": ({"key": "ab" * 32}, "other_tokens", "other tokens"),
    "more chunks than there are": ({"chunks": 6}, "other_tokens", "other tokens"),
    "no stamp of ours": ({"v": "1"}, "other_producer", "version 0"),
}


@pytest.mark.parametrize("change", NO_WAIT)
def test_a_mismatch_is_a_miss_with_its_reason_and_without_a_wait(make_engine, change, caplog):
    caplog.set_level(logging.INFO)
    stamp, reason, words = NO_WAIT[change]
    answer = prefill(make_engine(DictClient()))
    answer["kvferry"] |= stamp
    host = make_engine(DictClient())
    assert decode(host, answer) == 0
    assert host.observer[f"miss_tokens/{reason}"] == 40
    assert any(words in record.getMessage() for record in caplog.records)


def test_the_journal_has_the_reason_and_the_log_one_line(make_engine, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    answer = prefill(make_engine(DictClient()))
    answer["kvferry"]["v"] = 2
    host = make_engine(DictClient(), record=str(tmp_path / "journal"))
    caplog.clear()
    request = host.admitted("decode", PROMPT, handover=read_handover(answer))
    host.preempt(request)
    host.admit(request)  # admitted again: it was logged
    host.complete(request)
    host.scheduler.close()
    line = json.loads((tmp_path / "journal").read_text())
    assert line["misses"] == {"other_producer": 40, "partial": 1}
    assert line["why"] == "its stamp has version 2, not 1"
    said = [each.getMessage() for each in caplog.records if "another engine" in each.getMessage()]
    assert said == [
        "request decode, prefilled by another engine: of 41 tokens 40 computed (other_producer), "
        "1 computed (partial); its stamp has version 2, not 1"
    ]


def test_the_blocks_of_another_kind_of_engine_are_not_waited_for(make_engine, server):
    nixl = {"do_remote_prefill": True, "remote_block_ids": [[3, 4, 5]], "remote_host": "h"}
    host = make_engine(server)
    assert decode(host, nixl) == 0
    assert host.observer["miss_tokens/other_producer"] == 40


def test_a_refused_request_starts_nothing(make_engine, server):
    """Hosts send a stub with the parameters of the request through the engine, and abort it."""
    answer = prefill(make_engine(server))
    client = DictClient(server.values)
    host = make_engine(client)
    stub = host.add("stub", [0], handover=read_handover(answer))
    host.scheduler.request_finished(stub, ())
    assert host.scheduler.is_idle
    assert not client.asked


# -- turns ----------------------------------------------------------------------------------------


def test_the_next_turn_finds_what_the_decode_generated(make_engine, server):
    answer = prefill(make_engine(server))
    decoder = make_engine(server, save_generated=True)
    request = decoder.admitted("decode", PROMPT, handover=read_handover(answer))
    decoder.prefill(request)
    for token in range(100, 124):
        request.all_token_ids.append(token)
        decoder.prefill(request, budget=1)
    request.all_token_ids.append(1)
    back = decoder.finish(request)
    decoder.settle()
    assert (back["do_remote_decode"], back["do_remote_prefill"]) == (True, False)
    assert back["kvferry"]["chunks"] == 8
    history = [*request.all_token_ids, *range(30)]
    prefiller = make_engine(server)
    second = prefiller.add("turn 2", history, handover=read_handover(back))
    assert prefiller.admit(second) == 64
    prefiller.prefill(second)
    assert prefiller.finish(second)["do_remote_prefill"] is True


def test_an_edited_history_is_computed_at_once(make_engine, server):
    answer = prefill(make_engine(server))
    edited = make_engine(server)
    back = {**answer, "do_remote_decode": True, "do_remote_prefill": False}
    assert decode(edited, back, [*PROMPT[:8], *range(50, 90)]) == 8
    assert edited.observer["miss_tokens/other_tokens"] == 36


# -- shapes ---------------------------------------------------------------------------------------

WINDOWED = tuple(
    KVGroup(
        num_layers=2, num_kv_heads=2, content_size=8, dtype="float32", block_size=4, window=window
    )
    for window in (None, 12)
)


@pytest.mark.parametrize("groups", [None, WINDOWED], ids=["full", "window"])
def test_several_ranks_and_a_directory(make_host, tmp_path, groups):
    """Two ranks prefill, one decodes, and nothing but a directory is between them."""
    stores = [open_store(tmp_path / "store") for _ in range(2)]
    writer = make_host(rank_stores=stores, store=stores[0], world_size=2, groups=groups)
    answer = prefill(writer)
    assert answer["tp_size"] == 2
    reader = make_host(store=open_store(tmp_path / "store"), groups=groups)
    assert decode(reader, answer) == 40


def test_two_engines_of_one_user_need_no_store_in_their_options(make_host, tmp_path, monkeypatch):
    """vLLM's connector gives both the same one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    producer = make_host(**connector_options(None), mode=Mode.WRITE)
    consumer = make_host(**connector_options(None), mode=Mode.READ, load_timeout_seconds=30.0)
    assert decode(consumer, prefill(producer)) == 40
    assert consumer.observer["hit_tokens/file"] == 40


# -- what clients write ---------------------------------------------------------------------------


@settings(max_examples=30)
@given(params=ANY_PARAMS)
# Those that stop or hang engines with NIXL's connector, and more.
@example(params={"do_remote_prefill": True})
@example(params={"do_remote_prefill": True, "remote_block_ids": []})
@example(params={"do_remote_prefill": True, "remote_block_ids": "abc", "remote_port": None})
@example(params={"do_remote_prefill": True, "remote_block_ids": [[]], "remote_engine_id": [1]})
@example(params={"do_remote_prefill": True, "do_remote_decode": True, "remote_num_tokens": "9"})
@example(params={"do_remote_prefill": True, "remote_num_tokens": 0})
@example(params={"remote_prefiller": {"remote_host": ["x"], "remote_port": -1}})
def test_parameters_of_any_form_end_in_an_answer(params):
    events = Events(None, "off", 0)
    request = HostRequest("1", [*PROMPT], len(PROMPT), handover=read_handover(params))
    events.requests.append(request)
    events.role.on_new_request(request)
    events.run(())
