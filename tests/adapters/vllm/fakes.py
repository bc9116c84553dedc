"""Fakes of the objects that vLLM gives the plug-in, as far as it reads them. They need no vLLM."""

from __future__ import annotations

import copy
import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

from kvferry.identity import model_identity
from kvferry.keys import ModelIdentity
from kvferry.v1.running_model import running_model


class HFConfig:
    """A Hugging Face config: attributes and `to_dict`."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = copy.deepcopy(values)
        for name, value in self._values.items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._values)


CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "torch_dtype": "bfloat16",
}


def write_model(path: Path, *, fill: float = 1.0, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file({"w": torch.full((4,), fill)}, path / "model.safetensors")
    return path


def load_config(model: Any, **_: Any) -> HFConfig:
    return HFConfig(json.loads((Path(model) / "config.json").read_text()))


def make_code(module: str, *bases: type, name: str = "LlamaForCausalLM") -> type:
    """Make a model class that looks as if `module` defined it."""
    return type(name, bases, {"__module__": module})


def registry_of(code: type) -> Any:
    """Return a fake of vLLM's registry in which every architecture has the class `code`."""
    return SimpleNamespace(resolve_model_cls=lambda names, model: (code, names[0]))


OWN_CODE = registry_of(make_code("vllm.model_executor.models.llama"))
"""A registry in which vLLM itself defines the class of every architecture."""


def make_config(model: Path, *, kv_role: str = "kv_both", **changes: Any) -> Any:
    """Return a fake VllmConfig. `changes` sets attributes by dotted path, with `__` for the dot."""
    loaded = load_config(model)
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            model_weights="",
            revision=None,
            code_revision=None,
            hf_config_path=None,
            config_format="auto",
            trust_remote_code=False,
            hf_overrides={},
            use_mla=False,
            dtype=torch.float32,
            hf_config=loaded,
            hf_text_config=loaded,
            quantization=None,
            max_model_len=64,
            registry=OWN_CODE,
            using_transformers_backend=lambda: False,
            get_total_num_kv_heads=lambda: 2,
            get_head_size=lambda: 4,
        ),
        cache_config=SimpleNamespace(block_size=4, cache_dtype="auto"),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            world_size=1,
            rank=0,
            distributed_executor_backend=None,
        ),
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVFerryConnector", kv_role=kv_role, kv_connector_extra_config={}
        ),
        load_config=SimpleNamespace(
            load_format="auto", download_dir=None, model_loader_extra_config={}
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        lora_config=None,
        additional_config={},
        kv_events_config=None,
    )
    for name, value in changes.items():
        *path, last = name.split("__")
        target = config
        for part in path:
            target = getattr(target, part)
        setattr(target, last, value)
    return config


def identity_of(
    config: Any, version: str | None = None, reader: Any = load_config, **more: Any
) -> ModelIdentity:
    """Return the identity of the model that a fake VllmConfig describes."""
    return model_identity(running_model(config, reader), version, **more)


class QuantMode(enum.IntEnum):
    """Some of vLLM's modes of quantised KV."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    CUSTOM = 15


@dataclass
class FullAttentionSpec:
    block_size: int = 4
    num_kv_heads: int = 2
    head_size: int = 4
    dtype: torch.dtype = torch.float32
    sliding_window: int | None = None
    page_size_padded: int | None = None
    kv_quant_mode: QuantMode = QuantMode.NONE

    extra_bytes: ClassVar[int] = 0
    """Bytes of a page that are neither keys nor values."""

    @property
    def page_size_bytes(self) -> int:
        content = 2 * self.head_size * self.num_kv_heads * self.block_size
        return content * self.dtype.itemsize + self.extra_bytes


@dataclass
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int | None = 8
    extra_retained_tokens: int = 0


@dataclass
class SlidingWindowMLASpec(SlidingWindowSpec):
    bounded_replay: bool = False


@dataclass
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1

    @property
    def page_size_bytes(self) -> int:
        return self.head_size * self.num_kv_heads * self.block_size * self.dtype.itemsize


@dataclass
class MambaSpec:
    block_size: int = 4
    shapes: tuple[tuple[int, ...], ...] = ((3, 24), (2, 8, 4))
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    mamba_type: str = "MAMBA2"
    mamba_cache_mode: str = "align"


@dataclass
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = 4


@dataclass
class Group:
    layer_names: list[str]
    kv_cache_spec: Any
    enable_kv_transfer: bool = True


@dataclass
class KVCacheConfig:
    kv_cache_groups: list[Group] = field(default_factory=list)


def odd(spec: type, **values: Any) -> Any:
    """Return a spec whose class, of the same name, has other values than its fields say."""
    return type(spec.__name__, (spec,), values)()


def names(*numbers: int) -> list[str]:
    return [f"model.layers.{number}.self_attn.attn" for number in numbers]
