"""Which model runs: the content of its weights, the configuration in its directory, and how the
running model deviates from that. Engines and commands ask for it when they start."""

from kvferry.identity.directory import identify, length_dependent_rope, written_config
from kvferry.identity.running import ModelFiles, RunningModel, model_identity, read_written
from kvferry.identity.weights import (
    Loads,
    adapter_digest,
    basis_of,
    is_in_snapshot,
    newest_change,
    shows_its_changes,
    weight_files,
    weights_digest,
    weights_state,
)

__all__ = [
    "Loads",
    "ModelFiles",
    "RunningModel",
    "adapter_digest",
    "basis_of",
    "identify",
    "is_in_snapshot",
    "length_dependent_rope",
    "model_identity",
    "newest_change",
    "read_written",
    "shows_its_changes",
    "weight_files",
    "weights_digest",
    "weights_state",
    "written_config",
]
