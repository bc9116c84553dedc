"""Outputs of all ranks become one: no id early, no id twice, no news lost, no input changed."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.contract.fold import WorkerOutputFold
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerMeta, WorkerOutput
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Counters
from kvferry.v1 import KVOutputAggregator
from kvferry.v1.types import (
    CounterStats,
    KVConnectorOutput,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
)


@dataclass
class RunnerOutput:
    kv_connector_output: KVConnectorOutput | None = None
    sampled: list[int] = field(default_factory=list)


def report(sending=None, recving=None, **fields):
    return RunnerOutput(KVConnectorOutput(finished_sending=sending, finished_recving=recving,
                                          **fields))  # fmt: skip


def news(output):
    kv = output.kv_connector_output
    return kv.finished_sending, kv.finished_recving


class Seen(WorkerMeta, frozen=True, kw_only=True):
    ids: frozenset[str]

    def aggregate(self, other):
        return Seen(ids=self.ids | other.ids)


class MutatingStats(KVConnectorStats):
    """As vLLM's connectors write them: `aggregate` adds into self."""

    def reset(self):
        self.data = {}

    def aggregate(self, other):
        self.data["n"] += other.data["n"]
        return self

    def reduce(self):
        return dict(self.data)


class MutatingMeta(KVConnectorWorkerMetadata):
    def __init__(self, *ids):
        self.ids = list(ids)

    def aggregate(self, other):
        self.ids += other.ids
        return self


class Events:
    """A container of vLLM's shape."""

    def __init__(self, *events):
        self.events, self.workers = list(events), 1

    def add_events(self, events):
        self.events += events

    def increment_workers(self, count=1):
        self.workers += count

    def get_all_events(self):
        return self.events


# -- release ---------------------------


def rank_of(text):
    """Read what a rank reports: `s:a` an end of sending, `r:a` of a load, `=2` a count."""
    if text.strip() in ("none", "missing"):
        return RunnerOutput(None) if text.strip() == "none" else None
    fields = {}
    for word in text.split():
        if word.startswith("="):
            fields["expected_finished_count"] = int(word[1:])
        else:
            name = {"s": "sending", "r": "recving"}[word[0]]
            fields.setdefault(name, set()).add(word[2:])
    return report(**fields)


# A row: the count at first and at last; what the ranks report in each step, and what is released.
RELEASES = {
    "in the step of the last rank": (2, 2, ("s:a|r:b", ""), ("r:b|", "r:b"), ("|s:a", "s:a")),
    "sends and loads apart": (2, 2, ("s:a|r:a", ""), ("r:a|s:a", "s:a r:a")),
    "a12 a rank that repeats is no other": (2, 2, *[("s:a|", "")] * 3, ("|s:a", "s:a")),
    "again after its release": (2, 2, *[("r:a|", ""), ("|r:a", "r:a")] * 2),
    "a rank without a report is waited for": (2, 2, ("s:a|none", ""), ("none|s:a", "s:a")),
    # "a" was counted before the count was known: it does not wait for ranks that stay silent.
    "a lower count": (4, 2, ("s:a|s:a|s:a|", ""), ("=2|s:b||", "s:a"), ("s:b|||", "s:b")),
    "a higher count": (2, 3, ("s:a||", ""), ("|s:a =3|", ""), ("||s:a", "s:a")),
    "a count holds for the ranks before it": (1, 2, ("s:a|=2", "")),
    "of two counts in a step the larger": (1, 2, ("s:a =2|=1", "")),
    "a12 a missing rank loses nothing": (1, 1, ("s:a|missing|r:b", "s:a r:b")),
}


@pytest.mark.parametrize("row", RELEASES.values(), ids=RELEASES)
def test_an_id_is_released_in_the_step_of_its_last_rank(row):
    first, last, *steps = row
    aggregator = KVOutputAggregator(first)
    for ranks, released in steps:
        result = aggregator.aggregate([rank_of(text) for text in ranks.split("|")])
        assert news(result) == news(rank_of(released))
    assert result.kv_connector_output.expected_finished_count == last


# -- expected counts ---------------------------


@pytest.mark.parametrize(("count", "expected"), [(None, 3), (0, 3), (1, 1), (3, 3)])
def test_the_connector_may_say_how_many_reports_to_expect(count, expected):
    connector = SimpleNamespace(get_finished_count=lambda: count)
    aggregator = KVOutputAggregator.from_connector(connector, 3)
    ranks = [report({"a"}) for _ in range(expected)] + [report()] * (3 - expected)
    assert news(aggregator.aggregate([report({"a"}), report(), report()])) == (
        ({"a"}, None) if expected == 1 else (None, None)
    )
    if expected > 1:
        assert news(aggregator.aggregate(ranks)) == ({"a"}, None)


