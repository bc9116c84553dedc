"""`kvferry rm` and `pin` on real stores: what goes, what stays, and what is asked before."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.store.file.store import FileStore
from kvferry.store.url import open_one
from kvferry.testing.models import make_tiny_model
from kvferry.types import ExtraKeys
from tests.cli.test_explain import SPACE, TOKENS, put_prompt, space_of


def count(url: str) -> int:
    with open_one(url) as store:
        return sum(1 for _ in store.catalogue().scan())


@pytest.fixture
def changed(run):
    def ask(command: str, url: str, *options: object) -> int:
        ran = run(command, url, *options, "--json", "-")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["records"]

    return ask


@pytest.fixture
def place(url_of, url):
    return lambda kind: url if kind == "file" else url_of(kind)


@pytest.mark.parametrize("kind", ["file", "valkey", pytest.param("s3", marks=pytest.mark.slow)])
def test_by_namespace_tenant_prompt_and_all(changed, place, kind, tokens_file):
    where = place(kind)
    for space in (SPACE, space_of("team-a"), space_of("team-b")):
        put_prompt(where, space)
    put_prompt(where, extra=ExtraKeys(cache_salt="s"))
    assert changed("rm", where, "--tenant", "team-a", "--dry-run") == 4
    assert count(where) == 16
    assert changed("rm", where, "--tenant", "team-a", "--yes") == 4
    assert changed("rm", where, "--namespace", space_of("team-b").digest.hex()[:12], "-y") == 4
    prompt = ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file, "--yes"]
    assert changed("rm", where, *prompt, "--salt", "s") == 4
    assert count(where) == 4
    tokens_file.write_text(json.dumps(list(TOKENS)[:15]))
    assert changed("rm", where, *prompt) == 2
    assert changed("rm", where, "--everything", "--yes") == 2
    assert count(where) == 0


def test_by_age(changed, url):
    keys = put_prompt(url)
    with (
        FileStore(Path(url.removeprefix("file://"))) as store,
        store.index.database.transaction(writes=True) as db,
    ):
        db.execute("UPDATE records SET last_used = 5.0 WHERE key = ?", (keys[2],))
    assert changed("rm", url, "--older-than", "1d", "--yes") == 1
    assert count(url) == 3


def test_by_model(changed, run, url, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    put_prompt(url)
    with LLM(model, store=url, connector_options={"chunk_tokens": 16}) as llm:
        llm.generate([range(3, 70)], SamplingParams(max_tokens=1))
        assert llm.drain(60)
    prompt = tmp_path / "ids"
    prompt.write_text(" ".join(map(str, range(3, 40))))
    assert changed("rm", url, "--model", model, "--tokens", prompt, "--yes") == 2
    assert changed("rm", url, "--model", model, "--yes") == 2
    assert count(url) == 4
    other = make_tiny_model(tmp_path / "other", seed=3)
    ran = run("rm", url, "--model", other, "--yes")
    assert (ran.code, "no such namespace" in ran.error_line) == (1, True)


def test_pins_are_kept_by_gc_and_shown(changed, run, url, tokens_file):
    put_prompt(url)
    put_prompt(url, space_of("b"))
    size = os.stat(next(Path(url.removeprefix("file://")).rglob("*.safetensors"))).st_size
    quota = f"{url}?max_bytes={1000 * size}B"
    prompt = ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file]
    assert changed("pin", quota, *prompt, "--until", "36h", "--dry-run") == 4
    dry = json.loads(run("rm", url, "--max-bytes", "0", "--dry-run", "--json", "-").out)
    assert dry["records"] == 8
    assert changed("pin", quota, *prompt, "--until", "36h") == 4
    rows = json.loads(run("ls", url, "--json", "-").out)
    ends = [row["pinned_until"] for row in rows if "pinned_until" in row]
    assert len(ends) == 4
    assert all(abs(each - time.time() - 36 * 3600) < 3600 for each in ends)
    assert "36 h more" in run("ls", url).out
    dry = json.loads(run("rm", url, "--max-bytes", "0", "--dry-run", "--json", "-").out)
    assert dry["records"] == 4
    ours = ["--tenant", "", "--dry-run"]
    assert "all are pinned" in run("rm", url, *ours, "--older-than", "0s").error_line
    assert changed("rm", url, *ours) == 4
    assert run("rm", url, "--max-bytes", "0", "--yes").code == 0
    assert count(url) == 4
    ran = run("pin", quota, "--tenant", "", "--until", "now", "--dry-run")
    assert ran.out == "4 records would be unpinned\n"
    assert changed("pin", quota, "--tenant", "", "--until", "now") == 4
    assert run("rm", url, "--max-bytes", "0", "--yes").code == 0
    assert count(url) == 0
    ran = run("pin", quota, "--tenant", "", "--until", "2999-01-31T08:00")
    assert (ran.code, "no record in" in ran.error_line) == (1, True)


def test_more_pins_than_half_of_the_quota_are_one_line(run, url):
    put_prompt(url)
    size = os.stat(next(Path(url.removeprefix("file://")).rglob("*.safetensors"))).st_size
    quota = f"{url}?max_bytes={5 * size}B"
    put_prompt(url, space_of("b"), TOKENS[:7])
    says = []
    for tenant, more in (("b", ""), ("", ""), ("b", "now"), ("b", ""), ("", "")):
        command = ["pin", quota, "--tenant", tenant, "--until", more or "1h"]
        dry, real = run(*command, "--dry-run"), run(*command)
        assert dry.code == real.code
        assert dry.out.replace("would be ", "") == real.out
        assert dry.err == real.err
        says.append((real.code, real.error_line if real.code else real.out))
    assert [code for code, _ in says] == [0, 2, 0, 0, 2]
    assert "error: 1 records are pinned now" in says[1][1]
    assert "pins may take half of the quota" in says[1][1]
    assert count(url) == 5


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_without_a_quota_nothing_is_pinned(run, url, dry):
    put_prompt(url)
    ran = run("pin", url, "--tenant", "", "--until", "1h", *dry)
    assert ran.code == 2
    assert "has no quota" in ran.error_line


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_servers_cannot_pin(run, url_of, kind):
    where = url_of(kind)
    put_prompt(where)
    for dry in ([], ["--dry-run"]):
        ran = run("pin", where, "--tenant", "", "--until", "1h", *dry)
        assert ran.code == 2
        assert "cannot pin; a directory can" in ran.error_line


# -- what is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", ["rm --everything", "rm --tenant x", "rm --max-bytes 0", "rm --older-than 0s"]
)
def test_without_a_terminal_it_is_refused(run, url, command):
    put_prompt(url, space_of("x"))
    name, *options = command.split()
    ran = run(name, url, *options)
    assert ran.code == 2
    assert "give --yes" in ran.error_line
    assert count(url) == 4


def in_terminal(answer: bytes | None, *arguments: object) -> tuple[int, bytes]:
    """Run a command whose terminal gets `answer`, or an interrupt, once it has asked; and again
    until it ends: a terminal that gets ready to read drops what came before."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "kvferry.cli", *map(str, arguments)]
    text = b""
    with subprocess.Popen(command, stdin=follower, stderr=follower, stdout=follower) as process:
        os.close(follower)
        try:
            while True:
                if select.select([leader], [], [], 1.0)[0]:
                    if not (piece := os.read(leader, 1 << 16)):
                        break
                    text += piece
                    if b"[y/N]" not in piece:
                        continue
                if b"[y/N]" not in text:
                    continue
                if answer is None and b"interrupted" not in text:
                    process.send_signal(signal.SIGINT)
                elif answer is not None:
                    os.write(leader, answer)
        except OSError:  # all is read, and the other end is closed
            os.close(leader)
        except BaseException:
            process.kill()  # else its end would be waited for
            raise
    return process.returncode, text


