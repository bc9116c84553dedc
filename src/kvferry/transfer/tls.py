"""Optional TLS around connections of peers. Both sides show a certificate and check the other's.

A certificate proves which machine a side is. The shared key (`auth`) proves that it is a peer, and
is asked for as well.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from kvferry.errors import ConfigError, TransferError
from kvferry.network import reason_of, seconds_left
from kvferry.transfer.auth import SharedKey, read_key, user_key
from kvferry.transfer.messages import PeerFault
from kvferry.transfer.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFiles:
    """The files with which one side proves itself; see `auth` for the key.

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
        is_server = side == "server"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        if is_server:
            context.num_tickets = 0  # nothing is sent unasked: see `is_quiet`
        shown = f"{cert_file} and {cert_key_file}"
        try:
            # An empty password: else OpenSSL asks at the terminal for that of an encrypted key.
            context.load_cert_chain(cert_file, cert_key_file, password="")
            shown = ca_file
            context.load_verify_locations(ca_file)
        except OSError as error:  # an SSLError is one
            was_read = not isinstance(error, ssl.SSLError)
            reason = error.strerror if was_read else "no usable PEM, or a key that does not fit"
            raise ConfigError(f"{shown}: {reason}") from None
        return context


class TlsStream(Stream):
    """A `Stream` inside TLS. It uses Python's socket timeouts, because OpenSSL tries again after a
    timeout of the kernel.

    Args:
        context: a context from `PeerFiles.open_tls`.
        host: the host that the other side's certificate must name; None on a server.
    """

    _socket: ssl.SSLSocket

    def __init__(
        self, stream: socket.socket, context: ssl.SSLContext, host: str | None = None
    ) -> None:
        super().__init__(stream)
        self._socket = context.wrap_socket(
            stream,
            server_side=host is None,
            server_hostname=host,
            do_handshake_on_connect=False,
        )

    def begin(self, deadline: float) -> None:
        self._wait(self._shake_hands, 0, [], deadline)

    def _shake_hands(self, _views: list[memoryview]) -> int:
        try:
            self._socket.do_handshake()
        except ssl.SSLCertVerificationError as error:
            raise PeerFault(reason_of(error)) from None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise TransferError("it closed the connection") from None
        except ssl.SSLError as error:
            raise PeerFault(_reason_of(error)) from None
        return 0

    def is_quiet(self) -> bool:
        if self._ahead or self._socket.pending():
            return False
        with suppress(OSError):
            self._socket.settimeout(0)
            try:
                socket.socket.recv(self._socket, 1, socket.MSG_PEEK)
            except BlockingIOError:
                return True
        return False

    def _send_some(self, views: list[memoryview]) -> int:
        try:
            return self._socket.send(views[0])
        except ssl.SSLError as error:
            raise TransferError(_reason_of(error)) from None

    def _receive_some(self, views: list[memoryview], flags: int = 0) -> int:
        try:
            num_bytes = self._socket.recv_into(views[0])
        except ssl.SSLError as error:
            raise TransferError(_reason_of(error)) from None
        if not num_bytes:
            raise TransferError("it closed the connection")
        return num_bytes

    def _arm(self, option: int, deadline: float) -> None:
        self._socket.settimeout(seconds_left(deadline))


def _reason_of(error: ssl.SSLError) -> str:
    return f"TLS failed: {(error.reason or 'unknown').replace('_', ' ').lower()}"
