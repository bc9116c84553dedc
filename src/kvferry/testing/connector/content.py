"""Requests, and KV whose every number is a function of all tokens before it.

A block that was left out, shifted, damaged or taken from another request holds other numbers, so a
check names the token, layer and head where a connector went wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvferry.testing.prefixes import extend_seeds
from kvferry.types import ExtraKeys, MultimodalItem

HEADS, HEAD_DIM, LAYERS = 2, 8, 2
LAYER_NAMES = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
_CONTENT = 2 * HEAD_DIM
_PRIME = 2_147_483_629
_MODULI = {"float32": 16_777_213, "bfloat16": 251}
"""By dtype: all smaller integers are exact in it."""
_MARKS = {
    -1.0: "memory that nothing was written to",
    -2.0: "nothing, though the connector promised it",
    -3.0: "KV computed from wrong KV",
}
UNWRITTEN, EMPTIED, SPOILED = _MARKS
STATE = 0
"""The window of a layer that sees no tokens, but a state that follows from all of them: a short
convolution, as LFM2 has it. A block holds the state behind its last token, or behind the last token
of its request."""
STATE_SHAPE = (2, 2 * HEADS * HEAD_DIM)
"""Taps and channels of such a state, on all ranks."""


class Item(NamedTuple):
    """An image of a prompt. Its tokens are all the same placeholder."""

    name: str
    offset: int
    length: int = 8


class LoraAdapter(NamedTuple):
    """A LoRA adapter. `content`: what its files hold."""

    name: str
    number: int
    path: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request. `embeds`, the seed of prompt embeddings, replaces the tokens. `grows`: it is a
    session that takes more tokens when it has answered."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int = 1
    salt: str | None = None
    adapter: LoraAdapter | None = None
    items: tuple[Item, ...] = ()
    embeds: int | None = None
    grows: bool = False


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How an engine runs."""

    directory: str  # of the model
    identity: str  # what decides the model's KV
    block_size: int = 16
    num_blocks: int = 64
    budget: int = 512  # most tokens of a step
    ranks: int = 1
    in_flight: int = 1  # steps that are scheduled before the first one's results are in
    runner: int = 1  # or 2: vLLM's model runners show steps differently
    # Whether hooks are called around layers, even of a class that does not ask for piecewise
    # graphs, and connectors see attention metadata. Replayed graphs have neither.
    hooks: bool = True
    attention_metadata: bool = True
    late_rank: int = 0  # steps by which the last rank's reports of ended transfers come later
    dtype: str = "float32"
    # By layer: tokens that it sees; None: all; `STATE`: it keeps a state instead.
    windows: tuple[int | None, ...] = (None,) * LAYERS

    @property
    def groups(self) -> dict[int | None, list[int]]:
        """The layers of each block table, by their window."""
        windows = dict.fromkeys(self.windows)
        return {w: [i for i in range(LAYERS) if self.windows[i] == w] for w in windows}


class Row:
    """A request as an engine runs it, with a model of this identity."""

    def __init__(self, ask: Ask, identity: str) -> None:
        self.ask = ask
        self.tokens = list(ask.tokens)  # all that the engine knows
        self.said: list[int] = []  # the answer
        self.reason: str | None = None  # why it ended
        self.num_computed = 0  # tokens whose KV is in the blocks
        self.hits: list[int] = []  # tokens that loads brought, by admission; 0 for one that failed
        self.tables: tuple[list[int], ...] = ()  # block ids of each group
        self._identity = identity
        self._extra = ExtraKeys(
            cache_salt=ask.salt,
            lora=ask.adapter and ask.adapter.content,
            items=tuple(
                MultimodalItem(digest=item.name, offset=item.offset, length=item.length)
                for item in ask.items
            ),
            embeds_digest=None if ask.embeds is None else str(ask.embeds).encode(),
        )
        self._seeds: list[int] = []

    @property
    def hit(self) -> int:
        return self.hits[0] if self.hits else 0

    def seeds(self, stop: int) -> list[int]:
        """A number for each of the first `stop` tokens that depends on all tokens up to it."""
        extend_seeds(self._seeds, self.tokens[:stop], self._identity, self._extra)
        return self._seeds[:stop]

    def update(self, tokens: Sequence[int]) -> None:
        """Take the tokens that the engine knows now."""
        known = len(self._seeds)
        if list(tokens[:known]) != self.tokens[:known]:
            self._seeds.clear()
        self.tokens = list(tokens)

    def next_token(self, position: int) -> int:
        """The token at `position`: known, or else sampled from all before."""
        if position == len(self.tokens):
            self.tokens.append(3 + self.seeds(position)[-1] % 300)
        return self.tokens[position]


