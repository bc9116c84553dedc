"""The scheduler as host of the connector contract, against a pretend model that shows wrong KV."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection

import pytest

from kvferry.contract.messages import ASK_AGAIN, MISS, LookupResult, WorkerOutput
from kvferry.engine.request import FinishReason
from kvferry.engine.scheduler import MAX_FAILED_LOADS
from kvferry.errors import ContractError
from tests.engine.simulation import Choices, Simulation, reference

SIZE = 4


def prompt(length: int, seed: int = 0) -> list[int]:
    return [100 + (seed * 37 + i * 7) % 211 for i in range(length)]


def output_of(request) -> list[int]:
    return request.all_token_ids[request.num_prompt_tokens :]


def assert_right(request, count: int) -> None:
    assert output_of(request) == reference(
        request.all_token_ids[: request.num_prompt_tokens], count
    )


class Hits(Choices):
    """Offers up to `blocks` blocks, sync or async."""

    def __init__(self, blocks: int = 99, *, is_async: bool = False, ask_again: int = 0) -> None:
        self.blocks, self.is_async, self.ask_again = blocks, is_async, ask_again
        self.fail_at: list[int | None] = []
        self.hold = False
        self.delay = False

    def lookup(self, request, num_local_tokens, limit):
        if self.ask_again > 0:
            self.ask_again -= 1
            return ASK_AGAIN
        count = min(limit, self.blocks)
        if not self.is_async:
            count = min(count, (request.num_tokens - 1 - num_local_tokens) // SIZE)
        return LookupResult(count * SIZE, self.is_async) if count > 0 else MISS

    def failed_from(self, load):
        return self.fail_at.pop(0) if self.fail_at else None

    def ends_now(self, load):
        return not self.hold

    def delays_free(self, request):
        return self.delay

    def sent_now(self, request_id):
        return not self.hold


# ---- batching without hits


def test_a_batch_shares_the_token_budget():
    sim = Simulation(max_batched_tokens=10)
    requests = [sim.send(prompt(7, seed=i), max_tokens=4) for i in range(4)]
    step = sim.step()
    assert [entry.num_scheduled_tokens for entry in step.scheduled] == [7, 3]
    sim.run()
    for request in requests:
        assert_right(request, 4)


def test_stop_token_ends_a_request():
    expected = reference(prompt(9), 4)
    sim = Simulation()
    request = sim.send(prompt(9), max_tokens=50, stop_token_ids=frozenset({expected[2]}))
    sim.run()
    assert output_of(request) == expected[:3]
    assert request.outcome.reason is FinishReason.STOP


def test_local_prefix_is_shared_in_whole_blocks_and_never_the_last_token():
    sim = Simulation()
    sim.send(prompt(13))
    sim.run()
    for length, hit in [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]:
        request = sim.send(prompt(13)[:length])
        sim.run()
        assert request.hit.num_local_tokens == hit
        assert_right(request, 3)


def test_prefix_caching_off_shares_nothing():
    sim = Simulation(prefix_caching=False)
    for _ in range(2):
        request = sim.send(prompt(13))
        sim.run()
        assert request.hit.num_local_tokens == 0
    sharing = Simulation()
    known = sharing.send(prompt(13))
    sharing.run()
    assert not any(sim.pool.find_prefix([key]) for key in known.blocks.keys.keys)


def test_preemption_takes_the_last_and_resumes_it_right():
    # 9 blocks: two requests of 5 blocks cannot end side by side.
    sim = Simulation(num_blocks=10, prefix_caching=False)
    first, second = sim.send(prompt(8), max_tokens=12), sim.send(prompt(8, seed=1), max_tokens=12)
    preempted = set()
    while sim.engine.has_work():
        preempted |= sim.step().preempted_request_ids
    assert preempted == {second.request_id}
    assert_right(first, 12)
    assert_right(second, 12)
    assert sim.role.count("lookup", second.request_id) >= 2, "resuming asks again"
    assert sim.role.count("finished", second.request_id) == 1


def test_a_request_that_can_never_fit_and_a_repeated_id_are_refused():
    sim = Simulation(num_blocks=5)
    with pytest.raises(ContractError, match="may need 5 blocks, the pool has 4"):
        sim.send(prompt(14), max_tokens=3)
    request = sim.send(prompt(4))
    with pytest.raises(ContractError, match="in use"):
        sim.engine.add(request)


# ---- hits


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("length", [5, 8, 9, 16, 43])
def test_a_hit_is_used(length, is_async):
    sim = Simulation(Hits(is_async=is_async))
    request = sim.send(prompt(length))
    sim.run()
    assert_right(request, 3)
    whole = length if is_async else length - 1
    assert request.hit.num_external_tokens == whole // SIZE * SIZE
    assert sim.role.count("alloc", request.request_id) == (2 if is_async else 1)


def test_external_hits_come_behind_local_ones():
    sim = Simulation(Hits(blocks=0))
    sim.send(prompt(9))
    sim.run()
    sim.choices.blocks = 99
    request = sim.send(prompt(43))
    sim.run()
    assert request.hit == (8, 32)
    assert_right(request, 3)


def test_ask_again_lets_others_pass_and_ends():
    class Picky(Hits):
        def lookup(self, request, num_local_tokens, limit):
            if request.request_id == "r0":
                return super().lookup(request, num_local_tokens, limit)
            return MISS

    sim = Simulation(Picky(ask_again=5))
    waiting, passing = sim.send(prompt(20)), sim.send(prompt(9, seed=1), max_tokens=1)
    step = sim.step()
    assert [entry.request for entry in step.scheduled] == [passing]
    assert not sim.step().scheduled, "only one that waits is left: a step without tokens"
    sim.run()
    assert waiting.hit.num_external_tokens == 16
    assert_right(waiting, 3)


def test_ask_again_for_ever_is_a_miss_after_the_deadline():
    sim = Simulation(Hits(ask_again=10**9), load_deadline_seconds=2.0)
    request = sim.send(prompt(20))
    for _ in range(3):
        assert not sim.step().scheduled
    sim.clock.advance(1.99)
    assert not sim.step().scheduled
    sim.clock.advance(0.02)
    assert sim.step().scheduled
    sim.run()
    assert_right(request, 3)
    assert sim.unexpected["lookup_deadline"] == 1


# ---- loads that fail


def test_a_connector_that_never_keeps_its_promise_is_not_asked_for_ever():
    choices = Hits(is_async=True)
    choices.fail_at = [0] * 1000
    sim = Simulation(choices)
    request = sim.send(prompt(20))
    sim.run(max_steps=50)
    assert_right(request, 3)
    assert request.hit.num_external_tokens == 0
    assert sim.role.count("lookup") == MAX_FAILED_LOADS


def test_a_shared_bad_block_is_recomputed_for_every_request_that_uses_it():
    sim = Simulation(Hits(blocks=0), max_batched_tokens=64)
    first = sim.send(prompt(17), max_tokens=9)
    sim.step()
    second = sim.send(prompt(17), max_tokens=9)
    sim.step()
    assert second.hit.num_local_tokens == 16
    shared = first.block_ids[1]
    assert second.block_ids[1] == shared
    sim.spoil(first.block_ids[1:])
    step = sim.engine.schedule()
    sim.forward(step)
    sampled = len(sim.sampled)
    bad = WorkerOutput(invalid_block_ids=frozenset({shared}))
    sim.engine.update(step, bad, sim.sample)
    sim.check()
    assert len(sim.sampled) == sampled, "tokens of the spoiled step are dropped"
    assert first.num_computed_tokens == second.num_computed_tokens == SIZE
    late = sim.send(prompt(17))
    sim.run()
    for request, count in ((first, 9), (second, 9), (late, 3)):
        assert_right(request, count)


def test_what_was_computed_from_a_bad_block_is_forgotten_even_if_its_owner_is_gone():
    sim = Simulation()
    first = sim.send(prompt(16), max_tokens=1)
    sim.step()
    assert first.outcome is not None
    keys = first.blocks.keys.keys
    found = sim.pool.find_prefix(keys)
    assert len(found) == 4
    step = sim.engine.schedule()
    bad = WorkerOutput(invalid_block_ids=frozenset({found[1], 10**6}))
    sim.engine.update(step, bad, sim.sample)
    assert [sim.pool.find_prefix([key]) for key in keys] == [found[:1], [], [], []]


def test_what_was_computed_from_a_bad_copy_of_a_known_block_is_forgotten():
    sim = Simulation(max_batched_tokens=64)
    sim.send(prompt(9), max_tokens=9)
    longer = sim.send(prompt(20), max_tokens=9)
    sim.step()
    keys = longer.blocks.keys.keys
    found = sim.pool.find_prefix(keys)
    assert found[:2] != longer.block_ids[:2], "both computed the start; the first one is known"
    assert found[2:] == longer.block_ids[2:5]
    step = sim.engine.schedule()
    sim.forward(step)
    bad = WorkerOutput(invalid_block_ids=frozenset({longer.block_ids[0]}))
    sim.engine.update(step, bad, sim.sample)
    assert sim.pool.find_prefix(keys) == found[:2]


# ---- ends


def test_delayed_free_without_blocks_is_waited_for_as_well():
    choices = Hits(blocks=0)
    choices.delay = choices.hold = True
    sim = Simulation(choices)
    request = sim.send(prompt(9))
    assert sim.abort(request)
    assert not sim.abort(request)
    sim.step()
    assert sim.engine.has_work()
    with pytest.raises(ContractError, match="in use"):
        sim.engine.add(request)
    choices.hold = False
    sim.run()


# ---- a connector that hangs


def test_a_request_ends_with_an_error_when_lent_blocks_never_come_back():
    choices = Hits(is_async=True)
    choices.hold = True
    sim = Simulation(choices, num_blocks=8, load_deadline_seconds=2.0)
    request = sim.send(prompt(20))
    sim.step()
    sim.clock.advance(2.01)
    sim.run()
    assert request.outcome.reason is FinishReason.ERROR
    assert sim.role.count("finished", request.request_id) == 1


def test_blocks_that_two_requests_have_in_common_count_once_as_lent(caplog):
    choices = Hits(blocks=0)
    choices.delay = choices.hold = True
    sim = Simulation(choices, num_blocks=8, load_deadline_seconds=2.0)
    for _ in range(2):
        sim.send(prompt(9), max_tokens=1)
        sim.step()
    sim.clock.advance(2.01)
    sim.send(prompt(20, seed=1))
    sim.step()
    assert "4 of 7 blocks are lent" in caplog.text


def test_a_running_request_waits_for_blocks_that_are_about_to_come_back():
    choices = Hits(is_async=True)
    choices.hold = True
    sim = Simulation(choices, num_blocks=10, prefix_caching=False)
    loading = sim.send(prompt(20))
    sim.step()
    choices.blocks = 0
    running = sim.send(prompt(13), max_tokens=10)
    for _ in range(8):
        sim.step()
    assert running.block_ids
    assert running.num_tokens == 17, "stopped at the end of its fourth block"
    sim.abort(loading)
    choices.hold = False
    sim.run()
    assert_right(running, 10)


def test_pending_work_of_the_connector_keeps_the_engine_stepping():
    sim = Simulation()
    sim.role.pending = True
    assert sim.engine.has_work()
    assert not sim.step().scheduled
    sim.role.pending = False
    assert not sim.engine.has_work()


# ---- any schedule


class Drawn(Choices):
    """All that a connector may do, as drawn.

    Attributes:
        lent: requests whose blocks it keeps, once the simulation knows what is in them.
        is_over: from now on it does well.
    """

    lent: Collection[str] = ()
    is_over = False

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def _is_so(self, chance: float) -> bool:
        return not self.is_over and self._source.random() < chance

    def lookup(self, request, num_local_tokens, limit):
        if self._is_so(0.3):
            return ASK_AGAIN
        is_async = self._source.random() < 0.5
        if not is_async:
            limit = min(limit, (request.num_tokens - 1 - num_local_tokens) // SIZE)
        count = self._source.randint(0, max(0, limit))
        return LookupResult(count * SIZE, is_async) if count else MISS

    def failed_from(self, load):
        return self._source.randrange(len(load.block_ids)) if self._is_so(0.3) else None

    def fails_whole(self, load):
        return self._source.random() < 0.5

    def ends_now(self, load):
        return not self._is_so(0.6)

    def delays_free(self, request):
        return self._is_so(0.5)

    def sent_now(self, request_id):
        return request_id in self.lent and not self._is_so(0.6)

    def strangers(self):
        return frozenset({"never-seen", "r0", "r5"} if self._is_so(0.1) else ())


def run_schedule(seed: int) -> Counter[str]:
    """Requests that begin alike, come at any time, and may be aborted; a pool for few of them; and
    a clock that may jump beyond the deadline of a load. Return what happened how often."""
    source = random.Random(seed)
    choices = Drawn(source)
    sim = Simulation(
        choices,
        num_blocks=source.choice((9, 12, 40)),
        prefix_caching=source.random() < 0.7,
        max_batched_tokens=source.choice((5, 16, 64)),
        load_deadline_seconds=2.0,
    )
    choices.lent = sim.lent
    ended: Counter[str] = Counter()
    for _ in range(60):
        what = source.random()
        if what < 0.25:
            shared = prompt(source.randint(0, 16))
            own = prompt(source.randint(1, 12), seed=source.randint(1, 2))
            sim.send([*shared, *own][:28], max_tokens=source.randint(1, 4))
        elif what < 0.32 and sim.requests:
            sim.abort(source.choice(list(sim.requests.values())))
        elif what < 0.37:
            sim.clock.advance(2.01)
        else:
            step = sim.step()
            ended.update(step.finished_request_ids)
            assert (
                sum(each.num_scheduled_tokens for each in step.scheduled)
                <= sim.config.max_batched_tokens
            )
    choices.is_over = True
    for _ in range(300):
        if not sim.engine.has_work():
            break
        ended.update(sim.step().finished_request_ids)
    assert not sim.engine.has_work(), seed
    assert ended == Counter(dict.fromkeys(sim.requests, 1)), seed
    assert sim.role.count("finished") == len(sim.requests), seed
    sim.step()  # what was overdue has come back, too
    assert sim.pool.num_free == sim.pool.num_usable, seed
    happened = Counter(sim.unexpected.snapshot())
    for request in sim.requests.values():
        output, reason = output_of(request), request.outcome.reason
        assert_right(request, len(output))
        assert reason is not FinishReason.LENGTH or request.num_tokens == request.max_total_tokens
        happened[reason] += 1
        happened["hit"] += bool(request.hit and request.hit.num_external_tokens)
    return happened


HAPPENS = (
    *("hit", "preempted", "load_failed", "load_deadline", "lookup_deadline", "unknown_report"),
    *(FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR),
)


def test_any_schedule_ends_right_and_gives_all_blocks_back():
    happened = sum((run_schedule(seed) for seed in range(150)), Counter())
    assert min(happened[each] for each in HAPPENS) > 2, happened
