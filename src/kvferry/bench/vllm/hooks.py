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

    Wraps the methods of their classes until `remove`, so that the instances stay as they are. The
    cost of measuring is measured too, and taken off.

    Args:
        connectors: whose hooks.
        clock: in nanoseconds.
    """

    def __init__(
        self, connectors: Iterable[Any], clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._clock = clock
        self._nanoseconds = 0
        self._calls = 0
        self._depth = 0
        kinds = {type(connector) for connector in connectors}
        hooks = [(kind, name, getattr(kind, name, None)) for kind in kinds for name in HOOKS]
        self._wrapped: list[tuple[type, str, Any]] = []
        for kind, name, hook in hooks:
            if callable(hook):
                self._wrapped.append((kind, name, vars(kind).get(name)))
                setattr(kind, name, self._timed(hook))
        self._overhead = self._measure_overhead()
        self.take()

    def take(self) -> float:
        """Microseconds in hooks since the last call."""
        spent = self._nanoseconds - self._calls * self._overhead
        self._nanoseconds = self._calls = 0
        return max(0.0, spent / 1e3)

    def remove(self) -> None:
        """Leave the classes as they were. May be called again."""
        while self._wrapped:
            kind, name, own = self._wrapped.pop()
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        clock = self._clock

        def timed(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the hook takes
            if self._depth:
                return hook(*args, **kwargs)
            self._depth = 1
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
