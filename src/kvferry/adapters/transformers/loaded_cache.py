"""The cache that `StoredKV.load` returns. The one module here that needs Transformers to import."""

# ruff: noqa: ANN401 - the signature of `update` is Transformers'.

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from kvferry.errors import ContractError


class LoadedCache(DynamicCache):
    """A `DynamicCache` that keeps all tokens in every layer, and refuses its own prompt again.

    Assisted generation (an assistant model, prompt look-up) computes the whole prompt on top of any
    cache that is not empty when it starts, and answers nonsense.
    """

    def __init__(self, num_prompt_tokens: int) -> None:
        super().__init__()
        self._num_prompt_tokens = num_prompt_tokens
        self._is_filled = False

    def fill(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put in loaded KV; `[1, heads, tokens, size]` each."""
        super().update(keys, values, layer)
        self._is_filled = True

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DynamicCache.update`.

        Raises:
            ContractError: the whole prompt comes again.
        """
        num_new = key_states.shape[-2]
        # Only the first forward can be the prompt's; later ones may bring longer messages.
        if self._is_filled and num_new >= self._num_prompt_tokens:
            raise ContractError(
                f"{num_new} tokens are computed on top of a cache that was loaded for a prompt of "
                f"{self._num_prompt_tokens}: pass generate the same prompt, and no assistant or "
                "prompt look-up, which compute all of it again"
            )
        self._is_filled = False
        result: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return result
