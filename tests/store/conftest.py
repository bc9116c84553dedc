"""Servers that the tests of remote stores run against."""

from tests.servers.seaweed import seaweed

__all__ = ["seaweed"]
