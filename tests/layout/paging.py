"""KV tensors of any layout for tests, read element by element as a reference for the copies."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from kvferry.layout import spec
from kvferry.layout.ops import PagedKV
from kvferry.types import GroupShard, KVGroup

LAYOUTS = (
    *(name for name in spec.LAYOUTS if "H" in name), *spec.MEMORY_ORDERS, "HND", "NHD",
    "2BNHD:L2BHND", "B2NHD:BL2NHD", "2BNHD:2BLNHD", "B2NHD:B2HLND",
)  # fmt: skip
"""The layouts that can have any number of kv heads; some with an order in memory behind a colon."""

MLA_LAYOUTS = ("BND", "BND:BLND", "HND", "BLHNC")

INT_OF = {"float32": np.int32, "bfloat16": np.int16, "float8_e4m3fn": np.uint8}


@dataclass
class Cache:
    """The KV tensors of one rank in a layout."""

    layout: str
    num_layers: int = 2
    num_heads: int = 3
    block_size: int = 4
    num_blocks: int = 6
    head_dim: int = 2
    dtype: str = "float32"
    window: tuple[int, int] | None = None
    """The range of heads that this rank holds; None for all."""
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.layout, _, order = self.layout.partition(":")
        name = spec.ALIASES.get(self.layout, self.layout)
        axes = self.axes = spec.parse(self.layout).axes
        order = order or (name if "L" in name else "L" + name)
        heads = self.window or (0, self.num_heads)
        is_mla = "H" not in axes
        content = 2 * self.head_dim
        sizes = {
            "L": self.num_layers, "B": self.num_blocks, "H": heads[1] - heads[0],
            "N": self.block_size, "C": content, "2": 2,
            "D": content if is_mla else self.head_dim,
        }  # fmt: skip
        shape = [sizes[axis] for axis in order]
        memory = torch.zeros(shape, dtype=torch.uint8 if "8" in self.dtype else None)
        memory = memory.to(getattr(torch, self.dtype)).to(self.device)
        self.whole = memory.permute(*(order.index(axis) for axis in "L" + axes))
        self.tensors = list(self.whole)
        self.group = KVGroup(
            num_layers=self.num_layers, num_kv_heads=self.num_heads, content_size=content,
            dtype=self.dtype, block_size=self.block_size,
        )  # fmt: skip
        self.shard = GroupShard(layers=(0, self.num_layers), heads=heads)

    def paged(self, **options) -> PagedKV:
        return PagedKV(self.tensors, self.group, self.shard, self.layout, **options)

    @property
    def elements(self) -> np.ndarray:
        """A copy of all elements as integers, `[layer, block, head, slot, content]`, made only from
        the names of the axes."""
        bits = getattr(torch, np.dtype(INT_OF[self.dtype]).name)
        letters = "L" + self.axes
        values = self.whole.cpu().contiguous().view(bits).numpy()
        sizes = dict(zip(letters, values.shape, strict=True))
        result = np.empty(
            (sizes["L"], sizes["B"], sizes.get("H", 1), sizes["N"], 2 * self.head_dim),
            values.dtype,
        )
        for at in product(*map(range, result.shape)):
            index = dict(zip("LBHNC", at, strict=True))
            if "2" in letters:
                index["2"], index["D"] = divmod(index["C"], self.head_dim)
            elif "D" in letters:
                index["D"] = index["C"]
            result[at] = values[tuple(index[axis] for axis in letters)]
        return result

    def fill(self, start: int = 1) -> None:
        """Give each element a different number, as far as its bits allow."""
        count = self.whole.numel()
        bits = getattr(torch, np.dtype(INT_OF[self.dtype]).name)
        numbers = torch.arange(start, start + count).to(bits)
        raw = numbers.view(getattr(torch, self.dtype)).reshape(self.whole.shape)
        self.whole.copy_(raw.to(self.device))


def expected_rows(cache: Cache, block_ids: list[int], start: int, stop: int) -> np.ndarray:
    """Return the KV of tokens `[start, stop)`, `[layers, heads, tokens, content]`."""
    elements = cache.elements
    size = cache.block_size
    first = start // size
    tokens = [elements[:, block_ids[t // size - first], :, t % size] for t in range(start, stop)]
    return np.stack(tokens, axis=2)
