"""The one entry to the cache: a host's connector makes a `PrefixCache` per process, at start."""

from __future__ import annotations

import logging
import math
import random
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvferry.blocks.copies import DeviceSetup
from kvferry.blocks.rows import RankRecords, RankRows
from kvferry.blocks.states import PagedStates
from kvferry.blocks.tables import Tables
from kvferry.cache.config import CacheConfig, RoleContext, StatePlaces, default_memory_bytes
from kvferry.cache.deciding.host_pool import HostPool
from kvferry.cache.deciding.loans import Loans
from kvferry.cache.deciding.rank_slots import RankSlots
from kvferry.cache.deciding.scheduler import CacheScheduler
from kvferry.cache.deciding.sharded_store import ShardedStore
from kvferry.cache.deciding.shared_writes import SharedWrites
from kvferry.cache.epoch import CacheIdentity
from kvferry.cache.memory import machine_bytes, slot_size
from kvferry.cache.messages import SlotRegion
from kvferry.cache.moving.worker import CacheWorker
from kvferry.config import build_config
from kvferry.contract.spec import DraftSpec, EngineSpec, Mode
from kvferry.errors import ConfigError
from kvferry.keys import Namespace
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Gauges, Observer
from kvferry.record.drafts import draft_schema
from kvferry.record.schema import RecordSchema, default_chunk_tokens
from kvferry.record.state_parts import StatePart, chunk_tokens_with_states, state_parts
from kvferry.store.base import Store
from kvferry.store.io_pool import end_when_dropped
from kvferry.store.kind import StoreUrl
from kvferry.store.kinds import kind_of
from kvferry.store.recordio import value_check
from kvferry.store.url import open_store, parse_tiers
from kvferry.transfer.server import Listen, PeerServer
from kvferry.types import KVGroup, RankShard

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LARGE_DRAFTS = (
    "the KV of draft layers is not stored, as a record of it would be no smaller than one of the "
    "model: drafts after a hit are poor"
)


