"""KV whose every number is a function of all tokens before it, and the memory that holds it.

A block that was left out, shifted, damaged or taken from another request holds other numbers, so a
check names the token, layer and head where a connector went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import torch

_PRIME = 2_147_483_629
_MODULI = {"float32": 16_777_213, "bfloat16": 251}
"""By dtype: all smaller integers are exact in it."""
_MARKS = {
    -1.0: "memory that nothing was written to",
    -2.0: "nothing, though the connector promised it",
    -3.0: "KV computed from wrong KV",
}
UNWRITTEN, EMPTIED, SPOILED = _MARKS
_MOST_HEADS = 8


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


class Group(NamedTuple):
    """Layers with one block table. `window`: tokens that they see; None: all."""

    layers: tuple[int, ...]
    window: int | None


class Shape(NamedTuple):
    """The KV memory of one rank. `content`: numbers per token and head, K and V together.
    `keys_across`: vLLM's CPU kernels keep the keys of a block transposed, then the values."""

    groups: tuple[Group, ...]
    num_blocks: int
    block_size: int
    num_heads: int
    content: int
    dtype: str
    keys_across: bool

    @property
    def layers(self) -> range:
        return range(sum(len(group.layers) for group in self.groups))


@dataclass
class RequestRow:
    """A request as a model runner knows it.

    Attributes:
        identity: what decides KV besides tokens: model, salt, adapter, embeddings.
        shown: numbers that stand for image content, by token position.
        tables: block ids of each group.
    """

    name: str
    identity: str
    tokens: list[int]
    shown: Mapping[int, int] = field(default_factory=dict)
    tables: tuple[list[int], ...] = ()
    _seeds: list[int] = field(default_factory=list)

    def seeds(self, stop: int) -> list[int]:
        """A number for each of the first `stop` tokens that depends on all tokens up to it."""
        before = blake2b(self.identity.encode(), digest_size=4).digest()
        seed = self._seeds[-1] if self._seeds else int.from_bytes(before, "little")
        for position in range(len(self._seeds), stop):
            shown = 1_009 * self.shown.get(position, 0)
            seed = (seed * 1_000_003 + 7_919 * self.tokens[position] + shown + 1) % _PRIME
            self._seeds.append(seed)
        return self._seeds[:stop]

    def update(self, tokens: Sequence[int]) -> None:
        """Take the tokens that the engine knows now."""
        if list(tokens[: len(self._seeds)]) != self.tokens[: len(self._seeds)]:
            self._seeds.clear()
        self.tokens = list(tokens)

    def next_token(self, position: int) -> int:
        """The token at `position`: known, or else sampled from all before."""
        if position == len(self.tokens):
            self.tokens.append(3 + self.seeds(position)[-1] % 300)
        return self.tokens[position]


class ComputedPart(NamedTuple):
    """The tokens `[start, stop)` of a request, which a step computes."""

    row: RequestRow
    start: int
    stop: int


