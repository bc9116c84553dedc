"""Steps of any host are read alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.errors import ContractError
from kvferry.v1 import yield_req_data


def make_step(*, new=(), req_ids=(), blocks=(), **resumed):
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name, block_ids=ids) for name, ids in new],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(req_ids), new_block_ids=list(blocks), **resumed
        ),
    )


@pytest.mark.parametrize(
    "resumed", [{"resumed_req_ids": {"c"}}, {"resumed_from_preemption": [False, True]}]
)
def test_new_continuing_and_resumed_requests(resumed):
    step = make_step(
        new=[("a", ([1, 2], [7]))], req_ids=["b", "c"], blocks=[None, ([3],)], **resumed
    )
    assert list(yield_req_data(step)) == [
        ("a", ([1, 2], [7]), False),
        ("b", None, False),
        ("c", ([3],), True),
    ]


def test_an_empty_step():
    assert list(yield_req_data(make_step(resumed_req_ids=set()))) == []


@pytest.mark.parametrize(
    "step",
    [
        make_step(req_ids=["a"], resumed_req_ids=set()),
        make_step(req_ids=["a"], blocks=[None], resumed_from_preemption=[]),
    ],
)
def test_lists_that_are_not_parallel_are_refused(step):
    with pytest.raises(ContractError, match="must be parallel"):
        list(yield_req_data(step))
