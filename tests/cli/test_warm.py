"""`kvferry warm`: by the embedded engine and by a server, once and again."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoModelForCausalLM

from kvferry.adapters.transformers import StoredKV
from kvferry.engine import LLM, SamplingParams
from kvferry.observe import Counters
from kvferry.record import schema
from kvferry.store.file.store import FileStore
from kvferry.store.url import open_one
from tests.cli.test_hostile_names import is_plain
from tests.servers.process import LOCALHOST, free_ports

TOKEN_BYTES = 3 * 4 * 16 * 4
"""KV of a token of the tiny model."""


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = ["the statement was executed, and " * 9, list(range(3, 90)), {"prompt": [5] * 50}]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines) + "\n")
    return path


def count(url: str) -> int:
    with open_one(url) as store:
        return sum(1 for _ in store.catalogue().scan())


def test_what_is_stored_is_skipped_the_next_time(run, model_dir, url, prompts, tmp_path):
    command = ["warm", model_dir, "--prompts", prompts, "--chunk-tokens", 16, "--json", "-"]
    first = json.loads(run(*command, "--store", url).out)
    assert (first["prompts"], first["failed"], first["stored_before"]) == (3, [], 0)
    num_records = count(url)
    assert num_records == 87 // 16 + 50 // 16 + (first["num_tokens"] - 87 - 50) // 16
    with FileStore(tmp_path / "store") as store:
        (lost,) = store.catalogue().recent(1)
        store.delete(lost.key)
    again = json.loads(run(*command, "--store", url).out)
    assert count(url) == num_records
    assert 0 < again["stored_before"] < again["num_tokens"]
    # All is stored: nothing is computed, so that a store that takes nothing is enough.
    third = json.loads(run(*command, "--store", f"{url}?read_only=true").out)
    assert (third["prompts"], third["failed"]) == (3, [])
    assert third["stored_before"] > again["stored_before"]


@pytest.mark.parametrize("tokens", [16, 32])
def test_chunks_that_nobody_sized_are_shared_by_all_that_read_and_write_them(
    run, model_dir, url, tmp_path, monkeypatch, tokens
):
    monkeypatch.setattr(schema, "CHUNK_BYTES", tokens * TOKEN_BYTES)
    prompt = list(range(3, 90))
    (prompts := tmp_path / "prompts.jsonl").write_text(json.dumps(prompt))
    assert run("warm", model_dir, "--prompts", prompts, "--store", url).code == 0
    assert count(url) == 87 // tokens
    hit, counters = 87 // tokens * tokens, Counters()
    options = {"audit": "off", "load_timeout_seconds": 60.0}
    with LLM(model_dir, store=url, connector_options=options, observer=counters) as llm:
        llm.generate([prompt], SamplingParams(max_tokens=1))
    assert counters["hit_tokens"] == hit
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype="auto")
    with StoredKV(model, url, **options) as kv:
        kv.prefill([prompt])
        assert kv.num_loaded == hit
    (ids := tmp_path / "ids.json").write_text(json.dumps(prompt))
    ask = ["explain", url, "--tokens", ids, "--json", "-"]
    assert json.loads(run(*ask, "--model", model_dir).out)["hit_tokens"] == hit
    # For an engine whose operator set another size, they are a miss with its reason.
    with open_one(url) as store:
        ours = store.catalogue().described()
    LLM(model_dir, store=url, connector_options={"chunk_tokens": 8}).close()
    with open_one(url) as store:
        [other] = set(store.catalogue().described()) - set(ours)
    missed = json.loads(run(*ask, "--namespace", other.hex()).out)
    assert (missed["hit_tokens"], missed["reason"]) == (0, "other_namespace")
    assert (
        f"{hit} tokens are stored under chunk_tokens {tokens} (asked for: 8)" in missed["summary"]
    )


def test_a_prompt_that_is_too_long_is_named_and_the_others_are_served(run, model_dir, url, prompts):
    with prompts.open("a") as file:
        file.write(json.dumps([7] * 5000) + "\n" + json.dumps([9] * 40) + "\n")
    command = ["warm", model_dir, "--prompts", prompts, "--chunk-tokens", 16, "--store", url]
    value = json.loads(run(*command, "--json", "-").out)
    assert value["prompts"] == 4
    assert [each["prompt"] for each in value["failed"]] == [4]
    ran = run(*command)
    assert ran.code == 1
    assert "5000 tokens" in " ".join(ran.out.split())


def test_a_store_that_takes_nothing_is_said(run, model_dir, url, prompts):
    open_one(url).close()
    command = ["warm", model_dir, "--prompts", prompts, "--store", f"{url}?read_only=true"]
    value = json.loads(run(*command, "--chunk-tokens", 16, "--json", "-").out)
    assert value["prompts"] == 0
    assert {each["why"] for each in value["failed"]} == {"computed, but the store did not keep it"}


# -- servers --------------------------------------------------------------------------------------


@contextmanager
def serving(
    status: int = 200, hangs: threading.Event | None = None, *, drips: bool = False
) -> Iterator[tuple]:
    """A server of OpenAI's interface: its URL, and what it was asked. It `hangs`, or `drips` spaces
    until then."""
    asked: list[tuple[str, dict]] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, code: int, value: object) -> None:
            text = json.dumps(value).encode()
            self.send_response(code, "no\x1b[31m")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def do_GET(self):
            self.answer(200, {"data": [{"id": "served"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            if hangs is not None and drips:
                self.send_response(200)
                self.end_headers()
                with contextlib.suppress(OSError):
                    while not hangs.wait(0.05):
                        self.wfile.write(b" ")
                return
            if hangs is not None:
                hangs.wait(60)
            usage = {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}}
            self.answer(status, {"usage": usage})

    with ThreadingHTTPServer((LOCALHOST, 0), Handler) as server:
        # Its end waits for all answers: a fault of one is not to be printed into the next test.
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{LOCALHOST}:{server.server_address[1]}/v1", asked
        finally:
            if hangs is not None:
                hangs.set()
            server.shutdown()
            thread.join()


def test_a_server_gets_texts_as_messages_and_ids_as_they_are(run, prompts):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hello"}]
    with prompts.open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    with serving() as (place, asked):
        value = json.loads(run("warm", "--openai", place, "--prompts", prompts, "--json", "-").out)
        assert run("warm", "m", "--openai", place, "--prompts", prompts, "--raw").code == 0
    assert (value["prompts"], value["num_tokens"], value["stored_before"]) == (4, 40, 16)
    assert [path for path, _ in asked] == [
        *("/v1/chat/completions", "/v1/completions", "/v1/completions", "/v1/chat/completions"),
        *("/v1/completions", "/v1/completions", "/v1/completions", "/v1/chat/completions"),
    ]
    assert asked[1][1] == {
        "model": "served", "max_tokens": 1, "temperature": 0, "prompt": list(range(3, 90)),
    }  # fmt: skip
    assert asked[3][1]["messages"] == messages
    assert asked[4][1]["model"] == "m"


@pytest.mark.parametrize(("status", "code", "num_asked"), [(400, 1, 3), (401, 2, 1), (500, 2, 1)])
def test_refusals_of_a_prompt_go_on_and_those_of_all_end_it(run, prompts, status, code, num_asked):
    with serving(status) as (place, asked):
        ran = run("warm", "--openai", place, "--prompts", prompts)
    assert (ran.code, len(asked)) == (code, num_asked)
    assert str(status) in ran.out + ran.err
    assert is_plain(ran.out + ran.err)


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_is_away_or_hangs_is_one_line(run, prompts, drips):
    (port,) = free_ports(1)
    ran = run("warm", "m", "--openai", f"http://{LOCALHOST}:{port}/v1", "--prompts", prompts)
    assert (ran.code, "does not answer" in ran.error_line) == (2, True)
    with serving(hangs=threading.Event(), drips=drips) as (place, _):
        ran = run("warm", "m", "--openai", place, "--prompts", prompts, "--timeout", 1)
        assert (ran.code, "does not answer" in ran.error_line) == (2, True)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line", ["{", "5", "[]", '""', "[1.5]", "[true]", '{"messages": []}', '{"messages": [1]}',
             '{"messages": [{"role": 1, "content": "x"}]}', "[" * 100_000],
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_one_line(run, tmp_path, line):
    (tmp_path / "prompts").write_text(f'"one"\n{line}\n')
    ran = run("warm", "m", "--store", "file:///none", "--prompts", tmp_path / "prompts")
    assert ran.code == 2
    assert "line 2" in ran.error_line


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["m"], "give --store URL"),
        (["m", "--store", "file:///a", "--openai", "http://h"], "give --store URL"),
        (["--store", "file:///a"], "give the model directory"),
        (["m", "--openai", "ftp://h"], "write http://host:8000/v1"),
        (["m", "--openai", "http://me:correct-horse@h"], "without a login"),
        (["m", "--openai", "http://h:x"], "does not answer"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(run, prompts, options, says):
    ran = run("warm", *options, "--prompts", prompts)
    assert ran.code == 2
    assert says in ran.error_line
    assert "correct-horse" not in ran.err
