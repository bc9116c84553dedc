"""What is known of a host pool: all that it holds, but for the number of its places."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvferry.adapters.sglang.pool_facts import FACTS, FIELDS, OF_THIS_START, pool_facts
from kvferry.errors import ConfigError

NUM_PAGES, PAGE, DEVICE_TOKENS = 24, 8, 100


class Order(enum.Enum):
    NHD = 1
    HND = 2


@dataclass
class Buffers:
    """What the device holds, in as many tokens as fit there."""

    k: tuple[torch.Tensor, ...]
    layout: Order = Order.NHD


class Pool:
    """A pool of two states, with what SGLang's own pools have of attributes."""

    def __init__(self, num_pages: int = NUM_PAGES, tokens: int = DEVICE_TOKENS) -> None:
        self.size, self.page_num, self.page_size = num_pages * PAGE, num_pages, PAGE
        self.indexer_page_num = num_pages + 1
        self.device_capacity_tokens = tokens
        self.device = "cpu"
        self.layout = "page_first"
        self.dtype = torch.bfloat16
        self.layer_num = 3
        self._layer_shard_enabled = False
        self.pool_label = None
        self._buffer_device = torch.device("cpu")
        self.temporal_state_shape = torch.Size([4, 6])
        self._host_layer_by_controller = {0: 1, 1: 0}
        self.allocator = SimpleNamespace(at=id(self))
        self.buffer_info = Buffers((torch.zeros(tokens, 3, dtype=torch.float16),))
        self.kv_buffer = torch.zeros((self.size, 3, 4, 6), dtype=torch.float16)
        self.k_data_refs = list(self.kv_buffer.unbind(1))
        self.k_scale_host = [torch.zeros((self.indexer_page_num, 3), dtype=torch.float32)]
        self.device_rows = [torch.zeros(tokens, 2, dtype=torch.uint8) for _ in range(4)]
        self.free_slots = torch.arange(self.size)


PAGE_BYTES = PAGE * 3 * 4 * 6 * 2 + 3 * 4


class Another:
    """An object of another class."""


def changed(value: Any) -> Any:
    """Another value, of the same type where it is a plain one."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case str():
            return f"another {value}"
        case None:
            return "is set"
        case torch.Tensor():
            return value.to(torch.float64)
        case torch.Size():
            return torch.Size([*value[1:], value[0]])
        case list():
            return [changed(value[0]), *value[1:]]
        case dict():
            return value | {"more": 1}
        case Buffers():
            return Buffers(value.k, Order.HND)
        case torch.dtype():
            return torch.float8_e5m2
        case torch.device():
            return torch.device("meta")
        case _:
            return Another()


HELD = sorted(vars(Pool()).keys() - OF_THIS_START)


@pytest.mark.parametrize("name", HELD)
def test_each_attribute_is_of_the_facts(name: str) -> None:
    pool = Pool()
    before = pool_facts(pool, 0)
    if name == "device":
        pool.kv_buffer, pool.k_data_refs = pool.kv_buffer.to("meta"), []
    value = getattr(pool, name)
    setattr(pool, name, "meta" if name == "device" else changed(value))
    assert pool_facts(pool, 0) != before


def test_another_class_is_another_pool() -> None:
    class OtherPool(Pool):
        pass

    assert pool_facts(OtherPool(), PAGE_BYTES) != pool_facts(Pool(), PAGE_BYTES)


@pytest.mark.parametrize("shape", [(3, 6, 4), (4, 3, 6), (2, 6, 6), (72,)])
def test_a_shape_of_as_many_bytes_is_another(shape: tuple[int, ...]) -> None:
    pool = Pool()
    pool.kv_buffer = torch.zeros((pool.size, *shape), dtype=torch.float16)
    pool.k_data_refs = []
    as_it_is = Pool()
    as_it_is.k_data_refs = []
    assert pool_facts(pool, PAGE_BYTES) != pool_facts(as_it_is, PAGE_BYTES)


@pytest.mark.parametrize("num_pages", ["as many as layers", "as many as heads", "another number"])
@pytest.mark.parametrize("layer_first", [True, False])
def test_no_axis_is_taken_for_that_of_the_places_because_it_is_as_long(
    num_pages: str, layer_first: bool
) -> None:
    facts = []
    for layers, heads in ((3, 4), (5, 4), (3, 7)):
        pool = Pool()
        shape = (layers, pool.size) if layer_first else (pool.size, layers)
        pool.kv_buffer = torch.zeros((*shape, heads, 6), dtype=torch.float16)
        pool.k_data_refs = pool.k_scale_host = pool.device_rows = pool.buffer_info = []
        numbers = {"as many as layers": layers, "as many as heads": heads}
        pool.page_num = numbers.get(num_pages, NUM_PAGES)
        page_bytes = PAGE * layers * heads * 6 * 2
        facts.append(str(pool_facts(pool, page_bytes)))
        with pytest.raises(ConfigError, match=f"finds {page_bytes} of"):
            pool_facts(pool, page_bytes + 1)
    assert len(set(facts)) == 3


def test_the_number_of_places_and_what_is_in_use_do_not_matter() -> None:
    larger = Pool(num_pages=2 * NUM_PAGES, tokens=3 * DEVICE_TOKENS)
    larger.free_slots = larger.free_slots[7:]
    assert pool_facts(larger, PAGE_BYTES) == pool_facts(Pool(), PAGE_BYTES)


def test_a_pool_that_hides_what_its_pages_are_made_of_is_refused_by_name() -> None:
    pool = Pool()
    pool.k_scale_host = SimpleNamespace(hidden=pool.k_scale_host)
    with pytest.raises(
        ConfigError, match=f"finds {PAGE_BYTES - 12} of the {PAGE_BYTES} .* of Pool"
    ):
        pool_facts(pool, PAGE_BYTES)


def test_a_pool_around_a_pool_holds_what_that_one_does() -> None:
    class Inner(Pool):
        def get_data_page(self) -> None: ...

    class Around:
        def __init__(self, host_pool: Pool) -> None:
            self.host_pool = host_pool

        def __getattr__(self, name: str) -> Any:
            return getattr(self.host_pool, name)

    changed_inside = Inner()
    changed_inside.layer_num = 9
    facts = [pool_facts(Around(each), PAGE_BYTES) for each in (Inner(), Inner(), changed_inside)]
    assert facts[0] == facts[1] != facts[2]


def count_lookups(pool: Pool) -> None:
    pool.num_lookups = 7


def count_in_a_structure(pool: Pool) -> None:
    @dataclass
    class Counted(Buffers):
        num_moved: int = 7

    pool.buffer_info = Counted(())


def count_within(pool: Pool) -> None:
    class Inner(Pool):
        def get_data_page(self) -> None: ...

    pool.host_pool = Inner()
    count_lookups(pool.host_pool)


@pytest.mark.parametrize(
    ("add", "holder", "name"),
    [
        (count_lookups, "Pool", "num_lookups"),
        (count_in_a_structure, "Counted", "num_moved"),
        (count_within, "Inner", "num_lookups"),
    ],
)
def test_what_is_not_known_is_refused_by_name(add: Any, holder: str, name: str) -> None:
    """It is no namespace of each start's own, which would never hit and never say so."""
    pool = Pool()
    add(pool)
    with pytest.raises(ConfigError, match=f"^{holder} of this SGLang has '{name}'") as refusal:
        pool_facts(pool, PAGE_BYTES)
    assert "\n" not in str(refusal.value)


def test_no_name_stands_in_two_lists() -> None:
    assert not FACTS & OF_THIS_START
    assert not FIELDS & {"size", "fd", "free_slots"}