def test_the_answer_decides(url):
    put_prompt(url)
    code, text = in_terminal(b"n\n", "rm", url, "--everything")
    assert (code, b"nothing was changed" in text, count(url)) == (0, True, 4)
    assert b"delete 4 records, " in text
    code, text = in_terminal(None, "rm", url, "--everything")
    assert (code, b"error: interrupted" in text, count(url)) == (130, True, 4)
    code, _ = in_terminal(b"y\n", "rm", url, "--everything")
    assert (code, count(url)) == (0, 0)


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("rm", "choose the records"),
        ("rm --everything --tenant x", "--everything stands alone"),
        ("rm --namespace zz", "hexadecimal"),
        ("rm --tokens F", "whose prompt is it"),
        ("rm --namespace 00 --tokens /dev/null --older-than 1d", "do not go together"),
        ("rm --older-than soon", "not a duration"),
        ("rm --lora s", "is of a prompt"),
        ("rm --max-bytes 1GiB --tenant x", "--max-bytes is of the whole store"),
        ("rm --max-bytes 1GiB --everything", "--max-bytes is of the whole store"),
        ("pin --until 1h", "choose the records"),
        ("pin --until tomorrow --tenant x", "--until 'tomorrow'"),
        ("pin --until 2001-01-01 --tenant x", "is in the past"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(run, url, command, says):
    put_prompt(url)
    name, *options = command.split()
    ran = run(name, url, *options)
    assert (ran.code, count(url)) == (2, 4)
    assert says in ran.error_line


def test_a_store_in_use_stays_right(changed, url):
    keys = put_prompt(url)
    with open_one(url) as engine:
        assert engine.wait_indexed(60)
        assert changed("rm", url, "--everything", "--yes") == 4
        assert [engine.read(key, ()) for key in keys] == [None] * 4
        assert engine.put(keys[0], [b"x" * 10]).result == "stored"
