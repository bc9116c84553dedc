"""Models with recurrent states, as their kernels fill a page: by head, tap and channel of the whole
model. What a rank writes follows from the model, not from how kvferry describes its pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from kvferry.layout.states import Arrays

ITEM = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WORDS = {4: torch.int32, 2: torch.int16}


class Place(NamedTuple):
    """Whose page it is, after which tokens, and how a convolution lies in it."""

    layer: int
    seed: int
    tp: int = 1
    rank: int = 0
    dim_first: bool = False


@dataclass(frozen=True, kw_only=True)
class StateModel:
    """The states of one kind of layers.

    Attributes:
        kind: as `components_of` takes it.
        columns: of the convolution: heads of the whole model (those of one rank, if `copied`), and
            the channels of each; x, B and C or Q, K and V in turn. Empty: no convolution.
        copied: names of the columns that every rank has whole.
        heads: of the recurrent state, over all ranks; 0: there is none.
        size: shape of a head's recurrent state.
        taps: of the convolution.
        dtypes: of convolution and state.
    """

    kind: str
    columns: tuple[tuple[int, int], ...] = ()
    copied: tuple[int, ...] = ()
    heads: int = 0
    size: tuple[int, ...] = ()
    taps: int = 3
    dtypes: tuple[str, ...] = ("bfloat16", "float32")

    def arrays(self, tp: int, *, dim_first: bool) -> Arrays:
        shapes: list[tuple[int, ...]] = []
        if self.columns:
            channels = sum(
                width * (heads if at in self.copied else heads // tp)
                for at, (heads, width) in enumerate(self.columns)
            )
            shapes.append((channels, self.taps) if dim_first else (self.taps, channels))
        if self.heads:
            shapes.append((self.heads // tp, *self.size))
        return Arrays(
            shapes=shapes,
            dtypes=self.dtypes[: len(shapes)] if self.columns else self.dtypes[-1:],
            num_ranks=tp,
            dim_first=dim_first,
            shares_groups=bool(self.copied),
        )

    def page_bytes(self, tp: int) -> int:
        arrays = self.arrays(tp, dim_first=False)
        return sum(
            prod(shape) * ITEM[dtype].itemsize
            for shape, dtype in zip(arrays.shapes, arrays.dtypes, strict=True)
        )

    def write(self, page: torch.Tensor, place: Place) -> None:
        """Fill the page of a rank: every element as its place in the whole model says."""
        for view, wanted in self._arrays(page, place):
            view.copy_(wanted)

    def num_wrong(self, page: torch.Tensor, place: Place) -> int:
        """Count the elements of a page that are others."""
        return sum(int((view != wanted).sum()) for view, wanted in self._arrays(page, place))

    def _arrays(
        self, page: torch.Tensor, place: Place
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        layer, seed, tp, rank, dim_first = place
        arrays, offset = self.arrays(tp, dim_first=dim_first), 0
        for number, (shape, dtype) in enumerate(zip(arrays.shapes, arrays.dtypes, strict=True)):
            size = prod(shape) * ITEM[dtype].itemsize
            words = WORDS[ITEM[dtype].itemsize]
            # As vLLM's layers take their arrays out of a page.
            view = page.flatten()[offset : offset + size].view(ITEM[dtype]).view(*shape).view(words)
            is_convolution = bool(self.columns) and number == 0
            of_model = self._conv(tp, rank) if is_convolution else self._state(tp, rank)
            of_model = of_model.t() if is_convolution and dim_first else of_model
            wanted = of_model.reshape(shape) * 31 + layer * 1009 + seed * 7 + number * 127
            yield view, (wanted % 30_011).to(words)
            offset += size

    def _conv(self, tp: int, rank: int) -> torch.Tensor:
        """`[tap, channel]`: the number of each channel in the whole model."""
        channels: list[torch.Tensor] = []
        before = 0
        for at, (heads, width) in enumerate(self.columns):
            of_all = torch.arange(before, before + heads * width)
            share = heads * width // tp
            own = of_all if at in self.copied else of_all[rank * share : (rank + 1) * share]
            channels.append(own)
            before += heads * width
        return torch.cat(channels) + torch.arange(self.taps).view(-1, 1) * before

    def _state(self, tp: int, rank: int) -> torch.Tensor:
        share = self.heads // tp
        content = prod(self.size)
        heads = torch.arange(rank * share, (rank + 1) * share).view(-1, 1)
        return heads * content + torch.arange(content)


MODELS = {
    "Mamba-2": StateModel(
        kind="mamba2", columns=((16, 8), (8, 6), (8, 6)), heads=16, size=(8, 6)
    ),
    "Mamba-2 with one group, copied on each rank (Granite 4)": StateModel(
        kind="mamba2", columns=((16, 8), (1, 6), (1, 6)), copied=(1, 2), heads=16, size=(8, 6)
    ),
    "Mamba-2 in one dtype": StateModel(
        kind="mamba2", columns=((24, 4), (8, 10), (8, 10)), heads=24, size=(4, 10),
        dtypes=("bfloat16", "bfloat16"),
    ),
    "gated delta net (Qwen3-Next)": StateModel(
        kind="gated_delta", columns=((8, 6), (8, 6), (16, 10)), heads=16, size=(10, 6)
    ),
    "Kimi's delta attention": StateModel(
        kind="gated_delta", columns=((8, 6), (8, 6), (8, 6)), heads=8, size=(6, 6)
    ),
    "Mamba-1 (Jamba)": StateModel(
        kind="mamba1", columns=((128, 1),), heads=128, size=(6,), dtypes=("float16", "float16")
    ),
    "short convolution (LFM2)": StateModel(kind="short_conv", columns=((128, 1),), taps=2),
    "linear attention": StateModel(kind="linear", heads=8, size=(6, 6), dtypes=("float32",)),
}  # fmt: skip
