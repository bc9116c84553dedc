"""Which model runs: the content of its weights, the configuration in its directory, and how the
running model deviates from that. Engines and commands ask for it when they start."""

from kvferry.identity.directory import identify, length_dependent_rope, written_config
from kvferry.identity.weights import adapter_digest, newest_change, weights_digest, weights_state

__all__ = [
    "adapter_digest",
    "identify",
    "length_dependent_rope",
    "newest_change",
    "weights_digest",
    "weights_state",
    "written_config",
]
