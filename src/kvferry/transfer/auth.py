"""Decides which peers may connect to each other: a key that all share, and proofs of having it.

`client` and `server` exchange proofs first. A proof covers nonces of both sides and the incarnation
of the server, so a recorded proof is worth nothing later. The rest of the connection is not
protected: on a network that others can write to, give peers certificates. Then both sides also
check which machine the other one is, and connections are inside TLS.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvferry.errors import ConfigError
from kvferry.filesystem import user_cache, why_shared, why_untrusted
from kvferry.network import load_pem

KEY_BYTES = 32
MAX_KEY_BYTES = 4096

_ADVICE = "write one with: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE"


class SharedKey:
    """The secret that all peers share. No repr or message shows it."""

    def __init__(self, content: bytes) -> None:
        if not KEY_BYTES <= len(content) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"a key of peers has {KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(content)}; "
                + _ADVICE
            )
        self._content = content

    def proof(self, side: Literal["client", "server"], *parts: bytes) -> bytes:
        """Return 32 bytes that only a holder of the key can make from these parts."""
        # With lengths, so that different lists of parts never give the same text.
        said = (f"peer {side}".encode(), *parts)
        text = b"".join(len(part).to_bytes(4, "little") + part for part in said)
        return hmac.digest(self._content, text, "sha256")

    def is_proof(self, proof: bytes, side: Literal["client", "server"], *parts: bytes) -> bool:
        """Whether `proof` shows that the other side has the key."""
        return hmac.compare_digest(proof, self.proof(side, *parts))

    def __repr__(self) -> str:
        return "SharedKey(...)"


def read_key(path: str | Path) -> SharedKey:
    """Read the key file that an operator names. White space around an ASCII text does not count.

    Raises:
        ConfigError: the file cannot be read, belongs to a user other than this one or root, can be
            changed by its group, or read or changed by others; or the key is too short or long.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the key of peers cannot be read: {error.strerror}; {_ADVICE}") from None
    if (why := why_shared(status, 0o027)) is not None:
        raise ConfigError(
            f"the key of peers {why}; others must not read or change it: chown it to this user, "
            "and chmod 600"
        )
    # A copied text may gain or lose its last newline. Random bytes may end like one, so they stay.
    return SharedKey(content.strip() if content.isascii() else content)


def user_key() -> SharedKey:
    """Read the key of this user's processes on this machine. The first makes it in `user_cache`.

    Raises:
        ConfigError: the file cannot be made or read, is not this user's alone, or is in a directory
            that others can change.
    """
    directory = user_cache() / "kvferry"
    path = directory / "peer.key"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        why = why_untrusted(str(directory))
        if why is not None:
            raise ConfigError(f"the directory of the key of peers {why}: {directory}")
        with contextlib.suppress(FileNotFoundError):
            return _read_own(path)
        _make_key(path)
        return _read_own(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; name another key file") from None


def _read_own(path: Path) -> SharedKey:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(fd, "rb") as file:
        status = os.fstat(fd)
        is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
        if not is_ours or why_shared(status, 0o077) is not None:
            raise ConfigError(
                f"{path} is not a file that this user alone can read; remove it, and it is made "
                "again"
            )
        return SharedKey(file.read(MAX_KEY_BYTES + 1))


def _make_key(path: Path) -> None:
    """Write a new key, whole or not at all. If several processes do, the first one's key stands."""
    draft = path.with_name(f".peer.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFiles:
    """The files with which one side proves itself; the key is asked for with TLS, too.

    Attributes:
        key_file: file of the key that all peers share. None, allowed on loopback only: the key of
            this user's processes on this machine.
        cert_file: PEM of this machine's certificate and of those between it and the authority.
            Clients check that it names the address that they connect to.
        cert_key_file: PEM of the certificate's key, without a password.
        ca_file: PEM of the authority that signed the certificates of all peers.
    """

    key_file: str | None = None
    cert_file: str | None = None
    cert_key_file: str | None = None
    ca_file: str | None = None

    def open_key(self) -> SharedKey:
        """Read the key. Raises ConfigError; see `read_key` and `user_key`."""
        return user_key() if self.key_file is None else read_key(self.key_file)

    def open_tls(self, side: Literal["client", "server"]) -> ssl.SSLContext | None:
        """Make the TLS 1.3 context of one side; None if no file is given: connections are in clear.

        Raises:
            ConfigError: only some of the three files are given, or one cannot be read or used.
        """
        cert_file, cert_key_file, ca_file = self.cert_file, self.cert_key_file, self.ca_file
        files = {"cert_file": cert_file, "cert_key_file": cert_key_file, "ca_file": ca_file}
        missing = [name for name, file in files.items() if file is None]
        if len(missing) == len(files):
            return None
        if cert_file is None or cert_key_file is None or ca_file is None:
            raise ConfigError(f"TLS needs {', '.join(files)}; add {' and '.join(missing)}")
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if side == "server" else ssl.PROTOCOL_TLS_CLIENT
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        load_pem(context, cert_file, cert_key_file, ca_file)
        return context
