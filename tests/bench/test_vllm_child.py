"""What a process of `bench vllm` does with its engine, with an engine that is none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.bench.vllm import child

WORK = {
    "arguments": {"model": "m"},
    "connector": None,
    "warm_up": [1],
    "stored": None,
    "prompts": [[7, 8], [9]],
    "max_tokens": 2,
    "serve": {"prompts": [[1]] * 5, "max_tokens": [3, 1, 2, 2, 1], "at_once": 2},
    "decode": None,
}


class FakeHooks:
    def take(self):
        return 5.0

    def remove(self):
        pass


class FakeEngine:
    """Gives every request a token per step."""

    def __init__(self, arguments, connector, warm_up, stored):
        self.seen, self.most, self._running = [("engine", arguments["model"])], 0, {}
        self.hooks = FakeHooks()

    def get_ready(self):
        self.seen.append("ready")

    def add(self, tokens, max_tokens, logprobs):
        name = str(len(self.seen))
        self.seen.append(tuple(tokens))
        self._running[name] = ([], max_tokens)
        self.most = max(self.most, len(self._running))

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
    assert engine.seen == [("engine", "m"), *timed, *timed, *5 * [(1,)], "closed"]
    assert list(result) == ["prompts", "again", "serve"]
    for answer in (*result["prompts"], *result["again"]):
        assert answer["tokens"] == [4, 4]
        assert answer["hit_tokens"] == 0
        assert answer["wall_s"] > 0


def test_as_many_are_served_at_once_as_asked_for(engines):
    served = child.measure(WORK)["serve"]
    assert engines[0].most == 2
    assert served["tokens"] == 9
    assert len(served["gaps_s"]) == 9 - 5


def test_a_process_that_only_reads_only_times_prompts(engines):
    assert list(child.measure({**WORK, "serve": None})) == ["prompts", "again"]
