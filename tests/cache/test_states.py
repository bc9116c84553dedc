"""Prompts of a model with recurrent states, through both roles: what one engine leaves, another
goes on from. The host raises if it computes on a wrong state."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.contract.handover import read_handover
from kvferry.contract.messages import LookupMiss
from kvferry.errors import ContractError
from kvferry.keys import ChunkKeys, state_key
from kvferry.store.servers.remote import RemoteStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import Handover, KVSource
from tests.cache.stateful import BLOCK, StatefulHost, StatefulHostRequest
from tests.servers.process import LOCALHOST, free_ports
from tests.state_models import MODELS
from tests.store.servers.remote_client import DictClient

KIND = "Mamba-2"
PROMPT = list(range(7, 7 + 4 * BLOCK + 9))


@pytest.fixture
def make_host(tmp_path: Path) -> Iterator[Any]:
    hosts: list[StatefulHost] = []

    def make(kind: str = KIND, tp: int = 1, **options: Any) -> StatefulHost:
        hosts.append(StatefulHost(f"file://{tmp_path}/store", kind, tp, **options))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def store(make_host: Any, *prompts: list[int], budget: int = BLOCK, **options: Any) -> StatefulHost:
    host = make_host(**options)
    for number, prompt in enumerate(prompts):
        host.run(f"writer {number}", prompt, budget)
        host.settle()
    return host


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 4), (4, 2)])
def test_another_engine_goes_on_from_kv_and_state(make_host, kind, writers, readers):
    store(make_host, PROMPT, kind=kind, tp=writers)
    reader = make_host(kind=kind, tp=readers)
    assert reader.run("reader", PROMPT) == 4 * BLOCK
    assert reader.observer["hook_failed"] == reader.observer["contract_violation"] == 0


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])
def test_a_hit_ends_where_the_last_state_of_a_prompt_is(make_host, length):
    prompt = PROMPT[:length]
    store(make_host, prompt)
    assert make_host().run("reader", prompt) == (length - 1) // BLOCK * BLOCK


def test_it_hits_in_memory_as_well(make_host):
    host = store(make_host, PROMPT)
    assert host.run("again", PROMPT) == 4 * BLOCK
    host.role.pool.clear()
    assert host.run("from the store", PROMPT) == 4 * BLOCK


def test_prompts_that_begin_alike_hit_from_the_third_on(make_host):
    """The first leaves a state at its end. The second finds KV and no state where they part, and
    has the host keep one there."""
    shared, at_once = PROMPT[: 2 * BLOCK + 5], 10**9
    prompts = [[*shared, *range(at, at + 2 * BLOCK)] for at in (1000, 2000, 3000)]
    store(make_host, prompts[0], budget=at_once)
    second = make_host()
    request = second.add("second", prompts[1])
    assert second.admit(request) == 0
    assert second.role.requests.by_id["second"].answer.misses[LookupMiss.NO_STATE] > 0
    assert second.observer["miss_absent"] == 0, "no state that the store lacks is fetched"
    second.prefill(request, at_once)
    second.finish(request)
    second.settle()
    assert make_host().run("third", prompts[2], at_once) == 2 * BLOCK


def test_states_take_no_more_room_than_kv_but_at_the_end_of_a_prompt(make_host):
    prompt = list(range(7, 7 + 12 * BLOCK + 9))
    host = store(make_host, prompt)
    parts = host.caches[0].context.states.num_parts
    assert parts == 2
    state_bytes = parts * host.caches[0].schema.record_bytes
    # Of twelve steps that end with a block.
    assert host.observer["saved_state_bytes"] == 6 * state_bytes
    assert host.observer["put_stored"] == 12 + 6 * parts
    assert host.observer["loaded_state_bytes"] == 0
    host.run("again", [*prompt, *range(900, 900 + 3 * BLOCK)])
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
def test_a_state_of_which_a_part_is_damaged_is_none(make_host, tmp_path, damage, part):
    writer = store(make_host, PROMPT)
    keys = ChunkKeys(writer.caches[0].identity.first, BLOCK)
    keys.extend(PROMPT)
    name = state_key(keys.keys[-1], part).hex()
    (path,) = (tmp_path / "store").rglob(f"*{name}*")
    DAMAGES[damage](path)
    reader = make_host()
    assert reader.run("reader", PROMPT) == 2 * BLOCK, "the state before"
    reader.settle()
    assert make_host().run("once it was saved again", PROMPT) == 4 * BLOCK


def test_a_state_of_other_dtypes_is_another_models(make_host):
    store(make_host, PROMPT, kind="Mamba-2")
    assert make_host(kind="Mamba-2 in one dtype").run("reader", PROMPT) == 0


def test_a_request_that_lost_its_blocks_goes_on_from_its_own_states(make_host):
    host = make_host(save_generated=True)
    request = host.add("r", PROMPT[: 2 * BLOCK])
    assert host.admit(request) == 0
    host.prefill(request)
    for token in range(3 * BLOCK):
        request.all_token_ids.append(500 + token)
        host.prefill(request)
    host.preempt(request)
    host.settle()
    # Saved after one block, the last of the prompt, then each with as many bytes of KV: after 3, 5.
    assert host.admit(request) == 3 * BLOCK
    host.prefill(request)
    host.finish(request)


@pytest.mark.parametrize("audit", ["off", "first"])
def test_a_request_that_is_preempted_and_admitted_in_one_step_gets_its_load(make_host, audit):
    store(make_host, PROMPT)
    host = make_host(audit=audit, draw=lambda: 0.9)
    request = host.add("r", PROMPT)
    hit = host.admit(request)
    assert hit == (4 if audit == "off" else 2) * BLOCK
    host.lose(request)  # before the chunk to compare is computed
    assert host.admit(request) == hit
    assert host.failed == set()
    host.prefill(request)
    host.finish(request)
    host.settle()
    assert host.observer["audits"] == (audit != "off")


OVERWRITTEN = {"KV is overwritten": slice(1), "a state is overwritten": slice(-1, None)}


@pytest.mark.parametrize("where", [*OVERWRITTEN, "another epoch begins"])
def test_a_load_that_fails_is_computed_and_ends_nothing(make_host, where):
    store(make_host, PROMPT)
    host = make_host()
    request = host.add("r", PROMPT)
    before = host.scheduler.update_after_alloc

    def fail(view, block_ids, num_external_tokens):
        before(view, block_ids, num_external_tokens)
        if num_external_tokens and where == "another epoch begins":
            host.scheduler.reset()
        for rank in host.ranks if num_external_tokens else ():
            load, _ = host.role.requests.by_id["r"].load or (None, None)
            for chunk in load.chunks[OVERWRITTEN[where]] if load is not None else ():
                rank.driver.role.io.overwrite(chunk.slot)

    host.scheduler.update_after_alloc = fail
    host.admit(request)
    assert host.failed == {"r"}
    assert request.num_computed_tokens == 0
    host.scheduler.update_after_alloc = before
    assert host.admit(request) == 0, "it gets no further hit, or this went on for ever"
    host.prefill(request)
    host.finish(request)


def test_a_host_that_takes_a_part_of_a_hit_has_broken_the_contract(make_host):
    """There is no state at the end of the part."""
    store(make_host, PROMPT)
    host = make_host()
    request = host.add("r", PROMPT)
    take = host.scheduler.update_after_alloc
    host.scheduler.update_after_alloc = lambda view, blocks, external: take(
        view, blocks, min(external, 2 * BLOCK)
    )
    with pytest.raises(ContractError, match="never promised"):
        host.admit(request)


def test_a_host_that_shows_no_states_has_nothing_of_them_saved(make_host):
    host = make_host()
    request = host.add("r", PROMPT)
    host.admit(request)
    host._grow = without_states(host._grow)
    host.prefill(request)
    host.finish(request)
    host.settle()
    assert host.observer["put_stored"] == 4
    assert make_host().run("reader", PROMPT) == 0


def without_states(grow: Any) -> Any:
    def grow_without(request: StatefulHostRequest, tokens: int) -> Any:
        move = grow(request, tokens)
        request.states = []
        return move

    return grow_without


def test_a_host_that_names_no_block_of_a_table_has_nothing_more_saved(make_host, caplog):
    host = make_host()
    request = host.add("r", PROMPT)
    host.admit(request)
    grow = host._grow

    def one_table(request: StatefulHostRequest, tokens: int) -> Any:
        move = grow(request, tokens)
        request.states = [
            each._replace(blocks={1: each.blocks[1]}, is_kept=True) for each in request.states
        ]
        return move

    host._grow = one_table
    host.prefill(request)
    assert "and none of table 2" in caplog.text
    host.finish(request)
    host.settle()


def test_a_server_is_asked_for_states_with_the_first_question():
    client = DictClient()
    writer = StatefulHost(RemoteStore("memory://server", client), KIND)
    writer.run("writer", PROMPT)
    writer.settle()
    writer.close()
    client = DictClient(client.values)
    # By its clock no answer is late.
    clock = FakeClock()
    reader = StatefulHost(RemoteStore("memory://server", client, clock=clock), KIND, clock=clock)
    assert reader.run("reader", PROMPT) == 4 * BLOCK
    reader.close()


COME = {
    "states after chunks": (("chunks", "states"), 4 * BLOCK),
    "a part of the state later": (("chunks", "first parts", "second parts"), 4 * BLOCK),
    "states before chunks": (("states", "chunks"), 4 * BLOCK),
    "no state": (("chunks",), 0),
    "a part of a state": (("chunks", "first parts"), 0),
}
"""What a prefill in another engine leaves in a server by and by, and the hit of the decode."""


@pytest.mark.parametrize("case", COME)
def test_a_decode_waits_for_the_last_state_of_a_prefill_as_for_its_chunks(case):
    order, hit = COME[case]
    client = DictClient()
    writer = StatefulHost(RemoteStore("memory://server", client), KIND)
    writer.run("writer", PROMPT)
    writer.settle()
    keys = ChunkKeys(writer.caches[0].identity.first, BLOCK)
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
    reader = StatefulHost(store, KIND, clock=clock)
    source = KVSource(waits=True, num_tokens=len(PROMPT))
    request = reader.add("reader", PROMPT, Handover(source=source))

    def is_quiet() -> bool:
        reader.step([])
        return not (store._keys._asked or reader.role.pool.is_filling)

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
    reader.prefill(request)
    reader.close()


@pytest.mark.parametrize(("writers", "readers"), [(1, 1), (2, 1), (1, 2)])
def test_a_decode_reads_kv_and_state_from_the_memory_of_its_prefill(writers, readers):
    (port,) = free_ports(1)
    nowhere = f"peer://{LOCALHOST}:1"
    prefill = StatefulHost(nowhere, KIND, writers, serve=f"{LOCALHOST}:{port}")
    request = prefill.add("r", PROMPT, Handover(gives=True, answers=True))
    assert prefill.admit(request) == 0
    prefill.prefill(request)
    handover = read_handover(prefill.finish(request))
    prefill.settle()
    decode = StatefulHost(f"peer://{LOCALHOST}:{port}", KIND, readers)
    request = decode.add("r", PROMPT, handover)
    assert decode.admit(request) == 4 * BLOCK
    decode.prefill(request)
    decode.close()
    prefill.close()


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(n, marks=pytest.mark.sweep) for n in range(12, 200))]
)
def test_prompts_of_any_schedule_are_right(make_host, seed):
    """Requests of common beginnings, in steps of any length, which lose their blocks and wait for
    each other's chunks in a pool of a few slots. One of the two hosts plans a step before it has
    the output of the last one; hits are audited."""
    source = random.Random(seed)
    slot = 1 << 15
    hosts = [
        make_host(
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
        host.prefill(request, source.choice([BLOCK, 2 * BLOCK, 10**9]))
        if source.random() < 0.3:
            host.preempt(request)
            hits += host.admit(request)
            host.prefill(request)
        host.finish(request)
        if source.random() < 0.5:
            host.settle()
    assert hits > 0
    for host in hosts:
        host.settle()
        assert host.observer["audit_mismatch"] == 0
        assert host.failed == set()
        assert host.observer["hook_failed"] == host.observer["contract_violation"] == 0
