"""An import path of the last release is an error that names the new one."""

from __future__ import annotations

import importlib
import re

import pytest

from kvferry.moved import MOVED_MODULES, MOVED_NAMES


@pytest.mark.parametrize("module", MOVED_MODULES)
def test_a_module_that_is_gone_names_where_its_names_are(module):
    for path in (module, f"{module}.anything"):
        with pytest.raises(ImportError) as caught:
            importlib.import_module(path)
        assert module in str(caught.value)
        homes = re.findall(r"kvferry\.[a-z0-9_.]*[a-z0-9]", str(caught.value).partition(" to ")[2])
        assert homes
        for home in homes:
            importlib.import_module(home)


def test_two_names_of_our_own_are_where_the_error_says():
    from kvferry.contract.fold import WorkerOutputFold
    from kvferry.contract.lifecycle import StepLifecycle
    from kvferry.layout.shards import tensor_parallel_shard

    message = " ".join(MOVED_MODULES.values())
    for name in (WorkerOutputFold, StepLifecycle, tensor_parallel_shard):
        assert f"{name.__name__} to {name.__module__}" in message


@pytest.mark.parametrize(
    ("package", "name"),
    [(package, name) for package in MOVED_NAMES for name in MOVED_NAMES[package]],
)
def test_a_name_that_moved_names_its_new_path(package, name):
    with pytest.raises(ImportError, match=rf"{package}\.{name} moved: .* from kvferry\.v1$"):
        getattr(importlib.import_module(package), name)
    assert hasattr(importlib.import_module("kvferry.v1"), name)


@pytest.mark.parametrize("package", MOVED_NAMES)
def test_a_name_that_never_was_is_an_attribute_error(package):
    assert not hasattr(importlib.import_module(package), "copy_kv_block")
