"""Every command of the parser in places that are no good: one line or a tidy end, and an exit code
of docs/operate.md."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import typer

from kvferry.cli.main import build_app
from kvferry.cli.output import Exit
from kvferry.keys import ModelIdentity, Namespace
from kvferry.store.file.store import FileStore
from kvferry.store.url import open_one
from kvferry.testing.models import make_tiny_model
from kvferry.types import ChunkKey, KVGroup
from tests.cli.conftest import put_records
from tests.cli.test_explain import put_prompt
from tests.cli.test_hostile_names import NAMES, is_plain
from tests.servers.process import LOCALHOST, free_ports

COMMANDS = typer.main.get_command(build_app()).commands
OF_STORES = [
    name
    for name, command in COMMANDS.items()
    if any("URL" in (each.metavar or "") for each in command.params if each.opts[0][0] != "-")
]
"""Those with the URL of a store as an argument, which any new one is expected to be."""

OF_FILES = {
    "simulate": ["{path}"],
    "generate": ["{path}", "Hello"],
    "warm": ["{path}", "--store", "file:///nowhere", "--prompts", "{path}"],
    "demo": ["--model-dir", "{path}"],
}
"""The others, with what they take for a directory of which nothing can be made."""

DIGEST = hashlib.sha256(b"space").hexdigest()
OPTIONS = {
    "copy": ["file://{tokens}.copy"],
    "rm": ["--tenant", "nobody", "--yes"],
    "pin": ["--until", "1h", "--namespace", "{digest}"],
    "explain": ["--namespace", "{digest}", "--tokens", "{tokens}"],
    "report": ["--html", "{tokens}.html"],
}
"""What a command needs besides a store."""


@pytest.fixture
def arguments(tmp_path):
    """The arguments of a command on a store."""
    tokens = tmp_path / "tokens"
    tokens.write_text("1 2 3 4 5 6 7 8 9")

    def of(command: str, url: str, digest: str = DIGEST) -> list[str]:
        options = OPTIONS.get(command, [])
        return [command, url, *(each.format(digest=digest, tokens=tokens) for each in options)]

    return of


def test_every_command_is_here():
    assert sorted({*OF_STORES, *OF_FILES}) == sorted(COMMANDS)
    assert not set(OF_STORES) & set(OF_FILES)


def test_the_exit_codes_are_documented():
    text = (Path(__file__).parents[2] / "docs" / "operate.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)
    assert [(int(code), meaning) for code, meaning in rows] == [(c, c.meaning) for c in Exit]


def is_one_refusal(command: str, ran) -> bool:
    """Whether a command says in one line why it cannot; `doctor` finds that instead."""
    if command == "doctor":
        return ran.code == 1 and "1 thing is wrong" in ran.out and is_plain(ran.out) and not ran.err
    return ran.code == 2 and bool(ran.error_line) and is_plain(ran.error_line)


@pytest.mark.parametrize("command", OF_STORES)
def test_places_that_are_no_store(run, arguments, command, tmp_path):
    for name in ("empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("precious")
    (port,) = free_ports(1)
    down = f"valkey://me:correct-horse@{LOCALHOST}:{port}/kv"
    places = [(tmp_path / name).as_uri() for name in ("empty", "other", "missing")]
    for url in (*places, "memory://", down):
        ran = run(*arguments(command, url))
        assert is_one_refusal(command, ran), (url, ran)
        assert "correct-horse" not in ran.out + ran.err
    assert os.listdir(tmp_path / "empty") == []
    assert os.listdir(tmp_path / "other") == ["thesis.txt"]
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("command", OF_FILES)
def test_directories_that_hold_nothing_of_use(run, command, tmp_path):
    for name in ("empty", "other"):
        path = tmp_path / name
        path.mkdir()
        if name == "other":
            (path / "config.json").write_text("[")
        ran = run(command, *(each.format(path=path) for each in OF_FILES[command]))
        assert ran.code == 2
        assert is_plain(ran.error_line)


NOTHING = {
    "copy": "no record in",
    "explain": "no namespace in",
    "ls": "no record in",
    "pin": "no such namespace in",
    "rm": "no such namespace in",
    "verify": "no record in",
}
"""What the commands that look for something say of a store that holds nothing."""

ANSWERS = ("doctor", "report", "status")
"""Those that answer also of an empty store."""


def test_a_store_that_holds_nothing_has_the_exit_code_of_nothing(run, arguments, url):
    open_one(url).close()
    for command in OF_STORES:
        asked = arguments(command, f"{url}?max_bytes=1GiB") + (["00"] if command == "ls" else [])
        ran = run(*asked)
        if command in ANSWERS:
            assert ran.code == Exit.DONE, ran
            continue
        assert (ran.code, ran.error_line.startswith("nothing found: ")) == (Exit.NO, True), ran
        assert NOTHING[command] in ran.error_line
        ran = run(*asked, "--json", "-")
        found = json.loads(ran.out) if ran.out else {}
        assert (ran.code, found.get("records", 0)) == (Exit.NO, 0)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_given_twice_is_refused_unless_it_is_a_list(run, name):
    """Whatever its value: of two, one would be dropped without a word."""
    for param in COMMANDS[name].params:
        if param.param_type_name == "option" and not param.multiple:
            given = [param.opts[0]] if param.is_flag else [f"{param.opts[0]}=1"]
            both = [param.opts[-1]] if param.is_flag else [param.opts[-1], "1"]
            ran = run(name, *given, *both)
            assert (ran.code, f"{param.opts[0]} is given 2 times" in ran.error_line) == (2, True)


def test_every_command_that_takes_a_prompt_takes_a_chat():
    options = {
        name: {each for param in command.params for each in param.opts}
        for name, command in COMMANDS.items()
    }
    by_text = {name for name, given in options.items() if {"--prompt-file", "--model"} <= given}
    assert by_text == {"copy", "explain", "pin", "rm"}
    assert all({"--chat", "--date"} <= options[name] for name in by_text)


# -- a store in use, and a large one --------------------------------------------------------------

WRITER = """
import os, sys, random
from kvferry.store.file.store import FileStore
from kvferry.types import ChunkKey
with FileStore(sys.argv[1], max_bytes=1 << 20) as store:
    number = 0
    while os.getppid() == int(sys.argv[2]):
        store.put(ChunkKey(random.Random(number).randbytes(32)), [bytes(4000)])
        number += 1
        if number == 300:  # it evicts now
            print("at work", flush=True)
