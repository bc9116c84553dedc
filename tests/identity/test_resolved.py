"""A host's specs are described field by field, and what is not known is refused by name."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from fractions import Fraction

import pytest
import torch

from kvferry.errors import ConfigError
from kvferry.identity.resolved import Use, describe_spec, describe_value, unserved_fields
from kvferry.keys.encoding import canonical


class Mode(enum.IntEnum):
    PLAIN = 0
    SCALED = 1


@dataclass(frozen=True)
class Spec:
    block_size: int
    dtype: torch.dtype = torch.bfloat16
    mode: Mode = Mode.PLAIN
    states: int = 1
    budget: object = None
    shapes: tuple[tuple[int, ...], ...] = ((3, 4), (5,))

    @property
    def page_bytes(self) -> int:
        return self.block_size * 8


@dataclass(frozen=True)
class Mixed:
    specs: dict[str, Spec] = field(default_factory=dict)


TABLE = {
    "Spec": {
        "block_size": Use.PAGE,
        "dtype": Use.CONTENT,
        "mode": Use.CONTENT,
        "states": Use.UNSERVED,
        "budget": Use.NOTHING,
        "shapes": Use.CONTENT,
        "page_bytes": Use.PAGE,
        "of_another_release": Use.CONTENT,
    },
    "Mixed": {"specs": Use.CONTENT},
}
PLAIN = Spec(16)


def test_all_that_decides_bytes_is_described_by_plain_values():
    assert describe_spec(PLAIN, TABLE, "layer 0") == {
        "class": "Spec",
        "block_size": 16,
        "dtype": "bfloat16",
        "mode": "PLAIN",
        "states": 1,
        "shapes": [[3, 4], [5]],
        "page_bytes": 128,
    }


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 32},
        {"dtype": torch.float32},
        {"mode": Mode.SCALED},
        {"states": Fraction(1, 4)},
        {"shapes": ((3, 4), (6,))},
    ],
    ids=str,
)
def test_each_field_makes_another_description_also_within_a_spec_of_specs(change):
    changed = replace(PLAIN, **change)
    alone = [canonical(describe_spec(spec, TABLE, "x")) for spec in (PLAIN, changed)]
    mixed = [
        canonical(describe_spec(Mixed({"a": PLAIN, "b": spec}), TABLE, "x"))
        for spec in (PLAIN, changed)
    ]
    assert len({*alone, *mixed}) == 4


def test_a_field_that_decides_nothing_is_in_no_description_whatever_it_holds():
    assert describe_spec(replace(PLAIN, budget=object()), TABLE, "x") == describe_spec(
        PLAIN, TABLE, "x"
    )


@pytest.mark.parametrize("dropped", ["block_size", "dtype", "mode", "states", "budget", "shapes"])
@pytest.mark.parametrize("ask", [describe_spec, unserved_fields])
def test_a_field_that_is_not_in_the_table_is_refused_by_name(dropped, ask):
    table = {"Spec": {name: use for name, use in TABLE["Spec"].items() if name != dropped}}
    with pytest.raises(ConfigError, match=f"layer 7 keeps its KV as a Spec with {dropped}="):
        ask(PLAIN, table, "layer 7")


@pytest.mark.parametrize("ask", [describe_spec, unserved_fields])
@pytest.mark.parametrize("spec", [Mode.PLAIN, object(), replace(Mixed())])
def test_a_class_that_is_not_in_the_table_is_refused_by_name(spec, ask):
    with pytest.raises(ConfigError, match=f"keeps its KV as a {type(spec).__name__}, which"):
        ask(spec, {"Spec": TABLE["Spec"]}, "layer 7")


def test_a_subclass_is_another_class():
    class Finer(Spec):
        pass

    with pytest.raises(ConfigError, match="Finer"):
        describe_spec(Finer(16), TABLE, "layer 7")


def test_what_tokens_cannot_hold_is_named_with_its_value():
    assert unserved_fields(PLAIN, TABLE, "x") == {}
    assert unserved_fields(replace(PLAIN, states=4), TABLE, "x") == {"states": 4}


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (True, True),
        (1.5, 1.5),
        (torch.Size([2, 3]), [2, 3]),
        (frozenset("ba"), ["a", "b"]),
        ({1: torch.int8}, {"1": "int8"}),
        (Fraction(3, 2), "3/2"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_have_one_plain_form(value, plain):
    assert describe_value(value, "x") == plain


@pytest.mark.parametrize(
    "value",
    [object(), b"bytes", [object()], {"a": {1j}}, PLAIN],
    ids=lambda each: type(each).__name__,
)
def test_a_value_without_a_plain_form_is_refused(value):
    with pytest.raises(ConfigError, match=r"pool x.* is a \w+, which kvferry cannot describe"):
        describe_value(value, "pool x")
