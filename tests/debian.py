"""Unpacks programs of Debian's packages, and what they need that the machine lacks, into a folder
of the virtual environment. It needs no root."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_APT_SECONDS = 240


def unpacked(package: str) -> Path:
    """Unpack a package unless it is unpacked already; return the folder that stands for `/`.
    Fails the test if the package cannot be fetched."""
    folder = Path(sys.prefix) / f"debian-{package}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of several test processes unpacks
        if not (folder / "done").exists():
            try:
                _unpack(package, folder)
                (folder / "done").touch()
            except (OSError, subprocess.SubprocessError) as error:
                reason = " ".join(str(getattr(error, "stderr", None) or error).split())
                install = f"apt-get update && apt-get install -y {package}"
                pytest.fail(f"{package} is not here: run {install} ({reason})", pytrace=False)
    return folder / "root"


def environment(root: Path) -> dict[str, str]:
    """Return the environment in which an unpacked program finds its libraries and fonts."""
    known = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    paths = [str(each.parent) for each in root.glob("**/lib*.so*")]
    result = {**os.environ, "LD_LIBRARY_PATH": ":".join(dict.fromkeys([*paths, *known]))}
    if (root / "etc/fonts/fonts.conf").exists():  # otherwise the machine has its own
        config = root.parent / "fonts.conf"
        config.write_text(
            f"<fontconfig><dir>{root}/usr/share/fonts</dir>"
            f"<cachedir>{root.parent}/fonts</cachedir></fontconfig>"
        )
        result["FONTCONFIG_FILE"] = str(config)
    return result


def _unpack(package: str, folder: Path) -> None:
    options: list[str] = []
    lists = folder / "apt"
    try:
        wanted = _missing(package, options)
    except subprocess.CalledProcessError:
        # The machine's package lists are empty or old, and we may lack the right to renew them.
        for name in ("lists", "cache"):
            (lists / name / "partial").mkdir(parents=True, exist_ok=True)
        options = [f"-oDir::State::Lists={lists}/lists", f"-oDir::Cache={lists}/cache"]
        _run("apt-get", "update", "-qq", *options)
        wanted = _missing(package, options)
    _run("apt-get", "download", "-qq", *options, *wanted, cwd=folder)
    for each in folder.glob("*.deb"):
        _run("dpkg", "-x", str(each), str(folder / "root"))
        each.unlink()
    shutil.rmtree(lists, ignore_errors=True)


def _missing(package: str, options: list[str]) -> list[str]:
    said = _run("apt-get", "install", "-s", "--no-install-recommends", *options, package)
    found = [line.split()[1] for line in said.splitlines() if line.startswith("Inst ")]
    return found if package in found else [*found, package]


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=True, timeout=_APT_SECONDS
    )
    return done.stdout
