"""The order in which idle chunks are evicted, beside a list that is searched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.simulate.policies import Lru

KEYS = st.integers(0, 5)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS),
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("touch"), st.lists(KEYS, max_size=7)),
        st.tuples(st.just("evict"), st.none()),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_the_least_recently_used_goes_first(actions):
    order = Lru()
    model: list[int] = []  # the least recently used first
    for name, argument in actions:
        if name == "add":
            order.add(argument)
            model = [key for key in model if key != argument] + [argument]
        elif name == "remove":
            order.remove(argument)
            model = [key for key in model if key != argument]
        elif name == "touch":
            order.touch(argument)
            for key in reversed(argument):
                if key in model:
                    model.remove(key)
                    model.append(key)
        elif model:
            assert order.evict() == model.pop(0)
        assert len(order) == len(model)
        assert all((key in order) == (key in model) for key in range(6))


def test_a_prompt_loses_its_end_first():
    order = Lru()
    for key in "abc":
        order.add(key)
    order.touch("abc")
    assert [order.evict() for _ in range(3)] == ["c", "b", "a"]


def test_without_idle_chunks_nothing_can_be_evicted():
    with pytest.raises(KeyError):
        Lru().evict()
