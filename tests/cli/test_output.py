"""Durations, sizes, ages, tables, examples in the help, and JSON files."""

from __future__ import annotations

import json
import re
import shlex

import msgspec
import pytest
import typer

from kvferry.cli.main import build_app
from kvferry.cli.output import emit, format_age, make_table, parse_duration, require_size
from kvferry.errors import ConfigError
from kvferry.journal import JournalLine
from kvferry.keys import ModelIdentity, Namespace
from kvferry.store.url import open_store
from kvferry.types import KVGroup
from tests.cli.test_explain import put_prompt, space_of


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
def test_tables_in_a_pipe_fit_80_columns_and_break_no_id(make_store, run, command):
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
    if command == "ls":
        assert model in whole
    if command == "ls --by namespace":
        assert " ...longer-than-the-line-it-is-on\n" in out
    if command == "ls KEY":
        assert made.keys[0].hex() in out
    elif "rm" not in command:
        shown = {key.hex()[:16] for key in made.keys} if "namespace" not in command else set()
        assert shown & {*out.split()} or space.digest.hex()[:16] in out.split()


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("meta-llama/Llama-3.3-70B", "meta-llama/Llama-3.3-70B"),
        (".demo/SmolLM2-135M-Instruct", ".demo/SmolLM2-135M-Instruct"),
        ("/srv/models/organisation/SmolLM2-135M-Instruct", ".../SmolLM2-135M-Instruct"),
        ("/a/b/c/d/e/f/g/h/i/j/k/l/m/n/o/p/q/r", ".../e/f/g/h/i/j/k/l/m/n/o/p/q/r"),
        ("x" * 33, "..." + "x" * 29),
        ("x" * 32, "x" * 32),
    ],
)
def test_a_table_shows_the_end_of_a_path(capsys, path, shown):
    emit(None, None, make_table({"model": "model"}, [{"model": path}]))
    assert capsys.readouterr().out.split() == ["model", shown]


def test_a_journal_at_80_columns_breaks_no_id(run, tmp_path):
    ids = ["cmpl-ab94386118ef23cc-0-9ac5fc35", "chatcmpl-0123456789abcdef0123456789abcdef", "7"]
    lines = [
        JournalLine(
            time=0.0, chunk_tokens=16, num_tokens=120_000, keys=[], request=each,
            hits={"memory": 4096, "file": 65536}, misses={"absent": 50_000, "partial": 368},
            not_stored={"refused": 50_000}, not_stored_why="the disk is full",
        )
        for each in ids
    ]  # fmt: skip
    journal = tmp_path / "requests.jsonl"
    journal.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    out = run("explain", "--journal", journal).out
    assert max(map(len, out.splitlines())) <= 80
    shown = [each[:24] for each in ids]
    assert {*shown} <= {*out.split()}
    assert "\n".join(out.split()).count("absent") >= 3  # no word is broken, either
    assert f" {shown[1]} " in run("explain", "--journal", journal, "--request", shown[1]).out


def test_namespaces_of_several_dtypes_are_told_apart(run, tmp_path):
    url = (tmp_path / "store").as_uri()
    put_prompt(url, space_of())
    assert "dtype" not in run("ls", url, "--by", "namespace").out
    put_prompt(url, space_of(dtype="bfloat16"))
    for command in (["ls", url, "--by", "namespace"], ["status", url], ["doctor", url]):
        out = run(*command).out
        words = [line.split() for line in out.splitlines()]
        assert {"float32", "bfloat16"} <= {word for line in words for word in line}, command


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("verify {url}", "verifying"),
        ("copy {url} {url}-2", "copying"),
        ("rm {url} --everything --yes", "deleting"),
        ("report {url} --html {page}", "reading records"),
        ("doctor {url}", "looking at stores"),
        ("explain {url} --model {model} --tokens {tokens}", "hashing the weights"),
    ],
)
def test_what_may_take_long_shows_in_a_terminal_how_far_it_is(
    make_store, run, monkeypatch, tmp_path, model_dir, tokens_file, command, says
):
    for name in ("piped", "shown"):
        made = make_store(num_records=4, name=name)
        given = {"url": made.url, "page": tmp_path / "page.html", "model": model_dir}
        arguments = [each.format(**given, tokens=tokens_file) for each in command.split()]
        if name == "shown":
            monkeypatch.setenv("FORCE_COLOR", "1")
        assert (says in run(*arguments).err) == (name == "shown")


COMMANDS = typer.main.get_command(build_app()).commands


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_help_fits_80_columns_and_names_no_type_of_python(run, monkeypatch, name):
    monkeypatch.setenv("COLUMNS", "80")
    out = run(*name.split(), "--help").out
    assert max(map(len, out.splitlines())) <= 80
    assert re.findall(r"<(?!=)[a-z ]+|\[\[|\b(?:bool|str|int|float|list|path)\b\]?>", out) == []
    assert re.search(r"Usage: kvferry ", out)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ex"], ["explain"]),
        (["s"], ["status", "simulate"]),
        (["rm", "--ten"], ["--tenant"]),
    ],
)
def test_a_shell_completes_commands_and_options(run, monkeypatch, words, offered):
    monkeypatch.setenv("_KVFERRY_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(["kvferry", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    ran = run()
    assert (ran.code, ran.out.split(), ran.err) == (0, offered, "")


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
