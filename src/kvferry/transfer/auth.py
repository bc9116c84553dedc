"""Who may connect to whom: a key that peers share, proofs of it, tokens, and a list of addresses.

Both sides prove that they have the key, over nonces of both and the incarnation of the server, so
that nothing that was said before proves anything. What follows on the connection is not protected:
on a network that others can write to, run peers inside TLS or a VPN.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import ipaddress
import os
import secrets
import stat
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from kvferry.errors import ConfigError
from kvferry.filesystem import why_untrusted
from kvferry.network import join_host

KEY_BYTES = 32
MAX_KEY_BYTES = 4096

_ADVICE = "write one with: head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE"


class SharedKey:
    """What all peers know, and nobody else. Nothing shows it."""

    def __init__(self, content: bytes) -> None:
        if not KEY_BYTES <= len(content) <= MAX_KEY_BYTES:
            raise ConfigError(
                f"a key of peers has {KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(content)}; "
                + _ADVICE
            )
        self._content = content

    def proof(self, side: Literal["client", "server"], *parts: bytes) -> bytes:
        """32 bytes that only a holder of the key can make of these parts."""
        return self._mac(f"peer {side}", parts)

    def is_proof(self, proof: bytes, side: Literal["client", "server"], *parts: bytes) -> bool:
        """Whether the other side has the key."""
        return hmac.compare_digest(proof, self.proof(side, *parts))

    def token(self, incarnation: bytes, lease: str, address: str, expires: float) -> str:
        """What allows one who has got it to have peers connect to `address`, until `expires`
        (seconds since the epoch). Clients carry it and cannot change anything that it covers."""
        until = struct.pack("<q", int(expires))
        mac = self._mac("token", (incarnation, lease.encode(), address.encode(), until))
        return base64.urlsafe_b64encode(until + mac).decode()

    def accepts(
        self,
        token: object,
        incarnation: bytes,
        lease: str,
        address: str,
        *,
        clock: Callable[[], float] = time.time,
    ) -> bool:
        """Whether a holder of the key gave out this token, for this, and it has not expired. Takes
        any value: it comes from clients."""
        if not isinstance(token, str) or len(token) > 64 or not token.isascii():
            return False
        with contextlib.suppress(ValueError, struct.error):
            (until,) = struct.unpack("<q", base64.urlsafe_b64decode(token)[:8])
            expected = self.token(incarnation, lease, address, until)
            return hmac.compare_digest(token, expected) and clock() < until
        return False

    def _mac(self, what: str, parts: Iterable[bytes]) -> bytes:
        # With their lengths: else two lists of parts could be one text.
        text = b"".join(len(part).to_bytes(4, "little") + part for part in (what.encode(), *parts))
        return hmac.digest(self._content, text, "sha256")

    def __repr__(self) -> str:
        return "SharedKey(...)"


def read_key(path: str | Path) -> SharedKey:
    """The key in a file that an operator names.

    Raises:
        ConfigError: the file cannot be read, or others can read or change it.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"the key of peers cannot be read: {error.strerror}; {_ADVICE}") from None
    if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o027:
        raise ConfigError(
            f"the key of peers belongs to user {status.st_uid}, with mode "
            f"{stat.S_IMODE(status.st_mode):o}; others must not read or change it: chmod 600"
        )
    return SharedKey(content)


def user_key(directory: Path | None = None) -> SharedKey:
    """The key of this user's processes on this machine, made by the first of them.

    Args:
        directory: where the file is; by default `kvferry` in the user's cache directory, which is
            the same for services and logins, unlike that of a session.

    Raises:
        ConfigError: the file cannot be made or read, is not this user's alone, or is in a directory
            that others can change.
    """
    if directory is None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        directory = Path(cache, "kvferry")
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
    """Whole or absent, and the first of several stands."""
    draft = path.with_name(f".peer.{secrets.token_hex(8)}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.unlink(draft)


class AllowedAddresses:
    """Addresses that may be connected to without a token: whoever sends a request can name one.

    Args:
        allowed: `host`, `host:port` or a network such as `10.0.0.0/8`. Names are compared, never
            looked up.

    Raises:
        ConfigError: one of them is none of these.
    """

    def __init__(self, allowed: Iterable[str]) -> None:
        self._names: set[str] = set()
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for each in allowed:
            if "/" in each:
                try:
                    self._networks.append(ipaddress.ip_network(each))
                except ValueError as error:
                    raise ConfigError(f"{each!r} is no network: {error}") from None
            else:
                self._names.add(each.lower())

    def allows(self, host: str, port: int) -> bool:
        """Whether this address is one of them."""
        name = host.lower()
        if name in self._names or join_host(name, port) in self._names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)
