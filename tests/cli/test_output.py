"""Durations, sizes, ages, tables, examples in the help, and JSON files."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import typer

from kvferry.cli.main import build_app
from kvferry.cli.output import emit, format_age, parse_duration, require_size
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, Namespace
from kvferry.store.url import open_store
from kvferry.types import KVGroup


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("36h", 129_600), ("1.5d", 129_600), ("2w", 1_209_600)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "36", "h", "-1h", "1 h", "1h30m", "soon", "1H"])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="36h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("512MiB", 2**29), ("1.5 gib", 3 * 2**29), ("7B", 7), ("10kb", 10_000)],
)
def test_sizes_name_their_unit(text, num_bytes):
    assert require_size("--max-bytes", text) == num_bytes


@pytest.mark.parametrize("text", ["512", "1e9", "4096 "])
def test_a_size_without_a_unit_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"--max-bytes .* no unit; write for example 512MiB"):
        require_size("--max-bytes", text)


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 m"),
        (7200, "2 h"),
        (172_800, "2 d"),
        (1_814_400, "3 w"),
    ],
)
def test_ages_are_in_one_unit(seconds, age):
    assert format_age(1000.0, 1000.0 + seconds) == age


@pytest.mark.parametrize(
    "command",
    ["ls", "ls --sort token", "ls --removed", "ls --by namespace", "ls KEY", "verify --dry-run",
     "rm --max-bytes 1KiB --dry-run"],
)  # fmt: skip
def test_tables_in_a_pipe_fit_80_columns_and_cut_nothing(make_store, run, command):
    group = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16)
    model = "/srv/models/organisation/a-model-with-a-name-that-is-longer-than-the-line-it-is-on"
    space = Namespace.of(ModelIdentity(weights=bytes(32), config={}, name=model), (group,), 7)
    made = make_store(num_records=4, namespace=space.digest)
    with open_store(made.url) as store:
        store.describe(space.digest, space.as_text())
        store.discard(made.keys[3], "wrong_size")
    made.path(1).write_bytes(b"\xff" * 100)
    made.flip(2, -1)
    name, *options = command.replace("KEY", made.keys[0].hex()).split()
    out = run(name, made.url, *options).out
    assert max(map(len, out.splitlines())) <= 80 or made.url in out
    assert "…" not in out
    whole = "".join(re.split(r"\s+", out))
    if command in ("ls", "ls --by namespace"):
        assert model in whole
    if command == "ls KEY":
        assert made.keys[0].hex() in out


COMMANDS = typer.main.get_command(build_app()).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_every_command_has_an_example_that_can_be_parsed(run, name):
    shown = re.search(r"Example: (kvferry .*)", run(name, "--help").out)[1]
    program, command, *arguments = shlex.split(shown)
    assert (program, command) == ("kvferry", name)
    COMMANDS[name].make_context(f"kvferry {name}", arguments)


def test_a_json_file_is_replaced_whole(tmp_path):
    path = tmp_path / "out.json"
    emit({"a": 1}, str(path))
    emit([1, None, "ü"], str(path))
    assert json.loads(path.read_text()) == [1, None, "ü"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
