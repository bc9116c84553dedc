"""What a user can get wrong: exit code 2, one line that says what to do, nothing changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def _make_newer(root: Path) -> None:
    marker = json.loads((root / "kvferry.json").read_text())
    (root / "kvferry.json").write_text(json.dumps({**marker, "version": 99}))


LOOKS = ["ls", "status", "verify", "rm", "report", "copy"]
EXTRA = {
    "rm": ["--max-bytes", "1GiB"],
    "report": ["--html", "never.html"],
    "copy": ["file:///nowhere/to/copy"],
}


@pytest.mark.parametrize("command", LOOKS)
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("not a url", ["not a url", "file:///"]),
        ("/var/cache", ["no scheme", "file:///var/cache"]),
        ("flie:///x", ["unknown scheme 'flie'", "'file'"]),
        ("file://relative/path", ["absolute"]),
        ("file:///nowhere/at/all", ["/nowhere/at/all", "does not exist"]),
        ("file:///nowhere?max_byte=1GiB", ["'max_byte'", "'max_bytes'"]),
        ("file:///nowhere?max_bytes=lots", ["'max_bytes'", "10GiB"]),
        ("file:///nowhere?staging_bytes=1GiB", ["'staging_bytes'"]),
        ("memory://x", ["memory store", "file:///"]),
        ("valkey://host/kv?clutser=true", ["'clutser'", "'cluster'"]),
        ("s3://bucket/../kv", ["prefix"]),
        ("mooncake://host/kv", ["names no single master"]),
        ("file:///nowhere?create=maybe", ["'file:///nowhere': option 'create' is n"]),
        ("file:///nowhere?direct_io=offf", ["'file:///nowhere': option 'direct_io' is n"]),
        ("file:///caf%e9", ["'/caf%e9'", "not UTF-8"]),
    ],
)
def test_a_url_that_is_no_store(run, command, url, says):
    ran = run(command, url, *EXTRA.get(command, []))
    assert ran.code == 2
    assert all(part in ran.error_line for part in says), ran.error_line


@pytest.mark.parametrize("command", LOOKS)
def test_a_store_of_a_newer_format(make_store, run, command):
    made = make_store()
    _make_newer(made.root)
    before = made.snapshot()
    ran = run(command, made.url, *EXTRA.get(command, []))
    assert ran.code == 2
    assert "version 99" in ran.error_line
    assert "knows 2" in ran.error_line
    assert made.snapshot() == before


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lss"], "'ls'"),
        (["ls", "--limt", "3", "file:///x"], "--limit"),
        (["ls", "--sort", "colour", "file:///x"], "colour"),
        (["ls", "--limit", "few", "file:///x"], "--limit"),
        (["ls"], "URL"),
        (["ls", "file:///x", "00", "file:///y"], "file:///y"),
        (["ls", "file:///x", "00", "--removed"], "give one of them"),
        (["stat", "file:///x"], "kvferry ls URL --by namespace"),
        (["gc", "file:///x", "--max-bytes", "1GiB"], "kvferry rm URL --max-bytes SIZE"),
        (["bench"], "make bench NAME=stores"),
        (["rm", "file:///x"], "--max-bytes"),
        (["rm", "file:///x", "--older-than", "soon"], "'soon'"),
        (["rm", "file:///x", "--max-bytes", "3G"], "gib"),
        (["rm", "file:///x", "--max-bytes", "512"], "no unit; write for example 512MiB"),
        (["rm", "file:///x", "--max-bytes", "1e9"], "no unit; write for example 512MiB"),
        (["generate", "/nowhere/at/all"], "--prompt-file"),
        (["generate", "/nowhere/at/all", "Hello"], "/nowhere/at/all"),
        (["generate", "/etc", "Hello"], "/etc"),
        (["generate", "/etc", "--prompt-file", "/nowhere/at/all"], "/nowhere/at/all"),
        (["demo", "--model-dir", "/etc"], "/etc"),
    ],
)
def test_a_command_that_cannot_be_meant(run, arguments, says):
    ran = run(*arguments)
    assert ran.code == 2
    assert says.lower() in ran.error_line.lower(), ran.error_line


def test_a_wheel_that_is_not_the_pinned_one(run, tmp_path):
    pytest.importorskip("gguf")
    wheel = tmp_path / "model.whl"
    wheel.write_bytes(b"PK")
    ran = run("demo", "--dir", tmp_path / "cache", "--wheel", wheel)
    assert ran.code == 2
    assert "SHA-256" in ran.err
    assert os.listdir(tmp_path / "cache") == []


def test_max_bytes_below_one_chunk_loses_nothing(make_store, run, model_dir, tmp_path):
    made = make_store(num_records=3)
    before = made.snapshot()
    for root in (made.root, tmp_path / "new"):
        ran = run("generate", model_dir, "Hello", "--store", f"{root.as_uri()}?max_bytes=100")
        assert ran.code == 2
        assert "max_bytes=100" in ran.error_line
        assert "smaller than one chunk" in ran.error_line
    assert made.snapshot() == before
    assert not (tmp_path / "new").exists()


def test_a_store_that_cannot_be_written_does_not_stop_generation(make_store, run, model_dir):
    made = make_store(num_records=1)
    before = made.snapshot()
    ran = run("generate", model_dir, "Hello", "--store", f"{made.url}?read_only=true")
    assert ran.code == 0
    assert made.snapshot() == before


@pytest.mark.parametrize("target", ["", ".", "/", "/nowhere/at/all.json"])
def test_a_json_file_that_cannot_be_is_refused_before_the_work(make_store, run, target):
    made = make_store()
    before = made.snapshot()
    ran = run("rm", made.url, "--max-bytes", "0", "--json", target, "--yes")
    assert ran.code == 2
    assert "cannot write" in ran.error_line
    assert made.snapshot() == before


@pytest.mark.parametrize("target", ["/dev/stdout", "/proc/self/fd/1", "{out}"])
@pytest.mark.parametrize("goes_to_a_file", [False, True])
def test_json_into_stdout_is_not_mixed_with_the_table(make_store, tmp_path, target, goes_to_a_file):
    made, out = make_store(), tmp_path / "out"
    command = [sys.executable, "-m", "kvferry.cli", "ls", made.url, "--json"]
    with out.open("wb") as file:
        done = subprocess.run(
            [*command, target.format(out=out)], stdout=file if goes_to_a_file else subprocess.PIPE,
            stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(json.loads(out.read_bytes() or done.stdout)) == 3


def test_json_into_a_pipe_leaves_the_pipe(make_store, run, tmp_path):
    made = make_store()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert run("ls", made.url, "--json", pipe).code == 0
    assert len(json.loads(os.read(reader, 65536))) == 3
    os.close(reader)
    assert pipe.is_fifo()


def test_no_arguments_print_the_help(run):
    ran = run()
    assert ran.code == 2
    assert "Usage: kvferry" in ran.out + ran.err


def test_version(run):
    ran = run("--version")
    assert ran.code == 0
    assert ran.out.startswith("kvferry ")


def test_the_help_loads_neither_torch_nor_numpy():
    script = (
        "import sys, kvferry.cli.main as m; m.main(['--help']);"
        "sys.exit(bool({'torch', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--sort", "valkey://u:s3cr3t@host/kv"],
        ["--sort=valkey://u:s3cr3t@host/kv"],
        ["file:///nowhere", "00", "valkey://u:s3cr3t@host/kv"],
    ],
)
def test_a_password_in_a_wrong_place_is_not_shown(run, arguments):
    ran = run("ls", *arguments)
    assert ran.code == 2
    assert "s3cr3t" not in ran.err
    assert "valkey://" in ran.error_line