def test_more_reports_than_ranks_are_refused_at_start():
    connector = SimpleNamespace(get_finished_count=lambda: 4)
    with pytest.raises(ConfigError, match="says 4, but there are 3 ranks"):
        KVOutputAggregator.from_connector(connector, 3)


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_one_is_refused(count):
    with pytest.raises(ConfigError, match="at least one rank"):
        KVOutputAggregator(count)


# -- missing outputs ---------------------------


def test_a12_reports_wait_where_the_output_rank_has_nothing():
    aggregator = KVOutputAggregator(2)
    first = [
        None,
        report({"a"}, {"b"}, failed_recving={"b"}, invalid_block_ids={3},
               kv_connector_stats=CounterStats({"n": 1}), kv_cache_events=Events("e")),
        report({"a"}, {"b"}),
    ]  # fmt: skip
    assert aggregator.aggregate(first) is None
    assert aggregator.aggregate([None, None, None]) is None
    second = [report(), report(invalid_block_ids={5}, kv_cache_events=Events("f")), None]
    kv = aggregator.aggregate(second).kv_connector_output
    assert (kv.finished_sending, kv.finished_recving) == ({"a"}, {"b"})
    assert kv.failed_recving == {"b"}
    assert kv.invalid_block_ids == {3, 5}
    assert kv.kv_connector_stats == CounterStats({"n": 1})
    # Two steps of one worker: what one worker saw in each is still what all of them saw.
    assert (kv.kv_cache_events.events, kv.kv_cache_events.workers) == (["e", "f"], 1)
    third = aggregator.aggregate([report(), report(), report()]).kv_connector_output
    assert third.is_empty()


def test_the_output_of_another_rank_may_be_asked_for():
    outputs = [report({"a"}), RunnerOutput(None, sampled=[7])]
    result = KVOutputAggregator(1).aggregate(outputs, output_rank=1)
    assert (result.sampled, news(result)) == ([7], ({"a"}, None))


@pytest.mark.parametrize(("outputs", "rank"), [([], 0), ([None], 1), ([None], -1)])
def test_a_rank_that_is_not_there_is_refused(outputs, rank):
    with pytest.raises(ContractError, match=f"output_rank is {rank}"):
        KVOutputAggregator(1).aggregate(outputs, rank)


# -- failures ---------------------------


def test_invalid_blocks_are_those_of_the_step():
    aggregator = KVOutputAggregator(2)
    result = aggregator.aggregate([report(invalid_block_ids={1, 2}), report(invalid_block_ids={2})])
    assert result.kv_connector_output.invalid_block_ids == {1, 2}
    assert aggregator.aggregate([report(), report()]).kv_connector_output.invalid_block_ids == set()


def test_a_failed_load_is_held_until_its_id_is_released():
    aggregator = KVOutputAggregator(2)
    first = aggregator.aggregate([report(recving={"a"}, failed_recving={"a"}), report()])
    assert first.kv_connector_output.failed_recving == set()
    second = aggregator.aggregate([report(), report(recving={"a", "b"})]).kv_connector_output
    assert (second.finished_recving, second.failed_recving) == ({"a"}, {"a"})
    # The next load of the id is not blamed for it.
    third = aggregator.aggregate([report(recving={"a", "b"}), report(recving={"a"})])
    assert third.kv_connector_output.finished_recving == {"a", "b"}
    assert third.kv_connector_output.failed_recving == set()


# -- stats, events, worker metadata ---------------------------


def test_payloads_are_folded_and_inputs_left_alone():
    outputs = [
        report(
            {"a"},
            kv_connector_stats=MutatingStats({"n": n}),
            kv_cache_events=Events(f"e{n}"),
            kv_connector_worker_meta=MutatingMeta(n),
        )
        for n in (1, 2, 3)
    ]
    before = copy.deepcopy(outputs)
    result = KVOutputAggregator(3).aggregate(outputs)
    kv = result.kv_connector_output
    assert kv.kv_connector_stats.data == {"n": 6}
    assert (kv.kv_cache_events.events, kv.kv_cache_events.workers) == (["e1", "e2", "e3"], 3)
    assert kv.kv_connector_worker_meta.ids == [1, 2, 3]
    assert result is not outputs[0]
    assert repr_of(outputs) == repr_of(before)


