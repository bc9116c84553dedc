"""Triton kernels: copy blocks to record rows and back, all layers at once, and hash rows by leaf.

Memory is moved in words of 8 bytes. Each copying program moves a tile of one row (a head of a
layer). It finds each token's place in a table of slots, and each layer's tensor in a table of
addresses. Each hashing program computes the exact XXH3-128 of one leaf, a piece of a row that has
its own checksum. Within each KiB the stripes of the hash are a sum, which is formed in parallel;
only the scrambles between these sums run one after another.

The hash follows the xxHash specification (XXH3, 128 bits, seed 0, default secret) for inputs of
more than 240 bytes in whole stripes of 64 bytes. Other leaves are hashed on the host.

Needs Triton. `layout.ops` imports this on CUDA where Triton is installed. With TRITON_INTERPRET=1
the kernels run on tensors of the CPU.
"""

# mypy: disable-error-code="import-not-found,import-untyped,untyped-decorator"
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
# ruff: noqa: ANN001, ANN202 - the types of kernel arguments are Triton's

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvferry.layout.device import upload
from kvferry.layout.plan import BlockRun, Segment

WORD = 8
XXH3_128 = "xxh3_128"
"""Name of the one checksum that is computed here."""

_COPY_WORDS = 1024
"""Words that one copying program moves."""

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])


