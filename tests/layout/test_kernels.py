"""The Triton kernels. Without a GPU they run in Triton's interpreter."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import xxhash

from kvferry.layout.device import INT_OF, TorchCopies
from kvferry.layout.ops import MakeCopies, PagedKV
from kvferry.record.checksum import CHECKSUM
from kvferry.record.leaves import FLOAT_BITS, NO_FLOATS
from kvferry.record.schema import SAFETENSORS_DTYPE
from kvferry.types import GroupShard, KVGroup
from tests.layout.paging import LAYOUTS, MLA_LAYOUTS, Cache, expected_rows

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")

MAP_NORESERVE = 0x4000
"""Of Linux; Python has no name for it."""

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def triton_copies():
    """The class; its kernels are interpreted if there is no GPU (`tests/conftest.py`)."""
    from kvferry.layout.kernels import TritonCopies

    return TritonCopies


def make_cache(layout: str, **options) -> Cache:
    """Sizes in whole words of 8 bytes, and no power of two where it may be none."""
    options = {"head_dim": 6, "block_size": 3, "num_blocks": 8} | options
    cache = Cache(layout, device=DEVICE, **options)
    cache.fill()
    return cache


@pytest.mark.parametrize("rows_on", sorted({"cpu", DEVICE}))
@pytest.mark.parametrize("layout", [*LAYOUTS, *MLA_LAYOUTS])
def test_gather_and_scatter_agree_with_the_elements(layout, rows_on, triton_copies):
    cache = make_cache(layout, num_heads=1 if layout in MLA_LAYOUTS else 3)
    paged = cache.paged(copies=triton_copies)
    ids = [7, 2, 3, 0, 5]
    runs = paged.runs(ids[:3], 1, 9) + paged.runs(ids[4:], 12, 14)
    rows = torch.full((2, cache.num_heads, 16, 12), -1, dtype=torch.int32, device=rows_on)
    paged.gather(rows, 0, runs, 0)
    expected = expected_rows(cache, ids, 1, 14)
    there = [t for t in range(1, 14) if t // 3 != 3]
    found = rows.cpu().numpy()
    assert np.array_equal(found[:, :, there], expected[:, :, [t - 1 for t in there]])
    assert (np.delete(found, there, axis=2) == -1).all()
    target = make_cache(layout, num_heads=cache.num_heads, block_size=5)
    wanted = target.elements
    for token in there:
        wanted[:, [6, 1, 4][token // 5], :, token % 5] = found[:, :, token]
    into = target.paged(copies=triton_copies)
    for first, stop in ((1, 9), (12, 14)):
        used = [6, 1, 4][first // 5 : -(-stop // 5)]
        into.scatter(rows, 0, into.runs(used, first, stop), 0)
    assert np.array_equal(target.elements, wanted)


def test_some_layers_in_memory_of_their_own(triton_copies):
    cache = make_cache("2BNHD", num_layers=3, num_heads=4)
    expected = expected_rows(cache, [4, 2], 0, 6)
    cache.tensors = [tensor.clone() for tensor in cache.tensors]
    paged = cache.paged(copies=triton_copies)
    rows = torch.zeros((2, 4, 6, 12), dtype=torch.int32, device=DEVICE)
    paged.gather(rows, 1, paged.runs([4, 2], 0, 6), 0)
    assert np.array_equal(rows.cpu().numpy(), expected[1:])
    paged.scatter(rows + 1, 1, paged.runs([4, 2], 0, 6), 0)
    paged.gather(rows, 1, paged.runs([4, 2], 0, 6), 0)
    assert np.array_equal(rows.cpu().numpy(), expected[1:] + 1)


def leaves_of(paged, rows, leaf_bytes, dtype="U8"):
    later = paged.digests_later(
        rows, leaf_bytes, CHECKSUM.kernel, *FLOAT_BITS.get(dtype, NO_FLOATS).words
    )
    if rows.is_cuda:
        torch.cuda.synchronize()
    return later()


def hashed(paged, rows, leaf_bytes):
    digests, are_finite = leaves_of(paged, rows, leaf_bytes)
    assert are_finite  # as they are no floats
    return digests


@pytest.mark.parametrize(
    ("num_tokens", "leaf_bytes"),
    # Tokens of 64 bytes: leaves of one block of the hash, of parts of blocks, and a short last one.
    [(16, 1024), (16, 512), (17, 1088), (40, 1024), (36, 2048), (33, 65536), (1024, 65536)],
)
def test_digests_are_those_of_the_reference(num_tokens, leaf_bytes, triton_copies):
    cache = make_cache("B2NHD", num_layers=1, num_heads=2, head_dim=8, block_size=8, num_blocks=131)
    paged = cache.paged(copies=triton_copies)
    ids = list(range(130, 130 - -(-num_tokens // 8), -1))
    runs = paged.runs(ids, 0, num_tokens)
    rows = torch.zeros((1, 2, num_tokens, 16), dtype=torch.int32, device=DEVICE)
    paged.gather(rows, 0, runs, 0)
    digests = hashed(paged, rows, leaf_bytes)
    expected = expected_rows(cache, ids, 0, num_tokens)
    assert np.array_equal(rows.cpu().numpy(), expected)
    leaves = [
        row.tobytes()[start : start + leaf_bytes]
        for row in expected.reshape(2, -1)
        for start in range(0, num_tokens * 64, leaf_bytes)
    ]
    assert digests == b"".join(map(xxhash.xxh3_128_digest, leaves))
    rows[0, 1, num_tokens - 1, 15] ^= 1
    assert hashed(paged, rows, leaf_bytes)[-16:] != digests[-16:]


def test_leaves_the_kernel_cannot_hash_are_left_to_the_host(triton_copies):
    cache = make_cache("BHNC")
    paged = cache.paged(copies=triton_copies)
    rows = torch.zeros((2, 3, 3, 12), dtype=torch.int32, device=DEVICE)  # rows of 144 bytes
    for kernel in (CHECKSUM.kernel, None, "another"):
        assert paged.digests_later(rows, 65536, kernel, 0, 0) is None


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 448.0])
def test_one_value_that_is_not_finite_is_found_in_every_leaf(dtype, value, triton_copies):
    kind = getattr(torch, dtype)
    cache = make_cache("B2NHD", num_layers=1, num_heads=2, head_dim=8, block_size=8, num_blocks=3)
    paged = cache.paged(copies=triton_copies)
    rows = torch.zeros((1, 2, 20, 16), dtype=torch.int32, device=DEVICE)  # leaves of 1024 and 256
    values = rows.view(-1).view(kind)
    bits = torch.tensor([value]).to(kind).view(INT_OF[kind.itemsize]).to(DEVICE)
    is_finite = bool(bits.view(kind).float().isfinite())  # float8_e4m3fn has no Inf
    numbers = values.view(INT_OF[kind.itemsize])
    for at in (0, 1, 7, len(numbers) // 2 - 1, len(numbers) // 2, len(numbers) - 1):
        numbers.zero_()
        numbers[at] = bits[0]
        digests, are_finite = leaves_of(paged, rows, 1024, SAFETENSORS_DTYPE[dtype])
        assert are_finite == is_finite
        assert digests == hashed(paged, rows, 1024)


@pytest.mark.parametrize("options", [{"head_dim": 1}, {"head_dim": 3, "dtype": "bfloat16"}])
def test_kv_that_is_not_whole_words_is_left_to_torch(options, triton_copies):
    kinds = []

    def choose(parts, storages):
        kinds.append(triton_copies.serves(parts))
        return TorchCopies(parts, storages)

    make_cache("2BNHD", **options).paged(copies=choose)
    make_cache("2BNHD").paged(copies=choose)
    assert kinds == [False, True]


@pytest.fixture(scope="module")
def huge() -> torch.Tensor:
    """40 GiB, of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    try:
        memory = mmap.mmap(-1, 40 << 30, flags=flags)
    except OSError:
        pytest.skip("this machine reserves all memory that is mapped")
    return torch.frombuffer(memory, dtype=torch.uint8)


