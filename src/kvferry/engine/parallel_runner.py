"""A step on all ranks: the first one's here, the others' in their processes."""

from __future__ import annotations

from types import TracebackType

import torch

from kvferry.aggregation import WorkerOutputFold
from kvferry.contract.messages import EMPTY_OUTPUT, WorkerOutput
from kvferry.engine.rank_messages import RunStep
from kvferry.engine.ranks import Ranks
from kvferry.engine.runner import ModelRunner
from kvferry.engine.step import Step
from kvferry.errors import RankError
from kvferry.observe import Observer
from kvferry.runner import lifecycle


class ParallelRunner:
    """What `ModelRunner` is for one rank, for all of them. Outputs are folded into one."""

    def __init__(
        self, first: ModelRunner, ranks: Ranks, size: int, *, observer: Observer | None = None
    ) -> None:
        """Run `first` here and the rest on `ranks`, `size` in all."""
        self._first = first
        self._ranks = ranks
        self._fold = WorkerOutputFold(size, observer=observer)

    def around(self, step: Step) -> ParallelStep:
        """See `ModelRunner.around`.

        Raises:
            RankError: on entering or leaving: a rank failed.
        """
        return ParallelStep(step, self._first.around(step), self._ranks, self._fold)

    def idle(self, step: Step) -> WorkerOutput:
        """See `ModelRunner.idle`.

        Raises:
            RankError: a rank failed.
        """
        self._ranks.start_step(RunStep(step.plan, step.finished_request_ids, ()))
        own = self._first.idle(step)
        return self._fold.fold([own, *self._ranks.finish_step()])

    def forward(self, step: Step) -> dict[str, torch.Tensor]:
        """See `ModelRunner.forward`.

        Raises:
            RankError: a rank failed.
        """
        try:
            return self._first.forward(step)
        except RankError as error:
            # It says only that a peer is gone; the processes say which, and why.
            raise self._ranks.explain(str(error), patience_seconds=2.0) from error


class ParallelStep:
    """One step under way on all ranks.

    Attributes:
        output: what all report, folded; what the first rank alone reports if one failed.
    """

    def __init__(
        self, step: Step, first: lifecycle.Step, ranks: Ranks, fold: WorkerOutputFold
    ) -> None:
        self._step = step
        self._first = first
        self._ranks = ranks
        self._fold = fold
        self.output = EMPTY_OUTPUT

    def __enter__(self) -> ParallelStep:
        step = self._step
        self._ranks.start_step(RunStep(step.plan, step.finished_request_ids, step.batch()))
        self._first.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if exc is not None:
            # The others wait in the middle of a layer for a sum that never comes.
            self._ranks.explain(f"a step failed: {exc!r}")
        self._first.__exit__(exc_type, exc, traceback)
        self.output = self._first.output
        if exc is None:
            self.output = self._fold.fold([self.output, *self._ranks.finish_step()])
