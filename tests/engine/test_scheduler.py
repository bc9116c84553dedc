"""The scheduler as host of the connector contract, against a pretend model that shows wrong KV."""

from __future__ import annotations

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
        self.whole = False
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

    def fails_whole(self, load):
        return self.whole

    def ends_now(self, load):
        return not self.hold

    def delays_free(self, request):
        return self.delay

    def sent_now(self, request_id):
        return not self.hold


# ---- batching without hits


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 16, 17, 43])
def test_chunked_prefill_and_decode(length):
    sim = Simulation()
    request = sim.send(prompt(length), max_tokens=5)
    sim.run()
    assert_right(request, 5)
    assert request.outcome.reason is FinishReason.LENGTH
    assert sim.pool.num_free == sim.pool.num_usable


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


def test_nothing_of_a_load_is_shared_before_it_is_there():
    choices = Hits(is_async=True)
    choices.hold = True
    sim = Simulation(choices)
    loading = sim.send(prompt(20))
    sim.step()
    choices.blocks = 0
    other = sim.send(prompt(20))
    sim.step()
    assert other.hit == (0, 0)
    choices.hold = False
    sim.run()
    assert_right(loading, 3)
    assert_right(other, 3)


# ---- loads that fail


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("failed_from", [0, 1, 3])
def test_a_failed_load_is_recomputed(is_async, whole, failed_from):
    choices = Hits(is_async=is_async)
    choices.fail_at = [failed_from]
    choices.whole = whole
    sim = Simulation(choices)
    request = sim.send(prompt(20))
    sim.run()
    assert_right(request, 3)
    if not is_async:
        assert request.hit.num_external_tokens == failed_from * SIZE


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


def test_every_request_is_finished_once_even_those_that_never_ran():
    sim = Simulation(max_num_seqs=1)
    running, queued = sim.send(prompt(9)), sim.send(prompt(9, seed=1))
    sim.step()
    assert sim.abort(queued)
    assert ("finished", queued.request_id, 0) in sim.role.calls
    assert sim.abort(running)
    assert not sim.abort(running)
    assert not sim.engine.abort("nobody")
    ended = sim.step().finished_request_ids
    assert ended == {running.request_id, queued.request_id}
    assert sim.step().finished_request_ids == frozenset()
    assert sim.role.count("finished") == 2
    assert sim.pool.num_free == sim.pool.num_usable


def test_blocks_of_an_aborted_load_stay_until_its_end_is_reported():
    choices = Hits(is_async=True)
    choices.hold = True
    sim = Simulation(choices)
    request = sim.send(prompt(20))
    sim.step()
    sim.abort(request)
    assert sim.pool.num_free == sim.pool.num_usable - 5
    assert sim.engine.has_work()
    choices.blocks = 0
    other = sim.send(prompt(20, seed=1))
    sim.step()
    choices.hold = False
    sim.run()
    assert_right(other, 3)
    assert sim.pool.num_free == sim.pool.num_usable


def test_delayed_free_keeps_blocks_until_sent():
    choices = Hits(blocks=0)
    choices.delay = choices.hold = True
    sim = Simulation(choices, prefix_caching=False)
    request = sim.send(prompt(9), max_tokens=1)
    sim.step()
    assert request.outcome is not None
    assert sim.pool.num_free == sim.pool.num_usable - 3
    for _ in range(3):
        assert sim.engine.has_work()
        sim.step()
    with pytest.raises(ContractError, match="in use"):
        sim.engine.add(request)
    choices.hold = False
    sim.run()
    assert sim.pool.num_free == sim.pool.num_usable


def test_delayed_free_without_blocks_is_waited_for_as_well():
    choices = Hits(blocks=0)
    choices.delay = choices.hold = True
    sim = Simulation(choices)
    sim.abort(sim.send(prompt(9)))
    sim.step()
    assert sim.engine.has_work()
    choices.hold = False
    sim.run()


def test_unexpected_reports_are_counted_and_ignored():
    class Strangers(Hits):
        def strangers(self):
            return frozenset({"r0", "never-seen"})

    sim = Simulation(Strangers(blocks=0))
    request = sim.send(prompt(9))
    sim.run()
    assert_right(request, 3)
    assert sim.unexpected["unknown_report"] > 0
    assert sim.unexpected["unknown_report"] % 4 == 0


def test_a_report_in_the_step_that_ends_a_request_does_not_free_its_blocks():
    class Early(Hits):
        def strangers(self):
            return frozenset({"r0"})

    choices = Early(blocks=0)
    choices.delay = choices.hold = True
    sim = Simulation(choices, prefix_caching=False)
    sim.send(prompt(9), max_tokens=1)
    sim.step()
    assert sim.pool.num_free == sim.pool.num_usable - 3


# ---- a connector that hangs


def test_a_load_that_never_ends_is_given_up_and_its_blocks_are_not_used():
    choices = Hits(is_async=True)
    choices.hold = True
    sim = Simulation(choices, load_deadline_seconds=2.0)
    request = sim.send(prompt(20))
    sim.step()
    sim.clock.advance(2.01)
    sim.run()
    assert_right(request, 3)
    assert request.hit.num_external_tokens == 0
    assert sim.unexpected["load_deadline"] == 1
    assert sim.pool.num_free == sim.pool.num_usable - 5
    choices.hold = False
    sim.step()
    assert sim.pool.num_free == sim.pool.num_usable


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
