"""What each cache was computed from: notes that hooks take of a model's forwards.

A cache is known as long as only plain forwards of the model touched it. `StoredKV.save` computes an
unknown cache again before it stores it, so every doubt here costs time, and nothing else.

Not seen: edits by `.data`, which leave no trace on a tensor, and changes of the model that are
taken back before the next prompt.
"""

# ruff: noqa: ANN401 - the models and caches of Transformers share no typed surface.

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from kvferry.adapters.transformers.arguments import Prompt
from kvferry.adapters.transformers.host_model import HostModel, Watcher

_CACHE_NAMES = ("cache", "past_key_values")

_PLAIN_ARGUMENTS = {
    *_CACHE_NAMES,
    *("input_ids", "attention_mask", "position_ids", "use_cache", "return_dict", "logits_to_keep"),
    *("labels", "output_attentions", "output_hidden_states", "cache_position"),
}
"""Arguments of a forward that do not change KV, or that `Provenance` looks at."""


class _Forward(NamedTuple):
    """Copies of a forward's arguments, kept on the model's device: reading them waits for it."""

    num_before: int
    """Tokens of each row that were in the cache before the forward."""
    input_ids: torch.Tensor
    """`[rows, tokens]`."""
    position_ids: torch.Tensor | None
    """`[rows or 1, tokens]`."""
    num_visible: torch.Tensor | None
    """`[rows]`: visible tokens, of those in the cache and the new ones; None: all are visible."""
    num_before_each: torch.Tensor | None
    """`[rows]`: the number of visible tokens up to each token, summed over the tokens. With n
    visible tokens it is n(n+1)/2 if all hidden tokens are in front, else more."""

    @property
    def num_after(self) -> int:
        return self.num_before + self.input_ids.shape[1]


class _Row(NamedTuple):
    """What a forward was given for one row."""

    num_before: int
    token_ids: list[int]
    position_ids: list[int]
    num_hidden: int
    """Hidden tokens in front; -1 if tokens elsewhere are hidden."""

    def is_plain(self, num_padding: int) -> bool:
        """Whether exactly `num_padding` tokens in front were hidden, and positions start at 0
        behind them."""
        after = self.num_before + len(self.token_ids)
        if self.num_hidden != min(num_padding, after):
            return False
        first = max(num_padding, self.num_before)
        return self.position_ids[first - self.num_before :] == list(
            range(first - num_padding, after - num_padding)
        )