def hash_constants() -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the specification's constants as words. Below: first word, name, number of words.

    | 0 secret, 24 | 24 of the last stripe, 8 | 32 low merge, 8 | 40 high merge, 8 | 48 start, 8 |
    """
    last, high = len(_SECRET) - 64 - 7, len(_SECRET) - 64 - 11
    spans = (_SECRET, _SECRET[last : last + 64], _SECRET[11:75], _SECRET[high : high + 64])
    words = np.frombuffer(b"".join(spans), dtype="<u8")
    return np.concatenate([words, np.array(_START, dtype=np.uint64)])


# -- XXH3-128 ------------------------------------------------------------------------------------


@triton.jit
def _swapped(lanes):
    """Exchange neighbours: the hash adds each word of the input to the lane beside its own."""
    even, odd = tl.split(tl.reshape(lanes, [4, 2]))
    return tl.reshape(tl.join(odd, even), [8])


@triton.jit
def _stripe_sums(words, keys, wanted):
    """Return what the wanted stripes add to the 8 lanes; arguments are `[16, 8]`."""
    mixed = words ^ keys
    products = tl.where(wanted, (mixed & 0xFFFFFFFF) * (mixed >> 32), 0)
    return tl.sum(products, axis=0) + _swapped(tl.sum(tl.where(wanted, words, 0), axis=0))


@triton.jit
def _scrambled(lanes, constants):
    keys = tl.load(constants + 16 + tl.arange(0, 8)).to(tl.uint64, bitcast=True)
    return ((lanes ^ (lanes >> 47)) ^ keys) * 0x9E3779B1


@triton.jit
def _merged(lanes, constants, start):
    """Fold eight lanes into one word."""
    keys = tl.load(constants + tl.arange(0, 8)).to(tl.uint64, bitcast=True)
    left, right = tl.split(tl.reshape(lanes ^ keys, [4, 2]))
    word = start + tl.sum((left * right) ^ tl.umulhi(left, right), axis=0)
    word = (word ^ (word >> 37)) * 0x165667919E3779F9
    return word ^ (word >> 32)


@triton.jit
def _store_digest(digests, lanes, num_bytes, constants):
    """Store a digest in canonical order: the high word, then the low one."""
    length = num_bytes.to(tl.uint64)
    low = _merged(lanes, constants + 32, length * 0x9E3779B185EBCA87)
    high = _merged(lanes, constants + 40, (length * 0xC2B2AE3D27D4EB4F) ^ 0xFFFFFFFFFFFFFFFF)
    tl.store(digests, high.to(tl.int64, bitcast=True))
    tl.store(digests + 1, low.to(tl.int64, bitcast=True))


# -- kernels -------------------------------------------------------------------------------------


@triton.jit
def _copy_kernel(
    rows, slots, bases, row_words, token_words, part_words, head_words, num_heads,
    parts: tl.constexpr, tile: tl.constexpr, to_rows: tl.constexpr,
):  # fmt: skip
    """Copy a tile of one row, skipping tokens without a block."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * tile + tl.arange(0, tile)
    content = offsets % token_words
    inside = offsets < row_words
    slot = tl.load(slots + offsets // token_words, mask=inside, other=-1)
    there = inside & (slot >= 0)
    bases += row // num_heads * parts
    base = tl.load(bases + content // part_words, mask=there, other=0)
    head = (row % num_heads).to(tl.int64) * head_words
    places = (base + (slot + head + content % part_words) * 8).to(tl.pointer_type(tl.int64))
    in_rows = rows + row.to(tl.int64) * row_words + offsets
    if to_rows:
        tl.store(in_rows, tl.load(places, mask=there), mask=there)
    else:
        tl.store(places, tl.load(in_rows, mask=there), mask=there)


@triton.jit
def _hash_kernel(rows, digests, constants, row_words, leaf_words, exponent, lowest):
    """Compute the digest of one leaf of one row, and count its words with a value that is not
    finite: all bits of its exponent are set, so that `lowest` carries into the bit of its sign."""
    row = tl.program_id(0)
    start = tl.program_id(1) * leaf_words
    size = tl.minimum(leaf_words, row_words - start)
    leaf = rows + row.to(tl.int64) * row_words + start
    stripe = tl.arange(0, 16)[:, None]
    lane = tl.arange(0, 8)[None, :]
    keys = tl.load(constants + stripe + lane).to(tl.uint64, bitcast=True)
    lanes = tl.load(constants + 48 + tl.arange(0, 8)).to(tl.uint64, bitcast=True)
    # The last stripe has its own keys and is never scrambled, so it is left out of the blocks.
    num_blocks = (size - 1) // 128
    exponents, ones = exponent.to(tl.uint64), lowest.to(tl.uint64)
    sums = tl.zeros([16, 8], tl.uint64)
    for block in range(0, num_blocks + 1):
        offsets = block * 128 + stripe * 8 + lane
        inside = offsets < size
        words = tl.load(leaf + offsets, mask=inside, other=0).to(tl.uint64, bitcast=True)
        sums |= (words & exponents) + ones
        is_last = offsets >= size - 8
        lanes += _stripe_sums(words, keys, inside & (is_last == 0))
        if block < num_blocks:
            lanes = _scrambled(lanes, constants)
        else:
            final_keys = tl.load(constants + 24 + lane + stripe * 0).to(tl.uint64, bitcast=True)
            lanes += _stripe_sums(words, final_keys, inside & is_last)
    at = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    _store_digest(digests + at * 3, lanes, size * 8, constants)
    carries = ((sums & (exponents + ones)) != 0).to(tl.int64)
    tl.store(digests + at * 3 + 2, tl.sum(tl.sum(carries, axis=1), axis=0))


# -- running them --------------------------------------------------------------------------------


class TritonCopies:
    """Copies and leaf digests by the kernels above, for parts that `serves` accepts. All copies are
    made in one stream. The class is a `MakeCopies`."""

    def __init__(self, parts: tuple[Segment, ...], storages: Mapping[int, torch.Tensor]) -> None:
        self._storages = dict(storages)  # kept alive: kernels have their addresses
        self._device = next(iter(storages.values())).device
        first, item = parts[0].part, parts[0].item
        block, head, token, _ = first.strides
        self._block, self._head, self._token, self._part_words = (
            elements * item // WORD for elements in (block, head, token, first.shape[3])
        )
        starts = sorted({each.part.start for each in parts})
        self._num_parts = len(starts)
        num_layers = max(each.first_layer + each.num_layers for each in parts)
        bases = np.zeros((num_layers, self._num_parts), np.int64)
        for part, first_layer, count, stride, _ in parts:
            for index in range(count):
                address = part.storage + (part.offset + index * stride) * item
                bases[first_layer + index, starts.index(part.start)] = address
        self._bases = torch.from_numpy(bases).to(self._device)
        constants = torch.from_numpy(hash_constants().view(np.int64))
        self._constants = constants.to(self._device)
        # Of the copy under way: for chunks of usual sizes, no copy takes more device memory.
        self._slots_there = torch.empty(4096, dtype=torch.int64, device=self._device)

    @staticmethod
    def serves(parts: Sequence[Segment]) -> bool:
        """Whether all parts have equal strides and sizes, no gaps in the content of a token, and
        only whole words as strides, sizes and addresses."""
        shapes = {(*each.part.strides, each.part.shape[3], each.item) for each in parts}
        if len(shapes) != 1:
            return False
        block, head, token, step, size, item = shapes.pop()
        numbers = [block * item, head * item, token * item, size * item]
        for part, _, _, stride, _ in parts:
            numbers += [part.storage + part.offset * item, stride * item, part.start * item]
        return step == 1 and all(number % WORD == 0 for number in numbers)

    def scatter(
        self, rows: torch.Tensor, layer: int, runs: Sequence[BlockRun], first_token: int
    ) -> None:
        slots = self._slots(rows, runs, first_token)
        self._copy(rows.to(self._device), layer, slots, to_rows=False)

    def gather(
        self, rows: torch.Tensor, layer: int, runs: Sequence[BlockRun], first_token: int
    ) -> None:
        target = rows
        if sum(run.stop - run.start for run in runs) < rows.shape[2]:
            # Begins with the content of the rows, which tokens without a block keep.
            target = rows.to(self._device)
        elif rows.device != self._device:
            target = torch.empty_like(rows, device=self._device)
        self._copy(target, layer, self._slots(rows, runs, first_token), to_rows=True)
        if target is not rows:
            rows.copy_(target)

    def digests_later(
        self, rows: torch.Tensor, leaf_bytes: int, kernel: str, exponent: int, lowest: int
    ) -> Callable[[], tuple[bytes, bool]] | None:
        num_layers, num_heads = rows.shape[:2]
        row_bytes = rows.nbytes // (num_layers * num_heads)
        leaves = {min(leaf_bytes, row_bytes), row_bytes % leaf_bytes or leaf_bytes}
        if kernel != XXH3_128 or any(leaf % 64 or leaf <= 240 for leaf in leaves):
            return None
        words = rows.view(-1).view(torch.int64)
        grid = (num_layers * num_heads, triton.cdiv(row_bytes, leaf_bytes))
        digests = torch.empty((*grid, 3), dtype=torch.int64, device=rows.device)
        _hash_kernel[grid](
            words, digests, self._constants, row_bytes // WORD, leaf_bytes // WORD,
            exponent, lowest, num_warps=1,
        )  # fmt: skip
        found = torch.empty(digests.shape, dtype=torch.int64, pin_memory=digests.is_cuda)
        found.copy_(digests, non_blocking=True)

        def ended() -> tuple[bytes, bool]:
            numbers = found.numpy()
            return numbers[..., :2].astype(">i8").tobytes(), not numbers[..., 2].any()

        return ended

    def _slots(
        self, rows: torch.Tensor, runs: Sequence[BlockRun], first_token: int
    ) -> torch.Tensor:
        """Return the place of each token in the first head of a layer's part, in words; -1 without
        a block."""
        slots = np.full(rows.shape[2], -1, np.int64)
        for run in runs:
            within = np.arange(run.first_slot, run.first_slot + run.num_slots) * self._token
            places = np.asarray(run.blocks, np.int64)[:, None] * self._block + within
            slots[run.start - first_token : run.stop - first_token] = places.ravel()
        if len(slots) > len(self._slots_there):
            self._slots_there = torch.empty(len(slots), dtype=torch.int64, device=self._device)
        return upload(torch.from_numpy(slots), self._device, self._slots_there[: len(slots)])

    def _copy(self, rows: torch.Tensor, layer: int, slots: torch.Tensor, *, to_rows: bool) -> None:
        num_layers, num_heads, num_tokens, _ = rows.shape
        words = rows.view(-1).view(torch.int64)
        row_words = words.numel() // (num_layers * num_heads)
        grid = (num_layers * num_heads, triton.cdiv(row_words, _COPY_WORDS))
        _copy_kernel[grid](
            words, slots, self._bases[layer:], row_words, row_words // num_tokens,
            self._part_words, self._head, num_heads,
            parts=self._num_parts, tile=_COPY_WORDS, to_rows=to_rows,
        )  # fmt: skip
