"""Types that every layer shares: keys, requests and steps as a host shows them, KV geometry."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple, NewType, Protocol, runtime_checkable

import msgspec

FORMAT_VERSION = 1
"""Version of the record format; part of every record and every namespace."""

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes that identify a chunk's content, chained over its whole prefix and its namespace."""

BlockTable = tuple[Sequence[int], ...]
"""Block ids of one request: a sequence for each block table of the host, in token order. Id 0, the
null block, stands where a table keeps nothing. It is never read or written."""

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalItem:
    """One image, audio clip, ... whose placeholder tokens occupy `[offset, offset + length)`."""

    digest: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtraKeys:
    """What determines the KV bytes of a request, besides its token ids and the model.

    Attributes:
        cache_salt: isolates tenants; equal prompts under different salts share nothing.
        lora: identity of the adapter's *content*, not its name or path.
        items: multimodal inputs, in order of `offset`.
        embeds_digest: digest of the prompt embeddings, if they replace token ids.
        cacheable: False for a request that must never be read or written (for example prompt
            embeddings without a digest).
        reason, why: why it is not cacheable: a `LookupMiss`, and details in words or "".
    """

    cache_salt: str | None = None
    lora: str | None = None
    items: tuple[MultimodalItem, ...] = ()
    embeds_digest: bytes | None = None
    cacheable: bool = True
    reason: str = "not_cacheable"
    why: str = ""


NO_EXTRA_KEYS = ExtraKeys()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStamp:
    """The producer's statement about the chunks of a prompt that it computed. A client carries it
    to the next engine, and may have changed it.

    Attributes:
        version: version of the stamp; 0: not a stamp of kvferry. The other fields are read only if
            this is our own version.
        namespace: first hexadecimal digits of the namespace that roots the producer's keys.
        num_chunks: leading chunks of the prompt that the producer stored.
        last_key: key of the last of these chunks; empty if there is none.
    """

    version: int
    namespace: str = ""
    num_chunks: int = 0
    last_key: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSource:
    """Another engine that computes or has computed a request's prompt. Written by a client.

    Attributes:
        waits: whether to wait for chunks that it has not stored yet; False: take what is there.
        host, port: address of the engine; None if none was given.
        num_tokens: how many tokens it computed; None if not said.
        has_blocks: whether block ids are named. Then they come from another kind of engine, because
            kvferry leaves the lists of block ids empty.
        stamp: the stamp of a kvferry producer; None if there is none.
    """

    waits: bool
    host: str | None = None
    port: int | None = None
    num_tokens: int | None = None
    has_blocks: bool = False
    stamp: ProducerStamp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What a request asks for where one engine prefills and another decodes.

    Attributes:
        gives: whether another engine goes on from this request's KV, so that all of its chunks are
            stored.
        answers: whether the response to the client says where that KV is.
        source: the engine whose KV this request goes on from; None: there is none.
    """

    gives: bool = False
    answers: bool = False
    source: KVSource | None = None


MAX_PIN_SECONDS = 86_400.0
"""The longest pin that a request can ask for. Operators can pin for longer (`kvferry pin`)."""

_Tokens = Annotated[int, msgspec.Meta(ge=0)]
_PinSeconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_PIN_SECONDS)]


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request asks of the cache.

    Attributes:
        store: whether its KV is stored.
        load: whether KV is loaded for it.
        max_load_tokens: most tokens that are loaded for it; None: no limit.
        pin: seconds after its end for which the chunks of its prompt are kept from eviction, at
            most `MAX_PIN_SECONDS`; 0: not kept.
        explain: whether its answer says what was hit, and why the rest was computed.
    """

    store: bool = True
    load: bool = True
    max_load_tokens: _Tokens | None = None
    pin: _PinSeconds = 0.0
    explain: bool = False


DEFAULT_OPTIONS = RequestOptions()


@runtime_checkable
class RequestView(Protocol):
    """The part of a host's request that the core reads. Members may be plain attributes.

    `all_token_ids` holds prompt and *confirmed* generated tokens; hosts with speculative decoding
    must not show draft tokens here. It only grows, unless the prompt grows, too: a session takes
    back the tokens that were not computed, and goes on with others. Then `num_prompt_tokens` is
    another, and `extra_keys` may be.
    """

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def extra_keys(self) -> ExtraKeys: ...
    @property
    def handover(self) -> Handover | None:
        """None for most requests, in which no other engine takes part."""

    @property
    def options(self) -> RequestOptions: ...


@runtime_checkable
class SupportsJunction(Protocol):
    """A request of a host that can keep a recurrent state where prompts part."""

    def keep_state_after(self, num_tokens: int) -> None:
        """Later prompts that begin with these tokens would hit if their state were stored: have a
        step end there, and offer it. A whole number of blocks."""


class ScheduledRequest(Protocol):
    """One request that gets tokens in a step, as the connector's scheduler role sees it."""

    @property
    def request(self) -> RequestView: ...
    @property
    def block_ids(self) -> BlockTable: ...
    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the blocks before this step, external hits included."""

    @property
    def num_scheduled_tokens(self) -> int: ...


class OfferedState(NamedTuple):
    """A recurrent state of a request that stands in the host's blocks at the end of a step."""

    num_tokens: int
    """After so many tokens."""
    blocks: Mapping[int, int]
    """By block table, the block that has it. A host moves states, so no later step finds it
    there."""
    is_kept: bool
    """Whether the host keeps it for other requests, too; else a step just happens to end there."""


class StatefulRequest(ScheduledRequest, Protocol):
    """As `ScheduledRequest`, of a host whose `EngineSpec.states` is set."""

    @property
    def states(self) -> Sequence[OfferedState]:
        """What this step leaves behind; each is after whole blocks."""


