"""A bar for long generations."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from kvferry.engine.request import Request


class GenerationProgress:
    """Tokens done of tokens to do, over some requests, on the standard error output.

    The end is the longest that the requests may become; one that stops early jumps to its end.
    """

    def __init__(
        self, requests: Sequence[Request], *, enabled: bool, console: Console | None = None
    ) -> None:
        self._requests = requests
        self._total = sum(request.max_total_tokens for request in requests)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console or Console(stderr=True),
            disable=not enabled,
            transient=True,
        )
        self._task = self._progress.add_task("", total=self._total)

    def update(self) -> None:
        """Draw where the requests stand."""
        if self._progress.disable:
            return
        ended = sum(request.outcome is not None for request in self._requests)
        done = sum(
            request.num_computed_tokens if request.outcome is None else request.max_total_tokens
            for request in self._requests
        )
        self._progress.update(
            self._task, completed=done, description=f"{ended}/{len(self._requests)} prompts"
        )

    def __enter__(self) -> GenerationProgress:
        self._progress.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
