"""The table of connectors, and the message for a name that is not in it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvferry.connectors.registry import CONNECTORS, create_roles, create_worker, default_options
from kvferry.connectors.shared_storage.config import SharedStorageConfig
from kvferry.contract.spec import EngineSpec
from kvferry.errors import ConfigError
from kvferry.observe import Counters

SPEC = cast("EngineSpec", None)  # never read: the name is wrong


def test_the_table_is_read_only():
    with pytest.raises(TypeError):
        cast("Any", CONNECTORS)["mine"] = CONNECTORS["shared_storage"]


def test_defaults_are_those_of_the_options():
    defaults = default_options("shared_storage")
    assert "store" not in defaults
    store = "memory://x"
    assert SharedStorageConfig(store=store, **defaults) == SharedStorageConfig(store=store)


@pytest.mark.parametrize(
    "ask",
    [
        default_options,
        lambda name: create_roles(name, SPEC, {}, Counters()),
        lambda name: create_worker(name, SPEC, {}, Counters()),
    ],
)
def test_an_unknown_connector_is_refused_with_the_known_ones(ask):
    with pytest.raises(ConfigError, match=r"unknown connector 'disk'; known: shared_storage"):
        ask("disk")
