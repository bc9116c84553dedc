"""Reads the requests and steps of a V1 host into our views. `facade` calls it for a scheduler role.

It accepts the spellings of vLLM 0.10 to 0.32. Runs in: scheduler.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, NoReturn, cast

import msgspec

from kvferry.config import printable
from kvferry.contract.handover import read_handover, read_options
from kvferry.contract.messages import LookupMiss
from kvferry.contract.spec import StateSpec
from kvferry.errors import ConfigError
from kvferry.types import (
    DEFAULT_OPTIONS,
    NO_EXTRA_KEYS,
    NULL_BLOCK,
    ExtraKeys,
    Handover,
    MultimodalItem,
    OfferedState,
    RequestOptions,
    StepView,
)
from kvferry.v1.types import SchedulerOutput, V1Request
from kvferry.v1.utilities import resumed_flags

logger = logging.getLogger(__name__)

ADAPTER_SECONDS = 1.0
"""How long the look-ups of a request wait for its adapter to be read. After that the request is
computed, and stored if the adapter is known before it ends."""

CLIENT_OPTIONS = frozenset(RequestOptions.__struct_fields__)
"""All options that a client may use for one request."""

LoraIdentity = Callable[[Any], str | None]
"""Maps a host's LoRA request to an identity of the adapter's content; None: do not cache. Raises
`UnknownAdapterError`, which says why there is none. Once known, an adapter keeps its identity until
it has none from then on."""

ItemIdentity = Callable[[str], str | None]
"""Maps a host's name of a multimodal item to an identity of its content; None: do not cache."""


class UnknownAdapterError(Exception):
    """The content of an adapter that the host loaded is not known. The text says why."""


class UnreadAdapterError(UnknownAdapterError):
    """The content of an adapter is not known yet, or is being looked at again."""


UNCACHEABLE = ExtraKeys(cacheable=False)


class Inputs(NamedTuple):
    """What decides a request's KV besides the model, as the host names it. A streaming session is
    one request of vLLM whose prompt and items grow, so these are compared at each admission."""

    num_prompt_tokens: int
    has_embeds: bool
    salt: str | None
    lora: tuple[int, Any]
    """The host's LoRA request, by identity: hosts compare two by name."""
    items: tuple[tuple[Any, int, int], ...]
    """Name, offset and length of each multimodal item."""


