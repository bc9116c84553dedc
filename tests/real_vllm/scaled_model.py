"""A model class as a plug-in of vLLM brings it, under the name of an architecture of vLLM's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.model_executor.models.llama import LlamaForCausalLM


class ScaledLlama(LlamaForCausalLM):  # type: ignore[misc, unused-ignore]
    """A Llama that scales some weights, so that the same files give other KV."""

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        return super().load_weights(  # type: ignore[no-any-return, unused-ignore]
            (name, tensor * 1.5 if "input_layernorm" in name else tensor)
            for name, tensor in weights
        )
