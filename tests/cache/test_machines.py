"""Machines see nothing of each other's memory, whatever their ids of processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.servers.namespaces import Place, two_places

MAKE = """
import json, sys
from kvferry.cache.memory import SlotMemory
memory = SlotMemory(2, 4096, is_shared=True)
print(json.dumps([memory.name, memory.process, memory.fd]), flush=True)
sys.stdin.read()
"""
OPEN = """
import json, sys
from kvferry.cache.memory import open_slots
from kvferry.errors import TransferError
try:
    print(len(open_slots(*json.loads(sys.argv[1]), 8192)))
except TransferError as error:
    print(error)
"""


@contextmanager
def slots(place: Place) -> Iterator[str]:
    """Yield where a process on a machine has slots, until the block ends."""
    command = [*place.prefix, sys.executable, "-c", MAKE]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        yield process.stdout.readline()


def opened(place: Place, where: str) -> str:
    """Return how many bytes a machine sees there, or why none."""
    command = [*place.prefix, sys.executable, "-c", OPEN, where]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.filterwarnings("default:no network namespaces")
def test_a_machine_opens_the_slots_of_its_own_processes_and_of_no_other_machine():
    with two_places(are_machines=True) as (near, far), slots(near) as here, slots(far) as there:
        assert opened(near, here) == opened(far, there) == "8192"
        if near.pid is not None:
            # The number stands for a process on either, or for none.
            reasons = ("of this machine is not that rank", "cannot be opened")
            assert any(reason in opened(far, here) for reason in reasons)
            assert any(reason in opened(near, there) for reason in reasons)
