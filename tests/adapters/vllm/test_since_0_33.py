"""What hosts do since 0.33, also on earlier releases as far as they have it."""

from __future__ import annotations

import pytest

from .released import Release
from .versioned_config import NUM_TOKENS, prompt, whole_blocks
from .versioned_host import VersionedHost
from .versioned_kv import BLOCK


@pytest.fixture(params=["0.14.0", "0.32.0", "0.33.0"])
def release(request):
    return Release(request.param)


def num_pinned(host: VersionedHost) -> int:
    """Slots that a request holds."""
    return sum(slot.pins > 0 for slot in host.scheduler._half.role._role.pool._slots.values())


def test_an_engine_that_slept_stores_and_hits_again(release, plugin, engine):
    if release.has("supports_sleep_mode"):
        assert plugin.KVFerryConnector.supports_sleep_mode(None) is True
    for world in (1, 2):
        host = engine(world=world)
        host.run("before", prompt())
        host.settle()
        host.sleep()
        host.step([])
        host.wake()
        assert host.run("after", prompt()).hit == 0
        host.settle()
        host.rest_until_saved()
        assert host.run("again", prompt()).hit == whole_blocks(NUM_TOKENS)


def test_what_is_planned_while_the_memory_is_away_is_computed(release, engine):
    if not release.has("unregister_kv_caches"):
        return
    host = engine()
    [worker] = host.workers
    host.run("before", prompt())
    host.settle()
    host.rest_until_saved()
    request = host.add("r", prompt())
    assert host.admit(request) == whole_blocks(NUM_TOKENS)
    worker.unregister_kv_caches()
    failed = []
    host.scheduler.update_connector_output, update = (
        lambda output: (failed.extend(output.invalid_block_ids), update(output)),
        host.scheduler.update_connector_output,
    )
    host.step([(request, 1)])
    assert sorted(failed) == sorted(request.blocks[: whole_blocks(NUM_TOKENS) // BLOCK])
    worker.restore_kv_caches()
    host.finish(request)
    assert host.run("later", prompt(5)).hit == 0


@pytest.mark.parametrize("world", [1, 2])
def test_reports_of_a_failed_step_may_come_with_the_next(engine, world):
    host = engine(world=world)
    request = host.add("cold", prompt())
    host.admit(request)
    while request.num_computed < NUM_TOKENS:
        host.step([(request, min(7, NUM_TOKENS - request.num_computed))], fails=True)
        host.step([])
    host.finish(request)
    host.step([], fails=True)
    host.settle()
    host.rest_until_saved()
    assert num_pinned(host) == 0
    assert host.run("warm", prompt()).hit == whole_blocks(NUM_TOKENS)


@pytest.mark.parametrize(("limit", "steps_before"), [(0, 0), (BLOCK, 3), (NUM_TOKENS, 3)])
@pytest.mark.parametrize("audit", ["off", "first"])
def test_a_host_may_take_less_of_a_hit_and_later(engine, limit, steps_before, audit):
    first = engine()
    first.run("cold", prompt())
    first.settle()
    first.shutdown()
    host = engine(extra={"audit": audit})
    request = host.add("short", prompt())
    assert host.admit(request, limit=limit, steps_before=steps_before) <= limit
    host.prefill(request, budget=7)
    host.finish(request)
    host.settle()
    host.rest_until_saved()
    assert num_pinned(host) == 0
    assert not {"hook_failed", "contract_violation", "audit_failed"} & host.counters.keys()
    assert host.run("warm", prompt()).hit == whole_blocks(NUM_TOKENS) or audit == "first"


@pytest.mark.parametrize("audit", ["off", "first"])
def test_a_host_that_speculates_saves_after_the_report(engine, audit):
    first = engine(saves_last=True)
    first.run("cold", prompt(), budget=7, generate=3)
    first.settle()
    first.shutdown()
    host = engine(saves_last=True, extra={"audit": audit})
    host.run("warm", prompt(), budget=7)
    host.settle()
    host.rest_until_saved()
    assert num_pinned(host) == 0
    assert host.counters.get("audits", 0) == (audit == "first")
    assert "audit_failed" not in host.counters
    assert host.run("again", prompt()).hit == whole_blocks(NUM_TOKENS) or audit == "first"
