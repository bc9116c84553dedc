"""What a process of `bench vllm` does with its engine, with an engine that is none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvferry.bench.vllm import child
from kvferry.bench.vllm.child import Engine


@pytest.fixture
def state(monkeypatch) -> ModuleType:
    """The module where vLLM keeps the worker's half of a connector."""
    module = ModuleType("vllm.distributed.kv_transfer.kv_transfer_state")
    module._KV_CONNECTOR_AGENT = "worker"
    for name in ("vllm", "vllm.distributed", "vllm.distributed.kv_transfer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.distributed.kv_transfer"].kv_transfer_state = module
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.fixture
def engine(state) -> Engine:
    found = object.__new__(Engine)
    found._scheduler = SimpleNamespace(connector="scheduler")
    return found


def halves(engine: Engine, state: ModuleType) -> tuple[str | None, str | None]:
    return engine._scheduler.connector, state._KV_CONNECTOR_AGENT


def test_an_unplugged_engine_has_neither_half_and_gets_both_back(engine, state):
    with engine.unplugged():
        assert halves(engine, state) == (None, None)
    assert halves(engine, state) == ("scheduler", "worker")
    with pytest.raises(ZeroDivisionError), engine.unplugged():
        _ = 1 / 0
    assert halves(engine, state) == ("scheduler", "worker")


def test_turns_are_counted_by_whether_the_connector_was_there(engine, state, monkeypatch):
    seen = []

    def prompt(engine, tokens, max_tokens):
        plugged = halves(engine, state) == ("scheduler", "worker")
        assert plugged or halves(engine, state) == (None, None)
        seen.append((plugged, tokens[0]))
        return {"cpu_s": float(tokens[0]), "own_cpu_s": 0.5, "tokens": [1] * max_tokens}

    monkeypatch.setattr(child, "prompt", prompt)
    found = child.by_turns(
        engine, plugged=[[1], [2], [3]], unplugged=[[11], [12], [13]], max_tokens=2
    )
    assert seen == [(True, 1), (False, 11), (False, 12), (True, 2), (True, 3), (False, 13)]
    assert found == {
        "plugged": [{"cpu_s": cpu, "own_cpu_s": 0.5} for cpu in (1.0, 2.0, 3.0)],
        "unplugged": [{"cpu_s": cpu, "own_cpu_s": 0.5} for cpu in (11.0, 12.0, 13.0)],
    }
