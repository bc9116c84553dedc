"""A lane to a child process, without the process."""

from __future__ import annotations

import mmap
import socket
import time

import pytest

from kvferry.store.servers.child_client import LaneEnd, _Gone


def test_a_child_that_takes_no_command_is_not_said_to_have_crashed():
    end, unread = socket.socketpair()
    with end, unread:
        lane = LaneEnd(end, mmap.mmap(-1, 4096), 0, 4096)
        with pytest.raises(_Gone, match="did not take a command in time"):
            lane.ask(["exists", "k" * (16 << 20)], time.monotonic() + 0.01)
