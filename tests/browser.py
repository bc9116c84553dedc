"""Headless Chromium for tests of pages: the machine's own, or the one in Debian's packages, which
are unpacked into a folder of the virtual environment. That needs no root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium-headless-shell"
INSTALL = "apt-get update && apt-get install -y chromium"

_APT_SECONDS = 240


def browser_program() -> tuple[str, dict[str, str]]:
    """Path of a Chromium, and the environment that it needs. Fails the test where none can be
    had."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is not None:
        return found, dict(os.environ)
    folder = Path(sys.prefix) / "debian-chromium"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several processes of tests, one unpacks
        program = folder / "root/usr/lib/chromium/chromium-headless-shell"
        if not (folder / "done").exists():
            try:
                _unpack(folder)
                (folder / "done").touch()
            except (OSError, subprocess.SubprocessError) as error:
                reason = getattr(error, "stderr", None) or error
                pytest.fail(f"no Chromium is here: run {INSTALL} ({reason})", pytrace=False)
    return str(program), _environment(folder / "root")


def _unpack(folder: Path) -> None:
    """The package, and what it needs that is not installed."""
    options: list[str] = []
    try:
        wanted = _missing_packages(options)
    except subprocess.CalledProcessError:
        # The machine's lists are empty or old, and may not be ours to renew.
        for name in ("lists", "cache"):
            (folder / name / "partial").mkdir(parents=True, exist_ok=True)
        options = [f"-oDir::State::Lists={folder}/lists", f"-oDir::Cache={folder}/cache"]
        _run("apt-get", "update", "-qq", *options, cwd=folder)
        wanted = _missing_packages(options)
    _run("apt-get", "download", "-qq", *options, *wanted, cwd=folder)
    for each in folder.glob("*.deb"):
        _run("dpkg", "-x", str(each), str(folder / "root"), cwd=folder)
        each.unlink()


def _missing_packages(options: list[str]) -> list[str]:
    said = _run("apt-get", "install", "-s", "--no-install-recommends", *options, PACKAGE)
    return [line.split()[1] for line in said.splitlines() if line.startswith("Inst ")]


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=True, timeout=_APT_SECONDS
    )
    return done.stdout


def _environment(root: Path) -> dict[str, str]:
    known = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths = [str(each.parent) for each in root.glob("usr/lib/**/lib*.so*")]
    paths += [str(each.parent) for each in root.glob("lib/**/lib*.so*")]
    environment = {**os.environ, "LD_LIBRARY_PATH": ":".join(dict.fromkeys([*paths, *known]))}
    if (root / "etc/fonts/fonts.conf").exists():  # else the machine has its own
        config = root / "fonts.conf"
        config.write_text(
            f"<fontconfig><dir>{root}/usr/share/fonts</dir><cachedir>{root}/fonts</cachedir>"
            "</fontconfig>"
        )
        environment["FONTCONFIG_FILE"] = str(config)
    return environment


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    program, environment = browser_program()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, env=environment, args=["--no-sandbox"]
        )
        try:
            yield browser
        finally:
            browser.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running
