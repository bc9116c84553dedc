"""Any cache of a Transformers model as a tree of leaves, learnt by running the model.

A leaf is a tensor or a plain value somewhere inside the cache object, named by its path. Each has a
law, which probes find:

    rows        grows along one axis by as many rows for every chunk of tokens; rows that are there
                stay. Keys and values of attention, latents, keys of indexers.
    state       everything else that depends on tokens: recurrent states, windows, buffers. Stored
                whole, as it is after some chunk.
    count       a number that grows by the same step for every chunk.
    constant    equal after every chunk and for all prompts.

Nothing here knows a family of models. `learning.learn` makes the tree of one model;
`proof.prove` shows that a cache restored by it computes what the cache in memory computes.
"""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.cache_laws import (
    Count,
    Laws,
    Rows,
    State,
    canonical,
    is_all,
    natural,
)
from kvferry.adapters.transformers.cache_leaves import (
    Path,
    Slot,
    described,
    kinds,
    name_of,
    slots,
)
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue

TREE_VERSION = 1
"""Of the laws and of the layout of records and states; part of every namespace of a tree."""

_FEWEST_SNAPSHOT_TOKENS, _MOST_SNAPSHOT_TOKENS = 256, 4096
"""Shorter pieces of a prompt would be computed slowly; longer ones lose much at a branch."""

_ALIGNED_TOKENS = 64
"""Recurrent layers compute blocks of so many tokens: pieces of other sizes round otherwise."""


class Part(NamedTuple):
    """Some rows of a batch, in a cache of their own: without padding, and all of one length."""

    cache: Any
    places: Sequence[int]
    """Of its rows in the batch."""
    num_padding: int
    """Tokens in front of each row in the batch."""


