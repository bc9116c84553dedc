"""Reads the blocks of a step as hosts of the one-class shape describe it. Runs in: scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvferry.errors import ContractError


def yield_req_data(
    scheduler_output: Any,  # noqa: ANN401 - the host's, of any version
) -> Iterator[tuple[str, tuple[list[int], ...] | None, bool]]:
    """The requests of a step with the blocks they got.

    Args:
        scheduler_output: a `kvferry.v1.SchedulerOutput`, or that of any host.

    Yields:
        Request id; new block ids per KV group, None if no block was added; whether the request was
        preempted and now resumes: its new blocks then replace those it had.

    Raises:
        ContractError: parallel lists of the step differ in length.
    """
    for request in scheduler_output.scheduled_new_reqs:
        yield request.req_id, request.block_ids, False
    cached = scheduler_output.scheduled_cached_reqs
    request_ids = cached.req_ids
    # A set since vLLM 0.12, a list of flags before.
    resumed_ids = getattr(cached, "resumed_req_ids", None)
    if resumed_ids is None:
        resumed = cached.resumed_from_preemption
    else:
        resumed = [request_id in resumed_ids for request_id in request_ids]
    if not len(request_ids) == len(cached.new_block_ids) == len(resumed):
        raise ContractError(
            f"a step names {len(request_ids)} continuing requests, {len(cached.new_block_ids)} "
            f"lists of new blocks and {len(resumed)} flags: they must be parallel"
        )
    yield from zip(request_ids, cached.new_block_ids, resumed, strict=True)
