"""Which release of vLLM the tests run in, and marks for what an earlier one cannot do at all."""

from __future__ import annotations

import importlib.metadata

import pytest


def _release() -> tuple[int, int]:
    package, *_ = importlib.metadata.packages_distributions()["vllm"]  # the first on the path
    major, minor, *_ = importlib.metadata.version(package).split(".")
    return int(major), int(minor)


RELEASE = _release()


def serves_tiers() -> pytest.MarkDecorator:
    """A mark for tests of vLLM's tiers as they have been since 0.29, which `KVFerryTier` serves."""
    return does("gives a tier what ours needs", since=(0, 29))


def does(what: str, *, since: tuple[int, int]) -> pytest.MarkDecorator:
    """A mark for tests of what vLLM on a CPU does not do in earlier releases, connector or not.

    Args:
        what: later ones do.
        since: the earliest release that was seen to do it. Not all were looked at.
    """
    return pytest.mark.skipif(
        since > RELEASE, reason=f"unlike vLLM {since[0]}.{since[1]}, this one never {what}"
    )
