"""Unknown options are refused in one line that names them, before anything is made."""

from __future__ import annotations

from functools import partial

import pytest

from kvferry.connectors.registry import create_roles, create_worker, open_parts
from kvferry.connectors.shared_storage import SharedStorageConnector
from kvferry.contract.spec import EngineSpec
from kvferry.engine import LLM
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.observe import Counters
from kvferry.testing.models import make_tiny_model
from kvferry.topology import tensor_parallel_shard
from kvferry.v1.types import KVConnectorRole
from tests.connectors.shared_storage.hosts import make_groups
from tests.connectors.shared_storage.test_v1 import make_config

OLD = {"keep_bytes": 0}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def assert_says(error: BaseException) -> None:
    (said,) = str(error).splitlines()
    assert "unknown option 'keep_bytes'; did you mean 'memory_bytes'?" in said


@pytest.mark.parametrize(
    "make", [create_roles, create_worker, partial(open_parts, where="options", schedules=True)]
)
def test_by_the_connector(tmp_path, make):
    groups = make_groups()
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
    )
    options = {"store": f"file://{tmp_path}/store", **OLD}
    with pytest.raises(ConfigError) as refused:
        make("shared_storage", spec, options, Counters())
    assert_says(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_by_the_embedded_engine(tmp_path, model_dir):
    with pytest.raises(ConfigError) as refused:
        LLM(model_dir, store=f"file://{tmp_path}/store", connector_options=OLD)
    assert_says(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_by_the_one_class_shape(tmp_path, model_dir, role):
    config = make_config(model_dir, store=f"file://{tmp_path}/store", **OLD)
    with pytest.raises(ConfigError) as refused:
        SharedStorageConnector(config, role)
    assert_says(refused.value)
    assert list(tmp_path.iterdir()) == []
