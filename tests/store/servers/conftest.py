"""Fixtures for tests of clients of servers."""

import pytest


@pytest.fixture
def closing():
    """A function that returns its argument and closes it at the end of the test."""
    given = []

    def close_later(client):
        given.append(client)
        return client

    yield close_later
    for client in given:
        client.close()


@pytest.fixture
def name(request):
    """A name of a value that no other test uses."""
    return f"kv/{request.node.name}/one"
