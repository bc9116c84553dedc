"""The connector for vLLM, without vLLM's base class: `OneRole` plus options and start-up log."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakValueDictionary

from kvferry.adapters.vllm.drafts import draft_layers, draft_spec, views_with_drafts
from kvferry.adapters.vllm.events import EventTranslator
from kvferry.adapters.vllm.host import (
    Host,
    computes_otherwise,
    conv_state_layout,
    cpu_kernels,
    needs_all_tokens,
    own_report,
    platform_name,
    shares_handshake,
)
from kvferry.adapters.vllm.layers import Layer, refuse_stages_beside_others, stages_of
from kvferry.adapters.vllm.metrics import NOW
from kvferry.adapters.vllm.request_identity import ItemIdentities, LoraIdentities
from kvferry.adapters.vllm.spec import engine_spec, spec_of_workers
from kvferry.adapters.vllm.stages import find_layers
from kvferry.adapters.vllm.states import identity_with_states, served_states
from kvferry.cache.build import PrefixCache
from kvferry.cache.config import CacheConfig
from kvferry.cache.epoch import CacheIdentity
from kvferry.cache.messages import SlotRegion
from kvferry.config import build_config, format_size, unknown
from kvferry.contract.faults import HookFaults
from kvferry.contract.messages import LookupMiss
from kvferry.contract.spec import EngineSpec, Mode, StateSpec
from kvferry.errors import ConfigError
from kvferry.filesystem import user_cache
from kvferry.identity import model_identity
from kvferry.keys import ModelIdentity
from kvferry.observe import Counters
from kvferry.store.kinds import is_private
from kvferry.v1.facade import OneRole
from kvferry.v1.host import CLIENT_OPTIONS, HostRequests
from kvferry.v1.late_weights import NO_DIGEST, LateWeights, begin_hashing
from kvferry.v1.running_model import model_files, running_model

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.kvferry")
"""A child of vLLM's logger, to inherit its handlers and level."""

WHERE = "kv_connector_extra_config"

DEFAULT_MAX_BYTES = "10GiB"
"""Quota of the default store."""

START_SECONDS = 5.0
"""How long start-up waits for the store to list its records; look-ups before that may miss."""

GAUGE_SECONDS = 1.0
"""Seconds between two reports of gauges."""


class _Described(NamedTuple):
    """What a worker tells the scheduler's half at the start."""

    spec: EngineSpec
    region: SlotRegion | None
    """Where its slots are; None if it has none."""


