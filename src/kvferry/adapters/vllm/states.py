"""What the recurrent layers of vLLM keep, from their specs, by heads of the whole model.

vLLM's prefix cache keeps a state at the end of some blocks ("align"), in a page of its own. This
says which bytes of a page are which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import Any

from kvferry.adapters.vllm.layer_kv import TIER, text_config
from kvferry.adapters.vllm.layers import Layer, is_recurrent, number_of, specs_of
from kvferry.contract.spec import StateSpec
from kvferry.errors import ConfigError, LayoutError
from kvferry.keys import ModelIdentity
from kvferry.layout.states import Arrays, components_of
from kvferry.types import StateComponent, StateKind, TablePart

_KINDS = {
    "MAMBA1": "mamba1",
    "MAMBA2": "mamba2",
    "GDN_ATTN": "gated_delta",  # of Kimi's delta attention, too
    "SHORT_CONV": "short_conv",
    "LINEAR": "linear",
}
"""By vLLM's name of a layer's backend."""

_ANY_BACKEND = 128
"""A multiple of the smallest block of every attention backend of vLLM."""

_GROUPS = re.compile(r"(mamba_|ssm_)?n_?groups")
"""Names that configurations have for the groups of B and C."""


def states_of(
    vllm_config: Any,  # noqa: ANN401 - the host's, as all here
    kv_cache_config: Any,  # noqa: ANN401
    *,
    dim_first: bool,
) -> StateSpec | None:
    """Return the recurrent states of a model, and the block tables in which they stand; None if it
    has none. Kinds are in the order of their first layers.

    Raises:
        ConfigError: as `state_components`, or blocks of several sizes.
    """
    num_ranks = vllm_config.parallel_config.tensor_parallel_size
    config = text_config(vllm_config.model_config)
    found: list[tuple[int, str, int, int, tuple[StateComponent, ...]]] = []
    place = 0
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in specs_of(group):
            number = number_of(name, place)
            place += 1
            if not is_recurrent(spec):
                continue
            components = state_components(
                spec, config, num_ranks, dim_first=dim_first, where=f"layer {name}"
            )
            found.append((number, name, table, int(spec.block_size), components))
    if not found:
        return None
    of_kind: dict[tuple[StateComponent, ...], list[tuple[str, int, int]]] = {}
    for _, name, table, size, components in sorted(found, key=lambda each: each[:2]):
        of_kind.setdefault(components, []).append((name, table, size))
    return StateSpec(
        kinds=tuple(
            StateKind(num_layers=len(layers), components=components)
            for components, layers in of_kind.items()
        ),
        tables=tuple(
            part
            for kind, layers in enumerate(of_kind.values())
            for part in _table_parts(kind, layers)
        ),
    )


def served_states(
    vllm_config: Any,  # noqa: ANN401 - the host's
    kv_cache_config: Any,  # noqa: ANN401
    layers: Sequence[Layer],
    *,
    dim_first: bool,
    hands_off: bool,
) -> StateSpec | None:
    """Return what `states_of` does, for states that the connector serves.

    Args:
        layers: those with KV, of `layers_of`.
        hands_off: whether the host says in which blocks states are.

    Raises:
        ConfigError: as `states_of`, or states of which no prefix could be named or found.
    """
    states = states_of(vllm_config, kv_cache_config, dim_first=dim_first)
    if states is None:
        return None
    why = "" if hands_off else "this vLLM does not say where they are (0.30 and later do)"
    why = why or ("" if layers else "it has no KV beside them, by which a prefix is known")
    if why:
        raise ConfigError(
            f"kvferry's connector does not serve the recurrent states of this model: {why}; {TIER}"
        )
    return states


def identity_with_states(identity: ModelIdentity, platform: str) -> ModelIdentity:
    """Return the identity of a model with recurrent states: engines on other platforms have other
    kernels, which may keep the state of a head in another order. VLLM 0.32's kernels for delta nets
    keep it as `[key, value]` on a CPU, and as `[value, key]` elsewhere, in pages of one form."""
    return replace(identity, config={**identity.config, "states_of": f"vllm on {platform}"})


def state_sizes(vllm_config: Any) -> tuple[int, int]:  # noqa: ANN401 - the host's
    """Return a block size that vLLM takes whatever the number of ranks, up to 8: each needs blocks
    in which the KV of a layer has room for a state. It is a multiple of what any backend asks for.
    And the bytes of a recurrent layer's state, of all ranks.

    Raises:
        ConfigError: this vLLM does not say what the model's states are.
    """
    interface = import_module("vllm.v1.kv_cache_interface")
    registry = import_module("vllm.model_executor.models").ModelRegistry
    dtypes = import_module("vllm.utils.torch_utils").STR_DTYPE_TO_TORCH_DTYPE
    model = vllm_config.model_config
    found: list[int] = []
    layer_bytes = 0
    for num_ranks in (1, 2, 4, 8):
        config = copy(vllm_config)
        config.parallel_config = copy(vllm_config.parallel_config)
        config.parallel_config.tensor_parallel_size = num_ranks
        try:
            made, _ = registry.resolve_model_cls(model.architecture, model_config=model)
            state = interface.MambaSpec(
                block_size=1,
                shapes=tuple(made.get_mamba_state_shape_from_config(config)),
                dtypes=tuple(made.get_mamba_state_dtype_from_config(config)),
            )
            kind = interface.MLAAttentionSpec if model.use_mla else interface.FullAttentionSpec
            token = kind(
                block_size=1,
                num_kv_heads=model.get_num_kv_heads(config.parallel_config),
                head_size=model.get_head_size(),
                dtype=dtypes.get(vllm_config.cache_config.cache_dtype, model.dtype),
            )
        except AssertionError:  # the heads cannot be divided so
            continue
        except (AttributeError, TypeError) as error:
            raise ConfigError(f"this vLLM does not say what its states are: {error}") from error
        found.append(-(-state.page_size_bytes // token.page_size_bytes))
        layer_bytes = layer_bytes or state.page_size_bytes  # of one rank
    return -(-max(found) // _ANY_BACKEND) * _ANY_BACKEND, layer_bytes


def _kind_of(spec: Any) -> str:  # noqa: ANN401 - the host's
    return str(getattr(spec.mamba_type, "name", spec.mamba_type))


def _table_parts(kind: int, layers: Sequence[tuple[str, int, int]]) -> Iterator[TablePart]:
    """Yield the layers of a kind by block table, given the name, the table and the block size of
    each."""
    for table, size in sorted({(table, size) for _, table, size in layers}):
        here = [(at, name) for at, (name, *stands) in enumerate(layers) if stands == [table, size]]
        yield TablePart(
            table=table,
            group=kind,
            layers=tuple(at for at, _ in here),
            layer_names=tuple(name for _, name in here),
            block_size=size,
        )


def state_components(
    spec: Any,  # noqa: ANN401 - the host's
    config: Any,  # noqa: ANN401
    num_ranks: int,
    *,
    dim_first: bool,
    where: str,
) -> tuple[StateComponent, ...]:
    """Return the components of the state of a recurrent layer.

    Args:
        spec: a `MambaSpec` of one rank.
        config: the model's, of its text.
        dim_first: whether convolutions lie as `[channel, tap]` (`VLLM_SSM_CONV_STATE_LAYOUT=DS`).
        where: names the layer, for messages.

    Raises:
        ConfigError: vLLM keeps no states that a prefix can go on from, or in a form that is not
            known: rings of inputs, room for drafts, copies on each rank.
    """
    kind = _kind_of(spec)
    mode = getattr(spec, "mamba_cache_mode", "none")
    if mode != "align":
        raise ConfigError(
            f"{where} keeps no state at the end of blocks (mamba_cache_mode={mode!r}); set "
            "--enable-prefix-caching"
        )
    unserved = {
        name: getattr(spec, name)
        for name, plain in (("num_speculative_blocks", 0), ("tp_replicated", False))
        if getattr(spec, name, plain) != plain
    }
    if kind not in _KINDS or unserved:
        fields = "".join(f", {name}={value!r}" for name, value in unserved.items())
        raise ConfigError(
            f"{where} has states of {kind}{fields}, which kvferry's connector does not store; "
            f"{TIER}"
        )
    arrays = Arrays(
        shapes=spec.shapes,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        num_ranks=num_ranks,
        dim_first=dim_first,
        shares_groups=num_ranks > 1 and _has_one_group(config),
    )
    try:
        return components_of(_KINDS[kind], arrays)
    except LayoutError as error:
        raise ConfigError(f"{where} has states of {kind}: {error}; {TIER}") from error


def _has_one_group(config: Any) -> bool:  # noqa: ANN401 - the host's
    """Whether all heads share B and C, so that each rank has a copy. Only if all that the
    configuration names so agree: else each rank is taken to have groups of its own, which is never
    wrong, but read only with as many ranks."""
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    found = set(_numbers_of_groups(fields))
    return found == {1}


def _numbers_of_groups(fields: Mapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers_of_groups(value)
        elif _GROUPS.fullmatch(str(name)) and isinstance(value, int):
            yield value
