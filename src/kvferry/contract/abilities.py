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


IDLE_WAIT_SECONDS = 0.01
"""How long a worker may wait in a step without tokens. Hosts pause for about a millisecond after
such a step and ask again, and each time take the interpreter's lock from the threads that bring
what is waited for. A request that arrives meanwhile waits no longer than this: a decode step."""


@runtime_checkable
class SupportsWait(Protocol):
    """A worker with work in the background that requests wait for."""

    def wait(self, seconds: float) -> None:
        """Return when `collect` has something to report that a request waits for, when nothing of
        the kind is under way, or after `seconds`.

        Called, if at all, in a step without tokens, just before `collect`. Runs in: worker.
        """


@runtime_checkable
class SupportsHandshake(Protocol):
    """A worker whose peers must know something of it before the first transfer."""

    def handshake_metadata(self) -> object:
        """Picklable value for the scheduler role, or None. Called once, after registration."""
