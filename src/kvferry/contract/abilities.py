"""What some connectors can do beyond the two ABCs. Asked once, at construction, by `isinstance`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


@runtime_checkable
class SupportsLayerwise(Protocol):
    """A worker that works around each attention layer. Needs eager or piecewise graphs."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the load of this layer is complete. Runs in: worker, before attention."""

    def save_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object) -> None:
        """Take this layer's new KV. Runs in: worker, after attention."""


@runtime_checkable
class SupportsHandshake(Protocol):
    """A worker whose peers must know something of it before the first transfer."""

    def handshake_metadata(self) -> object:
        """Picklable value for the scheduler role, or None. Called once, after registration."""
