"""Tiny checkpoints in the formats in which large models are published."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from kvferry.testing.models import make_tiny_model

Tensors = dict[str, torch.Tensor]

_BLOCK = 32


class Format(NamedTuple):
    """How weights are packed, and what config.json says of it."""

    pack: Callable[[str, torch.Tensor], Tensors]
    """Makes the tensors that stand for a weight."""
    config: dict[str, Any]
    stays_packed: bool
    """Whether Transformers on a CPU multiplies packed weights, or unpacks them at load."""
    weights: str = r"_proj\.weight$"
    """Pattern of the weights that are packed."""
    arch: str = "llama"
    overrides: dict[str, int] = {}  # noqa: RUF012 - read only


def _fp8_in_blocks(name: str, weight: torch.Tensor) -> Tensors:
    """As DeepSeek, MiniMax-M2 and MiMo."""
    rows, columns = weight.shape
    blocks = weight.reshape(rows // _BLOCK, _BLOCK, columns // _BLOCK, _BLOCK)
    scale = blocks.abs().amax((1, 3), keepdim=True) / 448
    packed = (blocks / scale).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {name: packed, f"{name}_scale_inv": scale[:, 0, :, 0].contiguous()}


def _mxfp4(name: str, weight: torch.Tensor) -> Tensors:
    """As gpt-oss: any bytes are two numbers of 4 bits each."""
    experts, inner, outer = weight.shape
    generator = torch.Generator().manual_seed(inner)
    shape = (experts, outer, inner // 32, 16)
    blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    return {
        f"{name}_blocks": blocks,
        f"{name}_scales": torch.full(shape[:3], 124, dtype=torch.uint8),  # an eighth
    }


def _int4(name: str, weight: torch.Tensor) -> Tensors:
    """As Kimi: eight numbers in 32 bits, a scale for each group in a row."""
    rows, columns = weight.shape
    groups = weight.reshape(rows, columns // _BLOCK, _BLOCK)
    scale = groups.abs().amax(-1) / 7
    numbers = (groups / scale[..., None]).round().clamp(-8, 7).reshape(rows, columns // 8, 8)
    nibbles = (numbers.to(torch.int64) + 8) << torch.arange(0, 32, 4)
    packed = nibbles.sum(-1)
    return {
        f"{name}_packed": torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor([rows, columns]),
    }


def _fp8_by_row(name: str, weight: torch.Tensor) -> Tensors:
    """As the FP8 checkpoints of compressed-tensors, whose activations have 8 bits, too."""
    scale = weight.abs().amax(-1, keepdim=True) / 448
    return {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}


def _ternary(name: str, weight: torch.Tensor) -> Tensors:
    """As BitNet: four numbers of -1, 0 or 1 in a byte, activations of 8 bits."""
    from transformers.integrations.bitnet import pack_weights

    scale = 1 / weight.abs().mean()
    numbers = (weight * scale).round().clamp(-1, 1)
    return {name: pack_weights(numbers), f"{name}_scale": scale.reshape(1)}


def _compressed(
    form: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {**group, "output_activations": None}},
    }


_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _BLOCK}
_BY_TOKEN = {**_FLOAT8, "strategy": "token", "dynamic": True}

FORMATS = {
    "fp8": Format(
        _fp8_in_blocks,
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
        },
        stays_packed=False,
    ),
    "mxfp4": Format(
        _mxfp4,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        stays_packed=False,
        weights=r"experts\.\w+_proj$",
        arch="gpt_oss",
        overrides={"intermediate_size": 64},
    ),
    "int4": Format(_int4, _compressed("pack-quantized", _INT4, None), stays_packed=True),
    "fp8 by row": Format(
        _fp8_by_row,
        _compressed("float-quantized", {**_FLOAT8, "strategy": "channel"}, _BY_TOKEN),
        stays_packed=True,
    ),
    "bitnet": Format(
        _ternary,
        {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"},
        stays_packed=True,
    ),
}


def write_quantised(place: Path, name: str) -> Path:
    """Write a tiny checkpoint in a format of `FORMATS`."""
    form = FORMATS[name]
    directory = make_tiny_model(place, form.arch, pad_token_id=None, **form.overrides)
    return pack(directory, name)


def pack(directory: Path, name: str, which: Container[str] | None = None) -> Path:
    """Pack weights of a checkpoint: these, or those that the format names."""
    form, tensors = FORMATS[name], {}
    for each, weight in load_file(directory / "model.safetensors").items():
        is_packed = re.search(form.weights, each) if which is None else each in which
        tensors |= form.pack(each, weight) if is_packed else {each: weight}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    change_config(directory, quantization_config=form.config)
    return directory


def change_config(directory: Path, **fields: Any) -> None:
    """Set fields of config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