class StepView(Protocol):
    """One scheduler step. New, continuing and resumed requests all show their full block tables."""

    @property
    def scheduled(self) -> Sequence[ScheduledRequest]: ...
    @property
    def preempted_request_ids(self) -> Collection[str]: ...
    @property
    def finished_request_ids(self) -> Collection[str]:
        """Finished since the last step, including ids that this connector never handled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Geometry of one KV group of the *whole* model, whatever a rank holds of it.

    A group has all layers with the same heads, content, dtype, window and chunk, in layer order. It
    belongs to the model, not to a host. `TablePart` says how a host spreads it over block tables.

    Attributes:
        num_layers: layers in this group, over all pipeline ranks.
        num_kv_heads: distinct kv heads, over all tensor-parallel ranks (1 for MLA).
        content_size: elements stored per token and head: K and V side by side (2 x head_dim), or
            the latent of MLA.
        dtype: "float32", "bfloat16", "float16" or "float8_e4m3fn".
        block_size: tokens per block of the engine, unless a `TablePart` states another size.
        window: sliding window in tokens, including the attending one; None for full attention.
        chunk: tokens of an attention chunk: a token attends to those before it that are in the same
            chunk, counted from the first token of the prompt; None for attention without chunks.
        row_tokens: tokens for which `content_size` elements are stored: more than 1 where a host
            compresses so many that none has whole bytes. Only whole blocks are then stored.
        tail: tokens at the end of a chunk that a record holds of this group, where hits end at the
            ends of chunks and so need no others; None: all.
        values: dtype of the values that a host keeps as bytes, such as "float8_e4m3fn": for what is
            about to be stored, which must be finite. It divides no groups. Empty: `dtype`.
    """

    num_layers: int
    num_kv_heads: int
    content_size: int
    dtype: str
    block_size: int
    window: int | None = None
    chunk: int | None = None
    row_tokens: int = 1
    tail: int | None = None
    values: str = field(default="", compare=False)


class ShardRows(NamedTuple):
    """The rows of one component of a record that a shard has: some heads of some layers."""

    layers: tuple[int, int]
    """Half-open, as `heads`; both are `(0, 0)` if there are no rows."""
    num_layers: int
    """Of the whole component."""
    heads: tuple[int, int]
    num_heads: int

    @property
    def shape(self) -> tuple[int, int]:
        """Number of layers and heads."""
        return self.layers[1] - self.layers[0], self.heads[1] - self.heads[0]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape

    @property
    def is_whole(self) -> bool:
        return self.shape == (self.num_layers, self.num_heads)


class StateRun(NamedTuple):
    """Content of a component that lies evenly spaced in a page; the same for each head."""

    start: int
    """Where it begins on the content axis."""
    size: int
    offset: int
    """Of head 0 in the page. All in elements of the component's dtype."""
    head_stride: int
    stride: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateComponent:
    """One part of a layer's state, by heads.

    Attributes:
        name: "ssm", "conv.x", "conv.b", "conv.c", "conv.q", "conv.k" or "conv.v".
        num_heads: distinct heads over all ranks.
        rank_heads: heads in the page of one rank.
        content_size: elements of a head.
        dtype: of the elements, as `KVGroup` names it.
        runs: where the content lies in a page.
    """

    name: str
    num_heads: int
    rank_heads: int
    content_size: int
    dtype: str
    runs: tuple[StateRun, ...]

    def group(self, num_layers: int) -> KVGroup:
        """Return the group of the component in some layers: a state stands for one token."""
        return KVGroup(
            num_layers=num_layers,
            num_kv_heads=self.num_heads,
            content_size=self.content_size,
            dtype=self.dtype,
            block_size=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKind:
    """The layers of a model whose states have one form.

    Attributes:
        num_layers: of the whole model.
        components: what each layer keeps.
    """

    num_layers: int
    components: tuple[StateComponent, ...]

    @property
    def layers(self) -> range:
        """Their positions among each other."""
        return range(self.num_layers)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        """What a record holds of them, in order."""
        return tuple(each.group(self.num_layers) for each in self.components)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShard:
    """The layers and kv heads of one group that one rank reads and writes; half-open ranges.

    Ranks that replicate heads have equal ranges; exactly one of them has `writes` set, so that
    each row of a record is written once."""

    layers: tuple[int, int]
    heads: tuple[int, int]
    writes: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShard:
    """What one rank holds of every group.

    Attributes:
        num_replicas: so many ranks side by side hold exactly the same, the first of them at a
            multiple of this number.
    """

    rank: int
    world_size: int
    groups: tuple[GroupShard, ...]
    num_replicas: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePart:
    """Layers of one group whose blocks stand in one block table of the host.

    Attributes:
        table: index in a `BlockTable`, which has one sequence per table.
        group: index of the group.
        layers: indices of the layers among those that this rank holds of the group; empty if only
            other ranks have layers of the group in this table.
        layer_names: names of the layers in the host, in the same order; None for every layer that
            the host registers.
        block_size: tokens per block of the table.
        window: tokens that the table keeps, including the next one to compute. A block that lies
            wholly before them is the null block. None: the table keeps every block, and all must be
            right, since the host may offer any of them to other requests.
        chunk: tokens of an attention chunk: a block that lies wholly before the chunk of the next
            token to compute is the null block. None: as for `window`.
    """

    table: int
    group: int
    layers: tuple[int, ...]
    layer_names: tuple[str, ...] | None
    block_size: int
    window: int | None = None
    chunk: int | None = None

    @property
    def window_in_blocks(self) -> int | None:
        """Tokens before the end of a block that a hit needs which ends there; None if all."""
        if self.window is None:
            return None
        return -(-(self.window - 1) // self.block_size) * self.block_size
