"""The base class keeps the names, signatures and defaults that connectors and hosts know."""

from __future__ import annotations

import inspect

import pytest

import kvferry.v1 as v1
from kvferry.errors import ConfigError, ContractError
from kvferry.v1.types import CounterStats
from tests.v1.test_driven import make_config
from tests.v1.test_mixin import Metadata, RecordingV1

# As vLLM 0.12/0.13 has them.
SIGNATURES = {
    "__init__": ["vllm_config", "role", "kv_cache_config"],
    "bind_connector_metadata": ["connector_metadata"],
    "clear_connector_metadata": [],
    "_get_connector_metadata": [],
    "has_connector_metadata": [],
    "register_kv_caches": ["kv_caches"],
    "register_cross_layers_kv_cache": ["kv_cache", "attn_backend"],
    "set_host_xfer_buffer_ops": ["copy_operation"],
    "start_load_kv": ["forward_context", "kwargs"],
    "wait_for_layer_load": ["layer_name"],
    "save_kv_layer": ["layer_name", "kv_layer", "attn_metadata", "kwargs"],
    "wait_for_save": [],
    "get_finished": ["finished_req_ids"],
    "get_block_ids_with_load_errors": [],
    "shutdown": [],
    "get_kv_connector_stats": [],
    "get_handshake_metadata": [],
    "get_num_new_matched_tokens": ["request", "num_computed_tokens"],
    "update_state_after_alloc": ["request", "blocks", "num_external_tokens"],
    "build_connector_meta": ["scheduler_output"],
    "update_connector_output": ["connector_output"],
    "request_finished": ["request", "block_ids"],
    "take_events": [],
    "get_required_kvcache_layout": ["vllm_config"],
    "get_finished_count": [],
    "build_kv_connector_stats": ["data"],
    "set_xfer_handshake_metadata": ["metadata"],
    "build_prom_metrics": [
        "vllm_config", "metric_types", "labelnames", "per_engine_labelvalues",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_parameters_are_those_of_vllm(name):
    parameters = list(inspect.signature(getattr(v1.KVConnectorBase_V1, name)).parameters)
    assert [p for p in parameters if p != "self"] == SIGNATURES[name]


def test_every_method_tells_its_rules():
    documented = {
        name
        for name, member in vars(v1.KVConnectorBase_V1).items()
        if callable(member) and not name.startswith("__") and inspect.getdoc(member)
    }
    public = {
        name
        for name, member in vars(v1.KVConnectorBase_V1).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    assert public <= documented


def test_a0_a_connector_needs_a_transfer_configuration():
    config = make_config()
    config.kv_transfer_config = None

    class Connector(RecordingV1):
        def __init__(self):
            v1.KVConnectorBase_V1.__init__(self, config, v1.KVConnectorRole.WORKER)

    with pytest.raises(ConfigError, match="kv-transfer-config"):
        Connector()


class Derived(RecordingV1):
    """A connector that reads and sets what its base class keeps for it."""

    def kept(self):
        return self._vllm_config, self._kv_transfer_config, self._kv_cache_config, self._role

    def metadata(self):
        return self._get_connector_metadata()


def test_a0_attributes_that_connectors_read():
    connector = Derived()
    config, transfer_config, cache_config, role = connector.kept()
    assert transfer_config is config.kv_transfer_config
    assert cache_config is None
    assert connector.role is role is v1.KVConnectorRole.WORKER
    assert connector.prefer_cross_layer_blocks is False


def test_a2_metadata_is_there_during_a_step_only():
    connector, metadata = Derived(), Metadata()
    with pytest.raises(ContractError, match="no connector metadata is bound"):
        connector.metadata()
    connector.bind_connector_metadata(metadata)
    assert connector.has_connector_metadata()
    assert connector.metadata() is metadata
    connector.clear_connector_metadata()
    assert not connector.has_connector_metadata()


def test_defaults_are_those_that_hosts_expect():
    connector = RecordingV1()
    assert connector.request_finished(None, []) == (False, None)
    assert connector.take_events() == ()
    assert connector.get_finished_count() is None
    assert connector.reset_cache() is None
    assert connector.get_handshake_metadata() is None
    assert connector.build_connector_worker_meta() is None
    assert connector.get_kv_connector_kv_cache_events() is None
    assert connector.get_mem_pool_context() is None
    assert connector.get_loaded_kv_cache_group_ids(None) is None
    assert connector.get_external_cache_hit_sources(None, 3) == {}
    assert connector.register_finished_partial_tail() is False
    assert connector.has_pending_push_work() is connector.has_pending_block_frees() is False
    assert connector.supports_divergent_local_hybrid_hits is False
    assert RecordingV1.requires_piecewise_for_cudagraph({}) is False
    assert RecordingV1.build_kv_connector_stats({}) is None
    assert RecordingV1.build_prom_metrics(make_config(), {}, [], {}) is None


@pytest.mark.parametrize(("role", "required"), [("kv_both", True), ("kv_consumer", False)])
def test_producers_deliver_unless_they_say_otherwise(role, required):
    connector = Derived()
    config, *_ = connector.kept()
    config.kv_transfer_config.kv_role = role
    assert connector.requires_kv_delivery is required


def test_later_hosts_get_results_through_the_older_getter():
    connector = RecordingV1()
    connector.finished = ({"s"}, None)
    assert connector.get_transfer_results({"s"}) == v1.KVConnectorOutput(finished_sending={"s"})


def test_the_layout_is_not_asked_of_the_base_class():
    with pytest.raises(TypeError, match="not of its base"):
        v1.KVConnectorBase_V1.get_required_kvcache_layout(make_config())
    assert RecordingV1.get_required_kvcache_layout(make_config()) is None


def test_handshakes_of_one_stage_go_to_the_older_setter():
    connector, seen = RecordingV1(), []
    connector.set_xfer_handshake_metadata = seen.append
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): "a", (0, 1): "b"})
    assert seen == [{0: "a", 1: "b"}]
    with pytest.raises(ConfigError, match=r"pipeline ranks \[2\]"):
        connector.set_xfer_handshake_metadata_pp_aware({(2, 0): "a"})


def test_supports_hma_takes_a_class_or_an_instance():
    class Hybrid(RecordingV1, v1.SupportsHMA):
        def request_finished_all_groups(self, request, block_ids):
            return False, None

    assert v1.supports_hma(Hybrid)
    assert v1.supports_hma(Hybrid())
    assert not v1.supports_hma(RecordingV1)
    assert not v1.supports_hma(RecordingV1())


@pytest.mark.parametrize(
    "content",
    [
        {"finished_sending": {"r"}}, {"finished_recving": {"r"}}, {"failed_recving": {"r"}},
        {"invalid_block_ids": {0}}, {"kv_connector_stats": CounterStats({"n": 1})},
        {"kv_cache_events": ["e"]}, {"kv_connector_worker_meta": object()},
    ],
)  # fmt: skip
def test_an_output_with_content_is_not_empty(content):
    assert not v1.KVConnectorOutput(**content).is_empty()


def test_an_output_without_content_is_empty():
    output = v1.KVConnectorOutput(kv_connector_stats=CounterStats(), expected_finished_count=3)
    assert output.is_empty()


def test_a_clone_of_stats_counts_on_its_own():
    stats = CounterStats({"n": [1]})
    stats.clone().data["n"].append(2)
    assert stats.data == {"n": [1]}
