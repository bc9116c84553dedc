"""Prompts of a model with recurrent states, through both roles: what one engine leaves, another
goes on from. The host raises if it computes on a wrong state."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.handover import read_handover
from kvferry.contract.messages import LookupMiss
from kvferry.errors import ContractError
from kvferry.keys import ChunkKeys, state_key
from kvferry.store.servers.remote import RemoteStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import Handover, KVGroup, KVSource
from tests.cache.hosts import CacheHost
from tests.servers.process import LOCALHOST, free_ports
from tests.state_models import MODELS
from tests.store.servers.remote_client import DictClient

BLOCK = 32
GROUP = KVGroup(num_layers=2, num_kv_heads=2, content_size=32, dtype="float32", block_size=BLOCK)
KIND = "Mamba-2"
PROMPT = list(range(7, 7 + 4 * BLOCK + 9))


@pytest.fixture
def start(make_host: Any, tmp_path: Path) -> Callable[..., CacheHost]:
    """Factory of hosts of a model with recurrent states, over one directory."""

    def start(kind: str = KIND, tp: int = 1, **options: Any) -> CacheHost:
        options.setdefault("store", f"file://{tmp_path}/store")
        shape = {"groups": (GROUP,), "states": MODELS[kind], "world_size": tp}
        return make_host(**shape, multi_process=True, chunk_tokens=BLOCK, **options)

    return start


def serve(host: CacheHost, name: str, prompt: list[int], budget: int = BLOCK) -> int:
    """Serve a prompt. Return its hit."""
    return host.run(name, prompt, budget=budget).num_external_tokens


def store(start: Any, *prompts: list[int], budget: int = BLOCK, **options: Any) -> CacheHost:
    host = start(**options)
    for number, prompt in enumerate(prompts):
        serve(host, f"writer {number}", prompt, budget)
        host.settle()
    return host


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_another_engine_goes_on_from_kv_and_state(start, kind, writers, readers):
    store(start, PROMPT, kind=kind, tp=writers)
    reader = start(kind=kind, tp=readers)
    assert serve(reader, "reader", PROMPT) == 4 * BLOCK


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])
def test_a_hit_ends_where_the_last_state_of_a_prompt_is(start, length):
    prompt = PROMPT[:length]
    store(start, prompt)
    assert serve(start(), "reader", prompt) == (length - 1) // BLOCK * BLOCK


def test_it_hits_in_memory_as_well(start):
    host = store(start, PROMPT)
    assert serve(host, "again", PROMPT) == 4 * BLOCK
    host.scheduler.pool.clear()
    assert serve(host, "from the store", PROMPT) == 4 * BLOCK


def test_prompts_that_begin_alike_hit_from_the_third_on(start):
    """The first leaves a state at its end. The second finds KV and no state where they part, and
    has the host keep one there."""
    shared, at_once = PROMPT[: 2 * BLOCK + 5], 10**9
    prompts = [[*shared, *range(at, at + 2 * BLOCK)] for at in (1000, 2000, 3000)]
    store(start, prompts[0], budget=at_once)
    second = start()
    request = second.add("second", prompts[1])
    assert second.admit(request) == 0
    assert second.scheduler.requests.by_id["second"].answer.misses[LookupMiss.NO_STATE] > 0
    assert second.observer["miss_absent"] == 0, "no state that the store lacks is fetched"
    second.prefill(request, budget=at_once)
    second.finish(request)
    second.settle()
    assert serve(start(), "third", prompts[2], at_once) == 2 * BLOCK


def test_states_take_no_more_room_than_kv_but_at_the_end_of_a_prompt(start):
    prompt = list(range(7, 7 + 12 * BLOCK + 9))
    host = store(start, prompt)
    parts = host.parts[0].context.states.num_parts
    assert parts == 2
    state_bytes = parts * host.parts[0].schema.record_bytes
    # Of twelve steps that end with a block.
    assert host.observer["saved_state_bytes"] == 6 * state_bytes
    assert host.observer["put_stored"] == 12 + 6 * parts
    assert host.observer["loaded_state_bytes"] == 0
    serve(host, "again", [*prompt, *range(900, 900 + 3 * BLOCK)])
    host.settle()
    assert host.observer["saved_state_bytes"] == 8 * state_bytes
    assert host.observer["put_stored"] == 15 + 8 * parts
    assert host.observer["loaded_state_bytes"] == state_bytes


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {"removed": Path.unlink, "truncated": truncate, "one bit is other": flip}


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_state_of_which_a_part_is_damaged_is_none(start, tmp_path, damage, part):
    writer = store(start, PROMPT)
    keys = ChunkKeys(writer.parts[0].identity.first, BLOCK)
    keys.extend(PROMPT)
    name = state_key(keys.keys[-1], part).hex()
    (path,) = (tmp_path / "store").rglob(f"*{name}*")
    DAMAGES[damage](path)
    reader = start()
    assert serve(reader, "reader", PROMPT) == 2 * BLOCK, "the state before"
    reader.settle()
    assert serve(start(), "once it was saved again", PROMPT) == 4 * BLOCK


def test_a_state_of_other_dtypes_is_another_models(start):
    store(start, PROMPT, kind="Mamba-2")
    assert serve(start(kind="Mamba-2 in one dtype"), "reader", PROMPT) == 0


def test_a_request_that_lost_its_blocks_goes_on_from_its_own_states(start):
    host = start(save_generated=True)
    request = host.add("r", PROMPT[: 2 * BLOCK])
    assert host.admit(request) == 0
    host.prefill(request, budget=BLOCK)
    for token in range(3 * BLOCK):
        request.all_token_ids.append(500 + token)
        host.prefill(request, budget=BLOCK)
    host.preempt(request)
    host.settle()
    # Saved after one block, the last of the prompt, then each with as many bytes of KV: after 3, 5.
    assert host.admit(request) == 3 * BLOCK
    host.prefill(request, budget=BLOCK)
    host.finish(request)


@pytest.mark.parametrize("audit", ["off", "first"])
def test_a_request_that_is_preempted_and_admitted_in_one_step_gets_its_load(start, audit):
    store(start, PROMPT)
    host = start(audit=audit, draw=lambda: 0.9)
    request = host.add("r", PROMPT)
    hit = host.admit(request)
    assert hit == (4 if audit == "off" else 2) * BLOCK
    host.lose(request)  # before the chunk to compare is computed
    assert host.admit(request) == hit
    assert host.failed == set()
    host.prefill(request, budget=BLOCK)
    host.finish(request)
    host.settle()
    assert host.observer["audits"] == (audit != "off")


OVERWRITTEN = {"KV is overwritten": slice(1), "a state is overwritten": slice(-1, None)}


@pytest.mark.parametrize("where", [*OVERWRITTEN, "another epoch begins"])
def test_a_load_that_fails_is_computed_and_ends_nothing(start, where):
    store(start, PROMPT)
    host = start()
    role = host.scheduler
    host.scheduler = GuardedScheduler(role, block_size=BLOCK, strict=True, checks_host=False)
    request = host.add("r", PROMPT)
    before = host.scheduler.update_after_alloc

    def fail(view, block_ids, num_external_tokens):
        before(view, block_ids, num_external_tokens)
        if num_external_tokens and where == "another epoch begins":
            host.scheduler.reset()
        for rank in host.ranks if num_external_tokens else ():
            load, _ = role.requests.by_id["r"].load or (None, None)
            for chunk in load.chunks[OVERWRITTEN[where]] if load is not None else ():
                rank.worker.io.overwrite(chunk.slot)

    host.scheduler.update_after_alloc = fail
    host.admit(request)
    assert host.failed == {"r"}
    assert request.num_computed_tokens == 0
    host.scheduler.update_after_alloc = before
    assert host.admit(request) == 0, "it gets no further hit, or this went on for ever"
    host.prefill(request, budget=BLOCK)
    host.finish(request)


def test_a_host_that_takes_a_part_of_a_hit_has_broken_the_contract(start):
    """There is no state at the end of the part."""
    store(start, PROMPT)
    host = start()
    request = host.add("r", PROMPT)
    take = host.scheduler.update_after_alloc
    host.scheduler.update_after_alloc = lambda view, blocks, external: take(
        view, blocks, min(external, 2 * BLOCK)
    )
    with pytest.raises(ContractError, match="never promised"):
        host.admit(request)


def test_a_host_that_shows_no_states_has_nothing_of_them_saved(start):
    host = start()
    request = host.add("r", PROMPT)
    host.admit(request)
    host.offer = lambda *_: ()
    host.prefill(request, budget=BLOCK)
    host.finish(request)
    host.settle()
    assert host.observer["put_stored"] == 4
    assert serve(start(), "reader", PROMPT) == 0


def test_a_host_that_names_no_block_of_a_table_has_nothing_more_saved(start, caplog):
    host = start()
    request = host.add("r", PROMPT)
    host.admit(request)
    offer = host.offer
    host.offer = lambda *of: [
        each._replace(blocks={1: each.blocks[1]}, is_kept=True) for each in offer(*of)
    ]
    host.prefill(request, budget=BLOCK)
    assert "and none of table 2" in caplog.text
    host.finish(request)
    host.settle()


def test_a_server_is_asked_for_states_with_the_first_question(start):
    client = DictClient()
    writer = start(store=RemoteStore("memory://server", client))
    serve(writer, "writer", PROMPT)
    writer.settle()
    writer.close()
    client = DictClient(client.values)
    # By its clock no answer is late.
    clock = FakeClock()
    reader = start(store=RemoteStore("memory://server", client, clock=clock), clock=clock)
    assert serve(reader, "reader", PROMPT) == 4 * BLOCK


COME = {
    "states after chunks": (("chunks", "states"), 4 * BLOCK),
    "a part of the state later": (("chunks", "first parts", "second parts"), 4 * BLOCK),
    "states before chunks": (("states", "chunks"), 4 * BLOCK),
    "no state": (("chunks",), 0),
    "a part of a state": (("chunks", "first parts"), 0),
}
"""What a prefill in another engine leaves in a server by and by, and the hit of the decode."""


@pytest.mark.parametrize("case", COME)
def test_a_decode_waits_for_the_last_state_of_a_prefill_as_for_its_chunks(start, case):
    order, hit = COME[case]
    client = DictClient()
    writer = start(store=RemoteStore("memory://server", client))
    serve(writer, "writer", PROMPT)
    writer.settle()
    keys = ChunkKeys(writer.parts[0].identity.first, BLOCK)
    keys.extend(PROMPT)
    writer.close()
    parts = [{state_key(key, part).hex() for key in keys.keys} for part in range(2)]
    names = {
        "first parts": parts[0],
        "second parts": parts[1],
        "states": parts[0] | parts[1],
        "chunks": {key.hex() for key in keys.keys},
    }
    clock, here = FakeClock(), DictClient()
    store = RemoteStore("memory://server", here, clock=clock)
    reader = start(store=store, clock=clock)
    source = KVSource(waits=True, num_tokens=len(PROMPT))
    request = reader.add("reader", PROMPT, handover=Handover(source=source))

    def is_quiet() -> bool:
        reader.step([])
        return not (store._keys._asked or reader.scheduler.pool.is_filling)

    def waits() -> bool:
        wait_until(is_quiet, "no question and no read is under way, so time may go on")
        clock.advance(0.02)
        return reader.scheduler.lookup(request, 0).num_tokens is None

    for what in order:
        assert all(waits() for _ in range(5)), "for what has not come"
        here.values |= {
            name: value
            for name, value in client.values.items()
            if any(each in name for each in names[what])
        }
    if not hit:
        assert all(waits() for _ in range(5)), "for what has not come"
    until = clock() + 1.0
    wait_until(lambda: not waits(), "it waits no longer", interval=0.0)
    assert clock() < until, "states come soon after chunks, or not at all"
    assert reader.admit(request) == hit
    reader.prefill(request, budget=BLOCK)


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 2)])
def test_a_decode_reads_kv_and_state_from_the_memory_of_its_prefill(start, writers, readers):
    (port,) = free_ports(1)
    nowhere = f"peer://{LOCALHOST}:1"
    prefill = start(tp=writers, store=nowhere, serve=f"{LOCALHOST}:{port}")
    request = prefill.add("r", PROMPT, handover=Handover(gives=True, answers=True))
    assert prefill.admit(request) == 0
    prefill.prefill(request, budget=BLOCK)
    handover = read_handover(prefill.finish(request))
    prefill.settle()
    decode = start(tp=readers, store=f"peer://{LOCALHOST}:{port}")
    request = decode.add("r", PROMPT, handover=handover)
    assert decode.admit(request) == 4 * BLOCK
    decode.prefill(request, budget=BLOCK)


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.sweep) for n in range(12, 200))]
)
def test_prompts_of_any_schedule_are_right(start, seed):
    """Requests of common beginnings, in steps of any length, which lose their blocks and wait for
    each other's chunks in a pool of a few slots. One of the two hosts plans a step before it has
    the output of the last one; hits are audited."""
    source = random.Random(seed)
    slot = 1 << 15
    hosts = [
        start(
            memory_bytes=source.choice([24, 40, 200]) * slot,
            in_flight=in_flight,
            audit=0.3,
            draw=source.random,
        )
        for in_flight in (1, 2)
    ]
    beginnings = [[at * 400 + token for token in range(3 * BLOCK)] for at in range(2)]
    hits = 0
    for number in range(14):
        host = source.choice(hosts)
        begin = source.choice(beginnings)[: source.randrange(1, 3 * BLOCK)]
        tail = source.choice([0, 5000])
        prompt = [*begin, *range(tail, tail + source.randrange(1, 3 * BLOCK))]
        request = host.add(f"r{number}", prompt)
        hits += host.admit(request)
        host.prefill(request, budget=source.choice([BLOCK, 2 * BLOCK, 10**9]))
        if source.random() < 0.3:
            host.preempt(request)
            hits += host.admit(request)
            host.prefill(request, budget=BLOCK)
        host.finish(request)
        if source.random() < 0.5:
            host.settle()
    assert hits > 0
    for host in hosts:
        host.settle()
        assert host.observer["audit_mismatch"] == 0
        assert host.failed == set()
