"""Certificates made by openssl, valid for a day."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

_HERE = "DNS:localhost,IP:127.0.0.1"


class Files(NamedTuple):
    cert_file: str
    cert_key_file: str
    ca_file: str


def make_authority(directory: Path) -> Path:
    directory.mkdir()
    _openssl(directory, "ca", "-subj", "/CN=authority of a test")
    return directory


def make_files(authority: Path, name: str, names: str = "IP:127.0.0.1") -> Files:
    """A certificate for `names`, by an authority."""
    ca = authority / "ca.crt"
    signing = ("-CA", str(ca), "-CAkey", str(authority / "ca.key"))
    _openssl(authority, name, "-subj", "/CN=peer", "-addext", f"subjectAltName={names}", *signing)
    return Files(str(authority / f"{name}.crt"), str(authority / f"{name}.key"), str(ca))


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for localhost and 127.0.0.1, and its key."""
    _openssl(directory, "server", "-subj", "/CN=localhost", "-addext", f"subjectAltName={_HERE}")
    return directory / "server.crt", directory / "server.key"


def _openssl(directory: Path, name: str, *options: str) -> None:
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", *options]
    command += ["-keyout", str(directory / f"{name}.key"), "-out", str(directory / f"{name}.crt")]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    except FileNotFoundError:
        pytest.fail("openssl is not installed: run apt-get install openssl", pytrace=False)
