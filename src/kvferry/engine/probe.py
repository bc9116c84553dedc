"""Looks at a model's attention, to refuse at load what the engine would serve wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from kvferry.engine.kv_codec import KVCodec
from kvferry.engine.model_config import ModelGeometry
from kvferry.engine.scores import Scores, attention
from kvferry.errors import ConfigError

_HARMLESS_ARGUMENTS = frozenset(
    {"dropout", "position_ids", "cache_position", "use_cache", "is_causal", "logits_to_keep"}
)
"""What layers pass to attention that changes nothing here: inference, no Transformers cache."""


class Probe:
    """An attention context that looks, and attends among the tokens it gets, causally."""

    def __init__(self, codec: KVCodec) -> None:
        self._codec = codec
        self._layers: list[int] = []
        self._windows: dict[int, int | None] = {}
        self._shapes: set[tuple[int, int, bool]] = set()
        self._unknown: set[str] = set()

    def attend(
        self,
        layer_index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scores: Scores,
        window: int | None,
        rest: dict[str, object],
    ) -> torch.Tensor:
        """See `AttentionContext.attend`."""
        self._layers.append(layer_index)
        self._windows[layer_index] = window
        rows = self._codec.encode(layer_index, key, value)
        decoded = self._codec.decode(layer_index, rows, query.shape[-1])
        same = all(torch.equal(*pair) for pair in zip((key, value), decoded, strict=True))
        self._shapes.add((rows.shape[1], rows.shape[3], same))
        if rest["is_causal"] is False:
            self._unknown.add("keys behind the query (is_causal=False)")
        self._unknown |= {
            name
            for name, argument in rest.items()
            if argument is not None and argument is not False and name not in _HARMLESS_ARGUMENTS
        }
        return attention(query, key, value, scores, is_causal=True).transpose(1, 2)

    def check(self, geometry: ModelGeometry, model_dir: Path) -> None:
        """Refuse what was seen if it is not plain attention of the expected shape."""
        if self._unknown:
            raise ConfigError(
                f"{model_dir}: its attention uses {', '.join(sorted(self._unknown))}, "
                "which the engine does not implement"
            )
        if sorted(self._layers) != list(range(geometry.num_layers)):
            raise ConfigError(
                f"{model_dir}: attention ran in layers {self._layers}; the config says there are "
                f"{geometry.num_layers}, each with its own KV"
            )
        windows = tuple(self._windows[index] for index in range(geometry.num_layers))
        if windows != geometry.windows:
            raise ConfigError(
                f"{model_dir}: its layers attend to windows of {_kinds(windows)} tokens, by the "
                f"config of {_kinds(geometry.windows)}; give layer_types and sliding_window there"
            )
        expected = (geometry.num_kv_heads, geometry.content_size, True)
        if self._shapes != {expected}:
            raise ConfigError(
                f"{model_dir}: kv heads and what is kept of each token are "
                f"{sorted(shape[:2] for shape in self._shapes)}; the engine pages one shape for "
                f"all layers, {expected[:2]} by the config"
            )


def _kinds(windows: Sequence[int | None]) -> str:
    return ", ".join("all" if window is None else str(window) for window in dict.fromkeys(windows))