class HostRequestView:
    """A host's request as a `RequestView`. `all_token_ids` is the host's own list, which grows."""

    __slots__ = (
        "awaits_adapter", "extra_keys", "handover", "inputs", "is_unread", "options", "request",
        "request_id", "table", "until",
    )  # fmt: skip

    def __init__(
        self, request: V1Request, handover: Handover | None, options: RequestOptions
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.inputs: Inputs | None = None
        self.is_unread = False  # not cacheable, but perhaps once its adapter is read
        self.awaits_adapter = False  # the adapter is being looked at, for the first time or again
        self.until: float | None = None  # until when its look-ups wait for that
        self.table: list[list[int]] | None = None  # its blocks, one list for each of its tables
        self.extra_keys = NO_EXTRA_KEYS
        self.handover = handover
        self.options = options

    @property
    def all_token_ids(self) -> Sequence[int]:
        return self.request.all_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self.request.num_prompt_tokens

    def keep_state_after(self, num_tokens: int) -> None:
        """See `kvferry.types.SupportsJunction`; without effect on hosts that keep no states."""
        known = getattr(self.request, "shared_prefix_boundary", None)
        if isinstance(known, int):
            cast("Any", self.request).shared_prefix_boundary = max(known, num_tokens)


class ScheduledView(NamedTuple):
    """One request in one step, as `kvferry.types.ScheduledRequest` describes it."""

    request: HostRequestView
    block_ids: tuple[Sequence[int], ...]
    num_computed_tokens: int
    num_scheduled_tokens: int
    states: Sequence[OfferedState] = ()


class UnreadableStep:
    """A step in no known spelling. Each access raises the error, inside the role's guard."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> NoReturn:
        raise self._error


class V1Step(NamedTuple):
    """One step, as `kvferry.types.StepView` describes it."""

    scheduled: Sequence[ScheduledView]
    preempted_request_ids: Collection[str]
    finished_request_ids: Collection[str]


class HostRequests:
    """The host's requests, each with its block table.

    Args:
        hands_over: False: handover fields of requests are not read and nothing is explained, since
            another connector hands over and answers.
        drafts: whether the host decodes speculatively. vLLM 0.32 then keeps the KV of drafts behind
            a stop token as that of a session's next piece, so sessions that grow are not cached.
        loads: False: nothing is loaded for any request, whatever it asks for.
        states: the recurrent states of its model, if it has any.

    Attributes:
        client_options: names of the `RequestOptions` that clients may use. Others have no effect.
    """

    client_options: AbstractSet[str] = CLIENT_OPTIONS
    clock = staticmethod(time.monotonic)  # replaced by tests

    def __init__(
        self,
        lora_identity: LoraIdentity = lambda _lora_request: None,
        item_identity: ItemIdentity = str,
        *,
        hands_over: bool = True,
        drafts: bool = False,
        loads: bool = True,
        states: StateSpec | None = None,
    ) -> None:
        self._states = states
        self._hands_over = hands_over
        self._drafts = drafts
        self._loads = loads
        self._lora_identity = lora_identity
        self._item_identity = item_identity
        self._forbidden: set[str] = set()  # options that clients tried to use
        self._views: dict[str, HostRequestView] = {}

    def view(self, request: V1Request, *, is_lookup: bool = False) -> HostRequestView:
        """The view of a request; the same object for the request's whole life. Its extra keys
        follow the request until they cannot be found: from then on it is not cached. While its
        adapter is being read, they are looked for again. Between a look-up and the allocation for
        its hit they stay as they are."""
        view = self._views.get(request.request_id)
        if view is None or view.request is not request:  # hosts may use an id again
            params = getattr(request, "kv_transfer_params", None)
            handover = read_handover(params) if self._hands_over else None
            options = self._allowed(options_of(request, params))
            if options.explain and not self._hands_over:
                options = msgspec.structs.replace(options, explain=False)
            if not self._loads or needs_all_tokens(request):
                options = msgspec.structs.replace(options, load=False)
            view = self._views[request.request_id] = HostRequestView(request, handover, options)
        if view.extra_keys.cacheable or view.is_unread:
            self._follow(view)
        view.awaits_adapter = view.is_unread
        if is_lookup:
            view.awaits_adapter |= self._check_adapter(view)
        return view

    def _allowed(self, options: RequestOptions) -> RequestOptions:
        """Return what the operator allows of the options of a request."""
        asked = {
            name
            for name in CLIENT_OPTIONS - self.client_options
            if getattr(options, name) != getattr(DEFAULT_OPTIONS, name)
        }
        if not asked:
            return options
        for name in sorted(asked - self._forbidden):
            logger.warning("a client uses the option %r, which client_options leaves out", name)
        self._forbidden |= asked
        defaults = {name: getattr(DEFAULT_OPTIONS, name) for name in asked}
        return msgspec.structs.replace(options, **defaults)

    def waits(self, view: HostRequestView) -> bool:
        """Whether a request that is looked up waits for its adapter to be looked at."""
        if not (view.awaits_adapter and view.options.load):
            return False
        now = self.clock()
        if view.until is None:
            view.until = now + ADAPTER_SECONDS
        return now < view.until

    def _follow(self, view: HostRequestView) -> None:
        """Find the extra keys of a request again if its inputs changed."""
        try:
            inputs = inputs_of(view.request)
            has_grown = view.inputs is not None and inputs != view.inputs
            if has_grown and self._drafts:
                raise ValueError("it grew, and this engine decodes speculatively")
            if inputs != view.inputs or view.is_unread:
                view.inputs = inputs
                view.extra_keys = extra_keys_of(inputs, self._lora_identity, self._item_identity)
                view.is_unread = False
        except _NOT_FOUND as error:
            view.extra_keys = _not_cached(error)
            view.is_unread = isinstance(error, UnreadAdapterError)

    def _check_adapter(self, view: HostRequestView) -> bool:
        """Let a request go uncached from now on if its adapter lost its identity: the host may have
        loaded another in its place while the request ran. Whether that is being looked at."""
        if view.extra_keys.lora is None or view.inputs is None:
            return False
        try:
            self._lora_identity(view.inputs.lora[1])
        except UnreadAdapterError:
            return True
        except _NOT_FOUND as error:
            view.extra_keys = _not_cached(error)
        return False

    def forget(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._views.pop(request_id, None)

    def allocated(
        self, view: HostRequestView, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> tuple[Sequence[int], ...]:
        """Return the full block table of a request after an allocation. At the end of an async
        load, hosts before 0.32 name only the added blocks; the others came at its start."""
        table = [list(group) for group in block_ids]
        known = view.table
        if known is not None and num_external_tokens == 0 and len(known) == len(table):
            moved = [] if self._states is None else [part.table for part in self._states.tables]
            table = [
                new if new[: len(old)] == old or number in moved else old + new
                for number, (old, new) in enumerate(zip(known, table, strict=True))
            ]
        view.table = table
        return tuple(table)

    def step(self, output: SchedulerOutput) -> StepView:
        """Read one scheduler output; add full block tables. Call once per step, in order. Never
        raises: an output in no known spelling gives an `UnreadableStep`."""
        try:
            return self._step(output)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            for view in self._views.values():  # any table may lack a block of this step
                view.table = None
            return cast("StepView", UnreadableStep(error))

    def _step(self, output: Any) -> V1Step:  # noqa: ANN401 - a host's object
        preempted = getattr(output, "preempted_req_ids", None) or ()
        for request_id in preempted:
            if request_id in self._views:
                self._views[request_id].table = None
        num_computed_tokens: dict[str, int] = {}
        for new in output.scheduled_new_reqs:  # some hosts resume requests as new ones
            self._give_blocks(new.req_id, new.block_ids)
            num_computed_tokens[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, added, num_computed, is_resumed in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            resumed_flags(cached) if cached.req_ids else (),
            strict=True,
        ):
            num_computed_tokens[request_id] = num_computed
            if is_resumed:
                self._give_blocks(request_id, added or ())
            elif added is not None and request_id in self._views:
                table = self._views[request_id].table
                for group, more in () if table is None else zip(table, added, strict=True):
                    group.extend(more)
        scheduled = []
        for request_id, num_computed in num_computed_tokens.items():
            view = self._views.get(request_id)
            if view is None:
                continue
            if view.table is None:
                logger.warning("%r is scheduled in unknown blocks: not cached", request_id)
                self.forget(request_id)
                continue
            if view.is_unread:
                self._follow(view)
            self._check_adapter(view)
            num_tokens = output.num_scheduled_tokens[request_id]
            states: Sequence[OfferedState] = ()
            if self._states is not None:
                stop = num_computed + num_tokens
                states = states_in_step(output, request_id, stop, self._states)
            step = ScheduledView(view, tuple(view.table), num_computed, num_tokens, states)
            scheduled.append(step)
        return V1Step(scheduled, preempted, output.finished_req_ids)

    def _give_blocks(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        view = self._views.get(request_id)
        if view is None:
            logger.warning("%r is scheduled, and was never shown: not cached", request_id)
        else:
            view.table = [list(group) for group in block_ids]


def states_in_step(
    output: Any,  # noqa: ANN401 - a host's object
    request_id: str,
    stop: int,
    spec: StateSpec,
) -> list[OfferedState]:
    """Return the states of a request that stand in blocks when a step has computed the tokens up to
    `stop`, each with a block of every table: those that vLLM hands off (since 0.29), and the last
    one, if a block ends there. Which blocks, vLLM says in each step: it moves states and copies
    blocks, so neither an earlier step nor a position in an earlier table tells."""
    in_blocks = output.kv_connector_block_state
    if in_blocks is None:
        return []
    tables, size = [part.table for part in spec.tables], spec.block_size
    found: dict[int, dict[int, int]] = {}
    for table, block, num_tokens in in_blocks.boundary_state_offloads.get(request_id, ()):
        found.setdefault(num_tokens, {})[table] = block
    kept = frozenset(found)
    # The tokens of drafts may be taken back, so a step with drafts ends nowhere.
    if stop % size == 0 and not output.scheduled_spec_decode_tokens.get(request_id):
        known = in_blocks.get_block_ids(request_id)
        if stop not in found and known is not None:
            found[stop] = {table: known[table][stop // size - 1] for table in tables}
    return [
        OfferedState(num_tokens, blocks, is_kept=num_tokens in kept)
        for num_tokens, blocks in found.items()
        if num_tokens % size == 0
        and all(blocks.get(table, NULL_BLOCK) != NULL_BLOCK for table in tables)
    ]


def only_continues(output: Any) -> bool:  # noqa: ANN401 - a host's object
    """Whether a step only continues requests in blocks that they already have. Most steps do."""
    try:
        cached = output.scheduled_cached_reqs
        return output.total_num_scheduled_tokens > 0 and not (
            output.scheduled_new_reqs
            or output.finished_req_ids
            or getattr(output, "preempted_req_ids", None)
            or any(cached.new_block_ids)  # resumed requests have new blocks, too
            or _offers_states(output)
        )
    except (AttributeError, TypeError):  # in no known spelling
        return False


def _offers_states(output: Any) -> bool:  # noqa: ANN401 - a host's object
    """Whether a step hands off recurrent states; it may be one without new blocks."""
    in_blocks = getattr(output, "kv_connector_block_state", None)
    return bool(getattr(in_blocks, "boundary_state_offloads", None))


def needs_all_tokens(request: object) -> bool:
    """Whether a request wants something of every token of its prompt, such as logprobs or a vector,
    so that all are computed. vLLM decides that; in hosts that do not, those with logprobs do."""
    decided = getattr(request, "skip_reading_prefix_cache", None)
    if decided is not None:
        return bool(decided)
    sampling = getattr(request, "sampling_params", None)
    return getattr(sampling, "prompt_logprobs", None) is not None


def has_answer(request: object) -> bool:
    """Whether an ended request was neither aborted nor failed: a client waits for its answer."""
    status = getattr(request, "status", None)
    name = getattr(status, "name", None)
    return status is None or name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def options_of(request: object, params: object) -> RequestOptions:
    """Read a request's options in its `kv_transfer_params` or `extra_args`. Never raises, since an
    error would end the host: wrong options are logged, and the request runs without any."""
    sampling = getattr(request, "sampling_params", None)
    try:
        return read_options(params, getattr(sampling, "extra_args", None))
    except ConfigError as error:
        name = getattr(request, "request_id", "")
        logger.warning("request %s runs without options: %s", printable(str(name)), error)
        return DEFAULT_OPTIONS


def inputs_of(request: Any) -> Inputs:  # noqa: ANN401 - a host's object
    """Read the inputs of a request, of which hosts have several spellings.

    Raises:
        AttributeError, TypeError, ValueError: in no known spelling.
    """
    features = getattr(request, "mm_features", None)
    if features is not None:
        pairs = [(feature.identifier, feature.mm_position) for feature in features]
    else:
        names = getattr(request, "mm_hashes", None) or ()
        places = getattr(request, "mm_positions", None) or ()
        pairs = list(zip(names, places, strict=True))
    items = tuple((name, place.offset, place.length) for name, place in pairs)
    lora = getattr(request, "lora_request", None)
    has_embeds = getattr(request, "prompt_embeds", None) is not None
    has_embeds |= getattr(request, "prompt_token_ids", ()) is None
    salt = getattr(request, "cache_salt", None)
    num_prompt_tokens = request.num_prompt_tokens
    if num_prompt_tokens > len(request.all_token_ids):
        # vLLM 0.32 does so to a session whose piece ends while it is preempted, and then computes
        # other tokens than the request names.
        raise ValueError("its prompt is longer than its tokens")
    return Inputs(num_prompt_tokens, has_embeds, salt, (id(lora), lora), items)


_NOT_FOUND = (UnknownAdapterError, AttributeError, TypeError, ValueError, OSError, RuntimeError)


def _not_cached(error: Exception) -> ExtraKeys:
    """The extra keys of a request whose inputs have no identity, and why."""
    if isinstance(error, UnknownAdapterError):
        why = f"the LoRA adapter {error}"
        return ExtraKeys(cacheable=False, reason=LookupMiss.ADAPTER, why=why)
    logger.warning("request is not cached: its inputs cannot be identified (%r)", error)
    return UNCACHEABLE


def extra_keys_of(
    inputs: Inputs, lora_identity: LoraIdentity, item_identity: ItemIdentity
) -> ExtraKeys:
    """Return what decides a request's KV besides its tokens. An input without an identity of its
    *content* makes the request uncacheable."""
    lora_request = inputs.lora[1]
    lora = None if lora_request is None else lora_identity(lora_request)
    digests = [item_identity(str(name)) if name else None for name, _, _ in inputs.items]
    if inputs.has_embeds or (lora_request is not None and lora is None) or None in digests:
        return UNCACHEABLE
    if inputs.salt is None and lora is None and not inputs.items:
        return NO_EXTRA_KEYS
    items = (
        MultimodalItem(digest=str(digest), offset=offset, length=length)
        for digest, (_, offset, length) in zip(digests, inputs.items, strict=True)
    )
    in_order = tuple(sorted(items, key=lambda item: item.offset))
    return ExtraKeys(cache_salt=inputs.salt, lora=lora, items=in_order)
