"""Between blocks of any layout and record rows: no byte is lost, doubled or touched in passing."""

from __future__ import annotations

import sys
import threading
import time
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import LayoutError
from kvferry.layout.device import TorchCopies
from kvferry.layout.ops import PagedKV
from kvferry.layout.shards import heads_of_rank
from kvferry.types import GroupShard, KVGroup
from tests.layout.paging import INT_OF, LAYOUTS, MLA_LAYOUTS, Cache, expected_rows

EXECUTORS = ["numpy", "torch"]


def paged_of(cache: Cache, executor: str, **options) -> PagedKV:
    return cache.paged(copies=TorchCopies if executor == "torch" else None, **options)


def rows_like(array: np.ndarray, executor: str):
    """The array itself, or a tensor of the same memory."""
    return torch.from_numpy(array) if executor == "torch" else array


def check_transfer(
    source: Cache,
    target: Cache,
    from_ids: list[int],
    to_ids: list[int],
    span: tuple[int, int],
    *,
    executor: str = "numpy",
    chunk: int = 5,
) -> None:
    """Move tokens by rows of `chunk` tokens, each layer and head range of the target on its own
    where these are many, and look at every element of the target afterwards."""
    start, stop = span
    source.fill()
    expected = expected_rows(source, from_ids, start, stop)
    before = target.elements
    there, here = paged_of(source, executor), paged_of(target, executor)
    low, high = target.window or (0, target.num_heads)
    for first in range(start - start % chunk, stop, chunk):
        rows = np.zeros((source.num_layers, source.num_heads, chunk, 2 * source.head_dim),
                        INT_OF[source.dtype])  # fmt: skip
        window = max(start, first), min(stop, first + chunk)

        def run(paged: PagedKV, ids: list[int], window: tuple[int, int] = window):
            index = start // paged.block_size
            used = ids[
                window[0] // paged.block_size - index : -(-window[1] // paged.block_size) - index
            ]
            return list(paged.runs(used, *window))

        there.gather(rows_like(rows, executor), 0, run(there, from_ids), first)
        at = slice(window[0] - start, window[1] - start)
        assert np.array_equal(rows[:, :, window[0] - first : window[1] - first], expected[:, :, at])
        assert not rows[:, :, : window[0] - first].any()
        mine = np.ascontiguousarray(rows[:, low:high])
        for layer in range(target.num_layers):
            here.scatter(
                rows_like(mine[layer : layer + 1], executor), layer, run(here, to_ids), first
            )
    wanted = before
    for token in range(start, stop):
        block = to_ids[token // target.block_size - start // target.block_size]
        wanted[:, block, :, token % target.block_size] = expected[:, low:high, token - start]
    assert np.array_equal(target.elements, wanted)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("one", "other"), list(product(LAYOUTS, LAYOUTS)))
def test_every_layout_reads_what_every_layout_wrote(one, other, executor):
    source = Cache(one)
    target = Cache(other, block_size=3, num_blocks=8)
    target.fill(start=100_000)
    check_transfer(source, target, [5, 1, 2, 4], [7, 3, 4, 5, 1], (2, 15), executor=executor)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("one", "other"), list(product(MLA_LAYOUTS, MLA_LAYOUTS)))
def test_every_layout_of_mla_reads_what_every_layout_wrote(one, other, executor):
    source = Cache(one, num_heads=1)
    target = Cache(other, num_heads=1, block_size=6)
    check_transfer(source, target, [5, 1, 2, 4], [4, 3, 2], (0, 16), executor=executor)