def repr_of(outputs):
    kvs = [output.kv_connector_output for output in outputs]
    return [
        (news(output), kv.kv_connector_stats.data, vars(kv.kv_cache_events),
         vars(kv.kv_connector_worker_meta))
        for output, kv in zip(outputs, kvs, strict=True)
    ]  # fmt: skip


def test_a_shared_empty_output_stays_empty():
    empty = RunnerOutput()
    result = KVOutputAggregator(2).aggregate([empty, report({"a"})])
    assert empty.kv_connector_output is None
    assert result.kv_connector_output == KVConnectorOutput(expected_finished_count=2)


def test_our_own_messages_and_counters_are_folded():
    outputs = [
        report(
            kv_connector_stats=CounterStats({"hit": 1, name: 2}),
            kv_connector_worker_meta=Seen(ids=frozenset({name})),
        )
        for name in ("x", "y")
    ]
    kv = KVOutputAggregator(2).aggregate(outputs).kv_connector_output
    assert kv.kv_connector_stats == CounterStats({"hit": 2, "x": 2, "y": 2})
    assert kv.kv_connector_worker_meta == Seen(ids=frozenset({"x", "y"}))


def test_payloads_that_do_not_fold_cost_no_ids(caplog):
    observer = Counters()
    aggregator = KVOutputAggregator(2, observer=observer)
    outputs = [
        report({"a"}, kv_connector_stats=CounterStats({"n": 1}), kv_cache_events=Events("e")),
        report({"a"}, kv_connector_stats=MutatingStats({"n": 1}), kv_cache_events=("e",)),
    ]
    kv = aggregator.aggregate(outputs).kv_connector_output
    assert kv.finished_sending == {"a"}
    assert (kv.kv_connector_stats, kv.kv_cache_events) == (None, None)
    assert (observer["hook_failed_fold_stats"], observer["hook_failed_fold_events"]) == (1, 1)
    assert "the stats of this step are dropped" in caplog.text


def test_outputs_of_older_hosts_have_fewer_fields():
    old = SimpleNamespace(finished_sending={"a"}, finished_recving=None, kv_connector_stats=None,
                          invalid_block_ids={4}, expected_finished_count=0)  # fmt: skip
    kv = KVOutputAggregator(1).aggregate([RunnerOutput(old)]).kv_connector_output
    assert (kv.finished_sending, kv.invalid_block_ids) == ({"a"}, {4})


# -- our own outputs ---------------------------


def test_nothing_new_is_the_empty_output():
    assert WorkerOutputFold(2).fold([EMPTY_OUTPUT, None]) is EMPTY_OUTPUT
    half = WorkerOutput(finished_sending=frozenset("a"))
    assert WorkerOutputFold(2).fold([half, EMPTY_OUTPUT]) is EMPTY_OUTPUT


def test_event_sequences_are_joined_in_rank_order():
    outputs = [WorkerOutput(events=("a", "b")), None, WorkerOutput(events=["c"])]
    assert WorkerOutputFold(3).fold(outputs).events == ("a", "b", "c")


@given(st.data())
def test_every_id_is_released_once_in_the_step_of_its_last_rank(data):
    num_ranks = data.draw(st.integers(1, 4))
    num_steps = data.draw(st.integers(1, 6))
    num_ids = data.draw(st.integers(1, 4))
    # For each id and rank the step of its report, and whether the load failed there; with repeats
    # of the same report in steps before the last rank's.
    steps = [[{} for _ in range(num_ranks)] for _ in range(num_steps)]
    due = {}
    for name in map(str, range(num_ids)):
        at = data.draw(st.lists(st.integers(0, num_steps - 1), min_size=num_ranks,
                                max_size=num_ranks))  # fmt: skip
        failed = data.draw(st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks))
        due.setdefault(max(at), {})[name] = any(failed)
        for rank in range(num_ranks):
            for step in {at[rank], data.draw(st.integers(at[rank], max(at)))}:
                steps[step][rank][name] = failed[rank]
    fold = WorkerOutputFold(num_ranks)
    for number, reports in enumerate(steps):
        output = fold.fold(
            [
                WorkerOutput(
                    finished_recving=frozenset(ids),
                    failed_recving=frozenset(name for name, bad in ids.items() if bad),
                )
                for ids in reports
            ]
        )
        expected = due.get(number, {})
        assert output.finished_recving == expected.keys()
        assert output.failed_recving == {name for name, bad in expected.items() if bad}
