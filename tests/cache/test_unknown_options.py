"""Options of the first version and unknown ones are refused in one line that says what to do
instead, before anything is made."""

from __future__ import annotations

import pytest

from kvferry.cache.build import PrefixCache
from kvferry.contract.spec import EngineSpec
from kvferry.engine import LLM
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.layout.shards import tensor_parallel_shard
from kvferry.observe import Counters
from kvferry.testing.models import make_tiny_model
from kvferry.v1 import SharedStorageConnector
from kvferry.v1.types import KVConnectorRole
from tests.cache.hosts import make_groups
from tests.v1.test_shared_storage import make_config

CASES = pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"memory_byte": 0}, "unknown option 'memory_byte'; did you mean 'memory_bytes'?"),
    ],
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def assert_says(error: BaseException, said: str) -> None:
    (line,) = str(error).splitlines()
    assert said in line


@CASES
@pytest.mark.parametrize("schedules", [False, True])
def test_by_the_connector(tmp_path, schedules, options, said):
    groups = make_groups()
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
    )
    options = {"store": f"file://{tmp_path}/store", **options}
    with pytest.raises(ConfigError) as refused:
        PrefixCache(spec, options, Counters(), has_scheduler=schedules)
    assert_says(refused.value, said)
    assert list(tmp_path.iterdir()) == []


@CASES
def test_by_the_embedded_engine(tmp_path, model_dir, options, said):
    with pytest.raises(ConfigError) as refused:
        LLM(model_dir, store=f"file://{tmp_path}/store", connector_options=options)
    assert_says(refused.value, said)
    assert list(tmp_path.iterdir()) == []


@CASES
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_by_the_one_class_shape(tmp_path, model_dir, role, options, said):
    config = make_config(model_dir, store=f"file://{tmp_path}/store", **options)
    with pytest.raises(ConfigError) as refused:
        SharedStorageConnector(config, role)
    assert_says(refused.value, said)
    assert list(tmp_path.iterdir()) == []
