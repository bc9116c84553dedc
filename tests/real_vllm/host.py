"""The installed release of vLLM, and marks that skip tests of what it cannot do at all."""

from __future__ import annotations

import importlib.metadata

import pytest


def _release() -> tuple[int, int]:
    package, *_ = importlib.metadata.packages_distributions()["vllm"]  # the first on the path
    major, minor, *_ = importlib.metadata.version(package).split(".")
    return int(major), int(minor)


RELEASE = _release()


def serves_tiers() -> pytest.MarkDecorator:
    """Return a mark for tests of vLLM's tiers in the form that `KVFerryTier` serves, since 0.29."""
    return does("gives a tier what ours needs", since=(0, 29))


def does(what: str, *, since: tuple[int, int]) -> pytest.MarkDecorator:
    """Return a mark for tests of what vLLM on a CPU does not do before a release, whatever the
    connector.

    Args:
        what: What later releases do.
        since: The earliest release that was seen to do it. Not all were looked at.
    """
    return pytest.mark.skipif(
        since > RELEASE, reason=f"unlike vLLM {since[0]}.{since[1]}, this one never {what}"
    )
