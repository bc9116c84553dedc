"""A directory on a real network file system, used by two machines: a process each, with a mount and
an index of its own. Run by `make test-mount`."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from kvferry import filesystem
from kvferry.engine import LLM, SamplingParams
from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from tests.engine.test_llm import prompt
from tests.servers.mounts import KINDS
from tests.servers.process import let_run
from tests.store.file.machine import RemoteMachine, value_of

pytestmark = pytest.mark.mount

SIZE = len(value_of(0))
SOON = 10.0
"""What a machine finds by listing, beside the time that its mount may be stale."""
SCHEDULER_SECONDS = 0.5
"""Of one call on the scheduler's thread, which takes microseconds, on a machine that is busy."""


class TwoMachines:
    """Processes on the two mounts, and what is to be ended."""

    def __init__(self, kind: str, home: Path) -> None:
        self.mounts = KINDS[kind](home)
        self._home = home
        self._started: list[RemoteMachine] = []
        self.stale_seconds = self.mounts.stale_seconds

    def open(self, name: str, max_bytes: int | None = None) -> RemoteMachine:
        machine = RemoteMachine(self.mounts.place(name) / "store", self.home(name), max_bytes)
        self._started.append(machine)
        assert machine.call("ready")
        return machine

    def both(self, max_bytes: int | None = None) -> tuple[RemoteMachine, RemoteMachine]:
        return self.open("a", max_bytes), self.open("b", max_bytes)

    def home(self, name: str) -> Path:
        return self._home / f"home-{name}"

    def found(self, folder: str, name: str = "a") -> list[str]:
        return sorted(p.name for p in (self.mounts.place(name) / "store").glob(f"{folder}/*"))

    def soon(self, is_true, what: str) -> None:
        wait_until(is_true, what, SOON + 4 * self.stale_seconds)

    def stop(self) -> None:
        for machine in self._started:
            machine.kill()
        with suppress(ProcessLookupError):
            self.mounts.resume()
        self.mounts.stop()
        for machine in self._started:
            machine.wait()


@pytest.fixture(params=sorted(KINDS))
def machines(request):
    # Its files are larger than pytest should keep.
    with tempfile.TemporaryDirectory(prefix="kvferry-mounts-") as home:
        two = TwoMachines(request.param, Path(home))
        try:
            two.mounts.start()
            yield two
        finally:
            two.stop()


def test_the_index_of_a_mounted_directory_is_on_the_own_disk(machines):
    one, other = machines.both()
    assert one.call("put", 0) == "STORED"
    for name, machine in (("a", one), ("b", other)):
        assert not filesystem.is_of_one_machine(str(machines.mounts.place(name)))
        assert Path(machine.call("index_file")).is_relative_to(machines.home(name))
    assert machines.found("index*") == []


def test_of_racing_writers_of_one_key_all_are_fine_and_one_record_stays(machines):
    pair = machines.both()
    numbers = list(range(30))
    running = [machine.start("put_many", numbers) for machine in pair]
    answers = [machine.result(call) for machine, call in zip(pair, running, strict=True)]
    for of_key in zip(*answers, strict=True):
        assert "STORED" in of_key
        assert set(of_key) <= {"STORED", "EXISTS"}
    for machine in pair:
        machines.soon(lambda m=machine: m.call("used") == 30 * SIZE, "one record of each")
        assert [machine.call("read", number) for number in numbers] == ["whole"] * 30
    for name in ("a", "b"):
        machines.soon(lambda n=name: machines.found("writing", n) == [], "the end of writing")
    assert pair[0].call("keys") == pair[1].call("keys")
    machines.soon(lambda: pair[1].call("verify") == [30, 0, 0], "all in a listing")


def test_a_reader_gets_the_whole_value_or_none_while_another_machine_deletes(machines):
    one, other = machines.both()
    numbers = list(range(6))
    reading = other.start("read_for", 12.0, numbers)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        one.call("put_many", numbers)
        other.call("probe", numbers)
        let_run(0.5)
        for number in numbers:
            one.call("delete", number)
    answers = other.result(reading)
    assert answers.get("wrong", 0) == 0
    assert answers["absent"] > 0
    assert answers.get("whole", 0) > 0
    assert machines.found("quarantine") == []


