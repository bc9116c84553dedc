"""Cases: what must not be shared is not (vllm#53194), and what may be shared is right."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvferry.testing.connector.host import Ask, Item, MissedError
from kvferry.testing.connector.lab import PLACEHOLDER, Lab

_SAFE = ("miss", "refused")
FLAGS: dict[str, dict[str, Any]] = {
    **{name: {"may": _SAFE} for name in ("salt", "lora", "prompt_embeddings")},
    **{name: {"may": _SAFE} for name in ("images", "image_names")},
    **{name: {"may": _SAFE, "parts": 2} for name in ("lora_version", "weights", "rope", "dtype")},
    **{name: {"may": _SAFE, "parts": 2} for name in ("window", "block_size", "number_of_ranks")},
}


def _apart(lab: Lab, stored: Ask, *others: tuple[str, Ask]) -> None:
    """Store a prompt; no other one may be given its KV. MissedError if it is not reused at all,
    even the second time: an adapter may have to be read first."""
    try:
        with suppress(MissedError):
            lab.store_prompt(stored)
            return
        lab.store_prompt(lab.again(stored))
    finally:
        for what, other in others:
            lab.forget()
            with lab.during(what):
                lab.serve(other)


def salt(lab: Lab) -> None:
    """Requests with other salts, or none, share nothing. [kv_cache_utils.py; vllm#53495]"""
    lab.start()
    stored = lab.ask(69, salt="a")
    others = (
        ("another salt", lab.again(stored, salt="b")),
        ("no salt", lab.again(stored, salt=None)),
    )
    _apart(lab, stored, *others)


def lora(lab: Lab) -> None:
    """An adapter's KV is not the base model's, nor another adapter's. [kv_cache_utils.py;
    vllm#53495]"""
    one, two = lab.adapter("one", "first"), lab.adapter("two", "second", number=2)
    lab.start()
    stored = lab.ask(69, adapter=one)
    others = (
        ("no adapter", lab.again(stored, adapter=None)),
        ("another", lab.again(stored, adapter=two)),
    )
    _apart(lab, stored, *others)


def lora_version(lab: Lab) -> None:
    """An adapter that was trained on, at the same path, shares nothing with its former self.
    [vllm#53194]"""
    adapter = lab.adapter("one", f"version {lab.part}")
    lab.start()
    ask = lab.ask(69, adapter=adapter)
    if lab.part == 0:
        _apart(lab, ask)
    else:
        lab.expect_none(ask, "the adapter's next version")


def prompt_embeddings(lab: Lab) -> None:
    """Prompt embeddings share nothing with others. [kv_cache_utils.py; vllm#53495]"""
    lab.start()
    stored = lab.ask((0,) * 69, embeds=1)
    _apart(lab, stored, ("other embeddings", lab.again(stored, embeds=2)))


def images(lab: Lab) -> None:
    """An image shares nothing with others, nor with itself elsewhere. [kv_cache_utils.py]"""
    lab.start()
    stored = lab.ask((PLACEHOLDER,) * 69, items=(Item("aa", 4),))
    others = [
        ("another image", lab.again(stored, items=(Item("bb", 4),))),
        ("the image elsewhere", lab.again(stored, items=(Item("aa", 20),))),
        ("no image", lab.again(stored, items=())),
    ]
    _apart(lab, stored, *others)


def image_names(lab: Lab) -> None:
    """Two images share nothing with two others whose names join to the same text.
    [kv_cache_utils.py]"""
    lab.start()
    stored = lab.ask((PLACEHOLDER,) * 69, items=(Item("ab", 4), Item("c", 20)))
    other = lab.again(stored, items=(Item("a", 4), Item("bc", 20)))
    _apart(lab, stored, ("images whose names join alike", other))


def _other_model(lab: Lab, model: str, first: str = "plain") -> None:
    lab.start(first if lab.part == 0 else model)
    ask = lab.ask(69)
    if lab.part == 0:
        lab.store_prompt(ask)
    else:
        lab.expect_none(ask, f"a model of other {model}")


def weights(lab: Lab) -> None:
    """Other weights of the same shape share nothing. [no block hash covers them]"""
    _other_model(lab, "weights")


def rope(lab: Lab) -> None:
    """Another base of the rotary embedding shares nothing. [no block hash covers it]"""
    _other_model(lab, "rope")


def dtype(lab: Lab) -> None:
    """KV of another dtype is not taken for the engine's own. [no block hash covers it]"""
    _other_model(lab, "dtype")


def window(lab: Lab) -> None:
    """KV of another window is not taken for the engine's own. [no block hash covers it]"""
    _other_model(lab, "narrow", first="windows")


def _may_share(lab: Lab, what: str, **second: Any) -> None:  # noqa: ANN401
    lab.start(**(second if lab.part else {}))
    ask = lab.ask(101)
    if lab.part == 0:
        lab.store_prompt(ask)
        return
    with suppress(MissedError):
        lab.expect(ask, 96)
    lab.notes.append(f"shared across {what}: {lab.host.answers[ask.name].hit} of 101 tokens")


def block_size(lab: Lab) -> None:
    """An engine with another block size gets right KV, or none. [no block hash covers it]"""
    _may_share(lab, "block sizes", block_size=32)


def number_of_ranks(lab: Lab) -> None:
    """An engine with another number of ranks gets right KV, or none. [no block hash covers it]"""
    _may_share(lab, "numbers of ranks", ranks=2)
