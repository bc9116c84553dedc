"""Options of the first version are refused, each in one line that says what to do instead."""

from __future__ import annotations

from functools import partial

import pytest

from kvferry.connectors.registry import create_roles, create_worker, open_parts
from kvferry.connectors.shared_storage import SharedStorageConnector
from kvferry.connectors.shared_storage.config import SharedStorageConfig
from kvferry.contract.spec import EngineSpec
from kvferry.engine import LLM
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity
from kvferry.observe import Counters
from kvferry.testing.host import make_groups
from kvferry.testing.models import make_tiny_model
from kvferry.topology import tensor_parallel_shard
from kvferry.v1.types import KVConnectorRole
from tests.connectors.shared_storage.test_v1 import make_config

OLD = [
    ({"staging_bytes": "1GiB"}, "memory_bytes"),
    ({"keep_bytes": 0}, "memory_bytes"),
    ({"promise": "in_hand"}, "leave it out"),
    ({"promise": "index"}, "leave it out"),
    ({"staging_bytes": 1 << 30, "memory_bytes": 1 << 30}, "memory_bytes"),
]
CASES = pytest.mark.parametrize(("old", "instead"), OLD)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def assert_says(error: BaseException, old: dict[str, object], instead: str) -> None:
    (said,) = str(error).splitlines()
    assert repr(next(iter(old))) in said
    assert instead in said
    assert "did you mean" not in said


@CASES
@pytest.mark.parametrize(
    "make", [create_roles, create_worker, partial(open_parts, where="options", schedules=True)]
)
def test_by_the_connector(tmp_path, make, old, instead):
    groups = make_groups()
    spec = EngineSpec(
        identity=ModelIdentity(weights=bytes(32), config={}),
        groups=groups,
        shard=tensor_parallel_shard(groups, 0, 1),
    )
    options = {"store": f"file://{tmp_path}/store", **old}
    with pytest.raises(ConfigError) as refused:
        make("shared_storage", spec, options, Counters())
    assert_says(refused.value, old, instead)
    assert list(tmp_path.iterdir()) == []


@CASES
def test_by_the_embedded_engine(tmp_path, model_dir, old, instead):
    with pytest.raises(ConfigError) as refused:
        LLM(model_dir, store=f"file://{tmp_path}/store", connector_options=old)
    assert_says(refused.value, old, instead)
    assert list(tmp_path.iterdir()) == []


@CASES
@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_by_the_one_class_shape(tmp_path, model_dir, role, old, instead):
    config = make_config(model_dir, store=f"file://{tmp_path}/store", **old)
    with pytest.raises(ConfigError) as refused:
        SharedStorageConnector(config, role)
    assert_says(refused.value, old, instead)
    assert list(tmp_path.iterdir()) == []


def test_what_replaces_them_is_an_option():
    fields = SharedStorageConfig.__dataclass_fields__
    assert "memory_bytes" in fields
    assert not {"staging_bytes", "keep_bytes", "promise"} & fields.keys()
