"""Paths and texts that a terminal or a reader of markup would act on: shown as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from urllib.parse import quote

import pytest

from kvferry.keys import ModelIdentity, Namespace
from kvferry.store.file.store import FileStore
from kvferry.store.url import open_store
from kvferry.types import ChunkKey, KVGroup

NAMES = [
    "a [bold]b[/] [/red] [",
    "\x1b[31mred\x1b]0;title\x07",
    "line\nfeed\rback",
    "snow\u202eman",
]
COMMANDS = {
    "ls": [],
    "ls --removed": [],
    "ls --by namespace": [],
    "verify": ["--dry-run"],
    "rm --yes": ["--max-bytes", "1GiB"],
}


def url_of(path) -> str:
    return f"file://{quote(str(path))}"


def is_plain(text: str) -> bool:
    return all(each == "\n" or each.isprintable() for each in text)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_of_any_name_is_looked_at(make_store, run, command, name):
    made = make_store(num_records=1, name=name)
    with open_store(url_of(made.root)) as store:
        store.discard(ChunkKey(bytes(32)), name)
    ran = run(*command.split(), url_of(made.root), *COMMANDS[command])
    assert ran.code == 0, ran.err
    assert is_plain(ran.out)
    shown = run("ls", url_of(made.root), made.keys[0].hex())
    assert (shown.code, is_plain(shown.out)) == (0, True)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_refusal_that_names_such_a_path_is_one_plain_line(run, command, name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "thesis [red].txt").touch()
    for path in (tmp_path / name, tmp_path / name / "missing"):
        ran = run(*command.split(), url_of(path), *COMMANDS[command])
        assert ran.code == 2
        assert is_plain(ran.error_line)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
@pytest.mark.parametrize("option", ["--json", "--prompt-file", "--wheel"])
def test_any_option_with_such_a_path_is_refused_in_one_plain_line(
    make_store, run, option, name, tmp_path
):
    missing = tmp_path / name / "missing" / "file"
    command = {
        "--json": ["ls", make_store(num_records=1).url],
        "--prompt-file": ["generate", tmp_path],
        "--wheel": ["demo", "--dir", tmp_path / "cache"],
    }[option]
    ran = run(*command, option, missing)
    assert ran.code == 2
    assert is_plain(ran.err)
    assert ran.err.count("error: ") == 1


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_model_of_such_a_name_is_shown_as_it_is(make_store, run, name):
    group = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16)
    space = Namespace.of(ModelIdentity(weights=bytes(32), config={}, name=name), (group,), 7)
    made = make_store(num_records=1, namespace=space.digest)
    with open_store(made.url) as store:
        store.describe(space.digest, space.as_text())
    for options in ([], ["--by", "namespace"]):
        out = run("ls", made.url, *options).out
        assert is_plain(out)
        assert name.encode("unicode_escape").decode() in out
        value = json.loads(run("ls", made.url, *options, "--json", "-").out)
        assert (value[0] if not options else value["namespaces"][0])["model"] == name


def test_a_path_that_is_no_text_is_refused_in_one_line(tmp_path):
    root = os.fsencode(tmp_path) + b"/caf\xe9"
    os.mkdir(root)
    for url in (b"file://" + root, b"file://" + os.fsencode(tmp_path) + b"/caf%E9"):
        done = subprocess.run(
            [sys.executable, "-m", "kvferry.cli", "ls", url],
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr.startswith(b"error: ")
        assert done.stderr.count(b"\n") == 1
    assert os.listdir(root) == []


def test_a_log_line_that_names_such_a_path_is_one_plain_line(make_store):
    made = make_store(num_records=1, name="".join(NAMES))
    (made.root / "index.sqlite3").write_bytes(b"damaged" * 1000)
    command = ["rm", url_of(made.root), "--max-bytes", "1GiB", "--yes"]
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.cli", *command], capture_output=True, text=True, check=True
    )
    assert done.stderr.startswith("WARNING kvferry.store.file.database: the index ")
    assert is_plain(done.stderr)
    assert done.stderr.count("\n") == 1


def test_the_text_of_an_exception_in_a_log_line_is_plain():
    """A server's answer, for one."""
    script = (
        "import logging, sys, kvferry.cli.main as main, kvferry.cli.records as records\n"
        "def fails(*_):\n"
        "    try: raise OSError('answers \\x1b[31mred\\rback')\n"
        "    except OSError as error:\n"
        "        logging.getLogger('kvferry').exception('it %s', error)\n"
        "        raise\n"
        "records.query_store = fails\n"
        "sys.exit(main.main(['ls', 'file:///x']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    first, *_, last, error = done.stderr.splitlines()
    assert is_plain(done.stderr)
    said = r"answers \x1b[31mred\rback"
    assert first == f"ERROR kvferry: it {said}"
    assert last == f"OSError: {said}"
    assert error == r"error: answers \x1b[31mred back"


def test_names_in_a_store_that_are_no_text_are_passed_over(make_store, run):
    made = make_store(num_records=1)
    with open_store(made.url) as store:
        store.discard(ChunkKey(bytes(32)), "none")
    for place in (b"", b"/records", b"/records/00", b"/quarantine", b"/writing", b"/namespaces"):
        directory = os.fsencode(made.root) + place
        os.makedirs(directory, exist_ok=True)
        os.close(os.open(directory + b"/caf\xe9\x1b[31m", os.O_CREAT | os.O_WRONLY))
        os.mkdir(directory + b"/[red]\xff")
    for command, options in COMMANDS.items():
        ran = run(*command.split(), made.url, *options)
        assert ran.code == 0, ran.err
        assert is_plain(ran.out)


def test_a_store_under_a_path_that_is_no_text_has_an_index(tmp_path):
    root = tmp_path / os.fsdecode(b"caf\xe9 ?#%41")
    key = ChunkKey(bytes(32))
    with FileStore(root, max_bytes=1000) as store:
        assert store.put(key, [b"value"]).result == "stored"
    assert "index.sqlite3" in os.listdir(root)
    with FileStore(root, read_only=True) as store:
        assert store.stat().num_records == 1
