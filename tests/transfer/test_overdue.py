"""Loans that run out before their reader has all are counted."""

from __future__ import annotations

from kvferry.observe import Counters
from kvferry.testing.stores.hooks import wait_until
from kvferry.transfer.messages import Read

KEY = b"a" * 32
LARGE = bytes(48 << 20)
"""More than the buffers of a connection take."""


def test_loans_that_run_out_are_counted(serve, connect, raw, lender):
    lender.records[KEY] = LARGE
    counters = Counters()
    server = serve(observer=counters)
    assert connect(server).states_of([KEY], float("inf"))  # lent for no time, and not read
    gone, slow = raw(server), raw(server)
    for connection, milliseconds in ((gone, 60_000), (slow, 200)):
        connection.hello()
        connection.ask(Read(1, KEY, ((0, len(LARGE)),), milliseconds))
    gone.close()
    wait_until(lambda: lender.num_lent == 0, "the loans are back")
    assert counters["peer_overdue_loans"] == 1
    buffer = memoryview(bytearray(len(LARGE)))
    connect(server).read(KEY, [(0, buffer)], float("inf"))
    assert counters["peer_overdue_loans"] == 1