class PrefixCache:
    """The cache as one process has it: an open store, and the roles over it. Close it after
    its roles.

    Args:
        spec: the engine, and the rank for a worker role.
        options: fields of `CacheConfig`; unknown names are refused.
        observer: receives its counts.
        store: replaces the store that the options name, and is closed here, too.
        where: names the place of the options, at the start of messages about them.
        has_scheduler: whether the scheduler role will be asked for.

    Raises:
        ConfigError: a wrong option, too little memory for one chunk of this model (two with
            audits), or a store that cannot be used.

    Attributes:
        identity: what is loaded and stored, and whether anything is.
    """

    def __init__(
        self,
        spec: EngineSpec,
        options: Mapping[str, Any],
        observer: Observer,
        *,
        store: Store | None = None,
        where: str = "shared_storage options",
        has_scheduler: bool = True,
    ) -> None:
        config = build_config(CacheConfig, options, where=where)
        self._spec = spec
        self.config = config
        chunk_tokens = self._chunk_tokens = _chunk_tokens(spec, config.chunk_tokens)
        model = spec.identity
        if config.weights_version is not None:
            model = replace(model, weights_version=config.weights_version)
        groups, tenant = spec.groups, config.tenant
        states = () if spec.states is None else spec.states.groups
        sized = RecordSchema.for_groups(
            namespace=bytes(32), chunk_tokens=chunk_tokens, groups=groups
        )
        self._parts = state_parts(sized, states)
        num_parts = len(self._parts)
        self.identity = CacheIdentity(
            model,
            lambda model: Namespace.of(
                model, groups, chunk_tokens, tenant, states=states, state_parts=num_parts
            ),
        )
        if spec.mode is Mode.OFF:
            self.identity.stop("this engine neither loads nor saves")
        # What a fault stored before there is a name has a random one, and is never found.
        self._schema = sized.with_namespace(self.identity.first or secrets.token_bytes(32))
        records = records_of(groups, sized, self._parts, spec.shard, spec.drafts)
        self._drafts = records.drafts
        if self._drafts is None and spec.drafts is not None:
            logger.warning(_LARGE_DRAFTS)
        self.num_slots = self._count_slots()
        self.observer = observer
        self.store = store or self._open_store(index=has_scheduler)
        self.context = RoleContext(
            spec=spec,
            config=config,
            chunk_tokens=chunk_tokens,
            store=self.store,
            observer=observer,
            tables=Tables(spec, chunk_tokens),
            identity=self.identity,
            states=None if spec.states is None else self._places(spec.states.block_size),
        )
        self._scheduler: CacheScheduler | None = None
        self._worker: CacheWorker | None = None
        self._server: PeerServer | None = None
        self._keep_server: Callable[[], object] = _nothing
        role = "scheduler" if has_scheduler else "worker"
        observer.watch(_while_there(self.store, lambda store: _tier_gauges(store, role)))

    @property
    def spec(self) -> EngineSpec:
        """The engine, with the digest of its weights once that is known."""
        model = replace(self._spec.identity, weights=self.identity.model.weights)
        return replace(self._spec, identity=model)

    @property
    def schema(self) -> RecordSchema:
        """The layout of records of the first epoch, under a random name while that has none."""
        first = self.identity.first
        return self._schema.with_namespace(first) if first else self._schema

    def _places(self, block_size: int) -> StatePlaces:
        record_bytes = self._schema.record_bytes
        return StatePlaces(len(self._parts), block_size // self._chunk_tokens, record_bytes)

    def _count_slots(self) -> int:
        """How many whole records fit; the same on every rank. Raises ConfigError if too few."""
        record_bytes = slot_size(self._schema.record_bytes)
        memory_bytes = self.config.memory_bytes
        if memory_bytes is None:
            token_bytes = record_bytes / self._chunk_tokens
            memory_bytes = default_memory_bytes(
                token_bytes, self._spec.step_tokens, machine_bytes()
            )
        num_slots = memory_bytes // record_bytes
        needed = 1 if self.config.audit == "off" else 2  # an audit needs two
        if num_slots < needed:
            raise ConfigError(
                f"memory_bytes={memory_bytes} is smaller than "
                f"{'one chunk' if needed == 1 else 'two chunks'} of this model; set it to at least "
                f"{needed * record_bytes}"
            )
        return num_slots

    def _open_store(self, *, index: bool) -> Store:
        """Open the store; it may go on opening in the background.

        Raises:
            ConfigError: it cannot be used.
        """
        spec, listen, identity = self._spec, self._listen(), self.identity
        own = self._schema.of_shard(spec.shard.groups)
        schemas = [self._schema, *(part.schema for part in self._parts)]
        if own not in (None, self._schema):
            schemas.append(own)
        if self._drafts is not None:
            schemas.append(self._drafts.own)

        def named() -> tuple[bytes, str | None]:
            name = identity.wait_first()  # without this object, which the store would keep alive
            # Described once per engine, by the process of the scheduler role.
            return name.digest, name.as_text() if index and Mode.WRITE in spec.mode else None

        return open_store(
            self.config.store if listen is None else _others(self.config.store, listen),
            observer=self.observer,
            multi_process=spec.multi_process or spec.shard.world_size > 1,
            index=index,
            check=value_check(*schemas),
            named=named,
            start_seconds=self.config.start_timeout_seconds if identity.first else 0.0,
        )

    def _listen(self) -> Listen | None:
        """Where peers are served; None if they are not. Raises ConfigError."""
        serve, index = self.config.serve, self._spec.data_parallel_index
        return None if serve is None else Listen.parse(serve).for_engine(index)

    @property
    def block_multiple(self) -> int:
        """The number of tokens of every hit is a multiple of this."""
        return self.context.tables.block_size

    def wait_ready(self, timeout: float) -> bool:
        """Block until look-ups can find everything stored, for at most `timeout` seconds; True if
        they can. For the start of an engine: look-ups before that work, and may miss."""
        return self.store.wait_indexed(timeout)

    def close(self) -> None:
        """Close the server of peers and the store. Idempotent."""
        if self._server is not None:
            self._keep_server()
            self._server.close()
        self.identity.close()
        self.store.close()

    def _warn_of_windows(self) -> None:
        """Warn if chunks are longer than a window, or lie in two attention chunks: they are stored
        only if one step computes them whole."""
        groups, chunk = self._spec.groups, self._chunk_tokens
        parts = [part for part in self._spec.table_parts if groups[part.group].tail is None]
        smallest = min((part.window for part in parts if part.window is not None), default=chunk)
        smallest = min(smallest, *(math.gcd(part.chunk or chunk, chunk) for part in parts))
        if Mode.WRITE in self._spec.mode and smallest < chunk:
            logger.warning(
                "chunk_tokens=%d is more than the smallest attention window, or does not divide "
                "attention chunks: chunks that two steps compute are not stored; set it to at most "
                "%d",
                chunk,
                smallest,
            )

    def scheduler(
        self,
        *,
        draw: Callable[[], float] = random.random,
        log: logging.Logger = logger,
    ) -> CacheScheduler:
        """The scheduler role; call once.

        Args:
            draw: makes a random number in [0, 1), which decides whether a hit is audited, and
                whether near its start or near its end.
            log: gets a line for each request that another engine prefills or decodes.

        Raises:
            ConfigError: the journal cannot be written, peers cannot be served, or
                `weights_version_file` cannot be read.
        """
        self._warn_of_windows()
        world_size = self._spec.shard.world_size
        # Without this object: the server of peers keeps what ranks hold alive.
        records = partial(records_of, self._spec.groups, self._schema, self._parts)
        schemas = (*(part.schema for part in self._parts), self._schema)
        shard = self._spec.shard
        ranks = RankSlots(records, schemas, self.num_slots, shard, self.identity)
        context = replace(self.context, draw=draw, log=log)
        if world_size > 1:
            context = replace(context, store=ShardedStore(self.store, ranks))
            self.observer.watch(_while_there(ranks, _rank_gauges))
        all_groups = self.context.tables.all_groups
        pool = HostPool(self.num_slots, world_size, all_groups, Loans(ranks, self.context.clock))
        self.observer.watch(_while_there(pool, _pool_gauges))
        scheduler = CacheScheduler(
            context,
            self._schema,
            pool,
            shared_writes=SharedWrites(self.context, pool, ranks, schemas),
        )
        listen = self._listen()
        if listen is not None:
            identity = self.identity
            self._server = PeerServer(
                pool.loans, lambda: identity.state.namespace, listen, observer=self.observer
            )
            self._keep_server = end_when_dropped(self, str(self._server), self._server.close)
            scheduler.advertise(*self._server.address)
        self._scheduler = scheduler
        return scheduler

    @property
    def region(self) -> SlotRegion | None:
        """Where the slots of the worker role are; None without that role."""
        return None if self._worker is None else self._worker.region

    def learn_regions(self, regions: Iterable[SlotRegion]) -> None:
        """Tell the scheduler role where the ranks' slots are, if the host brings that at its start.
        It learns it from reports, too, but the first look-ups come before these."""
        if self._scheduler is not None:
            self._scheduler.learn_regions(regions)

    def worker(self, setup: DeviceSetup | None = None) -> CacheWorker:
        """The worker role; call once.

        Raises:
            ConfigError: `memory_bytes` is more than this machine lets a process reserve or share.
        """
        spec = self._spec
        records = records_of(spec.groups, self._schema, self._parts, spec.shard, spec.drafts)
        states = None
        if spec.states is not None:
            kinds, tables = spec.states.kinds, spec.states.tables
            states = PagedStates(kinds, tables, list(zip(self._parts, records.parts, strict=True)))
        setup = setup or DeviceSetup()
        self._worker = CacheWorker(self.context, records, self.num_slots, setup, states)
        return self._worker


def _chunk_tokens(spec: EngineSpec, chosen: int | None) -> int:
    """Return the tokens of a chunk: as the operator chose, or what the model's geometry makes it.
    Raises ConfigError if no state would stand where a chunk ends."""
    multiple = spec.chunk_multiple
    if spec.states is None:
        return chosen or default_chunk_tokens(spec.groups, multiple)
    size, groups = spec.states.block_size, spec.states.groups
    if chosen is None:
        return chunk_tokens_with_states(spec.groups, groups, size, multiple)
    if size % chosen:
        divisors = [str(each) for each in range(1, size + 1) if size % each == 0]
        raise ConfigError(
            f"chunk_tokens={chosen} does not divide the {size} tokens after which this engine "
            f"keeps states; use one of {', '.join(divisors)}, or leave the option out"
        )
    return chosen


def records_of(
    groups: tuple[KVGroup, ...],
    schema: RecordSchema,
    parts: Sequence[StatePart],
    shard: RankShard,
    drafts: DraftSpec | None = None,
) -> RankRecords:
    """What a rank holds of records; of drafts, its worker role alone knows."""
    rank, world_size = shard.rank, shard.world_size
    beside = None
    if drafts is not None:
        own = draft_schema(schema, drafts.drafter, drafts.groups, drafts.shard)
        alone = RecordSchema.for_groups(
            namespace=schema.namespace, chunk_tokens=schema.chunk_tokens, groups=drafts.groups
        )
        if own is not None:
            beside = RankRows(drafts.groups, drafts.shard, alone), own
    return RankRecords(
        RankRows(groups, shard, schema),
        [
            RankRows(
                part.groups,
                tensor_parallel_shard(part.groups, rank, world_size),
                part.schema.with_namespace(schema.namespace),
            )
            for part in parts
        ],
        beside,
    )


def _others(store: str | Sequence[str], itself: Listen) -> list[StoreUrl]:
    """Leave this engine out of the peers that the URLs name: a configuration that several engines
    share names all of them. If no URL were left, the URLs stay as they are. Raises ConfigError for
    an invalid URL."""
    tiers = parse_tiers(store)
    return [
        url for url in tiers if not kind_of(url.scheme).is_peer or not itself.is_at(*url.hosts[0])
    ] or tiers


def _nothing() -> None:
    pass


def _while_there(thing: T, gauges: Callable[[T], Gauges]) -> Callable[[], Gauges]:
    """Gauges of a thing that its observer does not keep alive."""
    known = weakref.ref(thing)

    def read() -> Gauges:
        there = known()
        return {} if there is None else gauges(there)

    return read


def _rank_gauges(ranks: RankSlots) -> Gauges:
    return {"ranks_apart": float(ranks.are_apart)}


def _pool_gauges(pool: HostPool) -> Gauges:
    numbers = {
        "total": pool.num_slots,
        "held": pool.num_assigned,
        "in_use": pool.num_taken,
        "lent": pool.loans.num_lent,
    }
    return {f"pool_slots/{state}": number for state, number in numbers.items()}


def _tier_gauges(store: Store, role: str) -> Gauges:
    found: Gauges = {}
    for tier in store.tiers():
        kind, because = tier.because or ("", "")
        place = f"{tier.name}/{role}/{tier.state}/{kind}/{because}"
        found[f"tier_since_seconds/{place}"] = tier.since
        if role == "scheduler":  # workers do not know all that it holds
            stat = tier.stat()
            found[f"store_records/{tier.name}"] = stat.num_records
            found[f"store_used_bytes/{tier.name}"] = stat.used_bytes
            if stat.max_bytes is not None:
                found[f"store_max_bytes/{tier.name}"] = stat.max_bytes
    return found
