"""For tests of clients of servers."""

import pytest


@pytest.fixture
def closing():
    """Closes at the end of the test what it is given, and returns it."""
    given = []

    def close_later(client):
        given.append(client)
        return client

    yield close_later
    for client in given:
        client.close()


@pytest.fixture
def name(request):
    """Each test has names of its own."""
    return f"kv/{request.node.name}/one"
