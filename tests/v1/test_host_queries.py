"""What a host's configuration says about layout and backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.errors import ConfigError, LayoutError
from kvferry.v1 import get_current_attn_backend, get_kv_connector_cache_layout
from kvferry.v1.utilities import CACHE_LAYOUTS


class WantsHND:
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config):
        return vllm_config.wish


def make_config(*, wish="HND", connector="WantsHND", module=None, transfer=True):
    config = SimpleNamespace(kv_connector=connector, kv_connector_module_path=module)
    return SimpleNamespace(kv_transfer_config=config if transfer else None, wish=wish)


@pytest.mark.parametrize("layout", CACHE_LAYOUTS)
def test_the_connectors_wish(layout):
    assert get_kv_connector_cache_layout(make_config(wish=layout), WantsHND) == layout


def test_the_class_may_be_found_by_its_module():
    assert get_kv_connector_cache_layout(make_config(module=__name__)) == "HND"


@pytest.mark.parametrize(
    ("config", "connector"),
    [(None, None), (make_config(transfer=False), WantsHND), (make_config(wish=None), WantsHND)],
)
def test_without_a_wish_it_is_nhd(config, connector):
    assert get_kv_connector_cache_layout(config, connector) == "NHD"


def test_a_layout_that_no_host_knows_is_refused():
    with pytest.raises(LayoutError, match="wants KV layout 'DNH'; known: NHD, HND"):
        get_kv_connector_cache_layout(make_config(wish="DNH"), WantsHND)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (make_config(), "'WantsHND' is named without kv_connector_module_path"),
        (make_config(connector="Absent", module=__name__), "'Absent' is not in"),
        (make_config(module="no.such.module"), "not in 'no.such.module'"),
    ],
)
def test_a_connector_that_is_nowhere_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        get_kv_connector_cache_layout(config)


class Backend:
    pass


class Attention:
    def get_attn_backend(self):
        return Backend


def make_model(**layers):
    compilation = SimpleNamespace(static_forward_context=layers)
    return SimpleNamespace(compilation_config=compilation)


def test_the_backend_is_that_of_the_first_attention_layer():
    assert get_current_attn_backend(make_model(moe=object(), attn=Attention())) is Backend


def test_a_model_without_attention_is_refused():
    with pytest.raises(LayoutError, match="none of the 1 layers"):
        get_current_attn_backend(make_model(moe=object()))
