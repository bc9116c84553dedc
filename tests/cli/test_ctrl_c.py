"""Ctrl-C to the whole process group of a command that works, engines of several processes included:
one line, exit code 130, and nothing stays behind."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.cli.main import main
from kvferry.cli.output import NothingFound
from kvferry.errors import ContractError
from kvferry.store.file import FileStore
from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from tests.cli.test_every_command import OF_FILES, servers, url_of
from tests.tokenizers import save_tiny_tokenizer

SECONDS = 250
INTERRUPTED = (130, -signal.SIGINT)
"""Python itself ends by the signal where that came in an `exec`, as in some imports; a shell says
130 of both."""

COMMANDS = {
    "simulate": ["{place}/trace", "--sizes", "100,1000,3000"],
    "generate": ["{model}", "Hello", "--max-tokens", "3000", "--store", "file://{place}/store"],
    "warm": ["{model}", "--store", "file://{place}/store", "--prompts", "{place}/prompts"],
    "demo": ["--model-dir", "{model}", "--dir", "{place}/demo"],
}
"""Each with enough to do."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=4096)
    save_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "temporary").mkdir()
    prompts = ([3 + (7 * row + column) % 200 for column in range(2000)] for row in range(200))
    (tmp_path / "prompts").write_text("".join(f"{json.dumps(each)}\n" for each in prompts))
    requests = (
        {"timestamp": row, "input_length": 10240, "output_length": 1,
         "hash_ids": [row * column % 5000 for column in range(20)]}
        for row in range(100_000)
    )  # fmt: skip
    (tmp_path / "trace").write_text("".join(f"{json.dumps(each)}\n" for each in requests))
    return tmp_path


class Running:
    """A command in a process group of its own, as a shell starts it in the foreground."""

    def __init__(self, command: list[str], place: Path) -> None:
        self.place = place
        self.temporary = place / "temporary"
        self._shared = set(os.listdir("/dev/shm"))
        with (place / "out").open("wb") as out, (place / "err").open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvferry.cli", *command],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                env={**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def others(self) -> list[str]:
        """The command lines of the processes that it has started and that still run."""
        found, mark = [], str(self.temporary).encode()
        for each in Path("/proc").iterdir():
            try:
                is_other = each.name.isdigit() and int(each.name) != self.process.pid
                if is_other and mark in (each / "environ").read_bytes():
                    found.append((each / "cmdline").read_text())
            except OSError:  # it has ended, or is not ours
                continue
        return [each for each in found if each]  # of a zombie, nothing is left

    def await_moment(self, is_there: Callable[[Running], object]) -> None:
        def has_come() -> bool:
            assert self.process.poll() is None, (self.place / "err").read_text()
            return bool(is_there(self))

        wait_until(has_come, "the moment of the interrupt", SECONDS, interval=0.01)

    def interrupt(self) -> tuple[int, list[str]]:
        """The exit code, and the lines on stderr that are no progress, nor say that a machine that
        stalls left a connector no time."""
        os.killpg(self.process.pid, signal.SIGINT)
        code = self.process.wait(SECONDS)
        lines = (self.place / "err").read_text().splitlines()
        lines = [each for each in lines if not each.startswith(("demo: ", "warming"))]
        return code, [each for each in lines if "the connector did not finish within" not in each]

    def left(self) -> list[str]:
        """What it has left behind."""
        what = f"the end of {self.others()}"
        wait_until(lambda: not self.others(), what, SECONDS, interval=0.01)
        shared = sorted(set(os.listdir("/dev/shm")) - self._shared)
        files = {*os.listdir(self.temporary)} - {
            f"torchinductor_{getpass.getuser()}"
        }  # torch's own
        return [*files, *(each for each in shared if "kvferry" in each)]


def maps(what: str) -> Callable[[Running], bool]:
    return lambda ran: what in Path(f"/proc/{ran.process.pid}/maps").read_text()


def says(ran: Running) -> object:
    return (ran.place / "out").read_bytes()


def has(pattern: str) -> Callable[[Running], object]:
    return lambda ran: next(ran.place.glob(pattern), None)


def runs(what: str, number: int = 1) -> Callable[[Running], bool]:
    return lambda ran: sum(what in each for each in ran.others()) >= number


MOMENTS = [
    ("simulate", "reads", maps("numpy")),
    ("generate", "imports", maps("/torch/")),
    ("generate", "streams", says),
    ("warm", "stores", has("store/records/*/*.safetensors")),
    ("demo", "a phase starts", runs("spawn_main")),
]
LATE_MOMENTS = [
    ("demo", "a phase stores", has("demo/kvferry-demo-run/store/records/*/*.safetensors")),
]


def test_every_command_that_works_for_long_is_here():
    assert {name for name, _, _ in MOMENTS} == set(COMMANDS) == set(OF_FILES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("command", "moment", "is_there"),
    [*MOMENTS, *(pytest.param(*each, marks=pytest.mark.sweep) for each in LATE_MOMENTS)],
    ids=[f"{name}, {at}" for name, at, _ in MOMENTS + LATE_MOMENTS],
)
def test_ctrl_c_is_one_line_and_leaves_nothing(place, model_dir, command, moment, is_there):
    given = [each.format(place=place, model=model_dir) for each in COMMANDS[command]]
    for _ in range(5):  # where this process stalls, a command is done before it is interrupted
        running = Running([command, *given], place)
        try:
            running.await_moment(is_there)
            code, lines = running.interrupt()
            assert running.left() == []
        finally:
            running.process.kill()
            running.process.wait()
        if code != 0:
            break
    assert lines == ["error: interrupted"]
    assert code in INTERRUPTED


@pytest.mark.parametrize("error", [OSError("closed"), ContractError("open"), NothingFound("none")])
def test_what_fails_after_a_ctrl_c_does_not_hide_it(tmp_path, monkeypatch, capsys, error):
    def catalogues(_store: FileStore) -> None:
        raise KeyboardInterrupt

    def close(store: FileStore) -> None:
        closed(store)
        raise error

    FileStore(tmp_path, max_bytes=1 << 20).close()
    closed = FileStore.close
    monkeypatch.setattr(FileStore, "close", close)
    monkeypatch.setattr(FileStore, "catalogues", catalogues)
    assert main(["ls", f"file://{tmp_path}"]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.timeout(600)
def test_ctrl_c_before_all_commands_are_imported_is_one_line(place):
    with servers(1) as held:  # which it would wait for
        running = Running(["ls", url_of("valkey", held[0])], place)
        try:
            running.await_moment(maps("_json"))
            code, lines = running.interrupt()
        finally:
            running.process.kill()
            running.process.wait()
    assert code in INTERRUPTED
    assert lines == ["error: interrupted"]
