"""Which model runs: the content of its weights, the configuration in its directory, and how the
running model deviates from that. Engines and commands ask for it when they start."""

from kvferry.identity.directory import identify, length_dependent_rope, written_config
from kvferry.identity.weights import (
    adapter_digest,
    is_in_snapshot,
    newest_change,
    shows_its_changes,
    weights_digest,
    weights_state,
)

__all__ = [
    "adapter_digest",
    "identify",
    "is_in_snapshot",
    "length_dependent_rope",
    "newest_change",
    "shows_its_changes",
    "weights_digest",
    "weights_state",
    "written_config",
]
