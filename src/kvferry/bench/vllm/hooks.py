"""How long a connector's hooks take, seen from inside the engine that calls them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

HOOKS = (
    # scheduler's half
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "has_pending_push_work",
    # worker's half
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""What vLLM calls around a step. A hook that another one calls is counted within that one."""


class HookTimer:
    """Adds up the time spent in the hooks of connectors. One thread calls them all.

    Wraps the methods of their classes, for good, so that the instances stay as they are. The cost
    of measuring is measured too, and taken off.
    """

    def __init__(self, connectors: Iterable[Any]) -> None:
        self._nanoseconds = 0
        self._calls = 0
        self._depth = 0
        kinds = {type(connector) for connector in connectors}
        hooks = [(kind, name, getattr(kind, name, None)) for kind in kinds for name in HOOKS]
        for kind, name, hook in hooks:
            if callable(hook):
                setattr(kind, name, self._timed(hook))
        self._overhead = self._measure_overhead()
        self.take()

    def take(self) -> float:
        """Microseconds in hooks since the last call."""
        spent = self._nanoseconds - self._calls * self._overhead
        self._nanoseconds = self._calls = 0
        return max(0.0, spent / 1e3)

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the hook takes
            if self._depth:
                return hook(*args, **kwargs)
            self._depth = 1
            clock()  # its own code comes into the caches at nobody's cost
            began = clock()
            try:
                return hook(*args, **kwargs)
            finally:
                self._nanoseconds += clock() - began
                self._calls += 1
                self._depth = 0

        return timed

    def _measure_overhead(self) -> float:
        """Nanoseconds that a hook of no content seems to take."""
        empty = self._timed(_nothing)
        best = float("inf")
        for _ in range(20):
            self._nanoseconds = 0
            for _ in range(1000):
                empty()
            best = min(best, self._nanoseconds / 1000)
        return best


def _nothing() -> None:
    return None
