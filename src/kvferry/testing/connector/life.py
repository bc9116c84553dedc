"""Cases: the life of requests."""

# ruff: noqa: ANN401 - changes of a host's setup

from __future__ import annotations

import builtins
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.testing.connector.host import (
    Answer,
    Ask,
    MissedError,
    NotHereError,
    RuleBrokenError,
)
from kvferry.testing.connector.lab import Lab
from kvferry.testing.connector.rules import Case, restarted, stored

TABLE: dict[str, tuple[str, Case]] = {
    "starts": ("Both halves start, and shut down. [base.py]", stored()),
    "reuse": (
        "An engine reuses the whole blocks of a prompt that it stored. [base.py]",
        stored(69),
    ),
    "restart": (
        "A stored prompt is reused after a restart. [base.py]",
        restarted({}, {}, must=True),
    ),
    "one_over_a_block": (
        "A prompt of one token more than whole blocks hits all of these. [scheduler.py, schedule]",
        stored(17, 33, 49),
    ),
    "whole_blocks": (
        "A prompt of whole blocks hits all but the last, since its last token is always computed."
        " [scheduler.py, schedule: it asserts that tokens are left]",
        stored(18, 32, 48, 64),
    ),
    "chunked_prefill": (
        "A prompt that is computed in chunks is stored whole. [scheduler.py: only the blocks of its"
        " first chunk come with a new request]",
        stored(101, 69, budget=23),
    ),
    "two_ranks": (
        "Each of two ranks gets its own heads back. [parallel_state.py]",
        restarted({"ranks": 2}, {"ranks": 2}, must=True),
    ),
    "two_groups": (
        "Layers with a window and layers without are reused together. [base.py, SupportsHMA]",
        stored(101, 69, model="windows", budget=64),
    ),
    "full_graphs": (
        "KV is stored in replayed graphs, where layers have no hooks, or the class asks for"
        " piecewise graphs. [base.py, requires_piecewise_for_cudagraph]",
        stored(69, hooks=False),
    ),
}
FLAGS: dict[str, dict[str, Any]] = {
    "restart": {"parts": 2},
    "two_ranks": {"parts": 2},
    "sleep": {"may": ("miss",)},
    "shutdown_under_load": {"parts": 2},
}


def short_prompts(lab: Lab) -> None:
    """Prompts no longer than a block hit nothing, and no count is negative. [scheduler.py,
    schedule: it takes a negative count as it is]"""
    lab.start()
    for count in (15, 16, 5, 1, 2):
        lab.serve(lab.ask(count))
        lab.expect_none(lab.ask(count), f"a prompt of {count} tokens")


def longer_prompt(lab: Lab) -> None:
    """A longer prompt reuses a stored one that it begins with. [kv_cache_utils.py: block hashes]"""
    lab.start()
    stored = lab.store_prompt(lab.ask(69))
    lab.expect(lab.ask(stored.tokens + lab.tokens(40)), 64, "a longer prompt")


def shared_prefix(lab: Lab) -> None:
    """A prompt reuses the blocks before it parts from a stored one. [kv_cache_utils.py]"""
    lab.start()
    stored = lab.store_prompt(lab.ask(69))
    lab.expect(lab.ask(stored.tokens[:40] + lab.tokens(40)), 32, "a prompt that shares 40 tokens")


def generated_tokens(lab: Lab) -> None:
    """A turn reuses what the turn before generated. [scheduler.py: block hashes cover output]"""
    lab.start()
    (answer,) = lab.serve(lab.ask(20, max_tokens=45))
    said = answer.ask.tokens + tuple(answer.tokens)
    lab.expect(lab.ask(said + lab.tokens(5)), 64, "a turn after one of 20 + 45 tokens")


def hit_then_more(lab: Lab) -> None:
    """A request that hit stores what it computes beyond its hit. [base.py]"""
    lab.start()
    stored = lab.store_prompt(lab.ask(40))
    lab.forget()
    (answer,) = lab.serve(lab.again(stored, max_tokens=40))
    said = stored.tokens + tuple(answer.tokens)
    lab.expect(lab.ask(said + lab.tokens(5)), 64, "a turn after one that hit")


