"""Images whose tokens attend to each other in both directions: no hit ends in one, and nothing is
stored of one that was computed in two steps."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.store.memory import MemoryStore
from kvferry.types import ExtraKeys, MultimodalItem, RequestOptions

from .keeping import NUM_CHUNKS, PROMPT

CHUNK = 8  # two blocks


def extra(*places: tuple[int, int]) -> ExtraKeys:
    """Items with these offsets and lengths."""
    return ExtraKeys(
        items=tuple(
            MultimodalItem(digest=f"image {number}", offset=offset, length=length)
            for number, (offset, length) in enumerate(places)
        )
    )


HITS: dict[str, tuple[list[tuple[int, int]], dict[str, Any], int]] = {
    # Items; chunks that are lost, most tokens to load, audits; the hit.
    "the end of the prompt": ([(37, 4)], {}, 36),
    "the first block is in it": ([(1, 40)], {}, 0),
    "a chunk is missing": ([(20, 10)], {"lost": 3}, 20),
    "the request wants no more": ([(10, 10)], {"most": 16}, 8),
    "the rest is audited": ([(30, 6)], {"audit": 1.0}, 28),
    "one behind the other": ([(17, 4), (21, 9)], {"lost": 3}, 16),
    "it ends there": ([(32, 8)], {}, 40),
    "it begins there": ([(24, 8)], {"lost": 3}, 24),
    "two in front": ([(0, 5), (9, 7)], {}, 40),
}


@pytest.mark.parametrize(("places", "how", "hit"), HITS.values(), ids=HITS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_hit_ends_in_no_item(make_host, places, how, hit, is_whole):
    store, items = MemoryStore("items"), extra(*places)
    writer = make_host(store=store, whole_items=is_whole)
    writer.run("writer", PROMPT, extra_keys=items)
    writer.settle()
    assert len(list(store.catalogue().scan())) == NUM_CHUNKS
    reader = make_host(store=store, whole_items=is_whole, audit=how.get("audit", "off"))
    request = reader.add(
        "reader", PROMPT, extra_keys=items, options=RequestOptions(max_load_tokens=how.get("most"))
    )
    if "lost" in how:
        chunks = reader.scheduler.requests.by_id["reader"].keys.keys
        store.delete(chunks[how["lost"]])
    found = reader.admit(request)
    if is_whole:
        assert found == hit
    else:
        ends = {"lost": 24, "most": 16, "audit": 32}
        assert found == next((ends[name] for name in how), 40)
    reader.complete(request)


STEPS = {  # tokens of the first step, and chunks that are stored in the end
    "within": (24, 2),
    "its first token": (21, 2),
    "all but its last": (29, 2),
    "before it": (20, NUM_CHUNKS),
    "behind it": (30, NUM_CHUNKS),
}


@pytest.mark.parametrize(("first_step", "num_stored"), STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("stores", [True, False])
def test_nothing_is_stored_of_an_item_that_was_computed_in_parts_nor_behind_it(
    make_host, first_step, num_stored, stores
):
    """Also by requests to which the host gives the same blocks, or a part of them."""
    store, items = MemoryStore("items"), extra((20, 10))
    host = make_host(store=store, whole_items=True)
    request = host.add("first", PROMPT, extra_keys=items, options=RequestOptions(store=stores))
    assert host.admit(request) == 0
    host.step([request], tokens=first_step)
    host.complete(request)
    host.settle()
    if stores:
        assert len(list(store.catalogue().scan())) == num_stored
    # The host has them itself by now; another request goes on otherwise behind the item.
    for name, prompt in (("same", PROMPT), ("other", [*PROMPT[:32], *range(900, 930)])):
        request = host.add(name, prompt, extra_keys=items)
        host.admit(request, num_local_tokens=32)
        host.complete(request)
        host.settle()
    is_right = num_stored == NUM_CHUNKS
    assert len(list(store.catalogue().scan())) == (NUM_CHUNKS + 3 if is_right else 2)


@pytest.mark.parametrize("most", [3, 2])
def test_if_too_many_were_computed_in_parts_nothing_is_stored_behind_any_item(
    make_host, monkeypatch, most
):
    """Which ones is forgotten, and the host may give their blocks to others."""
    monkeypatch.setattr("kvferry.cache.deciding.saves.MAX_FAILED", most)
    store, items = MemoryStore("items"), extra((20, 10))
    host = make_host(store=store, whole_items=True)
    request = host.add("first", PROMPT, extra_keys=items)
    host.admit(request)
    host.step([request], tokens=24)
    host.complete(request)
    for name, given in (("same", items), ("other", extra((20, 11))), ("none", extra())):
        request = host.add(name, PROMPT, extra_keys=given, options=RequestOptions(explain=True))
        host.admit(request, num_local_tokens=32 * (name == "same"))
        said = host.complete(request)["kvferry"]
        host.settle()
        is_wrong = name == "same" or (name == "other" and most == 2)
        assert said["not_stored"].get("not_cacheable", 0) == is_wrong * 3 * CHUNK
    # The first two chunks are before any item.
    assert len(list(store.catalogue().scan())) == 2 + 3 * (most == 3) + NUM_CHUNKS - 2


def test_the_answer_says_why_it_is_not_stored(make_host):
    host = make_host(whole_items=True)
    options = RequestOptions(explain=True)
    request = host.add("first", PROMPT, extra_keys=extra((20, 10)), options=options)
    host.admit(request)
    host.step([request], tokens=24)
    said = host.complete(request)["kvferry"]
    assert said["not_stored"]["not_cacheable"] == 3 * CHUNK
    assert "the item at token 20" in said["not_stored_why"]
