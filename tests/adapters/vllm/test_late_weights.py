"""Weights that take longer to hash than an engine's start waits: it serves without the cache."""

from __future__ import annotations

import logging
import threading
from functools import partial
from itertools import count

import pytest

from kvferry.adapters.vllm import connector
from kvferry.cache.deciding.policy import PREFILL_TOKENS
from kvferry.cache.epoch import BEING_HASHED, CacheIdentity
from kvferry.errors import ConfigError
from kvferry.journal import journal_lines
from kvferry.testing.stores.hooks import PATIENCE_SECONDS, wait_until
from kvferry.v1 import late_weights
from kvferry.v1.late_weights import LateWeights
from tests.late import GatedWeights

from .released import Release, number, versions
from .versioned_config import NUM_TOKENS, make_config, options, prompt, whole_blocks
from .versioned_host import VersionedHost

pytestmark = pytest.mark.slow

SERVED = [version for version in versions() if number(version) >= (0, 11, 1)]
WHOLE = whole_blocks(NUM_TOKENS)


@pytest.fixture(params=[SERVED[0], SERVED[-1]])
def release(request):
    return Release(request.param)


@pytest.fixture
def gate():
    """Hashing of late halves goes on once this is set."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def late(release, plugin, model, tmp_path, gate, monkeypatch):
    """A factory of engines whose halves of some numbers are late; the scheduler's half is 0, and
    those of the ranks follow. `found` stands for what such a half finds."""
    made = []

    def make(*halves, world=1, stages=1, found=None, in_multi=False, **extra):
        numbers = count()

        def weights():
            return GatedWeights(gate, found) if next(numbers) in halves else LateWeights()

        extra = options(tmp_path, **extra)
        config = make_config(release, model, world=world, stages=stages, extra=extra)
        with monkeypatch.context() as patch:
            patch.setattr(late_weights, "WEIGHTS_SECONDS", PATIENCE_SECONDS)
            patch.setattr(connector, "LateWeights", weights)
            made.append(VersionedHost(release, plugin.KVFerryConnector, config, in_multi=in_multi))
        return made[-1]

    yield make
    gate.set()
    for host in made:
        host.shutdown()


def become_known(host):
    for half in (host.scheduler, *host.workers):
        if isinstance(half._weights, GatedWeights):
            half._weights.become_known()
            identity = half._cache.identity
            wait_until(partial(is_told, identity), "the name is known, or that there is none")


def is_told(identity):
    return identity.state.why != BEING_HASHED or identity._first.done()


def take_up(host):
    """Hash the weights in all halves, and run a request, at which they look. Stores open then."""
    become_known(host)
    assert run(host, "takes up", prompt(start=3)) == 0
    for half in (host.scheduler, *host.workers):
        wait_until(partial(is_open, half._cache.store), "the store is open")


def is_open(store):
    return all(tier.state == "up" for tier in store.tiers())


def run(host, name, tokens):
    request = host.run(name, tokens)
    host.settle()
    host.rest_until_saved()
    return request.hit


def records(tmp_path):
    return [path for path in (tmp_path / "store").rglob("*.safetensors") if path.is_file()]


CASES = [  # ranks, halves that are late, whether vLLM's `MultiConnector` has the handshake
    (1, (0, 1), False),
    (1, (0,), False),
    (1, (1,), False),
    (1, (0, 1), True),
    (1, (1,), True),
    (2, (0, 1, 2), False),
    (2, (2,), False),
    (2, (0, 1), True),
]


@pytest.mark.parametrize(("world", "halves", "in_multi"), CASES)
def test_nothing_is_cached_until_every_half_knows_the_weights_and_all_afterwards(
    late, engine, tmp_path, world, halves, in_multi
):
    host = late(*halves, world=world, in_multi=in_multi)
    # One is so long that its step is timed: then ranks report that know the weights already.
    for num_tokens in (NUM_TOKENS, NUM_TOKENS, PREFILL_TOKENS):
        assert run(host, f"early {num_tokens}", prompt(count=num_tokens)) == 0
    assert records(tmp_path) == []
    take_up(host)
    assert run(host, "first", prompt(start=2)) == 0
    assert run(host, "second", prompt(start=2)) == WHOLE
    assert records(tmp_path)
    host.shutdown()
    # Whoever knew the weights from the start has the same namespace.
    other = engine(world=world)
    assert run(other, "elsewhere", prompt(start=2)) == WHOLE
    assert run(other, "early", prompt()) == 0


def answers(journal):
    return {line.request: line for _, line in journal_lines(journal)}


def test_requests_are_told_why_and_those_that_run_meanwhile_stay_uncached(late, tmp_path, caplog):
    journal = tmp_path / "requests.jsonl"
    host = late(0, 1, record=str(journal))
    running = host.add("running", prompt())
    host.admit(running)
    host.prefill(running, 8)
    take_up(host)
    # A new request makes the engine look.
    assert run(host, "cached", prompt(start=2)) == 0
    host.prefill(running)
    host.finish(running)
    assert run(host, "same", prompt()) == 0
    assert run(host, "again", prompt(start=2)) == WHOLE
    host.shutdown()
    told = answers(journal)
    assert told["running"].misses == told["running"].not_stored == {"hashing": NUM_TOKENS}
    assert told["running"].why == "the weights are being hashed"
    assert "hashing" not in {**told["cached"].misses, **told["same"].misses}
    assert host.counters["miss_tokens/hashing"] == NUM_TOKENS
    said = [record.getMessage() for record in caplog.records if "hashed" in record.getMessage()]
    assert len([line for line in said if "the engine starts" in line]) == 2  # for each half


def test_another_engine_s_prefill_is_neither_awaited_nor_promised(late):
    """An engine without a namespace computes, whoever else takes part."""
    host = late(0, 1)
    for name, params in HANDOVERS.items():
        request = host.add(name, prompt(), params)
        assert host.scheduler.get_num_new_matched_tokens(request.view, 0) == (0, False)
        host.admit(request)
        host.prefill(request)
        host.finish(request)
        host.settle()


HANDOVERS = {
    "producer": {"do_remote_decode": True},
    "consumer": {
        "do_remote_prefill": True,
        "kvferry": {"v": 1, "namespace": "0" * 16, "chunks": 5, "key": "00" * 32},
    },
}


FAULTS = [ConfigError("model.safetensors changes while it is read"), OSError(5, "broken mount")]


@pytest.mark.parametrize("fault", [*FAULTS, None], ids=str)
@pytest.mark.parametrize(
    ("world", "halves"), [(1, (0, 1)), (1, (0,)), (1, (1,)), (2, (1,)), (2, (2,))]
)
def test_weights_that_cannot_be_hashed_leave_an_engine_without_the_cache(
    late, engine, tmp_path, caplog, monkeypatch, world, halves, fault
):
    """Without a fault of the weights, what takes up their digest fails."""
    first = engine(world=world)
    assert [run(first, "stored", prompt()), run(first, "again", prompt())] == [0, WHOLE]
    first.shutdown()
    before = records(tmp_path)

    def found():
        if fault is not None:
            raise fault
        return b"w" * 32

    def broken(_identity, _weights):
        raise ArithmeticError("no namespace")

    monkeypatch.setattr(CacheIdentity, "name", broken)
    host = late(*halves, world=world, found=found)
    become_known(host)
    for start in (0, 2):  # stored and new
        assert run(host, f"from {start}", prompt(start=start)) == 0
    said = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == len(halves)
    assert all(str(fault or "broken") in each.getMessage() for each in said)
    assert all("\n" not in each.getMessage() for each in said)
    orders = watch_orders(host)
    for start in (0, 2):
        assert run(host, f"again from {start}", prompt(start=start)) == 0
    assert orders == []
    assert records(tmp_path) == before


def watch_orders(host):
    """Return a list that gets each plan from now on with something to read or to store."""
    orders, build = [], host.scheduler.build_connector_meta

    def watched(output):
        metadata = build(output)
        if metadata.plan.fetches or metadata.plan.saves:
            orders.append(metadata.plan)
        return metadata

    host.scheduler.build_connector_meta = watched
    return orders


@pytest.mark.parametrize(("world", "rank"), [(1, 1), (2, 2)])
def test_ranks_that_find_other_weights_serve_nothing(late, tmp_path, caplog, world, rank):
    host = late(rank, world=world, found=lambda: b"o" * 32)
    become_known(host)
    assert [run(host, f"{n}", prompt()) for n in range(3)] == [0, 0, 0]
    assert "another namespace" in caplog.text
    assert records(tmp_path) == []


def test_what_runs_after_a_reset_is_not_taken_for_the_weights_that_were_hashed(late, engine):
    host = late(0, 1)
    host.sleep()  # other weights may be loaded
    host.wake()
    take_up(host)
    assert [run(host, f"{n}", prompt()) for n in range(2)] == [0, WHOLE]
    host.shutdown()
    assert run(engine(), "elsewhere", prompt()) == 0


def test_an_engine_that_ends_while_it_hashes_leaves_nothing(late, tmp_path):
    before = set(threading.enumerate())
    host = late(0, 1)
    run(host, "early", prompt())
    host.shutdown()
    become_known(host)
    wait_until(lambda: before >= set(threading.enumerate()), "no thread is left")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("fault", [None, *FAULTS[:1]], ids=str)
def test_hashing_begins_while_vllm_measures_memory_and_compiles(
    release, plugin, model, tmp_path, monkeypatch, fault
):
    hashed = threading.Event()
    sources = []

    def digest(source, **_how):
        sources.append(source)
        hashed.set()
        if fault is not None:
            raise fault  # the connector tells it later

    monkeypatch.setattr(late_weights, "weights_digest", digest)
    late_weights._begin.cache_clear()
    before = set(threading.enumerate())
    config = make_config(release, model, extra=options(tmp_path))
    for _ in range(3):
        assert plugin.KVFerryConnector.get_required_kvcache_layout(config) is None
        assert hashed.wait(PATIENCE_SECONDS)
    wait_until(lambda: before >= set(threading.enumerate()), "the thread ended")
    assert sources == [model]


@pytest.mark.parametrize("release", [SERVED[-1]], indirect=True)
def test_pipeline_stages_take_up_late_weights_under_the_name_of_the_whole_model(late, caplog):
    caplog.set_level(logging.INFO)
    host = late(0, 1, 2, stages=2)
    assert run(host, "early", prompt()) == 0
    take_up(host)
    host.run("cold", prompt())
    host.settle()
    host.rest_until_saved()
    host.shutdown()
    assert run(late(stages=2), "warm", prompt()) == WHOLE
    start = "kvferry: namespace "
    said = [each.getMessage() for each in caplog.records if each.getMessage().startswith(start)]
    name = host.scheduler._cache.identity.first.hex()[:16]
    assert set(said) == {start + name}
