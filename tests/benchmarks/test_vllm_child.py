"""What a process of `bench vllm` does with its engine, with an engine that is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import vllm_child as child

WORK = {
    "arguments": {"model": "m"},
    "connector": None,
    "warm_up": [1],
    "stored": None,
    "prompts": [[7, 8], [9]],
    "max_tokens": 2,
    "decode": None,
}


class FakeEngine:
    """Gives every request a token per step."""

    def __init__(self, arguments, connector, warm_up, stored):
        self.seen, self._running = [("engine", arguments["model"])], {}

    def get_ready(self):
        self.seen.append("ready")

    def add(self, tokens, max_tokens, logprobs):
        name = str(len(self.seen))
        self.seen.append(tuple(tokens))
        self._running[name] = ([], max_tokens)

    def has_work(self):
        return bool(self._running)

    def step(self):
        outputs = []
        for name, (tokens, max_tokens) in list(self._running.items()):
            tokens.append(4)
            finished = len(tokens) == max_tokens
            if finished:
                del self._running[name]
            one = SimpleNamespace(token_ids=list(tokens), logprobs=None)
            outputs.append(
                SimpleNamespace(
                    request_id=name, outputs=[one], finished=finished, num_cached_tokens=None
                )
            )
        return outputs

    def settle(self):
        assert not self._running

    def close(self):
        self.seen.append("closed")


@pytest.fixture
def engines(monkeypatch):
    made = []

    def make(**arguments):
        made.append(FakeEngine(**arguments))
        return made[-1]

    monkeypatch.setattr(child, "Engine", make)
    monkeypatch.setattr(child, "QUIET_SECONDS", 0.0)
    return made


def test_prompts_are_timed_twice_before_anything_else_and_the_engine_is_closed(engines):
    result = child.measure(WORK)
    [engine] = engines
    timed = ["ready", (7, 8), "ready", (9,)]
    assert engine.seen == [("engine", "m"), *timed, *timed, "closed"]
    assert list(result) == ["prompts", "again"]
    for answer in (*result["prompts"], *result["again"]):
        assert answer["tokens"] == [4, 4]
        assert answer["hit_tokens"] == 0
        assert answer["wall_s"] > 0


def test_a_process_that_decodes_times_prompts_first(engines, monkeypatch):
    monkeypatch.setattr(child, "decode", lambda engine, tokens, num_steps: (tokens, num_steps))
    result = child.measure({**WORK, "decode": {"tokens": [5], "num_steps": 3}})
    assert list(result) == ["prompts", "again", "decode"]
    assert result["decode"] == ([5], 3)
