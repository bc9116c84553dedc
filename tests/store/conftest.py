"""Servers that the tests of remote stores run against."""

from tests.servers.mooncake import mooncake
from tests.servers.seaweed import seaweed

__all__ = ["mooncake", "seaweed"]