@st.composite
def shapes(draw):
    """Two engines and a range of tokens: any block sizes, any chunk, any TP of the reader."""
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    tp_sizes = [n for n in (1, 2, 3, 4, 8) if num_heads % n == 0 or n % num_heads == 0]
    tp = draw(st.sampled_from(tp_sizes))
    common = {
        "num_layers": draw(st.integers(1, 3)),
        "num_heads": num_heads,
        "head_dim": draw(st.integers(1, 3)),
        "dtype": draw(st.sampled_from(list(INT_OF))),
    }
    caches = []
    for window in (None, heads_of_rank(num_heads, draw(st.integers(0, tp - 1)), tp)):
        caches.append(
            Cache(
                draw(st.sampled_from(LAYOUTS)), block_size=draw(st.integers(1, 9)), num_blocks=14,
                window=window, **common,
            )
        )  # fmt: skip
    start = draw(st.integers(0, 5))
    stop = draw(st.integers(start + 1, start + 12))
    ids = []
    for cache in caches:
        count = -(-stop // cache.block_size) - start // cache.block_size
        free = list(range(1, 14))
        if draw(st.booleans()):
            free = draw(st.permutations(free))
        ids.append(free[:count])
    return caches, ids, (start, stop), draw(st.integers(1, 13))


@pytest.mark.parametrize("executor", EXECUTORS)
@given(shape=shapes())
def test_a_reader_of_another_shape_gets_its_heads_of_every_token(executor, shape):
    (source, target), (from_ids, to_ids), span, chunk = shape
    target.fill(start=7)
    check_transfer(source, target, from_ids, to_ids, span, executor=executor, chunk=chunk)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("layout", ["NHD", "2BNHD", "B2NHD"])
@pytest.mark.parametrize("lie", ["in order", "backwards", "in memory of their own"])
def test_layers_may_lie_anywhere_and_rows_be_some_of_them(lie, layout, executor):
    cache = Cache(layout, num_layers=3)
    cache.fill()
    wanted = expected_rows(cache, [4, 2], 0, 8)
    if lie != "in order":
        cache.tensors.reverse()
        wanted = wanted[::-1]
    if lie == "in memory of their own":
        cache.tensors = [tensor.clone() for tensor in cache.tensors]
    paged = paged_of(cache, executor)
    for first in (0, 1):
        rows = np.zeros((3 - first, 3, 8, 4), np.int32)
        paged.gather(rows_like(rows, executor), first, paged.runs([4, 2], 0, 8), 0)
        assert np.array_equal(rows, wanted[first:])


def test_a_buffer_becomes_rows_without_a_copy():
    cache = Cache("BHNC", dtype="bfloat16")
    cache.fill()
    paged = cache.paged()
    buffer = bytearray(2 * 3 * 4 * 4 * 2)
    rows = paged.as_rows(memoryview(buffer), (2, 3, 4, 4))
    paged.gather(rows, 0, paged.runs([2], 0, 4), 0)
    assert bytes(buffer) == expected_rows(cache, [2], 0, 4).tobytes()


# -- what does not fit is refused before a byte is written -----------------------------------------


@pytest.mark.parametrize("ids", [[1, 6], [1, -1], [6, 1], [1, 1 << 70]])
def test_ids_outside_the_cache_are_refused_when_the_runs_are_made(ids):
    paged = Cache("BHNC").paged()
    bad = next(block for block in ids if block != 1)
    with pytest.raises(LayoutError, match=rf"block id {bad} is outside \[0, 6\)"):
        paged.runs(ids, 0, 8)


@pytest.mark.parametrize(("start", "stop"), [(0, 9), (3, 9), (-1, 4)])
def test_more_tokens_than_blocks_are_refused(start, stop):
    with pytest.raises(LayoutError, match=f"tokens {start} to {stop} do not lie in 2 blocks of 4"):
        Cache("BHNC").paged().runs([1, 2], start, stop)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("direction", ["scatter", "gather"])
@pytest.mark.parametrize(
    ("shape", "dtype", "at", "says"),
    [
        ((2, 3, 8, 5), np.int32, (0, 0), "rows have 5 elements of 4 bytes"),
        ((2, 3, 8, 4), np.int16, (0, 0), "rows have 4 elements of 2 bytes"),
        ((3, 3, 8, 4), np.int32, (0, 0), "layers 0 to 3 of a shard of 2"),
        ((2, 3, 8, 4), np.int32, (1, 0), "layers 1 to 3 of a shard of 2"),
        ((1, 3, 8, 4), np.int32, (-1, 0), "layers -1 to 0 of a shard of 2"),
        ((2, 2, 8, 4), np.int32, (0, 0), "rows of 2 heads for a shard of 3"),
        ((2, 3, 8, 4), np.int32, (0, 1), "tokens 0 to 8 are not in rows of tokens 1 to 9"),
        ((2, 3, 7, 4), np.int32, (0, 0), "tokens 0 to 8 are not in rows of tokens 0 to 7"),
    ],
)
def test_rows_that_do_not_fit_are_refused(shape, dtype, at, says, direction, executor):
    cache = Cache("NHD")
    cache.fill()
    before = cache.elements
    rows = np.zeros(shape, dtype)
    paged = paged_of(cache, executor)
    layer, first_token = at
    with pytest.raises(LayoutError, match=says):
        getattr(paged, direction)(
            rows_like(rows, executor), layer, paged.runs([1, 2], 0, 8), first_token
        )
    assert np.array_equal(cache.elements, before)
    assert not rows.any()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_rows_with_gaps_are_refused(executor):
    cache = Cache("NHD")
    paged = paged_of(cache, executor)
    rows = rows_like(np.zeros((2, 6, 8, 4), np.int32), executor)[:, ::2]
    with pytest.raises(LayoutError, match="rows are not contiguous"):
        paged.scatter(rows, 0, paged.runs([1], 0, 4), 0)


def test_tensors_on_several_devices_are_refused():
    cache = Cache("BHNC")
    cache.tensors[1] = cache.tensors[1].to("meta")
    with pytest.raises(LayoutError, match=r"2 devices: .'cpu', 'meta'."):
        cache.paged()


def test_copies_let_other_threads_run():
    group = KVGroup(num_layers=1, num_kv_heads=2, content_size=64, dtype="bfloat16", block_size=16)
    tensors = [torch.zeros(2, 2**12, 16, 2, 32, dtype=torch.bfloat16)]
    paged = PagedKV(tensors, group, GroupShard(layers=(0, 1), heads=(0, 2)), "2BNHD")
    tokens = 16 * (2**12 - 1)
    rows = np.zeros((1, 2, tokens, 64), np.int16)
    runs = paged.runs(list(range(2**12 - 1, 0, -1)), 0, tokens)
    started, done, ran = threading.Event(), threading.Event(), []

    def run_once() -> None:
        started.wait(10)
        ran.append(True)
        done.wait(10)

    thread = threading.Thread(target=run_once)
    thread.start()
    interval = sys.getswitchinterval()
    # From here on nobody takes the GIL from us: it must be given.
    sys.setswitchinterval(100)
    try:
        started.set()
        # Again where a busy machine has not let the other run meanwhile.
        until = time.monotonic() + 10
        while not ran and time.monotonic() < until:
            paged.scatter(rows, 0, runs, 0)
        ran_meanwhile = bool(ran)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        thread.join()
    assert ran_meanwhile


@pytest.mark.parametrize("make", [np.zeros, lambda shape: [0.0] * shape[0]], ids=["numpy", "list"])
def test_what_is_no_tensor_is_named(make):
    group = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=4)
    with pytest.raises(LayoutError, match=r"a (ndarray|list) is no torch.Tensor"):
        PagedKV([make((4, 1, 4, 8))], group, GroupShard(layers=(0, 1), heads=(0, 1)), "BHNC")
