"""The embedded engine's scheduler over a pretend model, for tests of connectors.

The KV of a token is a number that depends on the KV of the previous token, so an error in a block
spreads to all later tokens, the generated ones included. Freed blocks are overwritten. Where a
connector would crash vLLM's engine, an assertion here fails.
"""

from __future__ import annotations

import pickle

import torch

from kvferry.contract.driver import StepDriver
from kvferry.contract.messages import WorkerOutput
from kvferry.engine.block_pool import BlockPool
from kvferry.engine.config import EngineConfig
from kvferry.engine.request import EngineStep, Request
from kvferry.engine.scheduler import Scheduler
from kvferry.observe import Counters
from kvferry.testing.clock import FakeClock
from tests.engine.integrity import check_scheduler

PRIME = 2**31 - 1
NUM_LAYERS = 2


def next_kv(before: int, token: int, layer: int) -> int:
    return (before * 1_000_003 + token * 31 + layer + 7) % PRIME


def true_kv(tokens, layer: int) -> list[int]:
    """Return the right KV of every token."""
    values, value = [], 1
    for token in tokens:
        value = next_kv(value, token, layer)
        values.append(value)
    return values


def true_output(prompt, num_new: int) -> list[int]:
    """Return the prompt and the generated tokens of a request for which nothing went wrong."""
    tokens = list(prompt)
    for _ in range(num_new):
        tokens.append(true_kv(tokens, NUM_LAYERS - 1)[-1] % 50)
    return tokens


class _Checked:
    """A scheduler role whose look-ups are checked. It notes in `hit_tokens` what they promise."""

    def __init__(self, role, block_size: int) -> None:
        self._role, self._block_size = role, block_size

    def __getattr__(self, name: str):
        return getattr(self._role, name)

    def lookup(self, request, num_local_tokens):
        answer = self._role.lookup(request, num_local_tokens)
        count, is_async, _ = answer
        if count is not None:
            assert 0 <= count <= request.num_tokens - (not is_async), answer
            assert count % self._block_size == 0, answer
            assert count or not is_async, answer
            request.hit_tokens = max(request.hit_tokens, count)
        return answer


class _Preempting(Scheduler):
    """Preempts what a test chose, too."""

    chosen: tuple[Request, ...] = ()

    def _schedule_running(self, step) -> None:
        for request in self.chosen:
            self._preempt(request, step)
        self.chosen = ()
        super()._schedule_running(step)


class ModelHost:
    """A scheduler and the pretend model. Subclasses do what a worker does in a step."""

    def __init__(self, role, num_blocks: int, **config) -> None:
        self.unexpected, self.clock = Counters(), FakeClock(0.0)
        self.config, self.pool = EngineConfig(**config), BlockPool(num_blocks)
        self.engine = _Preempting(
            self.config, self.pool, role, observer=self.unexpected, clock=self.clock
        )
        self.kv = {
            f"layer.{i}": torch.full((num_blocks, self.config.block_size), -1, dtype=torch.int64)
            for i in range(NUM_LAYERS)
        }
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, prompt, num_new: int = 2, **options) -> Request:
        total = len(prompt) + num_new
        request = Request(request_id, list(prompt), max_total_tokens=total, **options)
        request.hit_tokens = 0
        self.engine.add(request)
        self.requests[request_id] = request
        return request

    def run(self, max_steps: int = 300) -> None:
        """EngineStep until nothing is left to do."""
        while self.engine.has_work():
            assert max_steps > 0, self.requests
            max_steps -= 1
            self.step()
            self.clock.advance(0.001)

    def step(self) -> EngineStep:
        step = self.engine.schedule()
        self.engine.update(step, self.work(step), self.sample)
        check_scheduler(self.engine)
        return step

    def work(self, step: EngineStep) -> WorkerOutput:
        """Return what the worker reports."""
        raise NotImplementedError

    def compute(self, step: EngineStep, layer: int) -> None:
        kv = self.kv[f"layer.{layer}"]
        for entry in step.scheduled:
            request, first = entry.request, entry.num_computed_tokens
            for pos in range(first, first + entry.num_scheduled_tokens):
                before = int(kv[self._slot(request, pos - 1)]) if pos else 1
                token = request.all_token_ids[pos]
                assert self._slot(request, pos)[0], "the null block is written"
                kv[self._slot(request, pos)] = next_kv(before, token, layer)

    def _slot(self, request: Request, pos: int) -> tuple[int, int]:
        size = self.config.block_size
        return request.block_ids[pos // size], pos % size

    def sample(self, request: Request) -> int:
        last = self._slot(request, request.num_tokens - 1)
        return int(self.kv[f"layer.{NUM_LAYERS - 1}"][last]) % 50


class TinyHost(ModelHost):
    """The host. Tests `add` requests, then `run` it, or `step` it and interfere."""

    def __init__(
        self, scheduler, worker, *, block_size=4, num_blocks=40, budget=11, observer=None,
        strict=False,
    ) -> None:  # fmt: skip
        super().__init__(
            _Checked(scheduler, block_size), num_blocks, block_size=block_size,
            max_batched_tokens=budget, prefix_caching=False,
        )  # fmt: skip
        self.driver = StepDriver(worker, observer, strict=strict)
        worker.register_kv_caches(self.kv)
        self.outputs: list[WorkerOutput] = []
        self.fail_forward = False

    def abort(self, request: Request) -> None:
        self.engine.abort(request.request_id)
        self._overwrite_free()

    def preempt(self, request: Request) -> None:
        self.engine.chosen += (request,)

    @property
    def running(self) -> list[Request]:
        return list(self.engine._running.values())

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def step(self) -> EngineStep:
        step = super().step()
        assert self.unexpected["unknown_report"] == 0
        self._overwrite_free()
        return step

    def work(self, step: EngineStep) -> WorkerOutput:
        plan = pickle.loads(pickle.dumps(step.plan))
        if step.scheduled:
            with self.driver.step(plan, step.finished_request_ids) as run:
                self._forward(step)
            output = run.output
        else:
            output = self.driver.no_forward(plan, step.finished_request_ids)
        self.outputs.append(output)
        assert output.failed_recving <= output.finished_recving
        assert all(0 <= block < self.pool.num_blocks for block in output.invalid_block_ids)
        return output

    def _forward(self, step: EngineStep) -> None:
        layers = self.driver.layerwise
        for index, (name, kv) in enumerate(self.kv.items()):
            if layers is not None:
                layers.wait_for_layer_load(name)
            self.compute(step, index)
            if layers is not None:
                layers.save_layer(name, kv, None)
            if self.fail_forward:
                raise ZeroDivisionError

    def _overwrite_free(self) -> None:
        tables = [request.block_ids for request in self.engine.requests]
        held = {block for table in [*tables, *self.engine._lent_tables()] for block in table}
        free = [block for block in range(1, self.pool.num_blocks) if block not in held]
        for kv in self.kv.values():
            kv[free] = -1
