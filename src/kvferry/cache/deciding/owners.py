"""What ends the pins that have no owner any more, after a fault in a hook.

Each pin is in a `Hold` of a request or an audit. A fault between two statements can leave pins in a
`Hold` that no part refers to: their slots would be lost for the engine's life.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from kvferry.cache.deciding.hold import Hold
from kvferry.cache.deciding.host_pool import HostPool

_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def reclaim(pool: HostPool, holds: Iterable[Hold]) -> None:
    """End the pins that are in none of all `holds`. Rare; walks the slots."""
    owned = Counter(slot.index for hold in holds for slot in hold)
    pool.unpin_all([slot for slot in pool.pinned() for _ in range(slot.pins - owned[slot.index])])


def leaves_no_pin(hook: _Hook) -> _Hook:
    """Wrap a hook of the scheduler role: if it raises, what has no owner then is let go of."""

    @functools.wraps(hook)
    def wrapped(role: Any, *arguments: Any) -> Any:  # noqa: ANN401 - as the hook
        try:
            return hook(role, *arguments)
        except Exception:
            reclaim(role.pool, role.holds())
            raise

    return wrapped  # type: ignore[return-value]
