"""Cases: what must not be shared is not (vllm#53194), and what may be shared is right."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kvferry.testing.connector.host import Ask, Item, MissedError
from kvferry.testing.connector.lab import PLACEHOLDER, Lab
from kvferry.testing.connector.rules import Case, restarted

_UNHASHED = "[vllm#53194: no block hash covers it]"
TABLE: dict[str, tuple[str, Case]] = {
    name: (f"{expects} {_UNHASHED}", restarted(first, second))
    for name, expects, first, second in (
        ("weights", "Other weights of the same shape share nothing.", {}, {"model": "weights"}),
        ("rope", "Another base of the rotary embedding shares nothing.", {}, {"model": "rope"}),
        ("dtype", "KV of another dtype is not taken for the engine's.", {}, {"model": "dtype"}),
        ("window", "KV of another window is not taken for the engine's.", {"model": "windows"},
         {"model": "narrow"}),
        ("block_size", "Another block size gets right KV or none.", {}, {"block_size": 32}),
        ("number_of_ranks", "Another number of ranks gets right KV or none.", {}, {"ranks": 2}),
    )
}  # fmt: skip
FLAGS: dict[str, dict[str, Any]] = {
    **{name: {"may": ("miss", "refused"), "parts": 2} for name in (*TABLE, "lora_version")},
    "salt": {"may": ("miss",)},
    "lora": {"may": ("miss",)},
    "prompt_embeddings": {"may": ("miss",)},
    "images": {"may": ("miss",)},
    "image_names": {"may": ("miss",)},
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