def same_step(lab: Lab) -> None:
    """Equal and overlapping prompts of one step are all right, and stored. [scheduler.py: blocks
    are shared when they are allocated]"""
    lab.start()
    one = lab.ask(69)
    lab.serve(
        one, lab.again(one), lab.ask(one.tokens[:48] + lab.tokens(9)), lab.ask(one.tokens[:33])
    )
    lab.expect(lab.again(one), 64)


# --- steps ----------------------------------------------------------------------------------------


def steps_without_tokens(lab: Lab) -> None:
    """Steps without tokens bring all hooks but those of layers. [kv_connector_no_forward]"""
    host = lab.start()
    host.step(5)
    stored = lab.ask(69)
    lab.serve(stored)
    host.step(20)
    lab.expect(lab.again(stored), 64)


def async_scheduling(lab: Lab) -> None:
    """A step may be scheduled before the last one's results are in. [async_scheduler.py]"""
    lab.start(in_flight=2)
    asks = [lab.ask(count, max_tokens=9) for count in (69, 20, 50)]
    lab.serve(*asks)
    lab.expect(lab.again(asks[0], max_tokens=6), 64)


def preempted(lab: Lab, **setup: Any) -> None:
    """A request that lost its blocks resumes, and its KV is right. [scheduler.py,
    _preempt_request: the connector is not asked]"""
    host = lab.start(**setup)
    stored = lab.store_prompt(lab.ask(40))
    lab.forget()
    for steps, ask in ((4, lab.again(stored)), (1, lab.ask(69)), (8, lab.ask(30))):
        answer = host.add(replace(ask, max_tokens=25))
        host.step(steps)
        host.preempt()
        host.run()
        turn = lab.ask(ask.tokens + tuple(answer.tokens))
        with suppress(MissedError):  # another rule says that it is stored
            lab.expect(turn, (len(turn.tokens) - 1) // 16 * 16)
    lab.expect(lab.again(stored), 32)


def preempted_runner_2(lab: Lab) -> None:
    """The second model runner shows a resumed request as a new one. [scheduler.py, schedule]"""
    preempted(lab, runner=2)


def full_pool(lab: Lab) -> None:
    """Requests that take blocks from each other are right in the end. [scheduler.py, schedule]"""
    lab.start(num_blocks=14, budget=48)
    asks = [lab.ask(count, max_tokens=30) for count in (40, 69, 20, 55)]
    lab.serve(*asks)
    lab.forget()
    lab.serve(*[lab.again(ask) for ask in asks])


def second_look_up(lab: Lab) -> None:
    """A look-up may be repeated with another number of local tokens. [scheduler.py, schedule]"""
    host = lab.start()
    stored = lab.store_prompt(lab.ask(85))
    lab.forget()
    waiting = lab.ask(stored.tokens[:80] + lab.tokens(9))
    host.watch.hold.add(waiting.name)
    host.add(waiting)
    host.step(3)
    other = host.add(lab.ask(stored.tokens[:37], max_tokens=3))
    while other.reason is None:
        host.step()
    host.watch.hold.clear()
    host.run()


def growing_session(lab: Lab) -> None:
    """A session grows by tokens, and what it computes is stored right. [scheduler.py,
    _update_request_as_session: its last token is taken back]"""
    host = lab.start()
    ask = lab.ask(50, max_tokens=6, grows=True)
    answer = host.add(ask)
    for count in (30, 47, 5):
        wanted = len(answer.tokens) + 6
        while len(answer.tokens) < wanted:
            host.step()
        host.add(Ask(name=ask.name, tokens=lab.tokens(count), max_tokens=6, grows=count > 5))
    host.run()
    lab.expect(lab.ask(ask.tokens), 48, "the first turn of a session")


def unused_promise(lab: Lab) -> None:
    """A hit that the host does not take leaves nothing behind. [multi_connector.py]"""
    host = lab.start()
    stored = lab.store_prompt(lab.ask(69))
    lab.forget()
    host.watch.refuse = True
    lab.serve(lab.again(stored, max_tokens=5))
    host.watch.refuse = False
    lab.expect(lab.again(stored), 64)


def late_allocation(lab: Lab) -> None:
    """A hit may find no blocks for a while, and is used later. [scheduler.py, schedule]"""
    host = lab.start(num_blocks=11)
    stored = lab.store_prompt(lab.ask(101))
    lab.forget()
    hog, late = lab.ask(70, max_tokens=30), lab.again(stored, max_tokens=2)
    host.add(hog)
    host.step()
    host.add(late)
    host.step(5)
    if host.answers[late.name].hits:
        raise RuleBrokenError("there were blocks at once")
    host.run()


def local_blocks(lab: Lab) -> None:
    """A load writes the blocks that it brings, and none of the engine's own hit. [scheduler.py:
    other requests read these]"""
    host = lab.start()
    stored = lab.store_prompt(lab.ask(69))
    lab.forget()
    lab.serve(lab.ask(stored.tokens[:37]))
    host.marks_local_blocks = True
    if not lab.serve(lab.again(stored))[0].hit:
        raise MissedError("nothing was reused beyond a local hit")


def aborts(lab: Lab) -> None:
    """A request may be aborted in every phase. [scheduler.py, finish_requests]"""
    host = lab.start()
    stored = lab.store_prompt(lab.ask(69))
    for steps in range(8):
        lab.forget()
        ask = lab.again(stored, max_tokens=9) if steps % 2 else lab.ask(69, max_tokens=3)
        host.add(ask)
        host.step(steps // 2)
        host.abort(ask.name)
    lab.expect(lab.again(stored), 64)


def abort_after_promise(lab: Lab) -> None:
    """A request may be aborted as soon as its load is promised; the load still ends. [scheduler.py,
    finish_requests: the blocks wait for it]"""
    host = lab.start()
    stored = lab.store_prompt(lab.ask(69))
    lab.forget()
    ask = lab.again(stored, max_tokens=3)
    host.watch.wanted[ask.name] = 64
    host.add(ask)
    while not host.answers[ask.name].hits:
        host.step()
    host.abort(ask.name)
    lab.expect(lab.again(stored), 64)


def random_walk(lab: Lab, **setup: Any) -> None:
    """Any mix of arrivals, aborts and preemptions ends right, with no block held. [scheduler.py]"""
    host, source = lab.start(num_blocks=24, budget=40, **setup), lab.random
    roots = [lab.tokens(120) for _ in range(3)]
    answers: list[Answer] = []
    for _ in range(60):
        action = source.random()
        if action < 0.35:
            shared = source.choice(roots)[: source.choice((0, 16, 33, 48, 80))]
            tokens = shared + lab.tokens(source.randrange(1, 50))
            answers.append(host.add(lab.ask(tokens, max_tokens=source.randrange(1, 20))))
        elif action < 0.43 and answers:
            host.abort(source.choice(answers).ask.name)
        elif action < 0.5 and not host.watch.is_loading():
            host.preempt()
        host.step(source.randrange(4))
    host.run()
    lab.serve(*[lab.ask(root[:100]) for root in roots])


def random_walk_async(lab: Lab) -> None:
    """The same with two steps in flight. [async_scheduler.py]"""
    random_walk(lab, in_flight=2)


def random_walk_ranks(lab: Lab) -> None:
    """The same with two ranks, of which one reports late. [KVOutputAggregator]"""
    random_walk(lab, ranks=2, late_rank=3)


def no_attention_metadata(lab: Lab) -> None:
    """A promised load happens though there is no attention metadata. [vllm/v1/worker/gpu: replayed
    graphs have none]"""
    lab.start()
    stored = lab.store_prompt(lab.ask(69))
    lab.stop()
    lab.start(attention_metadata=False)
    lab.expect(lab.again(stored), 64)


# --- what operators see ---------------------------------------------------------------------------


def reset(lab: Lab) -> None:
    """After a reset that reports success, nothing stored before is reused. [base.py, reset_cache:
    called after an update of weights]"""
    host = lab.start()
    stored = lab.store_prompt(lab.ask(69))
    lab.forget()
    with host.blamed():
        if host.scheduler_half.reset_cache() is False:
            raise NotHereError("the class reports that it cannot reset")
    lab.expect_none(lab.again(stored), "after reset_cache() reported success")


def sleep(lab: Lab) -> None:
    """KV memory may be unmapped and come back empty. [vLLM 0.33, sleep mode]"""
    host = lab.start()
    if not hasattr(host.worker_halves[0], "unregister_kv_caches"):
        raise NotHereError("the class has no hooks for sleep")
    stored = lab.store_prompt(lab.ask(69))
    lab.forget()
    with host.blamed():
        for half in host.worker_halves:
            half.unregister_kv_caches()
        for memory in host.memories:
            memory.empty(range(host.setup.num_blocks))
        for half in host.worker_halves:
            half.restore_kv_caches()
    lab.expect(lab.again(stored), 64)


def shutdown_under_load(lab: Lab) -> None:
    """A shutdown with requests under way ends, and what was stored is right. [base.py, shutdown]"""
    host = lab.start()
    asks = [lab.ask(count, max_tokens=20) for count in (69, 101, 40, 50)]
    if lab.part == 0:
        for ask in asks:
            host.add(ask)
        host.step(3)
    else:
        lab.serve(*asks)


def statistics(lab: Lab) -> None:
    """Statistics survive the way to the process that logs them, and add up. [metrics.py]"""
    host = lab.start()
    lab.store_prompt(lab.ask(69))
    stats = host.last_stats
    if stats is None:
        raise NotHereError("the class reports none")
    with host.blamed():
        make = partial(lab.connector.build_kv_connector_stats, data=dict(stats.data))
        if make() is None:
            raise RuleBrokenError("build_kv_connector_stats makes nothing of the class's own data")
        once, twice = make().reduce(), make().aggregate(make()).reduce()
    if once.keys() != twice.keys():
        raise RuleBrokenError(f"{sorted(once)} added to themselves are {sorted(twice)}")


def quiet(lab: Lab) -> None:
    """A hit adds no line to the log at INFO. [operators: a line for each request is a flood]"""
    lab.start()
    stored = lab.store_prompt(lab.ask(69))
    name, lines = lab.connector.__module__, []
    where = Path(str(sys.modules[name].__file__))
    where = where if name.startswith("vllm.") else where.parents[name.count(".")]

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if Path(record.pathname).is_relative_to(where):
                lines.append(record.getMessage())

    for logger in (logging.getLogger(), logging.getLogger("vllm"), logging.getLogger("kvferry")):
        logger.addHandler(Handler(logging.INFO))
    for _ in range(5):
        lab.expect(lab.again(stored), 64)
    if len(lines) >= 5:
        raise RuleBrokenError(f"{len(lines)} lines for 5 hits, such as {lines[-1]!r}")


def quick_look_ups(lab: Lab) -> None:
    """A look-up asks no file system. [scheduler.py, schedule: all requests wait for it]"""
    host = lab.start()
    stored = lab.store_prompt(lab.ask(69))
    calls: set[str] = set()
    host.watch.around = partial(_noted_files, calls)
    lab.expect(lab.again(stored), 64)
    if calls:
        raise RuleBrokenError(f"a look-up called {', '.join(sorted(calls))}")


@contextmanager
def _noted_files(calls: set[str]) -> Iterator[None]:
    """Note which functions of the file system are called."""
    places: list[tuple[Any, str]] = [(builtins, "open")]
    places += [(os, name) for name in ("stat", "lstat", "open", "listdir", "scandir", "access")]
    before = [getattr(module, name) for module, name in places]

    def noted(name: str, function: Any, *args: Any, **more: Any) -> Any:
        calls.add(name)
        return function(*args, **more)

    for (module, name), function in zip(places, before, strict=True):
        setattr(module, name, partial(noted, f"{module.__name__}.{name}()", function))
    try:
        yield
    finally:
        for (module, name), function in zip(places, before, strict=True):
            setattr(module, name, function)
