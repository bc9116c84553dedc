"""`kvferry status`: from metrics, a journal and a store, and what it says where there are none."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvferry.cli.main import main
from kvferry.errors import ConfigError
from kvferry.exporters import KVFerryCollector
from kvferry.journal import JournalLine
from kvferry.observe import Counters
from kvferry.readings import quantile, read_endpoint
from kvferry.testing.clock import FakeClock

HOSTILE = "[red]\x1b[31m" + "x" * 1000


def busy_counters():
    counters = Counters()
    for name, amount in {
        "local_hit_tokens": 100,
        "hit_tokens/file": 600,
        "hit_tokens/memory": 200,
        "miss_tokens/absent": 90,
        f"miss_tokens/{HOSTILE}": 10,
        "saved_bytes": 3 << 20,
        "saved_state_bytes": 2 << 20,
        "loaded_state_bytes": 1 << 20,
        "hook_failed": 2,
    }.items():
        counters.count(name, amount)
    for seconds in (0.001, 0.004, 0.9):
        counters.observe("fetch", seconds)
    counters.watch(
        lambda: {
            "pool_slots/total": 64,
            "pool_slots/held": 40,
            "pool_slots/in_use": 7,
            "ranks_apart": 1.0,
            "store_used_bytes/file": 5 << 20,
            "store_max_bytes/file": 10 << 20,
            "tier_since_seconds/file/scheduler/up//": 1.0,
            f"tier_since_seconds/s3/worker/away/late/{HOSTILE}": 2.0,
            "tier_since_seconds/s3/worker/up//": 0.0,
        }
    )
    return counters


@contextmanager
def served(answer):
    """A server on a free port that answers by a function of the request handler."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            answer(self)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            thread.join()


def says(text):
    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(text)

    return answer


def exported(counters, prefix=""):
    registry = CollectorRegistry()
    registry.register(KVFerryCollector(counters, {"engine": "0"} if prefix else None))
    return generate_latest(registry).decode().replace("kvferry_", f"{prefix}kvferry_").encode()


