"""Hits are checked against what the engine computes itself."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from kvferry.blocks.audit import compare
from kvferry.cache.messages import CacheMeta, RankReport
from kvferry.cache.moving.comparisons import Comparisons
from kvferry.contract.messages import LookupMiss, WorkerOutput
from kvferry.errors import ConfigError
from kvferry.store.base import Where
from kvferry.store.recordio import seal_record
from kvferry.testing.faults import FaultyStore, Gate, StallingStore
from kvferry.types import ExtraKeys
from tests.cache.hosts import make_groups
from tests.cache.keeping import (
    NUM_CHUNKS,
    PROMPT,
    assert_settles,
    keys_of,
    lose_chunk,
    open_store,
    wait_for,
)
from tests.cache.pools import held_keys
from tests.cache.windowed import group

CHUNK = 8
WHOLE = NUM_CHUNKS * CHUNK
SHORT = WHOLE - CHUNK


def be_another_model(host, ranks=None, larger_by=None):
    """Let a host compute other KV than every other host, until the function that is returned.
    `larger_by`: the part by which its KV is larger; None: it is altogether another."""
    patch = pytest.MonkeyPatch()
    for rank in ranks if ranks is not None else host.ranks:

        def values(layer, seeds, right=rank.values):
            if larger_by is None:
                return right(layer, seeds + 1)
            return right(layer, seeds) * (1 + larger_by)

        patch.setattr(rank, "values", values)
    return patch.undo


@pytest.fixture
def reader(make_host, directory):
    """Makes hosts in a process of their own: the prompt is stored, and not in memory."""

    def make(other=False, **options):
        host = make_host(store=open_store(directory), audit="first", **options)
        if other:
            be_another_model(host)
        return host

    return make


@pytest.fixture
def two_ranks(make_host, tmp_path):
    """Makes hosts of two ranks; the prompt is stored."""
    groups = make_groups(num_kv_heads=2)
    settled_run(make_host(groups=groups, store=open_store(tmp_path / "store")), "writer")

    def make(**options):
        ranks = [open_store(tmp_path / "store") for _ in range(2)]
        return make_host(
            store=ranks[0],
            rank_stores=ranks,
            groups=groups,
            world_size=2,
            audit="first",
            **options,
        )

    return make


def end(host, request=None):
    """End a request, if any, and take all reports."""
    if request is not None:
        host.finish(request)
    host.settle()
    assert_settles(host)


def settled_run(host, request_id, prompt=PROMPT, **options):
    """Run a prompt, and take all reports."""
    request = host.run(request_id, prompt, **options)
    end(host)
    return request


def unchecked_run(host, request_id, prompt, *, budget=10**9, num_local_tokens=0):
    """The hit of a prompt that is run to its end, whose KV may be wrong."""
    request = host.add(request_id, prompt)
    hit = host.admit(request, num_local_tokens=num_local_tokens)
    while left := len(prompt) - request.num_computed_tokens:
        host.step([request], tokens=min(budget, left))
    end(host, request)
    return hit


def counts(host):
    names = ("audits", "audit_mismatch", "audit_failed")
    return tuple(host.observer[name] for name in names)


# ---- the same model

LIMIT = 5e-5 * (128 / CHUNK) ** 0.5
"""Tolerance of bias for chunks as short as these. It is reached before that of the error."""


@pytest.mark.parametrize(
    ("part", "expected"), [(0.3, "passes"), (0.7, "is doubtful"), (1.3, "is a mismatch")]
)
def test_a_difference_that_is_nearly_a_mismatch_is_used_counted_and_told_once(
    make_host, directory, caplog, part, expected
):
    other = list(range(300, 341))
    settled_run(make_host(store=open_store(directory)), "other", other)
    host = make_host(store=open_store(directory), audit=1.0)
    be_another_model(host, larger_by=part * LIMIT)
    for number, prompt in enumerate((PROMPT, other)):
        unchecked_run(host, f"first {number}", prompt)
    is_mismatch = expected == "is a mismatch"
    assert counts(host) == ((0, 1, 0) if is_mismatch else (2, 0, 0))
    is_doubtful = expected == "is doubtful"
    assert host.observer["audit_doubtful"] == 2 * is_doubtful
    assert caplog.text.count("differs more than rounding did") == is_doubtful
    assert ("option audit" in caplog.text) == (expected != "passes")
    assert unchecked_run(host, "later", PROMPT) == (0 if is_mismatch else SHORT)


@pytest.mark.parametrize(
    ("quantized", "passes"), [(None, False), ("gptq", False), ("fp8", True), ("nvfp4", None)]
)
def test_how_a_model_computes_decides_what_rounding_is(
    make_host, tmp_path, caplog, quantized, passes
):
    """None: its hits are not audited."""
    config = {"model_type": "simulated", "quantization_config": {"quant_method": quantized}}
    config = {"config": config if quantized else {"model_type": "simulated"}}
    settled_run(make_host(store=open_store(tmp_path / "store"), **config), "writer")
    host = make_host(store=open_store(tmp_path / "store"), audit="first", **config)
    be_another_model(host, larger_by=0.1)
    hit = unchecked_run(host, "first", PROMPT)
    assert hit == (WHOLE if passes is None else SHORT)
    expected = {None: (0, 0, 0), True: (1, 0, 0), False: (0, 1, 0)}[passes]
    assert counts(host) == expected
    assert ("hits are not audited: this model rounds activations" in caplog.text) == (
        passes is None
    )


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("budget", [1, 3, 7, 10**9])
def test_the_first_hit_lacks_its_last_chunk_and_later_ones_are_whole(reader, budget, recomputes):
    host = reader(recomputes=recomputes)
    request = settled_run(host, "first", budget=budget)
    assert request.num_external_tokens == SHORT
    assert counts(host) == (1, 0, 0)
    assert not host.invalid_block_ids
    assert host.observer["miss_tokens/audit"] == CHUNK
    host.forget_memory()
    for number in range(3):
        assert settled_run(host, f"later {number}").num_external_tokens == WHOLE
    assert counts(host) == (1, 0, 0)
    assert host.observer["put_stored"] == 0


def test_hits_that_begin_before_the_first_audit_ended_are_audited_too(reader):
    host = reader()
    requests = [host.add(name, PROMPT) for name in "abc"]
    assert [host.admit(each) for each in requests] == [SHORT] * 3
    host.step(requests, tokens=1)
    for each in requests:
        host.complete(each)
    end(host)
    assert counts(host) == (3, 0, 0)
    assert settled_run(host, "later").num_external_tokens == WHOLE


@pytest.mark.parametrize(
    ("audit", "expected"),
    [("first", 1), (0, 1), (0.0, 1), (1, 3), (1.0, 3), ("off", 0), ("0.0", 1), ("1", 3)],
)
def test_the_option_says_how_many_hits_are_audited(make_host, directory, audit, expected):
    host = make_host(store=open_store(directory), audit=audit)
    for number in range(3):
        settled_run(host, f"{number}")
    assert counts(host) == (expected, 0, 0)


def test_a_rate_audits_that_part_of_the_hits(make_host, directory):
    draws = iter([0.99, 0.2, 0.3])
    host = make_host(store=open_store(directory), audit=0.25, draw=lambda: next(draws))
    settled_run(host, "first")
    assert [host.scheduler.audits.draw() for _ in range(2)] == [0.8, None]


@pytest.mark.parametrize("audit", ["always", "", -0.1, 1.1, float("nan"), 2, True, None, "nan"])
def test_other_values_are_refused_in_one_line(make_host, audit):
    with pytest.raises(ConfigError, match=r"audit") as refused:
        make_host(audit=audit)
    assert "\n" not in str(refused.value)


def test_memory_for_one_chunk_is_refused_unless_nothing_is_audited(make_host):
    with pytest.raises(ConfigError, match="smaller than two chunks"):
        make_host(audit="first", num_slots=1)
    make_host(audit="off", num_slots=1)


# ---- another model


SECOND = list(range(200, 241))
THIRD = list(range(300, 341))


@pytest.fixture
def store_prompt(make_host, directory):
    """Stores a prompt, with the KV of another model if it is to be wrong."""

    def store(prompt, *, wrong=False):
        host = make_host(store=open_store(directory), audit="off")
        if wrong:
            be_another_model(host)
        assert settled_run(host, "stores", prompt).num_external_tokens == 0

    return store


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("budget", [7, 10**9])
def test_after_a_mismatch_nothing_is_read_or_written(
    reader, store_prompt, caplog, budget, recomputes
):
    store_prompt(SECOND)
    host = reader(other=True, recomputes=recomputes)
    with caplog.at_level(logging.WARNING):
        if recomputes:
            settled_run(host, "first", budget=budget)  # computed again: all of its KV is checked
            assert host.invalid_block_ids
        else:
            assert unchecked_run(host, "first", PROMPT, budget=budget) == SHORT
            assert not host.invalid_block_ids
        assert host.scheduler.identity.state.miss is LookupMiss.OTHER_MODEL
        for prompt in (PROMPT, SECOND, THIRD, THIRD):
            assert settled_run(host, "later", prompt).num_external_tokens == 0
    assert counts(host) == (0, 1, 0)
    assert host.observer["put_stored"] == 0
    assert host.observer["miss_tokens/other_model"] > 0
    [said] = [record.message for record in caplog.records if "other KV" in record.message]
    *right, bad = keys_of(host, PROMPT)
    store = host.scheduler.context.store
    for part in (f"record {bad.hex()} of {store.url}", "weights_version", "taken out"):
        assert part in said
    wait_for(lambda: store.where(bad) is not Where.HERE)
    assert all(store.where(key) is Where.HERE for key in right)
    # Others use what is left.
    other = reader()
    assert settled_run(other, "first").num_external_tokens == SHORT - CHUNK
    assert counts(other) == (1, 0, 0)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_model_that_differs_at_the_end_only_is_found_after_its_beginning_agreed(
    reader, store_prompt, run_wrong, recomputes
):
    """As one with other rotary frequencies does: the first tokens show little of it."""
    draws = iter([0.0, 0.99, 0.99])
    host = reader(recomputes=recomputes, draw=lambda: next(draws))
    assert settled_run(host, "agrees at its beginning").num_external_tokens == 0
    assert counts(host) == (1, 0, 0)
    assert run_wrong(host, "differs at its end", PROMPT) == SHORT
    assert counts(host) == (1, 1, 0)
    assert settled_run(host, "not loaded").num_external_tokens == 0


def test_a_hit_that_a_step_does_not_compare_is_taken_back_in_that_step(reader, monkeypatch):
    """As when a load of another request fails: the step saves nothing, and compares nothing."""
    host = reader(recomputes=True)
    request = host.add("not compared", PROMPT)
    assert host.admit(request) == SHORT
    with monkeypatch.context() as patch:
        for rank in host.ranks:
            patch.setattr(rank.worker, "save", lambda: None)
        host.step([request], tokens=len(PROMPT) - SHORT)
    assert host.invalid_block_ids
    assert request.num_computed_tokens < SHORT, "computed again before a token comes of it"
    host.step([request], tokens=len(PROMPT) - request.num_computed_tokens)
    end(host, request)
    assert counts(host)[:2] == (0, 0)


class HangsOnDiscard(FaultyStore):
    """Records are taken out once the gate opens."""

    def __init__(self, inner, gate):
        super().__init__(inner, operations=("discard",))
        self._gate = gate

    def fault(self, _operation):
        self._gate.pass_through()
        return True


def test_a_store_that_hangs_while_a_record_is_taken_out_delays_neither_steps_nor_the_end(
    make_host, directory, store_prompt, caplog
):
    store_prompt(SECOND, wrong=True)
    gate = Gate()
    store = HangsOnDiscard(open_store(directory), gate)
    host = make_host(store=store, audit="first", recomputes=True)
    started = time.monotonic()
    settled_run(host, "wrong", SECOND)
    assert settled_run(host, "later").num_external_tokens == 0
    *_, bad = keys_of(host, SECOND)
    assert store.where(bad) is Where.HERE
    host.scheduler.close()
    assert time.monotonic() - started < 30
    assert "not taken out" in caplog.text
    gate.release()
    wait_for(lambda: store.where(bad) is not Where.HERE)


@pytest.fixture
def run_wrong():
    """Runs a prompt on a host that computes other KV meanwhile, as on top of a wrong beginning."""

    def run(host, request_id, prompt, **options):
        be_right_again = be_another_model(host)
        hit = unchecked_run(host, request_id, prompt, **options)
        be_right_again()
        return hit

    return run


@pytest.mark.parametrize("wrong", [0, 1])
def test_one_rank_is_enough(two_ranks, wrong):
    host = two_ranks(recomputes=True)
    be_another_model(host, [host.ranks[wrong]])
    settled_run(host, "first")
    assert host.invalid_block_ids
    assert counts(host) == (0, 1, 0)
    assert settled_run(host, "later").num_external_tokens == 0


def test_an_audit_that_ends_after_its_epoch_says_nothing(reader):
    host = reader(other=True)
    request = host.admitted("first", PROMPT)
    host.scheduler.reset()  # before the plan that has the audit
    host.step([request], tokens=len(PROMPT) - SHORT)
    end(host, request)
    assert counts(host) == (0, 0, 0)
    settled_run(host, "own")
    assert settled_run(host, "own again").num_external_tokens == WHOLE


# ---- faults


def test_a_request_whose_identity_is_lost_is_not_audited(reader):
    """Another adapter may compute the rest of it."""
    host = reader()
    request = host.admitted("first", PROMPT)
    be_another_model(host)
    request.extra_keys = ExtraKeys(cacheable=False)
    host.step([request], tokens=len(PROMPT) - request.num_computed_tokens)
    end(host, request)
    assert counts(host) == (0, 0, 0)


def test_a_load_that_failed_is_not_audited(reader):
    host = reader(recomputes=True)
    request = host.admitted("first", PROMPT)
    lose_chunk(host, held_keys(host.pool).pop())
    host.prefill(request)
    end(host, request)
    assert host.observer["audits"] == host.observer["audit_mismatch"] == 0


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_comparison_that_fails_is_no_verdict(reader, monkeypatch, recomputes):
    host = reader(recomputes=recomputes)
    with monkeypatch.context() as patch:
        patch.setattr(
            "kvferry.cache.moving.comparisons.compare",
            lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")),
        )
        settled_run(host, "first")
    assert counts(host) == (0, 0, 1)
    # A host that can compute the hit again does not use it unchecked.
    assert bool(host.invalid_block_ids) == recomputes
    assert settled_run(host, "second").num_external_tokens == SHORT
    assert counts(host) == (1, 0, 1)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_comparison_that_hangs_delays_a_step_for_a_bounded_time(reader, monkeypatch, recomputes):
    name = "kvferry.cache.moving.comparisons"
    monkeypatch.setattr(f"{name}.AUDIT_SECONDS", 0.2)
    gate = threading.Event()
    compare = __import__(name, fromlist=["x"]).compare

    def slow(*args):
        gate.wait(20)
        return compare(*args)

    monkeypatch.setattr(f"{name}.compare", slow)
    host = reader(recomputes=recomputes)
    request = host.run("first", PROMPT)
    assert request.num_external_tokens == SHORT
    assert bool(host.invalid_block_ids) == recomputes
    assert counts(host) == (0, 0, 0)
    gate.set()
    wait_for(lambda: host.step([]) and host.observer["audits"] == 1)
    end(host)
    assert settled_run(host, "later").num_external_tokens == WHOLE


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_load_that_failed_ends_the_audits_that_wait(reader, recomputes):
    """Their requests may compute on blocks that were not filled."""
    host = reader(recomputes=recomputes)
    request = host.admitted("first", PROMPT)
    host.step([request], tokens=1)
    failed = RankReport(rank=0, pool=host.pool.pool_id, failures=1, failed_keys=(b"of another",))
    host.scheduler.update_output(WorkerOutput(meta=CacheMeta(reports=(failed,))))
    host.step([request], tokens=len(PROMPT) - SHORT - 1)
    end(host, request)
    assert counts(host) == (0, 0, 0)
    assert bool(host.invalid_block_ids) == recomputes  # what it loaded counts as unchecked


def test_a_forward_that_fails_ends_the_audit_without_a_verdict(reader):
    host = reader()
    request = host.admitted("first", PROMPT)
    compute = host.ranks[0].compute
    host.ranks[0].compute = lambda *_: (_ for _ in ()).throw(MemoryError("forward"))
    with pytest.raises(MemoryError):
        host.step([request], tokens=len(PROMPT) - SHORT)
    host.ranks[0].compute = compute
    request.num_computed_tokens = 0
    host.prefill(request)
    end(host, request)
    assert host.observer["audit_mismatch"] == 0


def test_a_window_shorter_than_a_chunk_makes_no_hit_short(make_host, tmp_path, caplog):
    groups = (group(2, None), group(3, 6))
    writer = make_host(groups=groups, store=open_store(tmp_path / "store"), chunk_tokens=16)
    settled_run(writer, "writer")
    options = {"chunk_tokens": 16, "audit": "first"}
    host = make_host(groups=groups, store=open_store(tmp_path / "store"), **options)
    assert "hits are not audited: an attention window" in caplog.text
    for number in range(3):
        request = settled_run(host, f"{number}", budget=4)
        assert request.num_external_tokens == 32
    assert counts(host) == (0, 0, 0)


def test_a_comparison_does_not_wait_for_writes(make_host, directory):
    gate = Gate()
    store = StallingStore(open_store(directory), gate=gate, operations={"put"})
    host = make_host(store=store, audit="first", recomputes=True, io_threads=2)
    host.run("other", range(500, 541))
    assert host.pool.is_writing
    started = time.monotonic()
    host.run("first", PROMPT)
    assert time.monotonic() - started < 30
    assert not host.invalid_block_ids
    assert counts(host) == (1, 0, 0)
    assert host.pool.is_writing
    gate.release()


def test_a_comparison_goes_before_what_waits_to_be_hashed(reader, monkeypatch):
    """A step waits for it, and should not wait for all that earlier steps computed."""
    moving, begun, order = "kvferry.cache.moving", threading.Event(), []

    def seal(*args):
        assert begun.wait(60)
        order.append("hash")
        return seal_record(*args)

    def compare_noting(*args):
        order.append("compare")
        return compare(*args)

    def begin(comparisons, *args, **options):
        begin_right(comparisons, *args, **options)
        begun.set()

    begin_right = Comparisons.begin
    monkeypatch.setattr(Comparisons, "begin", begin)
    monkeypatch.setattr(f"{moving}.slot_io.seal_record", seal)
    monkeypatch.setattr(f"{moving}.comparisons.compare", compare_noting)
    monkeypatch.setattr(f"{moving}.comparisons.AUDIT_SECONDS", 60.0)
    host = reader(recomputes=True)
    settled_run(host, "first", [*PROMPT, *range(500, 541)])
    assert counts(host) == (1, 0, 0)
    assert order == ["hash", "compare", *["hash"] * 4]
