"""vLLM's model-runner mixin under its own names, over our step driver.

For model runners written around these calls. Where vLLM's mixin reads a process-wide connector,
this one reads `self.kv_connector`; its methods are instance methods for that reason.

Unlike vLLM's mixin, this one runs `wait_for_save` in steps without tokens (a queue drained nowhere
else would stall), saves nothing after a forward that raised, and keeps a connector's faults from
the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

from kvferry.contract.driver import StepDriver
from kvferry.contract.messages import Plan
from kvferry.contract.worker import WorkerRole
from kvferry.errors import ContractError
from kvferry.observe import Observer
from kvferry.v1 import kv_allocation
from kvferry.v1.base import KVConnectorBase_V1
from kvferry.v1.driven import V1Plan, V1WorkerRole
from kvferry.v1.types import KVConnectorOutput, KVConnectorStats, to_v1_output

StepMessage = Any
"""A scheduler's output, with `kv_connector_metadata` (a `KVConnectorMetadata` for a V1 connector, a
`Plan` for a worker role of ours), `finished_req_ids` and `total_num_scheduled_tokens`."""


@dataclass
class ModelRunnerOutput:
    """The part of a model runner's output that this mixin fills."""

    kv_connector_output: KVConnectorOutput | None = None


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput()
"""Shared; never written to."""


class KVConnectorModelRunnerMixin:
    """Drives `self.kv_connector` through the steps of a model runner.

    Either wrap each forward in `maybe_get_kv_connector_output`, and call `kv_connector_no_forward`
    for steps without tokens; or call `maybe_setup_kv_connector`, the forward,
    `maybe_wait_for_kv_save` and `get_finished_kv_transfers`, which ends the step.

    Runs in: worker, on the model runner's thread.

    Attributes:
        kv_connector: a V1 connector built for the worker, or one of our worker roles. With None,
            every call does nothing. Set between steps.
        kv_observer: receives counts of the connector's faults and violations.
        empty_model_runner_output: what a step without tokens returns if its report is empty; a copy
            carries a report. Hosts set an object of their own with the attribute
            `kv_connector_output`.
    """

    kv_connector: KVConnectorBase_V1 | WorkerRole | None = None
    kv_observer: Observer = Observer()
    empty_model_runner_output: ClassVar[Any] = EMPTY_MODEL_RUNNER_OUTPUT

    _kv_driver: StepDriver | None = None
    _kv_driven: KVConnectorBase_V1 | WorkerRole | None = None

    def _driver(self) -> StepDriver | None:
        """The driver of `kv_connector`; a new one if the connector was replaced."""
        if self._kv_driven is not self.kv_connector:
            self._kv_driven = connector = self.kv_connector
            self._kv_driver = None
            if connector is not None:
                role = connector if isinstance(connector, WorkerRole) else V1WorkerRole(connector)
                self._kv_driver = StepDriver(role, self.kv_observer)
        return self._kv_driver

    def _plan(self, scheduler_output: StepMessage) -> Plan:
        metadata = scheduler_output.kv_connector_metadata
        if metadata is None:
            raise ContractError(
                "kv_connector_metadata is None, but the runner has a connector: the scheduler must "
                "call build_connector_meta (or build_plan) in every step"
            )
        if isinstance(metadata, Plan):
            return metadata
        # Hosts before 0.14 do not name preempted requests. `recving` is None because only the
        # connector knows which loads its metadata starts.
        preempted = getattr(scheduler_output, "preempted_req_ids", None)
        return V1Plan(
            metadata=metadata,
            has_tokens=scheduler_output.total_num_scheduled_tokens > 0,
            recving=None,
            preempted=frozenset(preempted or ()),
        )

    def maybe_setup_kv_connector(self, scheduler_output: StepMessage) -> None:
        """Begin a step: bind the metadata, start loads.

        Raises:
            ContractError: no metadata, or the last step was not ended.
        """
        driver = self._driver()
        if driver is not None:
            driver.begin(self._plan(scheduler_output))
            driver.start_load()

    def maybe_wait_for_kv_save(self) -> None:
        """Save after a forward that succeeded. Its blocks may be overwritten when this returns."""
        driver = self._driver()
        if driver is not None:
            driver.save()

    def get_finished_kv_transfers(
        self, scheduler_output: StepMessage
    ) -> tuple[set[str] | None, set[str] | None]:
        """End the step. Return the ids whose sends and whose loads ended; None for an empty set."""
        driver = self._driver()
        if driver is None:
            return None, None
        output = driver.finish(scheduler_output.finished_req_ids)
        return set(output.finished_sending) or None, set(output.finished_recving) or None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counters of the last step that was ended; None if it had none."""
        driver = self._driver()
        return None if driver is None else to_v1_output(driver.output).kv_connector_stats

    def kv_connector_no_forward(
        self, scheduler_output: StepMessage, vllm_config: object | None = None
    ) -> Any:  # noqa: ANN401 - the host's
        """Run a step without tokens. Returns the shared `empty_model_runner_output` if the report
        is empty. Hosts pass `vllm_config`, which is not read."""
        with self.maybe_get_kv_connector_output(scheduler_output) as kv_connector_output:
            pass
        if kv_connector_output is None or kv_connector_output.is_empty():
            return self.empty_model_runner_output
        output = copy.copy(self.empty_model_runner_output)
        output.kv_connector_output = kv_connector_output
        return output

    def maybe_get_kv_connector_output(
        self, scheduler_output: StepMessage
    ) -> AbstractContextManager[KVConnectorOutput | None]:
        """Run a whole step around the forward. Yields an output that is filled when the block is
        left, even by an error; yields None without a connector."""
        if self.kv_connector is None:
            return nullcontext()
        return self._get_kv_connector_output(scheduler_output)

    @contextmanager
    def _get_kv_connector_output(
        self, scheduler_output: StepMessage, wait_for_save: bool = True
    ) -> Generator[KVConnectorOutput, None, None]:
        driver = self._driver()
        if driver is None:
            raise ContractError("there is no connector: use maybe_get_kv_connector_output")
        output = KVConnectorOutput()
        self.maybe_setup_kv_connector(scheduler_output)
        try:
            yield output
            if wait_for_save:
                driver.save()
        finally:
            report = driver.finish(scheduler_output.finished_req_ids)
            vars(output).update(vars(to_v1_output(report)))

    def ensure_kv_transfer_shutdown(self) -> None:
        """Stop the connector and forget it. Idempotent; safe without one."""
        driver, self.kv_connector = self._driver(), None
        if driver is not None:
            driver.close()

    def use_uniform_kv_cache(
        self, attn_groups: kv_allocation.AttentionGroups, cache_dtype: str
    ) -> bool:
        """Whether to allocate with `allocate_uniform_kv_caches` and register its one tensor with
        `register_cross_layers_kv_cache` instead of `register_kv_caches`."""
        connector = self.kv_connector
        return kv_allocation.use_uniform_kv_cache(attn_groups, cache_dtype, connector=connector)

    allocate_uniform_kv_caches = staticmethod(kv_allocation.allocate_uniform_kv_caches)
