"""What each layer of vLLM keeps, from its spec, and the models that a connector of tokens refuses.

vLLM's scheduler sees less than its workers: for a group of layers of several sizes it gets the spec
of the first layer, and no modules. So the two halves may describe a model differently;
`connector.py` has the scheduler's half adopt what the workers' halves say.
"""

# ruff: noqa: ANN401 - configurations and specs are the host's

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import Any

from kvferry.adapters.vllm.kv_specs import KV_SPECS
from kvferry.adapters.vllm.layer_kv import (
    CHUNKED,
    SERVED,
    SLIDING,
    TIER,
    kind_of,
    order_of_heads,
    text_config,
    values_of,
    whole_blocks_of,
)
from kvferry.errors import ConfigError
from kvferry.identity.resolved import unserved_fields
from kvferry.types import KVGroup

_RING = "CircularBufferSpec"

_NUMBER = re.compile(r"\.(\d+)(?:\.|$)")
_ANY_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One attention layer of the model that this vLLM runs.

    Attributes:
        name: vLLM's name of the layer.
        number: position in the model.
        table: index of its KV group in vLLM, and so of its block table.
        block_size: tokens per block of that table.
        table_window: tokens that the table keeps (with a drafter, more than the window); None: all.
        table_chunk: tokens of the attention chunks of which the table keeps the last; None: all.
        kind: the form of its KV, as a group of one layer; layers of one kind make a record's group.
        whole_blocks: how its blocks lie, if they can only be stored whole; None: token by token.
        stage: the pipeline stage that holds it.
    """

    name: str
    number: int
    table: int
    block_size: int
    table_window: int | None
    table_chunk: int | None
    kind: KVGroup
    whole_blocks: str | None
    stage: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of content in a block."""
        return self.block_size // self.kind.row_tokens


def refuse_parallel(parallel: Any) -> None:
    """Raise ConfigError for a split of KV that is not served."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if isinstance(size, int) and size != 1:
            raise ConfigError(
                f"{name}={size} is not served by kvferry's connector; set it to 1, or {TIER}"
            )


def stages_of(parallel: Any) -> int:
    """Return the number of pipeline stages."""
    return int(getattr(parallel, "pipeline_parallel_size", 1))


def refuse_stages_beside_others(parallel: Any) -> None:
    """Raise ConfigError if a connector among several would have to tell the scheduler of stages."""
    if stages_of(parallel) > 1:
        raise ConfigError(
            f"pipeline_parallel_size={stages_of(parallel)} is not served inside a MultiConnector, "
            "where vLLM's scheduler hears of one child alone: make kvferry the only connector"
        )


def layers_of(vllm_config: Any, kv_cache_config: Any, platform: str) -> list[Layer]:
    """Return every layer of every group, in any order: a hit would leave any other as it was. Only
    draft layers of speculative decoding are left out (see `kvferry.adapters.vllm.drafts`): their KV
    depends on another model, and a wrong draft only costs time. So are rings, which are empty where
    a hit ends, and recurrent layers, which keep no KV.

    Args:
        kv_cache_config: the host's groups.
        platform: name of the device that vLLM runs on.

    Raises:
        ConfigError: a kind of layer that is not served, whether or not the host would transfer it.
    """
    drafts = draft_names(vllm_config, kv_cache_config)
    names, rings = set[str](), dict[str, int]()
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in specs_of(group):
            if name in drafts or is_recurrent(spec):
                continue
            if _is_left_out(spec):
                unserved_fields(spec, KV_SPECS, f"layer {name}")
                rings |= {name: int(spec.block_size)} if type(spec).__name__ == _RING else {}
                continue
            names.add(name)
    found = described(names, vllm_config.model_config, vllm_config, kv_cache_config, platform)
    _check_rings(rings, {layer.block_size for layer in found})
    return found


def described(
    names: Collection[str], model: Any, vllm_config: Any, kv_cache_config: Any, platform: str
) -> list[Layer]:
    """Return the layers of these names as their specs describe them, and `model`, whose they are.
    Raises ConfigError for a kind of layer that is not served."""
    modules, order = modules_of(vllm_config), order_of_heads(kv_cache_config)
    tp = vllm_config.parallel_config.tensor_parallel_size
    cache_dtype = vllm_config.cache_config.cache_dtype
    found, place = [], count()
    for table, group in enumerate(kv_cache_config.kv_cache_groups):
        for name, spec in specs_of(group):
            number = number_of(name, next(place))
            if name not in names:
                continue
            kind = _attending(kind_of(name, number, spec, model, tp), number, spec, model)
            found.append(
                Layer(
                    name=name,
                    number=number,
                    table=table,
                    block_size=group.kv_cache_spec.block_size,
                    table_window=_table_window(spec),
                    table_chunk=_chunk_of(number, spec, model) if _is_chunked(spec) else None,
                    kind=replace(kind, values=values_of(spec, cache_dtype, platform)),
                    whole_blocks=whole_blocks_of(spec, modules.get(name), platform, order),
                )
            )
    return found


def is_recurrent(spec: Any) -> bool:
    """Whether a layer keeps a recurrent state (`states.states_of`), and no KV of tokens."""
    return type(spec).__name__ == "MambaSpec"


def _is_left_out(spec: Any) -> bool:
    """Whether vLLM's own hits do without a layer: it keeps tokens that are not compressed yet, or a
    window that vLLM computes again after a hit."""
    is_known = type(spec).__name__ == _RING or getattr(spec, "bounded_replay", False)
    return is_known and getattr(spec, "prefix_cacheable", True) is False


def _check_rings(rings: Mapping[str, int], block_sizes: Collection[int]) -> None:
    """Raise ConfigError if a hit might end where a layer's ring holds tokens: it is empty at
    multiples of its size."""
    for name, size in rings.items():
        if math.lcm(1, *block_sizes) % size:
            raise ConfigError(
                f"layer {name} keeps its last {size} tokens as a {_RING}, and blocks of "
                f"{', '.join(map(str, sorted(block_sizes)))} tokens end within them; {TIER}"
            )


def num_target_layers(model: Any) -> int:
    """The number of layers of the model itself, without drafts; huge if it is not said."""
    config = text_config(model)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        number = getattr(config, name, None)
        if isinstance(number, int) and not isinstance(number, bool):
            return number
    return 1 << 30


def number_of(name: str, place: int) -> int:
    """Return the position in the model: the first number in the name, or the host's order."""
    match = _NUMBER.search(name) or _ANY_NUMBER.search(name)
    return place if match is None else int(match.group(1))


