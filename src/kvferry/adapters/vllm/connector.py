"""How a connector class for a host is made: `OneRole` on the host's base class."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvferry.adapters.vllm import caches
from kvferry.adapters.vllm.events import EventTranslator
from kvferry.adapters.vllm.host import Host, computes_like_others, cpu_kernels, own_report
from kvferry.adapters.vllm.identity import LoraIdentities, local_model, model_identity
from kvferry.adapters.vllm.items import ItemIdentities
from kvferry.adapters.vllm.metrics import IntervalCounters
from kvferry.adapters.vllm.options import KIND, WHERE, connector_options
from kvferry.adapters.vllm.spec import engine_spec
from kvferry.adapters.vllm.startup import log_start, warn_not_cached
from kvferry.connectors.registry import default_options, open_parts
from kvferry.contract.spec import EngineSpec
from kvferry.errors import ConfigError
from kvferry.v1.base import CarriedMeta, PlanMetadata
from kvferry.v1.facade import HostTypes, OneRole

if TYPE_CHECKING:
    import torch

START_SECONDS = 5.0
"""How long start-up waits for the store to list what it holds; look-ups before that may miss."""


class FerryConnector(OneRole):
    """Prefix reuse through a store, for vLLM; becomes a connector with a host's base class.

    Holds the scheduler role or one rank's worker role. Nothing in it decides or moves bytes.
    """

    host: ClassVar[Host]

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401 - the host's, as all here
        role: Any,  # noqa: ANN401
        kv_cache_config: Any = None,  # noqa: ANN401
    ) -> None:
        """Called by vLLM, once in the scheduler's process and once in each worker.

        Raises:
            ConfigError: options, a model or a parallel configuration that cannot be served; one
                line that says what to change.
        """
        # Before all others, as those of `OneRole`: hooks look at them in every step.
        self._observer = IntervalCounters()
        self._counts = self._observer.sums
        self._translator: EventTranslator | None = None
        groups = (kv_cache_config,) if self.host.base_takes_groups else ()
        super().__init__(vllm_config, role, *groups)
        options = connector_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        version = options.get("weights_version")
        self._lora_identities = LoraIdentities()
        self._item_identities = ItemIdentities(vllm_config, local_model(vllm_config))
        spec = engine_spec(
            vllm_config,
            kv_cache_config,
            model_identity(
                vllm_config, None if version is None else str(version), self.host.load_config
            ),
            carries_worker_meta=self.host.carries_messages,
            publishes=self.host.events is not None and _wants_events(vllm_config),
        )
        is_worker = role.name == "WORKER"
        if not computes_like_others(vllm_config):
            spec = replace(spec, loads=False, saves=False)
            if not is_worker:
                warn_not_cached()
        chunk_tokens = options.get("chunk_tokens", default_options(KIND)["chunk_tokens"])
        kernels = cpu_kernels(vllm_config, {part.block_size for part in spec.table_parts})
        spec = caches.with_layout(spec, kernels, chunk_tokens)
        self._kv_layout = spec.kv_layout
        self._host_config = vllm_config
        self._places: dict[str, int] | None = None  # of the tensors registered, by layer
        self._parts = open_parts(
            KIND, spec, options, self._observer, schedules=not is_worker, where=WHERE
        )
        self._translator = self._make_translator(spec)
        self._cache_hit_source = self._hit_source(self._parts.store.url)
        self.attach(
            role.name,
            None if is_worker else self._parts.scheduler(),
            self._parts.worker() if is_worker else None,
            block_size=self._parts.block_multiple,
            observer=self._observer,
        )
        if not is_worker:
            self._parts.wait_ready(START_SECONDS)
            schema = self._parts.schema
            log_start(spec, self._parts.store, schema.namespace, schema.record_bytes)

    def _make_translator(self, spec: EngineSpec) -> EventTranslator | None:
        if not spec.publishes:
            return None
        in_memory = self._parts.store.url.startswith("memory:")
        return EventTranslator(self.host.events, "CPU" if in_memory else "STORAGE")

    def _hit_source(self, url: str) -> Any:  # noqa: ANN401 - the host's
        sources = self.host.hit_sources
        if sources is None:
            return None
        return sources.HOST if url.startswith("memory:") else sources.DISK

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the layers' tensors.

        Raises:
            ConfigError: vLLM keeps one worker-side connector per process, and another engine in
                this process has it: hits of one would be copied into the blocks of the other.
        """
        places = {name: tensor.data_ptr() for name, tensor in kv_caches.items()}
        if self._places is not None and places != self._places:
            raise ConfigError(
                "another engine in this process uses kvferry, and vLLM keeps one connector per "
                "process: shut that engine down first, or set VLLM_ENABLE_V1_MULTIPROCESSING=1"
            )
        self._places = places
        layers = self._host_config.compilation_config.static_forward_context
        super().register_kv_caches(caches.views(kv_caches, layers, self._kv_layout))

    def handle_preemptions(self, kv_connector_metadata: object) -> None:
        """Nothing to do: saves copy out of the blocks in the step that computed them."""

    def get_kv_connector_stats(self) -> Any:  # noqa: ANN401 - the host's
        # Roles of ours count through the observer alone.
        step = self._step
        if step is None and not self._counts:
            return None
        counts = self._observer.take()
        if step is None or self.host_types.carries_worker_meta:
            return self.host_types.make_stats(counts, None) if counts else None
        # On a host without messages they ride along. Such a host asks the scheduler's half only if
        # a worker has something: so there is something, empty maybe, whenever there is a plan.
        meta = step.output.meta
        return self.host_types.make_stats(counts, None if meta is None else CarriedMeta(meta))

    # Scheduler side.

    def take_events(self) -> Iterable[Any]:
        if self._translator is None:
            return ()
        return tuple(self._translator.translate(super().take_events()))

    def get_finished_count(self) -> int | None:
        return None

    def _lora_identity(self, lora_request: object) -> str | None:
        return self._lora_identities(lora_request)

    def _item_identity(self, identifier: str) -> str | None:
        return self._item_identities(identifier)

    def shutdown(self) -> None:
        super().shutdown()
        self._lora_identities.close()
        self._parts.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: object) -> str | None:
        """None: any layout is read and written as it is."""
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: nothing is done around single layers on devices that run graphs."""
        return False


def _wants_events(vllm_config: Any) -> bool:  # noqa: ANN401 - the host's
    config = getattr(vllm_config, "kv_events_config", None)
    return config is not None and bool(config.enable_kv_cache_events)


def make_connector_class(
    host: Host, stats: type[Any] | None, prom_metrics: type[Any] | None
) -> type[Any]:
    """`KVFerryConnector` for `host`.

    Args:
        host: what to build on.
        stats: `make_stats_class(host.stats)`, importable so that it crosses processes, or None.
        prom_metrics: `make_prom_class(host.prom_metrics)`, or None.
    """

    def make_stats(counts: dict[str, float], meta: object) -> Any:  # noqa: ANN401 - the host's
        if stats is None:
            return None
        made = stats(data=counts)
        if meta is not None:
            made.carried_meta = meta
        return made

    def make_results(sending: set[str], recving: set[str], failed: set[str]) -> Any:  # noqa: ANN401
        if host.results is None:
            raise ConfigError(f"vLLM {host.version} does not ask for transfer results")
        return host.results(
            finished_sending=sending, finished_recving=recving, failed_recving=failed
        )

    class KVFerryConnector(FerryConnector, *host.bases):  # type: ignore[misc]
        host_types = HostTypes(
            make_stats=make_stats,
            make_results=make_results,
            no_results=None if host.results is None else _nothing(host.results),
            carries_worker_meta=host.worker_meta is not None,
        )

        @classmethod
        def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:  # noqa: ANN401
            return None if stats is None else stats(data=dict(data or {}))

        @classmethod
        def build_prom_metrics(
            cls,
            vllm_config: Any,  # noqa: ANN401
            metric_types: dict[Any, Any],
            labelnames: list[str],
            per_engine_labelvalues: dict[int, list[object]],
        ) -> Any:  # noqa: ANN401
            if prom_metrics is None:
                return None
            try:
                return prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
            except ValueError as error:  # prometheus_client's
                # Early hosts ask once for each of several connectors in one `MultiConnector`.
                if "Duplicated timeseries" not in str(error):
                    raise
                return None  # the ones of the first are there

    KVFerryConnector.host = host
    if host.worker_meta is None:
        KVFerryConnector.update_connector_output = _update_from_stats  # type: ignore[assignment, method-assign]
    _adopt_messages(host)
    return KVFerryConnector


def _update_from_stats(self: FerryConnector, connector_output: Any) -> None:  # noqa: ANN401
    """`update_connector_output` on hosts where messages from workers ride along on counters."""
    OneRole.update_connector_output(self, own_report(connector_output, type(self).__name__))


def _nothing(results: Callable[..., Any]) -> Any:  # noqa: ANN401 - the host's
    ids: frozenset[str] = frozenset()
    return results(finished_sending=ids, finished_recving=ids, failed_recving=ids)


def _adopt_messages(host: Host) -> None:
    """Let a host that asks what our messages are hear that they are its own kind."""
    host.metadata.register(PlanMetadata)
    if host.worker_meta is not None:
        host.worker_meta.register(CarriedMeta)
