"""The bar of long generations."""

from __future__ import annotations

import io

from rich.console import Console

from kvferry.engine.generation import GenerationProgress
from kvferry.engine.request import FinishReason, Outcome, Request


def test_a_request_that_stops_early_jumps_to_its_end():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    requests = [Request(f"r{i}", [1, 2, 3], max_total_tokens=10) for i in range(2)]
    with GenerationProgress(requests, enabled=True, console=console) as bar:
        requests[0].num_computed_tokens = 5
        bar.update()
        bar._progress.refresh()
        assert "0/2 prompts" in screen.getvalue()
        assert "25%" in screen.getvalue()
        for request in requests:
            request.outcome = Outcome(FinishReason.STOP, None)
        bar.update()
    assert "2/2 prompts" in screen.getvalue()
    assert "100%" in screen.getvalue()


def test_disabled_it_draws_nothing():
    screen = io.StringIO()
    with GenerationProgress([], enabled=False, console=Console(file=screen)) as bar:
        bar.update()
    assert screen.getvalue() == ""
