"""Audits of models with recurrent states: KV that an engine computes on a loaded state is compared
with what is stored behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvferry.contract.messages import LookupMiss
from tests.cache.hosts import CacheHost
from tests.cache.test_states import BLOCK, PROMPT, serve, start

AT_ONCE = 10**9

__all__ = ["start"]


def at_end() -> float:
    """Draws that have the last chunk of a hit compared, where one has a choice."""
    return 0.9


def compared(host: CacheHost) -> tuple[int, int, int]:
    host.settle()
    names = ("audits", "audit_mismatch", "audit_failed")
    return tuple(int(host.observer[name]) for name in names)  # type: ignore[return-value]


def store(
    start: Any,
    spoil: Callable[[CacheHost], None] = lambda _host: None,
    *,
    is_behind: bool = False,
) -> None:
    """Store a prompt whose last state is after four blocks, and the one before after two. If KV is
    to reach behind states, the last one is not stored."""
    host = start()
    serve(host, "beginning", PROMPT[: 2 * BLOCK + 9], AT_ONCE)
    host.settle()
    spoil(host)
    if is_behind:
        host.offer = lambda *_: ()  # type: ignore[method-assign]
    assert serve(host, "all", PROMPT, AT_ONCE) == 2 * BLOCK
    host.settle()


@pytest.mark.parametrize(("tp", "is_behind"), [(1, False), (1, True), (2, False), (2, True)])
def test_a_hit_is_compared_behind_the_state_that_is_loaded(start, tp, is_behind):
    """With a state after four blocks, the hit is promised up to the one before. Without, it ends
    there anyway, and what is behind is compared at no cost."""
    store(start, is_behind=is_behind)
    reader = start(tp=tp, audit="first", draw=at_end)
    request = reader.add("first", PROMPT)
    assert reader.admit(request) == 2 * BLOCK
    answer = reader.scheduler.requests.by_id["first"].answer
    reason = LookupMiss.NO_STATE if is_behind else LookupMiss.AUDIT
    assert answer.misses == {reason: 2 * BLOCK, LookupMiss.PARTIAL: 9}
    reader.prefill(request, budget=BLOCK)
    reader.finish(request)
    assert compared(reader) == (1, 0, 0)
    assert serve(reader, "next", PROMPT) == 4 * BLOCK
    assert compared(reader) == (1, 0, 0)


def computes_otherwise(host: CacheHost) -> None:
    """What follows is the KV of another model, as on a state that is not this one's."""
    for rank in host.ranks:
        right = rank.values

        def values(layer: Any, seeds: torch.Tensor, right: Any = right) -> torch.Tensor:
            return right(layer, seeds) * 1.01

        rank.values, rank.wrong_tokens = values, lambda *_: 0  # type: ignore[method-assign]


@pytest.mark.parametrize("is_behind", [False, True])
def test_kv_that_differs_behind_a_loaded_state_ends_the_use(start, caplog, is_behind):
    store(start, computes_otherwise, is_behind=is_behind)
    reader = start(audit="first", draw=at_end)
    assert serve(reader, "first", PROMPT) == 2 * BLOCK
    assert compared(reader) == (0, 1, 0)
    assert "the model computes other KV than is stored" in caplog.text
    assert serve(reader, "next", PROMPT) == 0


LOST: dict[str, Callable[[CacheHost, Any], None]] = {
    "it is preempted": lambda host, request: host.preempt(request),
    "it ends": lambda host, request: host.finish(request),
    "another epoch begins": lambda host, _request: host.scheduler.reset(),
}


@pytest.mark.parametrize("event", LOST)
def test_a_request_that_loses_its_blocks_before_it_is_compared_leaves_nothing_pinned(start, event):
    store(start)
    reader = start(audit="first", draw=at_end)
    request = reader.add("first", PROMPT)
    assert reader.admit(request) == 2 * BLOCK
    assert request.num_computed_tokens == 2 * BLOCK
    LOST[event](reader, request)
    reader.settle()
    assert compared(reader) == (0, 0, 0)
    assert not [hold for hold in reader.scheduler.holds() if list(hold)]
    if event == "it is preempted":
        assert reader.admit(request) == 2 * BLOCK, "the next hit is compared"
        reader.prefill(request, budget=BLOCK)
        assert compared(reader) == (1, 0, 0)
