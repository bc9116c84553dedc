"""What the process of the scheduler keeps by request: few registers, and empty ones at the end."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from kvferry.cache.deciding.request import Request
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import LookupMiss
from kvferry.observe import Counters
from kvferry.store.memory import MemoryStore
from kvferry.types import ExtraKeys, Handover, KVSource
from kvferry.v1.host import HostRequests
from tests.cache.keeping import PROMPT
from tests.v1.test_facade import host_request


def parts_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Attributes of one of our objects."""
    if type(thing).__module__.startswith("kvferry"):
        yield from getattr(thing, "__dict__", {}).items()
        for kind in type(thing).__mro__:
            for name in getattr(kind, "__slots__", ()):
                if hasattr(thing, name):
                    yield name, getattr(thing, name)


def registers(roots: Collection[Any], names: Collection[str]) -> dict[str, Any]:
    """Containers below `roots` that have some of these ids, or requests with these ids, as keys or
    members; by the class and attribute that has each."""
    found: dict[str, Any] = {}
    seen: dict[int, Any] = {}
    waiting: deque[tuple[str, Any]] = deque((type(root).__name__, root) for root in roots)
    while waiting:
        where, thing = waiting.popleft()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, dict | set | frozenset | list | tuple | deque):
            keys = [each.view.request_id if isinstance(each, Request) else each for each in thing]
            if {key for key in keys if isinstance(key, str)} & set(names):
                found[where] = thing
            children = thing.values() if isinstance(thing, dict) else thing
            waiting.extend((where, each) for each in children)
        waiting.extend((f"{type(thing).__name__}.{name}", part) for name, part in parts_of(thing))
    return found


def test_a_request_is_kept_in_few_places_and_in_none_once_it_has_ended(make_host):
    host = make_host(store=MemoryStore("registers"), audit=1.0)
    host.run("writer", PROMPT)
    host.settle()
    host.forget_memory()
    role = host.scheduler
    guard = host.scheduler = GuardedScheduler(role, Counters(), block_size=host.block_size)
    of_host = HostRequests()
    waits = Handover(source=KVSource(waits=True))
    hidden = ExtraKeys(cacheable=False, reason=LookupMiss.HASHING)
    requests = [
        host.add("queued", range(200, 241), handover=waits),
        host.add("fetches", PROMPT),
        host.add("promised", range(300, 341)),
        host.admitted("saves", [*PROMPT, *range(50)]),
        host.admitted("uncached", range(400, 441), extra_keys=hidden),
    ]
    names = [request.request_id for request in requests]
    for name in names:
        of_host.allocated(of_host.view(host_request(name)), ([1, 2],), 0)
    guard.lookup(requests[1], 0)
    requests[3].num_scheduled_tokens = 1
    found = registers([guard, of_host], names)
    by_id = {"HostRequests._views", "HostRules._requests", "Promises._of", "Requests.by_id"}
    # Of the same objects: which of them have work for the next plan.
    assert set(found) == by_id | {"Requests.at_work", "Promises._due"}
    assert set(role.requests.by_id) == set(names)
    for request in requests:
        host.scheduler.request_finished(request, request.block_ids)
        of_host.forget(request.request_id)
    host.step([])
    host.settle()
    assert registers([guard, of_host], names) == {}
