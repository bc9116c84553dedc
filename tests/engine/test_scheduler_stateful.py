"""Any order of requests, steps, aborts and connector behaviour leaves KV and books right."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.contract.messages import ASK_AGAIN, MISS, LookupResult
from kvferry.engine.request import FinishReason
from tests.engine.simulation import Choices, Simulation, reference

SIZE = 4


class Drawn(Choices):
    """Every choice is hypothesis's; outside a rule everything succeeds at once."""

    def __init__(self) -> None:
        self.data = None

    def pick(self, options):
        return options[0] if self.data is None else self.data.draw(st.sampled_from(options))

    def lookup(self, request, num_local_tokens, limit):
        kind = self.pick(["miss", "sync", "async", "again"])
        if kind == "again":
            return ASK_AGAIN
        if kind == "sync":
            limit = min(limit, (request.num_tokens - 1 - num_local_tokens) // SIZE)
        if kind == "miss" or limit <= 0:
            return MISS
        return LookupResult(self.pick(range(limit, 0, -1)) * SIZE, kind == "async")

    def failed_from(self, load):
        return self.pick([None, None, *range(len(load.block_ids))])

    def ends_now(self, load):
        return self.pick([True, False])

    def fails_whole(self, load):
        return self.pick([False, True])

    def delays_free(self, request):
        return self.pick([False, True])

    def sent_now(self, request_id):
        return self.pick([True, False])

    def rotten(self, block_ids):
        return [self.pick(block_ids)] if block_ids and self.pick([False] * 5 + [True]) else []

    def strangers(self):
        return frozenset(self.pick([(), (), ("r0",), ("stranger",)]))


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(8, 20),
        budget=st.sampled_from([3, 7, 16]),
        max_num_seqs=st.integers(1, 4),
        prefix_caching=st.booleans(),
    )
    def start(self, num_blocks, budget, max_num_seqs, prefix_caching):
        self.choices = Drawn()
        self.num_usable = num_blocks - 1
        self.sim = Simulation(
            self.choices,
            num_blocks=num_blocks,
            block_size=SIZE,
            everything_stored=False,
            max_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            prefix_caching=prefix_caching,
        )

    @rule(family=st.integers(0, 1), length=st.integers(1, 23), max_tokens=st.integers(1, 6))
    def add(self, family, length, max_tokens):
        length = min(length, self.num_usable * SIZE - max_tokens)
        # Prompts that share a beginning, and a family that shares none with the other.
        prompt = ([family] * 6 + list(range(length)))[:length]
        self.sim.send(prompt, max_tokens)

    @rule(data=st.data())
    def step(self, data):
        self.choices.data = data
        try:
            self.sim.step()
        finally:
            self.choices.data = None
        self.sim.clock.advance(0.001)

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.sim.abort(data.draw(st.sampled_from(list(self.sim.requests.values()))))

    @rule()
    def reset_prefix_cache(self):
        self.sim.pool.reset()

    @invariant()
    def books_balance(self):
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        self.sim.run()
        for request in self.sim.requests.values():
            if request.outcome.reason is FinishReason.ABORT:
                continue
            assert request.outcome.reason is FinishReason.LENGTH
            prompt = request.all_token_ids[: request.num_prompt_tokens]
            generated = request.all_token_ids[request.num_prompt_tokens :]
            assert generated == reference(prompt, len(generated))
            assert self.sim.role.count("finished", request.request_id) == 1
        assert self.sim.pool.num_free == self.num_usable


TestSchedulerStateful = SchedulerMachine.TestCase
TestSchedulerStateful.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
