"""What vLLM's callers hold is found by its name, and what is not found is nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvferry.adapters.vllm.host_frames import added_request, constructing

REQUEST = SimpleNamespace(lora_request=None)


def add(request: Any) -> Any:
    def tell_tiers(request_id: str) -> Any:
        return added_request()

    return tell_tiers("id")


def add_renamed(the_request: Any) -> Any:
    return added_request()


def test_the_request_is_that_of_the_nearest_caller_which_has_one() -> None:
    def outer(request: Any) -> Any:
        return add(REQUEST)

    assert outer(SimpleNamespace(lora_request="another")) is REQUEST


def test_a_variable_of_that_name_that_is_no_request_is_passed_over() -> None:
    def outer(request: Any) -> Any:
        def inner(request: str) -> Any:
            return added_request()

        return inner("an id")

    assert outer(REQUEST) is REQUEST


def test_a_request_under_another_name_is_not_found() -> None:
    assert add_renamed(REQUEST) is None


class KVConnectorBase_V1:
    """Of vLLM's name."""


class Connector(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.found = self.make_tiers()

    def make_tiers(self) -> Any:
        return constructing()


class Renamed(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, caches: Any) -> None:
        self.found = constructing()


class Another:
    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.found = constructing()


def test_the_configuration_is_that_of_the_connector_that_is_constructed() -> None:
    assert Connector("config", "caches").found == ("config", "caches")
    assert Connector("config", None).found is None
    assert Renamed("config", "caches").found is None
    assert Another("config", "caches").found is None


def test_a_connector_that_was_constructed_before_is_not_meant() -> None:
    assert Connector("config", "caches").make_tiers() is None
