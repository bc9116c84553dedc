"""Cases: what must not be shared is not (vllm#53194), and what may be shared is right."""

from __future__ import annotations

from kvferry.testing.connector.content import Ask, Item
from kvferry.testing.connector.lab import Lab
from kvferry.testing.connector.rules import Case, Changes, Table, flags, replaced, restarted


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
        ("states_and_ranks", "Another number of ranks gets its share of a right state, or none.",
         {"model": "states"}, {"model": "states", "ranks": 2}),
        ("states_and_blocks", "Another block size gets right states or none.", {"model": "states"},
         {"model": "states", "block_size": 32}),
        ("block_size", "Another block size gets right KV or none.", {}, {"block_size": 32}),
        ("number_of_ranks", "Another number of ranks gets right KV or none.", {}, {"ranks": 2}),
    )),
    *((name, f"{expects} [vllm#55776: a path is no content]", replaced("plain", model))
    for name, expects, model in (
        ("weights_in_place", "Weights that replaced others at the same path, as large and as old, "
         "share nothing with them.", "weights"),
        ("rope_in_place", "Another base of the rotary embedding, in the same directory, shares "
         "nothing.", "rope"),
        ("dtype_in_place", "KV of another dtype, in the same directory, is not taken for the "
         "engine's.", "dtype"),
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


def same_end(lab: Lab) -> None:
    """Equal tokens behind another beginning share nothing, nor those behind a block of another
    salt. [kv_cache_utils.py: hashes of blocks are chained]"""
    lab.start()
    one, two = lab.store_prompt(lab.ask(69)), lab.store_prompt(lab.ask(69))
    salted = lab.store_prompt(lab.ask(69, salt="a"))
    lab.forget()
    lab.store_prompt(lab.ask(salted.tokens[:16] + lab.tokens(20), salt="b"))
    lab.forget()
    lab.serve(lab.ask(two.tokens[:16] + one.tokens[16:]))
    lab.forget()
    lab.serve(lab.again(salted, salt="b"))


def token_borders(lab: Lab) -> None:
    """Tokens share nothing with others whose numbers join to the same text, or end in the same
    bytes. [kv_cache_utils.py: it hashes tuples of integers]"""
    lab.start()
    lab.store_prompt(lab.ask((33, 3) * 34 + (5,)))
    lab.expect_none(lab.ask((3, 33) * 34 + (5,)), "other tokens of the same digits")
    for bits in (8, 16):
        tokens = (33 + (1 << bits), 3) * 34 + (5,)
        lab.expect_none(lab.ask(tokens), f"other tokens of which the last {bits} bits are the same")


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