class FerryConnector(OneRole):
    """Prefix reuse through a store, for vLLM. A subclass adds the host's base class, and sets the
    class's attributes.

    Holds the scheduler role or one rank's worker role, and delegates all decisions and transfers.

    Attributes:
        host: types of the vLLM that constructs it.
        stats_class: a `metrics.Stats`, importable: its objects cross processes.
        prom_class: a `metrics.PromMetrics`.
    """

    host: ClassVar[Host]
    stats_class: ClassVar[type[Any]]
    prom_class: ClassVar[type[Any]]

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - the host's, as all here
        role: Any,  # noqa: ANN401
        kv_cache_config: Any = None,  # noqa: ANN401
    ) -> None:
        """Called by vLLM, once in the scheduler's process and once in each worker.

        Raises:
            ConfigError: options, a model or a parallel configuration that cannot be served.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        log_as(logging.getLogger("vllm"), logging.getLogger("kvferry"))
        self._gauges_at = 0.0
        self._lora_identities = LoraIdentities()
        self._host_config = vllm_config
        self._weights = LateWeights()
        self._kv_caches: dict[str, torch.Tensor] = {}  # the host's, as registered
        self._is_worker = role.name == "WORKER"
        # First of all that may be refused: other ranks wait for what this one says.
        self._layers = find_layers(
            vllm_config,
            kv_cache_config,
            platform_name(),
            self.host.exchange,
            is_worker=self._is_worker,
        )
        self._states = self._served_states(kv_cache_config)
        self._draft_layers: list[Layer] = []
        if self._is_worker and self._layers and self._states is None:
            self._draft_layers = draft_layers(
                vllm_config, kv_cache_config, self._layers, platform_name()
            )
        self._options = connector_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._hands_over, self._client_options = take_rules(self._options)
        self._step_back_beside_another()
        self._open(self._spec())
        if not self._is_worker and not self._awaits_stages:
            self._tell_start()
        if self._hands_over and not self._is_worker:
            _ANSWERING[self._engine_id] = self

    @property
    def _engine_id(self) -> str:
        """Of the engine; children of one `MultiConnector` have the same."""
        return str(getattr(self._host_config.kv_transfer_config, "engine_id", id(self)))

    def _step_back_beside_another(self) -> None:
        """Leave requests' fields to another kvferry of this engine. Two that answer one request end
        the engine: `MultiConnector` refuses answers with equal keys."""
        if self._hands_over and not self._is_worker and self._engine_id in _ANSWERING:
            self._hands_over = False
            logger.warning(
                "kvferry: another kvferry of this engine hands requests over and explains them, so "
                'this one does neither; set "handover": false for it'
            )

    def _served_states(self, kv_cache_config: Any) -> StateSpec | None:  # noqa: ANN401
        if self._layers is None:
            return None
        return served_states(
            self._host_config,
            kv_cache_config,
            self._layers,
            dim_first=conv_state_layout() == "DS",
            hands_off=self.host.hands_off_states,
        )

    @property
    def _num_stages(self) -> int:
        return stages_of(self._host_config.parallel_config)

    @property
    def _awaits_stages(self) -> bool:
        """Whether this is a scheduler's half that has yet to hear of all pipeline stages."""
        return self._num_stages > 1 and not self._is_worker

    def _spec(self) -> EngineSpec:
        """Describe this engine as this half sees it. All that can be refused without reading the
        weights is."""
        config = self._host_config
        options = build_config(CacheConfig, self._options, where=WHERE)
        sizes = {layer.block_size for layer in self._layers or ()}
        sizes = sizes or {config.cache_config.block_size}
        spec = engine_spec(
            config,
            self._layers,
            cpu_kernels(config, sizes),
            options.chunk_tokens,
            partial(self._identity, options.weights_version),
            self._states,
        )
        if self._why_off or self._awaits_stages:
            return replace(spec, mode=Mode.OFF)
        drafts = draft_spec(config, self._draft_layers, spec, cpu_kernels(config, sizes))
        return replace(spec, drafts=drafts)

    def _identity(self, weights_version: str | None) -> ModelIdentity:
        running = running_model(self._host_config, self.host.load_config)
        identity = model_identity(running, weights_version, self._weights.hashed)
        if self._states is None:
            return identity
        return identity_with_states(identity, platform_name())

    @property
    def _why_off(self) -> str:
        """Why nothing of this model is loaded or saved, whatever requests ask for; or empty."""
        if self._layers is not None and not self._layers:
            return "it keeps no KV (as encoders and most embedders do), so there is nothing to do"
        return computes_otherwise(self._host_config)

    def _open(self, spec: EngineSpec) -> None:
        """Open the cache, and take this half's role of it."""
        self._observer = Counters()
        self._faults = HookFaults(type(self).__name__, self._observer)
        self._cache = PrefixCache(
            spec, self._options, self._observer, where=WHERE, has_scheduler=not self._is_worker
        )
        is_off = spec.mode is Mode.OFF
        if not (is_off or self._cache.identity.first) and self._weights.found is not None:
            name = partial(_name, self._cache.identity, self._faults)
            self._weights.found.add_done_callback(name)
        in_memory = is_private(self._cache.store.url)
        self._translator: EventTranslator | None = None
        if spec.host_publishes_events:
            self._translator = EventTranslator(self.host.events, "CPU" if in_memory else "STORAGE")
        if self.host.hit_sources is not None:
            sources = self.host.hit_sources
            self._cache_hit_source = sources.HOST if in_memory else sources.DISK
        config = self._host_config
        requests = HostRequests(
            self._lora_identities,
            ItemIdentities(config, model_files(config).find()),
            hands_over=self._hands_over,
            drafts=getattr(config, "speculative_config", None) is not None,
            loads=not needs_all_tokens(config),
            states=self._states,
        )
        requests.client_options = self._client_options
        self.attach(
            self._cache.worker() if self._is_worker else self._cache.scheduler(log=logger),
            block_size=self._cache.block_multiple,
            observer=self._observer,
            requests=requests,
        )

    def _tell_start(self) -> None:
        """Begin to schedule: wait for the store, and log what is served."""
        self._cache.wait_ready(START_SECONDS)
        no_load = needs_all_tokens(self._host_config)
        if self._why_off:
            logger.warning("kvferry is off for this model: %s", self._why_off)
        elif no_load:
            logger.warning("kvferry: this engine only stores, and loads nothing: %s", no_load)
        log_start(self._cache)

    # The start, after both halves were constructed. vLLM's scheduler sees less of the model than
    # its workers: its half takes their description before the first request.

    def get_handshake_metadata(self) -> _Described | None:
        if not shares_handshake(self):
            return _Described(self._cache.spec, self._cache.region)
        refuse_stages_beside_others(self._host_config.parallel_config)
        return None

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take the workers' description of the model, and open the cache again if it is another.

        Raises:
            ConfigError: the workers disagree, or what they describe cannot be served.
        """
        described = [each for each in metadata.values() if isinstance(each, _Described)]
        spec = spec_of_workers(self._cache.spec, [each.spec for each in described])
        if spec is not None:
            if self._num_stages == 1:
                logger.info(
                    "kvferry: the scheduler of vLLM sees less of this model than its workers"
                )
            self._scheduler.role.close()
            self._cache.close()
            self._open(replace(spec, drafts=None))  # which workers alone know
            self._tell_start()
        self._cache.learn_regions(each.region for each in described if each.region is not None)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        self.set_xfer_handshake_metadata(dict(enumerate(metadata.values())))

    # The host's types.

    def make_results(
        self, sending: AbstractSet[str], recving: AbstractSet[str], failed: AbstractSet[str]
    ) -> Any:  # noqa: ANN401
        assert self.host.results is not None, "only hosts with this type ask for it"
        return self.host.results(
            finished_sending=sending, finished_recving=recving, failed_recving=failed
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> None:  # noqa: ANN401
        """Any. vLLM asks before it measures memory and compiles, which leaves time to hash."""
        begin_hashing(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
        return cls.stats_class(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,  # noqa: ANN401
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:  # noqa: ANN401
        try:
            return cls.prom_class(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        except ValueError as error:  # prometheus_client's
            # Early hosts call this once for each connector of a `MultiConnector`; the first call
            # has already registered the metrics.
            if "Duplicated timeseries" not in str(error):
                raise
            return None

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the layers' tensors.

        Raises:
            ConfigError: another engine in this process already uses vLLM's only worker-side
                connector; hits of this engine would be copied into that one's blocks.
        """
        if self._kv_caches and _addresses(kv_caches) != _addresses(self._kv_caches):
            raise ConfigError(
                "another engine in this process uses kvferry, and vLLM keeps one connector per "
                "process: shut that engine down first, or set VLLM_ENABLE_V1_MULTIPROCESSING=1"
            )
        self._kv_caches = dict(kv_caches)
        if self._layers is not None and not self._layers:
            return
        modules = self._host_config.compilation_config.static_forward_context
        layout = self._cache.spec.kv_layout
        views = views_with_drafts(
            kv_caches, modules, self._layers or (), self._draft_layers, layout
        )
        super().register_kv_caches(views)

    # For the sleep mode of vLLM 0.33 and later: between `unregister_kv_caches` and
    # `restore_kv_caches`, the tensors' memory is not mapped. Their addresses stay the same.

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        return True

    def unregister_kv_caches(self) -> None:
        self._worker.role.unregister_kv_caches()

    def restore_kv_caches(self) -> None:
        if self._kv_caches:
            self.register_kv_caches(self._kv_caches)

    def get_kv_connector_stats(self) -> Any:  # noqa: ANN401 - the host's
        # kvferry's roles count through the observer only.
        counted: dict[str, Any] = dict(self._observer.pop_all())
        if counted and time.monotonic() >= self._gauges_at:
            self._gauges_at = time.monotonic() + GAUGE_SECONDS
            counted[NOW] = self._observer.gauges()
        if self._step is None or self.host.worker_meta is not None:
            return self.stats_class(data=counted) if counted else None
        # Hosts without a field for worker messages carry them on the stats. They ask the scheduler
        # for stats only if a worker returned some, so a worker returns some in every step with a
        # plan.
        stats = self.stats_class(data=counted)
        stats.carried_meta = self._step.output.meta
        return stats

    # Scheduler side.

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401 - the host's
        if self.host.worker_meta is None:
            connector_output = own_report(connector_output, type(self).__name__)
        super().update_connector_output(connector_output)

    def take_events(self) -> Iterable[Any]:
        if self._translator is None:
            return ()
        return self._translator.translate(super().take_events())

    def shutdown(self) -> None:
        super().shutdown()
        if _ANSWERING.get(self._engine_id) is self:
            del _ANSWERING[self._engine_id]
        self._lora_identities.close()
        self._cache.close()


