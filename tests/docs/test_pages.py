"""Examples of the pages that are no Python blocks: they run as they stand."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from kvferry.cli.main import main
from kvferry.types import ScheduledRequest, StepView
from tests.servers.process import LOCALHOST, ServerProcess, accepts, free_ports
from tests.servers.valkey import running_valkey

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


class Engine(ThreadingHTTPServer):
    """An engine that answers each request with `answer`, and keeps what came."""

    def __init__(self, answer: dict[str, object]) -> None:
        self.came: list[tuple[str, dict[str, object]]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(handler) -> None:
                size = int(handler.headers["Content-Length"])
                self.came.append((handler.path, json.loads(handler.rfile.read(size))))
                handler.send_response(200)
                handler.send_header("Content-Type", "application/json")
                handler.end_headers()
                handler.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None:
                pass

        super().__init__((LOCALHOST, 0), Handler)


@contextmanager
def running(answer: dict[str, object]) -> Iterator[Engine]:
    with Engine(answer) as engine:
        thread = threading.Thread(target=engine.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()


def test_the_proxy_of_the_page_hands_over(tmp_path):
    page = (DOCS / "proxies.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```\n(class Proxy.*?\n)```", page, re.DOTALL)
    example = ROOT / "examples" / "proxy.py"
    assert code in example.read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 22
    (port,) = free_ports(1)
    params = {"do_remote_prefill": True, "remote_engine_id": "e"}
    asked = {"prompt": "Hello", "max_tokens": 9, "stream": False}
    with (
        running({"kv_transfer_params": params}) as prefill,
        running({"text": "world"}) as decode,
    ):
        command = [sys.executable, str(example), "--port", f"{port}"]
        for name, engine in (("prefill", prefill), ("decode", decode)):
            command += [f"--{name}", f"http://{LOCALHOST}:{engine.server_port}"]
        proxy = ServerProcess(command, tmp_path / "log")
        try:
            proxy.wait_ready(lambda: accepts(port))
            request = urllib.request.Request(
                f"http://{LOCALHOST}:{port}/v1/completions", json.dumps(asked).encode()
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert json.load(answer) == {"text": "world"}
        finally:
            proxy.kill()
        [(path, first)] = prefill.came
        assert path == "/v1/completions"
        assert first["kv_transfer_params"] == {"do_remote_decode": True}
        assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, "Hello")
        assert decode.came == [(path, {**asked, "kv_transfer_params": params})]


def test_the_server_of_two_machines_is_as_doctor_wants_it(tmp_path, capsys):
    page = (DOCS / "stores.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"```\n(bind 10\.0\.0\.7\n.*?)```", page, re.DOTALL)
    options = dict(line.split(" ", 1) for line in lines.splitlines())
    assert options.pop("bind") == "10.0.0.7"
    assert options.pop("save") == '""'  # `running_valkey` says both otherwise
    (secret := tmp_path / "secret").write_text(options["requirepass"])
    with running_valkey(**{name.replace("-", "_"): text for name, text in options.items()}) as it:
        url = f"valkey://{LOCALHOST}:{it.port}/kv?password_file={secret}"
        main(["doctor", url, "--json", "-"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [each for each in found if each["where"] != "machine"] == []


def test_the_page_for_engine_authors_says_where_each_name_of_the_example_is():
    page = " ".join((DOCS / "engine-authors.md").read_text(encoding="utf-8").split())
    code = (ROOT / "examples" / "own_engine.py").read_text(encoding="utf-8")
    imports = re.findall(r"^from (kvferry\S+) import (.+)$", code, re.MULTILINE)
    assert len(imports) > 5
    for module, names in imports:
        if module == "kvferry.engine.model":
            continue  # of Transformers' models, and no part of the contract
        package, _, last = module.rpartition(".")
        assert f"`{module}`" in page or (f"`{package}`" in page and f"`{last}`" in page), module
        for name in names.split(", "):
            assert f"`{name}`" in page, name


def test_the_step_of_engine_authors_has_the_fields_of_its_protocols():
    text = (DOCS / "engine-authors.md").read_text(encoding="utf-8")
    for protocol in (ScheduledRequest, StepView):
        fields = [name for name in vars(protocol) if not name.startswith("_")]
        assert len(fields) >= 3
        assert [name for name in fields if f"`{name}`" not in text] == []
