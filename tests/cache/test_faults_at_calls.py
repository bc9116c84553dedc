"""A fault at each place where a hook of the scheduler role calls something: no slot and no pin is
lost, no KV is wrong, and the next request is served."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvferry
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.observe import Counters
from tests.cache.pools import check_pool, slots_of

from .keeping import PROMPT

OURS = Path(kvferry.__file__).parent
ROOMS = OURS / "cache" / "deciding"
MEMORY = ("host_pool.py", "hold.py", "loans.py")
"""What keeps the slots. What it calls are its own accounts: none of that raises here."""

HOOKS = ["on_new_request", "lookup", "update_after_alloc", "build_plan", "request_finished"]
"""Not `update_output`: a report that is lost leaves its slots filling, as a rank that died does."""


class FaultAt:
    """Raises where `hook` of a role first calls a function of ours from a place in these rooms that
    is not in `known`, and adds the place."""

    def __init__(
        self, patch: pytest.MonkeyPatch, role: Any, hook: str, known: set[tuple[str, int]]
    ) -> None:
        self.raised, self._known = "", known
        self._real = getattr(role, hook)
        patch.setattr(role, hook, self)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return self._real(*arguments, **options)
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, _: Any) -> None:
        caller, name = frame.f_back, frame.f_code.co_name
        if event != "call" or self.raised or caller is None or name.startswith("<"):
            return
        path = Path(caller.f_code.co_filename)
        place = path.name, caller.f_lineno
        is_ours = path.parent == ROOMS and Path(frame.f_code.co_filename).is_relative_to(OURS)
        if is_ours and path.name not in MEMORY and place not in self._known:
            self._known.add(place)
            self.raised = f"{path.name}:{caller.f_lineno} calls {name}"
            raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.parametrize("hook", HOOKS)
def test_a_fault_at_any_place_of_a_hook_costs_a_hit_at_most(make_host, tmp_path, hook):
    known: set[tuple[str, int]] = set()
    longer = [*PROMPT, *range(50)]
    while True:
        directory = tmp_path / str(len(known))
        host = make_host(store=directory.as_uri(), audit=1.0)
        role = host.scheduler
        host.run("writer", PROMPT)
        host.settle()
        host.pool.clear()
        host.scheduler = GuardedScheduler(role, Counters(), block_size=host.block_size)
        with pytest.MonkeyPatch.context() as patch:
            fault = FaultAt(patch, role, hook, known)
            host.run("reader", longer)  # the host checks each byte of KV that it computes with
        check_pool(host.pool, role.holds())
        host.settle()
        assert host.pool.num_pins == 0, fault.raised
        assert all(slot.is_idle for slot in slots_of(host.pool).values()), fault.raised
        assert host.run("next", longer).num_external_tokens > 0, fault.raised
        host.settle()
        check_pool(host.pool, role.holds())
        assert host.pool.num_pins == 0, fault.raised
        host.close()
        if not fault.raised:
            break
    assert len(known) > 3
