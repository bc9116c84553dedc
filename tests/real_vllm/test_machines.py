"""Engines whose ranks or stages run on two machines, with one server for both: they read what they
stored, whatever becomes of one rank's part, and others read it once it is joined.

A start on two machines takes long, so few engines serve all tests here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvferry.record.check import RecordInfo, parse_head
from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.conftest import Pool
from tests.real_vllm.harness import (
    Answer,
    Answers,
    Engine,
    Oracle,
    assert_same,
    expected_hit,
    kvferry,
    random_prompts,
    records,
)
from tests.real_vllm.host import does
from tests.real_vllm.machines import Machines, two_machines
from tests.servers.valkey import ValkeyServer, running_valkey

pytestmark = [
    does("runs an engine on two machines without GPUs", since=(0, 32)),
    pytest.mark.filterwarnings("default:no network namespaces"),
]

LENGTHS = (300, 385, 777)
PROMPTS = {"ranks": LENGTHS, "stages": LENGTHS, "lost": (400,), "hung": (400,), "full": (400,)}
SPLITS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {
        "pipeline_parallel_size": 2,
        "max_num_batched_tokens": 256,
        "worker_extension_cls": "cpu_stages.Stages",
    },
}
BOUND_SECONDS = 60.0
"""More than an answer takes that waits for a store in vain, and less than deadlines of vLLM."""


def num_chunks(name: str) -> int:
    return sum(length // 128 for length in PROMPTS[name])


def stored(valkey: ValkeyServer) -> dict[bytes, RecordInfo]:
    """Return the records in a server, by its names."""
    found = {}
    for name in valkey.ask("KEYS", "*"):
        if re.search(rb"[0-9a-f]{64}$", name):
            head = valkey.ask("GETRANGE", name, 0, 8191)
            info = parse_head(memoryview(head), valkey.ask("STRLEN", name))
            if isinstance(info, RecordInfo):  # else a description of the namespace
                found[name] = info
    return found


@dataclass
class Runs:
    """What came out.

    Attributes:
        own: by name of the prompts, what one rank says by its own prefix hit.
        runs, seconds: by name of the prompts and what was done: answers, and how long they took.
        records: by name of the prompts, what was stored of them.
        joined: what `kvferry copy --join` said, the first time and again.
        sizes: of the records that it made, in bytes.
        are_apart: whether there were two machines.
        log: of the schedulers.
    """

    prompts: dict[str, list[list[int]]]
    own: dict[str, list[Answer]]
    runs: dict[str, Answers] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    records: dict[str, dict[bytes, RecordInfo]] = field(default_factory=dict)
    joined: list[dict[str, Any]] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    are_apart: bool = True
    log: str = ""

    def run(self, engine: Engine, name: str, done: str) -> None:
        began = time.monotonic()
        self.runs[f"{name} {done}"] = engine.generate(self.prompts[name])
        self.seconds[f"{name} {done}"] = time.monotonic() - began

    def store(self, engine: Engine, name: str, valkey: ValkeyServer) -> None:
        """Run prompts, and wait until they are stored."""
        before = stored(valkey)
        self.run(engine, name, "stored")
        count = len(before) + num_chunks(name) * (2 if self.are_apart else 1)
        wait_until(lambda: len(stored(valkey)) >= count, f"{name} are stored", BOUND_SECONDS)
        found = stored(valkey)
        self.records[name] = {key: found[key] for key in found.keys() - before.keys()}

    def lose(self, valkey: ValkeyServer) -> None:
        """Remove the second rank's part of the second chunk."""
        (name,) = (
            name
            for name, info in self.records["lost"].items()
            if info.first_token == 128 and info.schema.shard[0].heads[0] > 0
        )
        assert valkey.ask("DEL", name) == 1


