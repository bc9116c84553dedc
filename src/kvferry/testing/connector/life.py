"""Cases: the life of requests."""

# ruff: noqa: ANN401 - fields of setups

from __future__ import annotations

import gc
import logging
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

from kvferry.testing.connector.content import Ask, Row
from kvferry.testing.connector.host import CaseEnd, KitHost
from kvferry.testing.connector.lab import Lab
from kvferry.testing.connector.rules import Table, flags, restarted, stored
from kvferry.testing.connector.watch import MOST_SECONDS, LookUpWatch

_ROUNDS = 5


def _turn_after(lab: Lab, ask: Ask, tokens: int) -> None:
    """Expect that the turn after a request reuses what was answered."""
    said = ask.tokens + tuple(lab.serve(ask)[0].said)
    lab.expect(lab.ask(said + lab.tokens(5)), tokens, "the turn after")


def _preempted(lab: Lab, runner: int) -> None:
    host = lab.start(runner=runner)
    stored = lab.store_prompt(lab.ask(40))
    lab.forget()
    for steps, ask in ((4, lab.again(stored)), (1, lab.ask(69)), (8, lab.ask(30))):
        row = host.add(replace(ask, max_tokens=25))
        host.step(steps)
        host.preempt()
        host.run()
        said = ask.tokens + tuple(row.said)
        with lab.unless("miss"):
            lab.expect(lab.ask(said), (len(said) - 1) // 16 * 16)
    lab.expect(lab.again(stored), 32)


def _preempted_in_chunks(lab: Lab, runner: int) -> None:
    host = lab.start(budget=23, runner=runner)
    for steps in (1, 2, 3, 5):
        asks = [lab.ask(101, max_tokens=3), lab.ask(75, max_tokens=3)]
        for ask in asks:
            host.add(ask)
        host.step(steps)
        if not host.is_half_computed():
            raise CaseEnd("wrong", f"no prompt is half computed after {steps} steps")
        host.preempt()
        # What comes first now gets the blocks that the others had.
        host.add(lab.ask(20, max_tokens=9))
        host.run()
        for ask, tokens in zip(asks, (96, 64), strict=True):
            lab.expect(lab.again(ask), tokens)


def _until_ended(host: KitHost, ask: Ask) -> None:
    row = host.add(ask)
    while row.reason is None:
        host.step()


def _reused(lab: Lab, tokens: int, **host: Any) -> None:
    """Expect a hit in a host that is so."""
    stored = lab.stored()
    vars(lab.host).update(host)
    lab.expect(lab.again(stored, max_tokens=5), tokens)


def _random_walk(lab: Lab, **setup: Any) -> None:
    host, source = lab.start(num_blocks=24, budget=40, **setup), lab.random
    roots = [lab.tokens(120) for _ in range(3)]
    rows: list[Row] = []
    for number in range(80):
        action = source.random()
        if number % 20 == 9:  # longer than the budget, and none of it is stored
            rows.append(host.add(lab.ask(source.randrange(90, 140), max_tokens=3)))
        elif action < 0.35:
            shared = source.choice(roots)[: source.choice((0, 16, 33, 48, 80))]
            tokens = shared + lab.tokens(source.randrange(1, 50))
            rows.append(host.add(lab.ask(tokens, max_tokens=source.randrange(1, 20))))
        elif action < 0.43 and rows:
            host.abort(source.choice(rows))
        elif action < 0.48 and not host.is_loading():
            host.preempt()
        for _ in range(source.randrange(4)):
            host.step()
            if host.is_half_computed() and source.random() < 0.15 and not host.is_loading():
                host.preempt()
    host.run()
    lab.serve(*[lab.ask(root[:100]) for root in roots])


def _short_prompts(lab: Lab) -> None:
    lab.start()
    for count in (15, 16, 5, 1, 2):
        lab.serve(lab.ask(count))
        lab.expect_none(lab.ask(count), f"a prompt of {count} tokens")


def _states(lab: Lab) -> None:
    lab.start(model="states")
    for count in (69, 33, 48, 17):
        ask = lab.store_prompt(lab.ask(count))
        lab.serve(lab.again(ask))  # by a hit of the engine's own, in blocks that a load has filled


def _states_in_a_full_pool(lab: Lab) -> None:
    lab.start(model="states", num_blocks=22, budget=48)
    asks = [lab.ask(count, max_tokens=30) for count in (69, 85, 53, 101)]
    for _ in range(3):
        lab.serve(*asks)
        lab.forget()
        asks = [lab.again(ask) for ask in asks]
    for ask in asks:
        lab.expect(lab.again(ask), (len(ask.tokens) - 1) // 16 * 16)


def _states_of_a_junction(lab: Lab) -> None:
    lab.start(model="states")
    shared = lab.tokens(40)
    for count in (40, 30, 20):
        lab.serve(lab.ask(shared + lab.tokens(count)))
        lab.forget()
    lab.serve(lab.ask(shared[:35]), lab.ask(shared[:20] + lab.tokens(40)))


TABLE: Table = (
    ("starts", "Both halves start, and shut down. [base.py]", stored()),
    ("reuse", "An engine reuses the whole blocks of a prompt that it stored. [base.py]",
     stored(69)),
    ("restart", "A stored prompt is reused after a restart. [base.py]",
     restarted({}, {}, must=True, fresh=True)),
    ("one_over_a_block", "A prompt of one token more than whole blocks hits all of these. "
     "[scheduler.py, schedule]", stored(17, 33, 49)),
    ("whole_blocks", "A prompt of whole blocks hits all but the last, since its last token is "
     "always computed. [scheduler.py, schedule: it asserts that tokens are left]",
     stored(18, 32, 48, 64)),
    ("chunked_prefill", "A prompt that is computed in chunks is stored whole. [scheduler.py: only "
     "the blocks of its first chunk come with a new request]", stored(101, 69, budget=23)),
    ("two_ranks", "Each of two ranks gets its own heads back. [parallel_state.py]",
     restarted({"ranks": 2}, {"ranks": 2}, must=True)),
    ("two_groups", "Layers with a window and layers without are reused together. [base.py, "
     "SupportsHMA]", stored(101, 69, model="windows", budget=64)),
    ("states", "The state of a recurrent layer is reused with the KV before it. A load that begins "
     "in the step of its request comes after the runner has copied the state on, so it fills the "
     "last block, too; one that ends before fills the block at the hit's end. [gpu_model_runner.py:"
     " preprocess_mamba comes before start_load_kv]", _states),
    ("states_of_two_ranks", "Each of two ranks gets its own share of a state back. "
     "[parallel_state.py]",
     restarted({"model": "states", "ranks": 2}, {"model": "states", "ranks": 2}, must=True)),
    ("states_of_shared_prefixes", "Prompts that part where no state is known are right. "
     "[scheduler.py, _mamba_block_aligned_split: states are kept at few places]",
     _states_of_a_junction),
    ("states_in_a_full_pool", "Requests with states that take blocks from each other are right in "
     "the end: the host says in which block a state is, at each step. [sched/output.py, "
     "KVConnectorBlockState; vllm#46892: a synchronous load takes a block more than is counted]",
     flags(wide=True)(_states_in_a_full_pool)),
    ("full_graphs", "KV is stored in replayed graphs, where layers have no hooks, or the class "
     "asks for piecewise graphs. [base.py, requires_piecewise_for_cudagraph]",
     stored(69, hooks=False)),
    ("short_prompts", "Prompts no longer than a block hit nothing, and no count is negative. "
     "[scheduler.py, schedule: it takes a negative count as it is]", _short_prompts),
    ("longer_prompt", "A longer prompt reuses a stored one that it begins with. "
     "[kv_cache_utils.py: block hashes]",
     lambda lab: lab.expect(lab.ask(lab.stored().tokens + lab.tokens(40)), 64)),
    ("shared_prefix", "A prompt reuses the blocks before it parts from a stored one. "
     "[kv_cache_utils.py]",
     lambda lab: lab.expect(lab.ask(lab.stored().tokens[:40] + lab.tokens(40)), 32)),
    ("generated_tokens", "A turn reuses what the turn before generated. [scheduler.py: block "
     "hashes cover output]",
     lambda lab: _turn_after(lab, lab.started().ask(20, max_tokens=45), 64)),
    ("hit_then_more", "A request that hit stores what it computes beyond its hit. [base.py]",
     lambda lab: _turn_after(lab, lab.again(lab.stored(40), max_tokens=40), 64)),
    ("preempted", "A request that lost its blocks resumes, and its KV is right: new blocks of one "
     "in resumed_req_ids replace those it had. [scheduler.py, _preempt_request: the connector is "
     "not asked]", partial(_preempted, runner=1)),
    ("preempted_runner_2", "The second model runner shows a resumed request as a new one. "
     "[scheduler.py, schedule]", partial(_preempted, runner=2)),
    ("preempted_in_chunks", "A request that loses its blocks when half of its prompt is computed "
     "is stored whole and right. [scheduler.py: it comes again in resumed_req_ids, with the blocks "
     "of its first chunk]", partial(_preempted_in_chunks, runner=1)),
    ("preempted_in_chunks_runner_2", "The same with the second model runner. [scheduler.py, "
     "schedule]", partial(_preempted_in_chunks, runner=2)),
    ("part_of_a_promise", "A host may take fewer tokens than it was promised. [base.py, "
     "update_state_after_alloc]", partial(_reused, tokens=32, most=32)),
    ("repeated_reports", "Reports of ended transfers may come twice, or be another connector's. "
     "[multi_connector.py: it passes each report to all]",
     partial(_reused, tokens=64, repeats_reports=True)),
    ("random_walk", "Any mix of arrivals, aborts and preemptions, also of half a prompt, ends "
     "right, with no block held. "
     "[scheduler.py]", flags(wide=True)(partial(_random_walk))),
    ("random_walk_async", "The same with two steps in flight. [async_scheduler.py]",
     flags(wide=True)(partial(_random_walk, in_flight=2))),
    ("random_walk_states", "The same with recurrent layers. [scheduler.py]",
     flags(wide=True)(partial(_random_walk, model="states"))),
    ("random_walk_states_async", "The same with recurrent layers and two steps in flight. "
     "[async_scheduler.py]",
     flags(wide=True)(partial(_random_walk, model="states", in_flight=2))),
    ("random_walk_ranks", "The same with two ranks, of which one reports late. "
     "[KVOutputAggregator]", flags(wide=True)(partial(_random_walk, ranks=2, late_rank=3))),
)  # fmt: skip


def same_step(lab: Lab) -> None:
    """Equal and overlapping prompts of one step are all right, and stored. [scheduler.py: blocks
    are shared when they are allocated]"""
    lab.start()
    one = lab.ask(69)
    parts = lab.ask(one.tokens[:48] + lab.tokens(9)), lab.ask(one.tokens[:33])
    lab.serve(one, lab.again(one), *parts)
    lab.expect(lab.again(one), 64)


def steps_without_tokens(lab: Lab) -> None:
    """Steps without tokens bring all hooks but those of layers. [kv_connector_no_forward]"""
    host, stored = lab.start(), lab.ask(69)
    host.step(5)
    lab.serve(stored)
    host.step(20)
    lab.expect(lab.again(stored), 64)


def async_scheduling(lab: Lab) -> None:
    """A step may be scheduled before the last one's results are in. [async_scheduler.py]"""
    lab.start(in_flight=2)
    asks = [lab.ask(count, max_tokens=9) for count in (69, 20, 50)]
    lab.serve(*asks)
    lab.expect(lab.again(asks[0], max_tokens=6), 64)


@flags(wide=True)
def full_pool(lab: Lab) -> None:
    """Requests that take blocks from each other are right in the end. [scheduler.py, schedule]"""
    lab.start(num_blocks=14, budget=48)
    asks = [lab.ask(count, max_tokens=30) for count in (40, 69, 20, 55)]
    lab.serve(*asks)
    lab.forget()
    lab.serve(*[lab.again(ask) for ask in asks])


def second_look_up(lab: Lab) -> None:
    """A look-up may be repeated with another number of local tokens. [scheduler.py, schedule]"""
    stored, host = lab.stored(85), lab.host
    waiting = lab.ask(stored.tokens[:80] + lab.tokens(9))
    host.hold.add(waiting.name)
    host.add(waiting)
    host.step(3)
    other = host.add(lab.ask(stored.tokens[:37], max_tokens=3))
    while other.reason is None:
        host.step()
    host.hold.clear()
    host.run()


def growing_session(lab: Lab) -> None:
    """A session grows by tokens, and what it computes is stored right. [scheduler.py,
    _update_request_as_session: its last token is taken back]"""
    host, ask = lab.start(), lab.ask(50, max_tokens=6, grows=True)
    row = host.add(ask)
    for count in (30, 47, 5):
        wanted = len(row.said) + 6
        while len(row.said) < wanted:
            host.step()
        host.add(replace(ask, tokens=lab.tokens(count), grows=count > 5))
    host.run()
    lab.expect(lab.ask(ask.tokens), 48, "the first turn of a session")


def unused_promise(lab: Lab) -> None:
    """A hit that the host does not take leaves nothing behind. [multi_connector.py]"""
    stored = lab.stored()
    lab.host.most = 0
    lab.serve(lab.again(stored, max_tokens=5))
    lab.host.most = 64
    lab.expect(lab.again(stored), 64)


def late_allocation(lab: Lab) -> None:
    """A hit may find no blocks for a while, and is used later. [scheduler.py, schedule]"""
    stored, host = lab.stored(101, num_blocks=11), lab.host
    host.add(lab.ask(70, max_tokens=30))
    host.step()
    late = host.add(lab.again(stored, max_tokens=2))
    host.step(5)
    if late.hits:
        raise CaseEnd("wrong", "there were blocks at once")
    host.run()


def local_blocks(lab: Lab) -> None:
    """A load writes the blocks that it brings, and none of the engine's own hit. [scheduler.py:
    other requests read these]"""
    stored = lab.stored()
    lab.serve(lab.ask(stored.tokens[:37]))
    lab.host.hides_local_blocks = True
    if not lab.serve(lab.again(stored))[0].hit:
        raise CaseEnd("miss", "nothing was reused beyond a local hit")


def aborts(lab: Lab) -> None:
    """A request may be aborted in every phase. [scheduler.py, finish_requests]"""
    stored, host = lab.stored(), lab.host
    for steps in range(8):
        lab.forget()
        ask = lab.again(stored, max_tokens=9) if steps % 2 else lab.ask(69, max_tokens=3)
        row = host.add(ask)
        host.step(steps // 2)
        host.abort(row)
    lab.expect(lab.again(stored), 64)


def abort_after_promise(lab: Lab) -> None:
    """A request may be aborted as soon as its load is promised; the load still ends. [scheduler.py,
    finish_requests: the blocks wait for it]"""
    stored, host = lab.stored(), lab.host
    ask = lab.again(stored, max_tokens=3)
    host.wanted[ask.name] = 64
    row = host.add(ask)
    while not row.hits:
        host.step()
    host.abort(row)
    lab.expect(lab.again(stored), 64)


def no_attention_metadata(lab: Lab) -> None:
    """A promised load happens though there is no attention metadata. [vllm/v1/worker/gpu: replayed
    graphs have none]"""
    stored = lab.stored()
    lab.close()
    lab.start(attention_metadata=False)
    lab.expect(lab.again(stored), 64)


def forgotten_requests(lab: Lab) -> None:
    """A request that ended, was aborted or never ran is forgotten. [operators: engines serve
    millions of requests]"""
    host, count = lab.start(), 40
    stored = lab.store_prompt(lab.ask(37))
    host.seen_requests.clear()
    for number in range(count):
        row = host.add(lab.ask(9) if number % 2 else lab.again(stored))
        host.step(number % 3 + 1)
        if number % 4 == 0:
            host.abort(row)
    host.run()
    host.step(3)
    gc.collect()
    kept = {id(each()) for each in host.seen_requests if each() is not None}
    if len(kept) > count // 4:
        raise CaseEnd("wrong", f"{len(kept)} of {count} requests are kept after their end")


# --- what operators see ---------------------------------------------------------------------------


def reset(lab: Lab) -> None:
    """After a reset that reports success, nothing stored before is reused. [base.py, reset_cache:
    called after an update of weights]"""
    stored = lab.stored()
    with lab.host.blamed():
        answer = lab.host.scheduler_half.reset_cache()
    if answer is False:
        raise CaseEnd("not run", "the class reports that it cannot reset")
    lab.expect_none(lab.again(stored), f"after reset_cache() returned {answer}, a success")


@flags(may=("miss",))
def sleep(lab: Lab) -> None:
    """KV memory may be unmapped and come back empty. [vLLM 0.33, sleep mode]"""
    host = lab.start()
    if not hasattr(host.worker_halves[0], "unregister_kv_caches"):
        raise CaseEnd("not run", "the class has no hooks for sleep")
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


@flags(parts=2, wide=True)
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
    lab.stored()
    stats = lab.host.last_stats
    if stats is None:
        raise CaseEnd("not run", "the class reports none")
    with lab.host.blamed():
        make = partial(lab.connector.build_kv_connector_stats, data=dict(stats.data))
        if make() is None:
            raise CaseEnd("wrong", "build_kv_connector_stats makes nothing of the class's own data")
        once, twice = make().reduce(), make().aggregate(make()).reduce()
    if once.keys() != twice.keys():
        raise CaseEnd("wrong", f"{sorted(once)} added to themselves are {sorted(twice)}")


def quiet(lab: Lab) -> None:
    """A hit adds no line to the log at INFO. [operators: a line for each request is a flood]"""
    stored, handler = lab.stored(), BufferingHandler(1 << 20)
    name = lab.connector.__module__
    where = Path(str(sys.modules[name].__file__))
    where = where if name.startswith("vllm.") else where.parents[name.count(".")]
    handler.setLevel(logging.INFO)
    for logger in (logging.getLogger(), logging.getLogger("vllm"), logging.getLogger("kvferry")):
        logger.addHandler(handler)
    for _ in range(5):
        lab.expect(lab.again(stored), 64)
    lines = [each for each in handler.buffer if Path(each.pathname).is_relative_to(where)]
    if len(lines) >= 5:
        said = lines[-1].getMessage()
        raise CaseEnd("wrong", f"{len(lines)} lines for 5 hits, such as {said!r}")


def quick_look_ups(lab: Lab) -> None:
    """A look-up asks no file, socket or other process, waits for no lock, and does not compute for
    long. [scheduler.py, schedule: all requests wait for it]"""
    stored, watch = [lab.stored()], LookUpWatch()
    stored += [lab.store_prompt(lab.ask(69)) for _ in range(_ROUNDS)]
    lab.host.around = watch.noted
    lab.expect(lab.again(stored.pop()), 64)
    lab.serve(lab.ask(69))
    if watch.calls:
        raise CaseEnd("wrong", f"a look-up called {', '.join(sorted(watch.calls))}")
    lab.forget()
    for ask in stored:
        watch.begin_round()
        lab.host.around = nullcontext
        _until_ended(lab.host, lab.ask(69))  # it may still be being stored
        lab.host.around = watch.timed
        _until_ended(lab.host, lab.again(ask))
    for is_slow, does in ((watch.waits, "wait"), (watch.computes, "compute")):
        if is_slow:
            raise CaseEnd("wrong", f"look-ups {does} for more than {MOST_SECONDS * 1e3:.0f} ms")
