"""The namespace: a digest of all that decides KV bytes besides tokens and extra keys. Every chain
of keys begins with it.

It covers the content of the weights, the model config as the engine runs it, the geometry of each
KV group, the chunk size, the tenant, and the versions of format and keys. It does not cover how the
work is split and laid out (tensor and pipeline parallelism, block size, memory layout), nor engine,
device and path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from blake3 import blake3

from kvferry.errors import ConfigError
from kvferry.keys.chain import KEY_VERSION
from kvferry.keys.encoding import JsonValue, canonical
from kvferry.types import FORMAT_VERSION, KVGroup

NAMESPACE_TAG = b"kvferry.space.1\0"

OPAQUE = "opaque"
"""The `kind` of a namespace of opaque records (rows of a host); those of tokens have none."""

_MAX_TITLE_CHARACTERS = 200

MAX_STATE_PARTS = 4096
"""Most records of one state: a description that says more is hostile."""

IRRELEVANT_FIELDS = frozenset(
    {
        # where the config came from, and which library wrote it
        "_commit_hash",
        "_name_or_path",
        "name_or_path",
        "transformers_version",
        # what a forward pass returns, not what it computes
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "use_cache",
        # which kernel computes it: engine and device are not part of identity
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        # when generation stops and how it starts; the tokens themselves are hashed
        "bos_token_id",
        "eos_token_id",
        "finetuning_task",
        "task_specific_params",
    }
)
"""Fields of a Hugging Face config that cannot change KV bytes. All other fields count, also unknown
ones: a needless miss costs time, but a wrong hit gives wrong output."""

HOST_FIELDS = frozenset({"cpu_blocks", "latents_of", "states_of", "whole_blocks"})
"""Fields of an identity's config that no option sets: they follow from the kernels of the host that
computes the KV, and stand only where these keep engines apart."""

UNREAD = b"weights that are not hashed yet."
"""Stands for the digest of weights that are still being hashed. Nothing is stored under it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The model that produced the KV, identified by its content.

    Attributes:
        weights: 32-byte digest of the weights' content (`weights_digest`), or `UNREAD`.
        config: the model config as the engine effectively runs it: overrides, dtype, quantisation
            and rope settings applied, fields of `IRRELEVANT_FIELDS` dropped.
        weights_version: version of weights that change in place; None for weights as loaded.
        name: the user's name of the model, for people; no part of identity.
        other_weights: for commands, digests of the same directory for hosts that read other files
            of it; no part of identity.
    """

    weights: bytes
    config: Mapping[str, JsonValue]
    weights_version: str | None = None
    name: str | None = field(default=None, compare=False)
    other_weights: tuple[bytes, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.weights) != 32:
            raise ConfigError(
                f"a weights digest has 32 bytes, not {len(self.weights)}: use weights_digest()"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """A digest and the readable description it was made from: `digest` is BLAKE3 over
    `NAMESPACE_TAG` and the canonical encoding of `description`. `model` is the model's name if it
    has one, and is not in the description."""

    digest: bytes
    description: Mapping[str, JsonValue] = field(compare=False)
    model: str | None = field(default=None, compare=False)

    def of_weights(self, weights: bytes) -> Namespace:
        """Return the namespace that differs in the weights alone."""
        return Namespace.described({**self.description, "weights": weights.hex()}, self.model)

    @classmethod
    def of(
        cls,
        identity: ModelIdentity,
        groups: tuple[KVGroup, ...],
        chunk_tokens: int,
        tenant: str = "",
        *,
        states: Sequence[Sequence[KVGroup]] = (),
        state_parts: int = 0,
    ) -> Namespace:
        """Make the namespace of a model's KV. Raises ConfigError for no groups, or a config value
        that has no canonical encoding.

        Args:
            states: of a model with recurrent states, for each kind of layers the groups of states.
            state_parts: the records of one state.
        """
        if not groups:
            raise ConfigError("a namespace needs at least one KV group")
        described: list[JsonValue] = [describe_group(group) for group in groups]
        form: dict[str, JsonValue] = {"groups": described}
        if states:
            kinds: list[JsonValue] = [[describe_group(each) for each in kind] for kind in states]
            form["states"] = {"kinds": kinds, "state_parts": state_parts}
        return cls._of_model(identity, form, chunk_tokens, tenant)

    @classmethod
    def of_cache(
        cls,
        identity: ModelIdentity,
        cache: Mapping[str, JsonValue],
        chunk_tokens: int,
        tenant: str = "",
    ) -> Namespace:
        """Make the namespace of a cache that has more than KV groups; `cache` describes it. Raises
        ConfigError as `of`."""
        return cls._of_model(identity, {"cache": cache}, chunk_tokens, tenant)

    @classmethod
    def _of_model(
        cls,
        identity: ModelIdentity,
        form: Mapping[str, JsonValue],
        chunk_tokens: int,
        tenant: str,
    ) -> Namespace:
        description: dict[str, JsonValue] = {
            "format_version": FORMAT_VERSION,
            "key_version": KEY_VERSION,
            "weights": identity.weights.hex(),
            "weights_version": identity.weights_version,
            "config": identity.config,
            **form,
            "chunk_tokens": chunk_tokens,
            "tenant": tenant,
        }
        return cls.described(description, identity.name)

    @classmethod
    def described(cls, description: Mapping[str, JsonValue], model: str | None) -> Namespace:
        """Make the namespace of a whole description. Raises ConfigError for a value in it that has
        no canonical encoding."""
        # The digest comes first: it refuses values that the copy cannot handle.
        digest = _digest(description)
        copied = {name: _copied(value) for name, value in description.items()}
        return cls(digest=digest, description=copied, model=model)

    def as_text(self) -> str:
        """Return JSON with the model's name and the description, which stores keep."""
        value = {"model": self.model, "description": self.description}
        return json.dumps(value, indent=1) + "\n"

    @classmethod
    def from_text(cls, digest: bytes, text: str) -> Namespace | None:
        """Parse what `as_text` wrote; None if `text` is something else or describes another
        namespace."""
        try:
            value = json.loads(text)
            description, model = value["description"], value["model"]
            is_ours = isinstance(description, dict) and isinstance(model, str | None)
            if not is_ours or _digest(description) != digest:
                return None
        except (ValueError, KeyError, TypeError, RecursionError):  # the text is untrusted
            return None
        return cls(digest=digest, description=description, model=model)

    @property
    def title(self) -> str:
        """The model's name, or what its config says if it has none. For people. Its length is
        bounded, whatever a server says."""
        config = self.description.get("config")
        said = config if isinstance(config, Mapping) else {}
        names = said.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        title = self.model or str(first or said.get("model_type") or "a model without a name")
        return title[:_MAX_TITLE_CHARACTERS] + self._kind_in_title()

    @property
    def state_parts(self) -> int:
        """Number of records of a state: 0 where chunks are all that is stored."""
        said = self.description.get("cache") or self.description.get("states")
        parts = said.get("state_parts") if isinstance(said, Mapping) else None
        return parts if isinstance(parts, int) and 0 < parts <= MAX_STATE_PARTS else 0

    @property
    def is_opaque(self) -> bool:
        """Whether keys are made of a host's hashes, so that they do not follow from tokens."""
        return self.description.get("kind") == OPAQUE

    def _kind_in_title(self) -> str:
        if not self.is_opaque:
            return ""
        host = self.description.get("host")
        name = host.get("name") if isinstance(host, Mapping) else None
        return f" (rows of {str(name)[:20]})"