SHAPES = {
    # dtype, heads, tokens of a block, content
    "bfloat16": (torch.bfloat16, 8, 16, 256),
    "fp8": (torch.uint8, 8, 16, 256),
    "latent": (torch.bfloat16, 1, 64, 576),
}


def spread_over(
    memory: torch.Tensor, shape: str, order: str, copies: MakeCopies
) -> tuple[PagedKV, list[torch.Tensor]]:
    """A cache of four layers that fills the memory."""
    dtype, heads, tokens, content = SHAPES[shape]
    page = heads * tokens * content
    num_blocks = memory.numel() // (page * 4 * dtype.itemsize)
    layer, block = (page * num_blocks, page) if order[0] == "L" else (page, page * 4)
    head, token = (content, heads * content) if order[-3:] == "NHC" else (tokens * content, content)
    tensors = [
        memory.view(dtype).as_strided(
            (num_blocks, heads, tokens, content), (block, head, token, 1), each * layer
        )
        for each in range(4)
    ]
    group = KVGroup(
        num_layers=4, num_kv_heads=heads, content_size=content, dtype=str(dtype)[6:],
        block_size=tokens,
    )  # fmt: skip
    shard = GroupShard(layers=(0, 4), heads=(0, heads))
    return PagedKV(tensors, group, shard, "BHNC", copies=copies), tensors