"""


@pytest.fixture
def store_in_use(tmp_path) -> Iterator[str]:
    """A store that another process fills and evicts from without a pause."""
    root = tmp_path / "used"
    root.mkdir(mode=0o700)
    command = [sys.executable, "-c", WRITER, str(root), str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout.readline() == "at work\n"
            yield f"{root.as_uri()}?max_bytes=1MiB"
            assert writer.poll() is None
        finally:
            writer.kill()


def test_a_store_in_use(run, arguments, store_in_use):
    for command in OF_STORES:
        ran = run(*arguments(command, store_in_use))
        # Its values are no records, and its keys have no namespace.
        expected = {"verify": 1, "rm": 1, "explain": 1, "copy": 1, "pin": 1}
        # The writer may have removed what `verify` put into quarantine before `doctor` sees it.
        allowed = (0, 1) if command == "doctor" else (expected.get(command, 0),)
        assert ran.code in allowed, (command, ran)
        assert is_plain(ran.out + ran.err)
        assert "Traceback" not in ran.err


GROUP = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16)
SPACE = Namespace.of(ModelIdentity(weights=bytes(32), config={}, name="m"), (GROUP,), 7)


def make_large_store(root: Path, num_records: int) -> None:
    """A store of so many records by its index; the files are not there."""
    with open_one(root.as_uri()) as store:
        store.describe(SPACE.digest, SPACE.as_text())
    now = time.time()
    rows = (
        (hashlib.sha256(b"%d" % number).digest(), 1000, now - number, SPACE.digest)
        for number in range(num_records)
    )
    with closing(sqlite3.connect(root / "index.sqlite3")) as db, db:
        # Counting each by itself would take most of the time.
        triggers = db.execute("SELECT name, sql FROM sqlite_master WHERE type='trigger'").fetchall()
        for name, _ in triggers:
            db.execute(f"DROP TRIGGER {name}")
        names = "key, num_bytes, last_used, namespace"
        db.executemany(f"INSERT INTO records ({names}) VALUES (?, ?, ?, ?)", rows)
        db.execute("UPDATE totals SET num_records = ?, num_bytes = ?",
                   (num_records, 1000 * num_records))  # fmt: skip
        for _, sql in triggers:
            db.execute(sql)


LARGE = int(os.environ.get("KVFERRY_TEST_LARGE_STORE", "10000"))


@pytest.mark.slow
def test_a_large_store(tmp_path, arguments):
    """By commands that change nothing, within memory that no list of all records fits into."""
    root = tmp_path / "large"
    root.mkdir(mode=0o700)
    make_large_store(root, LARGE)
    dry = {"rm", "pin", "verify", "copy"}
    jobs = []
    for command in OF_STORES:
        if command == "doctor":  # it writes, and so finds that the files are not there
            continue
        given = arguments(command, root.as_uri(), SPACE.digest.hex())
        given = [each.replace("nobody", "") for each in given]
        if command == "pin":  # it refuses a store without a quota
            given[given.index(root.as_uri())] += "?max_bytes=1TiB"
        jobs.append([*given, *(["--dry-run"] if command in dry else [])])
    shows_all = ["ls", root.as_uri(), "--limit", "0"]
    jobs += [shows_all, [*shows_all, "--json", "-"]]
    codes = {"verify": 1}  # there is no file to verify
    for job, ended in zip(jobs, ran_apart(tmp_path, jobs, "one-by-one"), strict=True):
        assert ended["code"] == codes.get(job[0], 0), (job, ended)
        grown_per_record = 50
        if job[:4] == shows_all:  # in memory is what is listed, not its table or its JSON
            grown_per_record = 1000
            if job[4:]:
                assert len({row["key"] for row in json.loads(ended["out"])}) == LARGE
            else:
                assert re.findall("^[0-9a-f]{16}  unreadable: absent .* ago$", ended["out"], re.M)
                num_headings = -(-LARGE // 1000)
                assert len(ended["out"].splitlines()) == LARGE + num_headings + 3
        else:
            assert len(ended["out"]) < 20_000
        assert ended["grown_bytes"] < (64 << 20) + grown_per_record * LARGE, (job, ended)
        assert ended["seconds"] < 60 + LARGE / 5_000, (job, ended)


# -- as a process: hangs, Ctrl-C, `| head`, a terminal --------------------------------------------

APART = Path(__file__).with_name("apart.py")


@contextmanager
def apart(directory: Path, jobs: list[list[str]], *options: str) -> Iterator[subprocess.Popen[str]]:
    """Commands in processes of their own; its output is the line of their ids, then of how they
    ended."""
    command = [sys.executable, str(APART), str(directory), json.dumps(jobs), *options]
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    for size in ("COLUMNS", "LINES"):  # they would count for more than the terminal
        environment.pop(size, None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def ran_apart(
    directory: Path, jobs: list[list[str]], *options: str, stdout: str = "file"
) -> list[dict]:
    with apart(directory, jobs, stdout, *options) as process:
        process.stdout.readline()
        return json.loads(process.stdout.readline())


@contextmanager
def servers(number: int) -> Iterator[list[socket.socket]]:
    """Which accept and say nothing."""
    with ExitStack() as closing_all:
        yield [
            closing_all.enter_context(socket.create_server((LOCALHOST, 0))) for _ in range(number)
        ]


def url_of(scheme: str, server: socket.socket) -> str:
    place = f"{LOCALHOST}:{server.getsockname()[1]}"
    return f"s3://bucket/kv?endpoint=http://{place}" if scheme == "s3" else f"{scheme}://{place}/kv"


@pytest.mark.slow
def test_every_command_gives_up_on_a_server_that_accepts_and_says_nothing(tmp_path, arguments):
    put_records((tmp_path / "store").as_uri(), num_records=1)
    prompts = str(tmp_path / "prompts")
    warm = ["warm", str(make_tiny_model(tmp_path / "model")), "--prompts", prompts, "--store"]
    (tmp_path / "prompts").write_text(json.dumps(list(range(3, 200))))

    def job(command: str, url: str) -> list[str]:
        given = {"copy to": ["copy", (tmp_path / "store").as_uri(), url], "warm": [*warm, url]}
        return given.get(command) or arguments(command, url)

    commands = [*OF_STORES, "copy to", "warm"]
    # All open a bucket as they open the other; a process for each would take long.
    all_of = [("valkey", name) for name in commands] + [("s3", name) for name in ("ls", "copy to")]
    with servers(len(all_of)) as held:
        jobs = [
            job(command, url_of(scheme, server))
            for (scheme, command), server in zip(all_of, held, strict=True)
        ]
        all_ended = ran_apart(tmp_path, jobs, "impatient")
    for job, ended in zip(jobs, all_ended, strict=True):
        assert ended["code"] == (1 if job[0] == "doctor" else 2), (job, ended)
        assert "no answer within 1 s" in ended["out"] + ended["err"], (job, ended)


def test_ctrl_c_while_a_server_is_awaited_is_one_line(tmp_path, arguments):
    with servers(len(OF_STORES)) as held, ExitStack() as connections:
        jobs = [
            arguments(command, url_of("valkey", server))
            for command, server in zip(OF_STORES, held, strict=True)
        ]
        with apart(tmp_path, jobs, "file", "patient") as process:
            pids = json.loads(process.stdout.readline())
            for pid, server in zip(pids, held, strict=True):
                server.settimeout(60)
                connections.enter_context(server.accept()[0])
                os.kill(pid, signal.SIGINT)
            all_ended = json.loads(process.stdout.readline())
    for job, ended in zip(jobs, all_ended, strict=True):
        assert (ended["code"], ended["err"]) == (130, "error: interrupted\n"), (job, ended)


@pytest.fixture
def hostile_store(tmp_path) -> str:
    """Descriptions that a terminal acts on, with much markup: beside a namespace that
    differs from them in their fields alone, and without the prompt that they hold."""
    root = tmp_path / "hostile"
    root.mkdir(mode=0o700)
    put_prompt(root.as_uri(), SPACE, range(50, 60))
    for number, name in enumerate(NAMES):
        deep: object = name
        for _ in range(50):
            deep = [deep, 1]
        config = {name * 100: "x" * 100_000, name: number, "deep": deep}
        identity = ModelIdentity(weights=bytes(32), config=config, name=name * 1000)
        for tenant in ("", name):
            put_prompt(root.as_uri(), Namespace.of(identity, (GROUP,), 7, tenant), range(1, 10))
        with FileStore(root) as store:
            store.discard(ChunkKey(bytes([number]) * 32), name)
            store.describe(b"d" * 32, "[" * 100_000)
            none = {"model": None, "description": {"chunk_tokens": 0}}
            store.describe(b"e" * 32, json.dumps(none))
    return f"{root.as_uri()}?max_bytes=1GiB"


def of_hostile(arguments, url: str) -> list[list[str]]:
    with FileStore(Path(url.removeprefix("file://").partition("?")[0])) as store:
        key = next(iter(store.catalogue().scan())).key.hex()
    commands = [arguments(command, url, SPACE.digest.hex()) for command in OF_STORES]
    return [[key if each == "00" else each for each in command] for command in commands]


def test_hostile_descriptions(run, arguments, hostile_store):
    for job in of_hostile(arguments, hostile_store):
        ran = run(*job)
        assert ran.code in (0, 1, 2), (job, ran)
        assert is_plain(ran.out + ran.err), job
        assert len(ran.out + ran.err) < 30_000, job
        assert "Traceback" not in ran.err


def test_a_terminal_of_60_columns(tmp_path, arguments, hostile_store):
    jobs = of_hostile(arguments, hostile_store)
    for job, ended in zip(jobs, ran_apart(tmp_path, jobs, stdout="tty"), strict=True):
        assert ended["code"] in (0, 1, 2), (job, ended)
        shown = re.sub(r"\x1b\[[0-9;]*m", "", ended["out"]).replace("\r\n", "\n")
        assert is_plain(shown), job
        tables = [line for line in shown.splitlines() if "  " in line and "->" not in line]
        assert max(map(len, tables), default=0) <= 60, (job, tables)


def test_a_reader_that_left(tmp_path, arguments, hostile_store):
    jobs = of_hostile(arguments, hostile_store)
    jobs = [[*job, *(["--dry-run"] if job[0] == "rm" else [])] for job in jobs]
    for job, ended in zip(jobs, ran_apart(tmp_path, jobs, stdout="closed"), strict=True):
        # They run side by side: one that finds the index held by another warns that it lists.
        said = [line for line in ended["err"].splitlines() if not line.startswith("WARNING")]
        refused = ended["code"] in (Exit.NO, Exit.MISUSE) and len(said) == 1
        assert (ended["code"], said) == (141, []) or refused, (job, ended)
