"""The part `rounding` of the benchmark `device`: how far honest KV differs, beside the limits of
audits. A random model computes a prompt at once. Then it computes each chunk again, on top of the
stored KV before it, as a reader that audits a hit does: the batch has another shape, so the device
takes other kernels and tiles.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from benchmarks import Options
from benchmarks.host import CHUNK_TOKENS
from benchmarks.report import Row
from kvferry.blocks.audit import largest_difference
from kvferry.blocks.tolerance import tolerances_for

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGEST_FP8 = 448.0


class Sizes(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    tokens: int
    experts: int = 32
    used_experts: int = 4


QUICK = Sizes(2, 64, 4, 2, 16, 96, 2 * CHUNK_TOKENS, experts=4, used_experts=2)
FULL = Sizes(40, 2048, 16, 4, 128, 4096, 2048)

KINDS: Mapping[str, Mapping[str, object]] = {
    "bf16": {},
    "fp8": {"quantization_config": {"quant_method": "fp8"}},
    "experts": {"num_experts": 32},
    "fp8 experts": {"num_experts": 32, "quantization_config": {"quant_method": "fp8"}},
}
"""The kinds of models, and what their configurations say."""

ATTENTION: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "as chosen": nullcontext,
    "math": lambda: sdpa_kernel(SDPBackend.MATH),
}

Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def fp8_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Round tokens and rows of the weights to float8, each with its own scale, and multiply."""
    a, scale_a = _as_fp8(x)
    b, scale_b = _as_fp8(weight)
    if DEVICE == "cuda":
        return torch._scaled_mm(
            a, b.T, scale_a=scale_a, scale_b=scale_b.T, out_dtype=torch.bfloat16
        )
    return linear(a.float() * scale_a, b.float() * scale_b).bfloat16()


def _as_fp8(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = numbers.float().abs().amax(-1, keepdim=True).clamp_min(1e-9) / LARGEST_FP8
    return (numbers.float() / scale).to(torch.float8_e4m3fn), scale


class RandomModel:
    """A decoder without an embedding: its input is random. Its weights are scaled so that rounding
    adds up from layer to layer as in a trained model."""

    def __init__(self, sizes: Sizes, *, is_fp8: bool, has_experts: bool, seed: int) -> None:
        self.sizes = sizes
        self._linear: Linear = fp8_linear if is_fp8 else linear
        self._router = has_experts
        self._source = torch.Generator(DEVICE).manual_seed(seed)
        copies = sizes.experts if has_experts else 1
        inner = sizes.inner // (8 if has_experts else 1)
        width = sizes.heads * sizes.head_dim
        self._layers = [
            {
                "qkv": self._random(width + 2 * sizes.kv_heads * sizes.head_dim, sizes.hidden),
                "out": self._random(sizes.hidden, width),
                "route": self._random(sizes.experts, sizes.hidden),
                **{f"up{i}": self._random(2 * inner, sizes.hidden) for i in range(copies)},
                **{f"down{i}": self._random(sizes.hidden, inner) for i in range(copies)},
            }
            for _ in range(sizes.layers)
        ]
        self.inputs = self._random(sizes.tokens, sizes.hidden) * math.sqrt(sizes.hidden)

    def _random(self, rows: int, columns: int) -> torch.Tensor:
        numbers = torch.randn((rows, columns), generator=self._source, device=DEVICE)
        return (numbers / math.sqrt(columns)).bfloat16()

    @torch.inference_mode()
    def compute(self, start: int, stop: int, stored: torch.Tensor | None) -> torch.Tensor:
        """Return the KV of tokens `[start, stop)`, `[layers, heads, tokens, 2 x head_dim]`, on top
        of what is stored of those before."""
        x, found = self.inputs[start:stop], []
        for at, weights in enumerate(self._layers):
            qkv = self._linear(_norm(x), weights["qkv"])
            heads = qkv.view(stop - start, -1, self.sizes.head_dim).transpose(0, 1)
            q, k, v = heads.split((self.sizes.heads, *[self.sizes.kv_heads] * 2))
            found.append(torch.cat((k, v), -1))
            if stored is not None:
                before = stored[at, :, :start].chunk(2, -1)
                k, v = (torch.cat(pair, 1) for pair in zip(before, (k, v), strict=True))
            x = x + self._linear(self._attend(q, k, v), weights["out"])
            x = x + self._feed_forward(_norm(x), weights)
        return torch.stack(found)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shared = self.sizes.heads // self.sizes.kv_heads
        k, v = (each.repeat_interleave(shared, 0) for each in (k, v))
        num, total = q.shape[1], k.shape[1]
        mask = None
        if num < total:
            places = torch.arange(total, device=q.device)
            mask = places[None] <= places[total - num :, None]
        found = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, is_causal=mask is None
        )
        return found[0].transpose(0, 1).reshape(num, -1)

    def _feed_forward(self, x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not self._router:
            return self._expert(x, weights, 0)
        share, chosen = linear(x, weights["route"]).softmax(-1).topk(self.sizes.used_experts)
        result = torch.zeros_like(x)
        for expert in range(self.sizes.experts):
            tokens, rank = (chosen == expert).nonzero(as_tuple=True)
            if len(tokens):
                out = self._expert(x[tokens], weights, expert) * share[tokens, rank, None]
                result.index_add_(0, tokens, out)
        return result

    def _expert(
        self, x: torch.Tensor, weights: Mapping[str, torch.Tensor], index: int
    ) -> torch.Tensor:
        gate, up = self._linear(x, weights[f"up{index}"]).chunk(2, -1)
        return self._linear(silu(gate) * up, weights[f"down{index}"])


def _norm(x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, x.shape[-1:])


def rounding(options: Options) -> Sequence[Row]:
    """Return a row per kind of model and attention kernel: the largest difference of any chunk in
    parts of an audit's limit (above 1 the audit would call it wrong), its error and its bias."""
    sizes = QUICK if options.quick else FULL
    rows: list[Row] = []
    for kind, config in KINDS.items():
        model = RandomModel(
            sizes,
            is_fp8="quantization_config" in config,
            has_experts="num_experts" in config,
            seed=options.seed,
        )
        stored = model.compute(0, sizes.tokens, None)
        for name, kernels in ATTENTION.items():
            with kernels():
                rows.append(_compared(f"{kind}, {name}", model, stored, config))
    return rows


def _compared(
    case: str, model: RandomModel, stored: torch.Tensor, config: Mapping[str, object]
) -> Row:
    tolerances = tolerances_for(config)
    depths = [range(model.sizes.layers)]
    found = []
    for start in range(CHUNK_TOKENS, model.sizes.tokens, CHUNK_TOKENS):
        stop = start + CHUNK_TOKENS
        computed = model.compute(start, stop, stored).cpu()
        theirs = stored[:, :, start:stop].cpu()
        found.append(largest_difference([computed], [theirs], tolerances, depths))
    worst = max(found, key=lambda each: each.excess)
    return {
        "case": case,
        "of_limit": worst.excess,
        "error": worst.error,
        "bias": worst.bias,
        "chunks": len(found),
        "failed": sum(each.excess > 1 for each in found),
    }