def _name(identity: CacheIdentity, faults: HookFaults, found: Future[bytes]) -> None:
    """Take the digest of weights that were hashed after the start. Runs on the thread that did
    that, which logged an error."""
    is_named = found.exception() is None and faults.run(
        identity.name, found.result(), then="nothing is loaded or saved"
    )
    if is_named and identity.first:  # else the cache was closed before, as for another description
        logger.info("kvferry: namespace %s", identity.first.hex()[:16])
    elif not is_named:
        identity.stop(NO_DIGEST, LookupMiss.HASHING)


_ANSWERING: WeakValueDictionary[str, FerryConnector] = WeakValueDictionary()
"""By engine of this process, the connector that answers the fields of requests."""


def _addresses(kv_caches: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in kv_caches.items()}


# --- options --------------------------------------------------------------------------------------


def connector_options(extra: object) -> dict[str, Any]:
    """Return the connector's options from `kv_connector_extra_config`, with a default store. The
    connector's constructor checks their names and types.

    Raises:
        ConfigError: `extra` is not an object, or no store is given and no home directory found.
    """
    if extra is not None and not isinstance(extra, Mapping):
        raise ConfigError(f"{WHERE} is a {type(extra).__name__}, not an object")
    options = dict(extra or {})
    # The store's name in configurations of vLLM's ExampleConnector, once SharedStorageConnector.
    path = options.pop("shared_storage_path", None)
    if "store" not in options:
        options["store"] = _default_store() if path is None else Path(path).absolute().as_uri()
    return options