@pytest.mark.parametrize("prefix", ["", "vllm:"])
def test_metrics_of_an_engine_are_shown(prefix, capsys):
    with served(says(exported(busy_counters(), prefix))) as url:
        assert main(["status", url]) == 0
        shown = capsys.readouterr().out
        assert main(["status", url, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "900 of 1,000 tokens hit since the start" in shown
    assert "pool: 40 of 64 slots held, 7 in use" in shown
    assert "ranks on several machines: each stores the rows" in shown
    assert "2 faults of kvferry" in shown
    assert "states saved 2MiB" in shown
    assert "states loaded 1MiB" in shown
    assert found["hits"] == {"engine": 100, "file": 600, "memory": 200}
    states = {(each["tier"], each["state"]) for each in found["tiers"]}
    assert states == {("file", "up"), ("s3", "away")}
    assert [each["p50"] for each in found["latencies"]] == ["5 ms"]
    assert "\x1b" not in shown
    assert "[red]" in shown
    assert max(map(len, shown.splitlines()[1:])) <= 80


def test_what_is_no_endpoint_is_one_line(capsys):
    with served(says(b"<html>hello")) as url:
        assert main(["status", url]) == 2
        assert "does not answer with metrics" in capsys.readouterr().err
    assert main(["status", url]) == 2  # nobody listens there any more
    with served(says(b"# TYPE x counter\nx_total 1\n")) as other:
        assert main(["status", other]) == 2
    errors = capsys.readouterr().err
    assert "Connection refused" in errors
    assert "has no metrics of kvferry" in errors
    assert len(errors.splitlines()) == 2


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        ("x_seconds_bucket 1", "does not answer with metrics"),
        ('x_seconds_bucket{le="long"} 1', "does not answer with metrics"),
        ('store_used_bytes{tier="file"} +Inf', "has no metrics of kvferry"),
        ('hit_tokens_total{tier="file"} NaN', "has no metrics of kvferry"),
    ],
)
def test_metrics_that_make_no_sense_are_one_line(sample, said, capsys):
    with served(says(f"kvferry_{sample}\n".encode())) as url:
        assert main(["status", url]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert len(shown.err.splitlines()) == 1


def test_an_endpoint_that_hangs_or_never_ends_is_given_up(monkeypatch):
    ends, clock = threading.Event(), FakeClock()

    def hangs(_handler):
        ends.wait()

    def never_ends(handler):
        says(b"x")(handler)
        clock.advance(60.1)
        try:
            while not ends.wait(0.01):
                handler.wfile.write(b"x" * 100)
        except OSError:
            return

    monkeypatch.setattr("kvferry.network.time", SimpleNamespace(monotonic=clock))
    for answer, seconds, said in (
        (hangs, 0.2, "did not answer within"), (never_ends, 60, "does not end"),
    ):  # fmt: skip
        with served(answer) as url:
            try:
                with pytest.raises(ConfigError, match=said):
                    read_endpoint(url, seconds)
            finally:
                ends.set()
        ends.clear()


def test_the_last_requests_of_a_journal_are_summed_up(tmp_path, capsys):
    lines = [
        JournalLine(time=float(n), chunk_tokens=4, num_tokens=10, keys=[], request=str(n),
                    local=1, hits={"file": 4}, misses={"absent": 5})
        for n in range(3)
    ]  # fmt: skip
    path = tmp_path / "journal"
    path.write_text("".join(json.dumps({k: getattr(line, k) for k in line.__struct_fields__}) + "\n"
                            for line in lines))  # fmt: skip
    assert main(["status", "--journal", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "15 of 30 tokens hit in 2 s, 15 tokens/s" in shown.replace("\n", " ")
    path.write_text("")
    assert main(["status", "--journal", str(path)]) == 0
    assert main(["status", "--journal", str(tmp_path / "none")]) == 2
    assert main(["status"]) == 2


def test_a_journal_says_by_day_what_was_not_computed(tmp_path, capsys):
    noon = time.mktime((2026, 11, 28, 12, 0, 0, 0, 0, -1))

    def line(days: int, hits: int, rate: float) -> str:
        made = JournalLine(
            time=noon + 86400 * days, chunk_tokens=4, num_tokens=1000, keys=[], local=100,
            hits={"file": hits} if hits else {}, misses={"absent": 900 - hits}, compute_rate=rate,
        )  # fmt: skip
        return msgspec.json.encode(made).decode() + "\n"

    path = tmp_path / "journal"
    (tmp_path / "journal.1").write_text(line(0, 800, 2.0) + line(0, 0, 2.0))
    path.write_text(line(0, 400, 4.0) + line(1, 200, 0.0))
    assert main(["status", "--journal", str(path), "--by", "day"]) == 0
    shown = capsys.readouterr().out
    assert (
        "1,400 of 4,000 tokens were loaded instead of computed, which would have taken 8 m (of 200"
        in (" ".join(shown.split()))
    )
    days = [each.split() for each in shown.splitlines() if each.startswith("2026-11-")]
    assert days == [
        ["2026-11-28", "3", "3,000", "1,200", "40.0%", "8", "m", "300"],
        ["2026-11-29", "1", "1,000", "200", "20.0%", "0", "s", "100"],
    ]
    assert main(["status", "--journal", str(path), "--by", "day", "--json", "-"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["seconds"] == 400.0 + 100.0
    assert [each["untimed"] for each in value["days"]] == [0, 200]
    assert main(["status", "file:///nowhere", "--by", "day"]) == 2


def test_of_two_readings_what_came_between_is_shown():
    counters = busy_counters()

    def answer(handler):
        says(exported(counters))(handler)

    with served(answer) as url:
        before = read_endpoint(url, 10)
        counters.count("hit_tokens/file", 50)
        counters.observe("fetch", 3.0)
        now = read_endpoint(url, 10)
        restarted = read_endpoint(url, 10)
    recent = now.since(before)
    assert {name: value for name, value in recent.hits.items() if value} == {"file": 50}
    assert quantile(recent.times["fetch"], 0.5) == 5.0
    assert recent.counts["pool_slots/held"] == 40
    assert before.since(now) is before  # fewer tokens than before: another engine
    assert restarted.since(now).num_tokens == 0
