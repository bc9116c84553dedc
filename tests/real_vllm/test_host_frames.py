"""In this release of vLLM, the callers of a tier hold what `host_frames` looks for, by its names.

In the sources, so that a rename is a failure of this test before an engine refuses its tiers.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

import pytest

from tests.real_vllm.host import serves_tiers

pytestmark = [serves_tiers(), pytest.mark.filterwarnings("ignore")]


def functions_that_call(source: str, method: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and any(
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == method
            for call in ast.walk(node)
        ):
            yield node


def test_the_connector_that_makes_tiers_is_constructed_with_these_names() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    assert KVConnectorBase_V1.__name__ == "KVConnectorBase_V1"
    assert issubclass(OffloadingConnector, KVConnectorBase_V1)
    names = inspect.signature(OffloadingConnector.__init__).parameters
    assert {"self", "vllm_config", "kv_cache_config"} <= set(names)
    source = textwrap.dedent(inspect.getsource(OffloadingConnector.__init__))
    (init,) = ast.parse(source).body
    changed = {
        node.id
        for node in ast.walk(init)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    assert not changed & {"self", "vllm_config", "kv_cache_config"}


def test_whoever_tells_tiers_of_a_request_has_it_under_this_name() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    found = list(functions_that_call(inspect.getsource(scheduler), "on_new_request"))
    assert found
    for each in found:
        assert "request" in {argument.arg for argument in each.args.args}, each.name