def _digest(description: Mapping[str, JsonValue]) -> bytes:
    return blake3(NAMESPACE_TAG + canonical(description)).digest()


def relevant_config(config: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Return `config` without `IRRELEVANT_FIELDS`, also in sub-configs such as `text_config`."""
    result: dict[str, JsonValue] = {}
    for name, value in config.items():
        if name in IRRELEVANT_FIELDS:
            continue
        if isinstance(value, Mapping) and name.endswith("_config"):
            result[name] = relevant_config(value)
        else:
            result[name] = value
    return result


def describe_group(group: KVGroup) -> dict[str, JsonValue]:
    """Return the fields of a group that decide KV bytes."""
    # block_size is the engine's page: it decides where KV lies in memory, not what it is.
    described: dict[str, JsonValue] = {
        "num_layers": group.num_layers,
        "num_kv_heads": group.num_kv_heads,
        "content_size": group.content_size,
        "dtype": group.dtype,
        "window": group.window,
    }
    if group.chunk is not None:  # others keep the names that they had before there were chunks
        described["chunk"] = group.chunk
    if group.row_tokens != 1:
        described["row_tokens"] = group.row_tokens
    if group.tail is not None:
        described["tail"] = group.tail
    return described


def _copied(value: JsonValue) -> JsonValue:
    """Deep copy, in plain dicts and lists, so that the description cannot change later."""
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_copied(item) for item in value]
    return value
