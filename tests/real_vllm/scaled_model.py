"""A model class as plug-ins bring it, under the name of an architecture that vLLM has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM


class ScaledLlama(LlamaForCausalLM):  # type: ignore[misc, unused-ignore]
    """Other KV from the same files."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        return super().load_weights(  # type: ignore[no-any-return, unused-ignore]
            (name, tensor * 1.5 if "input_layernorm" in name else tensor)
            for name, tensor in weights
        )
