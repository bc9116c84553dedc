"""For the tests of the vLLM plug-in without vLLM."""

from __future__ import annotations

import math

import pytest

from kvferry.adapters.vllm import identity


@pytest.fixture(autouse=True)
def _models_may_be_made_in_the_process_of_the_test(monkeypatch):
    monkeypatch.setattr(identity, "process_start", lambda: math.inf)
