"""The vLLM benchmark around the engine: what runs, in which order, and what becomes of figures."""

from __future__ import annotations

import importlib.util
import json
import time
from types import SimpleNamespace

import pytest

from benchmarks import Options, vllm
from benchmarks.vllm import Measured
from benchmarks.vllm_child import HookTimer
from kvferry.errors import ConfigError


def answer(cpu: float, wall: float, *, hit: int = 0, logprob: float = -1.0) -> dict:
    return {
        "cpu_s": cpu,
        "wall_s": wall,
        "hit_tokens": hit,
        "tokens": [7],
        "logprobs": [{"7": logprob, "8": -3.0}],
    }


def storing(
    prompts: list[dict], again: list[dict], *, hooks: float = 0.0, bytes_per_token: float = 0.0
) -> dict:
    return {
        "prompts": prompts,
        "again": again,
        "decode": {"hooks_us": [hooks] * 3, "steps_s": [0.01], "cpu_s": 1.0},
        "bytes_per_token": bytes_per_token,
    }


@pytest.fixture
def measured() -> list[Measured]:
    """Two rounds of none and of a connector that costs 10 % and reuses 20 ms late."""
    alone = Measured(
        "none",
        [storing([answer(1.0, 1.0)], [answer(0.2, 0.20, hit=128)]) for _ in range(2)],
    )
    ours = Measured(
        "ours",
        [
            storing([answer(1.1, 1.0)], [], hooks=9.0, bytes_per_token=stored)
            for stored in (2.0, 4.0)
        ],
        [
            {"prompts": [answer(0.22, 0.23, hit=128)], "again": [answer(0.2, 0.21, hit=128)]}
            for _ in range(2)
        ],
    )
    return [alone, ours]


def test_a_missing_vllm_is_one_line_that_says_what_to_do(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name)
    )
    with pytest.raises(ConfigError, match="make bench NAME=vllm") as error:
        vllm.run(Options(directory=tmp_path))
    assert "\n" not in str(error.value)


def test_rows_are_medians_against_vllm_alone(measured):
    found = {(row["case"], row["phase"]): row for row in vllm.rows_of(measured)}
    assert {key for row in found.values() for key in row} == {
        "case", "phase", "cpu_s", "cpu_ratio", "wall_s", "beyond_ms", "hit_tokens",
        "bytes_per_token", "us_per_step", "p50_ms", "equal", "note",
    }  # fmt: skip
    assert list(found) == [
        *(("none", phase) for phase in ("cold", "own_hit", "decode")),
        *(("ours", phase) for phase in ("cold", "warm", "decode")),
    ]
    assert found["ours", "cold"]["cpu_ratio"] == pytest.approx(1.1)
    assert found["none", "own_hit"]["cpu_s"] == pytest.approx(0.2)
    assert found["ours", "cold"]["bytes_per_token"] == 3.0
    assert found["ours", "warm"]["beyond_ms"] == pytest.approx(20)
    assert found["ours", "warm"]["hit_tokens"] == 128
    assert found["ours", "warm"]["equal"] is True
    assert found["ours", "decode"]["us_per_step"] == 9.0
    assert "us_per_step" not in found["none", "decode"]


def test_one_answer_that_differs_makes_the_row_unequal(measured):
    measured[1].warm[1]["prompts"][0]["logprobs"][0]["7"] += 2e-3
    [warm] = [row for row in vllm.rows_of(measured) if row["phase"] == "warm"]
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
    assert vllm.is_equal({**reference, **change}, reference) is equal


def test_a_case_that_failed_keeps_a_row_that_says_why(measured):
    measured[1].failure = "no AVX"
    found = vllm.rows_of(measured)
    assert found[-1]["case"] == "ours"
    assert found[-1]["note"] == "not measured: no AVX"
    assert "cpu_s" not in found[-1]


def test_every_case_is_json_and_keeps_to_its_directory(tmp_path):
    found = vllm.connectors(tmp_path)
    assert found.keys() >= {*vllm.REQUIRED, *vllm.NOTES}
    assert next(iter(found)) == "none"
    assert found.pop("none") is None
    for connector in found.values():
        assert str(tmp_path) in json.dumps(connector)


def compute(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_hooks_are_timed_once_and_what_they_return_is_passed_on():
    class Connector:
        def build_connector_meta(self, seconds: float) -> str:
            self.take_events()
            compute(seconds)
            return "meta"

        def take_events(self) -> tuple:
            compute(0.002)
            return ()

    connector, other = Connector(), SimpleNamespace(unknown=1)
    timer = HookTimer([connector, other])
    started = time.perf_counter()
    assert connector.build_connector_meta(0.01) == "meta"
    elapsed_us = 1e6 * (time.perf_counter() - started)
    assert 12_000 <= timer.take() <= elapsed_us
    assert timer.take() == 0.0
    connector.take_events()
    assert timer.take() >= 2_000
    assert vars(connector) == {}  # as it is without a timer