def take_rules(options: dict[str, Any]) -> tuple[bool, frozenset[str]]:
    """Take out of the connector's options those about fields of requests: whether it hands requests
    over, and which options clients may use.

    Raises:
        ConfigError: one of them is of another form, or names an unknown option.
    """
    hands_over = options.pop("handover", True)
    if not isinstance(hands_over, bool):
        raise ConfigError(f"{WHERE}: handover is {hands_over!r}; it must be true or false")
    allowed = options.pop("client_options", sorted(CLIENT_OPTIONS))
    if not isinstance(allowed, list | tuple):
        raise ConfigError(
            f"{WHERE}: client_options is {allowed!r}; it must be a list of options of requests, "
            'such as ["store", "explain"], or [] for none'
        )
    for name in allowed:
        if not isinstance(name, str) or name not in CLIENT_OPTIONS:
            said = unknown("option of requests", name, CLIENT_OPTIONS)
            raise ConfigError(f"{WHERE}: client_options: {said}")
    return hands_over, frozenset(allowed)


def _default_store() -> str:
    """Return a URL in this user's cache directory, where no other user can write."""
    try:
        root = user_cache()
    except ConfigError as error:
        raise ConfigError(
            "no store is configured and no home directory was found for the default; set "
            '"store": "file:///absolute/directory?max_bytes=100GiB"'
        ) from error
    return f"{(root / 'kvferry' / 'kv').as_uri()}?max_bytes={DEFAULT_MAX_BYTES}"


# --- the log --------------------------------------------------------------------------------------


def log_as(host: logging.Logger, ours: logging.Logger) -> None:
    """Give `ours` the handlers and the level of the host's logger, unless `ours` has its own. At
    debug, the answer to each request is logged."""
    if not ours.handlers and ours.level == logging.NOTSET and host.handlers:
        ours.handlers = list(host.handlers)
        ours.setLevel(host.getEffectiveLevel())
        ours.propagate = host.propagate


# --- the log of the start -------------------------------------------------------------------------


def log_start(cache: PrefixCache) -> None:
    """Log store, namespace and layout, and how many tokens are held and computed at once."""
    store, schema, spec = cache.store, cache.schema, cache.spec
    stat = store.stat()
    logger.info(
        "kvferry: store %s with %d records, %s of %s; namespace %s; chunks of %d tokens, %s; %d KV "
        "groups in %d block tables, layout %s; %s",
        stat.url,
        stat.num_records,
        format_size(stat.used_bytes),
        "no quota" if stat.max_bytes is None else format_size(stat.max_bytes),
        cache.identity.first.hex()[:16] or "not known yet",
        schema.chunk_tokens,
        format_size(schema.record_bytes),
        len(spec.groups),
        len({part.table for part in spec.table_parts}),
        spec.kv_layout,
        _capacities(cache),
    )


def _capacities(cache: PrefixCache) -> str:
    chunk_tokens, max_bytes = cache.schema.chunk_tokens, cache.store.stat().max_bytes
    found = [f"memory holds {cache.num_slots * chunk_tokens} tokens"]
    if max_bytes is not None:
        found.append(f"the store {max_bytes // cache.schema.record_bytes * chunk_tokens}")
    states = cache.context.states
    if states is not None:
        every, size = states.every * chunk_tokens, states.num_parts * states.record_bytes
        found.append(
            f"a recurrent state after every {every} tokens has {format_size(size)}, for engines "
            f"with --block-size {every}"
        )
    if cache.spec.step_tokens is not None:
        found.append(f"a step computes {cache.spec.step_tokens}")
    return ", ".join(found)
