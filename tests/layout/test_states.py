"""States in pages: every element is found by head, whatever the ranks and the order in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvferry.errors import LayoutError
from kvferry.layout.ops import NumpyCopies, PagedKV, strided
from kvferry.layout.plan import BlockRun
from kvferry.layout.shards import heads_of_rank
from kvferry.layout.states import Arrays, components_of, page_parts
from tests.state_models import MODELS, Place, StateModel

LAYERS, BLOCKS, BLOCK = 3, 4, 2
GARBAGE = 0x5A
RUN = [BlockRun((BLOCK,), 0, 1, 0, 1)]


def pages_of(model: StateModel, tp: int, padding: int = 64) -> list[torch.Tensor]:
    """Pages of each layer as vLLM makes them: bytes, one layer behind the other, with padding."""
    size = -(-model.page_bytes(tp) // 8) * 8
    memory = torch.full((BLOCKS, LAYERS, size + padding), GARBAGE, dtype=torch.uint8)
    return [
        memory[:, layer, : model.page_bytes(tp)].view(torch.int8).view(BLOCKS, 1, 1, -1)
        for layer in range(LAYERS)
    ]


def bound(
    model: StateModel, pages: list[torch.Tensor], tp: int, *, dim_first: bool
) -> list[PagedKV]:
    return [
        PagedKV.of_parts(
            pages,
            [page_parts(component, strided(page)) for page in pages],
            {"float32": 4}.get(component.dtype, 2),
            component.content_size,
            copies=NumpyCopies,
        )
        for component in components_of(model.kind, model.arrays(tp, dim_first=dim_first))
    ]


def records_of(model: StateModel, tp: int, *, dim_first: bool) -> list[torch.Tensor]:
    """Write a state on every rank, and join the rows of all by head."""
    components = components_of(model.kind, model.arrays(tp, dim_first=dim_first))
    records = [
        torch.zeros(LAYERS, each.num_heads, 1, each.content_size, dtype=torch.int64)
        for each in components
    ]
    for rank in range(tp):
        pages = pages_of(model, tp)
        for layer, page in enumerate(pages):
            model.write(page[BLOCK], Place(layer, 5, tp, rank, dim_first))
        for record, each, paged in zip(
            records, components, bound(model, pages, tp, dim_first=dim_first), strict=True
        ):
            heads = heads_of_rank(each.num_heads, rank, tp)
            shape = (LAYERS, heads[1] - heads[0], 1, each.content_size)
            assert shape[1] == each.rank_heads
            rows = torch.zeros(shape, dtype={4: torch.int32, 2: torch.int16}[paged.item_bytes])
            paged.gather(rows.numpy(), 0, RUN, 0)
            record[:, heads[0] : heads[1]] = rows
    return records


SPLITS = [(tp, dim_first) for tp in (1, 2, 4, 8) for dim_first in (False, True)]


@pytest.mark.parametrize("name", MODELS)
def test_a_state_is_the_same_whatever_the_ranks_and_the_order_of_taps(name: str):
    model = MODELS[name]
    first, *others = [records_of(model, tp, dim_first=dim_first) for tp, dim_first in SPLITS]
    assert sum(each.numel() for each in first) * 1.0 == LAYERS * (
        sum(each.num_heads * each.content_size for each in components_of(
            model.kind, model.arrays(1, dim_first=False)
        ))
    )  # fmt: skip
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("tp", "dim_first"), SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_a_state_comes_back_into_the_pages_of_any_ranks_and_nothing_else_is_written(
    name: str, tp: int, dim_first: bool
):
    model = MODELS[name]
    records = records_of(model, 1, dim_first=False)
    components = components_of(model.kind, model.arrays(tp, dim_first=dim_first))
    for rank in range(tp):
        pages = pages_of(model, tp)
        memory = torch.empty(0, dtype=torch.uint8).set_(pages[0].untyped_storage())
        bindings = bound(model, pages, tp, dim_first=dim_first)
        for record, each, paged in zip(records, components, bindings, strict=True):
            start, stop = heads_of_rank(each.num_heads, rank, tp)
            dtype = {4: torch.int32, 2: torch.int16}[paged.item_bytes]
            rows = record[:, start:stop].to(dtype).contiguous()
            paged.scatter(rows.numpy(), 0, RUN, 0)
        for layer, page in enumerate(pages):
            assert not model.num_wrong(page[BLOCK], Place(layer, 5, tp, rank, dim_first))
            page[BLOCK] = torch.tensor(GARBAGE, dtype=torch.int8)
        assert bool((memory == GARBAGE).all()), "padding or another page"


def test_the_oldest_input_of_a_convolution_comes_first():
    model = MODELS["short convolution (LFM2)"]
    [record] = records_of(model, 1, dim_first=False)
    taps = record.view(LAYERS, -1, model.taps, record.shape[-1] // model.taps)
    assert (taps[:, :, 1] - taps[:, :, 0]).unique().tolist() == [31 * 128]


MAMBA2 = MODELS["Mamba-2"].arrays(2, dim_first=False)
WRONG = {
    "another kind": ("rings", MAMBA2, "not known"),
    "a ring behind the state": (
        "mamba2",
        replace(MAMBA2, shapes=(*MAMBA2.shapes, (2, 2)), dtypes=(*MAMBA2.dtypes, "float32")),
        "other arrays",
    ),
    "another dtype": ("mamba2", replace(MAMBA2, dtypes=("bfloat16", "float8_e4m3fn")), "float8"),
    "channels that are no x, B and C": (
        "mamba2",
        replace(MAMBA2, shapes=((3, 97), MAMBA2.shapes[1])),
        "97 channels",
    ),
    "several groups that are said to be one": (
        "mamba2",
        replace(MAMBA2, shares_groups=True),
        "4 groups",
    ),
    "channels that are no Q, K and V": (
        "gated_delta",
        replace(MAMBA2, shapes=((3, 97), MAMBA2.shapes[1])),
        "97 channels",
    ),
    "another state than channels": (
        "mamba1",
        Arrays(shapes=((3, 64), (32, 6)), dtypes=("float16", "float16")),
        "not 32 for 64",
    ),
    "channels that are not divided so far": (
        "short_conv",
        Arrays(shapes=((2, 9),), dtypes=("float16",), num_ranks=3),
        "not divided over 3",
    ),
    "a state that is not aligned": (
        "mamba2",
        Arrays(shapes=((3, 7), (1, 5, 1)), dtypes=("bfloat16", "float32")),
        "begins at byte 42",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_known_is_refused_in_one_line(name: str):
    kind, arrays, message = WRONG[name]
    with pytest.raises(LayoutError, match=message) as refused:
        components_of(kind, arrays)
    assert "\n" not in str(refused.value)


def test_pages_that_are_no_bytes_too_short_or_not_aligned_are_refused():
    first, *_ = components_of("mamba2", MAMBA2)
    pages = pages_of(MODELS["Mamba-2"], 2)[0]
    for wrong in (pages.view(torch.int16), pages[..., :64], pages.view(BLOCKS, 2, 1, -1)):
        with pytest.raises(LayoutError, match="pages of states are bytes"):
            page_parts(first, strided(wrong))
    with pytest.raises(LayoutError, match="no multiples of 2"):
        page_parts(first, strided(pages)._replace(offset=1))