class Memory:
    """The KV tensors of one rank, `[blocks, heads, tokens, content]` per layer, and a copy of what
    they hold where no connector may write."""

    def __init__(self, shape: Shape, rank: int) -> None:
        self.shape, self.rank = shape, rank
        size = (shape.num_blocks, shape.num_heads, shape.block_size, shape.content)
        self._dtype = getattr(torch, shape.dtype)
        self.tensors = {
            layer_name(i): torch.full(size, UNWRITTEN, dtype=self._dtype) for i in shape.layers
        }
        self._true = {name: tensor.clone() for name, tensor in self.tensors.items()}
        every = (len(shape.layers), _MOST_HEADS, shape.content)
        factors = torch.randint(1, 1 << 30, every, generator=torch.Generator().manual_seed(1))
        self._factors = factors[:, rank * shape.num_heads : (rank + 1) * shape.num_heads]
        tokens, numbers = torch.arange(shape.block_size)[:, None], torch.arange(shape.content)
        self._place = tokens * shape.content + numbers  # in a block and head
        if shape.keys_across:
            half = shape.content // 2
            values = shape.block_size * half + tokens * half + numbers - half
            self._place = torch.where(numbers < half, numbers * shape.block_size + tokens, values)

    def content(self, layer: int, seeds: Sequence[int]) -> torch.Tensor:
        """The right KV of tokens with these seeds, `[tokens, heads, content]`."""
        numbers = torch.tensor(seeds, dtype=torch.int64)[:, None, None] * self._factors[layer]
        return (numbers % _PRIME % _MODULI[self.shape.dtype]).to(self._dtype)

    def _table(self, layer: int, row: RequestRow) -> tuple[list[int], int | None]:
        for group, table in zip(self.shape.groups, row.tables, strict=True):
            if layer in group.layers:
                return table, group.window
        raise IndexError(layer)

    def compute(self, layer: int, part: ComputedPart, *, spoiled: bool) -> None:
        """Write the KV of the part's tokens; if `spoiled`, numbers that no check accepts."""
        where = self._slots(self._table(layer, part.row)[0], part.start, part.stop)
        values = self.content(layer, part.row.seeds(part.stop)[part.start :])
        for tensor in (self.tensors[layer_name(layer)], self._true[layer_name(layer)]):
            tensor.flatten(2)[where] = torch.full_like(values, SPOILED) if spoiled else values

    def attend(self, layer: int, part: ComputedPart, rows: Iterable[RequestRow]) -> list[str]:
        """Read what the part's first token attends to in a layer. Return what is wrong; `rows`
        explain it."""
        table, window = self._table(layer, part.row)
        first = 0 if window is None else max(0, part.start - window + 1)
        where = self._slots(table, first, part.start)
        found = self.tensors[layer_name(layer)].flatten(2)[where]
        right = self.content(layer, part.row.seeds(part.start)[first:])
        bad: list[str] = []
        for at, head in (found != right).any(-1).nonzero().tolist():
            text = f"{part.row.name}, token {first + at}, layer {layer}, head {head}"
            text += f", rank {self.rank}" if self.rank else ""
            what = self._explain(layer, head, found[at, head], rows) if not bad else ""
            bad.append(f"{text}: holds {what}")
        return bad

    def _explain(
        self, layer: int, head: int, found: torch.Tensor, rows: Iterable[RequestRow]
    ) -> str:
        for value, what in _MARKS.items():
            if bool((found == value).all()):
                return what
        for row in rows:
            right = self.content(layer, row.seeds(len(row.tokens)))[:, head]
            same = (right == found).all(-1).nonzero().flatten()
            if len(same):
                return f"the KV of token {int(same[0])} of {row.name}"
        return "no KV of this layer, head and engine"

    def empty(self, blocks: Iterable[int]) -> None:
        """Overwrite blocks: the connector has promised to fill them, or they are others' now."""
        for name, tensor in self.tensors.items():
            tensor[list(blocks)] = self._true[name][list(blocks)] = EMPTIED

    def stray_writes(self, allowed: set[int]) -> set[int]:
        """Blocks that changed since the last call though the connector may not write them."""
        changed: set[int] = set()
        for name, tensor in self.tensors.items():
            differs = (tensor != self._true[name]).flatten(1).any(1)
            changed.update(differs.nonzero().flatten().tolist())
            self._true[name].copy_(tensor)
        return changed - allowed

    def mark(self, blocks: Sequence[int]) -> None:
        """Change the sign of blocks, to see who writes to them until `unmark`."""
        for tensor in self.tensors.values():
            tensor[list(blocks)] *= -1

    def unmark(self, blocks: Sequence[int]) -> list[int]:
        """Change the sign back; return the blocks that were written meanwhile."""
        written: set[int] = set()
        for name, tensor in self.tensors.items():
            differs = (tensor != -self._true[name]).flatten(1).any(1)
            written.update(block for block in blocks if differs[block])
            tensor[list(blocks)] = self._true[name][list(blocks)]
        return sorted(written)

    def _slots(self, table: Sequence[int], start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Indices of the numbers `[tokens, heads, content]` in `[blocks, heads, numbers]`."""
        positions, size = torch.arange(start, stop), self.shape.block_size
        blocks = torch.tensor(table, dtype=torch.int64)[positions // size]
        heads = torch.arange(self.shape.num_heads)
        return blocks[:, None, None], heads[:, None], self._place[positions % size][:, None]
