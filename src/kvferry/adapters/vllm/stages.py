"""The layers of all pipeline stages, as one list that is the same on every rank.

vLLM shows a worker the layers of its own stage, and its scheduler those of the first stage. A
record holds those of the whole model, so ranks that differ by their stage alone tell each other
what they keep, once, when each constructs its connector. The scheduler's half learns it in the
handshake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import msgspec

from kvferry.adapters.vllm.layer_kv import TIER
from kvferry.adapters.vllm.layers import (
    Layer,
    is_recurrent,
    layers_of,
    refuse_parallel,
    specs_of,
    stages_of,
)
from kvferry.errors import ConfigError


class _Stage(msgspec.Struct, frozen=True):
    """What a rank says of its stage: its layers, or why these cannot be served."""

    layers: tuple[Layer, ...] = ()
    refusal: str = ""


_STOPPED = _Stage(refusal="it stopped before it knew its layers")


Exchange = Callable[[bytes], Sequence[bytes]]
"""Sends what this rank says, and returns what each stage says, by stage."""


def find_layers(
    vllm_config: Any,  # noqa: ANN401 - the host's
    kv_cache_config: Any,  # noqa: ANN401
    platform: str,
    exchange: Exchange | None,
    *,
    is_worker: bool,
) -> list[Layer] | None:
    """Return the layers of the model, for a scheduler with stages those of the first one; None if
    the host does not say.

    Raises:
        ConfigError: a split or a layer that is not served. With stages, all workers raise.
    """
    parallel = vllm_config.parallel_config
    num_stages = stages_of(parallel)

    def describe() -> list[Layer]:
        refuse_parallel(parallel)
        if num_stages > 1:
            _refuse_states(kv_cache_config)
        return layers_of(vllm_config, kv_cache_config, platform)

    if num_stages == 1 and kv_cache_config is None:
        refuse_parallel(parallel)
        return None
    if num_stages == 1:
        return describe()
    if exchange is None:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages} is not served with this vLLM, which tells "
            "connectors of the first stage only; use 0.24 or later, or set it to 1"
        )
    return layers_of_all_stages(describe, exchange) if is_worker else describe()


def _refuse_states(kv_cache_config: Any) -> None:  # noqa: ANN401 - the host's
    """Raise ConfigError if this stage has a recurrent layer: what is exchanged here is of KV."""
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in specs_of(group):
            if is_recurrent(spec):
                raise ConfigError(
                    f"layer {name} keeps a recurrent state, which kvferry's connector does not "
                    f"store in pipeline stages; set pipeline_parallel_size to 1, or {TIER}"
                )


def layers_of_all_stages(
    describe: Callable[[], Sequence[Layer]], exchange: Exchange
) -> list[Layer]:
    """Return the layers of all stages. Whatever one rank does not serve or cannot describe, all
    refuse: none waits for a rank that has raised.

    Args:
        describe: returns the layers of this stage, or raises.

    Raises:
        ConfigError: a stage is not served, or stages contradict each other.
    """
    mine = _STOPPED
    try:
        mine = _Stage(layers=tuple(describe()))
    except ConfigError as error:
        mine = _Stage(refusal=str(error))
    finally:
        said = exchange(msgspec.msgpack.encode(mine))
    stages = [msgspec.msgpack.decode(each, type=_Stage) for each in said]
    for number, stage in enumerate(stages):
        if stage.refusal:
            raise ConfigError(f"pipeline stage {number}: {stage.refusal}")
    layers = [
        replace(layer, stage=number)
        for number, stage in enumerate(stages)
        for layer in stage.layers
    ]
    _check_order(layers)
    return layers


def _check_order(layers: Sequence[Layer]) -> None:
    """Raise ConfigError unless each layer is in one stage, and the stages follow each other as
    layers do. Else layers would change places: a name may have no number that says its own."""
    first = {layer.name: layer for layer in reversed(layers)}
    for layer in layers:
        if first[layer.name] is not layer:
            raise ConfigError(
                f"pipeline stages {first[layer.name].stage} and {layer.stage} both hold layer "
                f"{layer.name}; serve this model without kvferry"
            )
    ordered = sorted(layers, key=lambda layer: (layer.number, layer.name))
    for before, after in pairwise(ordered):
        if before.stage > after.stage:
            raise ConfigError(
                f"layer {before.name} is in pipeline stage {before.stage}, and {after.name}, which "
                f"follows it, in {after.stage}; serve this model without kvferry"
            )