def comes_back(paged: PagedKV, tensors: list[torch.Tensor]) -> bool:
    """Whether blocks far apart, the last one among them, are copied out rightly, and in again."""
    kind, num_blocks = INT_OF[paged.item_bytes], tensors[0].shape[0]
    away, to = [num_blocks - 1, num_blocks // 2 + 7, 3], [num_blocks - 2, num_blocks // 3, 5]
    num_tokens = 2 * paged.block_size + 1
    generator = torch.Generator().manual_seed(1)
    for tensor in tensors:
        for block in away:
            values = torch.randint(1, 100, tensor[block].shape, generator=generator)
            tensor[block] = values.to(tensor.dtype)

    def content(blocks: list[int]) -> torch.Tensor:
        found = [torch.cat([tensor[block].view(kind) for block in blocks], 1) for tensor in tensors]
        return torch.stack(found)[:, :, :num_tokens]

    rows = torch.zeros(content(away).shape, dtype=kind)
    paged.gather(rows, 0, paged.runs(away, 0, num_tokens), 0)
    paged.scatter(rows, 0, paged.runs(to, 0, num_tokens), 0)
    right = torch.equal(rows, content(away)) and torch.equal(content(to), content(away))
    for tensor in tensors:
        for block in (*away, *to):
            tensor[block] = 0
    return right


@pytest.mark.skipif(DEVICE != "cpu", reason="for the interpreter: a device has other memory")
@pytest.mark.parametrize("order", ["LBNHC", "LBHNC", "BLNHC"])
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_beyond_32_bits_are_copied(huge, shape, order, triton_copies, monkeypatch):
    paged, tensors = spread_over(huge, shape, order, triton_copies)
    assert comes_back(paged, tensors)
    slots = triton_copies._slots

    def narrow(*args):
        """The offsets that arithmetic of 32 bits would give. Negative ones are not copied."""
        return (slots(*args) * 8).to(torch.int32).to(torch.int64) // 8

    monkeypatch.setattr(triton_copies, "_slots", narrow)
    assert not comes_back(paged, tensors)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_a_cuda_cache_uses_the_kernels_where_it_can(triton_copies):
    assert isinstance(make_cache("NHD").paged()._copies, triton_copies)
    assert isinstance(make_cache("2BNHD", head_dim=1).paged()._copies, TorchCopies)


COMPILE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kvferry.layout import kernels

POINTERS = {"rows", "slots", "bases", "digests", "constants"}
for kernel, warps, constants in [
    (kernels._copy_kernel, 4, {"parts": 2, "tile": 1024, "to_rows": True}),
    (kernels._copy_kernel, 4, {"parts": 1, "tile": 1024, "to_rows": False}),
    (kernels._hash_kernel, 1, {}),
]:
    names = kernel.arg_names
    types = {name: "*i64" if name in POINTERS else "i32" for name in names}
    types |= dict.fromkeys({"exponent", "lowest"} & types.keys(), "i64")
    source = ASTSource(
        fn=kernel,
        signature=types | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    done = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    print(len(done.asm["cubin"]) > 0)
"""


def test_the_kernels_compile_for_a_gpu_that_is_not_there(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        capture_output=True, text=True, timeout=200, check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 3