class CacheTree:
    """The laws of the leaves of one model's cache, for chunks of one size.

    Args:
        template: a cache of one chunk.
        seen: its leaves then, and after more chunks.

    Attributes:
        chunk_tokens: tokens of a chunk.
        kinds: classes of the objects that the cache consists of.
        rows, states, counts: the laws. All other leaves are constants.
        components: one for all leaves of rows of one shape and dtype.
        state_bytes: most bytes that the states of a prompt took, with their shapes.
        not_of_batches: the first leaf that depends on tokens and has no rows of a batch; None: all
            have, so that several prompts may be in one cache.
        not_padded: the first leaf with one row for several tokens, which no padding can be put
            before; None: there is none.
    """

    def __init__(
        self, chunk_tokens: int, template: Any, seen: Sequence[Mapping[Path, Any]], laws: Laws
    ) -> None:
        self.chunk_tokens = chunk_tokens
        self.kinds = kinds(template)
        self._template = template
        self._first = seen[0]
        self.rows, self.states, self.counts, self.components, self._aliases = laws
        self.state_bytes = max(map(self._num_bytes, seen)) if self.states else 0

    def _num_bytes(self, leaves: Mapping[Path, Any]) -> int:
        return len(self._state_of(leaves))

    @property
    def _laws(self) -> list[Rows | State]:
        return [*self.rows, *self.states]

    @property
    def not_of_batches(self) -> str | None:
        return next((name_of(law.path) for law in self._laws if law.batch is None), None)

    @property
    def not_padded(self) -> str | None:
        sizes = ((law.path, law.size) for law in self.rows)
        return next((name_of(path) for path, size in sizes if size != self.chunk_tokens), None)

    @property
    def stops_at_chunks(self) -> bool:
        """Whether what is stored must be taken at the end of a chunk: states, and rows of several
        tokens."""
        return bool(self.states) or any(law.size != self.chunk_tokens for law in self.rows)

    @property
    def snapshot_tokens(self) -> int:
        """Tokens between two stored states: their rows take at least the bytes of a state, but
        within bounds. A multiple of the chunk."""
        unit = math.lcm(self.chunk_tokens, _ALIGNED_TOKENS)
        row_bytes = sum(each.num_bytes for each in self.components) / self.chunk_tokens
        wanted = min(max(self.state_bytes / row_bytes, _FEWEST_SNAPSHOT_TOKENS), 4096)
        up, down = math.ceil(wanted / unit) * unit, _MOST_SNAPSHOT_TOKENS // unit * unit
        return max(min(up, down), unit)

    def describe(self) -> dict[str, JsonValue]:
        """Describe the laws for a namespace: each reader of its records has the same."""
        return {
            "version": TREE_VERSION,
            "rows": [
                [name_of(each.path), each.axis, each.size, each.component, each.layer]
                for each in self.rows
            ],
            "states": [[name_of(each.path), each.dtype, len(each.sizes)] for each in self.states],
            "counts": [[name_of(each.path), each.first, each.step] for each in self.counts],
        }

    # ---- the law, checked on every save

    def broken(self, cache: Any, num_tokens: int) -> str | None:
        """Return which leaf of a cache of `num_tokens` does not obey its law, and how; None if all
        do."""
        found, size = slots(cache), self.chunk_tokens
        for law in self.rows:
            value = found[law.path].value if law.path in found else None
            expected = list(self._first[law.path].shape)
            expected[law.axis] = num_tokens * law.size // size
            is_exact = law.size == size or num_tokens % size == 0
            if not isinstance(value, torch.Tensor) or value.dtype != self._first[law.path].dtype:
                return f"{name_of(law.path)} is {described(value)}"
            shape = list(value.shape)
            for axis in (law.batch, None if is_exact else law.axis):
                if axis is not None and len(shape) == len(expected):
                    shape[axis] = expected[axis]
            if shape != expected:
                return f"{name_of(law.path)} is {described(value)}, expected {expected}"
        for state in self.states:
            value = found[state.path].value if state.path in found else None
            if (
                not isinstance(value, torch.Tensor)
                or str(value.dtype) != f"torch.{state.dtype}"
                or value.dim() != len(state.sizes)
                or (num_tokens % size == 0 and not state.may_be(_of_one(value, state.batch)))
            ):
                return f"{name_of(state.path)} is {described(value)}"
            if value.is_floating_point() and not bool(value.isfinite().all()):
                return f"{name_of(state.path)} has NaN or Inf"
        for count in self.counts if num_tokens % size == 0 else ():
            value = found[count.path].value if count.path in found else None
            if value is None or not is_all(value, self._count(count, num_tokens)):
                return f"{name_of(count.path)} is {described(value)}"
        return None

    def witness(self, cache: Any, num_tokens: int) -> list[torch.Tensor]:
        """Copy the rows of the first and the last whole chunk, which must stay as they are."""
        return [each.clone() for each in self._witnessed(slots(cache), num_tokens)]

    def changed(
        self, cache: Any, num_tokens: int, witness: list[torch.Tensor], num_copies: int = 1
    ) -> str | None:
        """Return which leaf has other rows than a witness taken after `num_tokens`; None if none
        has. The cache may have `num_copies` of each row of the batch since."""
        laws = [law for law in self.rows for _ in range(2)]
        now = self._witnessed(slots(cache), num_tokens)
        for law, before, value in zip(laws, witness, now, strict=True):
            each = value
            if num_copies > 1 and law.batch is not None:
                places = torch.arange(0, each.shape[law.batch], num_copies, device=each.device)
                each = each.index_select(law.batch, places)
            if not torch.equal(each, before):
                return f"rows in {name_of(law.path)} change when tokens follow"
        return None

    def _witnessed(self, found: Mapping[Path, Slot], num_tokens: int) -> Iterator[torch.Tensor]:
        last = num_tokens // self.chunk_tokens - 1
        for law in self.rows:
            for chunk in (0, last):
                yield found[law.path].value.narrow(law.axis, chunk * law.size, law.size)

    # ---- from a cache

    def fill(self, into: Sequence[torch.Tensor], cache: Any, row: int, first_token: int) -> None:
        """Copy one chunk of one row of a batch into tensors `[layers, heads, rows, content]`, one
        for each component."""
        found = slots(cache)
        for law in self.rows:
            if law.component is None:
                continue
            start = first_token * law.size // self.chunk_tokens
            value = found[law.path].value.detach().narrow(law.axis, start, law.size)
            form = canonical(value, law.axis, law.batch)[row]
            target = into[law.component][law.layer]
            target.copy_(form.view(torch.uint8) if target.dtype != form.dtype else form)

    def state(self, cache: Any, row: int = 0) -> bytes:
        """Return the states of one row of a batch as bytes: a size, the shapes as JSON, the
        tensors."""
        found = slots(cache)
        return self._state_of(
            {law.path: _row_of(found[law.path].value, law.batch, row) for law in self.states}
        )

    def _state_of(self, leaves: Mapping[Path, Any]) -> bytes:
        tensors = [leaves[law.path].detach().cpu().contiguous() for law in self.states]
        head = json.dumps([list(each.shape) for each in tensors]).encode()
        body = (each.reshape(-1).view(torch.uint8).numpy().tobytes() for each in tensors)
        return b"".join((len(head).to_bytes(4, "little"), head, *body))

    # ---- into a cache

    def restore(
        self,
        chunks: Sequence[tuple[int, Sequence[Sequence[torch.Tensor]]]],
        num_tokens: int,
        states: Sequence[bytes] = (),
    ) -> Any:
        """Make a cache of `num_tokens`.

        Args:
            chunks: for each row of a batch, the tokens of padding in front, and the tensors of its
                chunks as `fill` makes them. The last chunk may go past the end.
            states: of each row, as `state` made it after these tokens.

        Raises:
            ValueError: a state that is none of this tree.
        """
        cache = copy.deepcopy(self._template)
        found = slots(cache)
        for law in self.rows:
            found[law.path].put(self._rows(law, chunks, num_tokens))
        if self.states and len(states) != len(chunks):
            raise ValueError("a row has no state")
        parts = map(self.tensors_of, states if self.states else ())
        for law, *values in zip(self.states, *parts, strict=True) if self.states else ():
            found[law.path].put(values[0] if law.batch is None else torch.cat(values, law.batch))
        self._put_counts(cache, num_tokens)
        return cache

    def stack(self, parts: Sequence[Part], num_tokens: int) -> Any:
        """Make one cache of parts, with `num_tokens` of each row, padding included. Uses up the
        cache of the first.

        Raises:
            ConfigError: states that cannot be together; names the leaf.
        """
        found = [slots(part.cache) for part in parts]
        whole = parts[0].cache
        order = [place for part in parts for place in part.places]
        for law in self._laws:
            values = [each[law.path].value for each in found]
            if isinstance(law, Rows):
                pairs = zip(values, parts, strict=True)
                values = [_padded(value, part.num_padding, law.axis) for value, part in pairs]
            if len(order) > 1 and law.batch is not None:
                if len({_shape_without(each, law.batch) for each in values}) > 1:
                    raise ConfigError(f"leaf {name_of(law.path)} has other sizes in other rows")
                rows = torch.tensor(order, device=values[0].device).argsort()
                values = [torch.cat(values, law.batch).index_select(law.batch, rows)]
            found[0][law.path].put(values[0])
        if any(part.num_padding for part in parts):
            self._put_counts(whole, num_tokens)
        self._put_aliases(whole)
        return whole

    def _put_counts(self, cache: Any, num_tokens: int) -> None:
        found = slots(cache)
        for count in self.counts:
            number = self._count(count, num_tokens)
            old = found[count.path].value
            is_tensor = isinstance(old, torch.Tensor)
            found[count.path].put(torch.full_like(old, number) if is_tensor else number)
        self._put_aliases(cache)

    def _put_aliases(self, cache: Any) -> None:
        found = slots(cache) if self._aliases else {}
        for path, original in self._aliases.items():
            found[path].put(found[original].value)

    def _rows(
        self,
        law: Rows,
        chunks: Sequence[tuple[int, Sequence[Sequence[torch.Tensor]]]],
        num_tokens: int,
    ) -> torch.Tensor:
        first = self._first[law.path]
        num_rows = num_tokens * law.size // self.chunk_tokens
        form = canonical(first, law.axis, law.batch)
        shape = (len(chunks), form.shape[1], num_rows, form.shape[3])
        whole = torch.zeros(shape, dtype=first.dtype)
        for row, (num_padding, tensors) in enumerate(chunks):
            for number, each in enumerate(tensors):
                if law.component is None:
                    break
                start = num_padding + number * law.size
                part = each[law.component][law.layer]
                part = part.view(first.dtype) if part.dtype != first.dtype else part
                whole[row, :, start : start + law.size] = part[:, : num_rows - start]
        return natural(whole, first, law.axis, law.batch).to(first.device)

    def tensors_of(self, state: bytes) -> Iterator[torch.Tensor]:
        """Yield the tensor of each law of `states`.

        Raises:
            ValueError: it is none of this tree.
        """
        size = int.from_bytes(state[:4], "little")
        shapes, at = json.loads(state[4 : 4 + size]), 4 + size
        for law, shape in zip(self.states, shapes, strict=True):
            dtype = getattr(torch, law.dtype)
            is_shape = law.may_be(shape) and all(isinstance(n, int) and n >= 0 for n in shape)
            stop = at + math.prod(shape) * dtype.itemsize if is_shape else -1
            if not at <= stop <= len(state):
                raise ValueError(f"{name_of(law.path)} has the shape {shape}")
            data = bytearray(state[at:stop]) or bytearray(dtype.itemsize)
            values = torch.frombuffer(data, dtype=dtype)[: math.prod(shape)].reshape(shape)
            at = stop
            yield values.to(self._first[law.path].device)

    def accepts(self, state: bytes) -> bool:
        """Whether bytes are a state of this tree."""
        try:
            return len(list(self.tensors_of(state))) == len(self.states)
        except (ValueError, TypeError, AttributeError, RuntimeError):  # the bytes are untrusted
            return False

    def repeat(self, cache: Any, num_copies: int) -> None:
        """Repeat each row of the batch, in every leaf that has rows of a batch."""
        axes = {law.path: law.batch for law in self._laws}
        done: dict[int, torch.Tensor] = {}
        for path, slot in slots(cache).items():
            axis = axes.get(self._aliases.get(path, path))
            if axis is not None:
                copied = done.get(id(slot.value))
                if copied is None:
                    copied = done[id(slot.value)] = slot.value.repeat_interleave(num_copies, axis)
                slot.put(copied)

    def leaves(self, cache: Any) -> dict[Path, torch.Tensor]:
        """Return the rows and states of a cache by path."""
        found = slots(cache)
        return {law.path: found[law.path].value for law in self._laws}

    def leaves_of_row(self, cache: Any, row: int, num_padding: int) -> dict[Path, torch.Tensor]:
        """Return the rows and states of one row of a batch by path, without its padding."""
        leaves = self.leaves(cache)
        found = {law.path: _row_of(leaves[law.path], law.batch, row) for law in self._laws}
        for law in self.rows if num_padding else ():
            value = found[law.path]
            found[law.path] = value.narrow(
                law.axis, num_padding, value.shape[law.axis] - num_padding
            )
        return found

    def counts_in(self, cache: Any) -> list[int]:
        """Return the numbers in a cache that count."""
        found = slots(cache)
        values = (found[count.path].value for count in self.counts)
        return [
            int(each.flatten()[0]) if isinstance(each, torch.Tensor) else each for each in values
        ]

    def _count(self, law: Count, num_tokens: int) -> int:
        return law.first + law.step * (num_tokens - self.chunk_tokens) // self.chunk_tokens


def _row_of(value: torch.Tensor, batch: int | None, row: int) -> torch.Tensor:
    return value if batch is None else value.narrow(batch, row, 1)


def _padded(value: torch.Tensor, num_padding: int, axis: int) -> torch.Tensor:
    """Put zeros before the rows of a leaf."""
    if not num_padding:
        return value
    shape = list(value.shape)
    shape[axis] = num_padding
    return torch.cat((value.new_zeros(shape), value), axis)


def _shape_without(value: torch.Tensor, axis: int) -> tuple[int, ...]:
    return (*value.shape[:axis], *value.shape[axis + 1 :])


def _of_one(value: torch.Tensor, batch: int | None) -> list[int]:
    """Return the shape that a leaf has for one row of a batch."""
    return [1 if axis == batch else size for axis, size in enumerate(value.shape)]