def test_a_live_writer_is_not_taken_for_dead_by_a_machine_that_sees_no_lock(machines):
    """The two have the same host name here."""
    one, other = machines.both()
    assert one.call("begin", 0)
    machines.soon(lambda: machines.found("writing", "b") != [], "what is being written")
    other.call("clean")
    assert one.call("commit", 0) == "STORED"
    other.call("probe", [0])
    machines.soon(lambda: other.call("contains", 0), "the record")
    assert other.call("read", 0) == "whole"


def test_a_server_that_stops_blocks_no_scheduler(machines):
    pair = machines.both()
    assert pair[0].call("put_many", list(range(4))) == ["STORED"] * 4
    machines.soon(lambda: pair[1].call("contains", 3), "the records")
    machines.mounts.pause()
    watching = [(machine, machine.start("watch", 10.0)) for machine in pair]
    work = [
        (machine, machine.start(*call))
        for machine, first in zip(pair, (100, 200), strict=True)
        for call in (("put", first), ("read", 3), ("read", 400), ("delete", first + 1))
    ]
    for machine, call in watching:
        assert machine.result(call) < SCHEDULER_SECONDS
    machines.mounts.resume()
    for machine, call in work:
        assert machine.result(call) not in ("wrong", "NO_SPACE")
    for number, machine in enumerate(pair, 500):
        machines.soon(lambda m=machine: m.call("read", 3) == "whole", "a read after it")
        machines.soon(
            lambda m=machine, n=number: m.call("put", n) in ("STORED", "EXISTS"), "a put after it"
        )


@pytest.mark.parametrize("end", ["stops", "dies"])
def test_closing_is_bounded_where_the_server_is_gone(machines, end):
    pair = machines.both()
    assert pair[0].call("put_many", list(range(4))) == ["STORED"] * 4
    machines.soon(lambda: pair[1].call("contains", 3), "the records")
    machines.mounts.pause() if end == "stops" else machines.mounts.kill_server()
    for machine in pair:
        watching = machine.start("watch", 3.0)
        machine.start("put", 100)
        reading = machine.start("read", 400)
        assert machine.result(watching) < SCHEDULER_SECONDS
        if end == "dies":  # at the latest after the mount's own time for retries
            assert machine.result(reading, 120) in ("error", "absent")
        assert machine.call("close") < 8.0


def test_what_the_mount_believes_for_seconds_makes_no_wrong_hit(machines):
    one, other = machines.both()
    numbers = list(range(4))
    answers = Counter()
    for round_ in range(3):
        for number in numbers:
            assert other.call("read", number) != "wrong"  # now its mount believes something
        assert one.call("put_many", numbers) == ["STORED"] * 4
        answers.update(other.call("read_for", machines.stale_seconds + 2, numbers))
        machines.soon(
            lambda: all(other.call("read", number) == "whole" for number in numbers), "hits"
        )
        if round_ < 2:
            assert all(one.call("delete", number) for number in numbers)
    assert set(answers) <= {"whole", "absent", "error"}
    assert machines.found("quarantine") == []
    assert one.call("verify") == [4, 0, 0]


def test_an_engine_hits_what_an_engine_on_another_machine_computed(machines, tmp_path, monkeypatch):
    model = make_tiny_model(tmp_path / "model")
    greedy = SamplingParams(max_tokens=6, ignore_eos=True, return_logits=True)
    prompts = [prompt(101, seed) for seed in range(3)]

    def run(store: str | None):
        options = {"connector_options": {"chunk_tokens": 16}} if store is not None else {}
        with LLM(model, store=store, **options) as llm:
            done = [llm.generate([each], greedy)[0] for each in prompts]
            assert llm.drain(20.0)
            return done

    cold = run(None)
    for name, num_stored in (("a", 0), ("b", 96)):
        monkeypatch.setenv("XDG_CACHE_HOME", str(machines.home(name)))
        found = run(f"file://{machines.mounts.place(name)}/store")
        assert [each.num_external_tokens for each in found][1:] == [num_stored] * 2
        for each, expected in zip(found, cold, strict=True):
            assert each.token_ids == expected.token_ids
            assert np.abs(each.first_logits - expected.first_logits).max() <= 1e-4
