"""Which tokens of a prompt an image fills, and which part of each tensor is its own."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvferry.adapters.transformers.items import NO_ITEMS, Items, items_of
from kvferry.keys import ChunkKeys

IMAGE, VIDEO = 90, 91
CONFIG = SimpleNamespace(image_token_id=IMAGE, video_token_index=VIDEO, image_start_token_id=5)
TEXT = 7


def row(*parts: int | tuple[int, int]) -> list[int]:
    """Return ids: as many of text, or `(id, number)`."""
    pairs = [(TEXT, each) if isinstance(each, int) else each for each in parts]
    return [token for token, number in pairs for _ in range(number)]


def found(ids: list[int], **given) -> Items:
    result = items_of(CONFIG, ids, given)
    assert isinstance(result, Items), result
    return result


def spans(items: Items) -> list[tuple[int, int]]:
    return [(each.first, each.stop) for each in items.items]


def grid(*shapes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(shapes)


def pixels(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


ONE = (IMAGE, 4)
TWO = row(3, ONE, 2, (IMAGE, 6), 1)
EACH_ROW = row(1, (IMAGE, 2), 1, (IMAGE, 2), 1, (IMAGE, 3), 2)
"""One image of two rows with a token between, and one of a row."""

LAWS = {
    "a row for each": (
        TWO,
        {"pixel_values": pixels(2, 3, 8, 8), "image_sizes": grid((9, 9), (5, 5))},
        "each of axis 0",
        [(3, 7), (9, 15)],
        {"pixel_values": [1, 1], "image_sizes": [1, 1]},
    ),
    "a row for each, in a batch of one": (
        TWO,
        {"pixel_values": pixels(1, 2, 3, 8), "pixel_attention_mask": pixels(1, 2, 8)},
        "each of axis 1",
        [(3, 7), (9, 15)],
        {"pixel_values": [1, 1]},
    ),
    "rows of cells and grids": (
        TWO,
        {"pixel_values": pixels(40, 5), "image_grid_thw": grid((1, 4, 4), (1, 4, 6))},
        "by image_grid_thw",
        [(3, 7), (9, 15)],
        {"pixel_values": [16, 24], "image_grid_thw": [1, 1]},
    ),
    "sizes of images with tokens between their rows": (
        EACH_ROW,
        {"pixel_values": pixels(2, 3, 64, 96), "image_sizes": grid((64, 64), (32, 96))},
        "by image_sizes",
        [(1, 6), (7, 10)],
        {"pixel_values": [1, 1]},
    ),
    "tiles alike, several in a run": (
        TWO,
        {"pixel_values": pixels(5, 3, 8, 8)},
        "alike on axis 0",
        [(3, 7), (9, 15)],
        {"pixel_values": [2, 3]},
    ),
    "tiles alike, by chance as many as runs": (
        row(1, (IMAGE, 8), 2, (IMAGE, 2), 1, (IMAGE, 2), 1),
        {"pixel_values": pixels(3, 3, 8, 8)},
        "alike on axis 0",
        [(1, 9), (11, 16)],
        {"pixel_values": [2, 1]},
    ),
    "tiles alike, in a batch of one": (
        TWO,
        {"pixel_values": pixels(1, 5, 3, 8, 8)},
        "alike on axis 1",
        [(3, 7), (9, 15)],
        {"pixel_values": [2, 3]},
    ),
    "grids that do not fit": (
        TWO,
        {"pixel_values": pixels(40, 5), "image_grid_thw": grid((1, 4, 5), (1, 4, 5))},
        "by image_grid_thw",
        [(3, 15)],
        {"pixel_values": [40]},
    ),
    "grids that fit together, but not each": (
        TWO,
        {"pixel_values": pixels(40, 5), "image_grid_thw": grid((1, 2, 5), (1, 5, 6))},
        "all",
        [(3, 15)],
        {"pixel_values": [40]},
    ),
    "nothing that fits": (
        TWO,
        {"pixel_values": pixels(7, 5), "image_grid_thw": grid((1, 4, 4), (1, 4, 6))},
        "all",
        [(3, 15)],
        {"pixel_values": [7], "image_grid_thw": [2]},
    ),
    "images beside videos": (
        row(2, ONE, 1, (VIDEO, 4), 1),
        {"pixel_values": pixels(2, 5), "pixel_values_videos": pixels(2, 5)},
        "all",
        [(2, 11)],
        {"pixel_values": [2], "pixel_values_videos": [2]},
    ),
    "types beside the tokens of images": (
        TWO,
        {
            "pixel_values": pixels(2, 3),
            "token_type_ids": torch.tensor([row(3, (1, 4), 2, (1, 7))]).where(
                torch.tensor([row(3, (1, 4), 2, (1, 7))]) != TEXT, 0
            ),
        },
        "all",
        [(3, 16)],
        {"pixel_values": [2]},
    ),
    "types alone say where": (
        row(9),
        {
            "pixel_values": pixels(1, 3),
            "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 0, 0, 0, 0]]),
        },
        "each of axis 0",
        [(2, 5)],
        {"pixel_values": [1]},
    ),
}


@pytest.mark.parametrize("case", LAWS)
def test_tensors_are_divided_by_their_shapes(case):
    ids, given, law, expected, rows = LAWS[case]
    items = found(ids, **given)
    assert items.law == law
    assert spans(items) == expected
    for name, numbers in rows.items():
        axis = items.parts[name].axis
        at = 0
        for number, (first, stop) in zip(numbers, expected, strict=True):
            part = items.inputs(first, stop)[name]
            assert torch.equal(part, given[name].narrow(axis, at, number))
            at += number
        assert at == given[name].shape[axis]
        assert torch.equal(items.inputs(0, len(ids))[name], given[name])


def test_tokens_without_an_item_get_no_tensor_of_one():
    types = torch.tensor([[0] * 3 + [1] * 4 + [0] * 2 + [1] * 6 + [0]])
    items = found(TWO, pixel_values=pixels(2, 3), mm_token_type_ids=types)
    for first, stop in ((0, 3), (7, 9), (15, 16)):
        inputs = items.inputs(first, stop)
        assert inputs.keys() == {"mm_token_type_ids"}
        assert torch.equal(inputs["mm_token_type_ids"], types[:, :stop])


@pytest.mark.parametrize(
    ("num_tokens", "cut", "aligned", "cover"),
    [
        (2, 2, 0, 2),
        (3, 3, 0, 3),
        (4, 3, 0, 7),
        (7, 7, 0, 7),
        (9, 9, 8, 9),
        (10, 9, 8, 15),
        (16, 16, 16, 16),
    ],
)
def test_nothing_ends_in_an_item(num_tokens, cut, aligned, cover):
    items = found(TWO, pixel_values=pixels(2, 3), image_sizes=grid((9, 9), (5, 5)))
    assert items.cut(num_tokens) == cut
    assert items.aligned_cut(num_tokens, 8) == aligned
    assert items.cover(num_tokens) == cover


def keys(ids: list[int], **given) -> list[bytes]:
    """Return the keys of chunks of four tokens."""
    items = found(ids, **given) if given else NO_ITEMS
    chain = ChunkKeys(bytes(32), 4, items.extra_keys)
    chain.extend(ids)
    return chain.keys


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    return sum(a == b for a, b in zip(one, other, strict=False))


GRIDS = {"image_grid_thw": grid((1, 4, 4), (1, 4, 6))}
PIXELS = pixels(40, 5)


def changed(row_number: int) -> torch.Tensor:
    other = PIXELS.clone()
    other[row_number] += 1
    return other


SHARED = {
    # Chunks of four tokens that share a key with a prompt of pixels and grids: images are at 5 to 9
    # and 11 to 17, so that the second is in the chunks 2 to 4.
    "the same": ({"pixel_values": PIXELS.clone(), **GRIDS}, 5),
    "text alone": ({}, 1),
    "another first image": ({"pixel_values": changed(3), **GRIDS}, 1),
    "another second image": ({"pixel_values": changed(39), **GRIDS}, 2),
    "another shape of the first": (
        {"pixel_values": PIXELS, "image_grid_thw": grid((1, 2, 8), (1, 4, 6))},
        1,
    ),
    "another shape of the second": (
        {"pixel_values": PIXELS, "image_grid_thw": grid((1, 4, 4), (1, 2, 12))},
        2,
    ),
    "pixels of another type": ({"pixel_values": PIXELS.double(), **GRIDS}, 1),
    "bytes of another type": ({"pixel_values": PIXELS.view(torch.int32), **GRIDS}, 1),
    "bytes of another shape": ({"pixel_values": PIXELS.reshape(40, 1, 5), **GRIDS}, 1),
    "another name": ({"pixel_values_videos": PIXELS, **GRIDS}, 1),
    "types of tokens": (
        {
            "pixel_values": PIXELS,
            **GRIDS,
            "mm_token_type_ids": torch.tensor([[0] * 5 + [1] * 4 + [0] * 2 + [1] * 6 + [0] * 3]),
        },
        1,
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_keys_are_those_of_tokens_and_of_the_items_that_begin_before_their_end(case):
    ids = row(5, ONE, 2, (IMAGE, 6), 3)
    given, number = SHARED[case]
    expected = keys(ids, pixel_values=PIXELS, **GRIDS)
    assert len(expected) == 5
    assert num_shared(expected, keys(ids, **given)) == number


def test_a_token_in_an_item_is_part_of_the_key_of_a_chunk_before_it():
    given = {"pixel_values": pixels(2, 3, 64, 96), "image_sizes": grid((64, 64), (32, 96))}
    ids = [TEXT, *EACH_ROW]
    other = [*ids]
    other[4] = 8  # between two rows of the first image, which begins in the first chunk
    one, two = (keys(each, **given) for each in (ids, other))
    assert one[0] != two[0]


REFUSED = {
    "no tensor": ({"pixel_values": [[1.0]]}, "it uses pixel_values, which is no tensor"),
    "a number": ({"pixel_values": torch.tensor(1.0)}, "it uses pixel_values, which is no tensor"),
    "no bytes": ({"pixel_values": pixels(2, 3).to("meta")}, "it uses pixel_values, which"),
    "types alone": (
        {"mm_token_type_ids": torch.ones(1, 16)},
        "it uses mm_token_type_ids",
    ),
    "types of others": (
        {"pixel_values": pixels(2, 3), "mm_token_type_ids": torch.ones(1, 15)},
        "it uses mm_token_type_ids, pixel_values, of other shapes than the input_ids",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_says_so(case):
    given, why = REFUSED[case]
    assert str(items_of(CONFIG, TWO, given)).startswith(why)
    assert "stands for it" in str(items_of(CONFIG, row(9), {"pixel_values": pixels(2, 3)}))