class Part(NamedTuple):
    """The tokens `[start, stop)` of a request, which a step computes."""

    row: Row
    start: int
    stop: int


class Memory:
    """The KV tensors of one rank, `[blocks, heads, tokens, content]` per layer, and a copy of what
    they hold where no connector may write. Layers with states have blocks of the same size."""

    def __init__(self, setup: Setup, rank: int, *, keys_across: bool) -> None:
        """`keys_across`: keys of a block are transposed, then come the values, as vLLM's CPU
        kernels keep them."""
        self.rank, self._groups, self._size = rank, setup.groups, setup.block_size
        self._heads = heads = HEADS // setup.ranks
        self._dtype, self._modulus = getattr(torch, setup.dtype), _MODULI[setup.dtype]
        shape = (setup.num_blocks, heads, self._size, _CONTENT)
        self.tensors = {
            name: torch.full(shape, UNWRITTEN, dtype=self._dtype) for name in LAYER_NAMES
        }
        self._true = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self._hidden: dict[str, torch.Tensor] = {}
        source = torch.Generator().manual_seed(1)
        factors = torch.randint(1, 1 << 30, (LAYERS, HEADS, _CONTENT), generator=source)
        self._factors = factors[:, rank * heads : (rank + 1) * heads]
        tokens, numbers = torch.arange(self._size)[:, None], torch.arange(_CONTENT)
        taps, channels = STATE_SHAPE
        states = torch.randint(1, 1 << 30, (LAYERS, taps, channels), generator=source)
        share = channels // setup.ranks
        self._state_factors = states[:, :, rank * share : (rank + 1) * share].flatten(1)
        self._place = tokens * _CONTENT + numbers  # in a block and head
        if keys_across:
            values = self._size * HEAD_DIM + tokens * HEAD_DIM + numbers - HEAD_DIM
            self._place = torch.where(numbers < HEAD_DIM, numbers * self._size + tokens, values)

    def shown(self) -> dict[str, torch.Tensor]:
        """The tensors as a connector gets them: states are bytes, as vLLM registers them."""
        recurrent = [LAYER_NAMES[layer] for layer in self._groups.get(STATE, ())]
        pages = {name: self.tensors[name].flatten(1).view(torch.int8) for name in recurrent}
        return {**self.tensors, **{name: page[:, None, None] for name, page in pages.items()}}

    def content(self, layer: int, seeds: Sequence[int]) -> torch.Tensor:
        """The right KV of tokens with these seeds, `[tokens, heads, content]`."""
        numbers = torch.tensor(seeds, dtype=torch.int64)[:, None, None] * self._factors[layer]
        return (numbers % _PRIME % self._modulus).to(self._dtype)

    def state(self, layer: int, seeds: Sequence[int]) -> torch.Tensor:
        """The right states behind tokens with these seeds, `[tokens, numbers]`."""
        numbers = torch.tensor(seeds, dtype=torch.int64)[:, None] * self._state_factors[layer]
        return (numbers % _PRIME % self._modulus).to(self._dtype)

    def carry_states(self, parts: Iterable[Part]) -> None:
        """Copy the states that parts go on from to the blocks that are theirs from now on, as a
        model runner does before loads begin."""
        for row, start, stop in parts:
            for layer in self._groups.get(STATE, ()) if start else ():
                for tensors in (self.tensors, self._true):
                    old = self._state_in(tensors, layer, row, start).clone()
                    self._state_in(tensors, layer, row, stop).copy_(old)

    def compute(self, layer: int, part: Part, *, spoiled: bool) -> None:
        """Write the KV of the part's tokens, or the state behind them; if `spoiled`, numbers that
        no check accepts."""
        row, start, stop = part
        seeds, (window, table) = row.seeds(stop), self._table(layer, row)
        if window == STATE:
            right = self.state(layer, seeds[-1:])[0]
        else:
            right = self.content(layer, seeds[start:])
        written = torch.full_like(right, SPOILED) if spoiled else right
        for tensors in (self.tensors, self._true):
            if window == STATE:
                self._state_in(tensors, layer, row, stop).copy_(written)
            else:
                where = self._slots(table, start, stop)
                tensors[LAYER_NAMES[layer]].flatten(2)[where] = written

    def attend(self, layer: int, part: Part, rows: Iterable[Row]) -> list[str]:
        """Read what the part's first token attends to in a layer. Return what is wrong; `rows`
        explain it."""
        window, table = self._table(layer, part.row)
        if window == STATE:
            return self._recall(layer, part, rows) if part.start else []
        first = 0 if window is None else max(0, part.start - window + 1)
        found = self.tensors[LAYER_NAMES[layer]].flatten(2)[self._slots(table, first, part.start)]
        right = self.content(layer, part.row.seeds(part.start)[first:])
        rank = f", rank {self.rank}" if self.rank else ""
        return [
            f"{part.row.ask.name}, token {first + at}, layer {layer}, head {head}{rank}: holds "
            + self._explain(layer, head, found[at, head], rows)
            for at, head in (found != right).any(-1).nonzero().tolist()
        ]

    def _recall(self, layer: int, part: Part, rows: Iterable[Row]) -> list[str]:
        """Read the state that a part goes on from, in the block that the part will leave its own
        in. Return what is wrong."""
        row, start, stop = part
        right = self.state(layer, row.seeds(start)[-1:])[0]
        found = self._state_in(self.tensors, layer, row, stop)
        if torch.equal(found, right):
            return []
        rank = f", rank {self.rank}" if self.rank else ""
        holds = self._explain(layer, None, found, rows)
        return [f"{row.ask.name}, the state behind token {start - 1}, layer {layer}{rank}: {holds}"]

    def _explain(
        self, layer: int, head: int | None, found: torch.Tensor, rows: Iterable[Row]
    ) -> str:
        """What `found` is; `head` is None for a state."""
        for value, what in _MARKS.items():
            if bool((found == value).all()):
                return what
        for row in rows:
            seeds = row.seeds(len(row.tokens))
            if head is None:
                kind, right = "state behind", self.state(layer, seeds)
            else:
                kind, right = "KV of", self.content(layer, seeds)[:, head]
            same = (right == found).all(-1).nonzero().flatten()
            if len(same):
                return f"the {kind} token {int(same[0])} of {row.ask.name}"
        return "no state of this layer" if head is None else "no KV of this layer, head and engine"

    def empty(self, blocks: Iterable[int]) -> None:
        """Overwrite blocks: the connector has promised to fill them, or they are others' now."""
        for name, tensor in self.tensors.items():
            tensor[list(blocks)] = self._true[name][list(blocks)] = EMPTIED

    def hide(self, blocks: list[int]) -> None:
        """Empty blocks until `show`, to see who writes to them meanwhile."""
        self._hidden = {name: tensor[blocks] for name, tensor in self.tensors.items()}
        self.empty(blocks)

    def show(self, blocks: list[int]) -> None:
        for name, kept in self._hidden.items():
            self.tensors[name][blocks] = self._true[name][blocks] = kept

    def stray_writes(self, allowed: set[int]) -> list[int]:
        """Blocks that changed since the last call though the connector may not write them."""
        changed: set[int] = set()
        for name, tensor in self.tensors.items():
            differs = (tensor != self._true[name]).flatten(1).any(1)
            changed.update(differs.nonzero().flatten().tolist())
            self._true[name].copy_(tensor)
        return sorted(changed - allowed)

    def _table(self, layer: int, row: Row) -> tuple[int | None, list[int]]:
        """The window of a layer, and a request's block table for it."""
        groups = zip(self._groups.items(), row.tables, strict=True)
        return next((window, table) for (window, layers), table in groups if layer in layers)

    def _state_in(
        self, tensors: dict[str, torch.Tensor], layer: int, row: Row, stop: int
    ) -> torch.Tensor:
        """Where the state behind the first `stop` tokens is, once the last of them is computed."""
        block = self._table(layer, row)[1][(stop - 1) // self._size]
        return tensors[LAYER_NAMES[layer]][block].flatten()[: self._state_factors.shape[1]]

    def _slots(self, table: list[int], start: int, stop: int) -> tuple[torch.Tensor, ...]:
        """Indices of the numbers `[tokens, heads, content]` in `[blocks, heads, numbers]`."""
        positions = torch.arange(start, stop)
        blocks = torch.tensor(table, dtype=torch.int64)[positions // self._size]
        heads, places = torch.arange(self._heads), self._place[positions % self._size]
        return blocks[:, None, None], heads[:, None], places[:, None]
