"""Models that round otherwise, for tests of audits: with quantised activations, and with kernels
that sum in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from kvferry.blocks.audit import Difference, largest_difference
from kvferry.blocks.tolerance import Tolerances, tolerances_for
from kvferry.engine.model import cache_argument, quiet_transformers
from kvferry.testing.models import make_tiny_model, write_random_model

CHUNK = 128

EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 32}

# ---- quantised activations


def fp8(numbers: torch.Tensor) -> torch.Tensor:
    """Round each token's numbers to float8_e4m3, with one scale for the token."""
    scale = numbers.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 448
    return (numbers / scale).to(torch.float8_e4m3fn).float() * scale


def int8(numbers: torch.Tensor) -> torch.Tensor:
    scale = numbers.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
    return (numbers / scale).round() * scale


def mxfp8(numbers: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3, with a power of two for each 32 numbers of a token."""
    parts = numbers.unflatten(-1, (-1, 32))
    scale = torch.exp2(parts.abs().amax(-1, keepdim=True).clamp_min(1e-9).log2().floor() - 8)
    return ((parts / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


QUANTIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fp8": fp8,
    "int8": int8,
    "mxfp8": mxfp8,
}

# ---- kernels


@contextmanager
def kernels(
    quantize: Callable[[torch.Tensor], torch.Tensor] | None,
    *,
    num_sums: int = 1,
    num_ranks: int = 1,
    exact_attention: bool = False,
) -> Iterator[None]:
    """Let linear layers and attention of this process compute in other kernels.

    Args:
        quantize: rounds the activations and weights of linear layers, but for those of routers.
        num_sums: number of parts in which float32 sums are made, as with other tiles.
        num_ranks: number of parts that are rounded before they are added, as by ranks.
        exact_attention: attention computes in float32.
    """
    attention = torch.nn.functional.scaled_dot_product_attention

    def linear(x, weight, bias=None):
        assert bias is None
        dtype = x.dtype
        if quantize is not None and weight.shape[0] != EXPERTS["num_experts"]:
            x, weight = (quantize(each.float()).to(dtype) for each in (x, weight))
        size = -(-x.shape[-1] // (num_sums * num_ranks))
        parts = zip(x.split(size, -1), weight.split(size, -1), strict=True)
        if num_ranks > 1:
            return sum(a @ b.T for a, b in parts)
        return sum(a.float() @ b.float().T for a, b in parts).to(dtype)

    def attend(q, k, v, *args, attn_mask=None, **more):
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
        parts = (each.float() for each in (q, k, v))
        return attention(*parts, *args, attn_mask=attn_mask, **more).to(q.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", linear)
        if exact_attention:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
        yield


OTHER_KERNELS = (
    {"exact_attention": True},
    {"num_sums": 2},
    {"num_ranks": 2},
    {"num_ranks": 4, "exact_attention": True},
)

# ---- models


class RoundingModel:
    """A tiny random model in bfloat16, and what it stored of a prompt.

    Args:
        quantized: a key of `QUANTIZED`; None: activations stay as they are.
        overrides: fields of the config.
    """

    def __init__(
        self,
        path: Path,
        quantized: str | None,
        *,
        experts: bool = False,
        seed: int = 0,
        num_tokens: int = 4 * CHUNK,
        **overrides: object,
    ) -> None:
        sizes = {"pad_token_id": None, **_HEADS, **overrides}
        if experts:
            config = AutoConfig.for_model("qwen3_moe", **{**_SIZES, **EXPERTS, **sizes})
            write_random_model(path, partial(AutoModelForCausalLM.from_config, config), seed)
        else:
            make_tiny_model(path, "llama", seed, **sizes)
        with quiet_transformers():
            self.model = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=torch.bfloat16,
                attn_implementation="sdpa",
                experts_implementation="eager",
            )
        self.model.eval()
        _as_trained(self.model)
        self.config = self.model.config.to_dict()
        if quantized is not None:
            self.config["quantization_config"] = {"quant_method": quantized}
        self._quantize = None if quantized is None else QUANTIZED[quantized]
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, 320, (1, num_tokens), generator=generator)
        with kernels(self._quantize):
            self.stored = self._compute(0, num_tokens)

    @torch.inference_mode()
    def _compute(self, start: int, stop: int) -> torch.Tensor:
        """Compute the KV of some tokens on top of what is stored: `[layers, heads, tokens, 2 *
        size]`."""
        cache = DynamicCache()
        for layer in range(self.model.config.num_hidden_layers if start else 0):
            keys, values = self.stored[layer, None, :, :start].chunk(2, -1)
            cache.update(keys, values, layer)
        given = {cache_argument(self.model.model): cache}
        self.model.model(self.tokens[:, start:stop], use_cache=True, **given)
        pairs = [torch.cat((layer.keys[0], layer.values[0]), -1) for layer in cache.layers]
        return torch.stack(pairs)

    def audit(
        self,
        chunk: int,
        how: dict,
        tolerances: Tolerances | None = None,
        *,
        is_shallow: bool = False,
    ) -> Difference:
        """Compare a stored chunk with what the model computes now, in other kernels.

        Args:
            tolerances: those of the model, if not given.
            is_shallow: compare as if all layers were the first.
        """
        start, stop = chunk * CHUNK, (chunk + 1) * CHUNK
        with kernels(self._quantize, **how):
            computed = self._compute(start, stop)
        stored = self.stored[:, :, start:stop]
        depths = [0] * len(stored) if is_shallow else range(len(stored))
        tolerances = tolerances_for(self.config) if tolerances is None else tolerances
        return largest_difference([computed[:, :, start:]], [stored], tolerances, [depths])


def _as_trained(model) -> None:
    """Scale random weights so that rounding adds up from layer to layer as in SmolLM2-135M, where
    it is 0.03 behind 30 layers. Larger weights let it grow without bounds in deep models."""
    for name, weight in model.named_parameters():
        if "embed" in name:
            weight.data /= weight.data.std()
        elif weight.ndim > 1:
            weight.data *= weight.shape[-1] ** -0.5 / weight.data.std()


_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
_SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96}
