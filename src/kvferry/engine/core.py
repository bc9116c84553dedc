"""The engine's loop body: schedule, run, learn."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kvferry.engine.parallel_runner import ParallelRunner
from kvferry.engine.request import Request
from kvferry.engine.runner import ModelRunner
from kvferry.engine.scheduler import Scheduler

IDLE_STEP_SECONDS = 0.001
"""Pause after a step without tokens: waiting for the connector must not burn a core."""

Sample = Callable[[Request, torch.Tensor], int]
"""Gives the next token of a request from its logits, `[vocab]` float32."""


class EngineCore:
    """Scheduler and runner of one engine, stepped by whoever wants tokens. Not thread-safe."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner | ParallelRunner,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._sleep = sleep

    def step(self, sample: Sample) -> None:
        """One engine step. Without a token to compute it still lets the connector work, then
        pauses.

        If the forward raises, the requests of the step are aborted, since nobody knows what is in
        their blocks; what the connector reported is taken in, and the error goes on.
        """
        step = self.scheduler.schedule()
        if not step.has_tokens:
            self.scheduler.update(step, self._runner.idle(step), _no_sample)
            self._sleep(IDLE_STEP_SECONDS)
            return
        around = self._runner.around(step)
        try:
            with around:
                logits = self._runner.forward(step)
        except BaseException:
            for entry in step.scheduled:
                self.scheduler.abort(entry.request.request_id)
            self.scheduler.update(step, around.output, _no_sample)
            raise
        self.scheduler.update(
            step, around.output, lambda request: sample(request, logits[request.request_id])
        )

    def drain(self, timeout_seconds: float) -> bool:
        """Step until nothing is left to do, for at most `timeout_seconds`; True if that was
        reached. For when no request runs: ends are told, saves finish, lent blocks come back."""
        deadline = self._clock() + timeout_seconds
        while self.scheduler.has_work():
            if self._clock() >= deadline:
                return False
            self.step(_no_tokens)
        return True


def _no_sample(request: Request) -> int:
    raise AssertionError(f"{request!r} got a token in a step that computed none")


def _no_tokens(request: Request, logits: torch.Tensor) -> int:
    raise AssertionError(f"{request!r} is still running while the engine drains")
