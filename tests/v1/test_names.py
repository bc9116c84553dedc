"""Every public name of the four documents of vLLM that this package grew from is in `kvferry.v1`,
with the members that they name. Private names, which only their own modules use, are not listed."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import kvferry.v1
from tests.v1.test_base import SIGNATURES

MIXIN = {
    "KVConnectorModelRunnerMixin": [
        "maybe_setup_kv_connector",
        "ensure_kv_transfer_shutdown",
        "maybe_wait_for_kv_save",
        "get_finished_kv_transfers",
        "kv_connector_no_forward",
        "maybe_get_kv_connector_output",
        "_get_kv_connector_output",
        "get_kv_connector_stats",
        "use_uniform_kv_cache",
        "allocate_uniform_kv_caches",
    ],
    # What it takes from other modules and hands out.
    "KVConnectorOutput": [
        "finished_sending",
        "finished_recving",
        "invalid_block_ids",
        "kv_connector_stats",
        "is_empty",
    ],
    "KVConnectorStats": ["aggregate", "reduce", "is_empty"],
}

BASE = {
    "CopyBlocksOp": [],
    "SupportsHMA": ["request_finished_all_groups"],
    "supports_hma": [],
    "KVConnectorRole": ["SCHEDULER", "WORKER"],
    "KVConnectorHandshakeMetadata": [],
    "KVConnectorMetadata": [],
    "KVConnectorBase_V1": [*SIGNATURES, "prefer_cross_layer_blocks", "role"],
}

UTILITIES = {
    "KVOutputAggregator": ["aggregate", "from_connector"],
    "EngineId": [],
    "TpKVTopology": [
        "tp_rank",
        "remote_tp_size",
        "is_mla",
        "total_num_kv_heads",
        "attn_backend",
        "engine_id",
        "remote_block_size",
        "is_kv_layout_blocks_first",
        "split_k_and_v",
        "tp_size",
        "block_size",
        "tp_ratio",
        "block_size_ratio",
        "tp_ratio_from_engine_id",
        "block_size_ratio_from_engine_id",
        "is_kv_replicated",
        "replicates_kv_cache",
        "get_target_remote_ranks",
        "get_target_remote_ranks_from_engine_id",
    ],
    "copy_kv_blocks": [],
    "get_current_attn_backend": [],
    "get_kv_connector_cache_layout": [],
    "kv_postprocess_blksize_and_layout_on_receive": [],
    "kv_postprocess_blksize_on_receive": [],
    "kv_postprocess_layout_on_receive": [],
    "yield_req_data": [],
}

SHARED_STORAGE = {
    "ReqMeta": ["token_ids", "slot_mapping", "is_store", "make_meta"],
    "SharedStorageConnectorMetadata": ["requests", "add_request"],
    "SharedStorageConnector": [
        "start_load_kv",
        "wait_for_layer_load",
        "save_kv_layer",
        "wait_for_save",
        "get_num_new_matched_tokens",
        "update_state_after_alloc",
        "build_connector_meta",
    ],
    "align_to_block_size": [],
}

NAMES = MIXIN | BASE | UTILITIES | SHARED_STORAGE


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_public_with_its_members(name):
    assert name in kvferry.v1.__all__
    found = getattr(kvferry.v1, name)
    fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
    known = {*dir(found), *(field.name for field in fields)}
    assert [member for member in NAMES[name] if member not in known] == []


HOSTS_NAMES = NAMES.keys() | {"KVFerryConnector", "KVFerryStorage", "KVFerryTier", "StoredKV"}
"""With those of ours that hosts are given."""

KNOWS_HOSTS = (
    "v1/",
    "adapters/",
    "doctor/findings.py",  # reads what vLLM is started with
    "cli/doctor.py",  # says what `StoredKV` would do with a model
    "engine/model.py",  # refuses a model that `StoredKV` serves
    "engine/model_config.py",  # says which models `StoredKV` serves
    "testing/connector/",  # runs connectors as vLLM does
)
"""Parts of the package that may know these names."""


def names_in(source: str) -> set[str]:
    """All names that code defines, reads or imports, and all words of its strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
                found.add(name)
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                found.add(name)
            case ast.Constant(value=str(text)):
                found.update(re.findall(r"\w+", text))
    return found


def test_nothing_below_knows_these_names():
    root = Path(kvferry.__file__).parent
    below = {
        path.relative_to(root).as_posix(): names_in(path.read_text("utf-8"))
        for path in root.rglob("*.py")
        if not path.relative_to(root).as_posix().startswith(KNOWS_HOSTS)
    }
    assert len(below) > 100
    assert {path: names & HOSTS_NAMES for path, names in below.items() if names & HOSTS_NAMES} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from kvferry.v1 import KVConnectorRole",
        "role = types.KVConnectorRole.WORKER",
        "class KVConnectorRole: ...",
        "def copy_kv_blocks(): ...",
        "log.warning('use KVFerryConnector on vLLM')",
    ],
)
def test_a_name_is_found(source):
    assert len(names_in(source) & HOSTS_NAMES) == 1