@pytest.fixture(scope="module")
def outcome(
    tmp_path_factory: pytest.TempPathFactory, models: dict[str, Path], pool: Pool, oracle: Oracle
) -> Runs:
    prompts = random_prompts(61, PROMPTS)
    outcome = Runs(prompts, {name: list(oracle(asked)) for name, asked in prompts.items()})
    folder, model = tmp_path_factory.mktemp("machines"), models["plain"]
    with two_machines(folder) as machines, running_valkey(machines.of_store) as valkey:
        url = f"valkey://{machines.of_store.address}:{valkey.port}/kv"
        outcome.are_apart = machines.are_apart
        with machines.engine(model, kvferry(url), **SPLITS["ranks"]) as engine:
            for name in ("ranks", "lost", "hung"):
                outcome.store(engine, name, valkey)
        with machines.engine(model, kvferry(url), **SPLITS["ranks"]) as engine:
            outcome.run(engine, "ranks", "read")
            if machines.are_apart:
                outcome.lose(valkey)
                outcome.run(engine, "lost", "read")
                with machines.cut_off():
                    outcome.run(engine, "hung", "read")
            _fill(engine, outcome, valkey)
        with machines.engine(model, kvferry(url), **SPLITS["stages"]) as engine:
            outcome.store(engine, "stages", valkey)
        for _ in range(2):
            outcome.joined.append(_join(machines, url, folder / "joined"))
        outcome.log = machines.processes[0].log.read_text(errors="replace")
    outcome.sizes = [path.stat().st_size for path in records(folder / "joined")]
    with pool.get("second").engine(model, kvferry(folder / "joined")) as engine:
        for name in SPLITS:
            outcome.run(engine, name, "joined")
    return outcome


def _fill(engine: Engine, outcome: Runs, valkey: ValkeyServer) -> None:
    """Run prompts while the server takes nothing."""
    before = stored(valkey)
    valkey.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    valkey.ask("CONFIG", "SET", "maxmemory", 1)
    outcome.run(engine, "full", "stored")
    found = stored(valkey)
    outcome.records["full"] = {key: found[key] for key in found.keys() - before.keys()}
    valkey.ask("CONFIG", "SET", "maxmemory", 0)


def _join(machines: Machines, url: str, place: Path) -> dict[str, Any]:
    """Join what is stored at `url`, on the first machine."""
    command = [*machines.places[0].prefix, sys.executable, "-m", "kvferry.cli", "copy", url]
    command += [place.as_uri(), "--join", "--json", "-"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", PROMPTS)
def test_machines_that_store_say_what_one_says(name: str, outcome: Runs) -> None:
    run = outcome.runs[f"{name} stored"]
    assert_same(outcome.own[name], run)
    assert run.external == 0


@pytest.mark.parametrize("name", SPLITS)
def test_each_machine_stores_what_it_holds(name: str, outcome: Runs) -> None:
    found = list(outcome.records[name].values())
    if not outcome.are_apart:
        return
    assert len(found) == 2 * num_chunks(name)
    held = {info.schema.shard[0][:1] + info.schema.shard[0][2:3] for info in found}
    assert len(held) == 2
    assert {info.schema.shard[0].is_whole for info in found} == {False}
    assert len({info.of for info in found}) == num_chunks(name)
    assert outcome.log.count("ranks are on several machines") == 3  # once for each engine


@pytest.mark.parametrize(
    ("name", "done"), [("ranks", "read"), ("ranks", "joined"), ("stages", "joined")]
)
def test_after_a_restart_ranks_read_it_and_one_rank_what_was_joined(
    name: str, done: str, outcome: Runs
) -> None:
    run = outcome.runs[f"{name} {done}"]
    assert_same(outcome.own[name], run)
    assert [answer.cached for answer in run] == [expected_hit(n) for n in LENGTHS]
    assert run.external == sum(expected_hit(n) for n in LENGTHS)


@pytest.mark.parametrize(("name", "hit"), [("lost", 128), ("hung", 0)])
def test_what_one_rank_does_not_get_is_computed(name: str, hit: int, outcome: Runs) -> None:
    if not outcome.are_apart:
        return
    run = outcome.runs[f"{name} read"]
    assert_same(outcome.own[name], run)
    assert run.external <= hit
    assert outcome.seconds[f"{name} read"] < BOUND_SECONDS


def test_of_a_full_store_nothing_is_promised(outcome: Runs) -> None:
    assert outcome.records["full"] == {}


def test_what_was_joined_adds_up(outcome: Runs) -> None:
    first, again = outcome.joined
    names = ("ranks", "stages", "lost", "hung")
    # The lost part may be stored again by now, or not.
    lost = {info.of.hex() for info in outcome.records["lost"].values() if info.first_token == 128}
    assert {each["key"] for each in first["bad"]} <= lost
    assert first["stored"] + len(first["bad"]) == sum(map(num_chunks, names))
    assert again["existing"] == first["stored"]
    assert len(outcome.sizes) == again["existing"] + again["stored"]
    if outcome.are_apart:
        parts = [info.schema.payload_bytes for info in outcome.records["ranks"].values()]
        (size,) = set(outcome.sizes)
        heads_bytes = size - sum(parts) // num_chunks("ranks")
        assert 0 < heads_bytes <= 8192
        assert first["of_shards"] == sum(map(num_chunks, names))
