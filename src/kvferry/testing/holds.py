"""Who has pins in a scheduler role, for tests: see `kvferry.testing.pools`."""

from __future__ import annotations

from typing import Any


def holds_of(role: Any) -> list[Any]:  # noqa: ANN401
    """Return all that owns pins: of each search, its hit and its audit; loads; and audits."""
    requests = role.requests.by_id.values()
    searches = [request.search for request in requests if request.search is not None]
    hits = [search.hit for search in searches if search.hit is not None]
    of_requests = (request.audit for request in requests)
    audits = [
        *(hit.audit for hit in hits if hit.audit is not None),
        *(audit for audit in of_requests if audit is not None and audit.is_expected),
        *role.audits._running.values(),
    ]
    return [
        *(search.pinned for search in searches),
        *(audit.hold for audit in audits),
        *(request.load[1] for request in requests if request.load is not None),
    ]
