"""Which recurrent states a step of vLLM offers, and in which blocks; junctions go the other way."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.contract.spec import StateSpec
from kvferry.types import (
    OfferedState,
    StateComponent,
    StateKind,
    StateRun,
    SupportsJunction,
    TablePart,
)
from kvferry.v1.host import HostRequests, only_continues, states_in_step
from kvferry.v1.types import CachedRequestData, SchedulerOutput

BLOCK = 16
STATE = StateComponent(
    name="ssm",
    num_heads=1,
    rank_heads=1,
    content_size=4,
    dtype="float32",
    runs=(StateRun(0, 4, 0, 4, 1),),
)


def spec_of(*tables: int) -> StateSpec:
    return StateSpec(
        kinds=(StateKind(num_layers=len(tables), components=(STATE,)),),
        tables=tuple(
            TablePart(table=table, group=0, layers=(at,), layer_names=(f"s{at}",), block_size=BLOCK)
            for at, table in enumerate(tables)
        ),
    )


def offering(offers=(), tables=None, drafts=()):
    """A step of request "r", in whose tables vLLM has these blocks now."""
    return SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(
            boundary_state_offloads={"r": list(offers)} if offers else {},
            get_block_ids=lambda request_id: tables if request_id == "r" else None,
        ),
        scheduled_spec_decode_tokens={"r": list(drafts)} if drafts else {},
    )


TABLES = ([1, 2, 3], [0, 0, 7], [0, 0, 9])
STEPS = {
    "an offer of both tables": (
        offering([(1, 5, 32), (2, 6, 32)], TABLES), 40, [(32, {1: 5, 2: 6}, True)],
    ),
    "an offer lacks a table": (offering([(1, 5, 32)], TABLES), 40, []),
    "a partial tail": (offering([(1, 5, 37), (2, 6, 37)], TABLES), 40, []),
    "the null block": (offering([(1, 5, 32), (2, 0, 32)], TABLES), 40, []),
    "a step that ends with a block": (offering((), TABLES), 48, [(48, {1: 7, 2: 9}, False)]),
    "one that does not": (offering((), TABLES), 47, []),
    "one with drafts": (offering((), TABLES, drafts=[4]), 48, []),
    "an offer where the step ends": (
        offering([(1, 5, 48), (2, 6, 48)], TABLES), 48, [(48, {1: 5, 2: 6}, True)],
    ),
    "two": (
        offering([(1, 5, 32), (2, 6, 32)], TABLES), 48,
        [(32, {1: 5, 2: 6}, True), (48, {1: 7, 2: 9}, False)],
    ),
    "a table that has nothing there": (offering((), ([1, 2, 3], [0, 0, 0], [0, 0, 9])), 48, []),
    "tables that vLLM does not show": (offering((), None), 48, []),
    "nothing shown": (SimpleNamespace(kv_connector_block_state=None), 48, []),
}  # fmt: skip
"""A step, the tokens that it ends with, and the states: after so many tokens, blocks, kept."""


@pytest.mark.parametrize("case", STEPS)
def test_a_step_offers_states_of_whole_blocks_with_a_block_of_each_table(case):
    output, stop, expected = STEPS[case]
    found = states_in_step(output, "r", stop, spec_of(1, 2))
    assert found == [OfferedState(*each) for each in expected]


def stepping(states, offers=(), change=lambda output: None):
    requests = HostRequests(states=states)
    request = SimpleNamespace(
        request_id="r",
        all_token_ids=list(range(50)),
        num_prompt_tokens=50,
        shared_prefix_boundary=16,
        prompt_embeds=None,
        lora_request=None,
        mm_features=(),
        cache_salt=None,
    )
    view = requests.view(request)
    requests.allocated(view, TABLES, 0)
    output = SchedulerOutput(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=["r"], new_block_ids=[None], num_computed_tokens=[32]
        ),
        num_scheduled_tokens={"r": 16},
    )
    vars(output).update(vars(offering(offers, TABLES)))
    change(output)
    return view, requests.step(output), output


def test_a_host_of_a_model_with_states_reads_them_in_each_step_and_another_reads_none():
    _, step, _ = stepping(spec_of(1, 2))
    assert step.scheduled[0].states == [OfferedState(48, {1: 7, 2: 9}, is_kept=False)]
    _, step, _ = stepping(None)
    assert step.scheduled[0].states == ()


def boundary(**fields):
    return {"kv_connector_block_state": SimpleNamespace(**fields)}


OTHER_SPELLINGS = {
    "no state of blocks": lambda output: vars(output).pop("kv_connector_block_state"),
    "offers of another name": lambda output: vars(output).update(
        boundary(partial_tail_offloads={}, get_block_ids=lambda _: TABLES)
    ),
    "offers of more fields": lambda output: vars(output).update(
        boundary(boundary_state_offloads={"r": [(1, 5, 32, 0)]}, get_block_ids=lambda _: TABLES)
    ),
    "fewer tables": lambda output: vars(output).update(
        boundary(boundary_state_offloads={}, get_block_ids=lambda _: TABLES[:2])
    ),
    "tables without the blocks before": lambda output: vars(output).update(
        boundary(boundary_state_offloads={}, get_block_ids=lambda _: ([1, 2, 3], [7], [9]))
    ),
}


@pytest.mark.parametrize("how", OTHER_SPELLINGS)
def test_a_step_in_another_spelling_is_read_as_none_and_no_block_is_guessed(how):
    _, step, _ = stepping(spec_of(1, 2), change=OTHER_SPELLINGS[how])
    with pytest.raises((AttributeError, LookupError, ValueError)):
        _ = step.scheduled


def test_a_step_without_new_blocks_may_hand_off_a_state():
    for offers in ((), [(1, 5, 32), (2, 6, 32)]):
        *_, output = stepping(spec_of(1, 2), offers)
        output.total_num_scheduled_tokens = 16
        assert only_continues(output) == (not offers)


def test_the_tables_of_states_after_an_async_load_are_those_that_the_host_names():
    requests = HostRequests(states=spec_of(1))
    request = SimpleNamespace(request_id="r", all_token_ids=[1], num_prompt_tokens=1)
    view = requests.view(request)
    requests.allocated(view, ([1, 2], [0, 5]), 32)
    assert requests.allocated(view, ([3], [0, 0, 6]), 0) == ([1, 2, 3], [0, 0, 6])


def test_a_junction_lets_the_host_keep_a_state_and_never_moves_one_back():
    view, *_ = stepping(spec_of(1, 2))
    assert isinstance(view, SupportsJunction)
    for asked, kept in ((48, 48), (32, 48)):
        view.keep_state_after(asked)
        assert view.request.shared_prefix_boundary == kept
    del view.request.shared_prefix_boundary
    view.keep_state_after(64)
    assert not hasattr(view.request, "shared_prefix_boundary")
