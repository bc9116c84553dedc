"""Helpers of network clients and servers: address look-up with a time limit, the time left until a
deadline, words for errors, and the form of addresses. Mostly peers and the Valkey store use it."""

from __future__ import annotations

import ipaddress
import queue
import socket
import ssl
import threading
import time
from collections.abc import Sequence


def seconds_left(deadline: float) -> float:
    """Return the seconds until a monotonic `deadline`, more than 0. Raises TimeoutError if late."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def reason_of(error: Exception) -> str:
    """Say what went wrong with a connection, without a name or number of this process."""
    match error:
        case TimeoutError():
            return "no answer in time"
        case ssl.SSLCertVerificationError():
            return f"its certificate is refused: {error.verify_message}"
        case OSError():
            return error.strerror or str(error) or type(error).__name__
        case MemoryError():
            return "no memory for its answer"
    return "its host name is not valid"


def addresses_of(host: str, seconds: float) -> list[str]:
    """Look up the numeric addresses of a host. Raises TimeoutError, OSError, ValueError."""
    found: queue.SimpleQueue[list[str] | Exception] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found.put([str(place[0]) for *_, place in answers])
        except (OSError, ValueError) as error:
            found.put(error)

    # getaddrinfo takes no timeout, so it runs in a thread, which ends when the resolver gives up.
    try:
        threading.Thread(target=look_up, name="kvferry-resolve", daemon=True).start()
    except RuntimeError:
        raise OSError("a thread to look up its address could not start") from None
    try:
        answer = found.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def connect(addresses: Sequence[str], port: int, deadline: float) -> socket.socket:
    """Connect to the first address that answers. Raises OSError."""
    fault = OSError("it has no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), seconds_left(deadline))
        except OSError as error:
            fault = error
    raise fault


def is_loopback(host: str) -> bool:
    """Whether the text of `host` can only mean this machine: 127.0.0.0/8, ::1 or localhost."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def is_same_host(one: str, other: str) -> bool:
    """Whether two texts name one host, as far as the texts alone show it: nothing is looked up. All
    addresses of this machine's loopback count as one."""
    try:
        is_equal = ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        is_equal = one.lower().rstrip(".") == other.lower().rstrip(".")
    return is_equal or (is_loopback(one) and is_loopback(other))


def join_host(host: str, port: int | None) -> str:
    """`host:port`, or `host` alone, with brackets around an IPv6 address."""
    return (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
