"""Engines of several ranks when something goes wrong; ranks beyond the first are threads here."""

from __future__ import annotations

import socket
import threading

import pytest

from kvferry.engine import SamplingParams
from kvferry.engine.rank_process import report_failure
from kvferry.engine.ranks import Channel
from kvferry.errors import ConfigError, FaultKind, RankError, StoreError
from kvferry.observe import Counters
from tests.engine.rank_threads import RankThread, ThreadedLLM
from tests.engine.test_llm import assert_same, own_generation, prompt

GREEDY = SamplingParams(max_tokens=6, ignore_eos=True, return_logits=True)


def test_preempted_requests_agree_on_all_ranks(model_dir):
    path = model_dir("qwen3")
    prompts = [prompt(40, seed=seed) for seed in range(3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, return_logits=True)
    observer = Counters()
    options = {"num_blocks": 11, "prefix_caching": False, "max_batched_tokens": 32}
    with ThreadedLLM(path, tensor_parallel_size=2, observer=observer, **options) as llm:
        assert_same(llm.generate(prompts, params), own_generation(path, prompts, 24))
    assert observer["preempted"] > 0


def test_close_leaves_no_thread_and_ends_streams(model_dir):
    threads = set(threading.enumerate())
    llm = ThreadedLLM(model_dir(), tensor_parallel_size=2)
    stream = llm.stream(prompt(20), SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    llm.close()
    llm.close()
    assert list(stream) == []
    assert set(threading.enumerate()) <= threads


class FailingRank(RankThread):
    """A rank that says why it ends, at once."""

    error: Exception = ConfigError("no such thing")

    def _run(self) -> None:
        self._status = report_failure(self._channel, self._fail)
        self._channel.close()

    def _fail(self, _channel):
        raise self.error


class SilentRank(RankThread):
    """A rank that ends without a word."""

    def _run(self) -> None:
        self._status = 7
        self._channel.close()


class BrokenRank(FailingRank):
    error = StoreError(FaultKind.REFUSED, "a disk\nwith more to say")


@pytest.mark.parametrize(
    ("launch", "error", "reason"),
    [
        (FailingRank, ConfigError, "rank 1 failed: no such thing"),
        (BrokenRank, RankError, "rank 1 failed: a disk$"),
        (SilentRank, RankError, r"rank 1 died \(exit status 7\)"),
    ],
)
def test_a_rank_that_cannot_start_is_named(model_dir, launch, error, reason):
    class Engine(ThreadedLLM):
        _launch = launch

    with pytest.raises(error, match=reason):
        Engine(model_dir(), tensor_parallel_size=2)


def test_a_channel_says_when_the_other_end_is_gone_or_only_slow():
    ours, theirs = (Channel(end, send_seconds=0.05) for end in socket.socketpair())
    with pytest.raises(TimeoutError):
        ours.receive(0.01)
    theirs.send({"a": b"x" * 100_000})
    assert ours.receive(5.0) == {"a": b"x" * 100_000}
    with pytest.raises(RankError, match="cannot reach"):
        ours.send(b"x" * 10_000_000)  # the other end does not read
    ours.close()
    theirs.close()
    with pytest.raises(RankError, match="cannot reach"):
        theirs.send(1)


def test_a_channel_that_is_closed_within_a_message_is_gone():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    theirs.sendall(b"\x10\0\0")
    theirs.close()
    with pytest.raises(RankError, match="is gone"):
        channel.receive(1.0)
    channel.close()