class _History:
    """What one cache was computed from: loaded prompts, and the forwards that went on from them."""

    def __init__(self, loaded: Sequence[Prompt] = (), num_loaded: int = 0) -> None:
        self._loaded = loaded
        self._num_loaded = num_loaded
        self._forwards: list[_Forward] = []
        self._noted: list[tuple[weakref.ref[torch.Tensor], int]] = []

    @property
    def num_tokens(self) -> int:
        return self._forwards[-1].num_after if self._forwards else self._num_loaded

    def append(self, forward: _Forward) -> None:
        self._forwards.append(forward)

    def note_tensors(self, cache: Any) -> bool:
        """Note the tensors of a cache; False if edits of them would go unnoticed."""
        self._noted = []
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                if not isinstance(tensor, torch.Tensor) or tensor.is_inference():
                    return False
                self._noted.append((weakref.ref(tensor), tensor._version))
        return True

    def is_unchanged(self, cache: Any) -> bool:
        """Whether a cache still has the noted tensors, unedited."""
        tensors = [each for layer in cache.layers for each in (layer.keys, layer.values)]
        return len(tensors) == len(self._noted) and all(
            (one := reference()) is not None and one is tensor and one._version == version
            for tensor, (reference, version) in zip(tensors, self._noted, strict=True)
        )

    def prompts(self) -> list[Prompt | None]:
        """Return each row's padding and the tokens behind it; None for a row that is uncertain."""
        num_rows = len(self._forwards[-1].input_ids) if self._forwards else len(self._loaded)
        read = [_rows_of(forward, num_rows) for forward in self._forwards]
        return [
            self._prompt(row * len(self._loaded) // num_rows, [each[row] for each in read])
            for row in range(num_rows)
        ]

    def _prompt(self, place: int, forwards: list[_Row]) -> Prompt | None:
        loaded = self._loaded[place] if self._loaded else Prompt(0, [])
        padding = forwards[-1].num_hidden if forwards else loaded.num_padding
        if self._num_loaded and padding != loaded.num_padding:
            return None
        if padding < 0 or not all(each.is_plain(padding) for each in forwards):
            return None
        token_ids = loaded.token_ids[: max(0, self._num_loaded - padding)]
        for each in forwards:
            token_ids = token_ids + each.token_ids[max(0, padding - each.num_before) :]
        return Prompt(padding, token_ids)


def _rows_of(forward: _Forward, num_rows: int) -> list[_Row]:
    """Return what a forward was given for each row; if rows were repeated later, all copies share
    it."""
    before, after = forward.num_before, forward.num_after
    ids = forward.input_ids.tolist()
    at = [list(range(before, after))]
    if forward.position_ids is not None:
        at = forward.position_ids.tolist()
    hidden = [0] * len(ids)
    if forward.num_visible is not None and forward.num_before_each is not None:
        counts = zip(forward.num_visible.tolist(), forward.num_before_each.tolist(), strict=True)
        hidden = [after - n if total == n * (n + 1) // 2 else -1 for n, total in counts]
    places = [row * len(ids) // num_rows for row in range(num_rows)]
    return [_Row(before, ids[i], at[i * len(at) // len(ids)], hidden[i]) for i in places]


class Provenance(Watcher):
    """The histories of the caches that a model filled since this object was made.

    Args:
        host: the model whose KV is stored; None: no forward is noted.
    """

    def __init__(self, host: HostModel | None = None) -> None:
        self._host = host
        self._traces: weakref.WeakKeyDictionary[Any, _History] = weakref.WeakKeyDictionary()
        self._names = [] if host is None else host.argument_names
        self._hooks = [] if host is None else host.watch(self._before, self._after)

    def __reduce__(self) -> Any:
        """Copy without the model: a copied model gets hooks that do nothing."""
        return (Provenance, ())

    def loaded(self, cache: Any, prompts: Sequence[Prompt]) -> None:
        """Note that a new cache was filled from the store."""
        trace = _History(prompts, cache.get_seq_length())
        if trace.note_tensors(cache):
            self._traces[cache] = trace

    def prompts_of(self, cache: Any) -> list[Prompt | None]:
        """Return what each row of a cache was computed from, with its padding; None for a row that
        is uncertain. An empty list if nothing is known of the cache."""
        trace = self._traces.get(cache)
        return trace.prompts() if trace is not None and trace.is_unchanged(cache) else []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._traces.clear()

    # ---- hooks

    def _before(self, _model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._host is None or torch.compiler.is_compiling():
            return
        cache = _cache_in(self._arguments(args, kwargs))
        if cache is None:
            return
        trace = self._traces.get(cache)
        if trace is not None and not trace.is_unchanged(cache):
            del self._traces[cache]
            trace = None
        if trace is None and cache.get_seq_length() == 0:
            self._traces[cache] = _History()

    def _after(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self._host is None or torch.compiler.is_compiling():
            return
        arguments = self._arguments(args, kwargs)
        cache = _cache_in(arguments)
        if cache is not None:
            trace = self._traces.pop(cache, None)
        else:  # the model made its own
            cache, trace = _cache_in(output), _History()
        if cache is None or trace is None:
            return
        forward = self._forward_of(model, arguments, trace.num_tokens)
        if forward is None or cache.get_seq_length() != forward.num_after:
            return
        trace.append(forward)
        if trace.note_tensors(cache):
            self._traces[cache] = trace

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def _forward_of(self, model: Any, arguments: dict[str, Any], before: int) -> _Forward | None:
        """Copy the arguments of a forward; None unless it is a plain one of the unchanged model."""
        unknown = (value for name, value in arguments.items() if name not in _PLAIN_ARGUMENTS)
        ids: Any = arguments.get("input_ids")
        mask: Any = arguments.get("attention_mask")
        at: Any = arguments.get("position_ids")
        if any(value is not None for value in unknown) or not _is_matrix(ids, None):
            return None
        num_rows, num_new = ids.shape
        if model.training or torch.is_autocast_enabled(ids.device.type):
            return None
        # Not for each single token of an answer: the check would take too long.
        if (before == 0 or num_new > 1) and not (self._host and self._host.is_unchanged):
            return None
        if at is not None and not (_is_matrix(at, num_new) and len(at) in (1, num_rows)):
            return None
        at = None if at is None else at.clone()
        if mask is None:
            return _Forward(before, ids.clone(), at, None, None)
        if not _is_matrix(mask, before + num_new) or len(mask) != num_rows:
            return None
        shown = mask.bool()
        return _Forward(before, ids.clone(), at, shown.sum(-1), shown.cumsum(-1).sum(-1))


def _cache_in(found: Any) -> Any:
    """Return the cache among the arguments of a forward, or in its output; None without one."""
    for name in _CACHE_NAMES:
        cache = found.get(name) if isinstance(found, dict) else None
        if hasattr(cache, "layers"):
            return cache
    return None


def _is_matrix(given: Any, num_columns: int | None) -> bool:
    return (
        isinstance(given, torch.Tensor)
        and given.ndim == 2
        and not given.is_floating_point()
        and num_columns in (None, given.shape[1])
    )
