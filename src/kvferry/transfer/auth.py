"""Decides which peers may connect to each other: a key that all share, and proofs of having it.

`client` and `server` exchange proofs first. A proof covers nonces of both sides and the incarnation
of the server, so a recorded proof is worth nothing later. The rest of the connection is not
protected: on a network that others can write to, give peers certificates (`tls`).
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Literal

from kvferry.errors import ConfigError
from kvferry.filesystem import user_cache, why_untrusted

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
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o027:
        raise ConfigError(
            f"the key of peers belongs to user {status.st_uid}, with mode "
            f"{stat.S_IMODE(status.st_mode):o}; others must not read or change it: chmod 600"
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
        if not is_ours or status.st_mode & 0o077:
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
