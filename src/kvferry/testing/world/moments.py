"""Moments at which something happens to an engine: between two of its steps, when what it has under
way would bear it least.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _is_pinned(engine: Any, name: str) -> bool:
    request = engine.scheduler.requests.by_id.get(name)
    return request is not None and request.search is not None and len(request.search.pinned) > 0


MOMENTS: dict[str, Callable[[Any], bool]] = {
    "fetching": lambda engine: engine.scheduler.pool.is_filling,
    "writing": lambda engine: engine.scheduler.pool.is_writing,
    "lent": lambda engine: any(engine.scheduler.pool.loans._lent.values()),
    "late": lambda engine: engine.host._late is not None,
    "running": lambda engine: bool(engine.host.running),
    "searching": lambda engine: any(
        request.search is not None and len(request.search.pinned)
        for request in engine.scheduler.requests.by_id.values()
    ),
    "auditing": lambda engine: any(
        request.audit is not None and request.audit.is_expected
        for request in engine.scheduler.requests.by_id.values()
    ),
    "asking again": lambda engine: any(request.asks_since for request in engine.host.waiting),
    "asking once more": lambda engine: any(
        request.turn and request.asks_since for request in engine.host.waiting
    ),
    "pinned again": lambda engine: any(
        request.turn and _is_pinned(engine, request.request_id) for request in engine.host.waiting
    ),
    "ran uncached": lambda engine: any(
        request.uncached is not None and request.view.extra_keys.cacheable
        for request in engine.scheduler.requests.by_id.values()
    ),
    "away": lambda engine: any(tier.up is None for tier in engine.parts[0].store._tiers),
}
"""By name: whether it is that moment in an engine."""
