"""A connector that keeps nothing: what vLLM takes for having one at all.

Every hook returns at once, most of them in vLLM's base class. Loaded by vLLM, by name.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.outputs import KVConnectorOutput


class NoOpConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Finds nothing, stores nothing."""

    _metadata = KVConnectorMetadata()
    _results = KVConnectorOutput()
    requires_kv_delivery = False

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """Bound to nothing: vLLM then leaves out the hooks around layers."""

    def clear_connector_metadata(self) -> None:
        pass

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:  # noqa: ANN401
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: object) -> Any:  # noqa: ANN401
        return self._results

    def get_num_new_matched_tokens(self, request: object, num_computed_tokens: int) -> Any:  # noqa: ANN401
        return 0, False

    def update_state_after_alloc(self, *args: object) -> None:
        pass

    def build_connector_meta(self, scheduler_output: object) -> Any:  # noqa: ANN401
        return self._metadata

    def request_finished_all_groups(self, request: object, block_ids: object) -> Any:  # noqa: ANN401
        return False, None
