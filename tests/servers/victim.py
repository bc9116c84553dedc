"""A process that calls hostile Valkey servers, and measures what their attacks cost it.

    python -m tests.servers.victim '{"name of an attack": port, ...}' SEED ROUNDS

It prints JSON: `outcomes`, by attack and call the result or what was raised; `late`, the longest
time of a call beyond its deadline; `cpu`, the most CPU seconds of a call; `stalls`, by attack and
call the longest work during which another thread could not run; and `peak_mib`, the memory that
all calls together took at most.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.errors import StoreError
from kvferry.store.servers.valkey import ValkeyClient
from tests.servers.process import LOCALHOST

CALL_SECONDS = 0.3
MAX_STALL_SECONDS = 0.05
_MAX_TRIES = 6
_MEMORY_BYTES = 6 << 30


class Ticker:
    """A thread that tries to run every millisecond.

    Attributes:
        longest: longest CPU time of this process during which the thread could not run. CPU time
            leaves out waits of the whole process on a busy machine, which no call has caused.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        self._ticked = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stall_of(self, call: Callable[[], object]) -> float:
        """Return the longest stall during a call. The call is made again if the stall was too long,
        since the machine may have caused it."""
        for _ in range(_MAX_TRIES):
            self._see_end()
            self.longest = 0.0
            call()
            self._see_end()
            if self.longest < MAX_STALL_SECONDS:
                break
        return self.longest

    def _see_end(self) -> None:
        """Wait until the thread has run after now. One tick may be under way, so wait for two."""
        for _ in range(2):
            self._ticked.clear()
            self._ticked.wait()

    def _run(self) -> None:
        last = time.process_time()
        while True:
            time.sleep(0.001)
            now = time.process_time()
            self.longest = max(self.longest, now - last)
            last = now
            self._ticked.set()


def calls(port: int) -> Iterator[tuple[str, Callable[[float], object]]]:
    """Yield the calls by name, each over connections of its own."""

    def client(*, cluster: bool = False) -> ValkeyClient:
        return ValkeyClient([(LOCALHOST, port)], cluster=cluster)

    buffers = [memoryview(bytearray(each)) for each in (100, 64_000, 38_300)]
    ranges = [(0, buffers[0]), (100, buffers[1]), (64_100, buffers[2])]
    yield "read", lambda until: client().read("kv/1", ranges, until)
    yield "size", lambda until: client().read("kv/1", [], until)
    yield "put", lambda until: client().put("kv/2", [bytes(200_000)], until)
    yield "exists", lambda until: client().exists(["kv/1", "kv/2"] * 100, until)
    yield "delete", lambda until: client().delete("kv/1", until)
    yield "scan", lambda until: list(client().scan("kv/", until))
    yield "cluster", lambda until: client(cluster=True).exists(["kv/1"], until)


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


class Costs:
    """The costs of the calls; the module's docstring describes them."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.stalls: dict[str, float] = {}
        self.late = self.cpu = 0.0
        self._ticker = Ticker()

    def measure(self, what: str, call: Callable[[float], object]) -> None:
        self.stalls[what] = self._ticker.stall_of(lambda: self._make(what, call))

    def _make(self, what: str, call: Callable[[float], object]) -> None:
        started, cpu = time.monotonic(), time.thread_time()
        try:
            outcome = repr(call(started + CALL_SECONDS))[:60]
        except StoreError as error:
            outcome = f"StoreError: {error}"
        except BaseException as error:  # any other error is a finding of the test
            outcome = f"RAISED {type(error).__name__}"
        self.late = max(self.late, time.monotonic() - started - CALL_SECONDS)
        self.cpu = max(self.cpu, time.thread_time() - cpu)
        self.outcomes[what] = outcome


def main(ports: dict[str, int], seed: int, rounds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    costs, chance = Costs(), random.Random(seed)
    before = peak_mib()
    for attack, port in ports.items():
        for name, call in calls(port):
            costs.measure(f"{attack}: {name}", call)
    for number in range(rounds):
        name, call = chance.choice(list(calls(chance.choice(list(ports.values())))))
        costs.measure(f"round {number}: {name}", call)
    print(
        json.dumps(
            {
                "outcomes": costs.outcomes,
                "stalls": costs.stalls,
                "late": costs.late,
                "cpu": costs.cpu,
                "peak_mib": peak_mib() - before,
            }
        )
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
