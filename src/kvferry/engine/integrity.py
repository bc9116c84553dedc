"""Whether a scheduler's queues and statuses contradict each other; for tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvferry.engine.request import Request, RequestStatus


def check_queues(
    requests: Mapping[str, Request],
    waiting: Iterable[Request],
    running: Iterable[Request],
    loading: Iterable[str],
) -> None:
    """Raise AssertionError unless every request is in the one queue that its status says, and holds
    blocks as its status says."""
    queued = [
        *((request.request_id, _WAITING) for request in waiting),
        *((request.request_id, (RequestStatus.RUNNING,)) for request in running),
        *((request_id, (RequestStatus.WAITING_FOR_REMOTE_KV,)) for request_id in loading),
    ]
    assert len({request_id for request_id, _ in queued}) == len(queued), "in two queues"
    assert {request_id for request_id, _ in queued} == requests.keys(), "in no queue, or a stranger"
    for request_id, statuses in queued:
        request = requests[request_id]
        assert request.status in statuses, f"{request!r} is in the wrong queue"
        if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
            assert not request.block_ids, f"{request!r} waits, yet holds blocks"
            assert request.num_computed_tokens == 0, f"{request!r} has KV without blocks"
        elif request.status is not RequestStatus.WAITING_FOR_REMOTE_KV:
            assert request.block_ids, f"{request!r} holds no blocks"
            assert request.num_computed_tokens < request.num_tokens, f"{request!r} is complete"


_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.LOADED)