def specs_of(group: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and spec of each layer of a group. A uniform group has a spec for each."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    for name in group.layer_names:
        yield name, each[name] if isinstance(each, Mapping) else group.kv_cache_spec


# --- drafts ---------------------------------------------------------------------------------------
#
# A layer that is taken for a draft may lack after a hit. If it were the model's, the hit would
# compute on whatever its blocks hold. So vLLM must say that it is one, and where it does not,
# all that it shows must agree; in doubt a layer is the model's.


def modules_of(vllm_config: Any) -> Mapping[str, Any]:
    """Return the layers that this process made, by name; none in vLLM's scheduler."""
    compilation = getattr(vllm_config, "compilation_config", None)
    found: Mapping[str, Any] = getattr(compilation, "static_forward_context", {})
    return found


def draft_names(vllm_config: Any, kv_cache_config: Any) -> set[str]:
    """Return the names of a drafter's layers.

    vLLM marks them since 0.33, and in its second model runner before. Without marks they are those
    that vLLM, if its configuration names a draft model, made after all others, if they have a name
    or a number that a model's own layers lack. Some models number their own layers so: in Falcon-H1
    the states of layer i are layer `num_hidden_layers + i`.

    Raises:
        ConfigError: a layer that vLLM made earlier has such a name or number, too, so that neither
            says anything of those behind it.
    """
    modules = modules_of(vllm_config)
    specs = {
        name: spec for group in kv_cache_config.kv_cache_groups for name, spec in specs_of(group)
    }
    found = {
        name
        for name, spec in specs.items()
        if getattr(spec, "is_draft", False)
        or getattr(modules.get(name), "is_draft_layer", False) is True
    }
    config = getattr(vllm_config, "speculative_config", None)
    drafter = getattr(config, "draft_model_config", None)
    own = getattr(config, "target_model_config", None)  # it stands for none, as for n-grams
    if found or drafter is None or drafter is own:
        return found
    num_layers = num_target_layers(vllm_config.model_config)

    def looks_so(name: str) -> bool:
        is_named_so = not {"draft_model", "mtp"}.isdisjoint(name.split("."))
        is_behind = number_of(name, 0) >= num_layers
        keeps_tokens = type(specs[name]).__name__ in SERVED
        return keeps_tokens and (is_named_so or is_behind)

    made = [name for name in modules if name in specs]
    # The scheduler's process has no modules; what the workers say of their layers counts there.
    behind = set(takewhile(looks_so, reversed(made)) if made else filter(looks_so, specs))
    for name in made:
        if name not in behind and looks_so(name):
            raise ConfigError(
                f"layer {name} of the model is numbered or named as those of draft models are, so "
                "which layers are drafts is not known; run it without a draft model"
            )
    return behind


# --- windows --------------------------------------------------------------------------------------


def _attending(kind: KVGroup, number: int, spec: Any, model: Any) -> KVGroup:
    """Return a layer's KV with the tokens that it attends to."""
    window, chunk = _window_of(number, spec, model), _chunk_of(number, spec, model)
    return replace(kind, window=window, chunk=chunk)


def _window_of(number: int, spec: Any, model: Any) -> int | None:
    """Return the window of a layer. vLLM may keep all tokens of layers with and without a window in
    one group, whose spec does not tell them apart; the model's configuration does."""
    window = getattr(spec, "sliding_window", None)
    config = text_config(model)
    kinds = getattr(config, "layer_types", None)
    if type(spec).__name__ not in SLIDING and isinstance(kinds, list) and number < len(kinds):
        is_sliding = kinds[number] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if is_sliding else None
    return window if isinstance(window, int) else None


def _is_chunked(spec: Any) -> bool:
    return type(spec).__name__ in CHUNKED


def _chunk_of(number: int, spec: Any, model: Any) -> int | None:
    """Return the tokens of a layer's attention chunks. As for windows, the model's configuration
    says which layers have them where vLLM keeps all tokens of all layers in one group."""
    chunk = getattr(spec, "attention_chunk_size", None)
    kinds = getattr(text_config(model), "layer_types", None)
    if not _is_chunked(spec) and isinstance(kinds, list) and number < len(kinds):
        chunk = chunk if kinds[number] == "chunked_attention" else None
    return chunk if isinstance(chunk, int) else None


def _table_window(spec: Any) -> int | None:
    """Return how many tokens vLLM keeps of a layer; None if all."""
    if type(spec).__name__ not in SLIDING:
        return None
    return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
