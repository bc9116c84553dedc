"""Cases: what must not be shared is not (vllm#53194), and what may be shared is right."""

from __future__ import annotations

from kvferry.testing.connector.content import Ask, Item
from kvferry.testing.connector.lab import Lab
from kvferry.testing.connector.rules import Case, Changes, Table, flags, restarted


def _store(lab: Lab, ask: Ask) -> None:
    """Store a prompt. The first time may be a miss: an adapter may have to be read first."""
    with lab.unless("miss"):
        lab.store_prompt(ask)
    lab.store_prompt(lab.again(ask))


def _apart(stored: Changes, *others: Changes) -> Case:
    """A case: a prompt is stored with inputs besides its tokens; no other one, which has others,
    may be given its KV."""

    @flags(may=("miss",))
    def case(lab: Lab) -> None:
        def inputs(changes: Changes) -> Changes:
            adapter = changes.get("adapter")
            return {**changes, "adapter": lab.adapter(*adapter)} if adapter else changes

        lab.start()
        ask = lab.ask(69 if stored.keys() <= {"salt", "adapter"} else (0,) * 69, **inputs(stored))
        try:
            _store(lab, ask)
        finally:
            for changes in others:
                lab.forget()
                with lab.during(f"after {stored}, with {changes}"):
                    lab.serve(lab.again(ask, **inputs(changes)))

    return case


TABLE: Table = (
    *((name, f"{expects} [vllm#53194: no block hash covers it]", restarted(first, second))
    for name, expects, first, second in (
        ("weights", "Other weights of the same shape share nothing.", {}, {"model": "weights"}),
        ("rope", "Another base of the rotary embedding shares nothing.", {}, {"model": "rope"}),
        ("dtype", "KV of another dtype is not taken for the engine's.", {}, {"model": "dtype"}),
        ("window", "KV of another window is not taken for the engine's.", {"model": "windows"},
         {"model": "narrow"}),
        ("block_size", "Another block size gets right KV or none.", {}, {"block_size": 32}),
        ("number_of_ranks", "Another number of ranks gets right KV or none.", {}, {"ranks": 2}),
    )),
    *((name, f"{expects} [kv_cache_utils.py{more}]", _apart(*inputs))
    for name, expects, more, *inputs in (
        ("salt", "Requests with other salts, or none, share nothing.", "; vllm#53495",
         {"salt": "a"}, {"salt": "b"}, {"salt": None}),
        ("lora", "An adapter's KV is not the base model's, nor another adapter's.", "; vllm#53495",
         {"adapter": ("one", "first")}, {"adapter": None}, {"adapter": ("two", "second", 2)}),
        ("prompt_embeddings", "Prompt embeddings share nothing with others.", "; vllm#53495",
         {"embeds": 1}, {"embeds": 2}),
        ("images", "An image shares nothing with others, nor with itself elsewhere.", "",
         {"items": (Item("aa", 4),)}, {"items": (Item("bb", 4),)}, {"items": (Item("aa", 20),)},
         {"items": ()}),
        ("image_names", "Two images share nothing with two others whose names join to the "
         "same text.", "",
         {"items": (Item("ab", 4), Item("c", 20))}, {"items": (Item("a", 4), Item("bc", 20))}),
    )),
)  # fmt: skip


@flags(may=("miss", "refused"), parts=2)
def lora_version(lab: Lab) -> None:
    """An adapter that was trained on, at the same path, shares nothing with its former self.
    [vllm#53194]"""
    adapter = lab.adapter("one", f"version {lab.part}")
    lab.start()
    ask = lab.ask(69, adapter=adapter)
    if lab.part == 0:
        _store(lab, ask)
    else:
        lab.expect_none(ask, "the adapter's next version")
